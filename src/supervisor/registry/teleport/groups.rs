//! The records of moves of groups, and what their decisions mean for kernels.
//!
//! The decision about a group is one record of the catalog. While the target has not acknowledged it, each start gives the
//! group's kernels the state that follows from it, whatever their own records say.

use std::rc::Rc;

use futures::future::LocalBoxFuture;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::incoming::TargetSide;
use crate::bundle::{GroupContents, GroupHead};
use crate::catalog::{GroupMoveRow, HandoverRow, KernelRow, NewAudit};
use crate::core::error::{Error, Result};
use crate::core::freeze::Group;
use crate::core::freeze::portable::GroupArrival;
use crate::core::handover::{Side, Stage};
use crate::core::ids::{Digest, Epoch, GroupId, HandoverId, HostId, KernelId};
use crate::core::kernel::State;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::journal::StateRecord;
use crate::supervisor::registry::Supervisor;
use crate::teleport::OfferedGroup;

/// A kernel that moves with its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leaving {
    pub handover: HandoverId,
    pub kernel: KernelId,
    /// Its epoch at the target.
    pub epoch: Epoch,
}

/// What a source sends of a group beside its objects.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DescribedGroup {
    /// The freeze; the kernels come by themselves.
    pub head: GroupHead,
    pub kernels: Vec<Leaving>,
}

/// Brings groups that arrive into their places: a part of freezes, which use this module.
pub(crate) trait GroupArrivals {
    /// Checks an offered group, before anything of it arrives.
    fn may_arrive<'a>(
        &'a self,
        supervisor: &'a Supervisor,
        group: &'a OfferedGroup,
        actor: &'a Actor,
    ) -> LocalBoxFuture<'a, Result<()>>;

    /// Checks that a received group can come into its places. Nothing is written.
    fn rehearse<'a>(
        &'a self,
        supervisor: &'a Supervisor,
        contents: &'a GroupContents,
        arrival: &'a GroupArrival,
        actor: &'a Actor,
    ) -> LocalBoxFuture<'a, Result<()>>;

    /// Makes the group, and restores its members outside of kernels. Idempotent.
    fn arrive<'a>(
        &'a self,
        supervisor: &'a Supervisor,
        arriving: (GroupId, Digest, DescribedGroup),
        arrival: GroupArrival,
        actor: &'a Actor,
    ) -> LocalBoxFuture<'a, Result<()>>;

    /// Ends an interrupted operation of a group that came here, if it is there.
    fn end_unfinished<'a>(&'a self, supervisor: &'a Supervisor, id: GroupId) -> LocalBoxFuture<'a, Result<()>>;
}

/// The record of a group that leaves; it has the fields of a kernel's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OutGroup {
    pub to: String,
    pub name: String,
    pub epoch: Epoch,
    pub host: Option<HostId>,
    /// Empty before the decision.
    pub kernels: Vec<Leaving>,
}

impl OutGroup {
    /// Refuses to go on with another host than the target.
    pub fn check_target(&self, found: HostId) -> Result<()> {
        let OutGroup { to, name, epoch, host, .. } = self.clone();
        super::Outgoing { to, name, epoch, host }.check_target(found)
    }
}

/// The record of a group that arrives.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MovedGroup {
    pub name: String,
    pub source: HostId,
    pub places: Vec<(String, String)>,
    /// What describes it: an object.
    pub description: Digest,
    /// The manifest of its freeze.
    pub manifest: Digest,
    /// The histories of its repositories.
    pub packs: Vec<Digest>,
    pub kernels: Vec<Leaving>,
}

/// Where a kernel went with its group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Departed {
    /// The group's move.
    pub group: HandoverId,
    /// The kernel's.
    pub handover: HandoverId,
    host: HostId,
    epoch: Epoch,
}

pub(super) fn record<T: serde::de::DeserializeOwned>(row: &GroupMoveRow) -> Result<T> {
    serde_json::from_str(&row.record)
        .map_err(|error| Error::corrupt(format!("the record of the group's move {}: {error}", row.id)))
}

