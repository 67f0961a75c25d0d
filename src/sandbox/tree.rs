//! The file tree of code inside, built in the engine's own mount namespace (N2). Runs in the
//! engine's process.
//!
//! ```text
//!  /            tmpfs, read-only     /usr /opt /nix    the host's, read-only
//!  /etc         made up              /bin /lib …       as the host has them
//!  /proc        own, parts covered   /dev              five devices, terminals, shm
//!  /tmp         tmpfs, bounded       /workspace        the kernel's folder
//!  and the planned mounts at their own paths, ryokan's folders in them covered
//! ```

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, fchmod, fstat, mkdirat};
use nix::unistd::{UnlinkatFlags, chdir, fchdir, pivot_root, symlinkat, unlinkat};

use super::host_path;
use super::init::EngineTree;
use super::layer::{Layer, SandboxError, failed};
use super::plan::SandboxPlan;
use super::tree_etc;
use crate::sys::mount::{NODEV, NOEXEC, NOSUID, RDONLY, attach, change, clone_tree, new_file_system};

/// A mount to attach, cloned from N1 and still detached.
pub(super) struct Hanging {
    /// Path inside.
    pub inside: PathBuf,
    /// The detached tree.
    pub tree: OwnedFd,
    /// Places in it to cover.
    pub covers: Vec<PathBuf>,
}

/// The source of a mount.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// A path of ryokan's or the system's, which no kernel's code can change.
    Own(PathBuf),
    /// A mount of the staging tree: a path through a descriptor of init's, and the shown host path.
    Staged {
        /// The path to open.
        at: PathBuf,
        /// Its path on the host, without symbolic links.
        shows: PathBuf,
    },
    /// A checked path of the host without symbolic links; refused if a link appeared since.
    Given(PathBuf),
}

impl Source {
    /// The shown host path, for hiding parts of it; none for ryokan's own.
    pub(super) fn shows(&self) -> Option<&Path> {
        match self {
            Source::Own(_) => None,
            Source::Staged { shows: path, .. } | Source::Given(path) => Some(path),
        }
    }
}

/// Folders of the host that are shown unchanged, read-only.
pub(super) const SYSTEM: [&str; 8] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix"];
/// Devices: those without state.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// Parts of `/proc` that reveal or change the host.
const PROC_COVERED: [&str; 19] = [
    "acpi",
    "asound",
    "bus",
    "cmdline",
    "config.gz",
    "driver",
    "fs",
    "interrupts",
    "irq",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "latency_stats",
    "scsi",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
];
/// An empty folder that covers others; removed by name once the tree is complete.
const EMPTY: &str = ".empty";
const SCRATCH: &str = ".scratch";
/// More than the generated files need; later only mount points are written there.
const ROOT_SIZE: &str = "8m";
const ROOT_FILES: &str = "8192";

/// A symbolic link: path and target.
type Link = (PathBuf, PathBuf);
type Step<T> = Result<T, SandboxError>;

fn fail<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> SandboxError {
    failed(Layer::PivotRoot, what)
}

/// Builds the tree and makes it the root of the calling process, in a new mount namespace. `mounts`
/// are ordered outermost first, including the workspace.
///
/// # Errors
/// The mount that failed, and why.
pub(super) fn build(plan: &SandboxPlan, mounts: Vec<Hanging>) -> Step<EngineTree> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed(Layer::MountNs, "cannot make the engine's mount namespace"))?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(failed(Layer::MountNs, "cannot make the mounts private"))?;
    let (system, links) = system_folders()?;
    let devices = devices()?;
    let replaced = replaced(plan)?;
    // From here on no path reaches the host's tree: the new root covers its /proc.
    let root = root()?;
    let at = root.as_fd();
    for (path, target) in links {
        symlinkat(target.as_path(), at, relative(&path)).map_err(fail(format_args!("cannot link {path:?}")))?;
    }
    for Hanging { inside, tree, .. } in &system {
        hang(at, inside, tree)?;
    }
    folder(at, Path::new(EMPTY))?;
    tree_etc::write(plan, at)?;
    let scratch = scratch(plan, at)?;
    dev(at, devices)?;
    proc(at)?;
    for (inside, tree) in &replaced {
        replace(at, inside, tree)?;
    }
    for planned in &mounts {
        hang(at, &planned.inside, &planned.tree)?;
    }
    for path in system.iter().chain(&mounts).flat_map(|hanging| &hanging.covers) {
        cover(at, path)?;
    }
    unlinkat(at, EMPTY, UnlinkatFlags::RemoveDir).map_err(fail("cannot remove the empty folder"))?;
    enter(&root)?;
    let namespace = openat(AT_FDCWD, "/proc/self/ns/mnt", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(fail("cannot open the engine's mount namespace"))?;
    Ok(EngineTree { namespace, scratch })
}

