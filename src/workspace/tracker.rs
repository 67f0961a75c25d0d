//! One live workspace: what is known of it, what is told of it, and captures of it.
//!
//! ```text
//!            open
//!             ▼
//!  ┌──▶ (quiet) ── prepare ──▶ (quiet)           reads what changed; the kernel runs on
//!  │      │
//!  │   freeze the worker
//!  │      └── collect ──▶ Collected              what changed since; nobody writes meanwhile
//!  │   thaw the worker      │
//!  └──────── finish ◀───────┘                    folders encoded, everything made durable: a tree
//! ```
//! Whatever fails in between leaves a tracker that walks over everything the next time: it never trusts what it is not sure
//! of. Nothing here waits for anything but files; the daemon calls it on its blocking threads.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;

use super::beneath;
use super::capture_stats::{CaptureStats, FullScanReason, Unwatched};
use super::changes::{self, Changes, CheckLevel, OpenEvents, WriterChecks};
use super::deferred_reads::DeferredReads;
use super::driver::{self, Driver, DriverChoice};
use super::encode::encode;
use super::error::WorkspaceError;
use super::index::{FolderId, Index, ROOT, Stamp};
use super::objects::{ObjectBatch, Objects};
use super::paths::WorkspacePaths;
use super::saved;
use super::scan::Scan;
use super::stage::Stage;
use super::tree::TreeId;
use super::tree::entry::{Content, Moment, Reason};
use crate::core::limits;
use crate::sys::inode;
use crate::sys::notify::Notify;

type Result<T> = std::result::Result<T, WorkspaceError>;

/// A workspace whose changes are followed.
#[derive(Debug)]
pub struct Tracker {
    pub(super) paths: WorkspacePaths,
    pub(super) root: OwnedFd,
    pub(super) device: u64,
    pub(super) owner: (u32, u32),
    pub(super) driver: Box<dyn Driver>,
    pub(super) index: Index,
    pub(super) notify: Option<Notify>,
    unwatched: Option<Unwatched>,
    pub(super) changes: Changes,
    /// Why the next pass walks over everything.
    pub(super) full_scan: Option<FullScanReason>,
    /// Whether what is known refers to objects that are not in the store yet.
    unfinished: bool,
    /// Whether objects that are known from before may have been collected since.
    objects_unverified: bool,
    /// Whether nobody else has ever been in this workspace: what a stamp says is so.
    pub(super) is_private: bool,
    pub(super) base: Option<TreeId>,
    grain: Duration,
    unsaved: bool,
    /// A number that no other state of what is known has, in any tracker of this process.
    pub(super) state: u64,
}

/// A number for a state of what is known.
fn next_state_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed)
}

/// How a pass is done.
#[derive(Default)]
pub(super) struct Pass {
    /// Whether nobody writes.
    pub frozen: bool,
    /// Contents that are known by stamp.
    pub contents: HashMap<Stamp, Content>,
    /// Whether the changes are all, though nobody tells.
    pub all_reported: bool,
    /// Where contents are kept that are read later.
    pub deferred: Option<DeferredReads>,
}

/// Something that a tree has only the name of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotCaptured {
    /// Its path in the workspace.
    pub path: PathBuf,
    /// Why.
    pub reason: Reason,
}

/// A tree that was captured.
#[derive(Debug, Clone)]
pub struct Captured {
    /// Its address.
    pub tree: TreeId,
    /// Files, folders and links in it.
    pub entries: u64,
    /// What is not in it, the first [`limits::WORKSPACE_MISSED_NAMES`].
    pub not_captured: Vec<NotCaptured>,
    /// How many those are in all.
    pub not_captured_count: u64,
    /// How it was done.
    pub stats: CaptureStats,
}

/// What was collected while nobody wrote. Dropped, the next pass walks over everything.
pub struct Collected {
    batch: Box<dyn ObjectBatch>,
    stats: CaptureStats,
    deferred: DeferredReads,
}

impl Collected {
    /// How it was done.
    pub fn stats(&self) -> &CaptureStats {
        &self.stats
    }
}