/// The id of a group as that of a kernel, for the records that name one.
pub(crate) fn as_kernel(group: GroupId) -> KernelId {
    KernelId::from_bytes(*group.as_bytes())
}

pub(super) fn as_handover(row: GroupMoveRow) -> HandoverRow {
    HandoverRow {
        id: row.id,
        side: row.side,
        kernel: as_kernel(row.group),
        uid: row.uid,
        live: row.side == Side::In && row.stage != Stage::Open,
        record: row.record,
        at_ms: row.at_ms,
    }
}

impl Supervisor {
    /// Names what brings groups into their places. Without, none arrives.
    pub(crate) fn set_group_arrivals(&self, arrivals: Rc<dyn GroupArrivals>) {
        *self.registry().handovers.arrivals.borrow_mut() = Some(arrivals);
    }

    pub(super) fn group_arrivals(&self) -> Result<Rc<dyn GroupArrivals>> {
        let arrivals = self.registry().handovers.arrivals.borrow().clone();
        arrivals.ok_or_else(|| Error::unavailable("the daemon is starting"))
    }

    /// The moves of groups as those of kernels.
    pub(super) async fn group_rows(&self) -> Result<Vec<HandoverRow>> {
        Ok(self.host().catalog.group_moves().await?.into_iter().map(as_handover).collect())
    }

    /// Remembers a decision: these kernels have departed.
    pub(crate) fn group_has_departed(&self, id: HandoverId, moved: &OutGroup) {
        let Some(host) = moved.host else { return };
        let mut departed = self.registry().handovers.departed.borrow_mut();
        for Leaving { handover, kernel, epoch } in &moved.kernels {
            departed.insert(*kernel, Departed { group: id, handover: *handover, host, epoch: *epoch });
        }
    }

    /// Reads the decisions about groups, before any kernel is recovered.
    pub(super) async fn recover_group_moves(&self) -> Result<()> {
        for row in self.host().catalog.group_moves().await? {
            if row.side == Side::Out && row.stage != Stage::Open {
                // Without it, kernels would live here that live elsewhere.
                let moved = record(&row).map_err(|error| {
                    let message = format!("{}: which kernels departed by it is not known", error.message);
                    Error { message, ..error }.hint(
                        "nothing starts before: bring back catalog.db from a backup, or correct that row of group_moves",
                    )
                })?;
                self.group_has_departed(row.id, &moved);
            }
        }
        Ok(())
    }

    /// The state of a kernel that has departed with its group, and the handover.
    pub(in crate::supervisor::registry) fn departed_with_group(&self, row: &KernelRow) -> Option<(State, HandoverId)> {
        let departed = self.registry().handovers.departed.borrow();
        let Departed { handover, host, epoch, .. } = *departed.get(&row.id).filter(|one| one.epoch > row.epoch)?;
        Some((State::Departed { host, epoch, handover }, handover))
    }

    /// Keeps code from kernels whose group is not whole here yet.
    pub(in crate::supervisor::registry) async fn await_arriving_groups(&self) -> Result<()> {
        for row in self.host().catalog.group_moves().await? {
            if row.side == Side::In && row.stage == Stage::Decided {
                let moved = match record::<MovedGroup>(&row) {
                    Ok(moved) => moved,
                    Err(error) => {
                        tracing::error!(handover = %row.id, %error, "a group that arrived cannot be completed");
                        continue;
                    }
                };
                self.registry().handovers.incomplete.borrow_mut().entry(row.group).or_default();
                let kernels = moved.kernels.iter().filter_map(|one| self.get(one.kernel));
                kernels.for_each(|kernel| kernel.set_awaits_group(true));
            }
        }
        Ok(())
    }

