//! `engine.db`: the engine's state, one row per state entry of `docs/engine-contract.md`.
//!
//! Only the worker's init writes it, in one transaction per execution that changed something. The daemon opens it while
//! no worker lives. Synchronous, with one owner (`InUse` for any other). The path may go through `/proc/self/fd/N`.

mod closed;
mod revise;
mod rows;

use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::slice;

use rusqlite::{OptionalExtension as _, params};

pub use self::closed::Inspected;
use self::rows::{Before, Due, delete, digest, put, put_info, read_head, replace_jobs, replace_missed, same};
use super::error::CatalogError;
use super::row::{bytes, unsigned};
use super::sqlite::{Db, Kind, Result};
use crate::core::durability::Durability;
use crate::core::ids::Digest;
use crate::core::limits;
use crate::core::missed::MissedEntry;

/// A state entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// `kind/name`.
    pub key: String,
    /// The entry's meta object, JSON; compared as text.
    pub meta_json: String,
    /// The engine's own encoding.
    pub body: Vec<u8>,
}

/// A state entry without body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryHead {
    /// `kind/name`.
    pub key: String,
    /// The entry's meta object, JSON.
    pub meta_json: String,
    /// BLAKE3 of the body.
    pub digest: Digest,
    /// The body's length in bytes.
    pub size: u64,
    /// The execution that last changed it; 0: none.
    pub exec: u64,
}

/// A background job that was running when the state was last stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobRecord {
    /// The engine's own id for it.
    pub id: String,
    /// What it runs.
    pub command: String,
}

/// The engine that wrote the entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineInfo {
    /// `kaish`, `python`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Format of the entries as a whole.
    pub format: u32,
}

/// The changes of one execution. Removals come first; of a key that occurs twice the last counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// New or changed entries.
    pub puts: Vec<Entry>,
    /// Keys of removed entries.
    pub dels: Vec<String>,
    /// All entries that are not captured now, if the list changed.
    pub missed: Option<Vec<MissedEntry>>,
    /// All background jobs that run now, if the list changed.
    pub jobs: Option<Vec<JobRecord>>,
    /// The execution; 0: none.
    pub exec: u64,
}

/// What [`EngineDb::apply`] wrote.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// Entries whose body or meta changed.
    pub puts: usize,
    /// Entries removed.
    pub dels: usize,
    /// Whether the list of uncaptured entries, or of jobs, was replaced.
    pub lists: bool,
}

/// Totals over all entries.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    entries: u64,
    bytes: u64,
}

/// An open engine database.
#[derive(Debug)]
pub struct EngineDb {
    db: Db,
    /// Computed at the first write; `None` also after a failed one.
    totals: Cell<Option<Totals>>,
    most_bytes: u64,
}

impl EngineDb {
    /// Builds the template of new databases ahead, before this process forks.
    ///
    /// # Errors
    /// SQLite's.
    pub fn prepare() -> Result<(), CatalogError> {
        Kind::Engine.template().map(drop)
    }

    /// Opens an engine database, or creates an empty one.
    ///
    /// # Errors
    /// Those of [`Db::open`].
    pub fn open(path: &Path, durability: Durability) -> Result<EngineDb, CatalogError> {
        let db = Db::open_or_create(Kind::Engine, path, durability)?;
        Ok(EngineDb { db, totals: Cell::new(None), most_bytes: limits::STATE_BYTES })
    }

    /// Bounds all bodies together, bytes; [`limits::STATE_BYTES`] without this.
    #[must_use]
    pub fn bounded(self, most_bytes: u64) -> EngineDb {
        EngineDb { most_bytes, ..self }
    }

    /// The engine that wrote the entries; `None` in a new database.
    ///
    /// # Errors
    /// Database errors.
    pub fn info(&self) -> Result<Option<EngineInfo>, CatalogError> {
        self.db.sql("read engine", |c| {
            c.prepare_cached("SELECT name, version, format FROM engine")?
                .query_row([], |row| Ok(EngineInfo { name: row.get(0)?, version: row.get(1)?, format: row.get(2)? }))
                .optional()
        })
    }

    /// Records which engine writes from now on.
    ///
    /// # Errors
    /// Database errors.
    pub fn set_info(&self, info: &EngineInfo) -> Result<(), CatalogError> {
        if self.info()?.as_ref() == Some(info) {
            return Ok(());
        }
        self.db.transaction("engine.info.set", |db| put_info(db, info))
    }

