//! The staging tree: mounts that a root daemon's worker prepares before it changes its user. They
//! show the kernel's folder, and paths for which the configuration asks for it, with mapped owners.
//!
//! They are attached in a small tmpfs on top of the kernel's folder (for a warm worker, whose
//! folder may change, on its parent), in a mount namespace of our own. The working directory is in
//! it, because that survives the change of namespaces.
//!
//! ```text
//!  <kernel_dir> = tmpfs ┬ kernel   the kernel's folder, owner mapped
//!                       ├ shared   another kernel's workspace, if shared, owner mapped
//!                       ├ 0, 1, …  mapped mounts, by their number in the plan (files and folders)
//!                       └ live-N   mounts sent later
//! ```

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, fstat, mkdirat};
use nix::unistd::fchdir;

use super::host_path;
use super::layer::{Layer, SandboxError, failed};
use super::plan::{RunAs, SandboxPlan};
use crate::sys::mount::{attach, clone_tree, map_ids, new_file_system};
use crate::sys::namespace::in_new_user_namespace;

/// The kernel's folder in the staging tree.
pub(super) const KERNEL: &str = "kernel";
/// A shared workspace in the staging tree.
pub(super) const SHARED: &str = "shared";

/// Builds the staging tree in a new mount namespace and makes it the working directory. Needs root.
///
/// # Errors
/// If a source is missing or its file system cannot map owners.
pub(super) fn stage(plan: &SandboxPlan, run_as: RunAs) -> Result<(), SandboxError> {
    let owners = Owners::default();
    let kernel = openat(AT_FDCWD, &plan.kernel_dir, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(failed(Layer::IdMap, format_args!("cannot open {:?}", plan.kernel_dir)))?;
    let mut trees = vec![(String::from(KERNEL), map_owner(&kernel, &plan.kernel_dir, run_as, &owners)?)];
    if let Some(workspace) = &plan.workspace {
        trees.push((String::from(SHARED), owners.mapped(workspace, run_as)?));
    }
    for (i, planned) in plan.mounts.iter().enumerate().filter(|(_, planned)| planned.is_mapped) {
        trees.push((i.to_string(), owners.mapped(&planned.source, run_as)?));
    }
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed(Layer::MountNs, "cannot make a mount namespace"))?;
    // Mounts of the host still propagate here, ours do not propagate back.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
        .map_err(failed(Layer::MountNs, "cannot make the mounts private"))?;
    let (uid, gid) = (run_as.uid.to_string(), run_as.gid.to_string());
    let options = [("size", "256k"), ("nr_inodes", "512"), ("mode", "0700"), ("uid", &uid), ("gid", &gid)];
    let root = new_file_system("tmpfs", &options, 0).map_err(failed(Layer::IdMap, "cannot make a tmpfs"))?;
    let place = plan.staged_on.as_ref().unwrap_or(&plan.kernel_dir);
    let target = openat(AT_FDCWD, place, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(failed(Layer::IdMap, format_args!("cannot open {place:?}")))?;
    attach(root.as_fd(), target.as_fd()).map_err(failed(Layer::IdMap, "cannot attach the staging tree"))?;
    for (name, tree) in trees {
        hang(root.as_fd(), &name, &tree).map_err(failed(Layer::IdMap, format_args!("cannot stage {name}")))?;
    }
    fchdir(&root).map_err(failed(Layer::IdMap, "cannot enter the staging tree"))
}

/// Attaches a detached tree in the staging tree under a new name.
pub(super) fn hang(root: std::os::fd::BorrowedFd<'_>, name: &str, tree: &OwnedFd) -> std::io::Result<()> {
    let is_folder = fstat(tree)?.st_mode & libc::S_IFMT == libc::S_IFDIR;
    if is_folder {
        mkdirat(root, name, Mode::from_bits_truncate(0o700))?;
    } else {
        openat(root, name, OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC, Mode::from_bits_truncate(0o600))?;
    }
    let target = openat(root, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
    attach(tree.as_fd(), target.as_fd())
}

/// User and group on disk, and the visible ones.
type Map = [(u32, u32); 2];

/// User namespaces that exist only for their id maps. Creating one takes a process, which a large
/// daemon should not fork repeatedly, so each is kept.
#[derive(Debug, Default)]
pub struct Owners {
    made: RefCell<HashMap<Map, Rc<OwnedFd>>>,
}

impl Owners {
    /// A detached tree of the source, which no link may lead to, with the source's owner mapped to
    /// `run_as`. A root daemon sends it for [`MountSource::Tree`](super::MountSource). Forks an
    /// idle child once per pair of owners.
    ///
    /// # Errors
    /// If the source is missing, a link is on the way, or its file system cannot map owners.
    pub fn mapped(&self, source: &Path, run_as: RunAs) -> Result<OwnedFd, SandboxError> {
        map_owner(&host_path::open(Layer::IdMap, source)?, source, run_as, self)
    }

    fn namespace(&self, on_disk: (u32, u32), seen: (u32, u32)) -> std::io::Result<Rc<OwnedFd>> {
        if let Some(made) = self.made.borrow().get(&[on_disk, seen]) {
            return Ok(Rc::clone(made));
        }
        let made = Rc::new(mapping_namespace(on_disk, seen)?);
        self.made.borrow_mut().insert([on_disk, seen], Rc::clone(&made));
        Ok(made)
    }
}

/// As [`Owners::mapped`] for an open file; `source` is its name for messages.
fn map_owner(opened: &OwnedFd, source: &Path, run_as: RunAs, owners: &Owners) -> Result<OwnedFd, SandboxError> {
    let tree = clone_tree(opened.as_fd(), Path::new(""), true)
        .map_err(failed(Layer::IdMap, format_args!("cannot mount {source:?}")))
        .map_err(|error| {
            let weak = error.cause.contains("EPERM") || error.cause.contains("not permitted");
            error.hint(if weak {
                "ryokan is root without CAP_SYS_ADMIN: run it as an ordinary user, or give its container that capability"
            } else {
                "make sure that the path exists"
            })
        })?;
    let owner = fstat(opened).map_err(failed(Layer::IdMap, format_args!("cannot look at {source:?}")))?;
    if (owner.st_uid, owner.st_gid) == (run_as.uid, run_as.gid) {
        return Ok(tree);
    }
    let namespace = owners
        .namespace((owner.st_uid, owner.st_gid), (run_as.uid, run_as.gid))
        .map_err(failed(Layer::IdMap, "cannot make a user namespace to map owners with"))?;
    map_ids(tree.as_fd(), namespace.as_fd())
        .map_err(failed(Layer::IdMap, format_args!("the file system of {source:?} cannot map owners")))?;
    Ok(tree)
}

/// A user namespace that only maps the on-disk user and group to the visible ones.
pub(super) fn mapping_namespace(on_disk: (u32, u32), seen: (u32, u32)) -> std::io::Result<OwnedFd> {
    in_new_user_namespace(|process| {
        std::fs::write(format!("/proc/{process}/uid_map"), format!("{} {} 1", on_disk.0, seen.0))?;
        std::fs::write(format!("/proc/{process}/gid_map"), format!("{} {} 1", on_disk.1, seen.1))?;
        Ok(File::open(format!("/proc/{process}/ns/user"))?.into())
    })
}

/// A path to a descriptor's file; only this process can follow it.
pub(super) fn through(fd: &OwnedFd, below: &str) -> std::path::PathBuf {
    let mut path = std::path::PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    if !below.is_empty() {
        path.push(below);
    }
    path
}
