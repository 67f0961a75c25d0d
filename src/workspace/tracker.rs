//! One live workspace: its index, its reported changes, and its captures.
//!
//! ```text
//!            open
//!             ▼
//!  ┌──▶ (quiet) ── prepare ──▶ (quiet)           reads what changed; the kernel runs on
//!  │      │
//!  │   freeze the worker
//!  │      └── collect ──▶ Collected              reads what changed since; no writers
//!  │   thaw the worker      │
//!  └──────── finish ◀───────┘                    encodes folders, makes everything durable: a tree
//! ```
//! After any failure in between, the next pass scans everything: a tracker never trusts what is uncertain. It waits
//! only for files; the daemon calls it on blocking threads.

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

/// A followed workspace.
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
    /// Why the next pass scans everything.
    pub(super) full_scan: Option<FullScanReason>,
    /// Whether the index refers to objects that are not in the store yet.
    unfinished: bool,
    /// Whether objects in the index may have been collected.
    objects_unverified: bool,
    /// Whether no other process has ever used this workspace: stamps are reliable.
    pub(super) is_private: bool,
    pub(super) base: Option<TreeId>,
    grain: Duration,
    unsaved: bool,
    /// Number of this state of the index, unique among all trackers of the process.
    pub(super) state: u64,
}

/// A new state number.
fn next_state_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed)
}

/// Options of a pass.
#[derive(Default)]
pub(super) struct Pass {
    /// Whether all writers are stopped.
    pub frozen: bool,
    /// Contents known by stamp.
    pub contents: HashMap<Stamp, Content>,
    /// Whether the recorded changes are complete although nothing is watched.
    pub all_reported: bool,
    /// Takes deferred reads.
    pub deferred: Option<DeferredReads>,
}

/// An entry that a tree holds by name only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotCaptured {
    /// Its path in the workspace.
    pub path: PathBuf,
    /// The reason.
    pub reason: Reason,
}

/// A captured tree.
#[derive(Debug, Clone)]
pub struct Captured {
    /// Its address.
    pub tree: TreeId,
    /// Number of entries.
    pub entries: u64,
    /// Entries that it does not hold, the first [`limits::WORKSPACE_MISSED_NAMES`].
    pub not_captured: Vec<NotCaptured>,
    /// Number of all such entries.
    pub not_captured_count: u64,
    /// Statistics.
    pub stats: CaptureStats,
}

/// What was collected while frozen. If it is dropped, the next pass scans everything.
pub struct Collected {
    batch: Box<dyn ObjectBatch>,
    stats: CaptureStats,
    deferred: DeferredReads,
}

impl Collected {
    /// Statistics so far.
    pub fn stats(&self) -> &CaptureStats {
        &self.stats
    }
}

impl Tracker {
    /// Starts to follow a workspace, with the saved index as far as it is valid. For a new kernel: before its worker
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
        // Leftovers of an earlier process take space and keep links to files. Opening the stage empties it.
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

    /// Trusts the index of a workspace that only this process has used. `base`: its tree, if that
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

    /// A file that last changed before this time is unchanged if its stamp is.
    pub(super) fn settled_before(&self) -> Moment {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(self.grain);
        Moment { secs: now.as_secs().cast_signed(), nanos: now.subsec_nanos() }
    }