    /// Refuses operations on a group whose arrival has not ended.
    pub(crate) fn refuse_arriving(&self, group: &Group) -> Result<()> {
        if !self.registry().handovers.incomplete.borrow().contains_key(&group.id) {
            return Ok(());
        }
        Err(Error::conflict(format!("group {} moved here, and its members are not in their places yet", group.name))
            .reason("group_arriving")
            .hint("`ryokan teleport --status` says why; `--resolve ID --discard` ends it with the kernels alone"))
    }

    /// Whether a kernel has left with its group by a move that is not acknowledged, and may have come back since.
    pub(crate) fn awaits_acknowledgement(&self, kernel: KernelId) -> bool {
        self.registry().handovers.departed.borrow().contains_key(&kernel)
    }

    /// Whether the handover is that of a kernel that arrives with its group.
    pub(super) async fn arrives_with_group(&self, id: HandoverId) -> Result<Option<HandoverId>> {
        let rows = self.host().catalog.group_moves().await?;
        let is_named = |row: &GroupMoveRow| {
            let names = |moved: MovedGroup| moved.kernels.iter().any(|one| one.handover == id);
            row.side == Side::In && row.stage != Stage::Done && record(row).is_ok_and(names)
        };
        Ok(rows.into_iter().find(is_named).map(|row| row.id))
    }

    /// Refuses to notify the target of a decision before every kernel has ended here.
    pub(super) async fn check_kernels_left(&self, id: HandoverId) -> Result<()> {
        let departed = self.registry().handovers.departed.borrow().clone();
        for (kernel, departed) in departed.into_iter().filter(|(_, departed)| departed.group == id) {
            let Some(kernel) = self.get(kernel) else { continue };
            if kernel.epoch >= departed.epoch {
                // It has come back since: the target activated it, and the acknowledgement was lost.
                continue;
            }
            if !kernel.has_departed(departed.handover) {
                return Err(Error::unavailable(format!("kernel {} has not ended here yet", kernel.spec().name)));
            }
            if let Err(error) = kernel.settle().await {
                tracing::warn!(kernel = %kernel.spec().name, %error, "the rest of a departure is left to recovery");
            }
            self.record_departure(&kernel, departed).await?;
        }
        Ok(())
    }

    /// Makes a departure durable in the kernel's own records: the decision about its group is forgotten next.
    async fn record_departure(&self, kernel: &Kernel, departed: Departed) -> Result<()> {
        let host = self.host();
        let Some(row) = host.catalog.kernel(kernel.id).await? else { return Ok(()) };
        let mut record: StateRecord = serde_json::from_str(&row.state_json).unwrap_or_default();
        let Departed { handover, host: there, epoch, .. } = departed;
        if matches!(record.life.state, State::Departed { handover: own, .. } if own == handover) {
            return Ok(());
        }
        record.life.state = State::Departed { host: there, epoch, handover };
        host.making_room(async || kernel.records.save_life(&record, row.last_used_at_ms).await).await
    }

    /// Forgets a group's move that has ended; returns whether it was one.
    pub(crate) async fn forget_group_move(&self, id: HandoverId) -> Result<bool> {
        let (host, rows) = (self.host(), self.host().catalog.group_moves().await?);
        let Some(row) = rows.into_iter().find(|row| row.id == id && row.side == Side::Out) else { return Ok(false) };
        let kernels = match row.stage {
            // Each of them has an abort of its own.
            Stage::Open => Vec::new(),
            Stage::Decided | Stage::Done => record::<OutGroup>(&row)?.kernels,
        };
        let handovers: Vec<HandoverId> = kernels.iter().map(|one| one.handover).collect();
        host.making_room(async || Ok(host.catalog.forget_group_move(id, handovers.clone()).await?)).await?;
        self.registry().handovers.departed.borrow_mut().retain(|_, departed| departed.group != id);
        Ok(true)
    }

    /// A move of a group begins or ends in this daemon.
    pub(crate) fn set_convoy(&self, id: HandoverId, cancel: Option<CancellationToken>) {
        let handovers = &self.registry().handovers;
        match cancel {
            Some(cancel) => drop(handovers.convoys.borrow_mut().insert(id, cancel)),
            None => drop(handovers.convoys.borrow_mut().remove(&id)),
        }
        handovers.wake.notify_one();
    }

