//! Where the members of an imported group come to be on this host: what a client names is checked as for a new member.
//!
//! Paths of the source host mean nothing here, whatever exists under the same name, so each member outside of a kernel
//! needs a place of its own. Nothing is written here.

use std::path::{Path, PathBuf};

use super::groups::{check_overlap, check_single, checked_name};
use super::objects::blocking;
use super::{access, sources};
use crate::catalog::host_database::{self, Present};
use crate::core::error::{Error, Result};
use crate::core::freeze::portable::{GroupArrival, former_place};
use crate::core::freeze::postgres::{Connection, ConnectionError};
use crate::core::freeze::{Captured, FreezeManifest, Group, Member, Part, Target};
use crate::git::Repository;
use crate::supervisor::registry::{ReservedName, Supervisor};

/// One member with its place.
pub(super) struct Placed {
    /// What the freeze has of it.
    pub part: Part,
    /// The member.
    pub member: Member,
    /// The name of a new kernel.
    pub reserved: Option<ReservedName>,
    /// Whether a repository is created.
    pub is_new: bool,
}

/// Decides the place of each member; `group` gets the members. Returns them, without those that are left out.
///
/// # Errors
/// `refused` (`place`) if a member has none; `alreadyExists`, and errors of the rules for members.
pub(super) async fn all(
    supervisor: &Supervisor,
    group: &mut Group,
    manifest: &FreezeManifest,
    arrival: &GroupArrival,
) -> Result<Vec<Placed>> {
    check_names(manifest, arrival)?;
    let place = |part: &Part| arrival.places.iter().find(|(name, _)| *name == part.name).map(|(_, place)| &**place);
    let is_kept = |part: &&Part| !arrival.left_out.contains(&part.name);
    let parts: Vec<&Part> = manifest.parts.iter().filter(is_kept).collect();
    if parts.is_empty() {
        return Err(Error::invalid("no member is left"));
    }
    let missing = parts.iter().filter(|part| place(part).is_none() && part.captured.kind() != "kernel");
    let missing: Vec<String> = missing
        .map(|part| format!("{} ({} {})", part.name, part.captured.kind(), former_place(&part.captured)))
        .collect();
    if !missing.is_empty() {
        return Err(Error::refused(format!("members without a place on this host: {}", missing.join(", ")))
            .reason("place")
            .hint("name it with --place MEMBER=PATH, or leave the member out with --leave-out MEMBER"));
    }
    let others = super::list(supervisor, group.uid).await?;
    let mut placed: Vec<Placed> = Vec::new();
    for part in parts {
        let made: Vec<PathBuf> = placed.iter().filter(|one: &&Placed| one.is_new).filter_map(made_path).collect();
        let one = place_one(supervisor, group, (part, place(part), arrival.moved), &made).await.map_err(|error| {
            let message = format!("member {}: {}", part.name, error.message);
            Error { message, ..error }
        })?;
        let target = &one.member.target;
        let path = host_path(target);
        let is_same = |other: &Target| other == target || (path.is_some() && host_path(other) == path);
        if group.members.iter().any(|member| is_same(&member.target)) {
            return Err(Error::already_exists(format!("member {}: another one has its place", part.name)));
        }
        check_overlap(group, target)?;
        check_single(supervisor.host(), &others, target)?;
        group.members.push(one.member.clone());
        placed.push(one);
    }
    Ok(placed)
}

/// Checks that a client names members of the file only, each once.
fn check_names(manifest: &FreezeManifest, arrival: &GroupArrival) -> Result<()> {
    let mut seen = std::collections::HashSet::new();
    for name in arrival.places.iter().map(|(name, _)| name).chain(&arrival.left_out) {
        if !manifest.parts.iter().any(|part| part.name == *name) {
            return Err(Error::invalid(format!("the file has no member {name:?}")).reason("place"));
        }
        if !seen.insert(name) {
            return Err(Error::invalid(format!("member {name} is named twice")).reason("place"));
        }
    }
    Ok(())
}