impl Tracker {
    /// Begins to follow a workspace. What was saved of it is used as far as it holds. For a new kernel: before its worker
    /// starts.
    ///
    /// # Errors
    /// The workspace cannot be opened.
    pub fn open(paths: WorkspacePaths) -> Result<Tracker> {
        let path = &paths.workspace;
        let root: OwnedFd = File::open(path).map_err(WorkspaceError::of("open", path))?.into();
        let stat = beneath::look_at(&root).map_err(WorkspaceError::of("look at", path))?;
        let magic = inode::file_system(root.as_fd()).map_err(WorkspaceError::of("look at", path))?;
        let (notify, unwatched) = match Notify::new() {
            Ok(notify) => (Some(notify), None),
            Err(error) => (None, Some(Unwatched::of(&error))),
        };
        let (index, full_scan) = match saved::load(&paths.index, beneath::stamp(&stat).inode) {
            saved::Loaded::Index(index) => (*index, FullScanReason::Reopened),
            saved::Loaded::Nothing => (Index::new(), FullScanReason::First),
            saved::Loaded::Unusable => (Index::new(), FullScanReason::Unusable),
        };
        let driver = driver::choose(&paths)?;
        // What a process before this one left there takes space, and keeps links to files. Whoever needs the folder empties it again.
        if paths.staging.is_dir() {
            let _ = Stage::open(&paths, stat.st_dev);
        }
        Ok(Tracker {
            paths,
            driver,
            root,
            device: stat.st_dev,
            owner: (stat.st_uid, stat.st_gid),
            index,
            notify,
            unwatched,
            changes: Changes::default(),
            full_scan: Some(full_scan),
            unfinished: false,
            objects_unverified: true,
            is_private: false,
            base: None,
            grain: grain(magic),
            unsaved: true,
            state: next_state_number(),
        })
    }

    /// Takes an index of what this process has just made, where nobody else is, for known. `base`: the tree that it is, if that
    /// is in the store.
    pub(super) fn adopt_index(&mut self, base: Option<TreeId>) -> Result<()> {
        self.watch_all()?;
        (self.full_scan, self.base, self.unsaved) = (None, base, true);
        if base.is_none() {
            // All files are in the store; these folders are not.
            self.index.mark_all_stale();
        }
        self.set_trusted(true);
        Ok(())
    }

    /// What was last changed before this, and looks as it did, is as it was.
    pub(super) fn settled_before(&self) -> Moment {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(self.grain);
        Moment { secs: now.as_secs().cast_signed(), nanos: now.subsec_nanos() }
    }

