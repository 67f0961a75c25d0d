//! The engine's state on its way into `engine.db`. Changes are collected during an execution and
//! stored in one transaction before its end is reported. Runs in init.
//!
//! Memory is bounded: changes of one execution beyond [`PENDING_BYTES`] are not kept; such an entry
//! is removed from the state and listed as missed.

use std::collections::BTreeMap;

use crate::catalog::CatalogError;
use crate::catalog::{Changes, EngineDb, EngineInfo, Entry, EntryHead, JobRecord};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::link::frames::{Job, Missed};

use super::spool::Spool;

/// Limit of the changed entries kept until the end of an execution, bytes.
const PENDING_BYTES: usize = 512 << 20;
/// Format version of the state, recorded in `engine.db`.
const STATE_FORMAT: u32 = 1;

/// A change waiting for the end of its execution.
#[derive(Debug)]
enum Change {
    Put(Entry),
    Del,
}

/// An incomplete entry.
#[derive(Debug)]
struct Partial {
    entry: Entry,
    /// Whether it exceeds the limit: its remaining chunks are discarded.
    dropped: bool,
}

/// `engine.db` with its pending changes.
pub struct State {
    db: EngineDb,
    info: Option<EngineInfo>,
    pending: BTreeMap<String, Change>,
    pending_bytes: usize,
    /// All bytes since the last transaction, kept or not.
    seen_bytes: u64,
    partial: Option<Partial>,
    /// Entries that were too large, by key.
    dropped: BTreeMap<String, MissedEntry>,
    missed: Vec<MissedEntry>,
    missed_changed: bool,
    jobs: Vec<Job>,
    jobs_changed: bool,
    /// Whether something was stored since the last WAL checkpoint.
    stored: bool,
}

impl State {
    /// Rehearses storing an execution's changes. A failure only makes the first execution slower.
    pub fn rehearse(&self) {
        if let Err(error) = self.db.rehearse() {
            tracing::debug!(%error, "storing state was not rehearsed");
        }
    }

    /// Wraps an open database.
    pub fn new(db: EngineDb) -> Self {
        State {
            db,
            info: None,
            pending: BTreeMap::new(),
            pending_bytes: 0,
            seen_bytes: 0,
            partial: None,
            dropped: BTreeMap::new(),
            missed: Vec::new(),
            missed_changed: false,
            jobs: Vec::new(),
            jobs_changed: false,
            stored: false,
        }
    }

    /// Records the writing engine.
    ///
    /// # Errors
    /// If the entries belong to another engine, and the database's errors.
    pub fn set_engine(&mut self, name: &str, version: &str) -> Result<(), CatalogError> {
        let info = EngineInfo { name: name.to_owned(), version: version.to_owned(), format: STATE_FORMAT };
        if let Some(before) = self.db.info()?
            && before.name != info.name
        {
            return Err(CatalogError::Conflict(format!("the kernel's state is of engine {}, not {name}", before.name)));
        }
        self.db.set_info(&info)?;
        self.info = Some(info);
        Ok(())
    }

    /// The jobs that ran when the state was last stored and are gone now; clears the list.
    ///
    /// # Errors
    /// The database's errors.
    pub fn take_lost_jobs(&mut self) -> Result<Vec<JobRecord>, CatalogError> {
        let lost = self.db.jobs()?;
        if !lost.is_empty() {
            self.db.apply(&Changes { jobs: Some(Vec::new()), ..Changes::default() })?;
        }
        Ok(lost)
    }

    /// Every stored entry without its body.
    ///
    /// # Errors
    /// The database's errors.
    pub fn heads(&self) -> Result<Vec<EntryHead>, CatalogError> {
        self.db.heads()
    }

    /// One stored entry.
    ///
    /// # Errors
    /// The database's errors.
    pub fn entry(&self, key: &str) -> Result<Option<Entry>, CatalogError> {
        self.db.entry(key)
    }

    /// Reads a stored entry from an offset.
    ///
    /// # Errors
    /// The database's errors.
    pub fn piece(&self, key: &str, offset: u64) -> Result<Option<(EntryHead, Vec<u8>)>, CatalogError> {
        self.db.piece(key, offset)
    }

    /// Takes one chunk of an entry.
    ///
    /// # Errors
    /// What the engine did wrong.
    pub fn put(&mut self, key: String, meta_json: String, chunk: &[u8], more: bool) -> Result<(), String> {
        self.seen_bytes += chunk.len() as u64;
        if self.seen_bytes > limits::STATE_BYTES {
            return Err(format!("{} bytes of state in one execution", self.seen_bytes));
        }
        let mut partial = match self.partial.take() {
            Some(partial) if partial.entry.key == key => partial,
            Some(partial) => return Err(format!("entry {key:?} within the chunks of {:?}", partial.entry.key)),
            None => {
                self.forget(&key);
                Partial { entry: Entry { key, meta_json, body: Vec::new() }, dropped: false }
            }
        };
        if partial.dropped || self.pending_bytes + partial.entry.body.len() + chunk.len() > PENDING_BYTES {
            partial.dropped = true;
            partial.entry.body = Vec::new();
        } else {
            partial.entry.body.extend_from_slice(chunk);
        }
        if more {
            self.partial = Some(partial);
            return Ok(());
        }
        self.finish(partial)
    }

