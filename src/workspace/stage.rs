//! The staging folder beside a workspace, private to the daemon: files are prepared here before they are moved into
//! place, and removed files wait here for deletion. The next process removes what a killed one left.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, RenameFlags, openat, renameat, renameat2};
use nix::sys::stat::{Mode, UtimensatFlags, mkdirat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, linkat, mkfifoat, symlinkat, unlinkat};

use super::beneath::{self, proc_path};
use super::error::WorkspaceError;
use super::objects::Objects;
use super::paths::WorkspacePaths;
use super::tree::entry::{Content, Group, Meta, Moment};
use super::tree::read;
use crate::core::limits;
use crate::sys::{fault, fs, inode, random};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// The staging folder.
pub(super) struct Stage {
    dir: OwnedFd,
    path: PathBuf,
    /// Part of every name here, so that a finished stage's deletions do not touch it.
    own: String,
    next: u64,
    /// Hard-linked files, which have one more name here.
    groups: HashMap<Group, String>,
    /// Bytes written.
    pub bytes: u64,
    /// Bytes of replaced files that wait for deletion.
    kept: u64,
}

/// The workspace's owner, and whether owners can be set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    pub own: (u32, u32),
    pub privileged: bool,
}

/// A prepared file that is not in place yet.
pub(super) struct Staged {
    name: String,
    /// The open file, unless it is hard-linked.
    pub file: Option<File>,
}

impl Stage {
    /// Opens or creates the folder, and empties it.
    pub(super) fn open(paths: &WorkspacePaths, device: u64) -> Result<Stage> {
        let path = paths.staging.clone();
        let dir = Stage::folder_of(paths)?;
        let stat = beneath::look_at(&dir).map_err(WorkspaceError::of("look at", &path))?;
        if stat.st_dev != device {
            return Err(WorkspaceError::Staging { path });
        }
        let own: String = random::bytes::<8>().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut stage = Stage { dir, path, own, next: 0, groups: HashMap::new(), bytes: 0, kept: 0 };
        stage.clear()?;
        Ok(stage)
    }

    /// Opens or creates the folder as it is.
    pub(super) fn folder_of(paths: &WorkspacePaths) -> Result<OwnedFd> {
        let path = &paths.staging;
        // Every restore comes here: an existing folder needs no sync.
        if !path.is_dir() {
            fs::create_dir_durable(path, 0o700, "workspace.staging.dir")?;
        }
        Ok(File::open(path).map_err(WorkspaceError::of("open", path))?.into())
    }

    /// Gives an unnamed file of this folder a name, to be placed.
    pub(super) fn adopt(&mut self, file: &File) -> Result<Staged> {
        let name = self.name('u');
        let link = linkat(AT_FDCWD, &proc_path(file.as_fd()), &self.dir, name.as_str(), AtFlags::AT_SYMLINK_FOLLOW);
        link.map_err(self.failed("name a file in"))?;
        Ok(Staged { name, file: None })
    }

    fn name(&mut self, what: char) -> String {
        self.next += 1;
        format!("{what}{}-{}", self.own, self.next)
    }

    fn failed<E: Into<io::Error>>(&self, op: &'static str) -> impl FnOnce(E) -> WorkspaceError {
        let path = self.path.clone();
        move |error| WorkspaceError::io(op, &path, error.into())
    }

    /// Prepares a file with all metadata. Hard-linked names share one file.
    pub(super) fn file(
        &mut self,
        objects: &dyn Objects,
        (size, content, group): (u64, &Content, Option<Group>),
        meta: &Meta,
        owner: Owner,
    ) -> Result<Staged> {
        let Some(group) = group else {
            let name = self.name('f');
            let file = self.make_file(objects, &name, (size, content), meta, owner)?;
            return Ok(Staged { name, file: Some(file) });
        };
        if !self.groups.contains_key(&group) {
            let name = self.name('g');
            self.make_file(objects, &name, (size, content), meta, owner)?;
            self.groups.insert(group, name);
        }
        let first = self.groups[&group].clone();
        let name = self.name('l');
        let link = fault::point("workspace.staging.link")
            .and_then(|()| Ok(linkat(&self.dir, first.as_str(), &self.dir, name.as_str(), AtFlags::empty())?));
        link.map_err(self.failed("link a file in"))?;
        Ok(Staged { name, file: None })
    }

