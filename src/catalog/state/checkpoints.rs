//! Checkpoints: their rows, where the kernel is among them, and the end of a restore.

use rusqlite::{Connection, OptionalExtension as _, Row, params};

use super::journal::{self, NewEntry};
use super::{StateHandle, grants, origin, transition, workflow, workflow_restore};
use crate::catalog::error::CatalogError;
use crate::catalog::row::{bytes, signed, unsigned, unsigned32, wrong};
use crate::catalog::sqlite::{Db, Result};
use crate::catalog::thread::Pending;
use crate::core::checkpoint::{Checkpoint, CheckpointType, Span};
use crate::core::error::Error;
use crate::core::ids::{CheckpointId, Digest, ExecId};
use crate::core::info::{GivenMount, McpTransport};
use crate::core::limits;
use crate::core::workflow::{Options, Outcome, Request, WorkflowPart};

/// A checkpoint to record; number, parent and version are assigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewCheckpoint {
    /// Its identity.
    pub id: CheckpointId,
    /// See [`Checkpoint::name`].
    pub name: String,
    /// See [`Checkpoint::description`].
    pub description: String,
    /// See [`Checkpoint::kind`].
    pub kind: CheckpointType,
    /// See [`Checkpoint::creator`].
    pub creator: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// See [`Checkpoint::pinned`].
    pub pinned: bool,
    /// See [`Checkpoint::manifest`].
    pub manifest: Digest,
    /// See [`Checkpoint::files`].
    pub files: u64,
    /// See [`Checkpoint::state_bytes`].
    pub state_bytes: u64,
    /// See [`Checkpoint::machine_bytes`].
    pub machine_bytes: u64,
    /// See [`Checkpoint::summary`].
    pub summary: String,
    /// The messages that it compacts.
    pub compact: Vec<Span>,
    /// The workflow records in its manifest.
    pub work: WorkflowPart,
    /// The workflow records as of the manifest; none: they cannot change yet.
    pub work_seen: Option<WorkflowPart>,
    /// A change in the same transaction.
    pub with: Option<Together>,
    /// An execution that was under way: the checkpoint holds the state before it.
    pub under_way: Option<ExecId>,
}

/// Refusal reason: the workflow records changed while the checkpoint was taken, so its manifest lacks the change.
pub const WORK_CHANGED: &str = "work_changed";

/// A workflow change in the same transaction as a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Together {
    /// The checkpoint includes the change.
    Before(Request),
    /// The checkpoint precedes the change.
    After(Request),
}

impl Together {
    /// The change.
    pub fn request(&self) -> &Request {
        match self {
            Together::Before(request) | Together::After(request) => request,
        }
    }
}

/// A recorded checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Added {
    /// Its row.
    pub checkpoint: Checkpoint,
    /// The outcome of the change made with it.
    pub outcome: Option<Outcome>,
    /// The newest journal entry.
    pub sequence: u64,
}

/// The kernel's position among its checkpoints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Head {
    /// The last one taken or restored: the parent of the next.
    pub checkpoint: Option<CheckpointId>,
    /// The target of undo: taken before the last restore.
    pub undo: Option<CheckpointId>,
}

/// What the end of a restore did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Its journal entry.
    pub sequence: u64,
    /// Decisions whose state changed.
    pub decisions_changed: u32,
    /// Artifacts that got a version.
    pub artifacts_changed: u32,
}

/// The end of a restore.
#[derive(Debug, Clone)]
pub struct Restored {
    /// The checkpoint that the kernel is at.
    pub target: CheckpointId,
    /// The checkpoint before the restore; the same as the target if the restore was reverted.
    pub safety: CheckpointId,
    /// Who asked for it.
    pub actor: String,
    /// What else the restore changes.
    pub options: Options,
    /// The mounts added since creation, as they are from now on.
    pub mounts: Vec<GivenMount>,
    /// The MCP servers, from now on.
    pub mcp: Vec<(String, McpTransport)>,
    /// Steps, agent, decisions and artifacts at the checkpoint.
    pub work: WorkflowPart,
    /// The journal entry.
    pub entry: NewEntry,
    /// Milliseconds since 1970.
    pub at_ms: i64,
}