    fn finish(&mut self, partial: Partial) -> Result<(), String> {
        let key = partial.entry.key.clone();
        if partial.dropped {
            let reason = format!("one execution changed more than {PENDING_BYTES} bytes of state");
            let missed = MissedEntry { key: key.clone(), type_name: String::new(), reason };
            self.dropped.insert(key.clone(), missed);
            self.missed_changed = true;
            return self.change(key, Change::Del);
        }
        self.missed_changed |= self.dropped.remove(&key).is_some();
        self.pending_bytes += partial.entry.body.len();
        self.change(key, Change::Put(partial.entry))
    }

    /// Records a deleted entry.
    ///
    /// # Errors
    /// What the engine did wrong.
    pub fn del(&mut self, key: String) -> Result<(), String> {
        self.forget(&key);
        self.missed_changed |= self.dropped.remove(&key).is_some();
        self.change(key, Change::Del)
    }

    fn forget(&mut self, key: &str) {
        if let Some(Change::Put(old)) = self.pending.remove(key) {
            self.pending_bytes -= old.body.len();
        }
    }

    fn change(&mut self, key: String, change: Change) -> Result<(), String> {
        self.pending.insert(key, change);
        match self.pending.len() > limits::STATE_ENTRIES {
            true => Err(format!("{} state entries in one execution", self.pending.len())),
            false => Ok(()),
        }
    }

    /// Takes the list of unsaved entries.
    pub fn set_missed(&mut self, missed: Vec<Missed>) {
        self.missed = missed.into_iter().map(MissedEntry::from).collect();
        self.missed_changed = true;
    }

    /// Takes the list of jobs.
    pub fn set_jobs(&mut self, jobs: Vec<Job>) {
        self.jobs = jobs;
        self.jobs_changed = true;
    }

    /// The running jobs.
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// The unsaved entries.
    pub fn missed(&self) -> Vec<MissedEntry> {
        self.missed.iter().chain(self.dropped.values()).cloned().collect()
    }

    /// Whether there are changes to store.
    pub fn is_dirty(&self) -> bool {
        !self.pending.is_empty() || self.missed_changed || self.jobs_changed
    }

    /// Stores all changes in one transaction. After an error they are kept for the next attempt.
    ///
    /// # Errors
    /// The database's errors; nothing was stored then.
    pub fn commit(&mut self, exec: Option<ExecId>) -> Result<(), CatalogError> {
        self.seen_bytes = 0;
        if !self.is_dirty() {
            return Ok(());
        }
        let mut changes = Changes { exec: exec.map_or(0, |exec| exec.0), ..Changes::default() };
        for (key, change) in std::mem::take(&mut self.pending) {
            match change {
                Change::Put(entry) => changes.puts.push(entry),
                Change::Del => changes.dels.push(key),
            }
        }
        if self.missed_changed {
            changes.missed = Some(self.missed());
        }
        if self.jobs_changed {
            let record = |job: &Job| JobRecord { id: job.id.clone(), command: job.command.clone() };
            changes.jobs = Some(self.jobs.iter().map(record).collect());
        }
        if let Err(error) = self.db.apply(&changes) {
            let puts = changes.puts.into_iter().map(|entry| (entry.key.clone(), Change::Put(entry)));
            self.pending = puts.chain(changes.dels.into_iter().map(|key| (key, Change::Del))).collect();
            return Err(error);
        }
        self.pending_bytes = 0;
        (self.missed_changed, self.jobs_changed) = (false, false);
        self.stored = true;
        Ok(())
    }

    /// Drops unstored changes: their execution did not end.
    pub fn discard(&mut self) {
        self.pending.clear();
        self.partial = None;
        (self.pending_bytes, self.seen_bytes) = (0, 0);
    }

    /// Replaces the whole state by the newly loaded one, in one transaction.
    ///
    /// # Errors
    /// The errors of the database and the spool; the previous state remains then.
    pub fn replace(&mut self, spool: Spool) -> Result<(), CatalogError> {
        let info = self.info.clone().ok_or_else(|| CatalogError::Conflict("no engine has started".into()))?;
        self.discard();
        self.dropped.clear();
        let entries = spool.into_entries()?;
        self.db.replace_all(&info, entries, &self.missed)?;
        (self.missed_changed, self.jobs_changed) = (false, false);
        self.stored = true;
        Ok(())
    }

    /// Checkpoints the WAL; to be called when idle. Free if nothing was stored since the last time.
    pub fn tidy(&mut self) {
        if std::mem::take(&mut self.stored) {
            self.db.checkpoint_wal();
        }
    }

    /// Drops the database without tidying.
    pub fn abandon(self) {
        self.db.discard();
    }

    /// Closes the database.
    ///
    /// # Errors
    /// The database's errors.
    pub fn close(self) -> Result<(), CatalogError> {
        self.db.close()
    }
}