/// A detached clone of a source in N1, with its restrictions.
pub(super) fn source(from: &Source, inside: &Path, writable: bool) -> Step<OwnedFd> {
    let what = || fail(format!("cannot open what is to appear at {inside:?}"));
    let tree = match from {
        Source::Own(path) | Source::Staged { at: path, .. } => clone_tree(AT_FDCWD, path, true).map_err(what())?,
        Source::Given(path) => {
            let opened = host_path::open(Layer::PivotRoot, path)?;
            clone_tree(opened.as_fd(), Path::new(""), true).map_err(what())?
        }
    };
    change(tree.as_fd(), true, NOSUID | NODEV | if writable { 0 } else { RDONLY }, 0)
        .map_err(fail(format_args!("cannot restrict the mount at {inside:?}")))?;
    Ok(tree)
}

/// The host's folders as mounts or links, as on the host.
fn system_folders() -> Step<(Vec<Hanging>, Vec<Link>)> {
    let (mut mounts, mut links) = (Vec::new(), Vec::new());
    for path in SYSTEM.map(Path::new) {
        match std::fs::symlink_metadata(path) {
            Ok(found) if found.is_symlink() => {
                let target = std::fs::read_link(path).map_err(fail(format_args!("cannot read {path:?}")))?;
                links.push((path.to_owned(), target));
            }
            Ok(found) if found.is_dir() => {
                let tree = source(&Source::Own(path.to_owned()), path, false)?;
                mounts.push(Hanging { inside: path.to_owned(), tree, covers: Vec::new() });
            }
            _ => {}
        }
    }
    Ok((mounts, links))
}

/// Clones of the files that are shown in place of others.
fn replaced(plan: &SandboxPlan) -> Step<Vec<(PathBuf, OwnedFd)>> {
    let clone = |(from, inside): &(PathBuf, PathBuf)| {
        let tree = source(&Source::Own(from.clone()), inside, false)?;
        Ok((inside.clone(), tree))
    };
    plan.replaced.iter().map(clone).collect()
}

