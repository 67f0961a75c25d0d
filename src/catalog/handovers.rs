//! The table of handovers: moves of kernels between hosts that need an end.

use rusqlite::{Row, params};

use super::handle::{CatalogHandle, Notes, Written};
use super::kernels::{self, KernelRow};
use super::row::{bytes, unsigned32};
use super::sqlite::{Db, Result};
use super::thread::Pending;
use crate::core::handover::Side;
use crate::core::ids::{HandoverId, KernelId};
use crate::core::limits;

/// A handover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandoverRow {
    /// Its identity, the same on both hosts.
    pub id: HandoverId,
    /// Direction.
    pub side: Side,
    /// The kernel.
    pub kernel: KernelId,
    /// The kernel's owner here.
    pub uid: u32,
    /// Whether an incoming kernel was activated.
    pub live: bool,
    /// The supervisor's record, JSON; opaque to the catalog.
    pub record: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
}

impl CatalogHandle {
    /// Records a handover.
    ///
    /// # Errors
    /// `Conflict` if a group has the kernel that leaves, `Limit`; `Sqlite` if the id is recorded.
    pub fn put_handover(&self, handover: HandoverRow) -> Pending<()> {
        self.write("catalog.handover.put", move |db| put(db, &handover))
    }

    /// Replaces the record of a handover, once its target is known.
    ///
    /// # Errors
    /// `NotFound`; database errors.
    pub fn name_handover(&self, id: HandoverId, record: String) -> Pending<()> {
        self.write("catalog.handover.name", move |db| {
            let changed = db.sql("name handover", |c| {
                c.prepare_cached("UPDATE handovers SET record = ? WHERE id = ?")?
                    .execute(params![record, id.as_bytes()])
            })?;
            kernels::found(changed, || format!("handover {id}"))
        })
    }

    /// Deletes the record of a handover that has ended.
    ///
    /// # Errors
    /// Database errors.
    pub fn forget_handover(&self, id: HandoverId) -> Pending<()> {
        self.write("catalog.handover.forget", move |db| {
            db.sql("forget handover", |c| {
                c.prepare_cached("DELETE FROM handovers WHERE id = ?")?.execute([id.as_bytes()]).map(drop)
            })
        })
    }

    /// Writes the records of all handovers and of their kernels anew: they are on the device when this returns, whatever
    /// an earlier sync has lost.
    ///
    /// # Errors
    /// Database errors.
    pub fn rewrite_handovers(&self) -> Pending<()> {
        self.write_anew("catalog.decision.rewrite", |db| {
            db.sql("rewrite handovers", |c| {
                c.execute("UPDATE handovers SET live = live", [])?;
                c.execute("UPDATE group_moves SET state = state", [])?;
                c.execute("UPDATE kernels SET epoch = epoch WHERE id IN (SELECT kernel FROM handovers)", []).map(drop)
            })
        })
    }

    /// Every recorded handover.
    ///
    /// # Errors
    /// Database errors.
    pub fn handovers(&self) -> Pending<Vec<HandoverRow>> {
        self.read(list)
    }

    /// Activates an incoming kernel. `replaced`: its row replaces the one that the kernel left when it departed from here,
    /// and the record of that move, which its return acknowledges.
    ///
    /// # Errors
    /// `Exists` if the name is taken, `Limit`.
    pub fn activate_handover(
        &self,
        id: HandoverId,
        replaced: Option<Option<HandoverId>>,
        kernel: KernelRow,
        notes: Notes,
    ) -> Pending<Written<()>> {
        self.write("catalog.handover.activate", move |db| {
            if let Some(left_by) = replaced {
                kernels::remove(db, kernel.id)?;
                if let Some(left_by) = left_by {
                    db.sql("forget handover", |c| {
                        let sql = "DELETE FROM handovers WHERE id = ? AND side = 0";
                        c.prepare_cached(sql)?.execute([left_by.as_bytes()]).map(drop)
                    })?;
                }
            }
            kernels::insert(db, &kernel, None, kernel.last_used_at_ms)?;
            let changed = db.sql("activate handover", |c| {
                c.prepare_cached("UPDATE handovers SET live = 1 WHERE id = ? AND side = 1")?.execute([id.as_bytes()])
            })?;
            kernels::found(changed, || format!("handover {id}"))?;
            notes.write(db, ())
        })
    }
}

fn put(db: &Db, handover: &HandoverRow) -> Result<()> {
    let count = db.sql("count handovers", |c| {
        c.prepare_cached("SELECT count(*) FROM handovers")?.query_row([], |row| row.get::<_, i64>(0))
    })?;
    // Records of activated kernels answer late repetitions only.
    let beyond = count + 1 - limits::HANDOVER_RECORDS as i64;
    if beyond > 0 {
        let removed = db.sql("drop old handovers", |c| {
            c.prepare_cached(
                "DELETE FROM handovers WHERE id IN (SELECT id FROM handovers WHERE live = 1 ORDER BY at_ms LIMIT ?)",
            )?
            .execute([beyond])
        })?;
        if (removed as i64) < beyond {
            let (what, most) = ("the number of moves that wait for an end", limits::HANDOVER_RECORDS as u64);
            return Err(super::CatalogError::Limit { what, most });
        }
    }
    let HandoverRow { id, side, kernel, uid, live, record, at_ms } = handover;
    // The supervisor has looked, but a group may have got it since. With its group it may leave.
    let is_member = "SELECT EXISTS (SELECT 1 FROM group_members WHERE kernel = ? AND group_id NOT IN
                     (SELECT group_id FROM group_moves WHERE side = 0 AND state = 0))";
    if *side == Side::Out && exists(db, is_member, *kernel)? {
        return Err(super::CatalogError::Conflict("the kernel is a member of a group".into()));
    }
    db.sql("record handover", |c| {
        c.prepare_cached(
            "INSERT INTO handovers (id, side, kernel, uid, live, record, at_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute(params![id.as_bytes(), i64::from(*side == Side::In), kernel.as_bytes(), uid, live, record, at_ms])
        .map(drop)
    })
}

/// Whether a kernel is moving to or from this host.
pub(super) fn is_moving(db: &Db, kernel: KernelId) -> Result<bool> {
    exists(db, "SELECT EXISTS (SELECT 1 FROM handovers WHERE kernel = ? AND live = 0)", kernel)
}

fn exists(db: &Db, query: &str, kernel: KernelId) -> Result<bool> {
    db.sql("look for kernel", |c| c.prepare_cached(query)?.query_row([kernel.as_bytes()], |row| row.get(0)))
}

fn list(db: &Db) -> Result<Vec<HandoverRow>> {
    db.sql("list handovers", |c| {
        c.prepare_cached("SELECT id, side, kernel, uid, live, record, at_ms FROM handovers ORDER BY at_ms, id")?
            .query_map([], read)?
            .collect()
    })
}

fn read(row: &Row<'_>) -> rusqlite::Result<HandoverRow> {
    Ok(HandoverRow {
        id: HandoverId::from_bytes(bytes(row, 0)?),
        side: if row.get::<_, i64>(1)? == 0 { Side::Out } else { Side::In },
        kernel: KernelId::from_bytes(bytes(row, 2)?),
        uid: unsigned32(row, 3)?,
        live: row.get(4)?,
        record: row.get(5)?,
        at_ms: row.get(6)?,
    })
}
