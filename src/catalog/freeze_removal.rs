//! Removal of single freezes. What the gate learnt from them stays.

use rusqlite::params;

use super::error::CatalogError;
use super::handle::{CatalogHandle, Notes, Written};
use super::row::bytes;
use super::thread::Pending;
use super::{freeze_pins, groups};
use crate::core::ids::{CheckpointId, FreezeId, GroupId, KernelId};

impl CatalogHandle {
    /// Removes a freeze; returns the checkpoints that only it needed, and records that their pins are unneeded. An undo that would go back to it goes nowhere then.
    ///
    /// # Errors
    /// `Conflict` while an operation of the group is recorded, `NotFound` if the freeze is gone.
    pub fn remove_freeze(
        &self,
        group: GroupId,
        freeze: FreezeId,
        notes: Notes,
    ) -> Pending<Written<Vec<(KernelId, CheckpointId)>>> {
        self.write("catalog.freeze.remove", move |db| {
            if groups::intent(db, group)?.is_some() {
                return Err(CatalogError::Conflict("an operation of the group has not ended".into()));
            }
            let (id, of) = (freeze.as_bytes(), group.as_bytes());
            let needed = db.sql("list checkpoints", |c| {
                c.prepare(
                    "SELECT kernel, checkpoint FROM freeze_checkpoints AS own WHERE freeze = ?1 AND NOT EXISTS
                     (SELECT 1 FROM freeze_checkpoints AS other WHERE other.checkpoint = own.checkpoint
                      AND other.kernel = own.kernel AND other.freeze <> ?1)",
                )?
                .query_map([id], |row| {
                    Ok((KernelId::from_bytes(bytes(row, 0)?), CheckpointId::from_bytes(bytes(row, 1)?)))
                })?
                .collect::<rusqlite::Result<Vec<_>>>()
            })?;
            let removed = db.sql("remove freeze", |c| {
                c.execute(
                    "INSERT INTO removed_schemas (group_id, number, database, user_version, schema, repository, commit_id)
                     SELECT group_id, number, database, user_version, schema, repository, commit_id
                     FROM freeze_schemas JOIN freezes ON freezes.id = freeze WHERE freeze = ?1 AND group_id = ?2
                     ON CONFLICT DO UPDATE SET number = min(number, excluded.number)",
                    params![id, of],
                )?;
                c.execute(
                    "UPDATE groups SET head = nullif(head, ?1), undo = nullif(undo, ?1),
                     removed = max(removed, (SELECT number FROM freezes WHERE id = ?1)) WHERE id = ?2",
                    params![id, of],
                )?;
                c.execute("DELETE FROM freezes WHERE id = ?1 AND group_id = ?2", params![id, of])
            });
            if removed? == 0 {
                return Err(CatalogError::NotFound(format!("freeze {freeze}")));
            }
            freeze_pins::add(db, &needed)?;
            notes.write(db, needed)
        })
    }
}
