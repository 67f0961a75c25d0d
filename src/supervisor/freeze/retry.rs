//! Ends what stays frozen or unfinished without a client that asks for it: sources that could not be resumed, restores
//! that could not be reverted, and freezes that could not be withdrawn.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::sources::pending;
use super::{operation_turn, recover};
use crate::core::error::Result;
use crate::core::freeze::Intent;
use crate::core::ids::GroupId;
use crate::core::limits;
use crate::supervisor::registry::Supervisor;

/// Failed attempts of each group since the last success, and the time before which none follows.
type Failures = HashMap<GroupId, (u32, Instant)>;

/// Begins to retry; it ends with the host.
pub fn retry(supervisor: &Supervisor) {
    let most = limits::GROUP_RETRY;
    let interval = supervisor.host().config.upkeep.interval.map_or(most, |interval| interval.min(most));
    let kept = supervisor.downgrade();
    tokio::task::spawn_local(async move {
        let mut failures = Failures::new();
        loop {
            tokio::time::sleep(interval).await;
            let Some(supervisor) = kept.upgrade() else { return };
            if supervisor.host().is_stopping() {
                return;
            }
            if let Err(error) = pass(&supervisor, interval, &mut failures).await {
                tracing::warn!(%error, "unfinished operations of groups are not known");
            }
        }
    });
}

/// Tries each group that needs it and whose turn is free. A group that fails again and again is tried less often.
async fn pass(supervisor: &Supervisor, interval: Duration, failures: &mut Failures) -> Result<()> {
    let waiting = waiting(supervisor).await?;
    failures.retain(|id, _| waiting.contains(id));
    if waiting.is_empty() {
        return Ok(());
    }
    let groups = supervisor.host().catalog.groups(None).await?;
    for group in groups.iter().filter(|group| waiting.contains(&group.id)) {
        let (failed, due) = failures.get(&group.id).copied().unwrap_or((0, Instant::now()));
        if due > Instant::now() {
            continue;
        }
        let Some(_turn) = operation_turn::free(supervisor, group).await? else { continue };
        if !self::waiting(supervisor).await?.contains(&group.id) {
            continue;
        }
        match recover::unfinished(supervisor, group).await {
            Ok(()) => {
                tracing::info!(group = %group.name, "an operation of a group was ended");
                failures.remove(&group.id);
            }
            // It was reported.
            Err(error) => {
                tracing::warn!(group = %group.name, %error, "an operation of a group could not be ended");
                let pause = interval * 2u32.pow(failed.min(limits::GROUP_RETRY_DOUBLINGS));
                failures.insert(group.id, (failed + 1, Instant::now() + pause));
            }
        }
    }
    Ok(())
}

/// The groups with a quiesced source, a restore that is to be reverted or a freeze that is to be withdrawn; also those whose
/// operation is under way.
async fn waiting(supervisor: &Supervisor) -> Result<BTreeSet<GroupId>> {
    let host = supervisor.host();
    let intents = host.catalog.intents().await?;
    let is_ended = |intent: &Intent| matches!(intent, Intent::Freeze { .. } | Intent::Restore { .. });
    let is_other = |id: &GroupId| intents.iter().any(|(of, intent)| of == id && !is_ended(intent));
    let mut found = pending::groups(host);
    found.extend(intents.iter().map(|(id, _)| *id));
    // Imports go on or are withdrawn with what made them.
    found.retain(|id| !is_other(id));
    Ok(found)
}
