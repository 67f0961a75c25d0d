//! Updates an index: by reported changes, or by a full scan.
//!
//! Events give each entry a check level: if its name or metadata changed, it is checked; if it was opened, it is also
//! checked for writers; if it was written, it is read. A full scan checks everything, and reads each file whose stamp
//! differs or is not settled: one that changed within the clock's grain before it was seen.
//!
//! Writes through a shared mapping have no events. Hence files that may be open for writing ("hot") are read by every
//! pass until they are not.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::readlinkat;
use nix::sys::stat::FileStat;
use std::os::unix::ffi::OsStringExt as _;

use super::beneath::{self, Kind};
use super::capture_stats::{CaptureStats, FullScanReason, Unwatched};
use super::changes::{self, Changes, CheckLevel, OpenEvents, WriterChecks};
use super::deferred_reads::DeferredReads;
use super::driver::Driver;
use super::error::WorkspaceError;
use super::index::{FolderId, Index, Known, NodeState, Place, ROOT, Removed, Stamp};
use super::objects::{ObjectBatch, Objects};
use super::tree::entry::{Content, Meta, Moment, Name, Reason};
use crate::core::limits;
use crate::sys::inode;
use crate::sys::notify::Notify;

type Result<T> = std::result::Result<T, WorkspaceError>;

/// The state of one pass.
pub(super) struct Scan<'a> {
    pub root: BorrowedFd<'a>,
    pub index: &'a mut Index,
    /// Watches the folders found, if changes are watched.
    pub notify: &'a mut Option<Notify>,
    pub batch: &'a mut dyn ObjectBatch,
    pub driver: &'a mut dyn Driver,
    /// Takes deferred reads.
    pub deferred: Option<&'a mut DeferredReads>,
    /// Checks whether previously known contents still exist.
    pub check: Option<&'a dyn Objects>,
    /// Whether all writers are stopped.
    pub frozen: bool,
    /// Whether no other process has, or had, any of it open.
    pub private: bool,
    /// Whether files may have changed without an event for any of their names.
    pub has_unreported: bool,
    pub stats: &'a mut CaptureStats,
    /// Device and owner of the workspace.
    pub device: u64,
    pub owner: (u32, u32),
    /// Stamps older than this are settled.
    pub settled_before: Moment,
    /// Contents by stamp: of moved files, of hard links, of files that a restore created.
    pub contents: HashMap<Stamp, Content>,
    /// Whether all changes are reported: then a stamp without its change time identifies a moved file.
    pub all_reported: bool,
    /// Changes for the next pass: reported meanwhile, or of files that kept changing.
    pub later: &'a mut Changes,
    /// Why the next pass must scan everything.
    pub next_full_scan: Option<FullScanReason>,
    /// Files opened since the last drain: the opens are reported too.
    pub opened: usize,
    /// Files that had no writer when checked.
    pub writer_checks: WriterChecks,
}

