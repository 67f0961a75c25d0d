//! Groups that come in a file: invisible operations of them are recorded first, then they become whole at once.

use rusqlite::params;

use super::error::CatalogError;
use super::groups::{NewFreeze, create, insert, insert_member, intent};
use super::handle::{CatalogHandle, Notes, Written};
use super::row::to_json;
use super::sqlite::{Db, Result};
use super::thread::Pending;
use crate::core::freeze::{Freeze, Intent, Member, Target};
use crate::core::ids::{GroupId, KernelId};

impl CatalogHandle {
    /// Creates a group without members, with the intent of its import.
    ///
    /// # Errors
    /// `Exists`; `Limit`.
    pub fn begin_group_import(&self, id: GroupId, (uid, name): (u32, String), at_ms: i64, new: Intent) -> Pending<()> {
        self.write("catalog.group.arrive", move |db| {
            create(db, (id, uid, &name, at_ms))?;
            let text = to_json(db.path(), "an intent", &new)?;
            db.sql("record intent", |c| {
                c.execute("UPDATE groups SET intent = ? WHERE id = ?", params![text, id.as_bytes()]).map(drop)
            })
        })
    }

    /// Adds members and the freeze of an imported group, and records `next` as its intent. Its members are at no freeze.
    ///
    /// # Errors
    /// `Conflict` if no import of it is recorded, or a kernel of it is gone.
    pub fn adopt_group(
        &self,
        members: Vec<Member>,
        new: NewFreeze,
        next: Option<Intent>,
        notes: Notes,
    ) -> Pending<Written<Freeze>> {
        self.write("catalog.group.adopt", move |db| {
            let group = new.group;
            if intent(db, group)?.is_none() {
                return Err(CatalogError::Conflict("no import of the group is recorded".into()));
            }
            for member in &members {
                if let Target::Kernel { id } = &member.target
                    && !has_kernel(db, *id)?
                {
                    return Err(CatalogError::Conflict(format!("kernel {id} of the group is gone")));
                }
                insert_member(db, group, member)?;
            }
            let freeze = insert(db, &new)?;
            let next = next.map(|next| to_json(db.path(), "an intent", &next)).transpose()?;
            db.sql("clear head", |c| {
                c.execute("UPDATE groups SET head = NULL, intent = ? WHERE id = ?", params![next, group.as_bytes()])
                    .map(drop)
            })?;
            notes.write(db, freeze)
        })
    }
}

fn has_kernel(db: &Db, id: KernelId) -> Result<bool> {
    db.sql("find kernel", |c| {
        c.query_row("SELECT EXISTS (SELECT 1 FROM kernels WHERE id = ?)", [id.as_bytes()], |row| row.get(0))
    })
}
