//! The table of workers: what a new daemon needs to find, verify and adopt, or remove them.

use rusqlite::{Row, params};

use super::row::{bytes, signed, unsigned};
use super::sqlite::{Db, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::spec::Isolation;

/// A worker that was alive when the daemon last checked.
#[derive(Clone, PartialEq, Eq)]
pub struct WorkerRow {
    /// Its identity.
    pub id: WorkerId,
    /// Its kernel.
    pub kernel: KernelId,
    /// The kernel's epoch when it started.
    pub epoch: Epoch,
    /// The ryokan build that it runs.
    pub build: String,
    /// Its secret.
    pub secret: Vec<u8>,
    /// How it runs.
    pub isolation: Isolation,
    /// What its isolation driver needs to find it; only the driver reads it.
    pub record: String,
}

impl std::fmt::Debug for WorkerRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("WorkerRow")
            .field("id", &self.id)
            .field("kernel", &self.kernel)
            .field("epoch", &self.epoch)
            .field("build", &self.build)
            .field("isolation", &self.isolation)
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<WorkerRow> {
    Ok(WorkerRow {
        id: WorkerId::from_bytes(bytes(row, 0)?),
        kernel: KernelId::from_bytes(bytes(row, 1)?),
        epoch: Epoch(unsigned(row, 2)?),
        build: row.get(3)?,
        secret: row.get(4)?,
        isolation: isolation(&row.get::<_, String>(5)?)?,
        record: row.get(6)?,
    })
}

fn isolation(name: &str) -> rusqlite::Result<Isolation> {
    Isolation::from_name(name).ok_or_else(|| {
        let unknown = format!("there is no isolation {name:?}");
        rusqlite::Error::FromSqlConversionFailure(5, rusqlite::types::Type::Text, unknown.into())
    })
}

pub(super) fn put(db: &Db, worker: &WorkerRow) -> Result<()> {
    db.sql("record worker", |c| {
        c.prepare_cached(
            "INSERT INTO workers (id, kernel, epoch, build, secret, isolation, record)
             VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET kernel = excluded.kernel,
             epoch = excluded.epoch, build = excluded.build, secret = excluded.secret,
             isolation = excluded.isolation, record = excluded.record",
        )?
        .execute(params![
            worker.id.as_bytes(),
            worker.kernel.as_bytes(),
            signed(worker.epoch.0),
            worker.build,
            worker.secret,
            worker.isolation.name(),
            worker.record,
        ])
        .map(drop)
    })
}

pub(super) fn list(db: &Db) -> Result<Vec<WorkerRow>> {
    db.sql("list workers", |c| {
        c.prepare_cached("SELECT id, kernel, epoch, build, secret, isolation, record FROM workers ORDER BY id")?
            .query_map([], read)?
            .collect()
    })
}

pub(super) fn remove(db: &Db, id: WorkerId) -> Result<bool> {
    db.sql("forget worker", |c| {
        c.prepare_cached("DELETE FROM workers WHERE id = ?")?.execute([id.as_bytes()]).map(|rows| rows > 0)
    })
}
