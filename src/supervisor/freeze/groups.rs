//! Groups and their members.

use std::path::{Path, PathBuf};

use super::objects::blocking;
use super::operation_turn::{self, turn_with};
use super::sources::{self, database_files, pending};
use super::{access, import_end, kept_commits, pauses, recover, removal};
use crate::catalog::Notes;
use crate::catalog::host_database::{self, Present};
use crate::core::audit::NewAudit;
use crate::core::error::{Error, Result};
use crate::core::freeze::postgres::{Connection, ConnectionError};
use crate::core::freeze::{Group, Intent, Member, Target};
use crate::core::ids::{CheckpointId, GroupId, KernelId};
use crate::core::name::KernelName;
use crate::core::nearest::nearest;
use crate::git::Repository;
use crate::supervisor::checkpoint::held_kernel as held;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

pub(super) fn checked_name(name: &str) -> Result<KernelName> {
    name.parse().map_err(|error: crate::core::name::NameError| {
        Error::invalid(error.to_string().replace("a kernel's name", "a name"))
    })
}

pub(super) fn notes(host: &Host, actor: &Actor, action: &str, detail: String) -> Notes {
    let line = host.line(actor, action, None);
    Notes { events: Vec::new(), audit: vec![NewAudit { owner: Some(actor.uid), detail: bounded(detail), ..line }] }
}

/// The caller's groups.
///
/// # Errors
/// Database errors.
pub async fn list(supervisor: &Supervisor, uid: u32) -> Result<Vec<Group>> {
    Ok(supervisor.host().catalog.groups(Some(uid)).await?)
}

/// Finds a group by name.
///
/// # Errors
/// `notFound`.
pub async fn find(supervisor: &Supervisor, uid: u32, name: &str) -> Result<Group> {
    let groups = list(supervisor, uid).await?;
    if let Some(found) = groups.iter().find(|group| group.name == name) {
        return Ok(found.clone());
    }
    let known: Vec<&str> = groups.iter().map(|group| group.name.as_str()).collect();
    let hint = match nearest(name, &known) {
        Some(near) => format!("did you mean {near}? `ryokan group show` lists the groups there are"),
        None => format!("create it: ryokan group new {name}"),
    };
    Err(Error::not_found(format!("there is no group {name:?}")).hint(hint))
}

/// Whether the caller has a group of this name.
pub async fn exists(supervisor: &Supervisor, uid: u32, name: &str) -> bool {
    find(supervisor, uid, name).await.is_ok()
}

/// Creates a group.
///
/// # Errors
/// `alreadyExists` if a group or a kernel has this name; `invalidArgument`.
pub async fn create(supervisor: &Supervisor, name: &str, actor: &Actor) -> Result<()> {
    let (host, name) = (supervisor.host(), checked_name(name)?);
    if supervisor.find(actor.uid, name.as_str()).is_ok() {
        return Err(Error::already_exists(format!("there is a kernel {name}")).hint("take another name for the group"));
    }
    let (id, notes) = (GroupId::from_bytes(host.random()), notes(host, actor, "group.create", name.to_string()));
    host.catalog.create_group(id, actor.uid, name.to_string(), host.now_ms(), notes).await?;
    Ok(())
}

