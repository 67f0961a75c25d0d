//! Retention of checkpoints: rules, pins, removal by request, and pins for readers.

use std::rc::Rc;

use super::lookup::find;
use crate::core::audit::NewAudit;
use crate::core::checkpoint::Checkpoint;
use crate::core::error::{Error, Result};
use crate::core::ids::CheckpointId;
use crate::core::retention::{Fate, Retention, Standing, Use, is_automatic, plan};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change};

/// Protects a checkpoint from retention and from removal by request, until dropped.
pub(crate) struct ReadPin {
    kernel: Rc<Kernel>,
    id: CheckpointId,
}

impl ReadPin {
    fn begin(kernel: &Rc<Kernel>, id: CheckpointId) -> ReadPin {
        *kernel.held.borrow_mut().entry(id).or_default() += 1;
        ReadPin { kernel: Rc::clone(kernel), id }
    }
}

impl Drop for ReadPin {
    fn drop(&mut self) {
        let mut held = self.kernel.held.borrow_mut();
        if let Some(count) = held.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.id);
            }
        }
    }
}

/// Pins a checkpoint for a read, until the second part is dropped.
///
/// # Errors
/// `notFound` if the checkpoint was removed meanwhile.
pub(crate) async fn pin_for_read(kernel: &Rc<Kernel>, checkpoint: Checkpoint) -> Result<(Checkpoint, ReadPin)> {
    let held = ReadPin::begin(kernel, checkpoint.id);
    // The checkpoint may have been about to be removed: the database has completed all earlier requests when it
    // answers.
    match kernel.records.checkpoint(checkpoint.id).await? {
        Some(checkpoint) => Ok((checkpoint, held)),
        None => Err(Error::not_found(format!("checkpoint {} was removed meanwhile", checkpoint.short_id()))),
    }
}

/// As [`find`], and pins the checkpoint.
///
/// # Errors
/// As [`find`].
pub(crate) async fn find_pinned(kernel: &Rc<Kernel>, reference: &str) -> Result<(Checkpoint, ReadPin)> {
    let found = find(kernel, reference).await?;
    pin_for_read(kernel, found).await
}

impl Kernel {
    /// Retention of automatic checkpoints.
    pub fn retention(&self) -> Retention {
        self.retention.get()
    }

    /// Whether an operation reads this checkpoint.
    pub(crate) fn holds(&self, id: CheckpointId) -> bool {
        self.held.borrow().contains_key(&id)
    }

    fn with_pins(&self, mut standing: Standing) -> Standing {
        standing.needed.extend(self.held.borrow().keys().map(|id| (*id, Use::Reading)));
        standing
    }

    /// The fate of each checkpoint by the retention rules.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn fates(&self, now_ms: i64) -> Result<Vec<(Checkpoint, Fate)>> {
        let standing = self.with_pins(self.records.standing().await?);
        let fates = plan(&self.retention.get(), &standing, now_ms);
        Ok(standing.checkpoints.into_iter().zip(fates.into_iter().map(|(_, fate)| fate)).collect())
    }
}

/// Removes the checkpoints of a kernel that retention expires; returns them.
///
/// # Errors
/// Database errors; all checkpoints remain then.
pub(crate) async fn prune(host: &Host, kernel: &Kernel) -> Result<Vec<Checkpoint>> {
    if kernel.view().checkpoints == 0 {
        return Ok(Vec::new());
    }
    let (now_ms, policy) = (host.now_ms(), kernel.retention.get());
    let fates = kernel.fates(now_ms).await?;
    // Until then only a new checkpoint changes the result, and each new checkpoint is followed by its own pruning.
    let oldest = fates.iter().filter(|(one, fate)| fate.stays() && is_automatic(one)).map(|(one, _)| one.at_ms).min();
    let keep_ms = policy.keep_for_ms.and_then(|ms| i64::try_from(ms).ok());
    kernel.prune_due_ms.set(oldest.zip(keep_ms).map_or(i64::MAX, |(at_ms, keep)| at_ms.saturating_add(keep)));
    if fates.iter().all(|(_, fate)| fate.stays()) {
        return Ok(Vec::new());
    }
    let expired = {
        let _names = host.upkeep.names.read().await;
        let held: Vec<CheckpointId> = kernel.held.borrow().keys().copied().collect();
        let choose = move |standing: &Standing| {
            let mut standing = standing.clone();
            standing.needed.extend(held.into_iter().map(|id| (id, Use::Reading)));
            let fates = plan(&policy, &standing, now_ms);
            fates.into_iter().filter(|(_, fate)| !fate.stays()).map(|(id, _)| id).collect()
        };
        kernel.records.thin_checkpoints(Box::new(choose)).await?
    };
    if !expired.is_empty() {
        publish_expired(host, kernel, &expired).await;
    }
    Ok(expired)
}

