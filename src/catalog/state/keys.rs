//! Idempotency keys of records: a repeated key returns the first record and writes nothing.

use rusqlite::{OptionalExtension as _, params};

use crate::catalog::error::CatalogError;
use crate::catalog::row::{signed, unsigned};
use crate::catalog::sqlite::{Db, Result};
use crate::core::error::Error;
use crate::core::limits;

/// Kind of the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Message,
    Decision,
    Artifact,
}

impl Kind {
    const fn number(self) -> i64 {
        match self {
            Kind::Message => 1,
            Kind::Decision => 2,
            Kind::Artifact => 3,
        }
    }
}

/// Name and number of the record made with an unexpired key.
pub(super) fn recall(db: &Db, key: &str, kind: Kind, now_ms: i64) -> Result<Option<(String, u64)>> {
    if key.is_empty() {
        return Ok(None);
    }
    if key.len() > limits::KEY_BYTES {
        return Err(CatalogError::Limit { what: "the idempotency key's length", most: limits::KEY_BYTES as u64 });
    }
    let found = db.sql("recall key", |c| {
        c.prepare_cached("SELECT kind, name, number FROM keys WHERE key = ? AND at_ms > ?")?
            .query_row(params![key, oldest(now_ms)], |row| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?, unsigned(row, 2)?))
            })
            .optional()
    })?;
    match found {
        Some((other, ..)) if other != kind.number() => {
            let error = Error::already_exists(format!("key {key:?} was used for something else in this kernel"));
            Err(CatalogError::Refused(Box::new(error.hint("take another key"))))
        }
        found => Ok(found.map(|(_, name, number)| (name, number))),
    }
}

/// Records a key, and deletes expired ones.
pub(super) fn remember(db: &Db, key: &str, kind: Kind, name: &str, number: u64, at_ms: i64) -> Result<()> {
    db.sql("remember key", |c| {
        c.prepare_cached("DELETE FROM keys WHERE at_ms <= ?")?.execute([oldest(at_ms)])?;
        c.prepare_cached("INSERT OR REPLACE INTO keys (key, kind, name, number, at_ms) VALUES (?, ?, ?, ?, ?)")?
            .execute(params![key, kind.number(), name, signed(number), at_ms])
            .map(drop)
    })
}

fn oldest(now_ms: i64) -> i64 {
    now_ms.saturating_sub(i64::try_from(limits::KEY_LIFETIME.as_millis()).unwrap_or(i64::MAX))
}
