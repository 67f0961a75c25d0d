//! A client's access to the files of a workspace, by path: reading. `files_change` changes them.
//!
//! Code inside may change every name at any moment. So a path is resolved once, by the host kernel, relative to an open
//! descriptor of the workspace, and never out of it; everything else happens on the resulting descriptor. A daemon that
//! is root refuses what the workspace's owner could not do.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, ReadDir};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2, readlinkat};
use nix::sys::stat::{FileStat, Mode};

use super::beneath::{self, Kind};
use super::paths::WorkspacePaths;
use super::stage::Owner;
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::files::{FileError, FileInfo, FileKind, FilePath, no_room};
use crate::core::limits;

/// Links are followed beneath the workspace only, and no mount is entered.
const BENEATH: ResolveFlag =
    ResolveFlag::RESOLVE_BENEATH.union(ResolveFlag::RESOLVE_NO_MAGICLINKS).union(ResolveFlag::RESOLVE_NO_XDEV);

/// The permission to read.
pub(super) const READ: u32 = 4;

/// The files of a workspace on this host. All calls block.
#[derive(Debug, Clone)]
pub struct LocalFiles {
    pub(super) paths: WorkspacePaths,
    pub(super) durability: Durability,
}

/// The bytes that a file or a directory with its contents takes on its device; 0 if it is gone. No
/// link is followed, so code that changes the directory meanwhile leads nowhere. Blocks.
///
/// # Errors
/// As [`LocalFiles::used_bytes`].
pub fn disk_bytes(path: &Path) -> Result<u64> {
    disk_bytes_beyond(path, &mut LinkedFiles::default())
}

/// Files with several names that are counted already, by device and inode.
pub type LinkedFiles = HashSet<(u64, u64)>;

/// As [`disk_bytes`], without the files that were counted before: those with several names are added to them. Blocks.
///
/// # Errors
/// As [`disk_bytes`].
pub fn disk_bytes_beyond(path: &Path, counted: &mut LinkedFiles) -> Result<u64> {
    let Ok(own) = std::fs::symlink_metadata(path) else { return Ok(0) };
    let own_bytes = own.blocks().saturating_mul(512);
    if !own.is_dir() {
        let is_counted = own.nlink() > 1 && !counted.insert((own.dev(), own.ino()));
        return Ok(if is_counted { 0 } else { own_bytes });
    }
    let paths = WorkspacePaths { workspace: path.to_owned(), staging: PathBuf::new(), index: PathBuf::new() };
    Ok(own_bytes.saturating_add(LocalFiles::new(paths, Durability::Process).used_bytes_beyond(counted)?))
}

/// An open workspace.
pub(super) struct Root {
    pub dir: OwnedFd,
    pub device: u64,
    pub owner: Owner,
}

impl LocalFiles {
    /// Access to the files at these paths.
    pub fn new(paths: WorkspacePaths, durability: Durability) -> LocalFiles {
        LocalFiles { paths, durability }
    }

