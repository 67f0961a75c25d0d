//! Groups whose kernels are paused after a freeze that failed.

use rusqlite::{Row, params};

use super::error::CatalogError;
use super::handle::{CatalogHandle, Notes, Written};
use super::row::wrong;
use super::thread::Pending;
use crate::core::freeze::on_failure::OnFailure;
use crate::core::ids::GroupId;

impl CatalogHandle {
    /// Sets what a failed freeze of a group does with its kernels.
    ///
    /// # Errors
    /// `NotFound` if the group is gone.
    pub fn set_on_failure(&self, group: GroupId, on_failure: OnFailure, notes: Notes) -> Pending<Written<()>> {
        self.write("catalog.group.set", move |db| {
            let place = OnFailure::ALL.iter().position(|one| *one == on_failure).unwrap_or_default();
            let set = db.sql("set on_failure", |c| {
                c.execute("UPDATE groups SET on_failure = ? WHERE id = ?", params![place as i64, group.as_bytes()])
            })?;
            if set == 0 { Err(CatalogError::NotFound(format!("group {group}"))) } else { notes.write(db, ()) }
        })
    }

    /// Records that the kernels of a group are paused, and ends the intent of its freeze. The first reason stays.
    ///
    /// # Errors
    /// Database errors.
    pub fn pause_group(&self, group: GroupId, why: String, notes: Notes) -> Pending<Written<()>> {
        self.write("catalog.group.pause", move |db| {
            db.sql("pause group", |c| {
                c.execute(
                    "UPDATE groups SET paused = coalesce(paused, ?), intent = NULL WHERE id = ?",
                    params![why, group.as_bytes()],
                )
            })?;
            notes.write(db, ())
        })
    }

    /// Records that the kernels of a group are no longer paused. Idempotent.
    ///
    /// # Errors
    /// Database errors.
    pub fn open_group(&self, group: GroupId, notes: Notes) -> Pending<Written<()>> {
        self.write("catalog.group.open", move |db| {
            db.sql("open group", |c| c.execute("UPDATE groups SET paused = NULL WHERE id = ?", [group.as_bytes()]))?;
            notes.write(db, ())
        })
    }
}

pub(super) fn read_on_failure(row: &Row<'_>, column: usize) -> rusqlite::Result<OnFailure> {
    let place: i64 = row.get(column)?;
    let found = usize::try_from(place).ok().and_then(|place| OnFailure::ALL.get(place).copied());
    found.ok_or_else(|| wrong(column, rusqlite::types::Type::Integer, format!("{place} is no way to end a freeze")))
}
