//! Rows of the audit log. [`core::audit`](crate::core::audit) defines the lines and their chain.

use rusqlite::{OptionalExtension as _, Row, params};

use super::row::{bytes, signed, unsigned, unsigned32};
use super::sqlite::{Db, Result};
use crate::core::audit::{AuditBreak, AuditHead, AuditLine, FORMAT, NewAudit, Walk};
use crate::core::ids::Digest;
use crate::core::limits;

const COLUMNS: &str =
    "sequence, at_ms, uid, client, action, kernel, version_before, version_after, outcome, hash, format,
    owner, manifest, detail";

/// A filter for lines.
#[derive(Debug, Clone, Default)]
pub struct AuditFilter {
    /// Only kernels whose id starts with this text.
    pub kernel: Option<String>,
    /// Only this user's operations on the host, and all operations on this user's kernels.
    pub seen_by: Option<u32>,
}

fn read(row: &Row<'_>) -> rusqlite::Result<AuditLine> {
    let version = |column| row.get::<_, Option<i64>>(column).map(|v| v.and_then(|v| u64::try_from(v).ok()));
    let manifest = match row.get_ref(12)? {
        rusqlite::types::ValueRef::Null => None,
        _ => Some(Digest::from_bytes(bytes(row, 12)?)),
    };
    Ok(AuditLine {
        sequence: unsigned(row, 0)?,
        format: unsigned32(row, 10)?,
        what: NewAudit {
            at_ms: row.get(1)?,
            uid: unsigned32(row, 2)?,
            client: row.get(3)?,
            action: row.get(4)?,
            kernel: row.get(5)?,
            version_before: version(6)?,
            version_after: version(7)?,
            outcome: row.get(8)?,
            owner: row.get(11)?,
            manifest,
            detail: row.get(13)?,
        },
        hash: Digest::from_bytes(bytes(row, 9)?),
    })
}

pub(super) fn head(db: &Db) -> Result<AuditHead> {
    db.sql("read audit log", |c| {
        c.prepare_cached("SELECT sequence, hash FROM audit ORDER BY sequence DESC LIMIT 1")?
            .query_row([], |row| {
                Ok(AuditHead { sequence: unsigned(row, 0)?, hash: Digest::from_bytes(bytes(row, 1)?) })
            })
            .optional()
            .map(|head| head.unwrap_or(AuditHead::EMPTY))
    })
}

pub(super) fn append(db: &Db, lines: &[NewAudit]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut head = head(db)?;
    db.sql("append audit line", |c| {
        let mut insert = c.prepare_cached(&format!(
            "INSERT INTO audit ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        ))?;
        for line in lines {
            head = head.after(FORMAT, line).expect("this release knows the format that it writes");
            insert.execute(params![
                signed(head.sequence),
                line.at_ms,
                line.uid,
                line.client,
                line.action,
                line.kernel,
                line.version_before.map(signed),
                line.version_after.map(signed),
                line.outcome,
                head.hash.as_bytes(),
                FORMAT,
                line.owner,
                line.manifest.as_ref().map(|manifest| manifest.as_bytes()),
                line.detail,
            ])?;
        }
        Ok(())
    })
}

pub(super) fn after(db: &Db, sequence: u64, filter: &AuditFilter, most: usize) -> Result<Vec<AuditLine>> {
    db.sql("read audit log", |c| {
        c.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM audit WHERE sequence > ?1 AND (?2 IS NULL OR substr(kernel, 1, length(?2)) = ?2)
             AND (?3 IS NULL OR owner = ?3 OR (owner IS NULL AND uid = ?3)) ORDER BY sequence LIMIT ?4"
        ))?
        .query_map(params![signed(sequence), filter.kernel, filter.seen_by, most.min(limits::PAGE_ROWS) as i64], read)?
        .collect()
    })
}

/// Verifies one more page of the chain. Returns whether there was one.
pub(super) fn walk(db: &Db, mut walk: Walk) -> Result<Result<(Walk, bool), AuditBreak>> {
    db.sql("verify audit log", |c| {
        let mut select =
            c.prepare_cached(&format!("SELECT {COLUMNS} FROM audit WHERE sequence > ? ORDER BY sequence LIMIT ?"))?;
        // From the start, also include numbers that no line can have.
        let from = if walk.head.sequence == 0 { i64::MIN } else { signed(walk.head.sequence) };
        let mut rows = select.query(params![from, limits::PAGE_ROWS as i64])?;
        let mut any = false;
        while let Some(row) = rows.next()? {
            any = true;
            let line = match read(row) {
                Ok(line) => line,
                Err(error @ rusqlite::Error::SqliteFailure(..)) => return Err(error),
                Err(field) => {
                    return Ok(Err(AuditBreak {
                        sequence: walk.head.sequence + 1,
                        why: field.to_string(),
                        is_gap: false,
                    }));
                }
            };
            if let Err(broken) = walk.take(&line) {
                return Ok(Err(broken));
            }
        }
        Ok(Ok((walk, any)))
    })
}