impl StateHandle {
    /// Records a checkpoint with its journal entry, after the store has everything that it references.
    ///
    /// # Errors
    /// Those of the change made with it; `Refused` if there is nothing to compact.
    pub fn add_checkpoint(&self, new: NewCheckpoint, entry: NewEntry) -> Pending<Added> {
        self.write("state.checkpoints.add", move |db| add(db, &new, entry))
    }

    /// A checkpoint.
    ///
    /// # Errors
    /// Database errors.
    pub fn checkpoint(&self, id: CheckpointId) -> Pending<Option<Checkpoint>> {
        self.read(move |db| get(db, id))
    }

    /// Checkpoints before a number, newest first, at most [`PAGE_ROWS`](crate::core::limits::PAGE_ROWS).
    ///
    /// # Errors
    /// Database errors.
    pub fn checkpoints(&self, before: u64, most: usize) -> Pending<Vec<Checkpoint>> {
        self.read(move |db| page(db, before, most))
    }

    /// Number of checkpoints.
    ///
    /// # Errors
    /// Database errors.
    pub fn checkpoint_count(&self) -> Pending<u64> {
        self.read(count)
    }

    /// The kernel's position among its checkpoints.
    ///
    /// # Errors
    /// Database errors.
    pub fn head(&self) -> Pending<Head> {
        self.read(head)
    }

    /// Whether the journal has entries other than messages since the kernel's position; without checkpoints: whether
    /// anything was executed.
    ///
    /// # Errors
    /// Database errors.
    pub fn changed_since_head(&self) -> Pending<bool> {
        self.read(|db| {
            db.sql("look for changes", |c| {
                c.prepare_cached(
                    "SELECT EXISTS (SELECT 1 FROM journal WHERE kind <> 2
                     AND sequence > coalesce((SELECT journal FROM head WHERE checkpoint IS NOT NULL), 0)
                     AND (kind = 1 OR EXISTS (SELECT 1 FROM head WHERE checkpoint IS NOT NULL)))",
                )?
                .query_row([], |row| row.get(0))
            })
        })
    }

    /// Pins or unpins a checkpoint; returns whether it exists.
    ///
    /// # Errors
    /// Database errors.
    pub fn pin_checkpoint(&self, id: CheckpointId, pinned: bool) -> Pending<bool> {
        self.write("state.checkpoints.pin", move |db| set_pinned(db, id, pinned))
    }

    /// Ends a restore, finished or reverted, with its journal entry. Clears the transition's record.
    ///
    /// # Errors
    /// `Conflict` if the checkpoint was removed.
    pub fn finish_restore(&self, done: Restored) -> Pending<Finished> {
        self.write("state.restore.finish", move |db| finish_restore(db, done))
    }
}

fn add(db: &Db, new: &NewCheckpoint, entry: NewEntry) -> Result<Added> {
    // A change between manifest and row would be in neither.
    if let Some(seen) = &new.work_seen
        && *seen != workflow::part(db)?
    {
        let changed = Error::conflict("the work was changed meanwhile").reason(WORK_CHANGED);
        return Err(CatalogError::Refused(Box::new(changed)));
    }
    let mut outcome = None;
    if let Some(Together::Before(request)) = &new.with {
        outcome = Some(workflow::change(db, request)?.outcome);
    }
    let checkpoint = add_with_parent(db, new, head(db)?.checkpoint, entry)?;
    // Its version is its journal entry's number plus one.
    let mut sequence = checkpoint.version - 1;
    if let Some(Together::After(request)) = &new.with {
        let done = workflow::change(db, request)?;
        sequence = done.sequence.unwrap_or(sequence);
        outcome = Some(done.outcome);
    }
    Ok(Added { checkpoint, outcome, sequence })
}