    fn make_file(
        &mut self,
        objects: &dyn Objects,
        name: &str,
        (size, content): (u64, &Content),
        meta: &Meta,
        owner: Owner,
    ) -> Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        let file: File = openat(&self.dir, name, flags, mode).map_err(self.failed("make a file in"))?.into();
        match content {
            Content::Inline(bytes) => self.write(&file, 0, bytes)?,
            Content::Whole(digest) => {
                let bytes = objects.get(*digest, limits::TREE_PIECE_BYTES as u64)?;
                self.write(&file, 0, &bytes)?;
            }
            Content::Map(digest) => {
                for piece in read::map(objects, *digest)?.pieces {
                    let bytes = objects.get(piece.digest, limits::TREE_PIECE_BYTES as u64)?;
                    self.write(&file, piece.offset, &bytes)?;
                }
            }
        }
        file.set_len(size).map_err(self.failed("write a file in"))?;
        self.apply_meta(file.as_fd(), meta, owner)?;
        Ok(file)
    }

    fn write(&mut self, file: &File, offset: u64, bytes: &[u8]) -> Result<()> {
        self.bytes += bytes.len() as u64;
        let written = fault::point("workspace.staging.write").and_then(|()| file.write_all_at(bytes, offset));
        written.map_err(self.failed("write a file in"))
    }

    /// Sets owner, attributes, mode and time of an open file or folder, in an order in which none undoes another.
    pub(super) fn apply_meta(&self, file: BorrowedFd<'_>, meta: &Meta, owner: Owner) -> Result<()> {
        if owner.privileged {
            let (user, group) = meta.owner.unwrap_or(owner.own);
            let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
            fchownat(file, "", user, group, AtFlags::AT_EMPTY_PATH).map_err(self.failed("give away a file of"))?;
        }
        let set = |file: BorrowedFd<'_>| -> io::Result<()> {
            let wanted = meta.attributes.as_deref().map(Vec::as_slice).unwrap_or_default();
            let present = beneath::attributes(file)?;
            for (name, value) in present.iter().flat_map(|list| list.iter()) {
                if !wanted.iter().any(|(other, same)| other == name && same == value) {
                    inode::remove_attribute(file, name)?;
                }
            }
            wanted.iter().try_for_each(|(name, value)| inode::set_attribute(file, name, value))?;
            std::fs::set_permissions(proc_path(file), Permissions::from_mode(meta.mode))
        };
        set(file).map_err(self.failed("set the attributes of a file of"))?;
        set_time(file, meta.modified).map_err(self.failed("set the time of a file of"))
    }

    /// Prepares a symbolic link.
    pub(super) fn symlink(&mut self, target: &[u8], meta: &Meta, owner: Owner) -> Result<Staged> {
        let name = self.name('s');
        symlinkat(target, &self.dir, name.as_str()).map_err(self.failed("make a link in"))?;
        self.apply_meta_by_name(&name, meta, owner)?;
        Ok(Staged { name, file: None })
    }

    /// Prepares a named pipe.
    pub(super) fn fifo(&mut self, meta: &Meta, owner: Owner) -> Result<Staged> {
        let name = self.name('p');
        mkfifoat(&self.dir, name.as_str(), Mode::S_IRUSR | Mode::S_IWUSR).map_err(self.failed("make a pipe in"))?;
        // The folder is private: the name is the pipe just made.
        std::fs::set_permissions(self.path.join(&name), Permissions::from_mode(meta.mode))
            .map_err(self.failed("set the mode of a pipe of"))?;
        self.apply_meta_by_name(&name, meta, owner)?;
        Ok(Staged { name, file: None })
    }

    /// Sets the metadata of an entry that cannot be opened.
    fn apply_meta_by_name(&self, name: &str, meta: &Meta, owner: Owner) -> Result<()> {
        if owner.privileged {
            let (user, group) = meta.owner.unwrap_or(owner.own);
            let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
            fchownat(&self.dir, name, user, group, AtFlags::AT_SYMLINK_NOFOLLOW)
                .map_err(self.failed("give away a file of"))?;
        }
        let (access, modified) = times(meta.modified);
        utimensat(&self.dir, name, &access, &modified, UtimensatFlags::NoFollowSymlink)
            .map_err(self.failed("set the time of a file of"))
    }

    /// Moves a prepared file into place, over anything but a folder. With `keep`, its size, the replaced file is moved
    /// here and deleted later: freeing blocks is slow on some file systems, and ext4 starts writing out a file that
    /// replaces another.
    pub(super) fn place(
        &mut self,
        staged: &Staged,
        dir: BorrowedFd<'_>,
        name: &[u8],
        keep: Option<u64>,
    ) -> io::Result<()> {
        fault::point("workspace.place.rename")?;
        // Bounded, for a full disk.
        if let Some(bytes) = keep.filter(|bytes| self.kept.saturating_add(*bytes) <= limits::WORKSPACE_REPLACED_BYTES) {
            self.kept += bytes;
            match renameat2(&self.dir, staged.name.as_str(), dir, name, RenameFlags::RENAME_EXCHANGE) {
                // The entry is gone, or the file system cannot exchange.
                Err(Errno::ENOENT | Errno::EINVAL | Errno::ENOSYS) => {}
                done => return Ok(done?),
            }
        }
        renameat(&self.dir, staged.name.as_str(), dir, name)?;
        Ok(())
    }

    /// Removes an entry from the workspace, a folder with its content.
    pub(super) fn remove(&mut self, dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
        fault::point("workspace.place.remove")?;
        let to = self.name('t');
        match renameat(dir, name, &self.dir, to.as_str()) {
            // Moving a folder needs write permission on it.
            Err(Errno::EACCES | Errno::EPERM) => {
                let folder = openat(
                    dir,
                    name,
                    OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
                    Mode::empty(),
                )?;
                std::fs::set_permissions(proc_path(folder.as_fd()), Permissions::from_mode(0o700))?;
                Ok(renameat(dir, name, &self.dir, to.as_str())?)
            }
            Err(Errno::ENOENT) => Ok(()),
            done => Ok(done?),
        }
    }

    /// A hard-linked file, if it was prepared, without its extra name here.
    pub(super) fn take_group(&mut self, group: &Group) -> Option<File> {
        let name = self.groups.remove(group)?;
        let file = beneath::file(self.dir.as_fd(), name.as_bytes()).ok()?;
        self.clear_one(name.as_bytes()).ok()?;
        Some(file)
    }

    /// Deletes the leftovers in the background.
    pub(super) fn leave(mut self) {
        let of_own = |stage: &Stage| -> Result<Vec<_>> {
            let mut names = beneath::list(stage.dir.as_fd()).map_err(stage.failed("list"))?;
            names.retain(|name| name.get(1..).is_some_and(|rest| rest.starts_with(stage.own.as_bytes())));
            Ok(names)
        };
        if of_own(&self).is_ok_and(|names| names.is_empty()) {
            return;
        }
        // If the thread cannot be started, or ends early, the next open or restore of the workspace deletes the rest.
        let _ = std::thread::Builder::new().name("staging".into()).spawn(move || {
            while let Ok(names) = of_own(&self)
                && !names.is_empty()
                && names.iter().all(|name| self.clear_one(name).is_ok())
            {}
        });
    }

    /// Deletes everything here. Nested folders are first moved up: no depth is too deep.
    pub(super) fn clear(&mut self) -> Result<()> {
        self.groups.clear();
        loop {
            let names = beneath::list(self.dir.as_fd()).map_err(self.failed("list"))?;
            if names.is_empty() {
                return Ok(());
            }
            for name in names {
                match self.clear_one(&name) {
                    // A finished stage deletes its own files.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    done => done.map_err(self.failed("empty"))?,
                }
            }
        }
    }

    fn clear_one(&mut self, name: &[u8]) -> io::Result<()> {
        fault::point("workspace.staging.clear")?;
        match unlinkat(&self.dir, name, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR | Errno::EPERM) => {}
            done => return Ok(done?),
        }
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let path = openat(&self.dir, name, flags, Mode::empty())?;
        std::fs::set_permissions(proc_path(path.as_fd()), Permissions::from_mode(0o700))?;
        let folder = beneath::child(self.dir.as_fd(), name)?;
        for inner in beneath::list(folder.as_fd())? {
            match unlinkat(&folder, &*inner, UnlinkatFlags::NoRemoveDir) {
                Err(Errno::EISDIR | Errno::EPERM) => {
                    let up = self.free_name()?;
                    match renameat(&folder, &*inner, &self.dir, up.as_str()) {
                        Err(Errno::EACCES | Errno::EPERM) => {
                            let inner_path = openat(&folder, &*inner, flags, Mode::empty())?;
                            std::fs::set_permissions(proc_path(inner_path.as_fd()), Permissions::from_mode(0o700))?;
                            renameat(&folder, &*inner, &self.dir, up.as_str())?;
                        }
                        done => done?,
                    }
                }
                done => done?,
            }
        }
        Ok(unlinkat(&self.dir, name, UnlinkatFlags::RemoveDir)?)
    }

    /// A name that no earlier process used.
    fn free_name(&mut self) -> io::Result<String> {
        loop {
            let name = self.name('d');
            match beneath::look(self.dir.as_fd(), name.as_bytes()) {
                Ok(_) => {}
                Err(Errno::ENOENT) => return Ok(name),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Creates a folder in the workspace, accessible only to its owner until it is complete.
    pub(super) fn folder(&self, dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
        fault::point("workspace.place.folder")?;
        Ok(mkdirat(dir, name, Mode::S_IRWXU)?)
    }
}

pub(super) fn times(modified: Moment) -> (TimeSpec, TimeSpec) {
    (TimeSpec::UTIME_OMIT, TimeSpec::new(modified.secs, i64::from(modified.nanos)))
}

/// Sets the modification time.
pub(super) fn set_time(file: BorrowedFd<'_>, modified: Moment) -> io::Result<()> {
    let (access, modified) = times(modified);
    let path = proc_path(file);
    Ok(utimensat(nix::fcntl::AT_FDCWD, &path, &access, &modified, UtimensatFlags::FollowSymlink)?)
}
