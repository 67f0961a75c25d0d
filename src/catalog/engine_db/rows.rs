//! Single rows of `engine.db`.

use std::collections::HashMap;

use rusqlite::{Row, params};

use super::{EngineInfo, Entry, EntryHead, JobRecord};
use crate::catalog::row::{bytes, signed, unsigned};
use crate::catalog::sqlite::{Db, Result};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::core::missed::MissedEntry;

/// An entry to write, and what it replaces.
pub(super) struct Due<'a> {
    pub(super) entry: &'a Entry,
    pub(super) digest: Digest,
    pub(super) before: Option<Before>,
}

pub(super) struct Before {
    pub(super) id: i64,
    pub(super) size: u64,
    pub(super) chunked: bool,
}

pub(super) fn digest(body: &[u8]) -> Digest {
    Digest::from_bytes(*blake3::hash(body).as_bytes())
}

/// Whether two lists are equal up to order.
pub(super) fn same<T: PartialEq + Clone>(old: &[T], new: &[T], key: impl Fn(&T) -> &String) -> bool {
    let mut sorted = new.to_vec();
    sorted.sort_by(|a, b| key(a).cmp(key(b)));
    old == sorted
}

pub(super) fn read_head(row: &Row<'_>) -> rusqlite::Result<(i64, EntryHead)> {
    let head = EntryHead {
        key: row.get(1)?,
        meta_json: row.get(2)?,
        digest: Digest::from_bytes(bytes(row, 3)?),
        size: unsigned(row, 4)?,
        exec: unsigned(row, 5)?,
    };
    Ok((row.get(0)?, head))
}

pub(super) fn put_info(db: &Db, info: &EngineInfo) -> Result<()> {
    db.sql("write engine", |c| {
        c.prepare_cached("INSERT OR REPLACE INTO engine (one, name, version, format) VALUES (1, ?, ?, ?)")?
            .execute(params![info.name, info.version, info.format])
            .map(drop)
    })
}

pub(super) fn put(db: &Db, due: &Due<'_>, exec: u64) -> Result<()> {
    let Due { entry, digest, before } = due;
    let chunked = entry.body.len() > limits::FRAME_TAIL_BYTES;
    let body = (!chunked).then_some(entry.body.as_slice());
    db.sql("store entry", |c| {
        let id: i64 = match before {
            Some(before) => {
                c.prepare_cached("UPDATE entries SET meta = ?, digest = ?, size = ?, exec = ?, body = ? WHERE id = ?")?
                    .execute(params![
                        entry.meta_json,
                        digest.as_bytes(),
                        signed(entry.body.len() as u64),
                        signed(exec),
                        body,
                        before.id
                    ])?;
                before.id
            }
            None => c
                .prepare_cached("INSERT INTO entries (key, meta, digest, size, exec, body) VALUES (?, ?, ?, ?, ?, ?)")?
                .insert(params![
                    entry.key,
                    entry.meta_json,
                    digest.as_bytes(),
                    signed(entry.body.len() as u64),
                    signed(exec),
                    body
                ])?,
        };
        if before.as_ref().is_some_and(|before| before.chunked) {
            c.prepare_cached("DELETE FROM chunks WHERE entry = ?")?.execute([id])?;
        }
        if chunked {
            let mut insert = c.prepare_cached("INSERT INTO chunks (entry, part, body) VALUES (?, ?, ?)")?;
            for (part, chunk) in entry.body.chunks(limits::FRAME_TAIL_BYTES).enumerate() {
                insert.execute(params![id, part as i64, chunk])?;
            }
        }
        Ok(())
    })
}

pub(super) fn delete(db: &Db, ids: &HashMap<i64, u64>) -> Result<()> {
    db.sql("remove entry", |c| {
        // The foreign key deletes its chunks.
        let mut delete = c.prepare_cached("DELETE FROM entries WHERE id = ?")?;
        ids.keys().try_for_each(|id| delete.execute([id]).map(drop))
    })
}

pub(super) fn replace_missed(db: &Db, missed: &[MissedEntry]) -> Result<()> {
    db.sql("replace missed", |c| {
        c.prepare_cached("DELETE FROM missed")?.execute([])?;
        let mut insert = c.prepare_cached("INSERT OR REPLACE INTO missed (key, type, reason) VALUES (?, ?, ?)")?;
        missed.iter().try_for_each(|m| insert.execute(params![m.key, m.type_name, m.reason]).map(drop))
    })
}

pub(super) fn replace_jobs(db: &Db, jobs: &[JobRecord]) -> Result<()> {
    db.sql("replace jobs", |c| {
        c.prepare_cached("DELETE FROM jobs")?.execute([])?;
        let mut insert = c.prepare_cached("INSERT OR REPLACE INTO jobs (id, command) VALUES (?, ?)")?;
        jobs.iter().try_for_each(|job| insert.execute(params![job.id, job.command]).map(drop))
    })
}
