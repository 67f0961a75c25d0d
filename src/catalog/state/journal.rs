//! The journal: append-only; executions, messages and marks in one sequence.

use rusqlite::{Row, params};

use super::executions::read_status;
use crate::catalog::error::CatalogError;
use crate::catalog::row::{signed, unsigned};
use crate::catalog::sqlite::{Db, Result};
use crate::core::info::JournalEntry;
use crate::core::limits;

/// What an entry is that is no execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A message of somebody's.
    Message,
    /// Something about the kernel worth finding again: a step, a decision, a restore.
    Mark,
}

/// A message or mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEntry {
    /// Message or mark.
    pub kind: EntryKind,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Who.
    pub actor: String,
    /// The text.
    pub text: String,
    /// What else belongs to it, one JSON object; empty if nothing does.
    pub detail_json: String,
}

/// From where, and which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// After this sequence number, oldest first; 0: from the first.
    After(u64),
    /// Before this sequence number, newest first; `u64::MAX`: from the last.
    Before(u64),
}

const EXECUTION: i64 = 1;
const MESSAGE: i64 = 2;
const MARK: i64 = 3;

pub(super) fn append(db: &Db, entries: &[NewEntry]) -> Result<Vec<u64>> {
    db.sql("append to journal", |c| {
        let mut insert =
            c.prepare_cached("INSERT INTO journal (at_ms, kind, actor, text, detail) VALUES (?, ?, ?, ?, ?)")?;
        let add = |entry: &NewEntry| {
            let kind = match entry.kind {
                EntryKind::Message => MESSAGE,
                EntryKind::Mark => MARK,
            };
            let detail = (!entry.detail_json.is_empty()).then_some(&entry.detail_json);
            insert.insert(params![entry.at_ms, kind, entry.actor, entry.text, detail]).map(|sequence| sequence as u64)
        };
        entries.iter().map(add).collect()
    })
}

pub(super) fn page(db: &Db, from: Direction, most: usize) -> Result<Vec<JournalEntry>> {
    let (sql, sequence) = match from {
        Direction::After(sequence) => (
            "SELECT j.sequence, j.at_ms, j.kind, j.actor, j.exec, j.text, e.status, e.code, e.err, e.duration_us,
             e.output_bytes, e.truncated_bytes FROM journal j LEFT JOIN executions e ON e.id = j.exec
             WHERE j.sequence > ? ORDER BY j.sequence LIMIT ?",
            sequence,
        ),
        Direction::Before(sequence) => (
            "SELECT j.sequence, j.at_ms, j.kind, j.actor, j.exec, j.text, e.status, e.code, e.err, e.duration_us,
             e.output_bytes, e.truncated_bytes FROM journal j LEFT JOIN executions e ON e.id = j.exec
             WHERE j.sequence < ? ORDER BY j.sequence DESC LIMIT ?",
            sequence,
        ),
    };
    db.sql("read journal", |c| {
        let mut statement = c.prepare_cached(sql)?;
        let rows = statement.query_map(params![signed(sequence), most.min(limits::PAGE_ROWS) as i64], read)?;
        let (mut page, mut bytes) = (Vec::new(), 0);
        for entry in rows {
            let entry = entry?;
            bytes += entry.text.len() + entry.err.len();
            page.push(entry);
            if bytes > limits::JOURNAL_PAGE_BYTES {
                break;
            }
        }
        Ok(page)
    })
}

/// Appends one entry; gives its number.
pub(super) fn append_one(db: &Db, entry: NewEntry) -> Result<u64> {
    append(db, &[entry])?.first().copied().ok_or(CatalogError::Stopped)
}

fn read(row: &Row<'_>) -> rusqlite::Result<JournalEntry> {
    let kind = match row.get(2)? {
        EXECUTION => "execution",
        MESSAGE => "message",
        MARK => "mark",
        other => return Err(rusqlite::Error::IntegralValueOutOfRange(2, other)),
    };
    let status = match (kind, read_status(row, 6)?) {
        ("execution", Some(status)) => status.name(),
        ("execution", None) => "running",
        _ => "",
    };
    let number = |column| row.get::<_, Option<i64>>(column).map(|n| n.and_then(|n| u64::try_from(n).ok()).unwrap_or(0));
    Ok(JournalEntry {
        sequence: unsigned(row, 0)?,
        at_ms: row.get(1)?,
        kind: kind.to_owned(),
        actor: row.get(3)?,
        exec: number(4)?,
        text: row.get(5)?,
        status: status.to_owned(),
        code: row.get::<_, Option<i32>>(7)?.unwrap_or(0),
        err: row.get::<_, Option<String>>(8)?.unwrap_or_default(),
        duration_us: number(9)?,
        output_bytes: number(10)?,
        truncated_bytes: number(11)?,
    })
}
