//! The engine's state on its way into `engine.db`. Changes are collected during an execution and
//! stored in one transaction before its end is reported. Runs in init.
//!
//! Memory is bounded by [`limits::pending_state_bytes`]: bodies, metadata, keys and lists count
//! against one bound. An entry whose body exceeds the bound is removed from the state and listed as
//! missed; metadata, keys and lists beyond it are a contract violation.

use std::collections::BTreeMap;

use crate::catalog::CatalogError;
use crate::catalog::{Changes, EngineDb, EngineInfo, Entry, EntryHead, JobRecord};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::link::frames::{Job, Missed};

use super::spool::Spool;

/// Memory of one entry beside its key, metadata and body, bytes.
const ENTRY_BYTES: usize = 256;
/// Freed bytes from which the allocator's free memory is returned to the system.
const RELEASED_BYTES: usize = 4 << 20;
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
    /// Bound of everything that this structure holds for the engine, bytes.
    bound: usize,
    /// Whether the pending changes come from the daemon, whose bound is larger.
    restores: bool,
    pending: BTreeMap<String, Change>,
    /// Bodies of pending entries.
    body_bytes: usize,
    /// Keys and metadata of pending and dropped entries, and the lists.
    head_bytes: usize,
    /// All bytes since the last transaction, kept or not.
    seen_bytes: u64,
    partial: Option<Partial>,
    /// Entries that were too large, by key.
    dropped: BTreeMap<String, MissedEntry>,
    missed: Vec<MissedEntry>,
    /// Entries that ended with a former worker, by key, until their names are bound again.
    ended: BTreeMap<String, MissedEntry>,
    missed_changed: bool,
    jobs: Vec<Job>,
    jobs_changed: bool,
    /// Whether something was stored since the last WAL checkpoint.
    stored: bool,
    /// The first execution whose changes could not be stored since the last transaction.
    unsaved_since: Option<ExecId>,
    /// Whether the engine works beside executions, and so may change the state.
    works: bool,
    /// Whether it did since the end of the last execution.
    worked: bool,
}

impl State {
    /// Rehearses storing an execution's changes. A failure only makes the first execution slower.
    pub fn rehearse(&self) {
        if let Err(error) = self.db.rehearse() {
            tracing::debug!(%error, "storing state was not rehearsed");
        }
    }

