//! The data directory of a PostgreSQL server: snapshots of its Btrfs subvolume, the log that a backup needs, checkouts and
//! the exchange. Blocks; knows no server.
//!
//! ```text
//! DIR/NAME                     the data directory, a subvolume
//! DIR/.NAME.ryokan/            root's or the server's user's own; nobody else reaches what is in it, except the user of a
//!       │                      private server while that runs
//!       ├ copy                 what a freeze pinned
//!       ├ trial                a copy of that, while it is started
//!       ├ part                 an incomplete checkout
//!       ├ new                  prepared for a restore; the former data directory after the switch. Always whole
//!       ├ gone                 what is left of a `new` that is being removed
//!       └ run                  socket and settings of a private server
//! ```
//! `postgres_marks` describes what marks them.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::directory::{index_of, refuse_missing};
use crate::core::error::{Error, Result};
use crate::core::freeze::server::{BackupEnd, ServerPart, is_segment};
use crate::core::limits;
use crate::store::Store;
use crate::supervisor::host::Host;
use crate::sys::fs::{path_of, remove_tree, sync_dir};
use crate::sys::{btrfs, fault, inode};
use crate::workspace::{self, Donor, Durability, Tracker, TreeId, WorkspaceError, WorkspacePaths};

/// Names in the folder beside the data directory.
pub(super) const COPY: &str = "copy";
pub(super) const TRIAL: &str = "trial";
pub(super) const NEW: &str = "new";
const PART: &str = "part";
const GONE: &str = "gone";
const RUN: &str = "run";
/// Modes of the folder: for its owner alone, and such that others pass through it.
const CLOSED: u32 = 0o700;
const OPEN: u32 = 0o711;
const STAGING: &str = "staging";
const INDEX: &str = "new.index";
/// More than the grain of the times of files.
const GRAIN: Duration = Duration::from_millis(100);
/// Inode number of the empty directory in the place of a subvolume within a snapshot.
const EMPTY_SUBVOLUME: u64 = 2;

/// The places of one server.
#[derive(Debug, Clone)]
pub(super) struct Places {
    pub data: PathBuf,
    beside: PathBuf,
    index: PathBuf,
}

pub(super) fn io<'a>(what: &'a str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |error| Error::unavailable(format!("cannot {what} {}: {error}", path.display()))
}

pub(super) fn sync(dir: &Path) -> Result<()> {
    sync_dir(dir).map_err(|error| Error::unavailable(error.to_string()))
}

/// Whether something is there. What is absent is replaced or given up, so no error may say so.
pub(super) fn exists(path: &Path) -> Result<bool> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => found.map(|_| true).map_err(io("look at", path)),
    }
}

