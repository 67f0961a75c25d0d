//! Confines a virtual machine monitor between fork and exec. Allocates nothing: its parent has prepared everything.

use std::ffi::{CStr, CString};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::sched::CloneFlags;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::checked;
use super::mount::{self, NODEV, NOEXEC, NOSUID, RDONLY};
use super::process::{lift, set_dumpable, set_no_new_privileges, set_parent_death_signal};

/// Where the tree is built: a folder of every host that holds nothing of the tree.
const PLACE: &CStr = c"/sys";
/// Where its folder is in the tree, if it has one.
const FOLDER: &CStr = c"/machine";
/// The same before the tree is the root.
const NEW_FOLDER: &CStr = c"/sys/machine";
/// The tree itself holds a few folders and links.
const TREE_OPTIONS: &CStr = c"size=64k,nr_inodes=64,mode=0755";
/// The user of a monitor in its user namespace: not 0, so that it has no capability there.
const INSIDE_ID: u32 = 1000;

/// A part of a monitor's tree. Places are relative to its root.
pub enum TreePart {
    /// An empty folder.
    Folder(CString),
    /// A symbolic link: its place and its target.
    Link(CString, CString),
    /// A folder of the host with everything below it, read-only, without devices: its place and its path.
    HostFolder(CString, CString),
    /// A file or device of the host, read-only: its place and its path.
    HostFile(CString, CString),
}

/// What confines a virtual machine monitor, prepared by its parent.
pub struct MonitorLayers {
    /// The file tree that it sees.
    pub tree: Vec<TreePart>,
    /// The folder in which it starts, writable, if it has one: its only folder of the host.
    pub folder: Option<OwnedFd>,
    /// A Landlock rule set.
    pub rules: OwnedFd,
    /// A system call filter.
    pub filter: seccompiler::BpfProgram,
    /// Resource limits.
    pub limits: Vec<(Resource, u64)>,
    /// `cgroup.procs` of its cgroup, if it has one, open for writing.
    pub cgroup: Option<OwnedFd>,
}

/// Confines the child of `command`, a virtual machine monitor: a session of its own, a cgroup, resource limits, no new
/// privileges, namespaces without network, a read-only tree of its own, file access, system calls. The start fails
/// where the host kernel refuses one of them.
///
/// # Errors
/// Those of copying descriptors.
pub fn confine_monitor(command: &mut Command, layers: MonitorLayers) -> io::Result<()> {
    // Those that the child gets at fixed numbers are placed before this uses its own.
    let (rules, cgroup) = (lift(&layers.rules)?, layers.cgroup.as_ref().map(lift).transpose()?);
    let folder = layers.folder.as_ref().map(lift).transpose()?;
    let parent = std::process::id();
    let prepare = move || {
        // Until its program begins, it has no name by which a later daemon finds it: it ends with this one.
        set_parent_death_signal(Some(nix::sys::signal::Signal::SIGKILL))?;
        if std::os::unix::process::parent_id() != parent {
            return Err(io::ErrorKind::NotFound.into());
        }
        nix::unistd::setsid()?;
        if let Some(procs) = &cgroup {
            // The writer itself.
            nix::unistd::write(procs, b"0")?;
        }
        set_no_new_privileges()?;
        if let Some(folder) = &folder {
            // The descriptor's mount is of the old namespace and cannot be bound in a new one; the working directory's
            // follows into it.
            nix::unistd::fchdir(folder)?;
        }
        leave_namespaces()?;
        enter_tree(&layers.tree, folder.is_some())?;
        // After the last open: until its program begins, it has as many descriptors as its parent.
        for (resource, most) in &layers.limits {
            let most = getrlimit(*resource)?.1.min(*most);
            setrlimit(*resource, most, most)?;
        }
        set_parent_death_signal(None)?;
        // SAFETY: this call takes integers only.
        checked(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0u32) })?;
        seccompiler::apply_filter(&layers.filter).map_err(|_| io::Error::from(io::ErrorKind::PermissionDenied))
    };
    // SAFETY: between fork and exec only system calls that any thread may make, and no allocation.
    unsafe { command.pre_exec(prepare) };
    Ok(())
}

