//! Conversion between columns and core types.

use std::path::Path;

use rusqlite::Row;
use rusqlite::types::Type;

use super::error::CatalogError;
use super::sqlite::Result;

/// Reads a blob of `N` bytes.
pub(super) fn bytes<const N: usize>(row: &Row<'_>, column: usize) -> rusqlite::Result<[u8; N]> {
    let blob = row.get_ref(column)?.as_blob()?;
    blob.try_into().map_err(|_| wrong(column, Type::Blob, format!("{} bytes where {N} belong", blob.len())))
}

/// Reads a non-negative number.
pub(super) fn unsigned(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    let number: i64 = row.get(column)?;
    u64::try_from(number).map_err(|e| wrong(column, Type::Integer, e.to_string()))
}

/// Reads a non-negative 32-bit number.
pub(super) fn unsigned32(row: &Row<'_>, column: usize) -> rusqlite::Result<u32> {
    let number: i64 = row.get(column)?;
    u32::try_from(number).map_err(|e| wrong(column, Type::Integer, e.to_string()))
}

/// Reads JSON.
pub(super) fn json<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str()?;
    serde_json::from_str(text).map_err(|e| wrong(column, Type::Text, e.to_string()))
}

/// Converts an unsigned number for SQLite, which has only signed ones. None of ours is that large.
pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A field with impossible content.
pub(super) fn wrong(column: usize, kind: Type, why: String) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, kind, why.into())
}

/// Writes JSON.
pub(super) fn to_json<T: serde::Serialize>(path: &Path, what: &str, value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|_| CatalogError::field(path, what))
}
