//! The host's events, numbered without gaps. The oldest are dropped; readers see how many they missed.

use rusqlite::{Row, params};

use super::row::{signed, unsigned};
use super::sqlite::{Db, Result};
use crate::core::info::Event;
use crate::core::limits;

/// An event without a number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEvent {
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The kernel; empty for events of the host.
    pub kernel: String,
    /// What happened, in the past tense.
    pub kind: String,
    /// One JSON object.
    pub detail_json: String,
}

/// A page of events, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventPage {
    /// Events directly after the number requested, or from the oldest kept.
    pub events: Vec<Event>,
    /// Number of events between the number requested and the first of these that are no longer kept.
    pub lost: u64,
    /// The newest number; 0: none yet.
    pub newest: u64,
}

/// The oldest are dropped in steps of this many.
const PRUNED_EVERY: u64 = 256;

fn read(row: &Row<'_>) -> rusqlite::Result<Event> {
    Ok(Event {
        sequence: unsigned(row, 0)?,
        at_ms: row.get(1)?,
        kernel: row.get(2)?,
        kind: row.get(3)?,
        detail_json: row.get(4)?,
    })
}

pub(super) fn append(db: &Db, events: Vec<NewEvent>) -> Result<Vec<Event>> {
    db.sql("append event", |c| {
        let mut insert = c.prepare_cached(
            "INSERT INTO events (at_ms, kernel, kind, detail) VALUES (?, ?, ?, ?) RETURNING sequence",
        )?;
        let mut numbered = Vec::with_capacity(events.len());
        for NewEvent { at_ms, kernel, kind, detail_json } in events {
            let sequence = insert.query_row(params![at_ms, kernel, kind, detail_json], |row| unsigned(row, 0))?;
            if sequence % PRUNED_EVERY == 0 {
                c.prepare_cached("DELETE FROM events WHERE sequence <= ?")?
                    .execute([signed(sequence) - signed(limits::EVENTS_KEPT)])?;
            }
            numbered.push(Event { sequence, at_ms, kernel, kind, detail_json });
        }
        Ok(numbered)
    })
}

/// Gives a renamed kernel's events its new name.
pub(super) fn rename(db: &Db, from: &str, to: &str, since_ms: i64) -> Result<()> {
    db.sql("rename events", |c| {
        c.prepare_cached("UPDATE events SET kernel = ? WHERE kernel = ? AND at_ms >= ?")?
            .execute(params![to, from, since_ms])
            .map(drop)
    })
}

pub(super) fn after(db: &Db, sequence: u64, most: usize) -> Result<EventPage> {
    db.sql("read events", |c| {
        let (oldest, newest) = c
            .prepare_cached("SELECT coalesce(min(sequence), 1), coalesce(max(sequence), 0) FROM events")?
            .query_row([], |row| Ok((unsigned(row, 0)?, unsigned(row, 1)?)))?;
        let events: Vec<Event> = c
            .prepare_cached(
                "SELECT sequence, at_ms, kernel, kind, detail FROM events WHERE sequence > ? ORDER BY sequence LIMIT ?",
            )?
            .query_map(params![signed(sequence), most.min(limits::PAGE_ROWS) as i64], read)?
            .collect::<rusqlite::Result<_>>()?;
        Ok(EventPage { events, lost: oldest.saturating_sub(sequence.saturating_add(1)), newest })
    })
}