fn leave_namespaces() -> io::Result<()> {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    // A change of user removed that user's access to /proc/self, where the id maps are written.
    set_dumpable(true)?;
    let apart = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    nix::sched::unshare(apart)?;
    write_map(c"/proc/self/uid_map", uid)?;
    put(c"/proc/self/setgroups", b"deny")?;
    write_map(c"/proc/self/gid_map", gid)
}

fn write_map(file: &CStr, outside: u32) -> io::Result<()> {
    let mut line = [0; 40];
    let mut rest = &mut line[..];
    writeln!(rest, "{INSIDE_ID} {outside} 1")?;
    let unused = rest.len();
    put(file, &line[..line.len() - unused])
}

fn put(file: &CStr, text: &[u8]) -> io::Result<()> {
    // SAFETY: the path is a live C string, the text a live slice; the descriptor is closed here.
    unsafe {
        let fd = checked(i64::from(libc::open(file.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC)))? as i32;
        let written = checked(libc::write(fd, text.as_ptr().cast(), text.len()) as i64);
        libc::close(fd);
        written.map(drop)
    }
}

/// Builds the tree and makes it the root, with the working directory in it if it `has_folder`; nothing else of the
/// host's files remains visible.
fn enter_tree(parts: &[TreePart], has_folder: bool) -> io::Result<()> {
    mount_at(None, c"/", None, libc::MS_REC | libc::MS_PRIVATE, None)?;
    mount_at(Some(c"ryokan"), PLACE, Some(c"tmpfs"), libc::MS_NOSUID | libc::MS_NODEV, Some(TREE_OPTIONS))?;
    if has_folder {
        make_folder(NEW_FOLDER)?;
        mount_at(Some(c"."), NEW_FOLDER, None, libc::MS_BIND, None)?;
        mount::change_at(NEW_FOLDER, false, NOSUID | NODEV | NOEXEC)?;
    }
    nix::unistd::chdir(PLACE)?;
    for part in parts {
        match part {
            TreePart::Folder(place) => make_folder(place)?,
            TreePart::Link(place, target) => {
                // SAFETY: both are live C strings.
                checked(i64::from(unsafe { libc::symlink(target.as_ptr(), place.as_ptr()) }))?;
            }
            TreePart::HostFolder(place, path) => {
                make_folder(place)?;
                mount_at(Some(path), place, None, libc::MS_BIND | libc::MS_REC, None)?;
                mount::change_at(place, true, RDONLY | NOSUID | NODEV)?;
            }
            TreePart::HostFile(place, path) => {
                // SAFETY: the path is a live C string; the descriptor is closed at once.
                unsafe {
                    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDONLY | libc::O_CLOEXEC;
                    libc::close(checked(i64::from(libc::open(place.as_ptr(), flags, 0o400)))? as i32);
                }
                mount_at(Some(path), place, None, libc::MS_BIND, None)?;
                mount::change_at(place, false, RDONLY | NOSUID)?;
            }
        }
    }
    nix::unistd::pivot_root(".", ".")?;
    nix::mount::umount2(".", nix::mount::MntFlags::MNT_DETACH)?;
    nix::unistd::chdir("/")?;
    mount::change_at(c"/", false, RDONLY | NOSUID | NODEV)?;
    if has_folder { Ok(nix::unistd::chdir(FOLDER)?) } else { Ok(()) }
}

fn make_folder(place: &CStr) -> io::Result<()> {
    // SAFETY: the path is a live C string.
    checked(i64::from(unsafe { libc::mkdir(place.as_ptr(), 0o755) })).map(drop)
}

fn mount_at(
    source: Option<&CStr>,
    place: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    options: Option<&CStr>,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    let options = pointer(options).cast();
    // SAFETY: each pointer is null or a live C string.
    checked(i64::from(unsafe { libc::mount(pointer(source), place.as_ptr(), pointer(kind), flags, options) })).map(drop)
}