/// Adds a member; an empty `name` is derived from the target.
///
/// # Errors
/// `notFound`, `alreadyExists`, `refused` (rules for host paths), `unsupported`, `invalidArgument`, `conflict` (paused).
pub async fn add(
    supervisor: &Supervisor,
    group: &str,
    (kind, target): (&str, &str),
    name: &str,
    actor: &Actor,
) -> Result<Member> {
    let host = supervisor.host();
    // Unchecked: its turn comes first.
    let named = match kind {
        "kernel" => supervisor.find(actor.uid, target).ok().map(|kernel| Target::Kernel { id: kernel.id }),
        kind => Target::named(kind, target),
    };
    let (group, _turn) = turn_with(supervisor, actor.uid, group, named.as_slice()).await?;
    pauses::refuse(&group)?;
    let (target, own_name) = match kind {
        "kernel" => {
            let kernel = supervisor.find(actor.uid, target)?;
            may_be_member(supervisor, &kernel).await?;
            (Target::Kernel { id: kernel.id }, kernel.spec().name.to_string())
        }
        "command" => {
            access::own_user(actor.uid)?;
            if !host.config.sources.contains_key(target) {
                return Err(Error::not_found(format!("no data source {target:?} is configured"))
                    .reason("source")
                    .hint(format!("add [sources.{target}] to the configuration, then restart the daemon")));
            }
            (Target::Command { source: target.to_owned() }, target.to_owned())
        }
        "postgres" => {
            access::own_user(actor.uid)?;
            let connection: Connection =
                target.parse().map_err(|error: ConnectionError| Error::invalid(error.to_string()))?;
            let member = Member {
                name: connection.database.clone(),
                target: Target::Postgres { connection: connection.to_string() },
            };
            (member.target, connection.database.to_ascii_lowercase())
        }
        "server" => {
            access::own_user(actor.uid)?;
            (Target::Server { server: target.to_owned() }, target.to_owned())
        }
        "repository" | "database" | "directory" => {
            let real = access::checked(host, actor.uid, Path::new(target))?;
            access::apart_from_servers(host, &real)?;
            let file = real.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let path = real.display().to_string();
            let target = match kind {
                "repository" => {
                    let repository = Repository::open(&access::git(host).await?, &real)?;
                    access::trusted_repository(supervisor, actor.uid, &repository).await?;
                    let databases = group.members.iter().filter_map(|member| member.target.database_path());
                    for database in databases {
                        check_untracked(&repository, database).await?;
                    }
                    Target::Repository { path }
                }
                "directory" => {
                    access::unshared_directory(supervisor, &real).await?;
                    sources::check_directory(host, &real)?;
                    Target::Directory { path }
                }
                _ => {
                    for member in &group.members {
                        let Target::Repository { path } = &member.target else { continue };
                        if real.starts_with(path) {
                            let repository = Repository::open(&access::git(host).await?, Path::new(path))?;
                            access::trusted_repository(supervisor, actor.uid, &repository).await?;
                            check_untracked(&repository, &real).await?;
                        }
                    }
                    match blocking(move || host_database::present(&real)).await? {
                        Present::Whole => {}
                        Present::Absent => return Err(Error::not_found(format!("there is no {path}"))),
                        Present::Damaged(why) => {
                            return Err(Error::refused(why).reason("no_database").hint("give an SQLite database"));
                        }
                    }
                    Target::Database { path }
                }
            };
            (target, file)
        }
        other => {
            let kinds = "kernel, repository, database, directory, command, postgres or server";
            return Err(Error::invalid(format!("{other:?} is no kind of member: {kinds}")));
        }
    };
    if group.members.iter().any(|member| member.target == target) {
        return Err(Error::already_exists(format!("group {} has it already", group.name)));
    }
    check_overlap(&group, &target)?;
    check_single(host, &list(supervisor, actor.uid).await?, &target)?;
    let name = if name.is_empty() { own_name.as_str() } else { name };
    let member = Member { name: checked_name(name)?.to_string(), target };
    // Last: it works where an unfinished restore of another group may.
    if matches!(member.target, Target::Postgres { .. } | Target::Server { .. }) {
        sources::check_reachable(host, group.id, actor.uid, &member).await?;
    }
    let notes = notes(host, actor, "group.add", format!("{}: {} {}", group.name, member.target.kind(), member.name));
    host.catalog.add_member(group.id, member.clone(), notes).await?;
    Ok(member)
}

/// Refuses a database that git tracks in a repository of the group. A freeze leaves its files out of the repository, but
/// every command of git that changes the work tree would write them under the programs that have them open.
async fn check_untracked(repository: &Repository, database: &Path) -> Result<()> {
    let tracked = repository.tracked(&database_files(database)).await?;
    let Some(name) = tracked.first() else { return Ok(()) };
    Err(Error::refused(format!("git tracks {name} in {}", repository.path().display()))
        .reason("database_tracked")
        .hint(format!("git would write it while it is open: `git rm --cached {name}`, ignore it, and commit that")))
}

/// Refuses a directory with another member in it: a restore exchanges the directory as a whole.
pub(super) fn check_overlap(group: &Group, target: &Target) -> Result<()> {
    let path = |target: &Target| match target {
        Target::Repository { path } | Target::Database { path } | Target::Directory { path } => {
            Some(Path::new(path).to_owned())
        }
        Target::Kernel { .. } | Target::Command { .. } | Target::Postgres { .. } | Target::Server { .. } => None,
    };
    let is_directory = |target: &Target| matches!(target, Target::Directory { .. });
    let Some(new) = path(target) else { return Ok(()) };
    for member in &group.members {
        let Some(old) = path(&member.target) else { continue };
        if (is_directory(target) && old.starts_with(&new)) || (is_directory(&member.target) && new.starts_with(&old)) {
            return Err(Error::refused(format!("{} and member {} overlap", new.display(), member.name))
                .reason("member_overlap")
                .hint("a restore exchanges a directory as a whole: give directories without other members in them"));
        }
    }
    Ok(())
}