    /// Wraps an open database. `bound` limits the memory for changes, bytes.
    pub fn new(db: EngineDb, bound: usize) -> Self {
        State {
            db,
            info: None,
            bound,
            restores: false,
            pending: BTreeMap::new(),
            body_bytes: 0,
            head_bytes: 0,
            seen_bytes: 0,
            partial: None,
            dropped: BTreeMap::new(),
            missed: Vec::new(),
            ended: BTreeMap::new(),
            missed_changed: false,
            jobs: Vec::new(),
            jobs_changed: false,
            stored: false,
            unsaved_since: None,
            works: false,
            worked: false,
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

    /// Reads the entries that ended with the former worker.
    ///
    /// # Errors
    /// The database's errors.
    pub fn read_ended(&mut self) -> Result<(), CatalogError> {
        let ended = self.db.missed()?.into_iter().map(MissedEntry::into_ended);
        self.ended = ended.map(|entry| (entry.key.clone(), entry)).collect();
        self.recount();
        Ok(())
    }

    /// The entry that ended with a former worker under one of these names, if the text has it as a word.
    pub fn ended_named(&self, text: &str) -> Option<&MissedEntry> {
        let is_of_name = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
        text.split(|c| !is_of_name(c)).find_map(|word| self.ended.get(&format!("var/{word}")))
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

    /// Takes one chunk of an entry from the daemon, for a restore. A checkpoint may hold more than one
    /// execution may change.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn put_restored(&mut self, key: String, meta_json: String, chunk: &[u8], more: bool) -> Result<(), String> {
        self.restores = true;
        self.put(key, meta_json, chunk, more)
    }

    fn bound(&self) -> usize {
        if self.restores { self.bound.max(limits::RESTORED_STATE_BYTES) } else { self.bound }
    }

    /// Takes one chunk of an entry.
    ///
    /// # Errors
    /// What the engine did wrong.
    pub fn put(&mut self, key: String, meta_json: String, chunk: &[u8], more: bool) -> Result<(), String> {
        self.seen_bytes += (key.len() + meta_json.len() + chunk.len()) as u64;
        if self.seen_bytes > limits::STATE_BYTES {
            return Err(format!("{} bytes of state in one execution", self.seen_bytes));
        }
        let mut partial = match self.partial.take() {
            Some(partial) if partial.entry.key == key => partial,
            Some(partial) => return Err(format!("entry {key:?} within the chunks of {:?}", partial.entry.key)),
            None => {
                self.forget(&key);
                self.charge(put_cost(&key, &meta_json))?;
                Partial { entry: Entry { key, meta_json, body: Vec::new() }, dropped: false }
            }
        };
        // An eighth of the bound remains for keys and metadata.
        let room = (self.bound() - self.bound() / 8).saturating_sub(self.head_bytes + self.body_bytes);
        if partial.dropped || partial.entry.body.len() + chunk.len() > room {
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
        self.head_bytes -= put_cost(&key, &partial.entry.meta_json);
        if partial.dropped {
            let reason = format!(
                "one execution changed more than {} MiB of state, a quarter of the kernel's memory limit",
                self.bound() >> 20
            );
            let missed = MissedEntry { key: key.clone(), type_name: String::new(), reason };
            self.undrop(&key);
            self.charge(missed_cost(&missed))?;
            self.dropped.insert(key.clone(), missed);
            self.missed_changed = true;
            return self.change(key, Change::Del);
        }
        self.undrop(&key);
        self.body_bytes += partial.entry.body.len();
        self.change(key, Change::Put(partial.entry))
    }

    fn forget_ended(&mut self, key: &str) {
        if let Some(ended) = self.ended.remove(key) {
            self.head_bytes -= missed_cost(&ended);
            self.missed_changed = true;
        }
    }

    /// Counts memory beside the bodies.
    fn charge(&mut self, bytes: usize) -> Result<(), String> {
        self.head_bytes += bytes;
        match self.head_bytes + self.body_bytes > self.bound() {
            true => Err(format!("state beyond {} MiB, a quarter of the kernel's memory limit", self.bound() >> 20)),
            false => Ok(()),
        }
    }

    /// Forgets that an entry was too large.
    fn undrop(&mut self, key: &str) {
        self.forget_ended(key);
        if let Some(missed) = self.dropped.remove(key) {
            self.head_bytes -= missed_cost(&missed);
            self.missed_changed = true;
        }
    }

    /// Records a deleted entry.
    ///
    /// # Errors
    /// What the engine did wrong.
    pub fn del(&mut self, key: String) -> Result<(), String> {
        self.forget(&key);
        self.undrop(&key);
        self.change(key, Change::Del)
    }

    fn forget(&mut self, key: &str) {
        if let Some(old) = self.pending.remove(key) {
            self.head_bytes -= change_cost(key, &old);
            if let Change::Put(entry) = old {
                self.body_bytes -= entry.body.len();
            }
        }
    }

    fn change(&mut self, key: String, change: Change) -> Result<(), String> {
        let cost = change_cost(&key, &change);
        // Replaces nothing: the caller called `forget`.
        self.pending.insert(key, change);
        self.charge(cost)?;
        match self.pending.len() > limits::STATE_ENTRIES {
            true => Err(format!("{} state entries in one execution", self.pending.len())),
            false => Ok(()),
        }
    }

    /// Takes the list of unsaved entries.
    ///
    /// # Errors
    /// If it exceeds the bound.
    pub fn set_missed(&mut self, missed: Vec<Missed>) -> Result<(), String> {
        self.head_bytes -= self.missed.iter().map(missed_cost).sum::<usize>();
        self.missed = missed.into_iter().map(MissedEntry::from).collect();
        self.missed_changed = true;
        let bound: Vec<String> = self.missed.iter().map(|entry| entry.key.clone()).collect();
        bound.iter().for_each(|key| self.forget_ended(key));
        self.charge(self.missed.iter().map(missed_cost).sum())
    }

    /// Takes the list of jobs.
    ///
    /// # Errors
    /// If it exceeds the bound.
    pub fn set_jobs(&mut self, jobs: Vec<Job>) -> Result<(), String> {
        self.head_bytes -= self.jobs.iter().map(job_cost).sum::<usize>();
        self.jobs = jobs;
        self.jobs_changed = true;
        self.charge(self.jobs.iter().map(job_cost).sum())
    }

    /// Notes whether the engine works beside executions.
    pub fn set_works(&mut self, works: bool) {
        self.works = works;
        self.worked |= works;
    }

    /// Whether the engine may have changed the state since the end of the last execution.
    pub fn has_worked(&self) -> bool {
        self.worked
    }

    /// The running jobs.
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// The unsaved entries.
    pub fn missed(&self) -> Vec<MissedEntry> {
        self.missed.iter().chain(self.dropped.values()).chain(self.ended.values()).cloned().collect()
    }

    /// The number of entries in [`State::missed`].
    pub fn listed(&self) -> usize {
        self.missed.len() + self.dropped.len() + self.ended.len()
    }

    /// The first ended execution whose changes are not stored.
    pub fn unsaved_since(&self) -> Option<ExecId> {
        self.unsaved_since
    }

    /// Whether entries wait to be stored.
    pub fn has_entries_to_store(&self) -> bool {
        !self.pending.is_empty()
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
        if exec.is_some() {
            self.worked = self.works;
        }
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
            self.unsaved_since = self.unsaved_since.or(exec);
            return Err(error);
        }
        drop(changes);
        self.recount();
        self.unsaved_since = None;
        (self.missed_changed, self.jobs_changed) = (false, false);
        self.stored = true;
        Ok(())
    }

    /// Counts again after the pending changes were taken or dropped, and returns freed memory.
    fn recount(&mut self) {
        self.restores = false;
        let before = self.body_bytes + self.head_bytes;
        self.body_bytes = 0;
        self.head_bytes =
            self.missed.iter().chain(self.dropped.values()).chain(self.ended.values()).map(missed_cost).sum::<usize>()
                + self.jobs.iter().map(job_cost).sum::<usize>()
                + self
                    .partial
                    .iter()
                    .map(|partial| put_cost(&partial.entry.key, &partial.entry.meta_json))
                    .sum::<usize>();
        if before.saturating_sub(self.head_bytes) >= RELEASED_BYTES {
            crate::sys::heap::trim();
        }
    }

    /// Drops unstored changes: their execution did not end.
    pub fn discard(&mut self) {
        self.pending.clear();
        self.partial = None;
        self.seen_bytes = 0;
        self.recount();
    }

    /// Replaces the whole state by the newly loaded one, in one transaction.
    ///
    /// # Errors
    /// The errors of the database and the spool; the previous state remains then.
    pub fn replace(&mut self, spool: Spool) -> Result<(), CatalogError> {
        let info = self.info.clone().ok_or_else(|| CatalogError::Conflict("no engine has started".into()))?;
        self.dropped.clear();
        self.ended.clear();
        self.discard();
        let entries = spool.into_entries()?;
        self.db.replace_all(&info, entries, &self.missed)?;
        self.unsaved_since = None;
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

fn put_cost(key: &str, meta_json: &str) -> usize {
    // The map and the entry each own the key.
    2 * key.len() + meta_json.len() + ENTRY_BYTES
}

fn change_cost(key: &str, change: &Change) -> usize {
    match change {
        Change::Put(entry) => put_cost(key, &entry.meta_json),
        Change::Del => put_cost(key, ""),
    }
}

fn missed_cost(missed: &MissedEntry) -> usize {
    2 * missed.key.len() + missed.type_name.len() + missed.reason.len() + ENTRY_BYTES
}

fn job_cost(job: &Job) -> usize {
    job.id.len() + job.command.len() + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::durability::Durability;

    #[test]
    fn unsaved_changes_have_first_execution() {
        let folder = tempfile::tempdir().expect("a folder");
        let db = EngineDb::open(&folder.path().join("engine.db"), Durability::Process).expect("opens");
        let mut state = State::new(db.bounded(4), 1 << 20);
        let set = |state: &mut State, body: &[u8]| state.put("var/x".into(), "{}".into(), body, false).expect("taken");
        set(&mut state, b"1");
        state.commit(Some(ExecId(1))).expect("stored");
        set(&mut state, b"too much");
        for exec in [2, 3] {
            state.commit(Some(ExecId(exec))).expect_err("too much");
            assert_eq!(state.unsaved_since(), Some(ExecId(2)));
        }
        set(&mut state, b"2");
        state.commit(Some(ExecId(4))).expect("stored");
        assert_eq!(state.unsaved_since(), None);
    }
}