/// Opens a file or a directory itself, never what a symbolic link leads to.
pub(super) fn open_itself(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

impl Places {
    pub fn new(host: &Host, data: PathBuf) -> Places {
        let index = index_of(host, &data);
        Places::of(data, index)
    }

    pub(super) fn of(data: PathBuf, index: PathBuf) -> Places {
        let name = data.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let beside = data.with_file_name(format!(".{name}.ryokan"));
        Places { data, beside, index }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.beside.join(name)
    }

    pub fn run(&self) -> PathBuf {
        self.beside.join(RUN)
    }

    fn parent(&self) -> &Path {
        self.data.parent().unwrap_or(&self.data)
    }

    /// User and group of the data directory.
    pub fn owner(&self, of: &Path) -> Result<(u32, u32)> {
        let meta = std::fs::symlink_metadata(of).map_err(io("look at", of))?;
        Ok((meta.uid(), meta.gid()))
    }

    pub fn is_there(&self) -> Result<bool> {
        exists(&self.data)
    }

    /// Checks that a snapshot of the data directory can be taken and exchanged for it.
    ///
    /// # Errors
    /// `unsupported`, `refused`.
    pub fn check(&self) -> Result<()> {
        let (data, own) = (&self.data, nix::unistd::geteuid().as_raw());
        let meta = std::fs::symlink_metadata(data).map_err(io("look at", data))?;
        let shown = data.display();
        let real = data.canonicalize().map_err(io("look at", data))?;
        if real != *data {
            return Err(Error::refused(format!("{shown} leads to {}", real.display()))
                .reason("symbolic_link")
                .hint("give the path without symbolic links in the configuration"));
        }
        let opened = open_itself(data).map_err(io("open", data))?;
        let magic = inode::file_system(opened.as_fd()).map_err(io("look at", data))?;
        if magic != btrfs::MAGIC || meta.ino() != btrfs::SUBVOLUME_INODE || !meta.is_dir() {
            return Err(Error::unsupported(format!(
                "{shown} is no subvolume of Btrfs, of which a snapshot can be taken"
            ))
            .reason("no_subvolume")
            .hint("move it into one made by `btrfs subvolume create`, or add its databases with --postgres: a dump"));
        }
        if own != 0 && meta.uid() != own {
            return Err(Error::unsupported(format!("{shown} belongs to user {}", meta.uid()))
                .reason("other_owner")
                .hint("run a daemon as the server's user, or as root, or add the databases with --postgres: a dump"));
        }
        self.check_mount()?;
        self.check_content(data)?;
        self.make()?;
        self.check_unused()?;
        let (one, other) = (self.at("one"), self.at("other"));
        let tried = std::fs::create_dir(&one).and_then(|()| std::fs::create_dir(&other));
        let tried = tried.and_then(|()| Ok(renameat2(AT_FDCWD, &one, AT_FDCWD, &other, RenameFlags::RENAME_EXCHANGE)?));
        // Another operation may need the others.
        [&one, &other, &self.beside].iter().for_each(|dir| drop(std::fs::remove_dir(dir)));
        tried.map_err(io("exchange directories beside", data))
    }

    /// Checks that root can change something here.
    ///
    /// Root works only where the server's user can put no other directory, and no link, into a place of the path. What
    /// an unprivileged daemon reaches is its own.
    ///
    /// # Errors
    /// `refused`.
    pub(super) fn check_place(&self) -> Result<()> {
        if !nix::unistd::geteuid().is_root() {
            return Ok(());
        }
        let parent = self.parent();
        for folder in parent.ancestors() {
            let meta = std::fs::symlink_metadata(folder).map_err(io("look at", folder))?;
            // In a sticky folder others cannot replace a folder of root's; but the data directory is its user's.
            let is_sticky = folder != parent && meta.mode() & 0o1000 != 0;
            if !meta.is_dir() || meta.uid() != 0 || (meta.mode() & 0o022 != 0 && !is_sticky) {
                return Err(Error::refused(format!("others than root can write in {}", folder.display()))
                    .reason("foreign_folder")
                    .hint("give every folder above the data directory to root alone, or run a daemon as its user"));
            }
        }
        match std::fs::symlink_metadata(&self.beside) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Ok(meta) if !meta.is_dir() || meta.uid() != 0 || meta.mode() & 0o022 != 0 => Err(self.foreign()),
            looked => looked.map(drop).map_err(io("look at", &self.beside)),
        }
    }

    fn foreign(&self) -> Error {
        Error::refused(format!("{} is not a folder of ryokan", self.beside.display()))
            .reason("foreign_folder")
            .hint("move it away")
    }

    fn check_mount(&self) -> Result<()> {
        match crate::sys::mount::is_mount_point(&self.data) {
            true => {
                Err(Error::unsupported(format!("{} is a mount point, which cannot be renamed", self.data.display()))
                    .reason("mount_point")
                    .hint("mount the folder around it"))
            }
            false => Ok(()),
        }
    }

    /// Checks that everything of a server is in its data directory.
    fn check_content(&self, data: &Path) -> Result<()> {
        let outside = |what: &str| {
            Error::unsupported(format!("{what} of {} is outside of the data directory", self.data.display()))
                .reason("outside_data")
                .hint("move it into the data directory, or add the databases with --postgres: a dump")
        };
        if std::fs::symlink_metadata(data.join("pg_wal")).is_ok_and(|meta| !meta.is_dir()) {
            return Err(outside("the log (pg_wal)"));
        }
        let spaces = std::fs::read_dir(data.join("pg_tblspc"));
        if spaces.is_ok_and(|mut spaces| spaces.next().is_some()) {
            return Err(outside("a tablespace"));
        }
        Ok(())
    }

    /// Makes the folder beside the data directory, or checks that it is our own.
    pub fn make(&self) -> Result<()> {
        self.check_place()?;
        let (beside, own) = (&self.beside, nix::unistd::geteuid().as_raw());
        match std::fs::DirBuilder::new().mode(0o700).create(beside) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let meta = std::fs::symlink_metadata(beside).map_err(io("look at", beside))?;
                // Open: the daemon ended while a private server ran.
                let is_ours = matches!(meta.mode() & 0o777, CLOSED | OPEN);
                if !meta.is_dir() || meta.uid() != own || !is_ours {
                    return Err(self.foreign());
                }
            }
            made => made.map_err(io("make", beside))?,
        }
        // Whatever the umask is.
        self.set_mode(CLOSED)
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&self.beside, mode).map_err(io("change", &self.beside))
    }

    /// Lets the user of a private server pass through root's folder. Meanwhile root changes nothing in the copies.
    pub fn open(&self) -> Result<()> {
        self.check_place()?;
        if nix::unistd::geteuid().is_root() { self.set_mode(OPEN) } else { Ok(()) }
    }

    /// Ends [`Self::open`].
    pub fn close(&self) -> Result<()> {
        self.check_place()?;
        self.set_mode(CLOSED)
    }

    /// Removes one copy.
    pub fn remove(&self, name: &str) -> Result<()> {
        self.check_place()?;
        let path = self.at(name);
        let meta = match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found.map_err(io("look at", &path))?,
        };
        if !meta.is_dir() {
            return std::fs::remove_file(&path).map_err(io("remove", &path));
        }
        if meta.ino() != btrfs::SUBVOLUME_INODE {
            return remove_tree(&path).map_err(io("remove", &path));
        }
        let home = File::open(&self.beside).map_err(io("open", &self.beside))?;
        match btrfs::destroy(home.as_fd(), name) {
            // Not root, and the mount does not allow it: file by file.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
                remove_tree(&path).map_err(io("remove", &path))
            }
            done => done.map_err(io("remove", &path)),
        }
    }

    /// Removes `new`, which is never there in part: a data directory may be needed after a crash.
    pub fn remove_new(&self) -> Result<()> {
        self.remove(GONE)?;
        let new = self.at(NEW);
        if !exists(&new)? {
            return Ok(());
        }
        std::fs::rename(&new, self.at(GONE)).map_err(io("rename", &new))?;
        sync(&self.beside)?;
        fault::point("source.server.discard").map_err(io("remove", &new))?;
        self.remove(GONE)
    }

    /// Removes all copies. What stays is removed by the next operation.
    pub fn discard(&self) {
        if let Err(error) = self.check_place() {
            tracing::warn!(%error, "inactive copies of a server are not looked for");
            return;
        }
        let others = [COPY, TRIAL, PART, RUN, STAGING, INDEX].map(|name| self.remove(name));
        for removed in others.into_iter().chain([self.remove_new()]) {
            if let Err(error) = removed {
                tracing::warn!(%error, "an inactive copy of a server could not be removed");
            }
        }
        // It stays while the server must be started again.
        let _ = std::fs::remove_dir(&self.beside);
    }

    /// Takes a snapshot of a subvolume; it may be written.
    pub fn snapshot(&self, of: &Path, name: &str) -> Result<()> {
        self.make()?;
        self.remove(name)?;
        let (from, home) = (open_itself(of).map_err(io("open", of))?, File::open(&self.beside));
        let home = home.map_err(io("open", &self.beside))?;
        btrfs::snapshot(from.as_fd(), home.as_fd(), name).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENOTTY | libc::EXDEV) => {
                Error::unsupported(format!("{} is no subvolume of Btrfs: {error}", of.display()))
                    .reason("no_subvolume")
                    .hint("move it away, then restore again")
            }
            _ => io("take a snapshot of", of)(error),
        })
    }

    /// Adds to the copy what makes it a backup: the segments of the log from its start to its stop, which the server must
    /// not remove before, and the label.
    pub fn complete(&self, end: &BackupEnd) -> Result<()> {
        let (copy, owner) = (self.at(COPY), self.owner(&self.data)?);
        let (log, to) = (self.data.join("pg_wal"), copy.join("pg_wal"));
        self.check_content(&copy)?;
        // The snapshot's own end before the stop.
        for entry in std::fs::read_dir(&to).map_err(io("read", &to))?.flatten() {
            if is_segment(&entry.file_name().to_string_lossy()) {
                std::fs::remove_file(entry.path()).map_err(io("remove", &entry.path()))?;
            }
        }
        // The server's user could put a link in the place of its folder.
        let opened = open_itself(&log).map_err(io("open", &log))?;
        let listed = std::fs::read_dir(path_of(&opened)).map_err(io("read", &log))?;
        let mut found = Vec::new();
        for entry in listed.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !end.needs(&name) {
                continue;
            }
            copy_segment(&entry.path(), &to.join(&name), owner).map_err(io("clone", &log.join(&name)))?;
            found.push(name);
        }
        let has = |wanted: Option<&str>| wanted.is_some_and(|wanted| found.iter().any(|name| name == wanted));
        if !has(end.first_segment()) || !has(Some(&end.segment)) {
            return Err(Error::unavailable("the server removed a part of its log that the backup needs")
                .reason("wal_removed")
                .hint("try again, or raise wal_keep_size"));
        }
        let label = copy.join("backup_label");
        new_file(&label, owner).and_then(|mut file| file.write_all(end.label.as_bytes())).map_err(io("write", &label))
    }

    /// Removes from the copy what is no part of a server: marks, and of a running one, what belongs to its process and to
    /// its peers.
    pub fn strip(&self, is_running: bool) -> Result<()> {
        let copy = self.at(COPY);
        self.unmark(&copy)?;
        if !is_running {
            return Ok(());
        }
        for name in ["postmaster.pid", "postmaster.opts"] {
            match std::fs::remove_file(copy.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io("remove", &copy)(error)),
                _ => {}
            }
        }
        for name in ["pg_replslot", "pg_wal/archive_status"] {
            let dir = copy.join(name);
            let is_dir = std::fs::symlink_metadata(&dir).is_ok_and(|meta| meta.is_dir());
            for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten().filter(|_| is_dir) {
                let path = entry.path();
                let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
                let removed = if is_dir { remove_tree(&path) } else { std::fs::remove_file(&path) };
                removed.map_err(io("remove", &path))?;
            }
        }
        Ok(())
    }

    /// Gives a new change time to files of the copy that the server may have changed again within the grain of the clock
    /// after the snapshot: the next freeze must not take those for unchanged. Refuses subvolumes in the data directory.
    pub fn unsettle(&self, taken: SystemTime) -> Result<()> {
        let since = taken.checked_sub(GRAIN).and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        let mut folders = vec![self.at(COPY)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).map_err(io("read", &folder))? {
                let path = entry.map_err(io("read", &folder))?.path();
                let meta = std::fs::symlink_metadata(&path).map_err(io("look at", &path))?;
                if meta.is_dir() && meta.ino() == EMPTY_SUBVOLUME {
                    return Err(Error::unsupported(format!(
                        "{} has another subvolume in it: {}",
                        self.data.display(),
                        path.file_name().unwrap_or_default().to_string_lossy()
                    ))
                    .reason("nested_subvolume")
                    .hint("replace it by a directory"));
                }
                let changed = Duration::new(meta.ctime().unsigned_abs(), meta.ctime_nsec().unsigned_abs() as u32);
                if meta.is_dir() {
                    folders.push(path);
                } else if meta.is_file() && changed >= since {
                    let same = std::fs::Permissions::from_mode(meta.mode() & 0o7777);
                    open_itself(&path).and_then(|file| file.set_permissions(same)).map_err(io("change", &path))?;
                }
            }
        }
        Ok(())
    }

    fn workspace(&self, name: &str, index: PathBuf) -> WorkspacePaths {
        WorkspacePaths { workspace: self.at(name), staging: self.at(STAGING), index }
    }

    /// Stores the copy. Also returns it as a source of files for a checkout.
    pub fn store(&self, store: &Store) -> Result<(ServerPart, Option<Donor>)> {
        let copy = self.at(COPY);
        let meta = std::fs::symlink_metadata(&copy).map_err(io("look at", &copy))?;
        let no_cow = open_itself(&copy).and_then(|dir| inode::is_no_cow(dir.as_fd())).map_err(io("look at", &copy))?;
        let mut tracker = Tracker::open(self.workspace(COPY, self.index.clone()))?;
        let mut attempt = 1;
        let captured = loop {
            match tracker.capture(store) {
                // Written by ourselves just now.
                Err(WorkspaceError::Changing { .. }) if attempt < limits::DIRECTORY_ATTEMPTS => {
                    attempt += 1;
                    std::thread::sleep(limits::DIRECTORY_PAUSE);
                }
                captured => break captured?,
            }
        };
        refuse_missing(&self.data, &captured.not_captured)?;
        if let Err(error) = tracker.save() {
            tracing::warn!(%error, "the index of a data directory could not be saved");
        }
        let part = ServerPart {
            tree: Some(captured.tree.0),
            entries: captured.entries,
            uid: meta.uid(),
            gid: meta.gid(),
            no_cow,
            ..ServerPart::default()
        };
        Ok((part, tracker.into_donor()))
    }

    /// Makes `new` from a tree: files of the donor are cloned where they fit. Complete and durable. `is_target`: it is
    /// marked as restored; otherwise it is the former data directory.
    pub fn checkout(&self, store: &Store, part: &ServerPart, donor: Option<&Donor>, is_target: bool) -> Result<()> {
        let Some(tree) = part.tree else { return Ok(()) };
        self.make()?;
        self.remove(PART)?;
        let new = self.at(PART);
        let home = File::open(&self.beside).map_err(io("open", &self.beside))?;
        btrfs::create(home.as_fd(), PART).map_err(io("make a subvolume", &new))?;
        let root = open_itself(&new).map_err(io("open", &new))?;
        if part.no_cow {
            // Nothing is in it yet.
            inode::set_no_cow(root.as_fd()).map_err(io("set No_COW of", &new))?;
        }
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::fchown(&root, Some(part.uid), Some(part.gid)).map_err(io("change", &new))?;
        }
        fault::point("source.server.checkout").map_err(io("fill", &new))?;
        let paths = self.workspace(PART, self.at(INDEX));
        let donor = donor.map(|donor| (donor, None));
        let (tracker, restored, _) = workspace::branch(donor, TreeId(tree), paths, store, Durability::Power)?;
        if tracker.base() != Some(TreeId(tree)) {
            let names: Vec<String> = restored.left.iter().take(5).map(|path| path.display().to_string()).collect();
            return Err(Error::refused(format!(
                "the copy of {} is not exact: {}",
                self.data.display(),
                names.join(", ")
            ))
            .reason("inexact_copy")
            .hint("only root can restore files of other owners"));
        }
        // Of a tree with marks of its own.
        self.unmark(&new)?;
        if is_target {
            self.mark_restored(&new, part.revision.is_some())?;
        }
        self.remove_new()?;
        std::fs::rename(&new, self.at(NEW)).map_err(io("rename", &new))?;
        sync(&self.beside)
    }

    /// Puts `new` in the place of the data directory, which becomes `new`. Either may be missing.
    pub fn exchange(&self) -> Result<()> {
        self.check_place()?;
        let (data, new) = (&self.data, &self.at(NEW));
        let renamed = match (exists(data)?, exists(new)?) {
            (true, true) => renameat2(AT_FDCWD, new, AT_FDCWD, data, RenameFlags::RENAME_EXCHANGE),
            (false, true) => renameat2(AT_FDCWD, new, AT_FDCWD, data, RenameFlags::RENAME_NOREPLACE),
            (true, false) => renameat2(AT_FDCWD, data, AT_FDCWD, new, RenameFlags::RENAME_NOREPLACE),
            (false, false) => Ok(()),
        };
        renamed.map_err(|error| io("exchange", data)(error.into()))?;
        self.sync_both()
    }

    /// Makes renames between both folders durable.
    pub(super) fn sync_both(&self) -> Result<()> {
        [self.parent(), &self.beside].into_iter().try_for_each(sync)
    }

    /// Makes an empty folder for a private server, with the settings of its access; the server's user cannot reach it
    /// before [`Self::open`].
    pub fn make_run(&self, owner: (u32, u32)) -> Result<()> {
        self.make()?;
        self.remove(RUN)?;
        let run = self.run();
        let make = || {
            std::fs::DirBuilder::new().mode(0o700).create(&run)?;
            new_file(&run.join("settings"), owner)?;
            // Only the server's user and root reach the socket.
            new_file(&run.join("access"), owner)?.write_all(b"local all all trust\n")?;
            chown(&open_itself(&run)?, owner)
        };
        make().map_err(io("make", &run))
    }
}