/// Refuses a source whose restore keeps its former content under a name of its own, if another group has it, too; and a
/// directory around a database of another group.
pub(super) fn check_single(host: &Host, groups: &[Group], target: &Target) -> Result<()> {
    let data = |server: &str| host.config.postgres.get(server).map(|server| server.data.display().to_string());
    let exchanged = |target: &Target| match target {
        Target::Directory { path } => Some(path.clone()),
        Target::Postgres { connection } => Some(connection.clone()),
        // The same data may have been configured under another name.
        Target::Server { server } => Some(data(server).unwrap_or_else(|| server.clone())),
        Target::Kernel { .. } | Target::Repository { .. } | Target::Database { .. } | Target::Command { .. } => None,
    };
    let directory = |target: &Target| match target {
        Target::Directory { path } => Some(Path::new(path).to_owned()),
        _ => None,
    };
    let is_around = |directory: Option<PathBuf>, database: Option<&Path>| {
        directory.zip(database).is_some_and(|(directory, database)| database.starts_with(directory))
    };
    for group in groups {
        let is_shared = |old: &Member| {
            is_around(directory(target), old.target.database_path())
                || is_around(directory(&old.target), target.database_path())
        };
        if let Some(old) = group.members.iter().find(|old| is_shared(old)) {
            return Err(Error::refused(format!("the member overlaps {} of group {}", old.name, group.name))
                .reason("member_overlap")
                .hint("a restore exchanges a directory under the programs that have a database in it open"));
        }
    }
    let Some(new) = exchanged(target) else { return Ok(()) };
    for group in groups {
        for old in group.members.iter().filter_map(|member| exchanged(&member.target)) {
            if Path::new(&new).starts_with(&old) || Path::new(&old).starts_with(&new) {
                return Err(Error::already_exists(format!("group {} has {old} already", group.name)));
            }
        }
    }
    Ok(())
}

async fn may_be_member(supervisor: &Supervisor, kernel: &Kernel) -> Result<()> {
    let name = kernel.spec().name.clone();
    kernel.check_here().map_err(|error| {
        let hint = format!("make the group on that host; `ryokan rm {name}` deletes what is left here");
        Error { message: format!("{}, and cannot be a member here", error.message), ..error }.hint(hint)
    })?;
    supervisor.refuse_in_handover(kernel).await.map_err(|error| match error.reason.as_str() {
        "handover" => {
            let hint = format!("{}; `ryokan teleport {name} --abort` cancels it", error.hint);
            Error { message: format!("{}, and cannot be a member before its end", error.message), ..error }.hint(hint)
        }
        _ => error,
    })?;
    if kernel.thread_of.is_some() {
        return Err(Error::refused(format!("{name} works in the workspace of {}", kernel.files().spec().name))
            .reason("thread")
            .hint("add the kernel whose files they are"));
    }
    if kernel.spec().ephemeral {
        return Err(Error::refused(format!("kernel {name} is ephemeral: it is removed with its client's connection"))
            .reason("ephemeral"));
    }
    Ok(())
}

/// Removes a member, or with an empty `member` the group with its freezes.
///
/// # Errors
/// `notFound`, `conflict` while an operation has not ended.
pub async fn remove(supervisor: &Supervisor, group: &str, member: &str, actor: &Actor) -> Result<()> {
    let host = supervisor.host();
    let (group, _turn) = super::turn(supervisor, actor.uid, group).await?;
    if !member.is_empty() {
        let notes = notes(host, actor, "group.drop", format!("{}: {member}", group.name));
        if !group.unfinished {
            pending::resume(host, |id| id == group.id).await?;
        }
        return match host.catalog.remove_member(group.id, member.to_owned(), notes).await?.value {
            true => {
                let removed = group.members.iter().filter(|one| one.name == member);
                import_end::forget_histories(supervisor, &group, removed.clone()).await;
                forget(host, removed.clone());
                pauses::refresh(supervisor, removed, actor).await
            }
            false => Err(Error::not_found(format!("group {} has no member {member:?}", group.name))),
        };
    }
    if !group.unfinished {
        pending::resume(host, |id| id == group.id).await?;
    }
    remove_whole(supervisor, &group, false, notes(host, actor, "group.remove", group.name.clone())).await?;
    pauses::refresh(supervisor, group.members.iter(), actor).await
}

