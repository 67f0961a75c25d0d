//! Groups whose kernels a failed freeze left paused, as configured.
//!
//! The catalog says which groups are paused. Their kernels start nothing, and what runs inside is suspended at the next
//! safe point, until a client resumes the group. Repositories and data sources are the user's own: they go on.

use std::rc::Rc;

use super::groups::notes;
use super::turn;
use crate::core::error::{Error, Result};
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::{Group, Member, Target};
use crate::core::kernel::State;
use crate::supervisor::checkpoint::held_kernel as held;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

/// Sets what a failed freeze does with the kernels of a group.
///
/// # Errors
/// `notFound`, and database errors.
pub async fn configure(supervisor: &Supervisor, group: &str, on_failure: OnFailure, actor: &Actor) -> Result<()> {
    let host = supervisor.host();
    let (group, _turn) = turn(supervisor, actor.uid, group).await?;
    let detail = format!("{}: on failure {}", group.name, on_failure.name());
    host.catalog.set_on_failure(group.id, on_failure, notes(host, actor, "group.set", detail)).await?;
    Ok(())
}

/// Lets the kernels of a paused group go on. Idempotent.
///
/// # Errors
/// `notFound`, and database errors.
pub async fn resume(supervisor: &Supervisor, group: &str, actor: &Actor) -> Result<()> {
    let host = supervisor.host();
    let (group, _turn) = turn(supervisor, actor.uid, group).await?;
    if group.paused.is_some() {
        host.catalog.open_group(group.id, notes(host, actor, "group.resume", group.name.clone())).await?;
        host.events.publish("", "group_resumed", serde_json::json!({ "group": group.name }));
    }
    refresh(supervisor, group.members.iter(), actor).await
}

/// Refuses an operation of a paused group.
///
/// # Errors
/// `conflict` (`group_paused`).
pub(super) fn refuse(group: &Group) -> Result<()> {
    match &group.paused {
        None => Ok(()),
        Some(why) => Err(Error::conflict(format!("group {} is paused: {why}", group.name))
            .reason("group_paused")
            .hint(format!("`ryokan resume {}` lets its kernels go on", group.name))),
    }
}

/// Records that a group is paused, and ends the intent of its freeze.
///
/// # Errors
/// Database errors.
pub(super) async fn record(host: &Host, group: &Group, why: &str, actor: &Actor) -> Result<()> {
    let detail = format!("{}: {why}", group.name);
    host.catalog.pause_group(group.id, bounded(why.to_owned()), notes(host, actor, "group.pause", detail)).await?;
    host.events.publish("", "group_paused", serde_json::json!({ "group": group.name, "error": why }));
    Ok(())
}

/// Pauses the kernels of a group, which nothing holds.
pub(super) fn close(supervisor: &Supervisor, group: &Group) {
    for kernel in kernels(supervisor, group.members.iter()) {
        kernel.set_group_paused(true);
        with_threads(&kernel);
    }
}

/// Keeps code from starting in the kernels of a group.
pub(super) fn close_admission(supervisor: &Supervisor, group: &Group) {
    kernels(supervisor, group.members.iter()).iter().for_each(|kernel| kernel.set_group_paused(true));
}

/// Opens kernels that no paused group has as members.
///
/// # Errors
/// Database errors.
pub(super) async fn refresh<'a>(
    supervisor: &Supervisor,
    members: impl Iterator<Item = &'a Member>,
    actor: &Actor,
) -> Result<()> {
    let groups = supervisor.host().catalog.groups(None).await?;
    let is_of = |group: &&Group, kernel: &Kernel| {
        group.members.iter().any(|member| matches!(member.target, Target::Kernel { id } if id == kernel.id))
    };
    for kernel in kernels(supervisor, members) {
        if !kernel.is_group_paused() {
            continue;
        }
        if groups.iter().filter(|group| group.paused.is_some()).any(|group| is_of(&group, &kernel)) {
            continue;
        }
        kernel.set_group_paused(false);
        for session in std::iter::once(Rc::clone(&kernel)).chain(kernel.threads()) {
            if !matches!(session.view().state, State::Suspended) {
                continue;
            }
            if let Err(error) = session.resume(actor.clone()).await {
                // Its next use resumes it.
                tracing::warn!(kernel = %session.spec().name, %error, "a kernel of a resumed group stays suspended");
            }
        }
    }
    Ok(())
}

/// Suspends a kernel and its threads at their next safe points.
pub(super) fn with_threads(kernel: &Rc<Kernel>) {
    when_idle(kernel);
    kernel.threads().iter().for_each(when_idle);
}

/// Suspends a kernel at its next safe point, if it has a worker.
pub(super) fn when_idle(kernel: &Rc<Kernel>) {
    match kernel.view().state {
        State::Starting | State::Ready | State::Busy { .. } | State::Stopping { .. } => {}
        State::Created
        | State::Suspended
        | State::Stopped { .. }
        | State::Crashed { .. }
        | State::Archived { .. }
        | State::Departed { .. } => return,
    }
    let kernel = Rc::clone(kernel);
    tokio::task::spawn_local(async move {
        if let Err(error) = held::pause(&kernel).await {
            // It starts nothing all the same.
            tracing::warn!(kernel = %kernel.spec().name, %error, "a kernel of a paused group was not suspended");
        }
    });
}

fn kernels<'a>(supervisor: &Supervisor, members: impl Iterator<Item = &'a Member>) -> Vec<Rc<Kernel>> {
    let of = |member: &Member| match member.target {
        Target::Kernel { id } => supervisor.get(id),
        _ => None,
    };
    members.filter_map(of).collect()
}
