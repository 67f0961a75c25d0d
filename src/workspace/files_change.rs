//! A client's changes of the files of a workspace, by path. `files` reads them.
//!
//! A file is written without a name in the staging folder, and appears by one rename; a killed daemon leaves nothing of
//! an unfinished one. The caller keeps captures and restores away from each change.

use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, RenameFlags, ResolveFlag, openat, openat2, renameat2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, unlinkat};

use super::beneath::{self, Kind, proc_path};
use super::files::{LocalFiles, Root, failure, info_of, refusal};
use super::stage::{Stage, Staged, set_time};
use super::tree::entry::{Meta, Moment};
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::files::{FILE_MODE_BITS, FileAttributes, FileChange, FileError, FileInfo, FilePath, Placement};
use crate::core::limits;

/// Mode of a new file.
const NEW_FILE: u32 = 0o644;
/// Mode of a new directory on the way to a file.
const NEW_FOLDER: u32 = 0o755;
/// The permission to change the entries of a directory.
const CHANGE: u32 = 3;

/// A file without a name yet.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    bytes: u64,
    most_bytes: u64,
}

impl NewFile {
    /// Appends to it.
    ///
    /// # Errors
    /// `too_large`, and those of the device.
    pub fn write(&mut self, data: &[u8]) -> Result<()> {
        self.bytes = self.bytes.saturating_add(data.len() as u64);
        if self.bytes > self.most_bytes {
            return Err(FileError::TooLarge.on("the file"));
        }
        self.file.write_all(data).map_err(|error| failure(&error, "the file"))
    }
}

impl LocalFiles {
    /// Begins a file of at most `most_bytes`.
    ///
    /// # Errors
    /// `unsupported` if the file system has no unnamed files.
    pub fn begin_write(&self, most_bytes: u64) -> Result<NewFile> {
        let staging = Stage::folder_of(&self.paths)?;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        match openat(&staging, ".", OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC, mode) {
            Ok(file) => Ok(NewFile { file: file.into(), bytes: 0, most_bytes }),
            Err(Errno::EOPNOTSUPP | Errno::EISDIR) => {
                Err(Error::unsupported("the file system of the workspace has no unnamed files")
                    .reason("unnamed_files")
                    .hint("keep ryokan's data on ext4, XFS, Btrfs or tmpfs"))
            }
            Err(error) => Err(refusal(error, "the file")),
        }
    }

    /// Makes a written file appear, complete.
    ///
    /// # Errors
    /// A [`FileError`]; nothing has changed then, except that missing directories may exist.
    pub fn place(&self, new: &NewFile, place: &Placement) -> Result<FileInfo> {
        let (root, shown) = (self.root()?, place.path.shown());
        let (parent, name) = root.parent_of(&place.path, place.parents)?;
        let replaced = not_a_folder(parent.as_fd(), name, &shown)?;
        let mode = place.attributes.mode.map(|mode| mode & FILE_MODE_BITS).or(replaced).unwrap_or(NEW_FILE);
        let file = new.file.as_fd();
        root.own(file, &shown)?;
        set_attributes(file, FileAttributes { mode: Some(mode), ..place.attributes }, &shown)?;
        if self.durability == Durability::Power {
            new.file.sync_all().map_err(|error| failure(&error, &shown))?;
        }
        self.put(&root, parent.as_fd(), name, &shown, |stage| Ok(stage.adopt(&new.file)?))?;
        info_of(file, name.to_vec()).map_err(|error| refusal(error, &shown))
    }

