//! The table of group moves: groups that move between hosts and need an end.

use rusqlite::{Row, params};

use super::error::CatalogError;
use super::handle::{CatalogHandle, Notes, Written};
use super::row::{bytes, unsigned32, wrong};
use super::sqlite::{Db, Result};
use super::thread::Pending;
use crate::core::handover::{Side, Stage};
use crate::core::ids::{GroupId, HandoverId};
use crate::core::limits;

/// A group's move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMoveRow {
    /// Its identity, the same on both hosts.
    pub id: HandoverId,
    /// Direction.
    pub side: Side,
    /// The group on this host.
    pub group: GroupId,
    /// Its owner here.
    pub uid: u32,
    /// How far it is.
    pub stage: Stage,
    /// The supervisor's record, JSON; opaque to the catalog.
    pub record: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
}

impl CatalogHandle {
    /// Records a group's move.
    ///
    /// # Errors
    /// `Conflict` if the group is being moved, `Limit`; `Sqlite` if the id is recorded.
    pub fn put_group_move(&self, row: GroupMoveRow) -> Pending<()> {
        self.write("catalog.groupmove.put", move |db| put(db, &row))
    }

    /// Replaces the record of a group's move and its stage. At the source, [`Stage::Decided`] is the decision about all
    /// kernels of the group.
    ///
    /// # Errors
    /// `NotFound`; database errors.
    pub fn advance_group_move(
        &self,
        id: HandoverId,
        stage: Stage,
        record: String,
        notes: Notes,
    ) -> Pending<Written<()>> {
        self.write("catalog.groupmove.advance", move |db| {
            let changed = db.sql("advance group move", |c| {
                c.prepare_cached("UPDATE group_moves SET state = max(state, ?), record = ? WHERE id = ?")?
                    .execute(params![place(stage), record, id.as_bytes()])
            })?;
            super::kernels::found(changed, || format!("move {id}"))?;
            notes.write(db, ())
        })
    }

    /// Deletes the record of a group's move, with those of its kernels' handovers: one decision ended all of them.
    ///
    /// # Errors
    /// Database errors.
    pub fn forget_group_move(&self, id: HandoverId, handovers: Vec<HandoverId>) -> Pending<()> {
        self.write("catalog.groupmove.forget", move |db| {
            db.sql("forget group move", |c| {
                for handover in &handovers {
                    c.prepare_cached("DELETE FROM handovers WHERE id = ?")?.execute([handover.as_bytes()])?;
                }
                c.prepare_cached("DELETE FROM group_moves WHERE id = ?")?.execute([id.as_bytes()]).map(drop)
            })
        })
    }

    /// Every recorded move of a group.
    ///
    /// # Errors
    /// Database errors.
    pub fn group_moves(&self) -> Pending<Vec<GroupMoveRow>> {
        self.read(list)
    }
}

fn place(stage: Stage) -> i64 {
    match stage {
        Stage::Open => 0,
        Stage::Decided => 1,
        Stage::Done => 2,
    }
}

fn put(db: &Db, row: &GroupMoveRow) -> Result<()> {
    let GroupMoveRow { id, side, group, uid, stage, record, at_ms } = row;
    let (count, moving): (i64, bool) = db.sql("count group moves", |c| {
        // Those that have ended answer late repetitions only.
        let ended = "DELETE FROM group_moves WHERE id IN
                     (SELECT id FROM group_moves WHERE side = 1 AND state = 2 ORDER BY at_ms DESC LIMIT -1 OFFSET ?)";
        c.prepare_cached(ended)?.execute([limits::HANDOVER_RECORDS as i64 / 2])?;
        let count = "SELECT count(*), coalesce(max(group_id = ? AND side = 0), 0) FROM group_moves";
        c.prepare_cached(count)?.query_row([group.as_bytes()], |row| Ok((row.get(0)?, row.get(1)?)))
    })?;
    if *side == Side::Out && moving {
        return Err(CatalogError::Conflict("the group has an unfinished move".into()));
    }
    if count >= limits::HANDOVER_RECORDS as i64 {
        let (what, most) = ("the number of moves that wait for an end", limits::HANDOVER_RECORDS as u64);
        return Err(CatalogError::Limit { what, most });
    }
    db.sql("record group move", |c| {
        c.prepare_cached(
            "INSERT INTO group_moves (id, side, group_id, uid, state, record, at_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute(params![
            id.as_bytes(),
            i64::from(*side == Side::In),
            group.as_bytes(),
            uid,
            place(*stage),
            record,
            at_ms
        ])
        .map(drop)
    })
}

fn list(db: &Db) -> Result<Vec<GroupMoveRow>> {
    db.sql("list group moves", |c| {
        c.prepare_cached("SELECT id, side, group_id, uid, state, record, at_ms FROM group_moves ORDER BY at_ms, id")?
            .query_map([], read)?
            .collect()
    })
}

fn read(row: &Row<'_>) -> rusqlite::Result<GroupMoveRow> {
    Ok(GroupMoveRow {
        id: HandoverId::from_bytes(bytes(row, 0)?),
        side: if row.get::<_, i64>(1)? == 0 { Side::Out } else { Side::In },
        group: GroupId::from_bytes(bytes(row, 2)?),
        uid: unsigned32(row, 3)?,
        stage: match row.get::<_, i64>(4)? {
            0 => Stage::Open,
            1 => Stage::Decided,
            2 => Stage::Done,
            other => return Err(wrong(4, rusqlite::types::Type::Integer, format!("{other} is no stage of a move"))),
        },
        record: row.get(5)?,
        at_ms: row.get(6)?,
    })
}
