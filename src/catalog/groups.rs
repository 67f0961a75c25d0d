//! Groups, their freezes, and what is under way in them.

use rusqlite::{OptionalExtension as _, Row, params};

use super::error::CatalogError;
use super::group_pauses::read_on_failure;
use super::handle::{CatalogHandle, Notes, Written};
use super::row::{bytes, json, signed, to_json, unsigned, wrong};
use super::sqlite::{Db, Result};
use super::thread::Pending;
use super::{freeze_pins, handovers};
use crate::core::checkpoint::CheckpointType;
use crate::core::freeze::gate::Pairing;
use crate::core::freeze::{Freeze, Group, Intent, Member, SchemaRevision, Target};
use crate::core::ids::{CheckpointId, Digest, FreezeId, GroupId, KernelId, PublicKey, Signature};
use crate::core::limits;
use crate::core::signature::Signed;

/// A freeze to record; its number is assigned.
#[derive(Debug, Clone)]
pub struct NewFreeze {
    /// The freeze, with number 0.
    pub freeze: Freeze,
    /// Its group.
    pub group: GroupId,
    /// The checkpoints that it needs.
    pub checkpoints: Vec<(KernelId, CheckpointId)>,
    /// Its schema revisions and commits.
    pub pairings: Vec<Pairing>,
}

impl CatalogHandle {
    /// Creates a group without members.
    ///
    /// # Errors
    /// `Exists`; `Limit` beyond [`limits::GROUPS`].
    pub fn create_group(&self, id: GroupId, uid: u32, name: String, at_ms: i64, notes: Notes) -> Pending<Written<()>> {
        self.write("catalog.group.create", move |db| {
            create(db, (id, uid, &name, at_ms))?;
            notes.write(db, ())
        })
    }

    /// Deletes a group with its freezes; returns the checkpoints that these needed, and records that their pins are unneeded.
    ///
    /// # Errors
    /// `Conflict` while an operation is recorded, unless it is abandoned.
    pub fn remove_group(
        &self,
        id: GroupId,
        abandon: bool,
        notes: Notes,
    ) -> Pending<Written<Vec<(KernelId, CheckpointId)>>> {
        self.write("catalog.group.remove", move |db| {
            if !abandon && intent(db, id)?.is_some() {
                return Err(CatalogError::Conflict("an operation of the group has not ended".into()));
            }
            let needed = db.sql("list checkpoints", |c| {
                c.prepare(
                    "SELECT kernel, checkpoint FROM freeze_checkpoints JOIN freezes ON freezes.id = freeze WHERE group_id = ?",
                )?
                .query_map([id.as_bytes()], |row| {
                    Ok((KernelId::from_bytes(bytes(row, 0)?), CheckpointId::from_bytes(bytes(row, 1)?)))
                })?
                .collect::<rusqlite::Result<Vec<_>>>()
            })?;
            db.sql("remove group", |c| c.execute("DELETE FROM groups WHERE id = ?", [id.as_bytes()]))?;
            freeze_pins::add(db, &needed)?;
            notes.write(db, needed)
        })
    }

    /// Adds a member.
    ///
    /// # Errors
    /// `Exists` if its name is taken; `Limit` beyond [`limits::GROUP_MEMBERS`].
    pub fn add_member(&self, group: GroupId, member: Member, notes: Notes) -> Pending<Written<()>> {
        self.write("catalog.group.add", move |db| {
            insert_member(db, group, &member)?;
            notes.write(db, ())
        })
    }

    /// Removes a member; returns whether it existed.
    ///
    /// # Errors
    /// `Conflict` while an operation is recorded.
    pub fn remove_member(&self, group: GroupId, name: String, notes: Notes) -> Pending<Written<bool>> {
        self.write("catalog.group.drop", move |db| {
            if intent(db, group)?.is_some() {
                return Err(CatalogError::Conflict("an operation of the group has not ended".into()));
            }
            let gone = db.sql("remove member", |c| {
                c.execute("DELETE FROM group_members WHERE group_id = ? AND name = ?", params![group.as_bytes(), name])
            })?;
            notes.write(db, gone > 0)
        })
    }

