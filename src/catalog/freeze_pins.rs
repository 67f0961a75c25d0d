//! Pins of checkpoints for freezes that are removed, or not sealed yet. They are in other databases than the freezes: what a
//! daemon that ends leaves is lifted at the next start.

use rusqlite::params;

use super::handle::CatalogHandle;
use super::row::bytes;
use super::sqlite::{Db, Result};
use super::thread::Pending;
use crate::core::ids::{CheckpointId, KernelId};

impl CatalogHandle {
    /// Records checkpoints that are about to be pinned for a freeze, whose seal makes them needed.
    ///
    /// # Errors
    /// Database errors.
    pub fn begin_pins(&self, pins: Vec<(KernelId, CheckpointId)>) -> Pending<()> {
        self.write("catalog.group.pins", move |db| add(db, &pins))
    }

    /// The recorded checkpoints that no freeze needs.
    ///
    /// # Errors
    /// Database errors.
    pub fn unneeded_pins(&self) -> Pending<Vec<(KernelId, CheckpointId)>> {
        self.read(|db| {
            db.sql("list unneeded pins", |c| {
                c.prepare_cached(
                    "SELECT kernel, checkpoint FROM unneeded_pins AS own WHERE NOT EXISTS
                     (SELECT 1 FROM freeze_checkpoints AS needed
                      WHERE needed.checkpoint = own.checkpoint AND needed.kernel = own.kernel)",
                )?
                .query_map([], |row| {
                    Ok((KernelId::from_bytes(bytes(row, 0)?), CheckpointId::from_bytes(bytes(row, 1)?)))
                })?
                .collect()
            })
        })
    }

    /// Forgets checkpoints whose pins are lifted. Idempotent.
    ///
    /// # Errors
    /// Database errors.
    pub fn end_pins(&self, lifted: Vec<(KernelId, CheckpointId)>) -> Pending<()> {
        self.write("catalog.group.unpinned", move |db| remove(db, &lifted))
    }
}

/// Records pins that no freeze needs.
pub(super) fn add(db: &Db, pins: &[(KernelId, CheckpointId)]) -> Result<()> {
    db.sql("record unneeded pins", |c| {
        let mut add = c.prepare_cached("INSERT OR IGNORE INTO unneeded_pins (kernel, checkpoint) VALUES (?, ?)")?;
        pins.iter().try_for_each(|(kernel, id)| add.execute(params![kernel.as_bytes(), id.as_bytes()]).map(drop))
    })
}

/// Forgets them: they are lifted, or a freeze needs them.
pub(super) fn remove(db: &Db, pins: &[(KernelId, CheckpointId)]) -> Result<()> {
    db.sql("forget unneeded pins", |c| {
        let mut remove = c.prepare_cached("DELETE FROM unneeded_pins WHERE kernel = ? AND checkpoint = ?")?;
        pins.iter().try_for_each(|(kernel, id)| remove.execute(params![kernel.as_bytes(), id.as_bytes()]).map(drop))
    })
}
