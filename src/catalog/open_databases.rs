//! The open databases of one thread: opened on use, closed when their kernel stops.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::CatalogError;
use super::files::Unsynced;
use super::sqlite::{Db, Kind, Result};
use crate::core::durability::Durability;
use crate::core::ids::KernelId;
use crate::core::limits;

/// Unsynced new kernels that start a background sync; each holds three descriptors.
const UNSYNCED: usize = 16;
/// Unsynced new kernels at most, while a slow device has not taken the previous ones.
const MAX_UNSYNCED: usize = 128;

/// Commits between two checks of the WALs' sizes.
const CHECK_EVERY: u32 = 64;

/// The database that a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Target {
    /// `catalog.db`.
    Host,
    /// A kernel's `state.db`.
    Kernel(KernelId),
}

/// The open databases of one thread.
#[derive(Debug)]
pub(super) struct OpenDatabases {
    open: HashMap<Target, (Db, u64)>,
    uses: u64,
    kernels: PathBuf,
    durability: Durability,
    unsynced: Vec<Unsynced>,
    /// Their `state.db` files.
    states: Vec<File>,
    /// When the last of them was added.
    last_unsynced: Option<Instant>,
    /// The thread that syncs earlier ones.
    syncing: Option<JoinHandle<()>>,
    /// Databases written since their WAL was last checkpointed.
    written: HashSet<Target>,
    /// Commits since the last check.
    unchecked_commits: u32,
    last_write: Option<Instant>,
}

impl OpenDatabases {
    /// An empty set; databases of kernels are in `kernels/<id>/` and open on use.
    pub(super) fn new(kernels: PathBuf, durability: Durability) -> OpenDatabases {
        let (written, unchecked_commits, last_write) = (HashSet::new(), 0, None);
        OpenDatabases {
            open: HashMap::new(),
            uses: 0,
            kernels,
            durability,
            unsynced: Vec::new(),
            states: Vec::new(),
            last_unsynced: None,
            syncing: None,
            written,
            unchecked_commits,
            last_write,
        }
    }

    /// Adds the host's own database.
    pub(super) fn with_host(mut self, db: Db) -> OpenDatabases {
        self.open.insert(Target::Host, (db, 0));
        self
    }

    /// What acknowledged work survives.
    pub(super) fn durability(&self) -> Durability {
        self.durability
    }

    /// The database; opens it if necessary.
    pub(super) fn db(&mut self, target: Target) -> Result<&Db> {
        self.uses += 1;
        if !self.open.contains_key(&target) {
            let Target::Kernel(kernel) = target else { return Err(CatalogError::Stopped) };
            if self.open.len() >= limits::STATE_DATABASES_OPEN {
                self.close_least_used();
            }
            self.sync_states();
            let path = self.kernels.join(kernel.to_string()).join(Kind::State.file_name());
            let db = Db::open(Kind::State, &path, self.durability)?;
            self.open.insert(target, (db, self.uses));
        }
        match self.open.get_mut(&target) {
            Some((db, used)) => {
                *used = self.uses;
                Ok(db)
            }
            None => Err(CatalogError::Stopped),
        }
    }

    /// Takes files of a new kernel to sync later. Without the sync, a loss of power loses only that kernel.
    pub(super) fn sync_later(&mut self, mut files: Unsynced) {
        self.states.extend(files.take_state());
        self.unsynced.push(files);
        self.last_unsynced = Some(Instant::now());
        if self.unsynced.len() >= MAX_UNSYNCED {
            self.sync_now();
        } else if self.unsynced.len() >= UNSYNCED {
            self.sync_in_background(Duration::ZERO);
        }
    }

    /// Syncs and closes the `state.db` files of new kernels, before any of them is opened: closing a descriptor drops a
    /// lock.
    pub(super) fn sync_states(&mut self) {
        for state in self.states.drain(..) {
            // Best effort: durability was not promised.
            let _ = state.sync_all();
        }
    }

    /// Syncs the new kernels' files in a background thread, unless one runs or the last file is younger than `age`:
    /// neither this thread nor the first use of a new kernel waits for the device.
    pub(super) fn sync_in_background(&mut self, age: Duration) {
        let is_syncing = self.syncing.as_ref().is_some_and(|thread| !thread.is_finished());
        let is_young = self.last_unsynced.is_some_and(|at| at.elapsed() < age);
        if is_syncing || is_young || self.unsynced.is_empty() {
            return;
        }
        let due = std::mem::take(&mut self.unsynced);
        let thread = std::thread::Builder::new().name("sync".into());
        // Without a thread the files stay unsynced, as after a loss of power.
        self.syncing = thread.spawn(move || due.into_iter().for_each(|files| drop(files.sync()))).ok();
    }

    /// Syncs the files taken by [`Self::sync_later`].
    pub(super) fn sync_now(&mut self) {
        self.sync_states();
        for files in self.unsynced.drain(..) {
            // Durability was not promised. A failing device fails the next write too, which reports it.
            let _ = files.sync();
        }
        if let Some(thread) = self.syncing.take() {
            let _ = thread.join();
        }
    }

    /// Whether the database is open.
    pub(super) fn is_open(&self, target: Target) -> bool {
        self.open.contains_key(&target)
    }

    /// Records a commit.
    pub(super) fn wrote(&mut self, target: Target) {
        self.written.insert(target);
        self.unchecked_commits += 1;
        self.last_write = Some(Instant::now());
    }

    /// Whether the WALs' sizes are due for a check; true once.
    pub(super) fn is_check_due(&mut self) -> bool {
        let needed = self.unchecked_commits >= CHECK_EVERY;
        if needed {
            self.unchecked_commits = 0;
        }
        needed
    }

    /// Whether there is work for the next quiet moment.
    pub(super) fn has_upkeep(&self) -> bool {
        !self.written.is_empty() || !self.unsynced.is_empty()
    }

    /// Checkpoints WALs that have grown. That waits for the device, so it is done once nothing was written for `quiet`,
    /// unless a WAL has grown beyond measure.
    pub(super) fn checkpoint_wals(&mut self, quiet: Duration) {
        let now_quiet = !quiet.is_zero() && self.last_write.is_none_or(|at| at.elapsed() >= quiet);
        let most = if now_quiet { limits::WAL_BYTES } else { limits::WAL_MAX_BYTES };
        for target in &self.written {
            if let Some((db, _)) = self.open.get(target) {
                db.checkpoint_wal(most);
            }
        }
        if now_quiet {
            self.written.clear();
        }
    }

    /// Closes a database; it reopens on use.
    pub(super) fn close(&mut self, target: Target) -> Result<()> {
        self.open.remove(&target).map_or(Ok(()), |(db, _)| db.close())
    }

    /// Closes a database whose file is about to be deleted.
    pub(super) fn discard(&mut self, target: Target) {
        if let Some((db, _)) = self.open.remove(&target) {
            db.discard();
        }
    }

    fn close_least_used(&mut self) {
        let oldest = self.open.iter().filter(|(of, _)| **of != Target::Host).min_by_key(|(_, (_, used))| *used);
        if let Some(target) = oldest.map(|(of, _)| *of) {
            // What the close could not checkpoint is still in the WAL.
            let _ = self.close(target);
        }
    }

    /// Closes every database.
    pub(super) fn close_all(&mut self) {
        self.sync_now();
        for (_, (db, _)) in self.open.drain() {
            // As above.
            let _ = db.close();
        }
    }
}
