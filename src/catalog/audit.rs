//! The audit log: append-only, each line chained to the one before.
//!
//! `hash = BLAKE3(context, hash of the line before, fields)`, where the context is [`CONTEXT`], the first line follows 32 zero
//! bytes, and each field is its length as 8 bytes little-endian and its bytes (numbers: 8 bytes little-endian; an absent
//! version: length 0). So a changed, missing, added or moved line breaks the chain at a place that [`verify`] names.
//! Lines cut off at the end leave a chain that is whole but shorter: keep an [`AuditHead`] elsewhere to see that.

use rusqlite::{OptionalExtension as _, Row, params};

use super::row::{bytes, signed, unsigned, unsigned32};
use super::sqlite::{Db, Result};
use crate::core::ids::Digest;
use crate::core::limits;

const CONTEXT: &str = "ryokan 2026 audit log line";

/// What somebody did, or tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewAudit {
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Who: the peer's uid.
    pub uid: u32,
    /// Who: the client's own name for itself.
    pub client: String,
    /// What: the operation.
    pub action: String,
    /// To which kernel (its id); empty for the host.
    pub kernel: String,
    /// The kernel's version before.
    pub version_before: Option<u64>,
    /// The kernel's version after.
    pub version_after: Option<u64>,
    /// `done`, or the code of the refusal or failure.
    pub outcome: String,
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditLine {
    /// From 1, without holes.
    pub sequence: u64,
    /// What happened.
    pub what: NewAudit,
    /// Of this line and all before it.
    pub hash: Digest,
}

/// The end of the log. Kept elsewhere, it proves later that nothing was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditHead {
    /// Lines in the log.
    pub sequence: u64,
    /// Hash of the last one; zeros for an empty log.
    pub hash: Digest,
}

/// Where the chain is broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the audit log is broken at line {sequence}: {why}")]
pub struct AuditBreak {
    /// The first line that does not fit.
    pub sequence: u64,
    /// What is wrong with it.
    pub why: String,
}

const NO_LINE: AuditHead = AuditHead { sequence: 0, hash: Digest::from_bytes([0; 32]) };

fn hash_line(before: Digest, sequence: u64, line: &NewAudit) -> Digest {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    hasher.update(before.as_bytes());
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    field(&sequence.to_le_bytes());
    field(&line.at_ms.to_le_bytes());
    field(&u64::from(line.uid).to_le_bytes());
    field(line.client.as_bytes());
    field(line.action.as_bytes());
    field(line.kernel.as_bytes());
    for version in [line.version_before, line.version_after] {
        field(version.map(u64::to_le_bytes).as_ref().map_or(&[], |bytes| bytes));
    }
    field(line.outcome.as_bytes());
    Digest::from_bytes(*hasher.finalize().as_bytes())
}

const COLUMNS: &str = "sequence, at_ms, uid, client, action, kernel, version_before, version_after, outcome, hash";

fn read(row: &Row<'_>) -> rusqlite::Result<AuditLine> {
    let version = |column| row.get::<_, Option<i64>>(column).map(|v| v.and_then(|v| u64::try_from(v).ok()));
    Ok(AuditLine {
        sequence: unsigned(row, 0)?,
        what: NewAudit {
            at_ms: row.get(1)?,
            uid: unsigned32(row, 2)?,
            client: row.get(3)?,
            action: row.get(4)?,
            kernel: row.get(5)?,
            version_before: version(6)?,
            version_after: version(7)?,
            outcome: row.get(8)?,
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
            .map(|head| head.unwrap_or(NO_LINE))
    })
}

pub(super) fn append(db: &Db, lines: &[NewAudit]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut head = head(db)?;
    db.sql("append audit line", |c| {
        let mut insert = c.prepare_cached(
            "INSERT INTO audit (sequence, at_ms, uid, client, action, kernel, version_before, version_after, outcome, hash)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?;
        for line in lines {
            head.sequence += 1;
            head.hash = hash_line(head.hash, head.sequence, line);
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
            ])?;
        }
        Ok(())
    })
}

pub(super) fn after(db: &Db, sequence: u64, kernel: Option<&str>, most: usize) -> Result<Vec<AuditLine>> {
    db.sql("read audit log", |c| {
        c.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM audit WHERE sequence > ?1 AND (?2 IS NULL OR kernel = ?2) ORDER BY sequence LIMIT ?3"
        ))?
        .query_map(params![signed(sequence), kernel, most.min(limits::PAGE_ROWS) as i64], read)?
        .collect()
    })
}

/// Walks the whole chain. `known` is a head that was kept elsewhere: its line must still be there, unchanged.
pub(super) fn verify(db: &Db, known: Option<AuditHead>) -> Result<Result<AuditHead, AuditBreak>> {
    db.sql("verify audit log", |c| {
        let mut select = c.prepare_cached(&format!("SELECT {COLUMNS} FROM audit ORDER BY sequence"))?;
        let mut rows = select.query([])?;
        let mut head = NO_LINE;
        while let Some(row) = rows.next()? {
            let due = head.sequence + 1;
            let broken = |why: String| Ok(Err(AuditBreak { sequence: due, why }));
            let line = match read(row) {
                Ok(line) => line,
                Err(error @ rusqlite::Error::SqliteFailure(..)) => return Err(error),
                Err(field) => return broken(field.to_string()),
            };
            if line.sequence != due {
                return broken(format!("it is missing; the next one is line {}", line.sequence));
            }
            let hash = hash_line(head.hash, due, &line.what);
            if hash != line.hash {
                return broken(String::from("its hash does not follow from its content and the line before"));
            }
            if known.is_some_and(|known| known.sequence == due && known.hash != hash) {
                return broken(String::from("it is another line than the one that was here before"));
            }
            head = AuditHead { sequence: due, hash };
        }
        match known.filter(|known| known.sequence > head.sequence) {
            Some(known) => Ok(Err(AuditBreak {
                sequence: head.sequence + 1,
                why: format!("it is missing, as is everything up to line {}", known.sequence),
            })),
            None => Ok(Ok(head)),
        }
    })
}
