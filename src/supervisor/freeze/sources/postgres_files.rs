//! The data directory of a PostgreSQL server: snapshots of its Btrfs subvolume, the log that a backup needs, checkouts and
//! the exchange. Blocks; knows no server.
//!
//! ```text
//! DIR/NAME                     the data directory, a subvolume
//! DIR/.NAME.ryokan/            root's or the server's user's own; the others cannot change what is in it
//!       ├ copy                 what a freeze pinned
//!       ├ trial                a copy of that, while it is started
//!       ├ new                  prepared for a restore; the former data directory after the switch
//!       ├ run                  socket and settings of a private server
//!       └ stopped              the server must be started again
//! DIR/NAME/ryokan.restored     in a data directory that a restore put there, until that has ended
//! ```

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
use crate::sys::fs::{remove_tree, sync_dir};
use crate::sys::{btrfs, inode};
use crate::workspace::{self, Donor, Durability, Tracker, TreeId, WorkspaceError, WorkspacePaths};

/// What a data directory that a restore put there holds.
const RESTORED: &str = "ryokan.restored";
/// Its text if no server started in the copy.
const DOES_NOT_START: &[u8] = b"damaged";
/// Names in the folder beside the data directory.
pub(super) const COPY: &str = "copy";
pub(super) const TRIAL: &str = "trial";
pub(super) const NEW: &str = "new";
const RUN: &str = "run";
const STOPPED: &str = "stopped";
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

fn io<'a>(what: &'a str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |error| Error::unavailable(format!("cannot {what} {}: {error}", path.display()))
}

fn sync(dir: &Path) -> Result<()> {
    sync_dir(dir).map_err(|error| Error::unavailable(error.to_string()))
}

fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

