//! The engine's state on its way into `engine.db`: changes are gathered while an execution runs and stored in one transaction
//! before its end is told.
//!
//! Memory is bounded: what one execution changes beyond [`PENDING_BYTES`] is not held; such an entry leaves the state and is
//! named among what is missed.

use std::collections::BTreeMap;

use crate::catalog::CatalogError;
use crate::catalog::{Changes, EngineDb, EngineInfo, Entry, EntryHead, JobRecord};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::link::frames::{Job, Missed};

use super::spool::Spool;

/// Changed entries that are held until the end of an execution, bytes.
const PENDING_BYTES: usize = 512 << 20;
/// Format of the state as a whole, as `engine.db` notes it.
const STATE_FORMAT: u32 = 1;

/// A change that waits for the end of its execution.
#[derive(Debug)]
enum Change {
    Put(Entry),
    Del,
}

/// An entry of which more chunks follow.
#[derive(Debug)]
struct Partial {
    entry: Entry,
    /// Beyond what is held: the rest is read and forgotten.
    dropped: bool,
}

/// `engine.db` and what is to go into it.
pub struct State {
    db: EngineDb,
    info: Option<EngineInfo>,
    pending: BTreeMap<String, Change>,
    pending_bytes: usize,
    /// All bytes since the last transaction, held or not.
    seen_bytes: u64,
    partial: Option<Partial>,
    /// Entries that were too large to hold, by key.
    dropped: BTreeMap<String, MissedEntry>,
    missed: Vec<MissedEntry>,
    missed_changed: bool,
    jobs: Vec<Job>,
    jobs_changed: bool,
    /// Something was stored since the database was last tidied.
    stored: bool,
}

impl State {
    /// Does once for nothing what an execution's changes will take. What cannot be rehearsed is only slower later.
    pub fn rehearse(&self) {
        if let Err(error) = self.db.rehearse() {
            tracing::debug!(%error, "what a kernel's state takes was not rehearsed");
        }
    }

    /// Takes over an open database.
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

    /// Notes which engine writes from now on.
    ///
    /// # Errors
    /// If the entries are another engine's, or the database's own errors.
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

    /// The jobs that ran when the state was last stored, which no longer do: they leave the list.
    ///
    /// # Errors
    /// The database's.
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
    /// The database's.
    pub fn heads(&self) -> Result<Vec<EntryHead>, CatalogError> {
        self.db.heads()
    }

    /// One stored entry.
    ///
    /// # Errors
    /// The database's.
    pub fn entry(&self, key: &str) -> Result<Option<Entry>, CatalogError> {
        self.db.entry(key)
    }

    /// What one stored entry has from an offset on.
    ///
    /// # Errors
    /// The database's.
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

    /// Takes the news that an entry is gone.
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

    /// Takes the list of what is not captured.
    pub fn set_missed(&mut self, missed: Vec<Missed>) {
        self.missed =
            missed.into_iter().map(|m| MissedEntry { key: m.key, type_name: m.type_name, reason: m.reason }).collect();
        self.missed_changed = true;
    }

    /// Takes the list of jobs.
    pub fn set_jobs(&mut self, jobs: Vec<Job>) {
        self.jobs = jobs;
        self.jobs_changed = true;
    }

    /// The jobs that run now.
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// All that is not captured now.
    pub fn missed(&self) -> Vec<MissedEntry> {
        self.missed.iter().chain(self.dropped.values()).cloned().collect()
    }

    /// Whether there is something to store.
    pub fn is_dirty(&self) -> bool {
        !self.pending.is_empty() || self.missed_changed || self.jobs_changed
    }

    /// Stores everything since the last time in one transaction. After an error it is kept for the next time.
    ///
    /// # Errors
    /// The database's; nothing was stored then.
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

    /// Forgets what was not stored: its execution did not end.
    pub fn discard(&mut self) {
        self.pending.clear();
        self.partial = None;
        (self.pending_bytes, self.seen_bytes) = (0, 0);
    }

    /// Replaces the whole state by what an engine was just loaded with, in one transaction.
    ///
    /// # Errors
    /// The database's, and those of reading the spooled entries; the former state stays then.
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

    /// To be called when nobody waits. Free if nothing was stored since the last time.
    pub fn tidy(&mut self) {
        if std::mem::take(&mut self.stored) {
            self.db.checkpoint_wal();
        }
    }

    /// Lets go of a database that nobody needs any more.
    pub fn abandon(self) {
        self.db.discard();
    }

    /// Closes the database.
    ///
    /// # Errors
    /// The database's.
    pub fn close(self) -> Result<(), CatalogError> {
        self.db.close()
    }
}
