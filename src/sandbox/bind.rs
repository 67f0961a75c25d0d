//! Adding and removing mounts while the engine runs. Runs in init.
//!
//! ```text
//!  N1: clone the source ──▶ a thread of its own enters N2 ──▶ makes the mount point, attaches, covers ──▶ thread ends
//! ```
//!
//! The thread has its own root and working directory, so the rest of init never leaves N1. The path
//! inside may be controlled by untrusted code: no link is followed.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::child::Wanted;
use super::init::{EngineTree, Init, MountSource};
use super::layer::{Layer, SandboxError, failed};
use super::plan::PlannedMount;
use super::tree::Source;
use super::{protect, staging, tree};
use crate::core::limits;
use crate::core::spec::check_inside_path;
use crate::sys::mount::{RDONLY, attach, change, clone_tree};

/// A mount added after the start; repeated when the engine restarts.
#[derive(Debug, Clone)]
pub(super) struct LiveBind {
    inside: PathBuf,
    /// Its path on the host, without symbolic links.
    shows: PathBuf,
    /// Its name in the staging tree, if it is there.
    staged: Option<String>,
    writable: bool,
    /// Device and inode of the mounted file, to recognise it.
    identity: (u64, u64),
}

impl LiveBind {
    pub(super) fn planned(&self) -> PlannedMount {
        let (inside, source) = (self.inside.clone(), self.shows.clone());
        PlannedMount { inside, source, writable: self.writable, system: false, is_mapped: self.staged.is_some() }
    }

    pub(super) fn wanted(&self, staging: Option<&OwnedFd>) -> Wanted {
        let shows = self.shows.clone();
        let source = match (&self.staged, staging) {
            (Some(name), Some(staging)) => Source::Staged { at: staging::through(staging, name), shows },
            _ => Source::Given(shows),
        };
        Wanted { inside: self.inside.clone(), source, writable: self.writable }
    }
}

pub(super) fn fail<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> SandboxError {
    failed(Layer::PivotRoot, what)
}

pub(super) fn refused(cause: impl Into<String>, hint: &str) -> SandboxError {
    SandboxError::new(Layer::PivotRoot, cause).hint(hint)
}

impl Init {
    /// Shows a file or folder of the host to the running engine.
    ///
    /// # Errors
    /// If the path inside is taken or reserved, or the source protected or unreachable. Nothing has
    /// changed then.
    pub fn bind(&mut self, source: MountSource, inside: &Path, writable: bool) -> Result<(), SandboxError> {
        check_inside_path(inside).map_err(|error| refused(error.to_string(), "choose another path"))?;
        if self.taken(inside) {
            return Err(refused(format!("{inside:?} is mounted already"), "unmount it first"));
        }
        if let Some(hidden) = self.planned().find(|mount| mount.system && mount.inside.starts_with(inside)) {
            let hint = "mount it while the kernel is stopped: at a start deeper mounts come on top";
            return Err(refused(format!("{inside:?} would hide {:?}, which every kernel has", hidden.inside), hint));
        }
        if self.plan.mounts.len() + self.live.len() >= limits::MOUNTS {
            return Err(refused(format!("a kernel has at most {} mounts", limits::MOUNTS), "unmount one first"));
        }
        let (staged, shows) = match source {
            MountSource::Path(path) => (None, path),
            MountSource::Tree { tree, shows } => (Some(self.stage_live(&tree)?), shows),
        };
        let mut bind = LiveBind { inside: inside.to_owned(), shows, staged, writable, identity: (0, 0) };
        let covers = protect::covers(inside, &bind.shows, &self.protected)?;
        if let Some(engine) = &self.engine {
            let wanted = bind.wanted(self.staging.as_ref());
            let attached = in_engine_tree(engine, || {
                let tree = tree::source(&wanted.source, inside, writable)?;
                Ok(move || attach_inside(tree, inside, &covers))
            })?;
            bind.identity = attached;
        }
        self.live.push(bind);
        Ok(())
    }

    /// Removes a mount of [`Init::bind`]. Files that the code has open there stay open.
    ///
    /// # Errors
    /// If `bind` mounted nothing there.
    pub fn unbind(&mut self, inside: &Path) -> Result<(), SandboxError> {
        let live = self.live.iter().position(|bind| bind.inside == inside);
        if live.is_none() && !self.planned().any(|planned| planned.inside == inside) {
            return Err(refused(format!("nothing is mounted at {inside:?}"), "list the mounts"));
        }
        if let Some(engine) = &self.engine {
            // Code inside cannot mount, so a planned place shows its planned mount.
            let identity = live.map(|at| self.live[at].identity);
            in_engine_tree(engine, || Ok(move || detach_inside(inside, identity)))?;
        }
        match live {
            Some(at) => drop(self.live.remove(at)),
            None => self.unbound.push(inside.to_owned()),
        }
        Ok(())
    }

    /// The paths inside with mounts from the host.
    pub fn bound(&self) -> impl Iterator<Item = &Path> {
        self.planned().filter(|mount| !mount.system).map(|mount| mount.inside.as_path()).chain(self.live_paths())
    }

    /// The mounts of the plan that are still present.
    fn planned(&self) -> impl Iterator<Item = &PlannedMount> {
        let gone = |mount: &&PlannedMount| self.unbound.contains(&mount.inside);
        self.plan.mounts.iter().filter(move |mount| !gone(mount))
    }

    fn live_paths(&self) -> impl Iterator<Item = &Path> {
        self.live.iter().map(|bind| bind.inside.as_path())
    }

    fn taken(&self, inside: &Path) -> bool {
        self.planned().map(|mount| mount.inside.as_path()).chain(self.live_paths()).any(|taken| taken == inside)
    }

