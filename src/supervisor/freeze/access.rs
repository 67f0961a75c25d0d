//! Which host paths a group may name.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::objects::blocking;
use crate::catalog::host_database;
use crate::core::error::{Error, Result};
use crate::git::{Git, Repository};
use crate::programs::Programs;
use crate::supervisor::host::{Host, resolve_missing};
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

/// Checks that a group of `uid` may use this path; returns it without symbolic links.
///
/// # Errors
/// `unsupported` for another user than the daemon's; `refused` by the rules for host paths, or for a file of another
/// user; `notFound`.
pub(super) fn checked(host: &Host, uid: u32, path: &Path) -> Result<PathBuf> {
    own_user(uid)?;
    host.check_source(uid, path)
}

/// Checks that a group is one of the daemon's own user.
///
/// # Errors
/// `unsupported` (`other_user`).
pub(super) fn own_user(uid: u32) -> Result<()> {
    match uid == nix::unistd::geteuid().as_raw() {
        true => Ok(()),
        false => Err(Error::unsupported("this daemon cannot act on host paths as another user")
            .reason("other_user")
            .hint("use a daemon of your own: run ryokan without --system")),
    }
}

/// The host paths of a kernel: each with whether the kernel can write it.
async fn paths_of(kernel: &Kernel) -> Result<Vec<(PathBuf, bool)>> {
    let spec = kernel.spec();
    let own = spec.paths.iter();
    let mut paths: Vec<(PathBuf, bool)> =
        own.map(|allowed| (allowed.real.clone().unwrap_or_else(|| allowed.path.clone()), allowed.writable)).collect();
    let (mounts, _) = kernel.records.grants().await?;
    paths.extend(
        mounts.into_iter().map(|given| (PathBuf::from(given.real.unwrap_or(given.mount.source)), given.mount.writable)),
    );
    Ok(paths)
}

/// Checks that a directory can be exchanged for another: no kernel has it or a part of it mounted, and none can write
/// beside it.
///
/// # Errors
/// `refused` (`shared_with_kernel`), and database errors.
pub(super) async fn unshared_directory(supervisor: &Supervisor, path: &Path) -> Result<()> {
    for kernel in supervisor.kernels() {
        let paths = paths_of(&kernel).await?;
        // A mount stays at the former directory after an exchange.
        if paths.iter().any(|(real, writable)| real.starts_with(path) || (*writable && path.starts_with(real))) {
            let name = &kernel.spec().name;
            return Err(Error::refused(format!("kernel {name} uses {}", path.display()))
                .reason("shared_with_kernel")
                .hint("a restore exchanges the directory, which a mount does not follow: unmount it"));
        }
    }
    Ok(())
}

/// Checks that a path and the data directory of each configured PostgreSQL server are apart: a restore of one would change
/// the other under its server.
///
/// # Errors
/// `refused` (`member_overlap`).
pub(super) fn apart_from_servers(host: &Host, path: &Path) -> Result<()> {
    for (name, server) in &host.config.postgres {
        let real = server.data.canonicalize().unwrap_or_else(|_| server.data.clone());
        if [&server.data, &real].iter().any(|data| path.starts_with(data) || data.starts_with(path)) {
            return Err(Error::refused(format!("{} and the data of PostgreSQL server {name} overlap", path.display()))
                .reason("member_overlap")
                .hint(format!("add the server as a whole (--server {name}), or remove [postgres.{name}]")));
        }
    }
    Ok(())
}

/// Checks a recorded path again. A wrecked member may be gone; the folders above its place are checked then.
///
/// # Errors
/// As [`checked`], and `refused` if it leads elsewhere now.
pub(super) fn recheck(host: &Host, uid: u32, path: &Path) -> Result<()> {
    let real = match checked(host, uid, path) {
        Err(error) if error.reason == "source_gone" => resolve_missing(path),
        found => Some(found?),
    };
    // A link in the place of a folder would make the restore write elsewhere.
    match real.filter(|real| real == path) {
        Some(real) => host.check_real_source(uid, path, real).map(drop),
        None => Err(Error::refused(format!("{} leads elsewhere than when it was added", path.display()))
            .reason("source_moved")
            .hint("put it back in its place, or remove the member and add it again")),
    }
}