    /// Stores an execution's changes in one transaction; in none if nothing differs.
    ///
    /// # Errors
    /// `Limit` beyond the bound of all bodies or [`limits::STATE_ENTRIES`], `Full`, `Corrupt`, …; nothing is changed
    /// then.
    pub fn apply(&self, changes: &Changes) -> Result<Applied, CatalogError> {
        let dels = self.present(&changes.dels)?;
        let puts = self.differing(&changes.puts, &changes.dels)?;
        let missed = match &changes.missed {
            Some(new) if !same(&self.missed()?, new, |missed| &missed.key) => Some(new),
            Some(_) | None => None,
        };
        let jobs = match &changes.jobs {
            Some(new) if !same(&self.jobs()?, new, |job| &job.id) => Some(new),
            Some(_) | None => None,
        };
        let applied = Applied { puts: puts.len(), dels: dels.len(), lists: missed.is_some() || jobs.is_some() };
        if applied == Applied::default() {
            return Ok(applied);
        }
        let totals = self.totals_after(&puts, &dels)?;
        self.totals.set(None);
        self.db.transaction("engine.state.apply", |db| {
            delete(db, &dels)?;
            puts.iter().try_for_each(|due| put(db, due, changes.exec))?;
            missed.map_or(Ok(()), |missed| replace_missed(db, missed))?;
            jobs.map_or(Ok(()), |jobs| replace_jobs(db, jobs))
        })?;
        self.totals.set(Some(totals));
        Ok(applied)
    }

    /// Stores an entry and rolls back, to compile the statements ahead.
    ///
    /// # Errors
    /// Database errors.
    pub fn rehearse(&self) -> Result<(), CatalogError> {
        let entry = Entry { key: "var/rehearsed".into(), meta_json: "{}".into(), body: vec![0] };
        self.heads()?;
        let (puts, missed, jobs) = (self.differing(slice::from_ref(&entry), &[])?, self.missed()?, self.jobs()?);
        self.totals_after(&puts, &HashMap::new())?;
        self.db.rehearse(|db| {
            puts.iter().try_for_each(|due| put(db, due, 0))?;
            self.entry(&entry.key)?;
            delete(db, &self.present(slice::from_ref(&entry.key))?)?;
            replace_missed(db, &missed)?;
            replace_jobs(db, &jobs)
        })
    }

    /// Replaces every entry and list in one transaction. No background jobs remain.
    ///
    /// # Errors
    /// As [`Self::apply`]; the first error of `entries`, and then nothing changes.
    pub fn replace_all(
        &self,
        info: &EngineInfo,
        entries: impl IntoIterator<Item = Result<Entry, CatalogError>>,
        missed: &[MissedEntry],
    ) -> Result<(), CatalogError> {
        self.totals.set(None);
        let totals = self.db.transaction("engine.state.replace", |db| {
            db.sql("replace state", |c| {
                c.execute_batch("DELETE FROM chunks; DELETE FROM entries; DELETE FROM missed; DELETE FROM jobs;")
            })?;
            put_info(db, info)?;
            let mut totals = Totals::default();
            for entry in entries {
                let entry = entry?;
                totals.entries += 1;
                totals.bytes = totals.bytes.saturating_add(entry.body.len() as u64);
                totals.check(self.most_bytes)?;
                put(db, &Due { digest: digest(&entry.body), entry: &entry, before: None }, 0)?;
            }
            replace_missed(db, missed)?;
            Ok(totals)
        })?;
        self.totals.set(Some(totals));
        Ok(())
    }

    /// Every entry without its body, by key.
    ///
    /// # Errors
    /// Database errors.
    pub fn heads(&self) -> Result<Vec<EntryHead>, CatalogError> {
        self.db.sql("list entries", |c| {
            c.prepare_cached("SELECT id, key, meta, digest, size, exec FROM entries ORDER BY key")?
                .query_map([], |row| read_head(row).map(|(_, head)| head))?
                .collect()
        })
    }