async fn place_one(
    supervisor: &Supervisor,
    group: &Group,
    (part, place, moved): (&Part, Option<&str>, bool),
    made: &[PathBuf],
) -> Result<Placed> {
    let (host, uid) = (supervisor.host(), group.uid);
    let (mut reserved, mut is_new) = (None, false);
    let text = place.unwrap_or_default();
    let target = match &part.captured {
        Captured::Kernel { kernel, .. } if moved => Target::Kernel { id: *kernel },
        Captured::Kernel { kernel_name, .. } => {
            let name = checked_name(place.unwrap_or(kernel_name))?;
            if name.as_str() == group.name {
                return Err(Error::already_exists(format!("the group has the name {name}")));
            }
            if super::exists(supervisor, uid, name.as_str()).await {
                return Err(Error::already_exists(format!("there is a group {name}")));
            }
            reserved = Some(supervisor.reserve(uid, name)?);
            Target::Kernel { id: supervisor.new_id() }
        }
        Captured::Repository { .. } => {
            let path = real_path(supervisor, uid, text, &[])?;
            access::unwritten(supervisor, &path).await?;
            is_new = std::fs::symlink_metadata(&path).is_err();
            if is_new {
                access::private_ancestors(&path)?;
            } else {
                let repository = Repository::open(&access::git(host).await?, &path)?;
                access::trusted_repository(supervisor, uid, &repository).await?;
                // A reference to the history will be kept there.
                repository.refuse_linked()?;
            }
            Target::Repository { path: path.display().to_string() }
        }
        Captured::Database { .. } => {
            let path = real_path(supervisor, uid, text, made)?;
            let shown = path.display().to_string();
            match blocking(move || host_database::present(&path)).await? {
                Present::Whole | Present::Absent => {}
                Present::Damaged(why) => {
                    return Err(Error::refused(why).reason("no_database").hint("give another path"));
                }
            }
            Target::Database { path: shown }
        }
        Captured::Directory { .. } => {
            let path = real_path(supervisor, uid, text, made)?;
            access::unshared_directory(supervisor, &path).await?;
            if std::fs::symlink_metadata(&path).is_ok() {
                sources::check_directory(host, &path)?;
            }
            Target::Directory { path: path.display().to_string() }
        }
        Captured::Command { .. } => {
            access::own_user(uid)?;
            if !host.config.sources.contains_key(text) {
                return Err(Error::not_found(format!("no data source {text:?} is configured")).reason("source"));
            }
            Target::Command { source: text.to_owned() }
        }
        Captured::Postgres { .. } => {
            access::own_user(uid)?;
            let connection: Connection =
                text.parse().map_err(|error: ConnectionError| Error::invalid(error.to_string()))?;
            Target::Postgres { connection: connection.to_string() }
        }
        Captured::Server { .. } => {
            return Err(Error::unsupported("the files of a PostgreSQL server belong to the cluster that they are of")
                .reason("server")
                .hint("leave the member out with --leave-out, and move its databases as members of kind postgres"));
        }
    };
    let member = Member { name: part.name.clone(), target };
    if matches!(member.target, Target::Postgres { .. }) {
        sources::check_reachable(host, group.id, uid, &member).await?;
    }
    Ok(Placed { part: part.clone(), member, reserved, is_new })
}

/// A path that a member may have, without symbolic links; its last component may be missing. It may be in a repository
/// that is `made`.
fn real_path(supervisor: &Supervisor, uid: u32, text: &str, made: &[PathBuf]) -> Result<PathBuf> {
    let host = supervisor.host();
    access::own_user(uid)?;
    let real = host.check_new_source(uid, Path::new(text), made)?;
    access::apart_from_servers(host, &real)?;
    Ok(real)
}

fn made_path(one: &Placed) -> Option<PathBuf> {
    host_path(&one.member.target).map(PathBuf::from)
}

/// The path of a member outside of kernels.
fn host_path(target: &Target) -> Option<&str> {
    match target {
        Target::Repository { path } | Target::Database { path } | Target::Directory { path } => Some(path),
        Target::Kernel { .. } | Target::Command { .. } | Target::Postgres { .. } | Target::Server { .. } => None,
    }
}
