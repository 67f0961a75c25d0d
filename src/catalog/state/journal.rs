//! The journal: append-only; one sequence for executions, messages and marks.

use rusqlite::{Row, params};

use super::executions::read_status;
use super::keys;
use crate::catalog::error::CatalogError;
use crate::catalog::row::{signed, unsigned};
use crate::catalog::sqlite::{Db, Result};
use crate::core::checkpoint::Span;
use crate::core::error::Error;
use crate::core::info::{JournalEntry, JournalView};
use crate::core::limits;

/// Kind of an entry that is no execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A message.
    Message,
    /// An event of the kernel's life: a step, a decision, a restore.
    Mark,
}

/// A message or mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEntry {
    /// Message or mark.
    pub kind: EntryKind,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The author.
    pub actor: String,
    /// The text.
    pub text: String,
    /// Details, one JSON object; may be empty.
    pub detail_json: String,
}

/// Start and direction of a page.
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
             e.output_bytes, e.truncated_bytes, j.kind = 1 AND json_type(j.detail, '$.process') IS NOT NULL FROM journal j LEFT JOIN executions e ON e.id = j.exec
             WHERE j.sequence > ? ORDER BY j.sequence LIMIT ?",
            sequence,
        ),
        Direction::Before(sequence) => (
            "SELECT j.sequence, j.at_ms, j.kind, j.actor, j.exec, j.text, e.status, e.code, e.err, e.duration_us,
             e.output_bytes, e.truncated_bytes, j.kind = 1 AND json_type(j.detail, '$.process') IS NOT NULL FROM journal j LEFT JOIN executions e ON e.id = j.exec
             WHERE j.sequence < ? ORDER BY j.sequence DESC LIMIT ?",
            sequence,
        ),
    };
    db.sql("read journal", |c| {
        let mut statement = c.prepare_cached(sql)?;
        bounded(statement.query_map(params![signed(sequence), most.min(limits::PAGE_ROWS) as i64], read)?)
    })
}

/// Limits a page to its most bytes.
fn bounded(rows: impl Iterator<Item = rusqlite::Result<JournalEntry>>) -> rusqlite::Result<Vec<JournalEntry>> {
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
}

/// A page of entries after a number, in a view.
pub(super) fn page_as(db: &Db, view: JournalView, after: u64, most: usize) -> Result<Vec<JournalEntry>> {
    let most = most.min(limits::PAGE_ROWS) as i64;
    // A message belongs to the newest checkpoint that compacted it; the last message of a checkpoint shows its summary.
    const COMPACTED: &str =
        "SELECT j.sequence, j.at_ms, j.kind, j.actor, j.exec, j.text, e.status, e.code, e.err, e.duration_us,
             e.output_bytes, e.truncated_bytes, j.kind = 1 AND json_type(j.detail, '$.process') IS NOT NULL,
             k.summary, k.creator, k.at_ms
         FROM (SELECT journal.*, (SELECT max(checkpoint) FROM compacted c WHERE c.sequence = journal.sequence) AS owner
               FROM journal WHERE sequence > ?1) j
         LEFT JOIN executions e ON e.id = j.exec LEFT JOIN checkpoints k ON k.number = j.owner
         WHERE j.owner IS NULL OR NOT EXISTS (
             SELECT 1 FROM compacted x WHERE x.checkpoint = j.owner AND x.sequence > j.sequence AND NOT EXISTS (
                 SELECT 1 FROM compacted y WHERE y.sequence = x.sequence AND y.checkpoint > j.owner))
         ORDER BY j.sequence LIMIT ?2";
    const OF_ONE: &str =
        "SELECT j.sequence, j.at_ms, j.kind, j.actor, j.exec, j.text, NULL, NULL, NULL, NULL, NULL, NULL, 0
         FROM compacted c JOIN journal j ON j.sequence = c.sequence WHERE c.checkpoint = ?3 AND c.sequence > ?1
         ORDER BY c.sequence LIMIT ?2";
    match view {
        JournalView::Whole => page(db, Direction::After(after), most as usize),
        JournalView::Compacted => db.sql("read journal", |c| {
            bounded(c.prepare_cached(COMPACTED)?.query_map(params![signed(after), most], read_compacted)?)
        }),
        JournalView::Of(number) => db.sql("read journal", |c| {
            bounded(c.prepare_cached(OF_ONE)?.query_map(params![signed(after), most, signed(number)], read)?)
        }),
    }
}

fn read_compacted(row: &Row<'_>) -> rusqlite::Result<JournalEntry> {
    let entry = read(row)?;
    let Some(summary) = row.get::<_, Option<String>>(13)? else { return Ok(entry) };
    let (kind, text) = ("checkpoint".to_owned(), format!("[checkpoint] {summary}"));
    Ok(JournalEntry { kind, text, actor: row.get(14)?, at_ms: row.get(15)?, ..entry })
}

/// Records that a checkpoint compacts the messages within the spans. Returns their number.
pub(super) fn compact(db: &Db, checkpoint: u64, spans: &[Span]) -> Result<u64> {
    let most = limits::COMPACTED_MESSAGES;
    let mut messages = 0;
    for Span { first, last } in spans {
        messages += db.sql("compact journal", |c| {
            c.prepare_cached(
                "INSERT OR IGNORE INTO compacted (sequence, checkpoint)
                 SELECT sequence, ?1 FROM journal WHERE sequence BETWEEN ?2 AND ?3 AND kind = ?4 LIMIT ?5",
            )?
            .execute(params![
                signed(checkpoint),
                signed(*first),
                signed(*last),
                MESSAGE,
                signed(most + 1)
            ])
        })? as u64;
        if messages > most {
            return Err(CatalogError::Limit { what: "the number of messages that one checkpoint compacts", most });
        }
    }
    if !spans.is_empty() && messages == 0 {
        let none = Error::not_found("there is no message among those to compact");
        let none = none.hint("`ryokan journal --full` shows the numbers; executions and marks are not compacted");
        return Err(CatalogError::Refused(Box::new(none)));
    }
    Ok(messages)
}

/// Appends a message once per key; returns its number, and whether it is new.
pub(super) fn add_message(db: &Db, entry: NewEntry, key: &str) -> Result<(u64, bool)> {
    if let Some(before) = message_by_key(db, key, entry.at_ms)? {
        return Ok((before, false));
    }
    let at_ms = entry.at_ms;
    let sequence = append_one(db, entry)?;
    if !key.is_empty() {
        keys::remember(db, key, keys::Kind::Message, "", sequence, at_ms)?;
    }
    Ok((sequence, true))
}

pub(super) fn message_by_key(db: &Db, key: &str, now_ms: i64) -> Result<Option<u64>> {
    Ok(keys::recall(db, key, keys::Kind::Message, now_ms)?.map(|(_, sequence)| sequence))
}

/// Appends one entry; returns its number.
pub(super) fn append_one(db: &Db, entry: NewEntry) -> Result<u64> {
    append(db, &[entry])?.first().copied().ok_or(CatalogError::Stopped)
}

fn read(row: &Row<'_>) -> rusqlite::Result<JournalEntry> {
    let kind = match row.get(2)? {
        EXECUTION if row.get(12)? => "process",
        EXECUTION => "execution",
        MESSAGE => "message",
        MARK => "mark",
        other => return Err(rusqlite::Error::IntegralValueOutOfRange(2, other)),
    };
    let status = match (kind, read_status(row, 6)?) {
        ("execution" | "process", Some(status)) => status.name(),
        ("execution" | "process", None) => "running",
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