    /// Becomes readable when changes are reported: then call [`Self::drain`], before the host's queue overflows. `None`
    /// if changes are not watched.
    pub fn changes_fd(&self) -> Option<BorrowedFd<'_>> {
        self.notify.as_ref().map(AsFd::as_fd)
    }

    /// The tree last captured or restored. While the tracker lives, it is a root of garbage collection.
    pub fn base(&self) -> Option<TreeId> {
        self.base
    }

    /// Drains the event queue. Cheap; does not access files.
    pub fn drain(&mut self) {
        let opens = OpenEvents::Count(&mut WriterChecks::default());
        let why = changes::drain(&mut self.notify, &mut self.index, &mut self.changes, opens);
        self.full_scan = self.full_scan.or(why);
    }

    /// Updates the index.
    pub(super) fn pass(
        &mut self,
        batch: &mut dyn ObjectBatch,
        objects: &dyn Objects,
        pass: &mut Pass,
    ) -> Result<CaptureStats> {
        self.drain();
        // Those of a failed pass: marks are counted from 0.
        self.notify.iter_mut().for_each(Notify::unmark);
        self.state = next_state_number();
        let unwatched = (self.notify.is_none() && !pass.all_reported).then_some(FullScanReason::Unwatched);
        // Until the pass ends, nothing is trusted.
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
        // Two writes within one tick of the clock leave one stamp.
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

    /// Reads what changed while the kernel runs on, to shorten the frozen pass. Leaves files that change during the
    /// read.
    ///
    /// # Errors
    /// File or store errors; the next pass scans everything then.
    pub fn prepare(&mut self, objects: &dyn Objects) -> Result<CaptureStats> {
        let mut batch = objects.batch();
        let done = self.pass(&mut *batch, objects, &mut Pass::default());
        let done = done.and_then(|stats| batch.commit().map(|()| stats).map_err(WorkspaceError::from));
        self.set_trusted(done.is_ok());
        done
    }

    /// Collects what changed, without writers: a change meanwhile is an error that names the file.
    ///
    /// # Errors
    /// A file changes; file or store errors; the next pass scans everything then.
    pub fn collect(&mut self, objects: &dyn Objects) -> Result<Collected> {
        let began = Instant::now();
        let mut batch = objects.batch();
        // Held by a collection that was not finished.
        self.driver.release()?;
        let mut pass = Pass { frozen: true, deferred: Some(DeferredReads::default()), ..Pass::default() };
        let done = self.pass(&mut *batch, objects, &mut pass);
        // Until `finish`, the index refers to objects that do not exist yet.
        self.set_trusted(false);
        let mut stats = done?;
        stats.pause = began.elapsed();
        Ok(Collected { batch, stats, deferred: pass.deferred.unwrap_or_default() })
    }

    /// Builds a tree from a collection. Writers may run again.
    ///
    /// # Errors
    /// Store errors; the next pass scans everything then.
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

    /// [`Self::collect`] and [`Self::finish`], for a workspace without writers.
    ///
    /// # Errors
    /// As both.
    pub fn capture(&mut self, objects: &dyn Objects) -> Result<Captured> {
        let collected = self.collect(objects)?;
        self.finish(collected)
    }

    /// Starts to follow a private workspace, copied from one with this index, and perhaps with known
    /// changes since.
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

    /// Whether all objects in the index exist.
    pub(super) fn is_trusted(&self) -> bool {
        !self.unfinished && !self.objects_unverified
    }

    /// Watches all known folders.
    pub(super) fn watch_all(&mut self) -> Result<()> {
        let folders: Vec<FolderId> = self.index.folders.keys().copied().collect();
        for id in folders {
            let Some(notify) = &self.notify else { return Ok(()) };
            let dir = match beneath::folder(self.root.as_fd(), &self.index.names(id)) {
                Ok(dir) => dir,
                // It was removed or moved since: events report that.
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
                // Only a readable folder can be watched: this one is checked instead.
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

    /// The captured objects did not become durable: the next pass verifies that each exists.
    pub fn invalidate(&mut self) {
        self.set_trusted(false);
        self.base = None;
    }

    /// Sets whether all objects in the index exist.
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

    /// Starts again with an empty index.
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

    /// Settles old stamps of a private workspace.
    pub(super) fn settle_all(&mut self) {
        let before = self.settled_before();
        for known in self.index.folders.values_mut().flat_map(|folder| folder.entries.values_mut()) {
            known.settled |= known.stamp.changed < before;
        }
    }

    /// As [`Self::save`], for a private workspace that was just created. Waits for the clock to
    /// move on if many stamps are within its grain.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn save_made(&mut self) -> Result<()> {
        // Files copied with their times may be older than the clock's grain by now.
        self.settle_all();
        let entries = self.index.folders.values_mut().flat_map(|folder| folder.entries.values_mut());
        let unsure: Vec<_> = entries.filter(|known| !known.settled).collect();
        if unsure.len() as u64 > limits::WORKSPACE_SETTLE_ENTRIES && self.grain <= LOCAL_GRAIN {
            std::thread::sleep(self.grain);
            unsure.into_iter().for_each(|known| known.settled = true);
        }
        self.save()
    }

    /// Saves the index for the next process. An old or missing file costs that process time, nothing else.
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

    /// Whether this is the directory that it follows.
    pub fn follows(&self, directory: &std::fs::Metadata) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        (directory.dev(), directory.ino()) == (self.device, self.root_inode())
    }

    /// How files are held and copied, and why not better.
    pub fn driver(&self) -> &DriverChoice {
        self.driver.choice()
    }

    /// Why changes are not watched, so that every pass is a full scan.
    pub fn unwatched(&self) -> Option<Unwatched> {
        self.unwatched
    }

    /// The workspace's path.
    pub fn workspace(&self) -> &Path {
        &self.paths.workspace
    }

    /// Number of watched folders.
    pub fn watched(&self) -> usize {
        self.index.watches.len()
    }
}

/// Lag of file times behind this machine's clock.
const LOCAL_GRAIN: Duration = Duration::from_millis(50);

/// Lag of a file system's times behind the clock: a younger stamp may stay the same although the file changes.
fn grain(magic: i64) -> Duration {
    /// File systems whose times come from this machine's clock, at most a tick old.
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
