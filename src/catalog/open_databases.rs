//! The databases of one thread: opened on use, closed when their kernel stops.

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

/// New kernels whose files are not synced yet; each has three descriptors open.
const UNSYNCED: usize = 16;
/// So many at most, while a slow device has not taken the ones before.
const MAX_UNSYNCED: usize = 128;

/// After so many commits somebody looks how large the WALs are.
const CHECK_EVERY: u32 = 64;

/// Which database a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Target {
    /// `catalog.db`.
    Host,
    /// A kernel's `state.db`.
    Kernel(KernelId),
}

/// The databases of one thread.
#[derive(Debug)]
pub(super) struct OpenDatabases {
    open: HashMap<Target, (Db, u64)>,
    uses: u64,
    kernels: PathBuf,
    durability: Durability,
    unsynced: Vec<Unsynced>,
    /// Of those, `state.db`.
    states: Vec<File>,
    /// When the last of them came.
    last_unsynced: Option<Instant>,
    /// Who makes those before them durable.
    syncing: Option<JoinHandle<()>>,
    /// Databases that were written since they were last looked after.
    written: HashSet<Target>,
    /// Commits since the thread was last asked to look after them.
    unchecked_commits: u32,
    last_write: Option<Instant>,
}

impl OpenDatabases {
    /// A set without databases; those of kernels are in `kernels/<id>/` and open on use.
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

    /// Puts the host's own database in the set.
    pub(super) fn with_host(mut self, db: Db) -> OpenDatabases {
        self.open.insert(Target::Host, (db, 0));
        self
    }

    /// What acknowledged work survives.
    pub(super) fn durability(&self) -> Durability {
        self.durability
    }

    /// The database, opened if it was not.
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

    /// Makes files durable beside everything else: they are new, and without them only their own kernel is lost.
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

    /// Makes new kernels' own databases durable, and lets go of their descriptors: a database's lock goes with any of them that is closed.
    pub(super) fn sync_states(&mut self) {
        for state in self.states.drain(..) {
            // Nobody was promised this, as above.
            let _ = state.sync_all();
        }
    }

    /// Begins to make durable what [`Self::sync_later`] was given, if that is not under way and the last of it is as old as that: whoever waits for
    /// this thread does not wait for the device, nor does whoever begins with a new kernel.
    pub(super) fn sync_in_background(&mut self, age: Duration) {
        let is_syncing = self.syncing.as_ref().is_some_and(|thread| !thread.is_finished());
        let is_young = self.last_unsynced.is_some_and(|at| at.elapsed() < age);
        if is_syncing || is_young || self.unsynced.is_empty() {
            return;
        }
        let due = std::mem::take(&mut self.unsynced);
        let thread = std::thread::Builder::new().name("sync".into());
        // Without a thread the files stay as they are, as if the host had ended at once.
        self.syncing = thread.spawn(move || due.into_iter().for_each(|files| drop(files.sync()))).ok();
    }

    /// Makes durable what [`Self::sync_later`] was given.
    pub(super) fn sync_now(&mut self) {
        self.sync_states();
        for files in self.unsynced.drain(..) {
            // Nobody was promised this. A device that fails here fails at the next write as well, and there it is told.
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

    /// Notes a commit.
    pub(super) fn wrote(&mut self, target: Target) {
        self.written.insert(target);
        self.unchecked_commits += 1;
        self.last_write = Some(Instant::now());
    }

    /// Whether so much was written that somebody should look after the WALs; says so once.
    pub(super) fn is_check_due(&mut self) -> bool {
        let needed = self.unchecked_commits >= CHECK_EVERY;
        if needed {
            self.unchecked_commits = 0;
        }
        needed
    }

    /// Whether there is something to do at the next quiet moment.
    pub(super) fn has_upkeep(&self) -> bool {
        !self.written.is_empty() || !self.unsynced.is_empty()
    }

    /// Moves WALs that have grown into their databases: which waits for the device, so it is done once nothing was written for
    /// `quiet`, unless one has grown beyond measure.
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

    /// Closes a database; it opens again on use.
    pub(super) fn close(&mut self, target: Target) -> Result<()> {
        self.open.remove(&target).map_or(Ok(()), |(db, _)| db.close())
    }

    /// Lets go of a database whose file is about to be removed.
    pub(super) fn discard(&mut self, target: Target) {
        if let Some((db, _)) = self.open.remove(&target) {
            db.discard();
        }
    }

    fn close_least_used(&mut self) {
        let oldest = self.open.iter().filter(|(of, _)| **of != Target::Host).min_by_key(|(_, (_, used))| *used);
        if let Some(target) = oldest.map(|(of, _)| *of) {
            // What the close could not move into the database is still in its WAL.
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