    /// Every group, or those of one user, by owner and name.
    ///
    /// # Errors
    /// Database errors.
    pub fn groups(&self, uid: Option<u32>) -> Pending<Vec<Group>> {
        self.read(move |db| {
            let mut groups = db.sql("list groups", |c| {
                c.prepare_cached(
                    "SELECT id, uid, name, created_at_ms, head, undo, intent IS NOT NULL,
                     (SELECT count(*) FROM freezes WHERE group_id = groups.id), on_failure, paused
                     FROM groups WHERE ?1 IS NULL OR uid = ?1 ORDER BY uid, name",
                )?
                .query_map([uid], read_group)?
                .collect::<rusqlite::Result<Vec<Group>>>()
            })?;
            for group in &mut groups {
                group.members = members(db, group.id)?;
            }
            Ok(groups)
        })
    }

    /// The name of a group that has this kernel as a member.
    ///
    /// # Errors
    /// Database errors.
    pub fn group_of_kernel(&self, kernel: KernelId) -> Pending<Option<String>> {
        self.read(move |db| {
            db.sql("find group", |c| {
                c.prepare_cached(
                    "SELECT groups.name FROM group_members JOIN groups ON groups.id = group_id WHERE kernel = ?",
                )?
                .query_row([kernel.as_bytes()], |row| row.get(0))
                .optional()
            })
        })
    }

    /// The group and the number of a freeze that needs this checkpoint of a kernel; an imported kernel has the ids of
    /// checkpoints of another one.
    ///
    /// # Errors
    /// Database errors.
    pub fn freeze_of_checkpoint(&self, kernel: KernelId, checkpoint: CheckpointId) -> Pending<Option<(String, u64)>> {
        self.read(move |db| {
            db.sql("find freeze", |c| {
                c.prepare_cached(
                    "SELECT groups.name, number FROM freeze_checkpoints JOIN freezes ON freezes.id = freeze
                     JOIN groups ON groups.id = group_id WHERE checkpoint = ? AND kernel = ?",
                )?
                .query_row(params![checkpoint.as_bytes(), kernel.as_bytes()], |row| {
                    Ok((row.get(0)?, unsigned(row, 1)?))
                })
                .optional()
            })
        })
    }

    /// The freezes of a group, newest first.
    ///
    /// # Errors
    /// Database errors.
    pub fn freezes(&self, group: GroupId) -> Pending<Vec<Freeze>> {
        self.read(move |db| {
            db.sql("list freezes", |c| {
                c.prepare_cached(&format!("{FREEZE} WHERE group_id = ? ORDER BY number DESC"))?
                    .query_map([group.as_bytes()], read_freeze)?
                    .collect()
            })
        })
    }

    /// The freezes that need a checkpoint of this kernel, oldest first: the checkpoint, and the group's name and id.
    ///
    /// # Errors
    /// Database errors.
    pub fn freezes_of_kernel(&self, kernel: KernelId) -> Pending<Vec<(CheckpointId, String, GroupId, FreezeId)>> {
        self.read(move |db| {
            db.sql("list freezes", |c| {
                c.prepare_cached(
                    "SELECT checkpoint, groups.name, groups.id, freeze FROM freeze_checkpoints
                     JOIN freezes ON freezes.id = freeze JOIN groups ON groups.id = group_id
                     WHERE kernel = ? ORDER BY freezes.at_ms",
                )?
                .query_map([kernel.as_bytes()], |row| {
                    let (group, freeze) = (GroupId::from_bytes(bytes(row, 2)?), FreezeId::from_bytes(bytes(row, 3)?));
                    Ok((CheckpointId::from_bytes(bytes(row, 0)?), row.get(1)?, group, freeze))
                })?
                .collect()
            })
        })
    }

    /// Every freeze of every group: its group's name, and its manifest.
    ///
    /// # Errors
    /// Database errors.
    pub fn freeze_roots(&self) -> Pending<Vec<(String, u64, Digest)>> {
        self.read(|db| {
            db.sql("list freezes", |c| {
                c.prepare_cached("SELECT name, number, manifest FROM freezes JOIN groups ON groups.id = group_id")?
                    .query_map([], |row| Ok((row.get(0)?, unsigned(row, 1)?, Digest::from_bytes(bytes(row, 2)?))))?
                    .collect()
            })
        })
    }

