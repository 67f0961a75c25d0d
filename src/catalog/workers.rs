//! The table of workers: what a new daemon needs to find, verify and adopt, or remove them.

use std::path::PathBuf;

use rusqlite::{Row, params};

use super::error::CatalogError;
use super::row::{bytes, signed, unsigned, unsigned32};
use super::sqlite::{Db, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};

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
    /// Its init's process id on the host.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`, clock ticks since boot: detects a reused process id.
    pub start_ticks: u64,
    /// Its private socket.
    pub socket: PathBuf,
}

impl std::fmt::Debug for WorkerRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("WorkerRow")
            .field("id", &self.id)
            .field("kernel", &self.kernel)
            .field("epoch", &self.epoch)
            .field("build", &self.build)
            .field("pid", &self.pid)
            .field("start_ticks", &self.start_ticks)
            .field("socket", &self.socket)
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
        pid: unsigned32(row, 5)?,
        start_ticks: unsigned(row, 6)?,
        socket: PathBuf::from(row.get::<_, String>(7)?),
    })
}

pub(super) fn put(db: &Db, worker: &WorkerRow) -> Result<()> {
    let socket = worker
        .socket
        .to_str()
        .ok_or_else(|| CatalogError::Conflict(format!("the socket path {} is not UTF-8", worker.socket.display())))?;
    db.sql("record worker", |c| {
        c.prepare_cached(
            "INSERT INTO workers (id, kernel, epoch, build, secret, pid, start_ticks, socket)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET kernel = excluded.kernel,
             epoch = excluded.epoch, build = excluded.build, secret = excluded.secret, pid = excluded.pid,
             start_ticks = excluded.start_ticks, socket = excluded.socket",
        )?
        .execute(params![
            worker.id.as_bytes(),
            worker.kernel.as_bytes(),
            signed(worker.epoch.0),
            worker.build,
            worker.secret,
            worker.pid,
            signed(worker.start_ticks),
            socket,
        ])
        .map(drop)
    })
}

pub(super) fn list(db: &Db) -> Result<Vec<WorkerRow>> {
    db.sql("list workers", |c| {
        c.prepare_cached("SELECT id, kernel, epoch, build, secret, pid, start_ticks, socket FROM workers ORDER BY id")?
            .query_map([], read)?
            .collect()
    })
}

pub(super) fn remove(db: &Db, id: WorkerId) -> Result<bool> {
    db.sql("forget worker", |c| {
        c.prepare_cached("DELETE FROM workers WHERE id = ?")?.execute([id.as_bytes()]).map(|rows| rows > 0)
    })
}