    /// Opens the workspace for one call: a restore or a return from the archive may replace it.
    pub(super) fn root(&self) -> Result<Root> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let path = &self.paths.workspace;
        let failed = |error: Errno| Error::unavailable(format!("the workspace cannot be opened: {error}"));
        let dir = open(path, flags, Mode::empty()).map_err(failed)?;
        let stat = beneath::look_at(&dir).map_err(failed)?;
        let privileged = nix::unistd::Uid::effective().is_root();
        Ok(Root { dir, device: stat.st_dev, owner: Owner { own: (stat.st_uid, stat.st_gid), privileged } })
    }

    /// The attributes of a file; with `follow`, of what a link leads to.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn stat(&self, path: &FilePath, follow: bool) -> Result<FileInfo> {
        let flags = if follow { OFlag::empty() } else { OFlag::O_NOFOLLOW };
        let found = self.root()?.resolve(path.names(), flags, &path.shown())?;
        let name = path.split().map(|(_, name)| name.to_vec()).unwrap_or_default();
        info_of(found.as_fd(), name).map_err(|error| refusal(error, &path.shown()))
    }

    /// Opens a directory, to list its entries.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn list(&self, path: &FilePath) -> Result<Listing> {
        let (root, shown) = (self.root()?, path.shown());
        let dir = root.resolve(path.names(), OFlag::O_DIRECTORY, &shown)?;
        root.permit(dir.as_fd(), READ, &shown)?;
        let entries = std::fs::read_dir(beneath::proc_path(dir.as_fd())).map_err(|error| failure(&error, &shown))?;
        Ok(Listing { dir, entries, shown })
    }

    /// Opens a regular file. It stays the same file whatever its path names later.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn open(&self, path: &FilePath) -> Result<(File, FileInfo)> {
        let (root, shown) = (self.root()?, path.shown());
        let found = root.resolve(path.names(), OFlag::empty(), &shown)?;
        let name = path.split().map(|(_, name)| name.to_vec()).unwrap_or_default();
        let info = info_of(found.as_fd(), name).map_err(|error| refusal(error, &shown))?;
        match info.kind {
            FileKind::File => {}
            FileKind::Directory => return Err(FileError::IsDirectory.on(&shown)),
            FileKind::Symlink | FileKind::Other => return Err(FileError::NotRegular.on(&shown)),
        }
        root.permit(found.as_fd(), READ, &shown)?;
        // The kind is known by now: opening has no side effects.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(beneath::proc_path(found.as_fd()));
        Ok((opened.map_err(|error| failure(&error, &shown))?, info))
    }

    /// The bytes that the files take on their device. Links are not followed.
    ///
    /// # Errors
    /// `busy` for more files than [`limits::FILES_COUNTED`]; those of the device.
    pub fn used_bytes(&self) -> Result<u64> {
        self.used_bytes_beyond(&mut LinkedFiles::default())
    }

    fn used_bytes_beyond(&self, linked: &mut LinkedFiles) -> Result<u64> {
        let root = self.root()?;
        let (mut bytes, mut visited) = (0_u64, 0);
        let mut dirs: Vec<Vec<Vec<u8>>> = vec![Vec::new()];
        while let Some(names) = dirs.pop() {
            let shown = String::from_utf8_lossy(&names.join(&b'/')).into_owned();
            // A directory that is gone, unreadable or no longer one counts as empty.
            let Ok(dir) = root.try_resolve(&names, OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW) else { continue };
            let Ok(entries) = std::fs::read_dir(beneath::proc_path(dir.as_fd())) else { continue };
            for entry in entries {
                let name = entry.map_err(|error| failure(&error, &shown))?.file_name().into_vec();
                visited += 1;
                if visited > limits::FILES_COUNTED {
                    let text = format!("the workspace has more than {} files", limits::FILES_COUNTED);
                    return Err(Error::busy(text).hint("remove some of them by an execution"));
                }
                let Ok(stat) = beneath::look(dir.as_fd(), &name) else { continue };
                let is_dir = matches!(beneath::kind(&stat), Kind::Folder);
                if stat.st_nlink > 1 && !is_dir && !linked.insert((stat.st_dev, stat.st_ino)) {
                    continue;
                }
                bytes = bytes.saturating_add(u64::try_from(stat.st_blocks).unwrap_or_default().saturating_mul(512));
                if is_dir {
                    dirs.push(names.iter().cloned().chain([name]).collect());
                }
            }
        }
        Ok(bytes)
    }

    /// Reads at most `most` bytes of an open file; fewer only at its end.
    ///
    /// # Errors
    /// Those of the device.
    pub fn read(file: &File, from: u64, most: usize) -> Result<Vec<u8>> {
        let mut data = vec![0; most];
        let mut filled = 0;
        while filled < most {
            match file.read_at(&mut data[filled..], from.saturating_add(filled as u64)) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Beyond the largest offset there is nothing.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => break,
                Err(error) => return Err(failure(&error, "the file")),
            }
        }
        data.truncate(filled);
        Ok(data)
    }
}

impl Root {
    /// Opens what the names lead to, as a path only.
    pub(super) fn resolve(&self, names: &[Vec<u8>], flags: OFlag, shown: &str) -> Result<OwnedFd> {
        self.try_resolve(names, flags).map_err(|error| refusal(error, shown))
    }

