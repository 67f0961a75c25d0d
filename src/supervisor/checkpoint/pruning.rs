//! Which checkpoints stay: retention, pins, removal by name, and what keeps one from going while it is read.

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

/// As long as this lives, neither retention nor anybody by name removes the checkpoint.
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

/// A checkpoint that was found, kept from going as long as the second part lives.
///
/// # Errors
/// `notFound` if it went meanwhile.
pub(crate) async fn hold(kernel: &Rc<Kernel>, checkpoint: Checkpoint) -> Result<(Checkpoint, ReadPin)> {
    let held = ReadPin::begin(kernel, checkpoint.id);
    // It may have been about to go when it was found: what was asked of the database before has been done when it answers.
    match kernel.records.checkpoint(checkpoint.id).await? {
        Some(checkpoint) => Ok((checkpoint, held)),
        None => Err(Error::not_found(format!("checkpoint {} was removed meanwhile", checkpoint.short_id()))),
    }
}

/// As [`find`], and keeps what it finds from going.
///
/// # Errors
/// As [`find`].
pub(crate) async fn find_pinned(kernel: &Rc<Kernel>, reference: &str) -> Result<(Checkpoint, ReadPin)> {
    let found = find(kernel, reference).await?;
    hold(kernel, found).await
}

impl Kernel {
    /// How long checkpoints that ryokan takes by itself are kept.
    pub fn retention(&self) -> Retention {
        self.retention.get()
    }

    /// Whether an operation reads that checkpoint.
    pub(crate) fn holds(&self, id: CheckpointId) -> bool {
        self.held.borrow().contains_key(&id)
    }

    fn with_pins(&self, mut standing: Standing) -> Standing {
        standing.needed.extend(self.held.borrow().keys().map(|id| (*id, Use::Reading)));
        standing
    }

    /// What becomes of each checkpoint by the rules of retention.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn fates(&self, now_ms: i64) -> Result<Vec<(Checkpoint, Fate)>> {
        let standing = self.with_pins(self.records.standing().await?);
        let fates = plan(&self.retention.get(), &standing, now_ms);
        Ok(standing.checkpoints.into_iter().zip(fates.into_iter().map(|(_, fate)| fate)).collect())
    }
}

/// Removes what retention lets go of a kernel; gives it.
///
/// # Errors
/// The database's: then all are there.
pub(crate) async fn prune(host: &Host, kernel: &Kernel) -> Result<Vec<Checkpoint>> {
    if kernel.view().checkpoints == 0 {
        return Ok(Vec::new());
    }
    let (now_ms, policy) = (host.now_ms(), kernel.retention.get());
    let fates = kernel.fates(now_ms).await?;
    // Until then only a new checkpoint changes anything, and each is followed by its own look.
    let oldest = fates.iter().filter(|(one, fate)| fate.stays() && is_automatic(one)).map(|(one, _)| one.at_ms).min();
    let keep_ms = policy.keep_for_ms.and_then(|ms| i64::try_from(ms).ok());
    kernel.prune_due_ms.set(oldest.zip(keep_ms).map_or(i64::MAX, |(at_ms, keep)| at_ms.saturating_add(keep)));
    if fates.iter().all(|(_, fate)| fate.stays()) {
        return Ok(Vec::new());
    }
    let gone = {
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
    if !gone.is_empty() {
        told(host, kernel, &gone).await;
    }
    Ok(gone)
}

async fn told(host: &Host, kernel: &Kernel, gone: &[Checkpoint]) {
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
    host.events.publish(&kernel.event_name, "checkpoints_expired", detail);
}

/// Checkpoints that one event names.
const NAMED: usize = 100;

/// Looks at what retention lets go, beside whatever goes on.
pub(super) fn prune_soon(host: &Rc<Host>, kernel: &Rc<Kernel>) {
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    tokio::task::spawn_local(async move {
        if let Err(error) = prune(&host, &kernel).await {
            tracing::warn!(kernel = %kernel.spec.name, %error, "old checkpoints could not be removed");
        }
    });
}

/// Removes a checkpoint because somebody asks for it.
///
/// # Errors
/// `notFound`; `conflict` if the kernel needs it, or is at another version.
pub async fn remove(host: &Rc<Host>, kernel: &Rc<Kernel>, reference: &str, change: Change) -> Result<Checkpoint> {
    let found = find(kernel, reference).await?;
    let (actor, before) = (change.actor.clone(), kernel.view().version);
    let version = kernel.forget_checkpoint(change, found.clone()).await?;
    host.upkeep.gone.set(host.upkeep.gone.get() + 1);
    let detail = serde_json::json!({ "id": found.id, "name": found.name });
    host.events.publish(&kernel.event_name, "checkpoint_removed", detail);
    let words = if found.name.is_empty() { found.id.to_string() } else { format!("{} {:?}", found.id, found.name) };
    host.audit_checkpoint(&actor, "checkpoint.remove", kernel, (before, version), found.manifest, words).await;
    Ok(found)
}

/// Keeps a checkpoint from retention, or no longer.
///
/// # Errors
/// `notFound`, `conflict` with the candidates, `busy` (leased).
pub async fn pin(host: &Rc<Host>, kernel: &Rc<Kernel>, reference: &str, pinned: bool, actor: &Actor) -> Result<()> {
    kernel.admit(actor, 0).await?;
    let (found, _held) = find_pinned(kernel, reference).await?;
    kernel.records.pin_checkpoint(found.id, pinned).await?;
    let version = kernel.view().version;
    let action = if pinned { "checkpoint.pin" } else { "checkpoint.unpin" };
    host.audit_checkpoint(actor, action, kernel, (version, version), found.manifest, found.id.to_string()).await;
    if !pinned {
        prune_soon(host, kernel);
    }
    Ok(())
}

/// Says how long checkpoints that ryokan takes by itself are kept from now on. Gives how many went because of that.
///
/// # Errors
/// `invalidArgument`, `conflict`, and the catalog's.
pub async fn set_retention(host: &Rc<Host>, kernel: &Rc<Kernel>, retention: Retention, change: Change) -> Result<u64> {
    retention.check().map_err(|error| Error::invalid(error.to_string()))?;
    kernel.change_retention(change, retention).await?;
    // Whoever asked may be gone by then: what is begun is ended, with all that is written down of it. The rule holds whatever becomes of
    // its first use: there will be others.
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    let first = tokio::task::spawn_local(async move {
        prune(&host, &kernel).await.map(|gone| gone.len()).unwrap_or_else(|error| {
            tracing::warn!(kernel = %kernel.spec.name, %error, "old checkpoints could not be removed");
            0
        })
    });
    Ok(first.await.unwrap_or(0) as u64)
}