    /// Cancels the move of a group before its decision; returns when it is certain that the group stays.
    ///
    /// # Errors
    /// `conflict` after the decision; `notFound` if the group is not being moved.
    pub async fn abort_group_teleport(&self, group: GroupId, name: &str) -> Result<()> {
        let of_group = |row: &GroupMoveRow| row.group == group && row.side == Side::Out;
        let none = || Error::not_found(format!("group {name} is not being moved"));
        let row = self.host().catalog.group_moves().await?.into_iter().find(of_group).ok_or_else(none)?;
        let convoy = self.registry().handovers.convoys.borrow().get(&row.id).cloned();
        if let Some(convoy) = convoy {
            convoy.cancel();
        }
        loop {
            let now = self.host().catalog.group_moves().await?.into_iter().find(|one| one.id == row.id);
            let is_active = self.registry().handovers.convoys.borrow().contains_key(&row.id);
            match now {
                Some(now) if now.stage != Stage::Open => {
                    return Err(Error::conflict(format!("too late: the move of group {name} is committed"))
                        .reason("committed")
                        .hint("use it on the other host"));
                }
                Some(_) if is_active => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
                Some(_) | None => break,
            }
        }
        self.registry().handovers.wake.notify_one();
        Ok(())
    }

    /// Decides about a prepared group in place of its source, or gives up an abort; returns whether there is one.
    pub(super) async fn resolve_group(&self, id: HandoverId, live: bool, actor: &Actor) -> Result<bool> {
        let host = self.host();
        let is_own = |row: &GroupMoveRow| !host.environment.system_wide || row.uid == actor.uid;
        let rows = host.catalog.group_moves().await?;
        let Some(row) = rows.into_iter().find(|row| row.id == id && row.stage != Stage::Done && is_own(row)) else {
            return Ok(false);
        };
        let is_active = self.registry().handovers.convoys.borrow().contains_key(&id);
        if row.side == Side::Out && (live || is_active) {
            return Err(Error::conflict(format!("handover {id} is a move away from here: nothing can be activated"))
                .hint("once it has ended, --discard gives up a decision that the other host does not acknowledge"));
        }
        let detail = format!("group of {}: {}", id, if live { "activated" } else { "discarded" });
        let line = host.line(actor, "handover.resolve", None);
        host.write_audit(NewAudit { owner: Some(row.uid), detail, ..line }).await;
        match (row.side, live) {
            (Side::Out, _) => {
                if row.stage != Stage::Open {
                    self.check_kernels_left(id).await?;
                }
                self.forget_group_move(id).await?;
            }
            (Side::In, _) => {
                let target = TargetSide::new(self.clone(), actor.clone());
                let is_decided = row.stage == Stage::Decided;
                // A damaged record completes nothing, and is deleted.
                let is_whole = record::<MovedGroup>(&row).is_ok();
                // In its own task: a client's disconnect leaves nothing half done.
                let resolving = tokio::task::spawn_local(async move {
                    match live {
                        true => target.activate_group(row).await,
                        false if is_decided && is_whole => target.give_up_rest(&row).await,
                        false => target.discard_group(id).await.map(drop),
                    }
                });
                resolving.await.map_err(|error| Error::internal(error.to_string()))??;
            }
        }
        Ok(true)
    }

    /// The objects that prepared groups need, with their names.
    pub(crate) async fn prepared_groups(&self) -> Result<Vec<(String, Vec<Digest>, Digest)>> {
        let rows = self.host().catalog.group_moves().await?;
        let needed = rows.iter().filter(|row| row.side == Side::In && row.stage != Stage::Done);
        let roots = |row: &GroupMoveRow| {
            let MovedGroup { name, description, manifest, packs, .. } = record(row)?;
            Ok((name, packs.into_iter().chain([description]).collect(), manifest))
        };
        needed.map(roots).collect()
    }
}