    /// Becomes readable when changes are told: then [`Self::drain`] is due, so that the host's queue does not overflow.
    /// None if nobody tells.
    pub fn changes_fd(&self) -> Option<BorrowedFd<'_>> {
        self.notify.as_ref().map(AsFd::as_fd)
    }

    /// The tree that was last captured or restored. While a tracker lives, its objects are in use: a root of garbage
    /// collection.
    pub fn base(&self) -> Option<TreeId> {
        self.base
    }

    /// Takes what was told of changes. Cheap; does not look at files.
    pub fn drain(&mut self) {
        let opens = OpenEvents::Count(&mut WriterChecks::default());
        let why = changes::drain(&mut self.notify, &mut self.index, &mut self.changes, opens);
        self.full_scan = self.full_scan.or(why);
    }

    /// Brings the index up to what is there.
    pub(super) fn pass(
        &mut self,
        batch: &mut dyn ObjectBatch,
        objects: &dyn Objects,
        pass: &mut Pass,
    ) -> Result<CaptureStats> {
        self.drain();
        // Of a pass that failed: marks are counted from the first.
        self.notify.iter_mut().for_each(Notify::unmark);
        self.state = next_state_number();
        let unwatched = (self.notify.is_none() && !pass.all_reported).then_some(FullScanReason::Unwatched);
        // Until it is done, nothing is sure.
        let unfinished = std::mem::replace(&mut self.unfinished, true).then_some(FullScanReason::Unfinished);
        let full_scan = self.full_scan.take().or(unfinished).or(unwatched);
        let mut stats = CaptureStats { full_scan, unwatched: self.unwatched, ..CaptureStats::default() };
        let changes = self.changes.take_for_pass();
        let settled_before = self.settled_before();
        let check = self.objects_unverified.then_some(objects);
        let mut scan = Scan {
            root: self.root.as_fd(),
            index: &mut self.index,
            all_reported: full_scan.is_none(),
            private: self.is_private,
            has_unreported: false,
            notify: &mut self.notify,
            batch,
            driver: &mut *self.driver,
            deferred: pass.deferred.as_mut(),
            check,
            frozen: pass.frozen,
            stats: &mut stats,
            device: self.device,
            owner: self.owner,
            settled_before,
            contents: std::mem::take(&mut pass.contents),
            later: &mut self.changes,
            next_full_scan: None,
            opened: 0,
            writer_checks: WriterChecks::default(),
        };
        if full_scan.is_some() { scan.scan_all() } else { scan.follow(&changes) }?;
        scan.drain();
        self.owner = scan.owner;
        self.full_scan = scan.next_full_scan;
        self.changes.end_pass(&self.index);
        // Twice within one tick of the clock leaves no trace in a stamp.
        if let Some((folder, name)) = self.changes.written.take()
            && pass.deferred.is_some()
        {
            return Err(WorkspaceError::Changing { path: self.index.path(folder, &name) });
        }
        self.unfinished = false;
        self.unwatched = stats.unwatched.or(self.unwatched);
        if check.is_some() {
            self.index.mark_all_stale();
        }
        self.unsaved = true;
        Ok(stats)
    }

    /// Reads what changed, while the kernel runs on, so that less is left to do while it is frozen. What changes under the
    /// reader is left for then.
    ///
    /// # Errors
    /// Files or the store fail; the next pass walks over everything then.
    pub fn prepare(&mut self, objects: &dyn Objects) -> Result<CaptureStats> {
        let mut batch = objects.batch();
        let done = self.pass(&mut *batch, objects, &mut Pass::default());
        let done = done.and_then(|stats| batch.commit().map(|()| stats).map_err(WorkspaceError::from));
        self.set_trusted(done.is_ok());
        done
    }

    /// Collects what changed. Nobody may write to the workspace meanwhile: what changes nevertheless is an error that names
    /// it.
    ///
    /// # Errors
    /// A file changes; files or the store fail; the next pass walks over everything then.
    pub fn collect(&mut self, objects: &dyn Objects) -> Result<Collected> {
        let began = Instant::now();
        let mut batch = objects.batch();
        // Of a collection that nobody finished.
        self.driver.release()?;
        let mut pass = Pass { frozen: true, deferred: Some(DeferredReads::default()), ..Pass::default() };
        let done = self.pass(&mut *batch, objects, &mut pass);
        // Until it is finished: what is known refers to objects that are not there yet.
        self.set_trusted(false);
        let mut stats = done?;
        stats.pause = began.elapsed();
        Ok(Collected { batch, stats, deferred: pass.deferred.unwrap_or_default() })
    }

    /// Makes a tree of what was collected. Writers may run again.
    ///
    /// # Errors
    /// The store fails; the next pass walks over everything then.
    pub fn finish(&mut self, collected: Collected) -> Result<Captured> {
        let Collected { mut batch, mut stats, deferred } = collected;
        deferred.resolve(&mut self.index, &mut *self.driver, &mut *batch, &mut stats)?;
        self.driver.release()?;
        let tree = encode(&mut self.index, &mut *batch)?;
        batch.commit()?;
        self.set_trusted(true);
        self.base = Some(tree);
        Ok(self.captured(tree, stats))
    }

    /// [`Self::collect`] and [`Self::finish`]: for a workspace to which nobody writes anyway.
    ///
    /// # Errors
    /// As those.
    pub fn capture(&mut self, objects: &dyn Objects) -> Result<Captured> {
        let collected = self.collect(objects)?;
        self.finish(collected)
    }

    /// Begins to follow a workspace that nobody else has been in, made from one of which this index is known, and perhaps what
    /// was changed since.
    pub(super) fn seeded(paths: WorkspacePaths, index: Index, changes: Option<Changes>) -> Result<Tracker> {
        let mut tracker = Tracker::open(paths)?;
        (tracker.index, tracker.is_private) = (index, true);
        tracker.full_scan = changes.is_none().then_some(FullScanReason::Reopened);
        if let Some(changes) = changes {
            tracker.changes = changes;
            tracker.watch_all()?;
        }
        tracker.set_trusted(true);
        Ok(tracker)
    }

    /// Whether what is known refers to objects that are there.
    pub(super) fn is_trusted(&self) -> bool {
        !self.unfinished && !self.objects_unverified
    }

    /// Has all folders watched that are known.
    pub(super) fn watch_all(&mut self) -> Result<()> {
        let folders: Vec<FolderId> = self.index.folders.keys().copied().collect();
        for id in folders {
            let Some(notify) = &self.notify else { return Ok(()) };
            let dir = match beneath::folder(self.root.as_fd(), &self.index.names(id)) {
                Ok(dir) => dir,
                // It went since: that was told, and is followed.
                Err(error) if beneath::is_gone(error) || beneath::is_refused(error) || error == Errno::EXDEV => {
                    continue;
                }
                Err(error) => return Err(WorkspaceError::of("open", &self.index.path(id, b""))(error)),
            };
            match notify.add(dir.as_fd()) {
                Ok(watch) => {
                    self.index.folder_mut(id).watch = Some(watch);
                    self.index.watches.insert(watch, id);
                }
                // Who may enter it may not read it, and only what can be read can be watched: it is looked at then.
                Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && id != ROOT => {
                    let folder = self.index.folder(id);
                    self.changes.add((folder.parent, folder.name.clone()), CheckLevel::Metadata);
                }
                Err(error) => {
                    self.unwatched = Some(Unwatched::of(&error));
                    self.notify = None;
                    self.index.watches.clear();
                }
            }
        }
        Ok(())
    }

    /// What was captured did not become durable after all: the next pass takes nothing for stored that it does not find.
    pub fn invalidate(&mut self) {
        self.set_trusted(false);
        self.base = None;
    }

    /// Whether everything that is known refers to objects that are there.
    pub(super) fn set_trusted(&mut self, trusted: bool) {
        (self.unfinished, self.objects_unverified) = (!trusted, !trusted);
    }

    fn captured(&self, tree: TreeId, stats: CaptureStats) -> Captured {
        let missing = self.index.missing.iter().take(limits::WORKSPACE_MISSED_NAMES);
        let not_captured =
            missing.map(|((id, name), reason)| NotCaptured { path: self.index.path(*id, name), reason: *reason });
        Captured {
            tree,
            entries: self.index.count,
            not_captured: not_captured.collect(),
            not_captured_count: self.index.missing.len() as u64,
            stats,
        }
    }

    /// Begins anew, knowing nothing.
    pub(super) fn forget(&mut self) -> Result<()> {
        match std::fs::remove_file(&self.paths.index) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(WorkspaceError::io("remove", &self.paths.index, error));
            }
            Ok(()) | Err(_) => {}
        }
        *self = Tracker::open(self.paths.clone())?;
        Ok(())
    }

    /// Nobody else has been here: what was noted longer ago than the clock's grain is known by its stamp.
    pub(super) fn settle_all(&mut self) {
        let before = self.settled_before();
        for known in self.index.folders.values_mut().flat_map(|folder| folder.entries.values_mut()) {
            known.settled |= known.stamp.changed < before;
        }
    }

    /// As [`Self::save`], for a workspace that was just made and that nobody else has been in. What was made within the clock's
    /// grain is known by its stamp once the clock has moved on, which is waited for if there is much of it.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn save_made(&mut self) -> Result<()> {
        // What was copied with its times may be older than the clock's grain by now, whenever it was looked at before.
        self.settle_all();
        let entries = self.index.folders.values_mut().flat_map(|folder| folder.entries.values_mut());
        let unsure: Vec<_> = entries.filter(|known| !known.settled).collect();
        if unsure.len() as u64 > limits::WORKSPACE_SETTLE_ENTRIES && self.grain <= LOCAL_GRAIN {
            std::thread::sleep(self.grain);
            unsure.into_iter().for_each(|known| known.settled = true);
        }
        self.save()
    }

    /// Keeps what is known for the next process. Old or missing, it costs the next one time and nothing else.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&mut self) -> Result<()> {
        if self.unsaved {
            saved::save(&self.paths.index, &self.index, self.root_inode())?;
            self.unsaved = false;
        }
        Ok(())
    }

    fn root_inode(&self) -> u64 {
        beneath::look_at(&self.root).map(|stat| stat.st_ino).unwrap_or_default()
    }

    /// How files are held and copied, and why in no better way.
    pub fn driver(&self) -> &DriverChoice {
        self.driver.choice()
    }

    /// Why changes are not told, so that everything is looked at each time.
    pub fn unwatched(&self) -> Option<Unwatched> {
        self.unwatched
    }

    /// The workspace's folder.
    pub fn workspace(&self) -> &Path {
        &self.paths.workspace
    }

    /// How many folders are watched.
    pub fn watched(&self) -> usize {
        self.index.watches.len()
    }
}

/// What times may lag behind where they come from this machine's clock.
const LOCAL_GRAIN: Duration = Duration::from_millis(50);

/// What a file system's times may lag behind the clock: a stamp that is younger may stay the same though the file changes.
fn grain(magic: i64) -> Duration {
    /// Times of these come from this machine's clock, at the latest a tick old.
    const LOCAL: &[i64] = &[
        0xef53,      // ext2, ext3, ext4
        0x5846_5342, // XFS
        0x9123_683e, // Btrfs
        0x0102_1994, // tmpfs
        0xf2f5_2010, // F2FS
        0x2fc1_2fc1, // ZFS
        0x794c_7630, // overlayfs
    ];
    if LOCAL.contains(&magic) { LOCAL_GRAIN } else { Duration::from_secs(10) }
}
