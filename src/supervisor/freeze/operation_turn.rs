//! The turn of an operation: with its group and members, against other groups that share some.

use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;

use futures::FutureExt as _;

use crate::core::error::{Error, Result};
use crate::core::freeze::concern::Concern;
use crate::core::freeze::postgres::Connection;
use crate::core::freeze::{Group, Intent, Member, Target};
use crate::core::ids::{GroupId, KernelId};
use crate::core::limits;
use crate::git::shared_by;
use crate::supervisor::host::Host;
use crate::supervisor::host::operation_queue::Turn;
use crate::supervisor::registry::Supervisor;

/// Finds a group and waits for its turn.
///
/// # Errors
/// `notFound`, `busy` (`group_turn`), `conflict` (`group_arriving`).
pub(super) async fn turn(supervisor: &Supervisor, uid: u32, name: &str) -> Result<(Group, Turn)> {
    turn_with(supervisor, uid, name, &[]).await
}

/// As [`turn`], of an operation that concerns further things.
///
/// # Errors
/// `notFound`, `busy` (`group_turn`).
pub(super) async fn turn_with(
    supervisor: &Supervisor,
    uid: u32,
    name: &str,
    further: &[Target],
) -> Result<(Group, Turn)> {
    loop {
        let group = super::find(supervisor, uid, name).await?;
        supervisor.refuse_arriving(&group)?;
        let targets = group.members.iter().map(|member| &member.target).chain(further);
        let turn = of_targets(supervisor.host(), Some(group.id), targets).await?;
        // An earlier operation may have changed its members.
        let now = super::find(supervisor, uid, name).await?;
        if (now.id, &now.members) == (group.id, &group.members) {
            return Ok((now, turn));
        }
    }
}

/// Waits for the turn of an operation on these members, and on their group unless that is new.
///
/// # Errors
/// `busy` (`group_turn`).
pub(super) async fn of_targets<'a>(
    host: &Rc<Host>,
    group: Option<GroupId>,
    targets: impl Iterator<Item = &'a Target>,
) -> Result<Turn> {
    let of_group = group.into_iter().map(Concern::Group);
    let concerns = of_group.chain(targets.flat_map(|target| concerns_of(host, target))).collect();
    match tokio::time::timeout(limits::CHECKPOINT_WAIT, host.group_queue.take(concerns)).await {
        Ok(turn) => Ok(turn),
        Err(_) => Err(Error::busy("an operation on the group, or on a member that it shares, has not ended")
            .reason("group_turn")
            .hint("wait for its end, then try again")),
    }
}

/// The turn of an operation on a group, if nothing has to be waited for and the group is as it was.
///
/// # Errors
/// Database errors.
pub(super) async fn free(supervisor: &Supervisor, group: &Group) -> Result<Option<Turn>> {
    let host = supervisor.host();
    if supervisor.refuse_arriving(group).is_err() {
        // Its move ends that, and admits code only at its end.
        return Ok(None);
    }
    let concerns = std::iter::once(Concern::Group(group.id));
    let concerns = concerns.chain(group.members.iter().flat_map(|member| concerns_of(host, &member.target)));
    let Some(turn) = host.group_queue.take(concerns.collect()).now_or_never() else { return Ok(None) };
    let groups = host.catalog.groups(None).await?;
    let is_same = groups.iter().any(|now| (now.id, &now.members) == (group.id, &group.members));
    Ok(is_same.then_some(turn))
}

/// Refuses an operation on members that another group has, too, while a restore of that group has not ended: they may be
/// between two states. Within the turn of the operation.
///
/// # Errors
/// `conflict` (`group_unfinished`).
pub(super) async fn refuse_half_restored(host: &Host, group: &Group) -> Result<()> {
    for other in half_restored(host, group.id).await? {
        let theirs: Vec<Concern> = other.members.iter().flat_map(|member| concerns_of(host, &member.target)).collect();
        let is_shared = |member: &&Member| {
            concerns_of(host, &member.target).iter().any(|own| theirs.iter().any(|their| own.conflicts(their)))
        };
        let Some(shared) = group.members.iter().find(is_shared) else { continue };
        let (name, shared) = (&other.name, &shared.name);
        return Err(Error::conflict(format!(
            "a restore of group {name}, which shares member {shared} with group {}, has not ended",
            group.name
        ))
        .reason("group_unfinished")
        .hint(format!(
            "the next freeze, restore or undo of {name} goes back first, and names what prevents it; `ryokan group rm \
             {name} --abandon` leaves its members as they are"
        )));
    }
    Ok(())
}

/// The other groups with a restore that has not ended.
async fn half_restored(host: &Host, than: GroupId) -> Result<Vec<Group>> {
    let intents = host.catalog.intents().await?;
    let is_half =
        |id: GroupId| intents.iter().any(|(of, intent)| *of == id && matches!(intent, Intent::Restore { .. }));
    let mut groups = host.catalog.groups(None).await?;
    groups.retain(|group| group.id != than && is_half(group.id));
    Ok(groups)
}

/// The kernels that a restore of another group, which has not ended, keeps from work.
///
/// # Errors
/// Database errors.
pub(super) async fn kernels_of_half_restored(host: &Host, than: GroupId) -> Result<BTreeSet<KernelId>> {
    let members = half_restored(host, than).await?.into_iter().flat_map(|group| group.members);
    let kernel = |member: Member| match member.target {
        Target::Kernel { id } => Some(id),
        _ => None,
    };
    Ok(members.filter_map(kernel).collect())
}

/// What an operation on a member concerns.
fn concerns_of(host: &Host, target: &Target) -> Vec<Concern> {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    match target {
        Target::Kernel { id } => vec![Concern::Kernel(*id)],
        Target::Repository { path } => {
            let path = real(Path::new(path));
            // References and objects are those of the repository that it was made from.
            let shared = shared_by(&path);
            std::iter::once(path).chain(shared).map(Concern::Path).collect()
        }
        Target::Database { path } | Target::Directory { path } => vec![Concern::Path(real(Path::new(path)))],
        Target::Command { source } => vec![Concern::Source(source.clone())],
        Target::Postgres { connection } => {
            let parsed = connection.parse::<Connection>();
            vec![Concern::Postgres(parsed.map_or_else(|_| connection.clone(), |parsed| parsed.database))]
        }
        Target::Server { server } => {
            let data = host.config.postgres.get(server).map(|server| real(&server.data));
            std::iter::once(Concern::Server(server.clone())).chain(data.map(Concern::Path)).collect()
        }
    }
}
