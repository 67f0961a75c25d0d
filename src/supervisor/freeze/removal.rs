//! Removal of freezes: of one that a client names, and of safety freezes that are old.

use super::{find_freeze, groups, kept_commits, turn};
use crate::core::checkpoint::CheckpointType;
use crate::core::error::Result;
use crate::core::freeze::{Freeze, Group};
use crate::core::ids::{CheckpointId, GroupId, KernelId};
use crate::supervisor::host::actor::Actor;
use crate::supervisor::registry::Supervisor;

/// Removes a freeze of a group; members stay as they are.
///
/// # Errors
/// `notFound`, `conflict` while an operation of the group has not ended.
pub async fn remove_freeze(supervisor: &Supervisor, group: &str, reference: &str, actor: &Actor) -> Result<()> {
    let (group, _turn) = turn(supervisor, actor.uid, group).await?;
    let freeze = find_freeze(supervisor.host(), &group, reference).await?;
    remove(supervisor, &group, &freeze, actor).await
}

async fn remove(supervisor: &Supervisor, group: &Group, freeze: &Freeze, actor: &Actor) -> Result<()> {
    let host = supervisor.host();
    let repositories = kept_commits::repositories(host, group, std::slice::from_ref(freeze)).await;
    // The marks of a collection under way must see each name that is removed now.
    let _names = host.upkeep.names.read().await;
    let detail = format!("{}: freeze {} ({})", group.name, freeze.number, freeze.id);
    let notes = groups::notes(host, actor, "group.forget", detail);
    let removed = host.catalog.remove_freeze(group.id, freeze.id, notes).await?;
    host.upkeep.gone.set(host.upkeep.gone.get() + 1);
    kept_commits::release_gone(supervisor, group, repositories).await?;
    unpin(supervisor, removed.value).await;
    Ok(())
}

/// Lets retention apply to checkpoints again that freezes needed. What fails is done at the next start.
pub(super) async fn unpin(supervisor: &Supervisor, checkpoints: Vec<(KernelId, CheckpointId)>) {
    let mut lifted = Vec::new();
    for (kernel, checkpoint) in checkpoints {
        if let Some(kernel) = supervisor.get(kernel)
            && let Err(error) = kernel.records.pin_checkpoint(checkpoint, false).await
        {
            tracing::warn!(kernel = %kernel.spec().name, %checkpoint, %error, "a checkpoint stays pinned");
            continue;
        }
        lifted.push((kernel, checkpoint));
    }
    if !lifted.is_empty()
        && let Err(error) = supervisor.host().catalog.end_pins(lifted).await
    {
        tracing::warn!(%error, "pins of checkpoints are lifted again at the next start");
    }
}

/// Lifts the pins that a former daemon left.
pub(super) async fn unpin_left(supervisor: &Supervisor) {
    match supervisor.host().catalog.unneeded_pins().await {
        Ok(left) => unpin(supervisor, left).await,
        Err(error) => tracing::warn!(%error, "checkpoints that no freeze needs stay pinned"),
    }
}

/// Removes the safety freezes of a group that the host's retention of automatic checkpoints does not keep, except the one
/// that undo goes back to.
///
/// # Errors
/// Database errors.
pub(super) async fn expire(supervisor: &Supervisor, group: GroupId, actor: &Actor) -> Result<()> {
    let host = supervisor.host();
    let Some(group) = host.catalog.groups(None).await?.into_iter().find(|one| one.id == group) else { return Ok(()) };
    let (retention, now) = (host.config.defaults.retention(), host.now_ms());
    let all = host.catalog.freezes(group.id).await?;
    let safety = all.iter().filter(|freeze| freeze.kind == CheckpointType::System);
    for (at, freeze) in safety.enumerate() {
        let is_needed = [group.head, group.undo].contains(&Some(freeze.id));
        if !is_needed && !retention.keeps(at, freeze.at_ms, now) {
            remove(supervisor, &group, freeze, actor).await?;
        }
    }
    Ok(())
}
