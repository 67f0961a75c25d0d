//! Checkpoints that go: by the rules of retention, or because somebody asked for it.
//!
//! What goes hands its children to its own parent, in the same transaction: so the tree of those that stay stays a tree.

use std::collections::HashSet;

use rusqlite::params;

use super::checkpoints::{all, head};
use super::journal::{self, NewEntry};
use super::{Head, StateHandle, transition};
use crate::catalog::error::CatalogError;
use crate::catalog::row::{signed, unsigned};
use crate::catalog::sqlite::{Db, Result};
use crate::catalog::thread::Pending;
use crate::core::checkpoint::Checkpoint;
use crate::core::ids::CheckpointId;
use crate::core::retention::{Standing, Use};

/// Says which checkpoints go.
pub type Selection = Box<dyn FnOnce(&Standing) -> Vec<CheckpointId> + Send>;

impl StateHandle {
    /// Every checkpoint, and which of them the kernel needs: where it is, what undo and a transition under way need.
    ///
    /// # Errors
    /// The database's.
    pub fn standing(&self) -> Pending<Standing> {
        self.read(standing)
    }

    /// How many checkpoints there are that ryokan took by itself and nobody pinned.
    ///
    /// # Errors
    /// The database's.
    pub fn automatic_checkpoints(&self) -> Pending<u64> {
        self.read(|db| {
            db.sql("count checkpoints", |c| {
                c.prepare_cached("SELECT count(*) FROM checkpoints WHERE type <> 1 AND pinned = 0")?
                    .query_row([], |row| unsigned(row, 0))
            })
        })
    }

    /// Removes the checkpoints that `choose` names, given all as they are in this very transaction; gives them. What the kernel
    /// needs stays, whatever `choose` says.
    ///
    /// # Errors
    /// The database's: then all are there.
    pub fn prune_checkpoints(&self, choose: Selection) -> Pending<Vec<Checkpoint>> {
        self.write("state.checkpoints.prune", move |db| {
            let standing = standing(db)?;
            let mut chosen: HashSet<CheckpointId> = choose(&standing).into_iter().collect();
            for (needed, _) in &standing.needed {
                chosen.remove(needed);
            }
            let gone = standing.checkpoints.into_iter().filter(|one| chosen.contains(&one.id)).collect::<Vec<_>>();
            gone.iter().try_for_each(|one| forget(db, one.id))?;
            Ok(gone)
        })
    }

    /// Removes one checkpoint, with its journal entry; gives that one's number.
    ///
    /// # Errors
    /// `NotFound`; `Conflict` if the kernel needs it.
    pub fn remove_checkpoint(&self, id: CheckpointId, entry: NewEntry) -> Pending<u64> {
        self.write("state.checkpoints.remove", move |db| {
            let standing = standing(db)?;
            if let Some((_, why)) = standing.needed.iter().find(|(needed, _)| *needed == id) {
                let why = match why {
                    Use::Head => "the kernel is at it",
                    Use::Undo => "undo goes back to it",
                    Use::Restore | Use::Reading => "a transition that has begun needs it",
                };
                return Err(CatalogError::Conflict(format!("checkpoint {id} cannot go: {why}")));
            }
            if !standing.checkpoints.iter().any(|one| one.id == id) {
                return Err(CatalogError::NotFound(format!("checkpoint {id}")));
            }
            forget(db, id)?;
            let sequence = journal::append_one(db, entry)?;
            // It changes nothing of what the kernel is.
            db.sql("remove checkpoint", |c| {
                c.prepare_cached("UPDATE head SET journal = ?1 WHERE journal = ?1 - 1")?.execute([signed(sequence)])
            })?;
            Ok(sequence)
        })
    }
}

fn standing(db: &Db) -> Result<Standing> {
    let Head { checkpoint, undo } = head(db)?;
    let mut needed: Vec<(CheckpointId, Use)> = Vec::new();
    needed.extend(checkpoint.map(|id| (id, Use::Head)));
    needed.extend(undo.map(|id| (id, Use::Undo)));
    let under_way = transition::get(db)?.map(|record| record.transition.checkpoints());
    needed.extend(under_way.into_iter().flatten().map(|id| (id, Use::Restore)));
    Ok(Standing { checkpoints: all(db)?, needed })
}

fn forget(db: &Db, id: CheckpointId) -> Result<()> {
    db.sql("remove checkpoint", |c| {
        c.prepare_cached(
            "UPDATE checkpoints SET parent = (SELECT parent FROM checkpoints WHERE id = ?1) WHERE parent = ?1",
        )?
        .execute([id.as_bytes()])?;
        c.prepare_cached("DELETE FROM checkpoints WHERE id = ?")?.execute(params![id.as_bytes()]).map(drop)
    })
}
