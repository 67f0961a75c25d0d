//! References in the repositories of members that keep the commits of freezes: `refs/ryokan/freezes/GROUP/FREEZE/MEMBER`.
//!
//! A freeze holds the work that no commit has; the commit itself stays in its repository. Without a reference, git would
//! collect it after an amend or a rebase. The name is made before the freeze is sealed, and removed with it. It belongs to
//! a member, because two of them may be work trees of one repository.

use std::collections::BTreeSet;
use std::path::Path;

use super::{access, manifest};
use crate::core::error::{Error, Result};
use crate::core::freeze::{Captured, Freeze, Group, Target};
use crate::core::ids::{FreezeId, GroupId};
use crate::git::Repository;
use crate::supervisor::host::Host;
use crate::supervisor::registry::Supervisor;

/// What the references of a group begin with, or those of one freeze.
fn folder(group: GroupId, freeze: Option<FreezeId>) -> String {
    let of = freeze.map(|freeze| format!("/{freeze}")).unwrap_or_default();
    format!("refs/ryokan/freezes/{group}{of}")
}

/// The reference of a member and its submodules.
pub(super) fn reference(group: GroupId, freeze: FreezeId, member: &str) -> String {
    format!("{}/{}", folder(group, Some(freeze)), &blake3::hash(member.as_bytes()).to_hex()[..16])
}

/// Removes the references of a group, or of one freeze of it, from a repository and its submodules. What fails is logged:
/// more is kept than is needed.
pub(super) async fn release(repository: &Repository, group: GroupId, freeze: Option<FreezeId>) {
    release_but(repository, &folder(group, freeze), &[]).await;
}

async fn release_but(repository: &Repository, name: &str, kept: &[String]) {
    let releasing = async {
        repository.release(name, kept).await?;
        for inner in repository.inner().await? {
            inner.release(name, kept).await?;
        }
        Ok::<_, Error>(())
    };
    if let Err(error) = releasing.await {
        let path = repository.path().display();
        tracing::warn!(%path, name, %error, "references that keep commits of a freeze may be left");
    }
}

/// The repositories that may have references of freezes: those of the freezes, and the members' of now, as one may have
/// been moved.
pub(super) async fn repositories(host: &Host, group: &Group, freezes: &[Freeze]) -> BTreeSet<String> {
    let mut found: BTreeSet<String> = group
        .members
        .iter()
        .filter_map(|member| match &member.target {
            Target::Repository { path } => Some(path.clone()),
            _ => None,
        })
        .collect();
    for freeze in freezes {
        // Without its manifest, the members of now are known.
        let Ok(manifest) = manifest(host, freeze).await else { continue };
        found.extend(manifest.parts.into_iter().filter_map(|part| match part.captured {
            Captured::Repository { path, .. } => Some(path),
            _ => None,
        }));
    }
    found
}

/// As [`release`], in repositories that no operation has open.
pub(super) async fn release_in(
    supervisor: &Supervisor,
    group: &Group,
    freeze: Option<FreezeId>,
    repositories: BTreeSet<String>,
) {
    release_but_in(supervisor, group, (&folder(group.id, freeze), &[]), repositories).await;
}

/// As [`release_in`], of all freezes of a group that are gone: a killed daemon may have left references.
///
/// # Errors
/// Database errors.
pub(super) async fn release_gone(supervisor: &Supervisor, group: &Group, repositories: BTreeSet<String>) -> Result<()> {
    let freezes = supervisor.host().catalog.freezes(group.id).await?;
    let kept: Vec<String> = freezes.iter().map(|freeze| folder(group.id, Some(freeze.id))).collect();
    release_but_in(supervisor, group, (&folder(group.id, None), &kept), repositories).await;
    Ok(())
}

async fn release_but_in(
    supervisor: &Supervisor,
    group: &Group,
    (name, kept): (&str, &[String]),
    repositories: BTreeSet<String>,
) {
    for path in repositories.iter().map(Path::new).filter(|path| path.exists()) {
        match open(supervisor, group.uid, path).await {
            Ok(repository) => release_but(&repository, name, kept).await,
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, name, %error, "references that keep commits of a freeze may be left");
            }
        }
    }
}

async fn open(supervisor: &Supervisor, uid: u32, path: &Path) -> Result<Repository> {
    let host = supervisor.host();
    access::recheck(host, uid, path)?;
    let repository = Repository::open(&access::git(host).await?, path)?;
    access::trusted_repository(supervisor, uid, &repository).await?;
    Ok(repository)
}

/// Says how a repository that is gone comes back.
pub(super) fn repository_gone(error: Error) -> Error {
    match error.reason.as_str() {
        "no_repository" => error.hint(
            "its commits are kept in the repository itself: clone it to that place from its remote or from an import of an \
             exported freeze, then try again",
        ),
        _ => error,
    }
}