fn chown(file: &File, (uid, gid): (u32, u32)) -> io::Result<()> {
    match nix::unistd::geteuid().is_root() {
        true => std::os::unix::fs::fchown(file, Some(uid), Some(gid)),
        false => Ok(()),
    }
}

/// Copies a segment of the log, sharing its blocks where the file system can.
fn copy_segment(from: &Path, to: &Path, owner: (u32, u32)) -> io::Result<()> {
    let (mut from, mut to) = (open_itself(from)?, new_file(to, owner)?);
    if !from.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    match inode::clone_blocks(from.as_fd(), to.as_fd()) {
        // Only one of both has the attribute No_COW.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => io::copy(&mut from, &mut to).map(drop),
        cloned => cloned,
    }
}

/// Makes a file of the server.
pub(super) fn new_file(path: &Path, owner: (u32, u32)) -> io::Result<File> {
    let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    chown(&file, owner)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_log_is_noticed() {
        let dir = tempfile::tempdir().expect("a directory");
        let places = Places::of(dir.path().join("data"), dir.path().join("index"));
        for folder in [places.data.join("pg_wal"), places.at(COPY).join("pg_wal")] {
            std::fs::create_dir_all(folder).expect("made");
        }
        let segment = "000000010000000000000002";
        let label = format!("START WAL LOCATION: 0/2000028 (file {segment})\n");
        let end = BackupEnd { label, segment: segment.into() };
        let error = places.complete(&end).expect_err("the segment is gone");
        assert_eq!(error.reason, "wal_removed");
        // A link that the server's user puts there is not followed.
        let (log, away) = (places.data.join("pg_wal"), dir.path().join("away"));
        std::fs::rename(&log, &away).expect("renamed");
        std::fs::write(away.join(segment), "secret").expect("written");
        std::os::unix::fs::symlink(&away, &log).expect("made");
        places.complete(&end).expect_err("a link");
        assert!(!exists(&places.at(COPY).join("pg_wal").join(segment)).expect("looked"));
    }
}