/// Removes what is remembered of members that are removed.
fn forget<'a>(host: &Host, members: impl Iterator<Item = &'a Member>) {
    for member in members {
        if let Target::Directory { path } = &member.target {
            sources::forget_directory(host, Path::new(path));
        }
        if let Target::Server { server } = &member.target
            && let Some(server) = host.config.postgres.get(server)
        {
            sources::forget_directory(host, &server.data);
        }
    }
}

/// Removes a group with its freezes although a freeze or a restore of it has not ended. Its members stay as they are:
/// nothing is brought back. Returns the directories of imported repositories that are not in their places.
///
/// # Errors
/// `notFound`, `conflict` if every operation has ended.
pub async fn abandon(supervisor: &Supervisor, group: &str, actor: &Actor) -> Result<Vec<String>> {
    let host = supervisor.host();
    let (group, _turn) = super::turn(supervisor, actor.uid, group).await?;
    if !group.unfinished {
        return Err(Error::conflict(format!("every operation of group {} has ended", group.name))
            .reason("group_finished")
            .hint("remove it without --abandon"));
    }
    let intent = host.catalog.intents().await?.into_iter().find(|(id, _)| *id == group.id);
    let unplaced = match intent {
        // Half of a group would be left.
        Some((id, Intent::Import { kernels, repositories, completed })) => {
            import_end::withdraw(supervisor, id, (&kernels, &repositories, &completed)).await?;
            return Ok(Vec::new());
        }
        Some((_, Intent::Place { repositories })) => repositories,
        Some((_, Intent::Freeze { checkpoints, .. })) => {
            withdraw(supervisor, checkpoints).await?;
            Vec::new()
        }
        Some((_, Intent::Restore { .. })) | None => Vec::new(),
    };
    // The user may work there.
    let left: Vec<String> =
        unplaced.into_iter().map(|one| one.beside).filter(|beside| Path::new(beside).exists()).collect();
    let notes = notes(host, actor, "group.abandon", group.name.clone());
    let held = operation_turn::kernels_of_half_restored(host, group.id).await?;
    remove_whole(supervisor, &group, true, notes).await?;
    for member in &group.members {
        let scratch = super::scratch(host, group.id).join(&member.name);
        // Nothing is brought back, but nothing is left quiesced.
        if let Ok(Some(mut source)) = sources::open(host, group.uid, member, scratch).await {
            source.discard().await;
        }
    }
    let _ = pending::resume(host, |id| id == group.id).await;
    let _ = std::fs::remove_dir_all(super::scratch(host, group.id));
    drop(host.parked.borrow_mut().remove(&group.id));
    recover::admit(supervisor, &group, &held);
    pauses::refresh(supervisor, group.members.iter(), actor).await?;
    host.events.publish("", "group_abandoned", serde_json::json!({ "group": group.name }));
    Ok(left)
}

/// Removes the checkpoints of a freeze that is abandoned. Those that stay are left to retention.
async fn withdraw(supervisor: &Supervisor, checkpoints: Vec<(KernelId, CheckpointId)>) -> Result<()> {
    let mut left = Vec::new();
    for (id, checkpoint) in checkpoints {
        if let Some(kernel) = supervisor.get(id)
            && let Err(error) = held::withdraw(&kernel, checkpoint).await
        {
            tracing::warn!(kernel = %kernel.spec().name, %checkpoint, %error, "a checkpoint of an abandoned freeze stays");
            left.push((id, checkpoint));
        }
    }
    if left.is_empty() {
        return Ok(());
    }
    supervisor.host().catalog.begin_pins(left.clone()).await?;
    removal::unpin(supervisor, left).await;
    Ok(())
}

async fn remove_whole(supervisor: &Supervisor, group: &Group, abandon: bool, notes: Notes) -> Result<()> {
    let host = supervisor.host();
    let freezes = host.catalog.freezes(group.id).await?;
    let repositories = kept_commits::repositories(host, group, &freezes).await;
    // The marks of a collection under way must see each name that is removed now.
    let _names = host.upkeep.names.read().await;
    let removed = host.catalog.remove_group(group.id, abandon, notes).await?;
    host.upkeep.gone.set(host.upkeep.gone.get() + 1);
    import_end::forget_histories(supervisor, group, group.members.iter()).await;
    kept_commits::release_in(supervisor, group, None, repositories).await;
    forget(host, group.members.iter());
    removal::unpin(supervisor, removed.value).await;
    Ok(())
}
