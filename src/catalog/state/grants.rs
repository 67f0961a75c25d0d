//! Resources granted to a kernel: mounts, MCP servers, blobs, consents.

use rusqlite::{OptionalExtension as _, params};

use crate::catalog::error::CatalogError;
use crate::catalog::row::{bytes, json, signed, to_json, unsigned};
use crate::catalog::sqlite::{Db, Result};
use crate::core::ids::Digest;
use crate::core::info::{GivenMount, McpTransport, MountInfo};
use crate::core::limits;

pub(super) fn put_mount(db: &Db, given: &GivenMount, made: u32) -> Result<()> {
    let MountInfo { path, source, writable } = &given.mount;
    db.sql("record mount", |c| {
        c.prepare_cached("INSERT OR REPLACE INTO mounts (path, source, writable, real, made) VALUES (?, ?, ?, ?, ?)")?
            .execute(params![path, source, writable, given.real, made])
    })?;
    within(db, "SELECT count(*) FROM mounts", "the number of mounts", limits::MOUNTS)
}

pub(super) fn remove_mount(db: &Db, path: &str) -> Result<u32> {
    db.sql("forget mount", |c| {
        let mut delete = c.prepare_cached("DELETE FROM mounts WHERE path = ? RETURNING made")?;
        Ok(delete.query_row([path], |row| row.get(0)).optional()?.unwrap_or(0))
    })
}

pub(super) fn mounts(db: &Db) -> Result<Vec<GivenMount>> {
    db.sql("list mounts", |c| {
        c.prepare_cached("SELECT path, source, writable, real FROM mounts ORDER BY path")?
            .query_map([], |row| {
                let mount = MountInfo { path: row.get(0)?, source: row.get(1)?, writable: row.get(2)? };
                Ok(GivenMount { mount, real: row.get(3)? })
            })?
            .collect()
    })
}

pub(super) fn put_mcp(db: &Db, name: &str, transport: &McpTransport) -> Result<()> {
    let transport = to_json(db.path(), "an MCP server", transport)?;
    db.sql("record MCP server", |c| {
        c.prepare_cached("INSERT OR REPLACE INTO mcp_servers (name, transport) VALUES (?, ?)")?
            .execute(params![name, transport])
    })?;
    within(db, "SELECT count(*) FROM mcp_servers", "the number of MCP servers", limits::MCP_SERVERS)
}

pub(super) fn remove_mcp(db: &Db, name: &str) -> Result<bool> {
    db.sql("forget MCP server", |c| {
        c.prepare_cached("DELETE FROM mcp_servers WHERE name = ?")?.execute([name]).map(|rows| rows > 0)
    })
}

pub(super) fn mcp_servers(db: &Db) -> Result<Vec<(String, McpTransport)>> {
    db.sql("list MCP servers", |c| {
        c.prepare_cached("SELECT name, transport FROM mcp_servers ORDER BY name")?
            .query_map([], |row| Ok((row.get(0)?, json(row, 1)?)))?
            .collect()
    })
}

/// Replaces all mounts and servers. An unchanged mount keeps what is recorded of its mount point.
pub(super) fn replace(db: &Db, wanted: &[GivenMount], mcp: &[(String, McpTransport)]) -> Result<()> {
    let present = mounts(db)?;
    for gone in present.iter().filter(|mount| !wanted.contains(mount)) {
        remove_mount(db, &gone.mount.path)?;
    }
    wanted.iter().filter(|mount| !present.contains(mount)).try_for_each(|mount| put_mount(db, mount, 0))?;
    db.sql("clear MCP servers", |c| c.prepare_cached("DELETE FROM mcp_servers")?.execute([]))?;
    mcp.iter().try_for_each(|(name, transport)| put_mcp(db, name, transport))
}

/// Fails, and thereby undoes the change, if a table has too many rows.
fn within(db: &Db, count: &'static str, what: &'static str, most: usize) -> Result<()> {
    let rows = db.sql("count", |c| c.prepare_cached(count)?.query_row([], |row| unsigned(row, 0)))?;
    if rows > most as u64 { Err(CatalogError::Limit { what, most: most as u64 }) } else { Ok(()) }
}

pub(super) fn grant_blobs(db: &Db, digests: &[Digest], at_ms: i64) -> Result<()> {
    db.sql("grant blob", |c| {
        let mut insert = c.prepare_cached("INSERT OR IGNORE INTO blob_grants (digest, at_ms) VALUES (?, ?)")?;
        digests.iter().try_for_each(|digest| insert.execute(params![digest.as_bytes(), at_ms]).map(drop))
    })
}

pub(super) fn blob_granted(db: &Db, digest: Digest) -> Result<bool> {
    db.sql("look up blob", |c| {
        c.prepare_cached("SELECT 1 FROM blob_grants WHERE digest = ?")?.exists([digest.as_bytes()])
    })
}

pub(super) fn blobs_granted_until(db: &Db, at_ms: i64) -> Result<Vec<Digest>> {
    db.sql("list blobs", |c| {
        c.prepare_cached("SELECT digest FROM blob_grants WHERE at_ms <= ? ORDER BY digest")?
            .query_map([at_ms], |row| bytes(row, 0).map(Digest::from_bytes))?
            .collect()
    })
}

/// A consent, or its withdrawal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewConsent {
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The person.
    pub actor: String,
    /// The subject.
    pub subject: String,
    /// Whether it was given or withdrawn.
    pub granted: bool,
    /// The wording.
    pub detail: String,
}

/// A recorded consent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consent {
    /// The sequence number.
    pub sequence: u64,
    /// The statement.
    pub what: NewConsent,
}

pub(super) fn add_consent(db: &Db, consent: &NewConsent) -> Result<u64> {
    db.sql("record consent", |c| {
        c.prepare_cached("INSERT INTO consents (at_ms, actor, subject, granted, detail) VALUES (?, ?, ?, ?, ?)")?
            .insert(params![consent.at_ms, consent.actor, consent.subject, consent.granted, consent.detail])
            .map(|sequence| sequence as u64)
    })
}

pub(super) fn consents(db: &Db, after: u64) -> Result<Vec<Consent>> {
    db.sql("list consents", |c| {
        c.prepare_cached(
            "SELECT sequence, at_ms, actor, subject, granted, detail FROM consents WHERE sequence > ? ORDER BY sequence
             LIMIT ?",
        )?
        .query_map(params![signed(after), limits::PAGE_ROWS as i64], |row| {
            Ok(Consent {
                sequence: unsigned(row, 0)?,
                what: NewConsent {
                    at_ms: row.get(1)?,
                    actor: row.get(2)?,
                    subject: row.get(3)?,
                    granted: row.get(4)?,
                    detail: row.get(5)?,
                },
            })
        })?
        .collect()
    })
}