    /// Applies a change.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn change(&self, change: &FileChange) -> Result<()> {
        match change {
            FileChange::MakeDir { path, mode, parents } => self.make_dir(path, *mode, *parents),
            FileChange::MakeLink { at, target } => self.make_link(at, target),
            FileChange::Rename { from, to, replace } => self.rename(from, to, *replace),
            FileChange::Remove { path, recursive } => self.remove(path, *recursive),
            FileChange::SetAttributes { path, attributes } => {
                let (root, shown) = (self.root()?, path.shown());
                let file = root.resolve(path.names(), OFlag::O_NOFOLLOW, &shown)?;
                let stat = beneath::look_at(&file).map_err(|error| refusal(error, &shown))?;
                match beneath::kind(&stat) {
                    Kind::File | Kind::Folder => {}
                    Kind::Symlink | Kind::Fifo | Kind::Other(_) => return Err(FileError::NotRegular.on(&shown)),
                }
                if root.owner.privileged && stat.st_uid != root.owner.own.0 {
                    return Err(FileError::Permission.on(&shown));
                }
                set_attributes(file.as_fd(), *attributes, &shown)
            }
        }?;
        self.settle(change.paths().first().map(|(path, _)| path.shown()).unwrap_or_default().as_str())
    }

    fn make_dir(&self, path: &FilePath, mode: u32, parents: bool) -> Result<()> {
        if path.names().is_empty() {
            return Ok(());
        }
        let root = self.root()?;
        let (parent, name) = root.parent_of(path, parents)?;
        root.folder(parent.as_fd(), name, mode & FILE_MODE_BITS, &path.shown()).map(drop)
    }

    fn make_link(&self, at: &Placement, target: &[u8]) -> Result<()> {
        if target.is_empty() || target.contains(&0) || target.len() > limits::LINK_TARGET_BYTES {
            return Err(Error::invalid("the target of a link has 1 to 4095 bytes, and none of them is zero"));
        }
        let (root, shown) = (self.root()?, at.path.shown());
        let (parent, name) = root.parent_of(&at.path, at.parents)?;
        not_a_folder(parent.as_fd(), name, &shown)?;
        let now = || i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos()).unwrap_or(i64::MAX);
        let modified = moment(at.attributes.modified_ns.unwrap_or_else(now));
        let meta = Meta { mode: 0o777, modified, owner: None, attributes: None };
        self.put(&root, parent.as_fd(), name, &shown, |stage| Ok(stage.symlink(target, &meta, root.owner)?))
    }

    fn rename(&self, from: &FilePath, to: &FilePath, replace: bool) -> Result<()> {
        let root = self.root()?;
        let (source, source_name) = root.parent_of(from, false)?;
        let (target, target_name) = root.parent_of(to, false)?;
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::RENAME_NOREPLACE };
        renameat2(&source, source_name, &target, target_name, flags).map_err(|error| {
            let at_target = matches!(error, Errno::EEXIST | Errno::EISDIR | Errno::ENOTDIR | Errno::ENOTEMPTY);
            refusal(error, &if at_target { to.shown() } else { from.shown() })
        })
    }

    fn remove(&self, path: &FilePath, recursive: bool) -> Result<()> {
        let (root, shown) = (self.root()?, path.shown());
        let (parent, name) = root.parent_of(path, false)?;
        let stat = beneath::look(parent.as_fd(), name).map_err(|error| refusal(error, &shown))?;
        let is_folder = beneath::kind(&stat) == Kind::Folder;
        if !(is_folder && recursive) {
            let how = if is_folder { UnlinkatFlags::RemoveDir } else { UnlinkatFlags::NoRemoveDir };
            return unlinkat(&parent, name, how).map_err(|error| refusal(error, &shown));
        }
        // Out of sight in one step; its content is deleted in the background.
        let mut stage = Stage::open(&self.paths, root.device)?;
        let removed = stage.remove(parent.as_fd(), name).map_err(|error| failure(&error, &shown));
        stage.leave();
        removed
    }

    /// Prepares an entry beside the workspace, and moves it into place.
    fn put(
        &self,
        root: &Root,
        parent: BorrowedFd<'_>,
        name: &[u8],
        shown: &str,
        make: impl FnOnce(&mut Stage) -> Result<Staged>,
    ) -> Result<()> {
        let mut stage = Stage::open(&self.paths, root.device)?;
        let placed = make(&mut stage)
            .and_then(|staged| stage.place(&staged, parent, name, None).map_err(|error| failure(&error, shown)));
        // Removes what was not placed.
        stage.leave();
        placed?;
        self.settle(shown)
    }

    /// Makes a change durable, if a loss of power must not undo it.
    fn settle(&self, shown: &str) -> Result<()> {
        match self.durability {
            Durability::Process => Ok(()),
            Durability::Power => {
                let workspace = File::open(&self.paths.workspace).map_err(|error| failure(&error, shown))?;
                nix::unistd::syncfs(&workspace).map_err(|error| refusal(error, shown))
            }
        }
    }
}

