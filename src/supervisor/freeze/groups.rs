//! Groups and their members.

use std::path::Path;

use super::databases::LiveDatabase;
use super::objects::blocking;
use super::{access, recover};
use crate::catalog::Notes;
use crate::catalog::host_database::{self, Present};
use crate::core::audit::NewAudit;
use crate::core::error::{Error, Result};
use crate::core::freeze::{Group, Member, Target};
use crate::core::ids::GroupId;
use crate::core::name::KernelName;
use crate::git::Repository;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

fn checked_name(name: &str) -> Result<KernelName> {
    name.parse().map_err(|error: crate::core::name::NameError| {
        Error::invalid(error.to_string().replace("a kernel's name", "a name"))
    })
}

fn notes(host: &Host, actor: &Actor, action: &str, detail: String) -> Notes {
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
    let found = list(supervisor, uid).await?.into_iter().find(|group| group.name == name);
    found.ok_or_else(|| {
        Error::not_found(format!("there is no group {name:?}")).hint(format!("create it: ryokan group new {name}"))
    })
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
/// `notFound`, `alreadyExists`, `refused` (rules for host paths), `unsupported`, `invalidArgument`.
pub async fn add(
    supervisor: &Supervisor,
    group: &str,
    (kind, target): (&str, &str),
    name: &str,
    actor: &Actor,
) -> Result<Member> {
    let host = supervisor.host();
    let _turn = super::turn(host).await?;
    let group = find(supervisor, actor.uid, group).await?;
    let (target, own_name) = match kind {
        "kernel" => {
            let kernel = supervisor.find(actor.uid, target)?;
            may_be_member(&kernel)?;
            (Target::Kernel { id: kernel.id }, kernel.spec().name.to_string())
        }
        "repository" | "database" => {
            let real = access::checked(host, actor.uid, Path::new(target))?;
            let file = real.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let path = real.display().to_string();
            let target = match kind {
                "repository" => {
                    let repository = Repository::open(&access::git(host).await?, &real)?;
                    access::trusted_repository(supervisor, actor.uid, &repository).await?;
                    Target::Repository { path }
                }
                _ => {
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
            return Err(Error::invalid(format!("{other:?} is no kind of member: kernel, repository or database")));
        }
    };
    if group.members.iter().any(|member| member.target == target) {
        return Err(Error::already_exists(format!("group {} has it already", group.name)));
    }
    let name = if name.is_empty() { own_name.as_str() } else { name };
    let member = Member { name: checked_name(name)?.to_string(), target };
    let notes = notes(host, actor, "group.add", format!("{}: {} {}", group.name, member.target.kind(), member.name));
    host.catalog.add_member(group.id, member.clone(), notes).await?;
    Ok(member)
}

fn may_be_member(kernel: &Kernel) -> Result<()> {
    let name = &kernel.spec().name;
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
    let _turn = super::turn(host).await?;
    let group = find(supervisor, actor.uid, group).await?;
    if !member.is_empty() {
        let notes = notes(host, actor, "group.drop", format!("{}: {member}", group.name));
        return match host.catalog.remove_member(group.id, member.to_owned(), notes).await?.value {
            true => Ok(()),
            false => Err(Error::not_found(format!("group {} has no member {member:?}", group.name))),
        };
    }
    remove_whole(supervisor, &group, false, notes(host, actor, "group.remove", group.name.clone())).await
}

/// Removes a group with its freezes although a freeze or a restore of it has not ended. Its members stay as they are:
/// nothing is brought back.
///
/// # Errors
/// `notFound`, `conflict` if every operation has ended.
pub async fn abandon(supervisor: &Supervisor, group: &str, actor: &Actor) -> Result<()> {
    let host = supervisor.host();
    let _turn = super::turn(host).await?;
    let group = find(supervisor, actor.uid, group).await?;
    if !group.unfinished {
        return Err(Error::conflict(format!("every operation of group {} has ended", group.name))
            .reason("group_finished")
            .hint("remove it without --abandon"));
    }
    let notes = notes(host, actor, "group.abandon", group.name.clone());
    remove_whole(supervisor, &group, true, notes).await?;
    for member in &group.members {
        if let Target::Database { path } = &member.target {
            LiveDatabase::new(path.into()).discard();
        }
    }
    let _ = std::fs::remove_dir_all(super::scratch(host, group.id));
    drop(host.parked.borrow_mut().remove(&group.id));
    recover::set_waiting(supervisor, &group, |_| true, false);
    host.events.publish("", "group_abandoned", serde_json::json!({ "group": group.name }));
    Ok(())
}

async fn remove_whole(supervisor: &Supervisor, group: &Group, abandon: bool, notes: Notes) -> Result<()> {
    let host = supervisor.host();
    // The marks of a collection under way must see each name that is removed now.
    let _names = host.upkeep.names.read().await;
    let removed = host.catalog.remove_group(group.id, abandon, notes).await?;
    host.upkeep.gone.set(host.upkeep.gone.get() + 1);
    for (kernel, checkpoint) in removed.value {
        // Retention applies to them again.
        if let Some(kernel) = supervisor.get(kernel) {
            kernel.records.pin_checkpoint(checkpoint, false).await?;
        }
    }
    Ok(())
}
