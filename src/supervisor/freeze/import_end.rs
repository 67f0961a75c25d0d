//! How an import of a group ends: withdrawn as a whole, or with its repositories in their places.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::member_places::Placed;
use super::{access, objects};
use crate::catalog::Notes;
use crate::core::audit::NewAudit;
use crate::core::error::{Error, Result};
use crate::core::freeze::{Group, Member, NewRepository, Target};
use crate::core::ids::{GroupId, KernelId};
use crate::git::Repository;
use crate::supervisor::host::Host;
use crate::supervisor::registry::Supervisor;
use crate::sys::fs::{remove_tree, rename_new_durable};

/// Attempts to remove a directory in which another program leaves files.
const REMOVALS: usize = 5;

/// The directory of a repository.
pub(super) fn repository_of(member: &Member) -> Option<String> {
    match &member.target {
        Target::Repository { path } => Some(path.clone()),
        _ => None,
    }
}

/// The repositories that are created: each is made beside its place, under a name that a freeze of a repository around it
/// leaves out.
pub(super) fn new_repositories(group: GroupId, placed: &[Placed]) -> Vec<NewRepository> {
    let new = placed.iter().filter(|one| one.is_new).filter_map(|one| repository_of(&one.member));
    let beside = |(n, place): (usize, String)| {
        let beside = Path::new(&place).with_file_name(format!(".{group}-{n}.ryokan")).display().to_string();
        NewRepository { beside, place }
    };
    new.enumerate().map(beside).collect()
}

/// The name that keeps the history of a group in a repository that was there.
pub(super) fn reference(group: GroupId) -> String {
    format!("refs/ryokan/{group}")
}

/// Removes everything of an import that did not become visible: its kernels, new repositories, and references in those
/// that were there. May be repeated.
///
/// # Errors
/// Those of kernels and files: the intent stays then.
pub(super) async fn withdraw(
    supervisor: &Supervisor,
    group: GroupId,
    (kernels, repositories, completed): (&[KernelId], &[NewRepository], &[String]),
) -> Result<()> {
    let host = supervisor.host();
    for kernel in kernels.iter().filter_map(|id| supervisor.get(*id)) {
        if let Err(error) = supervisor.withdraw(&kernel, host.own_actor()).await {
            // One that could not be removed may have been loaded anew.
            kernels.iter().filter_map(|id| supervisor.get(*id)).for_each(|kernel| kernel.set_awaits_group(true));
            return Err(error);
        }
    }
    remove_unplaced(host, repositories).await?;
    for path in completed {
        forget_history(supervisor, nix::unistd::geteuid().as_raw(), group, Path::new(path)).await;
    }
    let line = host.line(&host.own_actor(), "group.withdraw", None);
    let notes = Notes { events: Vec::new(), audit: vec![NewAudit { detail: group.to_string(), ..line }] };
    host.catalog.remove_group(group, true, notes).await?;
    Ok(())
}

/// Removes the new repositories of an import that is withdrawn.
///
/// # Errors
/// File errors; `deadline` if a git command of a former daemon does not end.
async fn remove_unplaced(host: &Host, repositories: &[NewRepository]) -> Result<()> {
    if repositories.is_empty() {
        return Ok(());
    }
    // Waits for those of a former daemon, which may still write there.
    access::git(host).await?;
    let folders: Vec<PathBuf> = repositories.iter().map(|one| PathBuf::from(&one.beside)).collect();
    objects::blocking(move || folders.iter().try_for_each(|folder| remove_beside(folder))).await
}

fn remove_beside(folder: &Path) -> Result<()> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        match remove_tree(folder) {
            Ok(()) => return Ok(()),
            Err(error) => match error.kind() {
                // Its file system may be unmounted; a directory on which it is mounted hides that.
                ErrorKind::NotFound if !folder.parent().is_some_and(Path::is_dir) => {
                    return Err(without_parent(folder));
                }
                ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::InvalidFilename => return Ok(()),
                // Another program looked into it, and left a file.
                ErrorKind::DirectoryNotEmpty if attempts < REMOVALS => {}
                _ => return Err(Error::unavailable(format!("{}: {error}", folder.display()))),
            },
        }
    }
}

fn without_parent(folder: &Path) -> Error {
    let parent = folder.parent().unwrap_or(folder).display();
    Error::unavailable(format!("there is no directory {parent}, in which a repository of an imported group was made"))
        .hint(format!("mount its file system, or make {parent}; the next operation of the group goes on"))
}

/// Puts the new repositories of a visible group into their places, and ends its intent. May be repeated.
///
/// # Errors
/// File errors, and if a place is taken by now: the intent stays then.
pub(super) async fn place(host: &Host, group: GroupId, repositories: &[NewRepository]) -> Result<()> {
    let all = repositories.to_vec();
    objects::blocking(move || all.iter().try_for_each(put_in_place)).await?;
    Ok(host.catalog.clear_intent(group).await?)
}

fn put_in_place(new: &NewRepository) -> Result<()> {
    let (from, to) = (Path::new(&new.beside), Path::new(&new.place));
    match std::fs::symlink_metadata(from) {
        // An earlier attempt put it there.
        Err(error) if error.kind() == ErrorKind::NotFound && to.is_dir() => return Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(lost(from, to)),
        Err(error) => return Err(Error::unavailable(format!("{}: {error}", from.display()))),
        Ok(_) => {}
    }
    rename_new_durable(from, to, "freeze.import.place").map_err(|error| match error.source.kind() {
        ErrorKind::AlreadyExists => {
            Error::conflict(format!("there is a {} by now, and the repository is in {}", to.display(), from.display()))
                .hint("move it away; the next operation of the group puts the repository there")
        }
        _ => Error::unavailable(error.to_string()),
    })
}

fn lost(from: &Path, to: &Path) -> Error {
    Error::unavailable(format!("the imported repository is neither in {} nor in {}", from.display(), to.display()))
        .hint("mount its file system, or bring the repository back, and the next operation of the group goes on; or: ryokan group rm --abandon")
}

/// Removes what refers to the history of an imported group in repositories that are no members any more.
pub(super) async fn forget_histories<'a>(
    supervisor: &Supervisor,
    group: &Group,
    members: impl Iterator<Item = &'a Member>,
) {
    for path in members.filter_map(repository_of) {
        forget_history(supervisor, group.uid, group.id, Path::new(&path)).await;
    }
}

/// Removes what refers to the history of an imported group, so that it is garbage of git.
async fn forget_history(supervisor: &Supervisor, uid: u32, group: GroupId, path: &Path) {
    let host = supervisor.host();
    if !path.exists() {
        return;
    }
    let forgetting = async {
        access::recheck(host, uid, path)?;
        let repository = Repository::open(&access::git(host).await?, path)?;
        access::trusted_repository(supervisor, uid, &repository).await?;
        repository.drop_history(&reference(group)).await?;
        for inner in repository.inner().await? {
            inner.drop_history(&reference(group)).await?;
        }
        Ok::<_, Error>(())
    };
    if let Err(error) = forgetting.await {
        let (path, reference) = (path.display().to_string(), reference(group));
        tracing::warn!(path, reference, %error, "the reference to a group's history may be left");
    }
}
