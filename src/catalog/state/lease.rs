//! The lease: who may control the kernel, until when, at which epoch.

use rusqlite::{OptionalExtension as _, params};

use crate::catalog::error::CatalogError;
use crate::catalog::row::{signed, unsigned};
use crate::catalog::sqlite::{Db, Result};
use crate::core::ids::Epoch;

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The holder.
    pub holder: String,
    /// The kernel's epoch when it was taken.
    pub epoch: Epoch,
    /// Milliseconds since 1970.
    pub expires_at_ms: i64,
}

pub(super) fn get(db: &Db) -> Result<Option<Lease>> {
    db.sql("read lease", |c| {
        c.prepare_cached("SELECT holder, epoch, expires_at_ms FROM lease")?
            .query_row([], |row| {
                Ok(Lease { holder: row.get(0)?, epoch: Epoch(unsigned(row, 1)?), expires_at_ms: row.get(2)? })
            })
            .optional()
    })
}

pub(super) fn take(db: &Db, lease: &Lease, now_ms: i64) -> Result<()> {
    if let Some(present) = get(db)? {
        if lease.epoch < present.epoch {
            return Err(CatalogError::Conflict(format!(
                "the lease is at epoch {}; epoch {} has ended",
                present.epoch.0, lease.epoch.0
            )));
        }
        // A later epoch is a change of ownership: it voids an earlier owner's lease.
        let held = present.expires_at_ms > now_ms && lease.epoch == present.epoch;
        if held && present.holder != lease.holder {
            return Err(CatalogError::Conflict(format!(
                "{} has the lease for another {} ms",
                present.holder,
                present.expires_at_ms - now_ms
            )));
        }
    }
    db.sql("take lease", |c| {
        c.prepare_cached("INSERT OR REPLACE INTO lease (one, holder, epoch, expires_at_ms) VALUES (1, ?, ?, ?)")?
            .execute(params![lease.holder, signed(lease.epoch.0), lease.expires_at_ms])
            .map(drop)
    })
}

/// Expires the lease, and keeps the row for its epoch.
pub(super) fn release(db: &Db, holder: &str) -> Result<bool> {
    db.sql("release lease", |c| {
        c.prepare_cached("UPDATE lease SET expires_at_ms = 0 WHERE holder = ? AND expires_at_ms > 0")?
            .execute([holder])
            .map(|rows| rows > 0)
    })
}
