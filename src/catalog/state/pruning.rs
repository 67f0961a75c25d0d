//! Removal of checkpoints, by retention or on request.
//!
//! The children of a removed checkpoint move to its parent in the same transaction: the rest stays a tree.

use std::collections::HashSet;

use rusqlite::params;

use super::checkpoints::{all, head, set_pinned};
use super::journal::{self, NewEntry};
use super::{Head, StateHandle, transition};
use crate::catalog::error::CatalogError;
use crate::catalog::row::signed;
use crate::catalog::sqlite::{Db, Result};
use crate::catalog::thread::Pending;
use crate::core::checkpoint::Checkpoint;
use crate::core::ids::CheckpointId;
use crate::core::retention::{Standing, Use};

/// Selects the checkpoints to remove.
pub type Selection = Box<dyn FnOnce(&Standing) -> Vec<CheckpointId> + Send>;

impl StateHandle {
    /// Every checkpoint, and which of them the kernel needs: where it is, what undo and a transition under way need.
    ///
    /// # Errors
    /// Database errors.
    pub fn standing(&self) -> Pending<Standing> {
        self.read(standing)
    }

    /// Removes the checkpoints selected by `choose` and returns them. `choose` sees all checkpoints as of this
    /// transaction; those that the kernel needs stay in any case.
    ///
    /// # Errors
    /// Database errors; nothing is removed then.
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

    /// Removes one checkpoint, with a journal entry; returns that entry's number.
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
            // The removal does not change the kernel's state.
            db.sql("remove checkpoint", |c| {
                c.prepare_cached("UPDATE head SET journal = ?1 WHERE journal = ?1 - 1")?.execute([signed(sequence)])
            })?;
            Ok(sequence)
        })
    }
}

impl StateHandle {
    /// Removes a checkpoint that must not have been taken: the kernel's position is again that before it. Idempotent.
    /// Returns whether it was removed: one that a later restore needs stays, unpinned.
    pub fn withdraw_checkpoint(&self, id: CheckpointId) -> Pending<bool> {
        self.write("state.checkpoints.withdraw", move |db| {
            let is_used = transition::get(db)?.is_some_and(|record| record.transition.checkpoints().contains(&id));
            if is_used || head(db)?.undo == Some(id) {
                set_pinned(db, id, false)?;
                return Ok(false);
            }
            let Some(withdrawn) = all(db)?.into_iter().find(|one| one.id == id) else { return Ok(false) };
            db.sql("withdraw checkpoint", |c| {
                c.prepare_cached(
                    "UPDATE head SET checkpoint = ?2, journal = coalesce((SELECT journal FROM checkpoints WHERE id = ?2), 0)
                     WHERE checkpoint = ?1",
                )?
                .execute(params![id.as_bytes(), withdrawn.parent.map(|parent| *parent.as_bytes())])
            })?;
            forget(db, id)?;
            Ok(true)
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
