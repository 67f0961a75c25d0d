//! The origin of a kernel's state, and the first records of a kernel created from a checkpoint.

use rusqlite::{OptionalExtension as _, Row, params};

use super::checkpoints::{NewCheckpoint, add_with_parent};
use super::journal::{self, NewEntry};
use super::{StateHandle, grants, workflow_restore};
use crate::catalog::row::{bytes, unsigned32, wrong};
use crate::catalog::sqlite::{Db, Result};
use crate::catalog::thread::Pending;
use crate::core::ids::{CheckpointId, Digest, KernelId};
use crate::core::info::{GivenMount, McpTransport};
use crate::core::origin::{ForkPoint, Origin, OriginKind};
use crate::core::workflow::{Decision, WorkflowPart};

/// The first records of a kernel created from a checkpoint.
#[derive(Debug, Clone)]
pub struct Beginning {
    /// The origin of its state.
    pub origin: Origin,
    /// Its workflow records: steps, agent, decisions and artifacts.
    pub work: WorkflowPart,
    /// Those decisions with their texts, as far as known.
    pub decisions: Vec<Decision>,
    /// Its first checkpoints, oldest first; the last is its position.
    pub checkpoints: Vec<FirstCheckpoint>,
    /// Its mounts besides its specification's.
    pub mounts: Vec<GivenMount>,
    /// Its MCP servers.
    pub mcp: Vec<(String, McpTransport)>,
    /// The blobs that it may read.
    pub blobs: Vec<Digest>,
    /// The first journal entry, unless that is a checkpoint's.
    pub entry: Option<NewEntry>,
    /// Milliseconds since 1970.
    pub at_ms: i64,
}

/// A checkpoint of a new kernel.
#[derive(Debug, Clone)]
pub struct FirstCheckpoint {
    /// Its record.
    pub new: NewCheckpoint,
    /// Its parent, perhaps another kernel's checkpoint.
    pub parent: Option<CheckpointId>,
    /// Its journal entry.
    pub entry: NewEntry,
}

impl StateHandle {
    /// Writes a new kernel's first records in one transaction. The store has everything that they reference.
    ///
    /// # Errors
    /// Database errors.
    pub fn begin(&self, beginning: Beginning) -> Pending<()> {
        self.write("state.kernel.begin", move |db| begin(db, beginning))
    }

    /// The origin of the kernel's state.
    ///
    /// # Errors
    /// Database errors.
    pub fn origin(&self) -> Pending<Origin> {
        self.read(get)
    }

    /// The blobs that the kernel could read at a time (milliseconds since 1970).
    ///
    /// # Errors
    /// Database errors.
    pub fn blobs_granted_until(&self, at_ms: i64) -> Pending<Vec<Digest>> {
        self.read(move |db| grants::blobs_granted_until(db, at_ms))
    }
}

fn begin(db: &Db, beginning: Beginning) -> Result<()> {
    grants::replace(db, &beginning.mounts, &beginning.mcp)?;
    grants::grant_blobs(db, &beginning.blobs, beginning.at_ms)?;
    put(db, &beginning.origin)?;
    // The creator of the kernel, who may not be the creator of an imported checkpoint.
    let entry = beginning.entry.as_ref().or(beginning.checkpoints.last().map(|first| &first.entry));
    let by = entry.map_or("", |entry| &entry.actor);
    workflow_restore::begin_from(db, &beginning.work, &beginning.decisions, (by, beginning.at_ms))?;
    if let Some(entry) = beginning.entry {
        journal::append_one(db, entry)?;
    }
    for first in beginning.checkpoints {
        add_with_parent(db, &first.new, first.parent, first.entry)?;
    }
    Ok(())
}

pub(super) fn get(db: &Db) -> Result<Origin> {
    let found = db.sql("read origin", |c| {
        c.prepare_cached("SELECT kind, generation, kernel, name, checkpoint, restored FROM origin")?
            .query_row([], read)
            .optional()
    })?;
    Ok(found.unwrap_or_default())
}

fn read(row: &Row<'_>) -> rusqlite::Result<Origin> {
    let place: i64 = row.get(0)?;
    let kind = usize::try_from(place).ok().and_then(|place| OriginKind::ALL.get(place).copied());
    let no_kind = || wrong(0, rusqlite::types::Type::Integer, format!("{place} is no kind of origin"));
    let optional = |column| -> rusqlite::Result<Option<[u8; 16]>> {
        match row.get_ref(column)? {
            rusqlite::types::ValueRef::Null => Ok(None),
            _ => bytes(row, column).map(Some),
        }
    };
    let from = match (optional(2)?, row.get::<_, Option<String>>(3)?, optional(4)?) {
        (Some(kernel), Some(name), Some(checkpoint)) => Some(ForkPoint {
            kernel: KernelId::from_bytes(kernel),
            name,
            checkpoint: CheckpointId::from_bytes(checkpoint),
        }),
        _ => None,
    };
    Ok(Origin {
        kind: kind.ok_or_else(no_kind)?,
        generation: unsigned32(row, 1)?,
        from,
        restored: optional(5)?.map(CheckpointId::from_bytes),
    })
}

pub(super) fn put(db: &Db, origin: &Origin) -> Result<()> {
    let place = OriginKind::ALL.iter().position(|kind| *kind == origin.kind).map(|place| place as i64);
    let from = origin.from.as_ref();
    db.sql("write origin", |c| {
        c.prepare_cached(
            "INSERT OR REPLACE INTO origin (one, kind, generation, kernel, name, checkpoint, restored)
             VALUES (1, ?, ?, ?, ?, ?, ?)",
        )?
        .execute(params![
            place,
            origin.generation,
            from.map(|from| *from.kernel.as_bytes()),
            from.map(|from| from.name.as_str()),
            from.map(|from| *from.checkpoint.as_bytes()),
            origin.restored.map(|restored| *restored.as_bytes()),
        ])
        .map(drop)
    })
}