    /// The schema revisions and commits of a group's freezes, oldest first; also of those that were removed.
    ///
    /// # Errors
    /// Database errors.
    pub fn pairings(&self, group: GroupId) -> Pending<Vec<Pairing>> {
        self.read(move |db| {
            db.sql("list schema revisions", |c| {
                c.prepare_cached(
                    "SELECT database, user_version, schema, repository, commit_id FROM
                     (SELECT number, database, user_version, schema, repository, commit_id FROM freeze_schemas
                      JOIN freezes ON freezes.id = freeze WHERE group_id = ?1
                      UNION ALL SELECT number, database, user_version, schema, repository, commit_id
                      FROM removed_schemas WHERE group_id = ?1) ORDER BY number",
                )?
                .query_map([group.as_bytes()], read_pairing)?
                .collect()
            })
        })
    }

    /// Records the intent of an operation of a group.
    ///
    /// # Errors
    /// `Conflict` if one is recorded, or the group is gone.
    pub fn begin_intent(&self, group: GroupId, new: Intent) -> Pending<()> {
        self.write("catalog.group.intent", move |db| {
            let text = to_json(db.path(), "an intent", &new)?;
            let set = db.sql("record intent", |c| {
                c.execute(
                    "UPDATE groups SET intent = ? WHERE id = ? AND intent IS NULL",
                    params![text, group.as_bytes()],
                )
            })?;
            if set == 0 {
                Err(CatalogError::Conflict("an operation of the group has not ended".into()))
            } else {
                Ok(())
            }
        })
    }

    /// Updates the recorded intent.
    ///
    /// # Errors
    /// `Conflict` if none is recorded.
    pub fn update_intent(&self, group: GroupId, new: Intent) -> Pending<()> {
        self.write("catalog.group.progress", move |db| {
            let text = to_json(db.path(), "an intent", &new)?;
            let set = db.sql("record intent", |c| {
                c.execute(
                    "UPDATE groups SET intent = ? WHERE id = ? AND intent IS NOT NULL",
                    params![text, group.as_bytes()],
                )
            })?;
            if set == 0 { Err(CatalogError::Conflict("no operation of the group is recorded".into())) } else { Ok(()) }
        })
    }

    /// Deletes the intent. Idempotent.
    ///
    /// # Errors
    /// Database errors.
    pub fn clear_intent(&self, group: GroupId) -> Pending<()> {
        self.write("catalog.group.clear", move |db| clear(db, group))
    }

    /// The intents of all groups.
    ///
    /// # Errors
    /// Database errors.
    pub fn intents(&self) -> Pending<Vec<(GroupId, Intent)>> {
        self.read(|db| {
            db.sql("list intents", |c| {
                c.prepare_cached("SELECT id, intent FROM groups WHERE intent IS NOT NULL")?
                    .query_map([], |row| Ok((GroupId::from_bytes(bytes(row, 0)?), json(row, 1)?)))?
                    .collect()
            })
        })
    }

    /// Makes a freeze visible, and ends its intent.
    ///
    /// # Errors
    /// `Limit`, `Conflict` if the group is gone.
    pub fn seal_freeze(&self, new: NewFreeze, notes: Notes) -> Pending<Written<Freeze>> {
        self.write("catalog.freeze.seal", move |db| {
            let freeze = insert(db, &new)?;
            notes.write(db, freeze)
        })
    }

    /// Records that a restore holds, and ends its intent.
    ///
    /// # Errors
    /// `Conflict` if the freeze is gone.
    pub fn commit_group_restore(
        &self,
        group: GroupId,
        target: FreezeId,
        safety: FreezeId,
        at_ms: i64,
        notes: Notes,
    ) -> Pending<Written<()>> {
        self.write("catalog.group.restored", move |db| {
            let found = db.sql("record restore", |c| {
                c.execute("UPDATE freezes SET restored_at_ms = ? WHERE id = ?", params![at_ms, target.as_bytes()])
            })?;
            if found == 0 {
                return Err(CatalogError::Conflict(format!("freeze {target} is no longer there")));
            }
            db.sql("record restore", |c| {
                c.execute(
                    "UPDATE groups SET head = ?, undo = ?, intent = NULL WHERE id = ?",
                    params![target.as_bytes(), safety.as_bytes(), group.as_bytes()],
                )
            })?;
            notes.write(db, ())
        })
    }
}

