//! Mounts by descriptor: the mount calls of Linux 5.2 and later, which `nix` does not have.
//!
//! A detached tree is mounted nowhere; it vanishes with its descriptor unless attached.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::checked;

/// Read-only.
pub const RDONLY: u64 = 0x1;
/// Ignores set-user-id bits.
pub const NOSUID: u64 = 0x2;
/// Ignores device nodes.
pub const NODEV: u64 = 0x4;
/// Forbids execution.
pub const NOEXEC: u64 = 0x8;
const IDMAP: u64 = 0x0010_0000;

const OPEN_TREE_CLONE: u32 = 1;
const AT_RECURSIVE: u32 = 0x8000;
const AT_EMPTY_PATH: u32 = 0x1000;

#[repr(C)]
#[derive(Default)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Converts a path for the kernel.
fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Takes ownership of the descriptor that a system call created.
fn owned(returned: libc::c_long) -> io::Result<OwnedFd> {
    let fd = checked(returned)?;
    // SAFETY: the kernel has just created this descriptor for us; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Whether something is mounted at this path, which has no symbolic links.
pub fn is_mount_point(path: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(4).map(Path::new) == Some(path))
}

/// Clones the mount at `path` (relative to `dir`; empty: `dir` itself) as a detached tree, with its
/// submounts if `recursive`.
///
/// # Errors
/// The kernel's errors.
pub fn clone_tree(dir: BorrowedFd<'_>, path: &Path, recursive: bool) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as u32 | AT_EMPTY_PATH;
    if recursive {
        flags |= AT_RECURSIVE;
    }
    // SAFETY: the path is a live C string that the kernel only reads.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, dir.as_raw_fd(), path.as_ptr(), flags) })
}

/// Attaches a detached tree on top of `target`.
///
/// # Errors
/// The kernel's errors.
pub fn attach(tree: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    const F_EMPTY_PATH: u32 = 0x4;
    const T_EMPTY_PATH: u32 = 0x40;
    let empty = c"".as_ptr();
    // SAFETY: both paths are the empty C string, which the kernel only reads.
    checked(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            empty,
            target.as_raw_fd(),
            empty,
            F_EMPTY_PATH | T_EMPTY_PATH,
        )
    })
    .map(drop)
}

fn set_attributes(mount: BorrowedFd<'_>, recursive: bool, attributes: &MountAttr) -> io::Result<()> {
    set_attributes_at(mount.as_raw_fd(), c"", recursive, attributes)
}

fn set_attributes_at(dir: RawFd, path: &CStr, recursive: bool, attributes: &MountAttr) -> io::Result<()> {
    let flags = AT_EMPTY_PATH | if recursive { AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a live C string; the attributes are a live value of exactly the size given.
    checked(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            dir,
            path.as_ptr(),
            flags,
            std::ptr::from_ref(attributes),
            size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// Sets and clears attributes of a mount; if `recursive` also of every mount below.
///
/// # Errors
/// The kernel's errors; nothing has changed then.
pub fn change(mount: BorrowedFd<'_>, recursive: bool, set: u64, clear: u64) -> io::Result<()> {
    set_attributes(mount, recursive, &MountAttr { set, clear, ..MountAttr::default() })
}

/// As [`change`] for the mount at a path, without a descriptor and without an allocation.
///
/// # Errors
/// The kernel's errors; nothing has changed then.
pub fn change_at(path: &CStr, recursive: bool, set: u64) -> io::Result<()> {
    set_attributes_at(libc::AT_FDCWD, path, recursive, &MountAttr { set, ..MountAttr::default() })
}

/// Maps the owners of a detached tree's files through `user_namespace`, from on-disk ids (inside)
/// to visible ids (outside).
///
/// # Errors
/// `EINVAL` where the file system does not support it; `EPERM` without privilege over it.
pub fn map_ids(mount: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    let userns_fd = user_namespace.as_raw_fd() as u64;
    set_attributes(mount, true, &MountAttr { set: IDMAP, userns_fd, ..MountAttr::default() })
}

/// Makes a new file system instance, detached.
///
/// # Errors
/// The kernel's errors, also for an unknown option.
pub fn new_file_system(kind: &str, options: &[(&str, &str)], attributes: u64) -> io::Result<OwnedFd> {
    const FSOPEN_CLOEXEC: u32 = 1;
    const FSMOUNT_CLOEXEC: u32 = 1;
    const FSCONFIG_SET_STRING: u32 = 1;
    const FSCONFIG_CMD_CREATE: u32 = 6;
    let text = |text: &str| CString::new(text).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
    let kind = text(kind)?;
    // SAFETY: the kind is a live C string that the kernel only reads.
    let context = owned(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), FSOPEN_CLOEXEC) })?;
    for (key, value) in options {
        let (key, value) = (text(key)?, text(value)?);
        // SAFETY: key and value are live C strings that the kernel only reads.
        checked(unsafe {
            libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), FSCONFIG_SET_STRING, key.as_ptr(), value.as_ptr(), 0)
        })?;
    }
    let null = std::ptr::null::<u8>();
    // SAFETY: this command takes null pointers and a zero.
    checked(unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), FSCONFIG_CMD_CREATE, null, null, 0) })?;
    // SAFETY: this call takes integers only.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, context.as_fd().as_raw_fd(), FSMOUNT_CLOEXEC, attributes as u32) })
}
