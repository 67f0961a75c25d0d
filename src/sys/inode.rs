//! Operations on open files beyond `std` and `nix`: extended attributes, write detection,
//! block-sharing clones, file system type.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::process::{Command, Stdio};

use super::checked;

/// Names of a file's extended attributes, in the file system's order. Empty where attributes are
/// unsupported.
///
/// # Errors
/// The kernel's errors.
pub fn attributes(file: BorrowedFd<'_>) -> io::Result<Vec<Vec<u8>>> {
    let list = sized(|buffer: &mut [u8]| {
        // SAFETY: the buffer is valid for its length, which is passed.
        unsafe { libc::flistxattr(file.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) }
    });
    match list {
        Ok(list) => Ok(list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()),
        Err(error) if error.raw_os_error() == Some(libc::ENOTSUP) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The value of an extended attribute.
///
/// # Errors
/// `ENODATA` if the attribute does not exist; the kernel's errors.
pub fn attribute(file: BorrowedFd<'_>, name: &[u8]) -> io::Result<Vec<u8>> {
    let name = CString::new(name).map_err(io::Error::other)?;
    sized(|buffer: &mut [u8]| {
        // SAFETY: the name ends with a zero byte; the buffer is valid for its length, which is passed.
        unsafe { libc::fgetxattr(file.as_raw_fd(), name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) }
    })
}

/// Asks for the length, then the bytes; again if the value grew in between.
fn sized(mut ask: impl FnMut(&mut [u8]) -> isize) -> io::Result<Vec<u8>> {
    loop {
        let room = checked(ask(&mut []) as libc::c_long)?;
        let mut buffer = vec![0; usize::try_from(room).map_err(io::Error::other)?];
        if buffer.is_empty() {
            return Ok(buffer);
        }
        match checked(ask(&mut buffer) as libc::c_long) {
            Ok(filled) => {
                buffer.truncate(usize::try_from(filled).map_err(io::Error::other)?);
                return Ok(buffer);
            }
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sets an extended attribute.
///
/// # Errors
/// The kernel's errors.
pub fn set_attribute(file: BorrowedFd<'_>, name: &[u8], value: &[u8]) -> io::Result<()> {
    let name = CString::new(name).map_err(io::Error::other)?;
    // SAFETY: the name ends with a zero byte; the value is valid for its length, which is passed.
    let returned = unsafe { libc::fsetxattr(file.as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    checked(i64::from(returned)).map(drop)
}

/// Removes an extended attribute.
///
/// # Errors
/// The kernel's errors.
pub fn remove_attribute(file: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    let name = CString::new(name).map_err(io::Error::other)?;
    // SAFETY: the name ends with a zero byte.
    checked(i64::from(unsafe { libc::fremovexattr(file.as_raw_fd(), name.as_ptr()) })).map(drop)
}

/// Whether any process has a regular file open or mapped for writing: a read lease is then refused.
/// Yes where the file system or the user's rights do not allow the check.
pub fn may_be_written(file: BorrowedFd<'_>) -> bool {
    if !lease(file, libc::F_RDLCK) {
        return true;
    }
    lease(file, libc::F_UNLCK);
    false
}

/// Takes or releases a lease; returns whether it was granted.
fn lease(file: BorrowedFd<'_>, kind: libc::c_int) -> bool {
    /// `F_SETSIG` of `fcntl.h`, the same on every architecture.
    const SET_SIGNAL: libc::c_int = 10;
    // SAFETY: takes integers only.
    let fcntl = |command: libc::c_int, value: libc::c_int| unsafe { libc::fcntl(file.as_raw_fd(), command, value) };
    // A process that opens the file for writing signals us. The default SIGIO would end this
    // process.
    (kind == libc::F_UNLCK || fcntl(SET_SIGNAL, libc::SIGURG) >= 0) && fcntl(libc::F_SETLEASE, kind) >= 0
}

/// Makes an empty file a clone of another, sharing its blocks. Later writes to either do not affect
/// the other.
///
/// # Errors
/// `EOPNOTSUPP`, `EXDEV`, `EINVAL` where the file system does not support it.
pub fn clone_blocks(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes integers only.
    checked(i64::from(unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) })).map(drop)
}

/// `FS_NOCOW_FL` (linux/fs.h).
const NO_COW: libc::c_int = 0x0080_0000;

/// Whether Btrfs overwrites this file in place, or new files in this directory: the attribute No_COW.
///
/// # Errors
/// The file system's errors.
pub fn is_no_cow(file: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(flags(file)? & NO_COW != 0)
}

/// As [`is_no_cow`], by a program of its own: a close of the file in this process would release the locks that SQLite holds
/// on it. False if the program is not installed: new files are as their directory says then. Blocks.
pub fn is_no_cow_apart(path: &Path) -> bool {
    let mut command = Command::new("lsattr");
    command.args(["-d", "--"]).arg(path).env_clear();
    command.envs(std::env::var_os("PATH").map(|value| ("PATH", value)));
    command.current_dir("/").stdin(Stdio::null()).stderr(Stdio::null());
    let Ok(listed) = command.output() else { return false };
    let attributes = listed.stdout.split(|byte| *byte == b' ').next().unwrap_or_default();
    listed.status.success() && attributes.contains(&b'C')
}

/// Sets No_COW on an empty directory, for files that are made in it, and reads it back.
///
/// # Errors
/// The file system's errors; `Unsupported` if the attribute is not there afterwards.
pub fn set_no_cow(empty: BorrowedFd<'_>) -> io::Result<()> {
    let flags = flags(empty)? | NO_COW;
    // SAFETY: the request reads one integer, which lives through the call.
    let set = unsafe { libc::ioctl(empty.as_raw_fd(), libc::FS_IOC_SETFLAGS, std::ptr::from_ref(&flags)) };
    checked(i64::from(set))?;
    if is_no_cow(empty)? { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

fn flags(file: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    let mut flags: libc::c_int = 0;
    // SAFETY: the request writes one integer, which lives through the call.
    let read = unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS, std::ptr::from_mut(&mut flags)) };
    checked(i64::from(read)).map(|_| flags)
}

/// Flushes a file's data to its device and waits. Metadata is not covered, so this promises no
/// durability; it spares a later clone the wait.
///
/// # Errors
/// What the device refuses.
pub fn write_out(file: BorrowedFd<'_>) -> io::Result<()> {
    let how = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: takes integers only.
    checked(i64::from(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, how) })).map(drop)
}

/// The type of an open file's file system (`statfs` magic).
///
/// # Errors
/// The kernel's errors.
pub fn file_system(file: BorrowedFd<'_>) -> io::Result<i64> {
    Ok(nix::sys::statfs::fstatfs(file)?.filesystem_type().0)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    /// A page of a file mapped for writing; the file itself is closed.
    pub(crate) struct Mapping(*mut libc::c_void);

    // SAFETY: the mapping belongs to the process; the thread that owns this value writes to it.
    unsafe impl Send for Mapping {}

    impl Mapping {
        pub(crate) fn of(path: &std::path::Path) -> Mapping {
            let file = std::fs::File::options().read(true).write(true).open(path).expect("opened");
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            // SAFETY: a new mapping at an address that the kernel chooses.
            let map = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, file.as_raw_fd(), 0) };
            assert_ne!(map, libc::MAP_FAILED);
            Mapping(map)
        }

        pub(crate) fn write(&mut self, byte: u8) {
            // SAFETY: the mapping is one page long, writable, and ours until dropped.
            unsafe { self.0.cast::<u8>().write_volatile(byte) };
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: the mapping was made in `of`, and nothing refers to it any more.
            assert_eq!(unsafe { libc::munmap(self.0, 4096) }, 0);
        }
    }

    #[test]
    fn mapping_counts_as_writer() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("f");
        std::fs::write(&path, [0; 4096]).expect("written");
        let reader = std::fs::File::open(&path).expect("opened");
        assert!(!may_be_written(reader.as_fd()));
        let writer = std::fs::File::options().read(true).write(true).open(&path).expect("opened");
        assert!(may_be_written(reader.as_fd()));
        let mapping = Mapping::of(&path);
        drop(writer);
        assert!(may_be_written(reader.as_fd()));
        drop(mapping);
        assert!(!may_be_written(reader.as_fd()));
    }

    #[test]
    fn lease_break_is_harmless() {
        use std::os::unix::fs::OpenOptionsExt as _;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("f");
        std::fs::write(&path, "text").expect("written");
        let reader = std::fs::File::open(&path).expect("opened");
        assert!(lease(reader.as_fd(), libc::F_RDLCK));
        let refused = std::fs::File::options().write(true).custom_flags(libc::O_NONBLOCK).open(&path);
        assert_eq!(refused.expect_err("leased").raw_os_error(), Some(libc::EWOULDBLOCK));
        assert!(lease(reader.as_fd(), libc::F_UNLCK));
        assert!(!may_be_written(reader.as_fd()));
    }

    #[test]
    fn xattrs_round_trip() {
        let dir = tempfile::tempdir_in(".").expect("a temporary directory");
        let file = std::fs::File::create(dir.path().join("f")).expect("created");
        if let Err(error) = set_attribute(file.as_fd(), b"user.a", b"1") {
            return eprintln!("ignored, because this file system has no attributes: {error}");
        }
        set_attribute(file.as_fd(), b"user.empty", b"").expect("set");
        assert_eq!(attributes(file.as_fd()).expect("listed").len(), 2);
        assert_eq!(attribute(file.as_fd(), b"user.a").expect("there"), b"1");
        assert_eq!(attribute(file.as_fd(), b"user.empty").expect("there"), b"");
        remove_attribute(file.as_fd(), b"user.a").expect("removed");
        assert!(attribute(file.as_fd(), b"user.a").is_err());
    }
}