    /// Attaches a detached mount in the staging tree, where it lasts as long as init.
    fn stage_live(&mut self, tree: &OwnedFd) -> Result<String, SandboxError> {
        let Some(root) = &self.staging else {
            return Err(refused("only a daemon that is root can send a mount", "give a path instead"));
        };
        self.live_count += 1;
        let name = format!("live-{}", self.live_count);
        staging::hang(root.as_fd(), &name, tree).map_err(fail("cannot stage the mount"))?;
        Ok(name)
    }
}

/// Runs `before` in N1 and its result in N2, both on a thread that ends afterwards.
pub(super) fn in_engine_tree<T: Send, Inside: FnOnce() -> Result<T, SandboxError>>(
    engine: &EngineTree,
    before: impl FnOnce() -> Result<Inside, SandboxError> + Send,
) -> Result<T, SandboxError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("ryokan-bind".into()).spawn_scoped(scope, || {
            let inside = before()?;
            unshare(CloneFlags::CLONE_FS).map_err(fail("cannot separate the thread from init"))?;
            setns(&engine.namespace, CloneFlags::CLONE_NEWNS).map_err(fail("cannot enter the engine's tree"))?;
            inside()
        });
        let thread = thread.map_err(fail("cannot start a thread"))?;
        thread.join().unwrap_or_else(|_| Err(SandboxError::new(Layer::PivotRoot, "the mounting thread panicked")))
    })
}

pub(super) fn open_root() -> Result<OwnedFd, SandboxError> {
    openat(AT_FDCWD, "/", OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(fail("cannot open the engine's root"))
}

/// A writable mount of the engine's root file system, without its submounts.
pub(super) fn writable_root() -> Result<OwnedFd, SandboxError> {
    let clone = clone_tree(AT_FDCWD, Path::new("/"), false).map_err(fail("cannot clone the engine's root"))?;
    change(clone.as_fd(), false, 0, RDONLY).map_err(fail("cannot write to the engine's root"))?;
    Ok(clone)
}

/// In N2: makes the mount point, attaches, covers.
fn attach_inside(mount: OwnedFd, inside: &Path, covers: &[PathBuf]) -> Result<(u64, u64), SandboxError> {
    let (root, bare) = (open_root()?, writable_root()?);
    make_place(&root, &bare, inside, &mount)?;
    let target = tree::find(root.as_fd(), inside).map_err(fail(format_args!("cannot open {inside:?} inside")))?;
    let identity = identity(mount.as_fd())?;
    attach(mount.as_fd(), target.as_fd()).map_err(fail(format_args!("cannot mount at {inside:?}")))?;
    if covers.is_empty() {
        return Ok(identity);
    }
    let covered = with_covers(&root, &bare, covers);
    if covered.is_err() {
        // No mount is better than one that shows too much.
        detach_inside(inside, Some(identity))?;
    }
    covered.map(|()| identity)
}

fn with_covers(root: &OwnedFd, bare: &OwnedFd, covers: &[PathBuf]) -> Result<(), SandboxError> {
    tree::with_empty(bare.as_fd(), || covers.iter().try_for_each(|path| tree::cover(root.as_fd(), path)))
}

/// Makes the mount point. Within the root's file system, which is read-only to the engine, through
/// our own mount of it; beyond, with the rights of the code inside.
fn make_place(root: &OwnedFd, bare: &OwnedFd, inside: &Path, mount: &OwnedFd) -> Result<(), SandboxError> {
    let root_device = fstat(root).map_err(fail("cannot look at the engine's root"))?.st_dev;
    let mut deepest = root.try_clone().map_err(fail("cannot open the engine's root"))?;
    for part in tree::relative(inside).components() {
        match tree::find(deepest.as_fd(), Path::new(part.as_os_str())) {
            Ok(found) => deepest = found,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => break,
            Err(error) => return Err(fail(format_args!("cannot reach {inside:?} inside"))(error)),
        }
    }
    let on_root = fstat(&deepest).map_err(fail("cannot look at the engine's tree"))?.st_dev == root_device;
    let through = if on_root { bare } else { root };
    tree::mount_point(through.as_fd(), inside, mount).map(drop)
}

fn identity(fd: BorrowedFd<'_>) -> Result<(u64, u64), SandboxError> {
    let found = fstat(fd).map_err(fail("cannot look at the mount"))?;
    Ok((found.st_dev, found.st_ino))
}

/// In N2: unmounts, if the present mount is the recorded one.
fn detach_inside(inside: &Path, expected: Option<(u64, u64)>) -> Result<(), SandboxError> {
    let root = open_root()?;
    let found = tree::find(root.as_fd(), inside).map_err(fail(format_args!("cannot open {inside:?} inside")))?;
    let there = identity(found.as_fd())?;
    if expected.is_some_and(|expected| expected != there) {
        return Err(refused(
            format!("{inside:?} inside is no longer what was mounted there"),
            "restart the kernel's worker",
        ));
    }
    let place = format!("/proc/self/fd/{}", found.as_raw_fd());
    umount2(place.as_str(), MntFlags::MNT_DETACH).map_err(fail(format_args!("cannot unmount {inside:?}")))?;
    drop(found);
    // Removes the mount point if it was made for this mount. Non-empty or foreign entries stay.
    let bare = writable_root()?;
    let flag = |kind| unlinkat(&bare, tree::relative(inside), kind);
    let _ = flag(UnlinkatFlags::RemoveDir).or_else(|_| flag(UnlinkatFlags::NoRemoveDir));
    Ok(())
}