/// Opens a file or a directory itself, never what a symbolic link leads to.
fn open_itself(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

impl Places {
    pub fn new(host: &Host, data: PathBuf) -> Places {
        let name = data.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let beside = data.with_file_name(format!(".{name}.ryokan"));
        Places { beside, index: index_of(host, &data), data }
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

    pub fn is_there(&self) -> bool {
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
        let (one, other) = (self.at("one"), self.at("other"));
        let tried = std::fs::create_dir(&one).and_then(|()| std::fs::create_dir(&other));
        let tried = tried.and_then(|()| Ok(renameat2(AT_FDCWD, &one, AT_FDCWD, &other, RenameFlags::RENAME_EXCHANGE)?));
        [one, other].iter().for_each(|dir| drop(std::fs::remove_dir(dir)));
        self.discard();
        tried.map_err(io("exchange directories beside", data))
    }

    /// Root works only where the server's user cannot put another directory into a place.
    fn check_parent(&self) -> Result<()> {
        let parent = std::fs::symlink_metadata(self.parent()).map_err(io("look at", self.parent()))?;
        if nix::unistd::geteuid().is_root() && (parent.uid() != 0 || parent.mode() & 0o022 != 0) {
            return Err(Error::refused(format!("others than root can write in {}", self.parent().display()))
                .reason("foreign_folder")
                .hint("give the folder of the data directory to root, or run a daemon as the server's user"));
        }
        Ok(())
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
        self.check_parent()?;
        let (beside, own) = (&self.beside, nix::unistd::geteuid().as_raw());
        // The server's user passes through root's.
        let mode = if own == 0 { 0o711 } else { 0o700 };
        match std::fs::DirBuilder::new().mode(mode).create(beside) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let meta = std::fs::symlink_metadata(beside).map_err(io("look at", beside))?;
                match meta.is_dir() && meta.uid() == own && meta.mode() & 0o777 == mode {
                    true => Ok(()),
                    false => Err(Error::refused(format!("{} is not a folder of ryokan", beside.display()))
                        .reason("foreign_folder")
                        .hint("move it away")),
                }
            }
            made => {
                made.map_err(io("make", beside))?;
                // Whatever the umask is.
                std::fs::set_permissions(beside, std::fs::Permissions::from_mode(mode)).map_err(io("change", beside))
            }
        }
    }

    /// Removes one copy.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.at(name);
        let Ok(meta) = std::fs::symlink_metadata(&path) else { return Ok(()) };
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

    /// Removes all copies. What stays is removed by the next operation.
    pub fn discard(&self) {
        for name in [COPY, TRIAL, NEW, RUN, STAGING, INDEX] {
            if let Err(error) = self.remove(name) {
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
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&log).map_err(io("read", &log))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !end.needs(&name) {
                continue;
            }
            let path = to.join(&name);
            let clone = || {
                let from = open_itself(&entry.path())?;
                let new = new_file(&path, owner)?;
                inode::clone_blocks(from.as_fd(), new.as_fd())
            };
            clone().map_err(io("clone", &entry.path()))?;
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

    /// Removes from the copy of a running server what belongs to its process and to its peers.
    pub fn strip(&self) -> Result<()> {
        let copy = self.at(COPY);
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

    /// Makes `new` from a tree: files of the donor are cloned where they fit. Complete and durable.
    pub fn checkout(&self, store: &Store, part: &ServerPart, donor: Option<&Donor>) -> Result<()> {
        let Some(tree) = part.tree else { return Ok(()) };
        self.make()?;
        self.remove(NEW)?;
        let new = self.at(NEW);
        let home = File::open(&self.beside).map_err(io("open", &self.beside))?;
        btrfs::create(home.as_fd(), NEW).map_err(io("make a subvolume", &new))?;
        let root = open_itself(&new).map_err(io("open", &new))?;
        if part.no_cow {
            // Nothing is in it yet.
            inode::set_no_cow(root.as_fd()).map_err(io("set No_COW of", &new))?;
        }
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::fchown(&root, Some(part.uid), Some(part.gid)).map_err(io("change", &new))?;
        }
        let paths = self.workspace(NEW, self.at(INDEX));
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
        Ok(())
    }

    /// Marks `new` as restored. `starts`: a server started in it.
    pub fn mark_restored(&self, starts: bool) -> Result<()> {
        let (new, mark) = (self.at(NEW), self.at(NEW).join(RESTORED));
        let text: &[u8] = if starts { b"" } else { DOES_NOT_START };
        let write = |mut file: File| file.write_all(text).and_then(|()| file.sync_all());
        new_file(&mark, self.owner(&new)?).and_then(write).map_err(io("write", &mark))?;
        sync(&new)
    }

    /// Whether a server can be expected to start in the data directory: not in a damaged one that was restored as it was.
    pub fn may_start(&self) -> bool {
        let mark =
            File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(self.data.join(RESTORED));
        let is_damaged = mark.is_ok_and(|file| file.metadata().is_ok_and(|meta| meta.len() > 0));
        self.is_there() && !is_damaged
    }

    /// Whether a data directory was put there by a restore that has not ended.
    pub fn is_restored(&self, dir: &Path) -> bool {
        exists(&dir.join(RESTORED))
    }

    /// The restore has ended.
    pub fn unmark(&self) -> Result<()> {
        let mark = self.data.join(RESTORED);
        match std::fs::remove_file(&mark) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io("remove", &mark)(error)),
            _ => Ok(()),
        }
    }

    /// Records that the server must be started again. Durable.
    pub fn record_stopped(&self) -> Result<()> {
        self.make()?;
        let path = self.at(STOPPED);
        File::create(&path).and_then(|file| file.sync_all()).map_err(io("write", &path))?;
        sync(&self.beside)
    }

    pub fn is_stopped(&self) -> bool {
        exists(&self.at(STOPPED))
    }

    /// The server runs again.
    pub fn clear_stopped(&self) -> Result<()> {
        let path = self.at(STOPPED);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io("remove", &path)(error)),
            _ => Ok(()),
        }
    }

    /// Puts `new` in the place of the data directory, which becomes `new`. Either may be missing.
    pub fn exchange(&self) -> Result<()> {
        let (data, new) = (&self.data, &self.at(NEW));
        let renamed = match (exists(data), exists(new)) {
            (true, true) => renameat2(AT_FDCWD, new, AT_FDCWD, data, RenameFlags::RENAME_EXCHANGE),
            (false, true) => renameat2(AT_FDCWD, new, AT_FDCWD, data, RenameFlags::RENAME_NOREPLACE),
            (true, false) => renameat2(AT_FDCWD, data, AT_FDCWD, new, RenameFlags::RENAME_NOREPLACE),
            (false, false) => Ok(()),
        };
        renamed.map_err(|error| io("exchange", data)(error.into()))?;
        [self.parent(), &self.beside].into_iter().try_for_each(sync)
    }

    /// Moves `new` beside the data directory, for good.
    pub fn keep(&self, at_ms: i64) -> Result<PathBuf> {
        let name = self.data.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let kept = self.data.with_file_name(format!("{name}.kept-{at_ms}"));
        // It ends as a data directory like any other.
        let _ = std::fs::remove_file(self.at(NEW).join(RESTORED));
        std::fs::rename(self.at(NEW), &kept).map_err(io("keep", &kept))?;
        sync(self.parent())?;
        Ok(kept)
    }

    /// Makes an empty folder for a private server, with the settings of its access.
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

/// Makes a file of the server.
fn new_file(path: &Path, owner: (u32, u32)) -> io::Result<File> {
    let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    chown(&file, owner)?;
    Ok(file)
}
