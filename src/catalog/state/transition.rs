//! The record of the transition that a kernel is in.

use rusqlite::OptionalExtension as _;

use super::StateHandle;
use super::journal::{self, NewEntry};
use crate::catalog::error::CatalogError;
use crate::catalog::sqlite::{Db, Result};
use crate::catalog::thread::Pending;
use crate::core::kernel::transition::{Decision, Record};

impl StateHandle {
    /// Records a transition's intent. An interrupted one of the same kind is replaced.
    ///
    /// # Errors
    /// `Conflict` if a transition of another kind is recorded.
    pub fn begin_transition(&self, record: Record) -> Pending<()> {
        self.write("state.transition.begin", move |db| {
            let kind = record.transition.kind();
            match get(db)? {
                Some(before) if before.transition.kind() != kind => {
                    let before = before.transition.kind().name();
                    Err(CatalogError::Conflict(format!("a transition is recorded already: {before}")))
                }
                Some(_) | None => put(db, &record),
            }
        })
    }

    /// The transition that was begun and has not ended.
    ///
    /// # Errors
    /// The database's.
    pub fn transition(&self) -> Pending<Option<Record>> {
        self.read(get)
    }

    /// Records that the outcome holds, with its journal entry; gives the number of that.
    ///
    /// # Errors
    /// `Conflict` if no transition is recorded.
    pub fn commit_transition(&self, entry: NewEntry) -> Pending<u64> {
        self.write("state.transition.commit", move |db| {
            decide(db, Decision::Committed)?;
            journal::append_one(db, entry)
        })
    }

    /// Records that the kernel goes back.
    ///
    /// # Errors
    /// `Conflict` if no transition is recorded.
    pub fn abort_transition(&self) -> Pending<()> {
        self.write("state.transition.abort", move |db| decide(db, Decision::Aborted))
    }

    /// Writes the record anew: it is on the device when this returns, whatever an earlier sync has lost.
    ///
    /// # Errors
    /// The database's.
    pub fn rewrite_transition(&self) -> Pending<()> {
        self.write_anew("state.decision.rewrite", |db| {
            db.sql("rewrite transition", |c| c.execute("UPDATE transition SET record = record", []).map(drop))
        })
    }

    /// Deletes the record: nothing is left to recover.
    ///
    /// # Errors
    /// The database's.
    pub fn clear_transition(&self) -> Pending<()> {
        self.write("state.transition.clear", clear)
    }
}

pub(super) fn get(db: &Db) -> Result<Option<Record>> {
    let text: Option<String> = db.sql("read transition", |c| {
        c.prepare_cached("SELECT record FROM transition")?.query_row([], |row| row.get(0)).optional()
    })?;
    let read = |text: String| {
        serde_json::from_str(&text).map_err(|error| CatalogError::Corrupt {
            path: db.path().to_owned(),
            why: format!("the record of a transition: {error}"),
        })
    };
    text.map(read).transpose()
}

fn put(db: &Db, record: &Record) -> Result<()> {
    let text = serde_json::to_string(record)
        .map_err(|error| CatalogError::Conflict(format!("a transition cannot be recorded: {error}")))?;
    db.sql("record transition", |c| {
        c.prepare_cached("INSERT OR REPLACE INTO transition (one, record) VALUES (1, ?)")?.execute([text]).map(drop)
    })
}

fn decide(db: &Db, decision: Decision) -> Result<()> {
    match get(db)? {
        Some(record) => put(db, &Record { decision, ..record }),
        None => Err(CatalogError::Conflict("no transition is recorded".into())),
    }
}

pub(super) fn clear(db: &Db) -> Result<()> {
    db.sql("clear transition", |c| c.prepare_cached("DELETE FROM transition")?.execute([]).map(drop))
}
