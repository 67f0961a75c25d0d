//! A file tree of this system, as source and sink of a transfer.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat, openat2, readlinkat};
use nix::sys::stat::{FileStat, Mode, UtimensatFlags, fstat, fstatat, mkdirat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

use super::{
    Entry, Kind, MODE_BITS, MOST_DEPTH, MOST_ENTRIES, MOST_PATH, PIECE_BYTES, Sink, Source, from_text, inside, invalid,
    to_text,
};

const BENEATH: ResolveFlag = ResolveFlag::RESOLVE_BENEATH.union(ResolveFlag::RESOLVE_NO_SYMLINKS);

/// A file tree of this system.
pub struct Tree {
    root: OwnedFd,
    /// Whether permissions that keep the owner out are widened; [`Sink::finish`] sets them again.
    unlocks: bool,
}

impl Tree {
    /// Opens the tree. `unlocks`: nothing else uses it, and this process owns the files without being root.
    ///
    /// # Errors
    /// Those of opening.
    pub fn open(root: &Path, unlocks: bool) -> io::Result<Tree> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(Tree { root: open(root, flags, Mode::empty())?, unlocks })
    }

    fn parent<'p>(&self, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
        let name = path.file_name().ok_or_else(|| invalid("a path without a name"))?;
        let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC).resolve(BENEATH);
        Ok((openat2(&self.root, above, how)?, name))
    }

    fn walk(&self, at: BorrowedFd<'_>, above: &Path, into: &mut Vec<Entry>) -> io::Result<()> {
        if above.components().count() >= MOST_DEPTH {
            return Err(invalid("the workspace has folders too deep"));
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut dir = Dir::openat(at, ".", flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in dir.iter() {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        for name in names {
            let (name, path) = (OsStr::from_bytes(&name), above.join(OsStr::from_bytes(&name)));
            if into.len() >= MOST_ENTRIES || path.as_os_str().len() > MOST_PATH {
                return Err(invalid("the workspace has too many files, or too long paths"));
            }
            let found = match fstatat(at, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
                Err(Errno::ENOENT) => continue,
                found => found?,
            };
            match found.st_mode & libc::S_IFMT {
                libc::S_IFREG => into.push(entry(&path, Kind::File, &found)),
                libc::S_IFDIR => {
                    let how = OpenHow::new().flags(flags).resolve(BENEATH | ResolveFlag::RESOLVE_NO_XDEV);
                    if self.unlocks && found.st_mode & 0o700 != 0o700 {
                        Pinned::open(at, name, Kind::Folder)?.set_mode(found.st_mode | 0o700)?;
                    }
                    let child = match openat2(at, name, how) {
                        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::EXDEV | Errno::ELOOP) => continue,
                        child => child?,
                    };
                    into.push(entry(&path, Kind::Folder, &found));
                    self.walk(child.as_fd(), &path, into)?;
                }
                libc::S_IFLNK => {
                    let target = match readlinkat(at, name) {
                        Err(Errno::ENOENT | Errno::EINVAL) => continue,
                        target => target?,
                    };
                    let target = to_text(target.as_bytes());
                    into.push(Entry { target, ..entry(&path, Kind::Link, &found) });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn open_file(&self, path: &Path) -> io::Result<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let open = || openat2(&self.root, path, OpenHow::new().flags(flags).resolve(BENEATH));
        let opened = match open() {
            Err(Errno::EACCES) if self.unlocks => {
                let (dir, name) = self.parent(path)?;
                let pinned = Pinned::open(dir.as_fd(), name, Kind::File)?;
                pinned.set_mode(pinned.found.st_mode | 0o400)?;
                let opened = open();
                pinned.set_mode(pinned.found.st_mode)?;
                opened?
            }
            opened => opened?,
        };
        let file = File::from(opened);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::from(io::ErrorKind::NotFound)),
        }
    }

    fn remove_in(&self, dir: BorrowedFd<'_>, name: &OsStr, depth: usize) -> io::Result<()> {
        match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::EISDIR | Errno::EPERM) if depth < MOST_DEPTH => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut folder = Dir::from_fd(openat(dir, name, flags, Mode::empty())?)?;
        let mut names = Vec::new();
        for entry in folder.iter() {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        for name in names {
            self.remove_in(folder.as_fd(), OsStr::from_bytes(&name), depth + 1)?;
        }
        Ok(unlinkat(dir, name, UnlinkatFlags::RemoveDir)?)
    }

    /// Narrows the permissions of folders that a list widened.
    ///
    /// # Errors
    /// Those of changing them.
    pub fn lock_again(&mut self, entries: &[Entry]) -> io::Result<()> {
        let widened = |entry: &&Entry| entry.kind == Kind::Folder && entry.mode & 0o700 != 0o700;
        let unlocks = self.unlocks;
        entries.iter().rev().filter(widened).filter(|_| unlocks).try_for_each(|entry| self.finish(entry))
    }

    /// Every entry, folders before their content.
    ///
    /// # Errors
    /// Those of reading, and `InvalidData` beyond a limit.
    pub fn list_all(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.walk(self.root.as_fd(), Path::new(""), &mut entries)?;
        Ok(entries)
    }
}

/// A file or folder whose permissions change, whatever its name means meanwhile.
struct Pinned {
    opened: OwnedFd,
    found: FileStat,
}

impl Pinned {
    /// Opens it without following a link, and without access to its content.
    fn open(dir: BorrowedFd<'_>, name: &OsStr, kind: Kind) -> io::Result<Pinned> {
        let opened = openat(dir, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
        let found = fstat(&opened)?;
        match (kind, found.st_mode & libc::S_IFMT) {
            (Kind::File, libc::S_IFREG) | (Kind::Folder, libc::S_IFDIR) => Ok(Pinned { opened, found }),
            _ => Err(invalid("a file of the workspace has become one of another type")),
        }
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        let itself = format!("/proc/self/fd/{}", self.opened.as_raw_fd());
        std::fs::set_permissions(itself, Permissions::from_mode(mode & MODE_BITS))
    }
}

fn entry(path: &Path, kind: Kind, found: &FileStat) -> Entry {
    Entry {
        path: to_text(path.as_os_str().as_bytes()),
        kind,
        mode: found.st_mode & MODE_BITS,
        size: if kind == Kind::File { found.st_size.cast_unsigned() } else { 0 },
        modified: (found.st_mtime, found.st_mtime_nsec),
        identity: (found.st_ctime, found.st_ctime_nsec, found.st_ino),
        target: String::new(),
    }
}

impl Source for Tree {
    fn list(&mut self) -> io::Result<Vec<Entry>> {
        self.list_all()
    }

    fn read(&mut self, path: &str, offset: u64) -> io::Result<Vec<u8>> {
        let file = self.open_file(&inside(path)?)?;
        let left = file.metadata()?.len().saturating_sub(offset);
        let mut data = vec![0; usize::try_from(left).unwrap_or(PIECE_BYTES).min(PIECE_BYTES)];
        let mut filled = 0;
        while filled < data.len() {
            match file.read_at(&mut data[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        data.truncate(filled);
        Ok(data)
    }
}

impl Sink for Tree {
    fn list(&mut self) -> io::Result<Vec<Entry>> {
        let mut entries = self.list_all()?;
        // As they are now, so that the transfer narrows them again.
        for entry in entries.iter_mut().filter(|entry| self.unlocks && entry.kind == Kind::Folder) {
            entry.mode |= 0o700;
        }
        Ok(entries)
    }

    fn remove(&mut self, path: &str) -> io::Result<()> {
        let path = inside(path)?;
        let (dir, name) = self.parent(&path)?;
        self.remove_in(dir.as_fd(), name, 0)
    }

    fn folder(&mut self, path: &str) -> io::Result<()> {
        let path = inside(path)?;
        let (dir, name) = self.parent(&path)?;
        Ok(mkdirat(&dir, name, Mode::from_bits_truncate(0o700))?)
    }

    fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        let path = inside(path)?;
        let target = from_text(target).ok_or_else(|| invalid("a link's target is invalid"))?;
        let (dir, name) = self.parent(&path)?;
        Ok(symlinkat(target.as_os_str(), &dir, name)?)
    }

    fn write(&mut self, path: &str, offset: u64, data: &[u8]) -> io::Result<()> {
        let path = inside(path)?;
        let (dir, name) = self.parent(&path)?;
        let mut flags = OFlag::O_WRONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        if offset == 0 {
            self.remove_in(dir.as_fd(), name, 0)?;
            flags |= OFlag::O_CREAT | OFlag::O_EXCL;
        }
        let file = File::from(openat(&dir, name, flags, Mode::from_bits_truncate(0o600))?);
        file.write_all_at(data, offset)
    }

    fn finish(&mut self, entry: &Entry) -> io::Result<()> {
        let path = inside(&entry.path)?;
        let (dir, name) = self.parent(&path)?;
        if entry.kind == Kind::File {
            let flags = OFlag::O_WRONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
            // A hole at the end was not written.
            if let Ok(file) = openat(&dir, name, flags, Mode::empty()).map(File::from)
                && file.metadata()?.len() < entry.size
            {
                file.set_len(entry.size)?;
            }
        }
        Pinned::open(dir.as_fd(), name, entry.kind)?.set_mode(entry.mode)?;
        let (secs, nanos) = entry.modified;
        let modified = TimeSpec::new(secs, nanos.clamp(0, 999_999_999));
        Ok(utimensat(&dir, name, &TimeSpec::UTIME_OMIT, &modified, UtimensatFlags::NoFollowSymlink)?)
    }
}
