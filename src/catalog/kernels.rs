//! The table of kernels.

use rusqlite::{OptionalExtension as _, Row, params};

use super::error::CatalogError;
use super::keys::{self, IdempotencyKey};
use super::row::{bytes, json, signed, to_json, unsigned, unsigned32};
use super::sqlite::{Db, Result};
use crate::core::ids::{Epoch, KernelId};
use crate::core::limits;
use crate::core::spec::KernelSpec;

/// A kernel's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRow {
    /// Its identity.
    pub id: KernelId,
    /// Its owner.
    pub uid: u32,
    /// Its specification; the name is unique among the owner's kernels.
    pub spec: KernelSpec,
    /// The state record, JSON; opaque to the catalog.
    pub state_json: String,
    /// From 1; grows with each external change.
    pub version: u64,
    /// Grows with each change of ownership.
    pub epoch: Epoch,
    /// Generation of the engine's state when the kernel was created; its `state.db` has the current one.
    pub generation: u32,
    /// The kernel whose workspace it shares, and which must exist as long; none: it has its own.
    pub thread_of: Option<KernelId>,
    /// Milliseconds since 1970.
    pub created_at_ms: i64,
    /// Milliseconds since 1970.
    pub last_used_at_ms: i64,
}

/// Result of a creation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Created {
    /// The kernel is new.
    New,
    /// The result of an earlier creation with the same idempotency key; nothing was written.
    Before(KernelId),
}

/// Changes to a kernel's row; `None` leaves a field unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelChange {
    /// Only if the kernel has this version; 0: any.
    pub expected_version: u64,
    /// Whether this is an external change: the version grows by one.
    pub new_version: bool,
    /// New specification, for example with a new name.
    pub spec: Option<KernelSpec>,
    /// New state record.
    pub state_json: Option<String>,
    /// New epoch; a lower one is refused.
    pub epoch: Option<Epoch>,
    /// New generation.
    pub generation: Option<u32>,
    /// Milliseconds since 1970.
    pub last_used_at_ms: Option<i64>,
}

const COLUMNS: &str = "id, uid, spec, state, version, epoch, generation, created_at_ms, last_used_at_ms, thread_of";

fn read(row: &Row<'_>) -> rusqlite::Result<KernelRow> {
    Ok(KernelRow {
        id: KernelId::from_bytes(bytes(row, 0)?),
        uid: unsigned32(row, 1)?,
        spec: json(row, 2)?,
        state_json: row.get(3)?,
        version: unsigned(row, 4)?,
        epoch: Epoch(unsigned(row, 5)?),
        generation: unsigned32(row, 6)?,
        created_at_ms: row.get(7)?,
        last_used_at_ms: row.get(8)?,
        thread_of: match row.get_ref(9)? {
            rusqlite::types::ValueRef::Null => None,
            _ => Some(KernelId::from_bytes(bytes(row, 9)?)),
        },
    })
}

pub(super) fn insert(db: &Db, kernel: &KernelRow, key: Option<&IdempotencyKey>, now_ms: i64) -> Result<Created> {
    if let Some(key) = key {
        if let Some(before) = keys::recall(db, &key.scope, &key.key, now_ms)? {
            let id = before.parse().map_err(|_| CatalogError::field(db.path(), "an idempotency key's result"))?;
            return Ok(Created::Before(id));
        }
        keys::forget_expired(db, now_ms)?;
        keys::remember(db, key, &kernel.id.to_string())?;
    }
    let count = db.sql("count kernels", |c| {
        c.prepare_cached("SELECT count(*) FROM kernels")?.query_row([], |row| unsigned(row, 0))
    })?;
    if count >= limits::KERNELS as u64 {
        return Err(CatalogError::Limit { what: "the number of kernels", most: limits::KERNELS as u64 });
    }
    if let Some(owner) = kernel.thread_of
        && get(db, owner)?.is_none()
    {
        return Err(CatalogError::NotFound(format!("kernel {owner}")));
    }
    let spec = to_json(db.path(), "a specification", &kernel.spec)?;
    let inserted = db.sql("insert kernel", |c| {
        c.prepare_cached(
            "INSERT INTO kernels (id, uid, name, spec, state, version, epoch, generation, created_at_ms, last_used_at_ms,
             thread_of) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        )?
        .execute(params![
            kernel.id.as_bytes(),
            kernel.uid,
            kernel.spec.name.as_str(),
            spec,
            kernel.state_json,
            signed(kernel.version.max(1)),
            signed(kernel.epoch.0),
            kernel.generation,
            kernel.created_at_ms,
            kernel.last_used_at_ms,
            kernel.thread_of.map(|owner| *owner.as_bytes()),
        ])
    })?;
    if inserted == 0 {
        return Err(CatalogError::Exists(format!("a kernel {}", kernel.spec.name)));
    }
    Ok(Created::New)
}