impl Root {
    /// Opens the directory of a path, whose entries may be changed; with `make`, missing ones are made.
    fn parent_of<'p>(&self, path: &'p FilePath, make: bool) -> Result<(OwnedFd, &'p [u8])> {
        let shown = path.shown();
        let (folders, name) = path.split().ok_or_else(|| {
            Error::refused("the workspace itself cannot be changed").reason(FileError::Mount.reason())
        })?;
        let parent = match self.try_resolve(folders, OFlag::O_DIRECTORY) {
            Err(Errno::ENOENT) if make => self.make_folders(folders, &shown)?,
            found => found.map_err(|error| refusal(error, &shown))?,
        };
        self.permit(parent.as_fd(), CHANGE, &shown)?;
        Ok((parent, name))
    }

    /// Makes the missing directories, below the deepest one that exists.
    fn make_folders(&self, folders: &[Vec<u8>], shown: &str) -> Result<OwnedFd> {
        let mut depth = folders.len();
        let mut at = loop {
            depth = depth.saturating_sub(1);
            match self.try_resolve(&folders[..depth], OFlag::O_DIRECTORY) {
                Err(Errno::ENOENT) if depth > 0 => {}
                found => break found.map_err(|error| refusal(error, shown))?,
            }
        };
        for name in &folders[depth..] {
            self.permit(at.as_fd(), CHANGE, shown)?;
            at = self.folder(at.as_fd(), name, NEW_FOLDER, shown)?;
        }
        Ok(at)
    }

    /// Makes a directory unless it exists, and opens it.
    fn folder(&self, parent: BorrowedFd<'_>, name: &[u8], mode: u32, shown: &str) -> Result<OwnedFd> {
        let made = match mkdirat(parent, name, Mode::S_IRWXU) {
            Ok(()) => true,
            Err(Errno::EEXIST) => false,
            Err(error) => return Err(refusal(error, shown)),
        };
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let resolve = ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV | ResolveFlag::RESOLVE_BENEATH;
        let opened = openat2(parent, name, OpenHow::new().flags(flags).resolve(resolve));
        let opened = opened.map_err(|error| match error {
            Errno::ELOOP => FileError::NotDirectory.on(shown),
            error => refusal(error, shown),
        })?;
        if made {
            self.own(opened.as_fd(), shown)?;
            set_attributes(opened.as_fd(), FileAttributes { mode: Some(mode), modified_ns: None }, shown)?;
        }
        Ok(opened)
    }

    /// Gives a new file of a daemon that is root to the kernel's user.
    fn own(&self, file: BorrowedFd<'_>, shown: &str) -> Result<()> {
        if !self.owner.privileged {
            return Ok(());
        }
        let (user, group) = self.owner.own;
        let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
        fchownat(file, "", user, group, AtFlags::AT_EMPTY_PATH).map_err(|error| refusal(error, shown))
    }
}

/// Refuses a directory in the place of a file; returns the mode of a regular file there.
fn not_a_folder(parent: BorrowedFd<'_>, name: &[u8], shown: &str) -> Result<Option<u32>> {
    match beneath::look(parent, name) {
        Ok(stat) => match beneath::kind(&stat) {
            Kind::Folder => Err(FileError::IsDirectory.on(shown)),
            Kind::File => Ok(Some(stat.st_mode & FILE_MODE_BITS)),
            Kind::Symlink | Kind::Fifo | Kind::Other(_) => Ok(None),
        },
        Err(Errno::ENOENT) => Ok(None),
        Err(error) => Err(refusal(error, shown)),
    }
}

fn set_attributes(file: BorrowedFd<'_>, attributes: FileAttributes, shown: &str) -> Result<()> {
    if let Some(mode) = attributes.mode {
        let mode = Permissions::from_mode(mode & FILE_MODE_BITS);
        std::fs::set_permissions(proc_path(file), mode).map_err(|error| failure(&error, shown))?;
    }
    match attributes.modified_ns {
        Some(ns) => set_time(file, moment(ns)).map_err(|error| failure(&error, shown)),
        None => Ok(()),
    }
}

fn moment(ns: i64) -> Moment {
    let nanos = u32::try_from(ns.rem_euclid(1_000_000_000)).unwrap_or_default();
    Moment { secs: ns.div_euclid(1_000_000_000), nanos }
}