pub(super) fn create(db: &Db, (id, uid, name, at_ms): (GroupId, u32, &str, i64)) -> Result<()> {
    let (count, taken): (i64, bool) = db.sql("count groups", |c| {
        c.query_row(
            "SELECT count(*), coalesce(max(name = ?), 0) FROM groups WHERE uid = ?",
            params![name, uid],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
    })?;
    if taken {
        return Err(CatalogError::Exists(format!("a group {name}")));
    }
    if count >= signed(limits::GROUPS) {
        return Err(CatalogError::Limit { what: "the number of groups", most: limits::GROUPS });
    }
    db.sql("create group", |c| {
        c.execute(
            "INSERT INTO groups (id, uid, name, created_at_ms) VALUES (?, ?, ?, ?)",
            params![id.as_bytes(), uid, name, at_ms],
        )
    })?;
    Ok(())
}

pub(super) fn insert_member(db: &Db, group: GroupId, member: &Member) -> Result<()> {
    let there = members(db, group)?;
    if there.iter().any(|one| one.name == member.name) {
        return Err(CatalogError::Exists(format!("a member {}", member.name)));
    }
    if there.len() >= limits::GROUP_MEMBERS {
        return Err(CatalogError::Limit { what: "the number of members", most: limits::GROUP_MEMBERS as u64 });
    }
    let target = to_json(db.path(), "a member", &member.target)?;
    let kernel = match &member.target {
        Target::Kernel { id } if handovers::is_moving(db, *id)? => {
            return Err(CatalogError::Conflict("the kernel has an unfinished handover".into()));
        }
        Target::Kernel { id } => Some(*id.as_bytes()),
        Target::Repository { .. }
        | Target::Database { .. }
        | Target::Directory { .. }
        | Target::Command { .. }
        | Target::Postgres { .. }
        | Target::Server { .. } => None,
    };
    db.sql("add member", |c| {
        c.execute(
            "INSERT INTO group_members (group_id, name, target, kernel) VALUES (?, ?, ?, ?)",
            params![group.as_bytes(), member.name, target, kernel],
        )
    })?;
    Ok(())
}

const FREEZE: &str =
    "SELECT id, number, message, type, creator, at_ms, restored_at_ms, manifest, signer, signature FROM freezes";

pub(super) fn insert(db: &Db, new: &NewFreeze) -> Result<Freeze> {
    let NewFreeze { freeze, group, checkpoints, pairings } = new;
    let (count, last) = db.sql("count freezes", |c| {
        c.query_row(
            "SELECT count(*), max(coalesce(max(number), 0), coalesce((SELECT removed FROM groups WHERE id = ?1), 0))
             FROM freezes WHERE group_id = ?1",
            [group.as_bytes()],
            |row| Ok((unsigned(row, 0)?, unsigned(row, 1)?)),
        )
    })?;
    if count >= limits::GROUP_FREEZES {
        return Err(CatalogError::Limit { what: "the number of freezes", most: limits::GROUP_FREEZES });
    }
    let place = CheckpointType::ALL.iter().position(|kind| *kind == freeze.kind).unwrap_or_default();
    let id = freeze.id.as_bytes();
    db.sql("seal freeze", |c| {
        c.execute(
            "INSERT INTO freezes (id, group_id, number, message, type, creator, at_ms, manifest, signer, signature)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                id,
                group.as_bytes(),
                signed(last + 1),
                freeze.message,
                place as i64,
                freeze.creator,
                freeze.at_ms,
                freeze.manifest.as_bytes(),
                freeze.signed.map(|signed| *signed.key.as_bytes()),
                freeze.signed.map(|signed| *signed.signature.as_bytes()),
            ],
        )?;
        for (kernel, checkpoint) in checkpoints {
            c.execute(
                "INSERT INTO freeze_checkpoints (freeze, kernel, checkpoint) VALUES (?, ?, ?)",
                params![id, kernel.as_bytes(), checkpoint.as_bytes()],
            )?;
        }
        for pair in pairings {
            c.execute(
                "INSERT INTO freeze_schemas (freeze, database, user_version, schema, repository, commit_id)
                 VALUES (?, ?, ?, ?, ?, ?)",
                params![
                    id,
                    pair.database,
                    pair.revision.user_version,
                    pair.revision.schema,
                    pair.repository,
                    pair.commit.as_str()
                ],
            )?;
        }
        c.execute("UPDATE groups SET head = ?, intent = NULL WHERE id = ?", params![id, group.as_bytes()])
    })?;
    freeze_pins::remove(db, checkpoints)?;
    Ok(Freeze { number: last + 1, ..freeze.clone() })
}

