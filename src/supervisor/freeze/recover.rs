//! Ends what a former daemon, or a failed restore, left unfinished: a freeze or an import without its row is withdrawn, a
//! restore is reverted. The repositories of an import that is visible come into their places.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::run_restore::Run;
use super::sources::{self, KEPT, pending};
use super::{access, manifest, operation_turn, pauses, scratch};
use super::{import_end, kept_commits, members, removal};
use crate::core::error::{Error, Result};
use crate::core::freeze::restore::{Action, Outcome, Restore};
use crate::core::freeze::{Group, Intent, Member, Target};
use crate::core::ids::{FreezeId, GroupId, KernelId};
use crate::supervisor::checkpoint::held_kernel as held;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

/// Ends every unfinished operation, before clients are served.
pub async fn recover(supervisor: &Supervisor) {
    let host = supervisor.host();
    let (intents, groups) = match (host.catalog.intents().await, host.catalog.groups(None).await) {
        (Ok(intents), Ok(groups)) => (intents, groups),
        (Err(error), _) | (_, Err(error)) => {
            return tracing::error!(%error, "unfinished operations of groups are not known");
        }
    };
    // What fails stays recorded, and was reported.
    let reverts =
        |id: GroupId| intents.iter().any(|(of, intent)| *of == id && matches!(intent, Intent::Restore { .. }));
    let _ = pending::resume(host, |id| !reverts(id)).await;
    groups.iter().filter(|group| group.paused.is_some()).for_each(|group| pauses::close_admission(supervisor, group));
    for (id, intent) in intents {
        let group = groups.iter().find(|group| group.id == id);
        if let (Some(group), Intent::Restore { members, .. }) = (group, &intent) {
            // Until the end, nothing runs in kernels that may be between two states.
            let is_concerned = |member: &Member| members.contains(&member.name);
            kernels(supervisor, group, is_concerned).for_each(|kernel| kernel.set_awaits_group(true));
        }
        if let (Some(group), Intent::Freeze { pauses: true, .. }) = (group, &intent) {
            pauses::close_admission(supervisor, group);
        }
        if let Intent::Import { kernels, .. } = &intent {
            kernels.iter().filter_map(|id| supervisor.get(*id)).for_each(|kernel| kernel.set_awaits_group(true));
        }
        if let Err(error) = end(supervisor, id, intent).await {
            let group = group.map_or_else(|| id.to_string(), |group| group.name.clone());
            tracing::error!(%group, %error, "an operation of a group could not be ended");
            host.events.publish(
                "",
                "group_unfinished",
                serde_json::json!({ "group": group, "error": error.to_string() }),
            );
        }
    }
    removal::unpin_left(supervisor).await;
    sweep(host, &groups).await;
    groups.iter().filter(|group| group.paused.is_some()).for_each(|group| pauses::close(supervisor, group));
}

/// Admits code to the kernels of a group whose operation has ended, except to those in `held`: another group's.
pub(super) fn admit(supervisor: &Supervisor, group: &Group, held: &BTreeSet<KernelId>) {
    let is_free = |kernel: &Rc<Kernel>| !held.contains(&kernel.id);
    kernels(supervisor, group, |_| true).filter(is_free).for_each(|kernel| kernel.set_awaits_group(false));
}

fn kernels(
    supervisor: &Supervisor,
    group: &Group,
    wanted: impl Fn(&Member) -> bool,
) -> impl Iterator<Item = Rc<Kernel>> {
    let kernel = |member: &Member| match member.target {
        Target::Kernel { id } => supervisor.get(id),
        _ => None,
    };
    group.members.iter().filter(move |member| wanted(member)).filter_map(kernel)
}