async fn publish_expired(host: &Host, kernel: &Kernel, gone: &[Checkpoint]) {
    host.upkeep.gone.set(host.upkeep.gone.get() + 1);
    {
        let mut view = kernel.view.borrow_mut();
        view.checkpoints = view.checkpoints.saturating_sub(gone.len() as u64);
    }
    let version = Some(kernel.view().version);
    let actor = host.own_actor();
    for one in gone {
        let line = host.line(&actor, "checkpoint.expire", Some(kernel));
        let (manifest, detail) = (Some(one.manifest), format!("{} ({})", one.id, one.kind.name()));
        host.write_audit(NewAudit { version_before: version, version_after: version, manifest, detail, ..line }).await;
    }
    let ids: Vec<String> = gone.iter().take(NAMED).map(|one| one.id.to_string()).collect();
    let detail = serde_json::json!({ "count": gone.len(), "ids": ids });
    host.events.publish(&kernel.event_name(), "checkpoints_expired", detail);
}

/// Checkpoints named in one event.
const NAMED: usize = 100;

/// Prunes expired checkpoints in the background.
pub(super) fn prune_soon(host: &Rc<Host>, kernel: &Rc<Kernel>) {
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    tokio::task::spawn_local(async move {
        if let Err(error) = prune(&host, &kernel).await {
            tracing::warn!(kernel = %kernel.spec().name, %error, "old checkpoints could not be removed");
        }
    });
}

/// Refuses a checkpoint that a freeze has.
async fn check_freezes(host: &Host, kernel: &Kernel, found: &Checkpoint) -> Result<()> {
    match host.catalog.freeze_of_checkpoint(kernel.id, found.id).await? {
        Some((group, number)) => {
            let short = found.short_id();
            Err(Error::conflict(format!("freeze {number} of group {group} needs checkpoint {short}"))
                .reason("freeze")
                .hint(format!("remove the freeze instead: ryokan group rm {group} --freeze {number}")))
        }
        None => Ok(()),
    }
}

/// Removes a checkpoint by request.
///
/// # Errors
/// `notFound`; `conflict` if the kernel needs it, or is at another version.
pub async fn remove(host: &Rc<Host>, kernel: &Rc<Kernel>, reference: &str, change: Change) -> Result<Checkpoint> {
    let found = find(kernel, reference).await?;
    check_freezes(host, kernel, &found).await?;
    let (actor, before) = (change.actor.clone(), kernel.view().version);
    let version = kernel.forget_checkpoint(change, found.clone()).await?;
    host.upkeep.gone.set(host.upkeep.gone.get() + 1);
    let detail = serde_json::json!({ "id": found.id, "name": found.name });
    host.events.publish(&kernel.event_name(), "checkpoint_removed", detail);
    let words = if found.name.is_empty() { found.id.to_string() } else { format!("{} {:?}", found.id, found.name) };
    host.audit_checkpoint(&actor, "checkpoint.remove", kernel, (before, version), found.manifest, words).await;
    Ok(found)
}

/// Pins or unpins a checkpoint.
///
/// # Errors
/// `notFound`, `conflict` with the candidates, with a freeze that needs the pin, or with a move, `busy` (leased).
pub async fn pin(host: &Rc<Host>, kernel: &Rc<Kernel>, reference: &str, pinned: bool, actor: &Actor) -> Result<()> {
    kernel.admit(actor, 0).await?;
    let (found, _held) = find_pinned(kernel, reference).await?;
    if !pinned {
        check_freezes(host, kernel, &found).await?;
    }
    kernel.not_leaving()?;
    kernel.records.pin_checkpoint(found.id, pinned).await?;
    let version = kernel.view().version;
    let action = if pinned { "checkpoint.pin" } else { "checkpoint.unpin" };
    host.audit_checkpoint(actor, action, kernel, (version, version), found.manifest, found.id.to_string()).await;
    if !pinned {
        prune_soon(host, kernel);
    }
    Ok(())
}

/// Sets the retention of automatic checkpoints. Returns the number of checkpoints removed as a result.
///
/// # Errors
/// `invalidArgument`, `conflict`, and catalog errors.
pub async fn set_retention(host: &Rc<Host>, kernel: &Rc<Kernel>, retention: Retention, change: Change) -> Result<u64> {
    retention.check().map_err(|error| Error::invalid(error.to_string()))?;
    kernel.change_retention(change, retention).await?;
    // The client may disconnect: a started change completes, with all its records. The rule holds even if this first
    // pruning fails: later ones follow.
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    let first = tokio::task::spawn_local(async move {
        prune(&host, &kernel).await.map(|gone| gone.len()).unwrap_or_else(|error| {
            tracing::warn!(kernel = %kernel.spec().name, %error, "old checkpoints could not be removed");
            0
        })
    });
    Ok(first.await.unwrap_or(0) as u64)
}