pub(super) fn add_with_parent(
    db: &Db,
    new: &NewCheckpoint,
    parent: Option<CheckpointId>,
    entry: NewEntry,
) -> Result<Checkpoint> {
    let sequence = journal::append_one(db, entry)?;
    let number = db.sql("record checkpoint", |c| insert(c, new, parent, sequence))?;
    if !new.compact.is_empty() {
        let messages = journal::compact(db, number, &new.compact)?;
        db.sql("record checkpoint", |c| {
            c.prepare_cached("UPDATE checkpoints SET compacted = ? WHERE number = ?")?
                .execute(params![signed(messages), signed(number)])
        })?;
    }
    db.sql("read checkpoint", |c| c.prepare_cached(&select("WHERE number = ?"))?.query_row([signed(number)], read))
}

fn insert(c: &Connection, new: &NewCheckpoint, parent: Option<CheckpointId>, sequence: u64) -> rusqlite::Result<u64> {
    let place = CheckpointType::ALL.iter().position(|kind| *kind == new.kind);
    let (step, step_name, agent) = new.work.shown();
    let number = c
        .prepare_cached(
            "INSERT INTO checkpoints (id, name, description, type, creator, at_ms, parent, pinned, restore_point, journal,
             manifest, files, state_bytes, step, step_name, agent, summary, machine_bytes)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .insert(params![
            new.id.as_bytes(),
            new.name,
            new.description,
            place.map(|place| place as i64),
            new.creator,
            new.at_ms,
            parent.map(|parent| *parent.as_bytes()),
            new.pinned,
            signed(sequence),
            new.manifest.as_bytes(),
            signed(new.files),
            signed(new.state_bytes),
            step,
            step_name,
            agent,
            new.summary,
            signed(new.machine_bytes),
        ])?;
    c.prepare_cached(
        "INSERT INTO head (one, checkpoint, journal) VALUES (1, ?, ?)
         ON CONFLICT (one) DO UPDATE SET checkpoint = excluded.checkpoint, journal = excluded.journal",
    )?
    .execute(params![new.id.as_bytes(), signed(sequence)])?;
    if let Some(exec) = new.under_way {
        // What the execution changes is in no checkpoint, although it began before this one.
        c.prepare_cached("UPDATE head SET journal = min(journal, (SELECT journal - 1 FROM executions WHERE id = ?))")?
            .execute([signed(exec.0)])?;
    }
    Ok(number as u64)
}

fn get(db: &Db, id: CheckpointId) -> Result<Option<Checkpoint>> {
    db.sql("read checkpoint", |c| {
        c.prepare_cached(&select("WHERE id = ?"))?.query_row([id.as_bytes()], read).optional()
    })
}

fn page(db: &Db, before: u64, most: usize) -> Result<Vec<Checkpoint>> {
    db.sql("list checkpoints", |c| {
        let mut statement = c.prepare_cached(&select("WHERE number < ? ORDER BY number DESC LIMIT ?"))?;
        let rows = statement.query_map(params![signed(before), most.min(limits::PAGE_ROWS) as i64], read)?;
        rows.collect()
    })
}

/// All checkpoints, newest first.
pub(super) fn all(db: &Db) -> Result<Vec<Checkpoint>> {
    db.sql("list checkpoints", |c| c.prepare_cached(&select("ORDER BY number DESC"))?.query_map([], read)?.collect())
}

fn count(db: &Db) -> Result<u64> {
    db.sql("count checkpoints", |c| {
        c.prepare_cached("SELECT count(*) FROM checkpoints")?.query_row([], |row| unsigned(row, 0))
    })
}

pub(super) fn head(db: &Db) -> Result<Head> {
    db.sql("read head", read_head)
}

pub(super) fn set_pinned(db: &Db, id: CheckpointId, pinned: bool) -> Result<bool> {
    db.sql("pin checkpoint", |c| {
        let changed = c
            .prepare_cached("UPDATE checkpoints SET pinned = ? WHERE id = ?")?
            .execute(params![pinned, id.as_bytes()])?;
        Ok(changed > 0)
    })
}