pub(super) fn intent(db: &Db, group: GroupId) -> Result<Option<String>> {
    let found: Option<Option<String>> = db.sql("read intent", |c| {
        c.query_row("SELECT intent FROM groups WHERE id = ?", [group.as_bytes()], |row| row.get(0)).optional()
    })?;
    found.ok_or_else(|| CatalogError::NotFound(format!("group {group}")))
}

fn clear(db: &Db, group: GroupId) -> Result<()> {
    db.sql("clear intent", |c| c.execute("UPDATE groups SET intent = NULL WHERE id = ?", [group.as_bytes()]).map(drop))
}

fn members(db: &Db, group: GroupId) -> Result<Vec<Member>> {
    db.sql("list members", |c| {
        c.prepare_cached("SELECT name, target FROM group_members WHERE group_id = ? ORDER BY name")?
            .query_map([group.as_bytes()], |row| Ok(Member { name: row.get(0)?, target: json(row, 1)? }))?
            .collect()
    })
}

fn optional(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<FreezeId>> {
    match row.get_ref(column)? {
        rusqlite::types::ValueRef::Null => Ok(None),
        _ => bytes(row, column).map(FreezeId::from_bytes).map(Some),
    }
}

fn read_group(row: &Row<'_>) -> rusqlite::Result<Group> {
    Ok(Group {
        id: GroupId::from_bytes(bytes(row, 0)?),
        uid: row.get(1)?,
        name: row.get(2)?,
        members: Vec::new(),
        created_at_ms: row.get(3)?,
        head: optional(row, 4)?,
        undo: optional(row, 5)?,
        unfinished: row.get(6)?,
        freezes: unsigned(row, 7)?,
        on_failure: read_on_failure(row, 8)?,
        paused: row.get(9)?,
    })
}

fn read_freeze(row: &Row<'_>) -> rusqlite::Result<Freeze> {
    let place: i64 = row.get(3)?;
    let kind = usize::try_from(place).ok().and_then(|place| CheckpointType::ALL.get(place).copied());
    Ok(Freeze {
        id: FreezeId::from_bytes(bytes(row, 0)?),
        number: unsigned(row, 1)?,
        message: row.get(2)?,
        kind: kind.ok_or_else(|| wrong(3, rusqlite::types::Type::Integer, format!("{place} is no type of freeze")))?,
        creator: row.get(4)?,
        at_ms: row.get(5)?,
        restored_at_ms: row.get(6)?,
        manifest: Digest::from_bytes(bytes(row, 7)?),
        signed: match row.get_ref(8)? {
            rusqlite::types::ValueRef::Null => None,
            _ => Some(Signed {
                key: PublicKey::from_bytes(bytes(row, 8)?),
                signature: Signature::from_bytes(bytes(row, 9)?),
            }),
        },
    })
}

fn read_pairing(row: &Row<'_>) -> rusqlite::Result<Pairing> {
    let commit: String = row.get(4)?;
    let no_commit =
        |error: crate::core::freeze::refs::NotACommit| wrong(4, rusqlite::types::Type::Text, error.to_string());
    Ok(Pairing {
        database: row.get(0)?,
        revision: SchemaRevision { user_version: row.get(1)?, schema: row.get(2)? },
        repository: row.get(3)?,
        commit: commit.parse().map_err(no_commit)?,
    })
}