impl Scan<'_> {
    /// Drains the event queue. While frozen, all opens are this pass's own.
    pub(super) fn drain(&mut self) {
        let opens = if self.frozen { OpenEvents::Ours } else { OpenEvents::Count(&mut self.writer_checks) };
        let why = changes::drain(self.notify, self.index, self.later, opens);
        self.next_full_scan = self.next_full_scan.or(why);
        self.opened = 0;
        // Their events are drained; marks are counted anew.
        self.writer_checks = WriterChecks::default();
        self.notify.iter_mut().for_each(Notify::unmark);
    }

    /// Whether an open file may have a writer.
    pub(super) fn has_writers(&mut self, id: FolderId, name: &[u8], file: &File) -> bool {
        // Without a mark, our own open counts like any other.
        let mark = if self.frozen { None } else { self.notify.as_mut().and_then(|notify| notify.mark().ok()) };
        let hot = inode::may_be_written(file.as_fd());
        if let Some(mark) = mark.filter(|_| !hot) {
            self.writer_checks.no_writer_since((id, name.into()), mark);
        }
        self.opened += 1;
        if self.opened >= limits::WORKSPACE_OPEN_BATCH {
            self.drain();
        }
        hot
    }

    /// Checks everything.
    pub(super) fn scan_all(&mut self) -> Result<()> {
        let hot = std::mem::take(&mut self.index.hot);
        let root = self.open(ROOT)?;
        self.settle_root(&root)?;
        self.scan_from(vec![(ROOT, Some(root))])?;
        if !self.frozen && self.notify.is_some() {
            // A folder is watched only once it was reached.
            self.rescan()?;
        }
        // The scan trusted stamps; these files' stamps prove nothing.
        let mut changes = Changes::default();
        hot.into_iter().for_each(|place| changes.add(place, CheckLevel::Content));
        self.follow(&changes)
    }

    /// Checks the entries that were reported.
    pub(super) fn follow(&mut self, changes: &Changes) -> Result<()> {
        let mut changes = changes.clone();
        // An inaccessible entry was not watched: anything may have happened in it since it became accessible.
        let mut reported = changes.names.iter().flat_map(|(folder, names)| names.keys().map(|name| (*folder, name)));
        let was_unwatched = reported.any(|(folder, name)| self.index.was_unwatched(folder, name));
        self.has_unreported = changes.has_unreported || was_unwatched || self.index.has_unwatchable_dirs();
        for place in &self.index.hot {
            changes.add(place.clone(), CheckLevel::Content);
        }
        for place in self.index.externally_linked() {
            changes.add_by_stamp(place);
        }
        self.spread(&mut changes);
        // Removals first: an entry that appeared may be one of them under another name.
        for (folder, names) in &changes.names {
            self.follow_removals(*folder, names, &changes)?;
        }
        let (mut found, mut away) = (Vec::new(), Vec::new());
        for (folder, names) in &changes.names {
            // It may have been removed with a folder above it.
            if !self.index.folders.contains_key(folder) {
                continue;
            }
            let Some(dir) = self.open_same_dir(*folder)? else {
                self.requeue_changes(*folder, names);
                away.push(*folder);
                continue;
            };
            for (name, level) in names {
                found.extend(self.examine(*folder, dir.as_fd(), name, *level)?.map(|id| (id, None)));
            }
            self.refresh(*folder, dir.as_fd())?;
        }
        self.scan_from(found)?;
        // After the events of their parents: they may be inaccessible by now.
        for folder in away {
            self.reexamine_dir(folder)?;
        }
        // After new folders are watched: earlier changes show in the stamps.
        if self.has_unreported {
            self.rescan()?;
        }
        self.read_regrouped()
    }

    /// Reads the files that gained or lost a name, under each of their names. A write through an unknown name was
    /// reported for that name alone, and the known names do not show that they belong together.
    fn read_regrouped(&mut self) -> Result<()> {
        if self.index.regroup.is_empty() {
            return Ok(());
        }
        let mut places: Vec<Place> = Vec::new();
        for (id, folder) in &self.index.folders {
            let of = folder.entries.iter().filter(|(_, known)| {
                matches!(known.what, NodeState::File { .. }) && self.index.regroup.contains(&known.stamp.inode)
            });
            places.extend(of.map(|(name, _)| (*id, name.clone())));
        }
        for (folder, name) in places {
            if !self.index.folders.contains_key(&folder) {
                continue;
            }
            if let Some(dir) = self.open_same_dir(folder)? {
                self.examine(folder, dir.as_fd(), &name, CheckLevel::Content)?;
            } else {
                self.fail_if_frozen(folder)?;
                self.later.add((folder, name), CheckLevel::Content);
            }
        }
        Ok(())
    }

    /// Applies the changes of one name of a file to its other names.
    fn spread(&self, changes: &mut Changes) {
        let mut more = Vec::new();
        for (folder, names) in &changes.names {
            for (name, level) in names {
                let Some(Known { stamp, what: NodeState::File { names: 2.., .. }, .. }) =
                    self.index.known(*folder, name)
                else {
                    continue;
                };
                for place in self.index.links.get(&stamp.inode).into_iter().flatten() {
                    more.push((place.clone(), *level));
                }
            }
        }
        more.into_iter().for_each(|(place, level)| changes.add(place, level));
    }

    fn follow_removals(
        &mut self,
        folder: FolderId,
        names: &HashMap<Name, CheckLevel>,
        changes: &Changes,
    ) -> Result<()> {
        if !self.index.folders.contains_key(&folder) {
            return Ok(());
        }
        let dir = self.open_same_dir(folder)?;
        if dir.is_none() && !self.frozen {
            self.requeue_changes(folder, names);
            return Ok(());
        }
        // While frozen, a folder that cannot be opened has no entries left; `reexamine_dir` reports it if that is
        // wrong.
        for name in names.keys() {
            let Some(known) = self.index.known(folder, name) else { continue };
            let now = match dir.as_ref().map(|dir| beneath::look(dir.as_fd(), name)) {
                Some(Ok(stat)) => Some(stat.st_ino),
                Some(Err(error)) if !beneath::is_gone(error) && !beneath::is_refused(error) => {
                    return Err(WorkspaceError::of("look at", &self.index.path(folder, name))(error));
                }
                Some(Err(_)) | None => None,
            };
            if now != Some(known.stamp.inode) {
                self.forget(folder, name, Some(changes));
            }
        }
        Ok(())
    }

    /// Removes an entry from the index; keeps known contents in case the file appears under another name.
    fn forget(&mut self, folder: FolderId, name: &[u8], changes: Option<&Changes>) {
        let (all_reported, contents) = (self.all_reported, &mut self.contents);
        let notify = self.notify.as_ref();
        let mut is_unwatched = false;
        self.index.remove(folder, name, &mut |removed| match removed {
            Removed::File((folder, name), Known { stamp, settled, what: NodeState::File { content, .. }, .. }) => {
                // Without reported changes, nothing is known.
                let touched = changes.is_none_or(|changes| {
                    changes
                        .names
                        .get(folder)
                        .and_then(|names| names.get(name))
                        .is_some_and(|c| *c > CheckLevel::Metadata)
                });
                // A write through a mapping leaves no trace in the stamp on some file systems.
                let written = touched && changes.is_some();
                // Within one tick of the clock, another file may have got the same inode, size and times.
                if *settled && !written {
                    if all_reported && !touched {
                        contents.insert(moved(*stamp), content.clone());
                    }
                    contents.insert(*stamp, content.clone());
                }
            }
            Removed::File(..) => {}
            Removed::Watch(watch) => {
                is_unwatched = true;
                if let Some(notify) = notify {
                    notify.remove(watch);
                }
            }
        });
        // Queued events of that folder are lost, and so are changes in it until it is found elsewhere: perhaps not by
        // this pass.
        if is_unwatched && !self.frozen {
            self.has_unreported = true;
            self.later.has_unreported = true;
        }
    }

    pub(super) fn scan_from(&mut self, mut folders: Vec<(FolderId, Option<OwnedFd>)>) -> Result<()> {
        while let Some((id, dir)) = folders.pop() {
            // It may have been removed again with a folder above it.
            if !self.index.folders.contains_key(&id) {
                continue;
            }
            let Some(dir) = self.reuse_or_open(id, dir)? else {
                self.fail_if_frozen(id)?;
                self.defer_listing(id);
                continue;
            };
            for (id, dir) in self.list(id, &dir)? {
                let dir = dir.filter(|_| folders.len() < limits::WORKSPACE_OPEN_DIRS);
                folders.push((id, dir));
            }
        }
        Ok(())
    }

    /// Checks all entries of a folder; returns the folders among them.
    fn list(&mut self, id: FolderId, dir: &OwnedFd) -> Result<Vec<(FolderId, Option<OwnedFd>)>> {
        // Watched before it is listed: later changes are reported.
        self.watch(id, dir.as_fd())?;
        self.refresh(id, dir.as_fd())?;
        let names = match beneath::list(dir.as_fd()) {
            Ok(names) => names,
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && id != ROOT => {
                return self.missing_folder(id, Reason::Unreadable).map(|()| Vec::new());
            }
            Err(error) => return Err(WorkspaceError::of("list", &self.index.path(id, b""))(error)),
        };
        let folder = self.index.folder(id);
        let removed: Vec<Name> =
            folder.entries.keys().filter(|name| names.binary_search(name).is_err()).cloned().collect();
        for name in removed {
            self.forget(id, &name, None);
        }
        let mut found = Vec::new();
        for name in names {
            if let Some(inner) = self.examine(id, dir.as_fd(), &name, CheckLevel::Stamp)? {
                let open = if found.len() < limits::WORKSPACE_OPEN_DIRS {
                    beneath::child(dir.as_fd(), &name).ok()
                } else {
                    None
                };
                found.push((inner, open));
            }
        }
        Ok(found)
    }

    fn watch(&mut self, id: FolderId, dir: BorrowedFd<'_>) -> Result<()> {
        let Some(notify) = self.notify.as_ref() else { return Ok(()) };
        let known = self.index.folder(id).watch.filter(|watch| self.index.watches.get(watch) == Some(&id));
        if known.is_some() && self.all_reported {
            return Ok(());
        }
        // In a full scan the watch may have ended unnoticed, and its number may be that of another folder's watch.
        match notify.add(dir) {
            Ok(watch) => {
                if let Some(known) = known.filter(|known| *known != watch) {
                    self.index.watches.remove(&known);
                }
                self.index.folder_mut(id).watch = Some(watch);
                self.index.watches.insert(watch, id);
            }
            // Only a readable folder can be watched.
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && id != ROOT => self.defer_listing(id),
            Err(error) => {
                // From now on every pass is a full scan, and each capture says so.
                self.stats.unwatched = Some(Unwatched::of(&error));
                *self.notify = None;
                self.index.watches.clear();
            }
        }
        Ok(())
    }

    pub(super) fn open(&self, id: FolderId) -> Result<OwnedFd> {
        let names = self.index.names(id);
        beneath::folder(self.root, &names).map_err(|e| WorkspaceError::of("open", &self.index.path(id, b""))(e))
    }

    fn settle_root(&mut self, root: &OwnedFd) -> Result<()> {
        let stat = beneath::look_at(root).map_err(WorkspaceError::of("look at", &self.index.path(ROOT, b"")))?;
        self.owner = (stat.st_uid, stat.st_gid);
        Ok(())
    }

    /// Updates a folder's own mode, times and attributes, which its parent's object holds.
    fn refresh(&mut self, id: FolderId, dir: BorrowedFd<'_>) -> Result<()> {
        let path = || self.index.path(id, b"");
        let stat = beneath::look_at(dir).map_err(|e| WorkspaceError::of("look at", &path())(e))?;
        let stamp = beneath::stamp(&stat);
        let (parent, name) = (self.index.folder(id).parent, self.index.folder(id).name.clone());
        let attributes = match beneath::attributes(dir) {
            Ok(attributes) => attributes,
            // Opened without read permission.
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => None,
            Err(error) => return Err(WorkspaceError::io("read the attributes of", &path(), error)),
        };
        let meta = beneath::meta(&stat, self.owner, attributes);
        if id == ROOT {
            (self.index.root, self.index.root_stamp) = (meta, stamp);
            return Ok(());
        }
        if let Some(known) = self.index.folders.get_mut(&parent).and_then(|folder| folder.entries.get_mut(&name)) {
            let same = known.meta == meta;
            (known.meta, known.stamp) = (meta, stamp);
            if !same {
                self.index.mark_stale(parent, &name);
            }
        }
        Ok(())
    }

    /// Checks one entry at the given level. Returns a folder that must be listed.
    pub(super) fn examine(
        &mut self,
        id: FolderId,
        dir: BorrowedFd<'_>,
        name: &[u8],
        level: CheckLevel,
    ) -> Result<Option<FolderId>> {
        let mut level = level;
        for _ in 0..limits::WORKSPACE_READ_ATTEMPTS {
            let stat = match beneath::look(dir, name) {
                Ok(stat) => stat,
                Err(error) if beneath::is_gone(error) => {
                    self.forget(id, name, None);
                    return Ok(None);
                }
                Err(error) if beneath::is_refused(error) => return self.missing(id, name, Reason::Unreadable),
                Err(error) => return Err(WorkspaceError::of("look at", &self.index.path(id, name))(error)),
            };
            self.stats.examined += 1;
            match self.capture_entry(id, dir, name, &stat, level)? {
                Outcome::Done => return Ok(None),
                Outcome::Folder(inner) => return Ok(Some(inner)),
                Outcome::Changed => level = CheckLevel::Content,
                Outcome::Later => {
                    self.later.add((id, name.into()), CheckLevel::Content);
                    return Ok(None);
                }
            }
        }
        if self.frozen {
            return Err(WorkspaceError::Changing { path: self.index.path(id, name) });
        }
        self.later.add((id, name.into()), CheckLevel::Content);
        Ok(None)
    }

    fn capture_entry(
        &mut self,
        id: FolderId,
        dir: BorrowedFd<'_>,
        name: &[u8],
        stat: &FileStat,
        level: CheckLevel,
    ) -> Result<Outcome> {
        let kind = if stat.st_dev == self.device { beneath::kind(stat) } else { Kind::Other(Reason::Mount) };
        let known = self.index.known(id, name);
        // Only the same inode of the same type is the known entry.
        let same_kind = known.is_some_and(|known| {
            known.stamp.inode == stat.st_ino
                && match &known.what {
                    NodeState::File { .. } => kind == Kind::File,
                    NodeState::Folder(_) => kind == Kind::Folder,
                    NodeState::Symlink(_) => kind == Kind::Symlink,
                    NodeState::Fifo => kind == Kind::Fifo,
                    NodeState::Missing(reason) => kind == Kind::Other(*reason),
                }
        });
        if known.is_some() && !same_kind {
            self.has_unreported |= kind == Kind::Folder && self.index.was_unwatched(id, name);
            self.forget(id, name, None);
        }
        if self.index.count > limits::WORKSPACE_ENTRIES {
            return Err(WorkspaceError::TooMany { what: "entries", limit: limits::WORKSPACE_ENTRIES });
        }
        match kind {
            Kind::Folder => self.capture_folder(id, dir, name, stat.st_ino, level),
            Kind::File => self.capture_file(id, dir, name, stat, level),
            Kind::Symlink => {
                let target = match readlinkat(dir, name) {
                    Ok(target) => target.into_vec().into_boxed_slice(),
                    Err(error) if beneath::is_gone(error) || error == Errno::EINVAL => return Ok(Outcome::Changed),
                    Err(error) => return Err(WorkspaceError::of("read", &self.index.path(id, name))(error)),
                };
                Ok(self.capture_plain(id, name, stat, NodeState::Symlink(target)))
            }
            Kind::Fifo => Ok(self.capture_plain(id, name, stat, NodeState::Fifo)),
            Kind::Other(reason) => {
                self.capture_plain(id, name, stat, NodeState::Missing(reason));
                Ok(Outcome::Done)
            }
        }
    }

    fn capture_plain(&mut self, id: FolderId, name: &[u8], stat: &FileStat, what: NodeState) -> Outcome {
        let meta = beneath::meta(stat, self.owner, None);
        let stamp = beneath::stamp(stat);
        let same = self.index.known(id, name).is_some_and(|known| {
            known.meta == meta
                && match (&known.what, &what) {
                    (NodeState::Symlink(a), NodeState::Symlink(b)) => a == b,
                    (NodeState::Fifo, NodeState::Fifo) => true,
                    (NodeState::Missing(a), NodeState::Missing(b)) => a == b,
                    _ => false,
                }
        });
        if !same {
            self.index.set(id, name, Known { stamp, settled: true, meta, what });
        }
        Outcome::Done
    }

    fn capture_folder(
        &mut self,
        id: FolderId,
        dir: BorrowedFd<'_>,
        name: &[u8],
        inode: u64,
        level: CheckLevel,
    ) -> Result<Outcome> {
        let opened = match beneath::child(dir, name) {
            Ok(opened) => opened,
            Err(error) if beneath::is_gone(error) => return Ok(Outcome::Changed),
            Err(error) if beneath::is_refused(error) => {
                return self.missing(id, name, Reason::Unreadable).map(|_| Outcome::Done);
            }
            Err(Errno::EXDEV) => return self.missing(id, name, Reason::Mount).map(|_| Outcome::Done),
            Err(error) => return Err(WorkspaceError::of("open", &self.index.path(id, name))(error)),
        };
        let stat =
            beneath::look_at(&opened).map_err(|e| WorkspaceError::of("look at", &self.index.path(id, name))(e))?;
        if stat.st_ino != inode {
            return Ok(Outcome::Changed);
        }
        if let Some(Known { what: NodeState::Folder(inner), .. }) = self.index.known(id, name) {
            let inner = *inner;
            self.refresh(inner, opened.as_fd())?;
            // Without a watch, another folder may have got the same inode.
            let watch = self.index.folder(inner).watch;
            let is_watched = watch.is_some_and(|watch| self.index.watches.get(&watch) == Some(&inner));
            let is_new = self.notify.is_some() && !is_watched;
            // Its readable content may have changed with its permissions.
            let is_closed = beneath::look(opened.as_fd(), b".").is_err_and(beneath::is_refused);
            let is_other = is_closed || self.index.has_unreadable_child(inner);
            return Ok(if matches!(level, CheckLevel::Stamp | CheckLevel::Content) || is_new || is_other {
                Outcome::Folder(inner)
            } else {
                Outcome::Done
            });
        }
        if self.index.folder(id).depth >= limits::WORKSPACE_DEPTH {
            let limit = u64::from(limits::WORKSPACE_DEPTH);
            return Err(WorkspaceError::TooMany { what: "folders within folders", limit });
        }
        let attributes = beneath::attributes(opened.as_fd())
            .map_err(|e| WorkspaceError::io("read the attributes of", &self.index.path(id, name), e))?;
        let meta = beneath::meta(&stat, self.owner, attributes);
        let inner = self.index.make_folder(id, name);
        let what = NodeState::Folder(inner);
        self.index.set(id, name, Known { stamp: beneath::stamp(&stat), settled: true, meta, what });
        Ok(Outcome::Folder(inner))
    }

    pub(super) fn missing(&mut self, id: FolderId, name: &[u8], reason: Reason) -> Result<Option<FolderId>> {
        self.forget(id, name, None);
        let (stamp, meta, what) = (Stamp::default(), Meta::default(), NodeState::Missing(reason));
        self.index.set(id, name, Known { stamp, settled: true, meta, what });
        Ok(None)
    }

    fn missing_folder(&mut self, id: FolderId, reason: Reason) -> Result<()> {
        let (parent, name) = (self.index.folder(id).parent, self.index.folder(id).name.clone());
        self.missing(parent, &name, reason).map(drop)
    }
}

/// Result of checking an entry.
pub(super) enum Outcome {
    Done,
    Folder(FolderId),
    Changed,
    /// Left for the frozen pass.
    Later,
}

/// The part of a stamp that survives a rename.
pub(super) fn moved(stamp: Stamp) -> Stamp {
    Stamp { changed: Moment::default(), ..stamp }
}