    pub(super) fn try_resolve(&self, names: &[Vec<u8>], flags: OFlag) -> nix::Result<OwnedFd> {
        let joined = names.join(&b'/');
        let path = if joined.is_empty() { b".".as_slice() } else { &joined };
        let how = OpenHow::new().flags(flags | OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(BENEATH);
        let mut attempts = 0;
        loop {
            match openat2(&self.dir, path, how) {
                // A name was changed meanwhile, and the host kernel cannot exclude that the path leads out.
                Err(Errno::EAGAIN) if attempts < limits::FILE_RESOLVE_ATTEMPTS => attempts += 1,
                done => return done,
            }
        }
    }

    /// Refuses a daemon that is root what the mode of a file refuses its owner.
    pub(super) fn permit(&self, file: BorrowedFd<'_>, wanted: u32, shown: &str) -> Result<()> {
        if !self.owner.privileged {
            return Ok(());
        }
        let stat = beneath::look_at(file).map_err(|error| refusal(error, shown))?;
        if permits(&stat, self.owner.own, wanted) { Ok(()) } else { Err(FileError::Permission.on(shown)) }
    }
}

fn permits(stat: &FileStat, (user, group): (u32, u32), wanted: u32) -> bool {
    let shift = match () {
        () if stat.st_uid == user => 6,
        () if stat.st_gid == group => 3,
        () => 0,
    };
    stat.st_mode >> shift & wanted == wanted
}

/// An open directory. Its entries come in no order.
#[derive(Debug)]
pub struct Listing {
    dir: OwnedFd,
    entries: ReadDir,
    shown: String,
}

impl Listing {
    /// The next entries, a bounded number; none at the end.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn next_page(&mut self) -> Result<Vec<FileInfo>> {
        let mut page = Vec::new();
        while page.len() < limits::FILE_LIST_PAGE {
            let Some(entry) = self.entries.next() else { break };
            let name = entry.map_err(|error| failure(&error, &self.shown))?.file_name().into_vec();
            match entry_info(self.dir.as_fd(), name) {
                Ok(info) => page.push(info),
                // It was removed meanwhile.
                Err(Errno::ENOENT) => {}
                Err(error) => return Err(refusal(error, &self.shown)),
            }
        }
        Ok(page)
    }
}

fn entry_info(dir: BorrowedFd<'_>, name: Vec<u8>) -> nix::Result<FileInfo> {
    let stat = beneath::look(dir, &name)?;
    let target = match beneath::kind(&stat) {
        Kind::Symlink => readlinkat(dir, name.as_slice())?.into_vec(),
        Kind::File | Kind::Folder | Kind::Fifo | Kind::Other(_) => Vec::new(),
    };
    Ok(info(&stat, name, target))
}

/// The attributes of an open file.
pub(super) fn info_of(file: BorrowedFd<'_>, name: Vec<u8>) -> nix::Result<FileInfo> {
    let stat = beneath::look_at(file)?;
    let target = match beneath::kind(&stat) {
        Kind::Symlink => readlinkat(file, "")?.as_bytes().to_vec(),
        Kind::File | Kind::Folder | Kind::Fifo | Kind::Other(_) => Vec::new(),
    };
    Ok(info(&stat, name, target))
}

fn info(stat: &FileStat, name: Vec<u8>, target: Vec<u8>) -> FileInfo {
    let kind = match beneath::kind(stat) {
        Kind::File => FileKind::File,
        Kind::Folder => FileKind::Directory,
        Kind::Symlink => FileKind::Symlink,
        Kind::Fifo | Kind::Other(_) => FileKind::Other,
    };
    FileInfo {
        name,
        kind,
        bytes: u64::try_from(stat.st_size).unwrap_or_default(),
        mode: stat.st_mode & 0o7777,
        modified_ns: stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec),
        target,
    }
}

/// The error of a failed operation on a path.
pub(super) fn refusal(error: Errno, shown: &str) -> Error {
    let known = match error {
        Errno::ENOENT | Errno::ESTALE => FileError::NotFound,
        Errno::ENOTDIR => FileError::NotDirectory,
        Errno::EISDIR => FileError::IsDirectory,
        Errno::EEXIST => FileError::Exists,
        Errno::ENOTEMPTY => FileError::NotEmpty,
        Errno::EXDEV | Errno::ELOOP => FileError::Outside,
        Errno::EACCES | Errno::EPERM => FileError::Permission,
        Errno::EFBIG => FileError::TooLarge,
        Errno::EBUSY => FileError::Mount,
        Errno::ENOSPC | Errno::EDQUOT => return no_room(shown),
        Errno::EAGAIN => return Error::busy(format!("the directories of {shown} are being renamed")).hint("try again"),
        Errno::EINVAL | Errno::ENAMETOOLONG => return Error::invalid(format!("{shown}: {}", error.desc())),
        other => return Error::internal(format!("{shown}: {}", other.desc())),
    };
    known.on(shown)
}

/// As [`refusal`], for errors of the standard library.
pub(super) fn failure(error: &io::Error, shown: &str) -> Error {
    match error.raw_os_error() {
        Some(code) => refusal(Errno::from_raw(code), shown),
        None => Error::internal(format!("{shown}: {error}")),
    }
}