/// Removes the files of operations that have ended.
async fn sweep(host: &Rc<Host>, groups: &[Group]) {
    // Without an answer everything may be needed.
    let Ok(intents) = host.catalog.intents().await else { return };
    let needed: Vec<String> = intents.iter().map(|(id, _)| id.to_string()).collect();
    for group in groups.iter().filter(|group| !needed.contains(&group.id.to_string())) {
        // Only captures of directories and servers leave files outside of the data folder.
        let leaves_files = |member: &&Member| matches!(member.target, Target::Directory { .. } | Target::Server { .. });
        for member in group.members.iter().filter(leaves_files) {
            let scratch = scratch(host, group.id).join(&member.name);
            // A member that cannot be opened is reported by the next operation.
            if let Ok(Some(mut source)) = sources::open(host, group.uid, member, scratch).await {
                source.discard().await;
            }
        }
    }
    let Ok(entries) = std::fs::read_dir(host.environment.data.join("groups")) else { return };
    for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != KEPT && name != pending::FOLDER && !needed.contains(&name) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Ends the unfinished operation of a group, if there is one.
///
/// # Errors
/// Errors that prevent it: the group stays unfinished.
pub(super) async fn unfinished(supervisor: &Supervisor, group: &Group) -> Result<()> {
    let intents = supervisor.host().catalog.intents().await?;
    if !intents.iter().any(|(id, intent)| *id == group.id && matches!(intent, Intent::Restore { .. })) {
        pending::resume(supervisor.host(), |id| id == group.id).await?;
    }
    let Some((id, intent)) = intents.into_iter().find(|(id, _)| *id == group.id) else {
        // Files of the operation before.
        let _ = std::fs::remove_dir_all(scratch(supervisor.host(), group.id));
        return Ok(());
    };
    end(supervisor, id, intent).await
}

async fn end(supervisor: &Supervisor, id: GroupId, intent: Intent) -> Result<()> {
    let host = supervisor.host();
    match intent {
        // Its row would have ended the intent.
        Intent::Freeze { id: freeze, checkpoints, pauses } => {
            for (kernel, checkpoint) in checkpoints {
                if let Some(kernel) = supervisor.get(kernel) {
                    held::withdraw(&kernel, checkpoint).await?;
                }
            }
            let group = host.catalog.groups(None).await?.into_iter().find(|group| group.id == id);
            if let Some(group) = &group {
                let repositories = kept_commits::repositories(host, group, &[]).await;
                kept_commits::release_in(supervisor, group, Some(freeze), repositories).await;
            }
            if !pauses {
                return Ok(host.catalog.clear_intent(id).await?);
            }
            let group = group.ok_or_else(|| Error::corrupt(format!("group {id} is gone")))?;
            let why = "the daemon ended during a freeze";
            pauses::record(host, &group, why, &host.own_actor()).await?;
            pauses::close(supervisor, &group);
            Ok(())
        }
        Intent::Import { kernels, repositories, completed } => {
            import_end::withdraw(supervisor, id, (&kernels, &repositories, &completed)).await
        }
        Intent::Place { repositories } => import_end::place(host, id, &repositories).await,
        Intent::Restore { target, safety, members, reached } => {
            let group = host.catalog.groups(None).await?.into_iter().find(|group| group.id == id);
            let group = group.ok_or_else(|| Error::corrupt(format!("group {id} is gone")))?;
            // Before the change: without an answer, code is admitted to none.
            let held = operation_turn::kernels_of_half_restored(host, id).await?;
            revert(supervisor, &group, (target, safety), &members, reached).await?;
            // The kernels of a group that arrives wait for the end of its move.
            if supervisor.refuse_arriving(&group).is_ok() {
                admit(supervisor, &group, &held);
            }
            // Members that were held only.
            pending::resume(host, |of| of == id).await?;
            if let Err(error) = removal::expire(supervisor, id, &host.own_actor()).await {
                tracing::warn!(group = %group.name, %error, "older safety freezes could not be removed");
            }
            Ok(())
        }
    }
}

async fn revert(
    supervisor: &Supervisor,
    group: &Group,
    (target, safety): (FreezeId, FreezeId),
    names: &[String],
    reached: usize,
) -> Result<()> {
    let host = supervisor.host();
    // Waits for git commands of the former daemon.
    access::git(host).await?;
    let all = host.catalog.freezes(group.id).await?;
    let find = |id: FreezeId| {
        let found = all.iter().find(|freeze| freeze.id == id).cloned();
        found.ok_or_else(|| Error::corrupt(format!("freeze {id}, which a restore needs, is gone")))
    };
    let (freeze, safety) = (find(target)?, find(safety)?);
    let (parts, targets) = (manifest(host, &safety).await?.parts, manifest(host, &freeze).await?.parts);
    // Broken members that the restore did not concern are no obstacle.
    let mut opened = members::open(supervisor, group, |member| names.contains(&member.name)).await?;
    let mut live = Vec::new();
    for name in names {
        let at = opened.iter().position(|live| live.name == *name);
        let part = parts.iter().find(|part| part.name == *name);
        let (Some(at), Some(part)) = (at, part) else {
            return Err(Error::corrupt(format!("member {name}, which a restore concerns, is gone")));
        };
        let mut one = opened.swap_remove(at);
        one.set_captured(part.captured.clone());
        one.target = targets.iter().find(|part| part.name == *name).map(|part| part.captured.clone());
        live.push(one);
    }
    let databases = members::database_files_of(&targets);
    live.iter_mut().for_each(|live| live.leave_out(&databases));
    live.iter_mut().take(reached).for_each(members::Live::may_be_switched);
    let actor = host.own_actor();
    // The members that a failed restore of this daemon holds. What can fail before has succeeded; their kernels wait.
    drop(host.parked.borrow_mut().remove(&group.id));
    let mut machine = Restore::recovery(live.len(), reached);
    let restored = live.len();
    let mut run = Run { live, restored, safety: Some(safety), ..Run::new(host, group, freeze, &actor) };
    run.order();
    while machine.next() != Action::End {
        let reply = run.perform(machine.next()).await;
        machine.reply(reply);
    }
    match machine.outcome() {
        Some(Outcome::AsBefore { .. }) => {
            host.events.publish("", "group_reverted", serde_json::json!({ "group": group.name }));
            Ok(())
        }
        outcome => run.end(outcome).map(drop),
    }
}
