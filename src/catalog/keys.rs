//! Idempotency keys: a repeated key returns the first result.

use rusqlite::{OptionalExtension as _, params};

use super::error::CatalogError;
use super::sqlite::{Db, Result};
use crate::core::limits;

/// A key and its expiry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// Owner and operation, for example `create/1000`.
    pub scope: String,
    /// The key, at most [`limits::KEY_BYTES`].
    pub key: String,
    /// Milliseconds since 1970.
    pub expires_at_ms: i64,
}

pub(super) fn remember(db: &Db, key: &IdempotencyKey, result: &str) -> Result<()> {
    if key.key.len() > limits::KEY_BYTES {
        return Err(CatalogError::Limit { what: "the idempotency key's length", most: limits::KEY_BYTES as u64 });
    }
    db.sql("remember key", |c| {
        c.prepare_cached(
            "INSERT INTO keys (scope, key, result, expires_at_ms) VALUES (?, ?, ?, ?)
             ON CONFLICT DO UPDATE SET result = excluded.result, expires_at_ms = excluded.expires_at_ms",
        )?
        .execute(params![key.scope, key.key, result, key.expires_at_ms])
        .map(drop)
    })
}

pub(super) fn recall(db: &Db, scope: &str, key: &str, now_ms: i64) -> Result<Option<String>> {
    db.sql("recall key", |c| {
        c.prepare_cached("SELECT result FROM keys WHERE scope = ? AND key = ? AND expires_at_ms > ?")?
            .query_row(params![scope, key, now_ms], |row| row.get(0))
            .optional()
    })
}

pub(super) fn forget_expired(db: &Db, now_ms: i64) -> Result<usize> {
    db.sql("forget keys", |c| c.prepare_cached("DELETE FROM keys WHERE expires_at_ms <= ?")?.execute([now_ms]))
}