    /// One entry; `None` if the key does not exist.
    ///
    /// # Errors
    /// `Corrupt` if the body has changed.
    pub fn entry(&self, key: &str) -> Result<Option<Entry>, CatalogError> {
        let Some((id, head)) = self.head(key)? else { return Ok(None) };
        let mut body = Vec::new();
        self.pieces::<CatalogError>(id, &head, &mut |piece, _| {
            body.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(Some(Entry { key: head.key, meta_json: head.meta_json, body }))
    }

    /// One entry's head and a piece of its body from an offset on, at most [`limits::FRAME_TAIL_BYTES`]; `None` if the
    /// key does not exist. The caller verifies the whole body against the head's digest.
    ///
    /// # Errors
    /// Database errors; `Corrupt` if the body is shorter than the head says.
    pub fn piece(&self, key: &str, offset: u64) -> Result<Option<(EntryHead, Vec<u8>)>, CatalogError> {
        const PART: u64 = limits::FRAME_TAIL_BYTES as u64;
        let Some((id, head)) = self.head(key)? else { return Ok(None) };
        if offset >= head.size {
            return Ok(Some((head, Vec::new())));
        }
        let (part, skip) = if head.size > PART { (offset / PART, offset % PART) } else { (0, offset) };
        let body: Option<Vec<u8>> = self.db.sql("read body", |c| match head.size > PART {
            true => c
                .prepare_cached("SELECT body FROM chunks WHERE entry = ? AND part = ?")?
                .query_row(params![id, part.cast_signed()], |row| row.get(0))
                .optional(),
            false => c.prepare_cached("SELECT body FROM entries WHERE id = ?")?.query_row([id], |row| row.get(0)),
        })?;
        let mut body = body.unwrap_or_default();
        if body.len() as u64 <= skip {
            let why = format!("the body of entry {:?} is not what was stored", head.key);
            return Err(CatalogError::Corrupt { path: self.db.path().to_owned(), why });
        }
        body.drain(..skip as usize);
        Ok(Some((head, body)))
    }

    fn head(&self, key: &str) -> Result<Option<(i64, EntryHead)>, CatalogError> {
        self.db.sql("read entry", |c| {
            c.prepare_cached("SELECT id, key, meta, digest, size, exec FROM entries WHERE key = ?")?
                .query_row([key], read_head)
                .optional()
        })
    }

    /// Visits every entry, by key, in pieces of at most [`limits::FRAME_TAIL_BYTES`]: head, piece, and whether more of
    /// the entry follows. The last piece of an entry follows the verification of its body.
    ///
    /// # Errors
    /// `Corrupt` if a body has changed; those of `visit`.
    pub fn entries<E: From<CatalogError>>(
        &self,
        mut visit: impl FnMut(&EntryHead, &[u8], bool) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut after = String::new();
        loop {
            let next = self.db.sql("read entries", |c| {
                c.prepare_cached(
                    "SELECT id, key, meta, digest, size, exec FROM entries WHERE key > ? ORDER BY key LIMIT 1",
                )?
                .query_row([&after], read_head)
                .optional()
            })?;
            let Some((id, head)) = next else { return Ok(()) };
            self.pieces(id, &head, &mut |piece, more| visit(&head, piece, more))?;
            after = head.key;
        }
    }

    /// The entries that were not captured.
    ///
    /// # Errors
    /// Database errors.
    pub fn missed(&self) -> Result<Vec<MissedEntry>, CatalogError> {
        self.db.sql("list missed", |c| {
            c.prepare_cached("SELECT key, type, reason FROM missed ORDER BY key")?
                .query_map([], |row| Ok(MissedEntry { key: row.get(0)?, type_name: row.get(1)?, reason: row.get(2)? }))?
                .collect()
        })
    }

    /// The background jobs that were running when the state was last stored.
    ///
    /// # Errors
    /// Database errors.
    pub fn jobs(&self) -> Result<Vec<JobRecord>, CatalogError> {
        self.db.sql("list jobs", |c| {
            c.prepare_cached("SELECT id, command FROM jobs ORDER BY id")?
                .query_map([], |row| Ok(JobRecord { id: row.get(0)?, command: row.get(1)? }))?
                .collect()
        })
    }

    /// Checkpoints a long WAL. Call it between executions.
    pub fn checkpoint_wal(&self) {
        self.db.checkpoint_wal(limits::WAL_BYTES);
    }

    /// Verifies every page and every body.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn check(&self) -> Result<(), CatalogError> {
        self.db.check()?;
        self.entries(|_, _, _| Ok(()))
    }

    /// Closes the database.
    ///
    /// # Errors
    /// As [`Db::close`].
    pub fn close(self) -> Result<(), CatalogError> {
        self.db.close()
    }

    /// As [`Db::discard`].
    pub fn discard(self) {
        self.db.discard();
    }

    /// Those of `keys` that exist, once each, with their values.
    fn present(&self, keys: &[String]) -> Result<HashMap<i64, u64>> {
        let mut found = HashMap::new();
        for key in keys {
            if let Some((before, ..)) = self.before(key)? {
                found.insert(before.id, before.size);
            }
        }
        Ok(found)
    }

    /// The entries that differ from the stored ones.
    fn differing<'a>(&self, puts: &'a [Entry], dels: &[String]) -> Result<Vec<Due<'a>>> {
        let mut last: HashMap<&str, usize> = HashMap::new();
        if puts.len() > 1 {
            last.extend(puts.iter().enumerate().map(|(i, entry)| (entry.key.as_str(), i)));
        }
        let mut due = Vec::new();
        for (i, entry) in puts.iter().enumerate() {
            if last.get(entry.key.as_str()).is_some_and(|last| *last != i) {
                continue;
            }
            let digest = digest(&entry.body);
            let present = if dels.contains(&entry.key) { None } else { self.before(&entry.key)? };
            match present {
                Some((_, old, meta)) if old == digest && meta == entry.meta_json => {}
                present => due.push(Due { entry, digest, before: present.map(|(before, ..)| before) }),
            }
        }
        Ok(due)
    }

    fn before(&self, key: &str) -> Result<Option<(Before, Digest, String)>> {
        self.db.sql("look up entry", |c| {
            c.prepare_cached("SELECT id, size, body IS NULL, digest, meta FROM entries WHERE key = ?")?
                .query_row([key], |row| {
                    let before = Before { id: row.get(0)?, size: unsigned(row, 1)?, chunked: row.get(2)? };
                    Ok((before, Digest::from_bytes(bytes(row, 3)?), row.get(4)?))
                })
                .optional()
        })
    }

    fn totals_after(&self, puts: &[Due<'_>], dels: &HashMap<i64, u64>) -> Result<Totals> {
        let mut totals = match self.totals.get() {
            Some(totals) => totals,
            None => self.db.sql("count entries", |c| {
                c.prepare_cached("SELECT count(*), coalesce(sum(size), 0) FROM entries")?
                    .query_row([], |row| Ok(Totals { entries: unsigned(row, 0)?, bytes: unsigned(row, 1)? }))
            })?,
        };
        let before = totals.bytes;
        totals.entries = totals.entries.saturating_sub(dels.len() as u64);
        totals.bytes = totals.bytes.saturating_sub(dels.values().sum());
        for due in puts {
            totals.bytes = totals.bytes.saturating_add(due.entry.body.len() as u64);
            match &due.before {
                Some(before) => totals.bytes = totals.bytes.saturating_sub(before.size),
                None => totals.entries += 1,
            }
        }
        // State beyond a bound that is new may shrink.
        totals.check(self.most_bytes.max(before))?;
        Ok(totals)
    }

    /// Visits a body in pieces, the last one only after the digest was verified.
    fn pieces<E: From<CatalogError>>(
        &self,
        id: i64,
        head: &EntryHead,
        visit: &mut impl FnMut(&[u8], bool) -> Result<(), E>,
    ) -> Result<(), E> {
        let damaged = || CatalogError::Corrupt {
            path: self.db.path().to_owned(),
            why: format!("the body of entry {:?} is not what was stored", head.key),
        };
        let mut hasher = blake3::Hasher::new();
        let (mut part, mut read) = (0i64, 0u64);
        loop {
            let piece: Option<Vec<u8>> = self.db.sql("read body", |c| {
                let inline: Option<Vec<u8>> = match part {
                    0 => {
                        c.prepare_cached("SELECT body FROM entries WHERE id = ?")?.query_row([id], |row| row.get(0))?
                    }
                    _ => None,
                };
                match inline {
                    Some(body) => Ok(Some(body)),
                    None => c
                        .prepare_cached("SELECT body FROM chunks WHERE entry = ? AND part = ?")?
                        .query_row([id, part], |row| row.get(0))
                        .optional(),
                }
            })?;
            let piece = piece.ok_or_else(damaged)?;
            hasher.update(&piece);
            read += piece.len() as u64;
            let more = read < head.size;
            if !more && (read != head.size || hasher.finalize().as_bytes() != head.digest.as_bytes()) {
                return Err(damaged().into());
            }
            visit(&piece, more)?;
            if !more {
                return Ok(());
            }
            part += 1;
        }
    }
}

impl Totals {
    fn check(self, most_bytes: u64) -> Result<()> {
        if self.entries > limits::STATE_ENTRIES as u64 {
            return Err(CatalogError::Limit {
                what: "the number of state entries",
                most: limits::STATE_ENTRIES as u64,
            });
        }
        if self.bytes > most_bytes {
            return Err(CatalogError::Limit {
                what: "the size of the engine state in bytes, which the kernel's memory limit bounds,",
                most: most_bytes,
            });
        }
        Ok(())
    }
}