fn finish_restore(db: &Db, done: Restored) -> Result<Finished> {
    let Restored { target, safety, actor, options, mounts, mcp, work, entry, at_ms } = done;
    let sequence = journal::append_one(db, entry)?;
    grants::replace(db, &mounts, &mcp)?;
    if target != safety {
        origin::put(db, &origin::get(db)?.after_restore(target))?;
    }
    let (decisions_changed, artifacts_changed) =
        workflow_restore::restore(db, &work, (target, safety), options, (&actor, at_ms))?;
    transition::clear(db)?;
    let found = db.sql("end restore", |c| {
        if target == safety {
            // The restore was reverted: the kernel's position and the target of undo are unchanged.
            let mut there = c.prepare_cached("SELECT count(*) FROM checkpoints WHERE id = ?")?;
            return there.query_row([target.as_bytes()], |row| row.get::<_, i64>(0)).map(|rows| rows as usize);
        }
        c.prepare_cached("INSERT OR REPLACE INTO head (one, checkpoint, undo, journal) VALUES (1, ?, ?, ?)")?
            .execute(params![target.as_bytes(), safety.as_bytes(), signed(sequence)])?;
        c.prepare_cached("UPDATE checkpoints SET restored_at_ms = ? WHERE id = ?")?
            .execute(params![at_ms, target.as_bytes()])
    })?;
    match found {
        0 => Err(CatalogError::Conflict(format!("checkpoint {target} is no longer there"))),
        _ => Ok(Finished { sequence, decisions_changed, artifacts_changed }),
    }
}

fn select(rest: &str) -> String {
    format!(
        "SELECT number, id, name, description, type, creator, at_ms, parent, pinned, restore_point, restored_at_ms, journal,
         manifest, files, state_bytes, step, step_name, agent, summary, compacted, machine_bytes FROM checkpoints {rest}"
    )
}

fn read_head(c: &Connection) -> rusqlite::Result<Head> {
    let optional = |row: &Row<'_>, column| -> rusqlite::Result<Option<CheckpointId>> {
        match row.get_ref(column)? {
            rusqlite::types::ValueRef::Null => Ok(None),
            _ => bytes(row, column).map(CheckpointId::from_bytes).map(Some),
        }
    };
    let found = c
        .prepare_cached("SELECT checkpoint, undo FROM head")?
        .query_row([], |row| Ok(Head { checkpoint: optional(row, 0)?, undo: optional(row, 1)? }))
        .optional()?;
    Ok(found.unwrap_or_default())
}

fn read(row: &Row<'_>) -> rusqlite::Result<Checkpoint> {
    let place: i64 = row.get(4)?;
    let kind = usize::try_from(place).ok().and_then(|place| CheckpointType::ALL.get(place).copied());
    let no_type = || wrong(4, rusqlite::types::Type::Integer, format!("{place} is no type of checkpoint"));
    let parent = match row.get_ref(7)? {
        rusqlite::types::ValueRef::Null => None,
        _ => Some(CheckpointId::from_bytes(bytes(row, 7)?)),
    };
    Ok(Checkpoint {
        number: unsigned(row, 0)?,
        id: CheckpointId::from_bytes(bytes(row, 1)?),
        name: row.get(2)?,
        description: row.get(3)?,
        kind: kind.ok_or_else(no_type)?,
        creator: row.get(5)?,
        at_ms: row.get(6)?,
        parent,
        pinned: row.get(8)?,
        restore_point: row.get(9)?,
        restored_at_ms: row.get(10)?,
        // The journal entry's number plus one, as every version.
        version: unsigned(row, 11)? + 1,
        manifest: Digest::from_bytes(bytes(row, 12)?),
        files: unsigned(row, 13)?,
        state_bytes: unsigned(row, 14)?,
        step: unsigned32(row, 15)?,
        step_name: row.get(16)?,
        agent: row.get(17)?,
        summary: row.get(18)?,
        compacted: unsigned(row, 19)?,
        machine_bytes: unsigned(row, 20)?,
    })
}
