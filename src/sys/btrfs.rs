//! Btrfs subvolumes: create, snapshot, remove. Sources: linux/btrfs.h, btrfs-ioctl(2).

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use super::checked;

/// `statfs` magic of Btrfs.
pub const MAGIC: i64 = 0x9123_683e;
/// Inode number of every subvolume's root.
pub const SUBVOLUME_INODE: u64 = 256;

const TYPE: u32 = 0x94;
const CREATE: libc::c_ulong = write_of::<Named>(14);
const DESTROY: libc::c_ulong = write_of::<Named>(15);
const SNAPSHOT: libc::c_ulong = write_of::<Snapshot>(23);

const SUBVOLUME_INFO: libc::c_ulong =
    ((2 << 30) | ((size_of::<SubvolumeInfo>() as u32) << 16) | (TYPE << 8) | 60) as libc::c_ulong;

const NAME: usize = 4088;
const SNAPSHOT_NAME: usize = 4040;

/// `struct btrfs_ioctl_vol_args`
#[repr(C)]
struct Named {
    fd: i64,
    name: [u8; NAME],
}

/// `struct btrfs_ioctl_vol_args_v2`
#[repr(C)]
struct Snapshot {
    fd: i64,
    transaction: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; SNAPSHOT_NAME],
}

/// `struct btrfs_ioctl_get_subvol_info_args`
#[repr(C)]
struct SubvolumeInfo {
    id: u64,
    name: [u8; 256],
    parent: u64,
    directory: u64,
    generation: u64,
    flags: u64,
    uuids: [u8; 48],
    transactions: [u64; 4],
    times: [u64; 8],
    reserved: [u64; 8],
}

/// `_IOW(TYPE, number, T)`
const fn write_of<T>(number: u32) -> libc::c_ulong {
    ((1 << 30) | ((size_of::<T>() as u32) << 16) | (TYPE << 8) | number) as libc::c_ulong
}

fn named<const N: usize>(name: &str) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // The last byte stays zero.
    match bytes[..N - 1].get_mut(..name.len()) {
        Some(place) if !name.contains(['/', '\0']) => place.copy_from_slice(name.as_bytes()),
        Some(_) | None => return Err(io::ErrorKind::InvalidFilename.into()),
    }
    Ok(bytes)
}

fn call<T>(dir: BorrowedFd<'_>, request: libc::c_ulong, argument: &T) -> io::Result<()> {
    // SAFETY: the request reads exactly its argument type's size; the argument lives through the
    // call.
    let returned = unsafe { libc::ioctl(dir.as_raw_fd(), request as _, std::ptr::from_ref(argument)) };
    checked(i64::from(returned)).map(drop)
}

/// Creates an empty subvolume in a folder. Needs the rights of `mkdir` there.
///
/// # Errors
/// `ENOTTY` on another file system; the errors of `mkdir`.
pub fn create(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    call(dir, CREATE, &Named { fd: 0, name: named(name)? })
}

/// Makes a writable snapshot of a subvolume, sharing its blocks. The subvolume's owner may do so.
/// Nested subvolumes become empty folders in the snapshot.
///
/// # Errors
/// `EPERM`, `EXDEV`, `EINVAL` if `of` is no subvolume; the errors of `mkdir`.
pub fn snapshot(of: BorrowedFd<'_>, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let (fd, name) = (i64::from(of.as_raw_fd()), named(name)?);
    call(dir, SNAPSHOT, &Snapshot { fd, transaction: 0, flags: 0, unused: [0; 4], name })
}

/// Removes a subvolume with its whole content in one step.
///
/// # Errors
/// `EPERM` for a user other than root, except for the owner where the file system is mounted with
/// `user_subvol_rm_allowed`. Otherwise it must be emptied and removed as a folder.
pub fn destroy(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    call(dir, DESTROY, &Named { fd: 0, name: named(name)? })
}

/// Id and generation of the subvolume that a directory is in.
///
/// # Errors
/// `ENOTTY` on another file system, and before Linux 4.18.
pub fn subvolume(dir: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let mut info = std::mem::MaybeUninit::<SubvolumeInfo>::zeroed();
    // SAFETY: the request writes exactly its argument type's size; the argument lives through the call.
    let returned = unsafe { libc::ioctl(dir.as_raw_fd(), SUBVOLUME_INFO as _, info.as_mut_ptr()) };
    checked(i64::from(returned))?;
    // SAFETY: integers only, which were zero or written.
    let info = unsafe { info.assume_init() };
    Ok((info.id, info.generation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn btrfs_ioctl_layout() {
        assert_eq!((size_of::<Named>(), size_of::<Snapshot>()), (4096, 4096));
        assert_eq!((CREATE, DESTROY, SNAPSHOT), (0x5000_940e, 0x5000_940f, 0x5000_9417));
        assert_eq!((size_of::<SubvolumeInfo>(), SUBVOLUME_INFO), (504, 0x81f8_943c));
        assert!(named::<8>("1234567").is_ok() && named::<8>("12345678").is_err() && named::<8>("a/b").is_err());
    }
}