/// Shows a file in place of another, or where there is none yet.
fn replace(at: BorrowedFd<'_>, inside: &Path, tree: &OwnedFd) -> Step<()> {
    match find(at, inside) {
        Ok(target) => attach(tree.as_fd(), target.as_fd()).map_err(fail(format_args!("cannot replace {inside:?}"))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => hang(at, inside, tree),
        Err(error) => Err(fail(format_args!("cannot replace {inside:?}"))(error)),
    }
}

fn devices() -> Step<Vec<(&'static str, OwnedFd)>> {
    let mut found = Vec::new();
    for name in DEVICES {
        let path = Path::new("/dev").join(name);
        let is_device = std::fs::metadata(&path).is_ok_and(|found| found.file_type().is_char_device());
        if !is_device {
            return Err(
                SandboxError::new(Layer::PivotRoot, format!("{path:?} is no device")).hint("give the host its /dev")
            );
        }
        let tree = clone_tree(AT_FDCWD, &path, false).map_err(fail(format_args!("cannot open {path:?}")))?;
        change(tree.as_fd(), false, NOSUID | NOEXEC | RDONLY, 0)
            .map_err(fail(format_args!("cannot restrict {path:?}")))?;
        found.push((name, tree));
    }
    Ok(found)
}

fn root() -> Step<OwnedFd> {
    let options = [("size", ROOT_SIZE), ("nr_inodes", ROOT_FILES), ("mode", "0755")];
    let root = new_file_system("tmpfs", &options, NOSUID | NODEV).map_err(fail("cannot make the root"))?;
    let target = openat(AT_FDCWD, "/proc", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(fail("cannot open /proc"))?;
    attach(root.as_fd(), target.as_fd()).map_err(fail("cannot attach the root"))?;
    Ok(root)
}

/// `/tmp` and `/dev/shm`: two folders of one tmpfs, limited together.
fn scratch(plan: &SandboxPlan, at: BorrowedFd<'_>) -> Step<OwnedFd> {
    let (size, files) = (plan.scratch_bytes().to_string(), plan.scratch_files().to_string());
    let options = [("size", size.as_str()), ("nr_inodes", &files), ("mode", "0755")];
    let scratch = new_file_system("tmpfs", &options, NOSUID | NODEV).map_err(fail("cannot make /tmp"))?;
    hang(at, Path::new(SCRATCH), &scratch)?;
    for (name, inside) in [("tmp", "/tmp"), ("shm", "/dev/shm")] {
        let made = folder(scratch.as_fd(), Path::new(name))
            .and_then(|_| {
                openat(&scratch, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
                    .and_then(|made| fchmod(&made, Mode::from_bits_truncate(0o1777)))
                    .map_err(fail(format_args!("cannot open {inside} to all")))
            })
            .and_then(|()| clone_tree(scratch.as_fd(), Path::new(name), false).map_err(fail(inside)))?;
        hang(at, Path::new(inside), &made)?;
    }
    fchdir(at).map_err(fail("cannot enter the root"))?;
    umount2(SCRATCH, MntFlags::MNT_DETACH).map_err(fail("cannot detach the scratch mount"))?;
    unlinkat(at, SCRATCH, UnlinkatFlags::RemoveDir).map_err(fail("cannot remove the scratch folder"))?;
    Ok(scratch)
}

fn dev(at: BorrowedFd<'_>, devices: Vec<(&str, OwnedFd)>) -> Step<()> {
    let dev = folder(at, Path::new("/dev"))?;
    for (name, tree) in devices {
        file(dev.as_fd(), OsStr::new(name)).map_err(fail(format_args!("cannot make /dev/{name}")))?;
        hang(dev.as_fd(), Path::new(name), &tree)?;
    }
    let links = [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ];
    for (name, target) in links {
        symlinkat(target, &dev, name).map_err(fail(format_args!("cannot link /dev/{name}")))?;
    }
    let options = [("ptmxmode", "0666"), ("mode", "0620")];
    let pts = new_file_system("devpts", &options, NOSUID | NOEXEC).map_err(fail("cannot make /dev/pts"))?;
    hang(dev.as_fd(), Path::new("pts"), &pts)
}

fn proc(at: BorrowedFd<'_>) -> Step<()> {
    let what = "cannot mount the engine's /proc";
    // Processes that cannot be inspected, init above all, are not even listed.
    let proc = new_file_system("proc", &[("hidepid", "invisible")], NOSUID | NODEV | NOEXEC)
        .map_err(failed(Layer::PidNs, what))?;
    hang(at, Path::new("/proc"), &proc)?;
    let settings = clone_tree(proc.as_fd(), Path::new("sys"), false).map_err(fail("cannot clone /proc/sys"))?;
    change(settings.as_fd(), false, RDONLY | NOSUID | NODEV | NOEXEC, 0).map_err(fail("cannot restrict /proc/sys"))?;
    hang(at, Path::new("/proc/sys"), &settings)?;
    for name in PROC_COVERED {
        cover(at, &Path::new("/proc").join(name))?;
    }
    Ok(())
}

/// Covers a file with `/dev/null`, a folder with an empty one. A missing entry needs no cover.
pub(super) fn cover(at: BorrowedFd<'_>, path: &Path) -> Step<()> {
    let target = match find(at, path) {
        Ok(target) => target,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
        Err(error) => return Err(fail(format_args!("cannot cover {path:?}"))(error)),
    };
    let what = || format!("cannot cover {path:?}");
    let is_folder = fstat(&target).map_err(fail(what()))?.st_mode & libc::S_IFMT == libc::S_IFDIR;
    let tree = clone_tree(at, Path::new(if is_folder { EMPTY } else { "dev/null" }), false).map_err(fail(what()))?;
    let nodev = if is_folder { NODEV } else { 0 };
    change(tree.as_fd(), false, RDONLY | NOSUID | NOEXEC | nodev, 0).map_err(fail(what()))?;
    attach(tree.as_fd(), target.as_fd()).map_err(fail(what()))
}

/// Recreates the folder for covers briefly in a finished tree.
pub(super) fn with_empty<T>(at: BorrowedFd<'_>, act: impl FnOnce() -> Step<T>) -> Step<T> {
    folder(at, Path::new(EMPTY))?;
    let result = act();
    unlinkat(at, EMPTY, UnlinkatFlags::RemoveDir).map_err(fail("cannot remove the empty folder"))?;
    result
}

/// Makes the new root the process's own and detaches the host's tree.
fn enter(root: &OwnedFd) -> Step<()> {
    fchdir(root).map_err(fail("cannot enter the root"))?;
    pivot_root(".", ".").map_err(fail("cannot make the new tree the root"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(fail("cannot detach the host's tree"))?;
    chdir("/").map_err(fail("cannot enter the root"))?;
    change(root.as_fd(), false, RDONLY | NOSUID | NODEV, 0).map_err(fail("cannot make the root read-only"))
}

pub(super) fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Opens `path` below `at`, following no link on the way.
pub(super) fn find(at: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    open_below(at, path, OFlag::empty())
}

fn open_below(at: BorrowedFd<'_>, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
    let path = relative(path);
    if !path.components().all(|part| matches!(part, Component::Normal(_))) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    if path.as_os_str().is_empty() {
        return at.try_clone_to_owned();
    }
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | flags;
    Ok(openat2(at, path, OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS))?)
}

/// Creates a folder with its parents, following no link on the way, and opens it.
pub(super) fn folder(at: BorrowedFd<'_>, path: &Path) -> Step<OwnedFd> {
    make_folder(at, path).map_err(fail(format_args!("cannot make {path:?} inside")))
}

fn make_folder(at: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    let path = relative(path);
    match (open_below(at, path, OFlag::O_DIRECTORY), path.parent(), path.file_name()) {
        (Err(error), Some(above), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
            let above = make_folder(at, above)?;
            mkdirat(&above, name, Mode::from_bits_truncate(0o755))?;
            open_below(above.as_fd(), Path::new(name), OFlag::O_DIRECTORY)
        }
        (found, ..) => found,
    }
}

fn file(at: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_WRONLY;
    match openat(at, name, flags, Mode::from_bits_truncate(0o644)) {
        Ok(_) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Creates the mount point if needed, a folder or file like the mounted tree, and opens it.
pub(super) fn mount_point(at: BorrowedFd<'_>, inside: &Path, tree: &OwnedFd) -> Step<OwnedFd> {
    let what = || format!("cannot make a mount point for {inside:?}");
    if fstat(tree).map_err(fail(what()))?.st_mode & libc::S_IFMT == libc::S_IFDIR {
        return folder(at, inside);
    }
    let above = folder(at, inside.parent().unwrap_or(Path::new("/")))?;
    let name = inside.file_name().unwrap_or_default();
    file(above.as_fd(), name).map_err(fail(what()))?;
    openat(&above, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty()).map_err(fail(what()))
}

fn hang(at: BorrowedFd<'_>, inside: &Path, tree: &OwnedFd) -> Step<()> {
    let target = mount_point(at, inside, tree)?;
    attach(tree.as_fd(), target.as_fd()).map_err(fail(format_args!("cannot mount at {inside:?}")))
}