pub(super) fn get(db: &Db, id: KernelId) -> Result<Option<KernelRow>> {
    db.sql("read kernel", |c| {
        c.prepare_cached(&format!("SELECT {COLUMNS} FROM kernels WHERE id = ?"))?
            .query_row([id.as_bytes()], read)
            .optional()
    })
}

pub(super) fn list(db: &Db, uid: Option<u32>) -> Result<Vec<KernelRow>> {
    db.sql("list kernels", |c| {
        c.prepare_cached(&format!("SELECT {COLUMNS} FROM kernels WHERE ?1 IS NULL OR uid = ?1 ORDER BY uid, name"))?
            .query_map([uid], read)?
            .collect()
    })
}

pub(super) fn update(db: &Db, id: KernelId, change: &KernelChange) -> Result<KernelRow> {
    let mut row = get(db, id)?.ok_or_else(|| CatalogError::NotFound(format!("kernel {id}")))?;
    if change.expected_version != 0 && change.expected_version != row.version {
        return Err(CatalogError::Conflict(format!(
            "kernel {} is at version {}, not {}",
            row.spec.name, row.version, change.expected_version
        )));
    }
    if let Some(epoch) = change.epoch.filter(|epoch| *epoch < row.epoch) {
        return Err(CatalogError::Conflict(format!(
            "kernel {} is at epoch {}; epoch {} has ended",
            row.spec.name, row.epoch.0, epoch.0
        )));
    }
    row.version += u64::from(change.new_version);
    row.epoch = change.epoch.unwrap_or(row.epoch);
    row.generation = change.generation.unwrap_or(row.generation);
    row.last_used_at_ms = change.last_used_at_ms.unwrap_or(row.last_used_at_ms);
    if let Some(state) = &change.state_json {
        row.state_json.clone_from(state);
    }
    if let Some(spec) = &change.spec {
        row.spec.clone_from(spec);
    }
    let spec = to_json(db.path(), "a specification", &row.spec)?;
    let changed = db.sql("update kernel", |c| {
        c.prepare_cached(
            "UPDATE OR IGNORE kernels SET name = ?, spec = ?, state = ?, version = ?, epoch = ?, generation = ?,
             last_used_at_ms = ? WHERE id = ?",
        )?
        .execute(params![
            row.spec.name.as_str(),
            spec,
            row.state_json,
            signed(row.version),
            signed(row.epoch.0),
            row.generation,
            row.last_used_at_ms,
            id.as_bytes(),
        ])
    })?;
    if changed == 0 {
        return Err(CatalogError::Exists(format!("a kernel {}", row.spec.name)));
    }
    Ok(row)
}

pub(super) fn touch(db: &Db, id: KernelId, at_ms: i64) -> Result<()> {
    let changed = db.sql("touch kernel", |c| {
        c.prepare_cached("UPDATE kernels SET last_used_at_ms = max(last_used_at_ms, ?) WHERE id = ?")?
            .execute(params![at_ms, id.as_bytes()])
    })?;
    found(changed, || format!("kernel {id}"))
}

pub(super) fn remove(db: &Db, id: KernelId) -> Result<()> {
    let threads = db.sql("count threads", |c| {
        c.prepare_cached("SELECT count(*) FROM kernels WHERE thread_of = ?")?
            .query_row([id.as_bytes()], |row| unsigned(row, 0))
    })?;
    if threads > 0 {
        return Err(CatalogError::Conflict(format!("{threads} kernels work in the workspace of kernel {id}")));
    }
    let removed =
        db.sql("remove kernel", |c| c.prepare_cached("DELETE FROM kernels WHERE id = ?")?.execute([id.as_bytes()]))?;
    found(removed, || format!("kernel {id}"))
}

/// Turns "no row changed" into `NotFound`.
pub(super) fn found(rows: usize, what: impl FnOnce() -> String) -> Result<()> {
    if rows == 0 { Err(CatalogError::NotFound(what())) } else { Ok(()) }
}
