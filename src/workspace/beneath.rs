//! Opens and stats files beneath a folder that untrusted code owns: never through a symbolic link, never outside it,
//! never into a mount.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{FileStat, fstat, fstatat};

use super::index::Stamp;
use super::tree::entry::{Attributes, MODE_BITS, Meta, Moment, Name, Reason};
use super::tree::format::is_kept_attribute;
use crate::sys::inode;

/// Longest path passed to the host kernel at once.
const PIECE: usize = 3900;

const FOLDER: OFlag = OFlag::O_DIRECTORY.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// No mount is entered, not even of the same file system: the watches of the workspace do not cover it.
const HERE: ResolveFlag = ResolveFlag::RESOLVE_NO_SYMLINKS.union(ResolveFlag::RESOLVE_NO_XDEV);

/// Type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Folder,
    Symlink,
    Fifo,
    Other(Reason),
}

/// Whether the error means that the entry was removed or replaced.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ESTALE)
}

/// Whether the error means that access is denied.
pub(super) fn is_refused(error: Errno) -> bool {
    matches!(error, Errno::EACCES | Errno::EPERM)
}

/// Opens a folder by its names from `root`, at any depth.
pub(super) fn folder<'n>(root: BorrowedFd<'_>, names: impl IntoIterator<Item = &'n Name>) -> nix::Result<OwnedFd> {
    let resolve = HERE | ResolveFlag::RESOLVE_BENEATH;
    let open = |at: BorrowedFd<'_>, path: &[u8]| {
        let path = if path.is_empty() { b".".as_slice() } else { path };
        let flags = FOLDER | OFlag::O_RDONLY;
        match openat2(at, path, OpenHow::new().flags(flags).resolve(resolve)) {
            // It may be searchable, if not readable.
            Err(Errno::EACCES) => openat2(at, path, OpenHow::new().flags(FOLDER | OFlag::O_PATH).resolve(resolve)),
            done => done,
        }
    };
    let mut at: Option<OwnedFd> = None;
    let mut path: Vec<u8> = Vec::new();
    for name in names {
        if path.len() + name.len() + 1 > PIECE {
            at = Some(open(at.as_ref().map_or(root, AsFd::as_fd), &path)?);
            path.clear();
        }
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
    }
    open(at.as_ref().map_or(root, AsFd::as_fd), &path)
}

/// Whether a workspace has a regular file at this path below it, without links.
pub fn has_file(workspace: &std::path::Path, below: &std::path::Path) -> bool {
    let look = || -> io::Result<bool> {
        let root = std::fs::File::open(workspace)?;
        let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(HERE | ResolveFlag::RESOLVE_BENEATH);
        let found = openat2(root.as_fd(), below, how)?;
        Ok(std::fs::File::from(found).metadata()?.is_file())
    };
    look().unwrap_or(false)
}

/// Opens a child folder. `EXDEV`: it is a mount point.
pub(super) fn child(dir: BorrowedFd<'_>, name: &[u8]) -> nix::Result<OwnedFd> {
    openat2(dir, name, OpenHow::new().flags(FOLDER | OFlag::O_RDONLY).resolve(HERE))
}

/// Opens a regular file for reading. Never blocks on a pipe. `EXDEV`: it is a mount point.
pub(super) fn file(dir: BorrowedFd<'_>, name: &[u8]) -> nix::Result<std::fs::File> {
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    openat2(dir, name, OpenHow::new().flags(flags).resolve(HERE)).map(Into::into)
}

/// Stats an entry itself, not the target of a link.
pub(super) fn look(dir: BorrowedFd<'_>, name: &[u8]) -> nix::Result<FileStat> {
    fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// Stats an open file.
pub(super) fn look_at(file: impl AsFd) -> nix::Result<FileStat> {
    fstat(file)
}

/// A path to an open file, readable or not.
pub(super) fn proc_path(file: BorrowedFd<'_>) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// The sorted names in an open folder.
pub(super) fn list(dir: BorrowedFd<'_>) -> io::Result<Vec<Name>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(proc_path(dir))? {
        names.push(entry?.file_name().into_vec().into_boxed_slice());
    }
    names.sort_unstable();
    Ok(names)
}

pub(super) fn kind(stat: &FileStat) -> Kind {
    match stat.st_mode & libc::S_IFMT {
        libc::S_IFREG => Kind::File,
        libc::S_IFDIR => Kind::Folder,
        libc::S_IFLNK => Kind::Symlink,
        libc::S_IFIFO => Kind::Fifo,
        libc::S_IFSOCK => Kind::Other(Reason::Socket),
        _ => Kind::Other(Reason::Device),
    }
}

pub(super) fn stamp(stat: &FileStat) -> Stamp {
    let moment = |secs: i64, nanos: i64| Moment { secs, nanos: u32::try_from(nanos).unwrap_or_default() };
    Stamp {
        inode: stat.st_ino,
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        modified: moment(stat.st_mtime, stat.st_mtime_nsec),
        changed: moment(stat.st_ctime, stat.st_ctime_nsec),
    }
}

/// Mode, time and owner from `stat`, with the given attributes.
pub(super) fn meta(stat: &FileStat, owner: (u32, u32), attributes: Attributes) -> Meta {
    let own = (stat.st_uid, stat.st_gid);
    Meta {
        // Links have no mode of their own.
        mode: if kind(stat) == Kind::Symlink { 0o777 } else { stat.st_mode & MODE_BITS },
        modified: stamp(stat).modified,
        owner: (own != owner).then_some(own),
        attributes,
    }
}

/// Whether a file has set-uid or set-gid bits, which trees do not keep. On folders, set-gid only passes the group on.
pub(super) fn has_set_id(stat: &FileStat) -> bool {
    kind(stat) == Kind::File && stat.st_mode & (libc::S_ISUID | libc::S_ISGID) != 0
}

/// The extended attributes that trees keep.
pub(super) fn attributes(file: BorrowedFd<'_>) -> io::Result<Attributes> {
    let mut kept = Vec::new();
    for name in inode::attributes(file)? {
        if is_kept_attribute(&name) {
            match inode::attribute(file, &name) {
                Ok(value) => kept.push((name.into_boxed_slice(), value.into_boxed_slice())),
                Err(error) if error.raw_os_error() == Some(libc::ENODATA) => {}
                Err(error) => return Err(error),
            }
        }
    }
    kept.sort();
    Ok((!kept.is_empty()).then(|| Box::new(kept)))
}