/// Checks that git may run in a repository: it is the user's own, no kernel can write in it, and its configuration runs no
/// programs.
///
/// # Errors
/// `refused`, `notFound`, and database errors.
pub(super) async fn trusted_repository(supervisor: &Supervisor, uid: u32, repository: &Repository) -> Result<()> {
    let path = repository.path();
    owned(&path.join(".git"), uid)?;
    unwritten(supervisor, path).await?;
    // A linked work tree uses settings and objects of the repository.
    if let Some(shared) = repository.shared_dir() {
        let host = supervisor.host();
        recheck(host, uid, shared)?;
        apart_from_servers(host, shared)?;
        owned(shared, uid)?;
        owned(&shared.join("worktrees"), uid)?;
        unwritten(supervisor, shared).await?;
    }
    // What a kernel wrote before its mount was removed is still there.
    repository.check_settings().await
}

fn owned(path: &Path, uid: u32) -> Result<()> {
    let owner = host_database::owner(path)?;
    match owner == uid {
        true => Ok(()),
        false => Err(Error::refused(format!("{} belongs to user {owner}", path.display())).reason("other_owner").hint(
            "git reads a repository's configuration, which may run programs: only your own repositories are used",
        )),
    }
}

/// Checks that no kernel can write in a directory, which need not exist, or exchange it.
///
/// # Errors
/// `refused` (`shared_with_kernel`), and database errors.
pub(super) async fn unwritten(supervisor: &Supervisor, path: &Path) -> Result<()> {
    for kernel in supervisor.kernels() {
        let mut writable = paths_of(&kernel).await?.into_iter().filter(|(_, writable)| *writable).map(|(real, _)| real);
        if writable.any(|real| path.starts_with(&real) || real.starts_with(path)) {
            let name = &kernel.spec().name;
            return Err(Error::refused(format!("kernel {name} can write {}", path.display()))
                .reason("shared_with_kernel")
                .hint("its code could make git run programs outside of the sandbox: mount it read-only, or unmount it and check what was written"));
        }
    }
    Ok(())
}

/// Checks that only this user and root can exchange a path or what is above it: git runs there before it can be checked.
///
/// # Errors
/// `refused` (`shared_folder`), and file errors.
pub(super) fn private_ancestors(path: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    for folder in path.ancestors().skip(1) {
        let meta = std::fs::symlink_metadata(folder)
            .map_err(|error| Error::unavailable(format!("cannot look at {}: {error}", folder.display())))?;
        let is_own = meta.uid() == 0 || meta.uid() == nix::unistd::geteuid().as_raw();
        let (is_shared, is_sticky) = (meta.mode() & 0o022 != 0, meta.mode() & libc::S_ISVTX != 0);
        if !meta.is_dir() || !is_own || (is_shared && !is_sticky) {
            return Err(Error::refused(format!("another user can replace what is in {}", folder.display()))
                .reason("shared_folder")
                .hint(
                    "give a place in a folder that only you can write (`chmod go-w`), or a repository that is there",
                ));
        }
    }
    Ok(())
}

/// Git, for operations on groups.
///
/// # Errors
/// `deadline` if a git command of a former daemon does not end.
pub(super) async fn git(host: &Host) -> Result<Rc<Git>> {
    let folder = host.environment.data.join("groups");
    // Only once: a second log would wait for the lock of the first.
    let open = || async move { blocking(move || Git::open(groups_folder(folder)?.join("git.log"))).await.map(Rc::new) };
    host.git.get_or_try_init(open).await.cloned()
}

/// Programs of data sources.
///
/// # Errors
/// File errors.
pub(super) async fn programs(host: &Host) -> Result<Rc<Programs>> {
    let folder = host.environment.data.join("groups");
    let open = || async move {
        blocking(move || Programs::open(groups_folder(folder)?.join("programs.log"))).await.map(Rc::new)
    };
    host.programs.get_or_try_init(open).await.cloned()
}

/// Makes the folder for operations on groups.
fn groups_folder(folder: PathBuf) -> Result<PathBuf> {
    crate::sys::fs::create_dir_durable(&folder, 0o700, "freeze.groups.dir")
        .map_err(|error| Error::unavailable(error.to_string()))?;
    Ok(folder)
}
