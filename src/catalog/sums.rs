//! Checksums of the rows of `state.db`: triggers compute them with each write, `verify` compares them.
//!
//! ```text
//! hash(values)   BLAKE3 of each value's type (1 byte), length (8 bytes, little-endian) and bytes
//! sum(entry n)   of the journal: hash(sum(entry before n), values of n), in the entry's row
//! sum(table)     of every other table: exclusive or of the hashes of its rows
//! ```
//!
//! SQLite's own check covers the structure, not the content. The sums have no secret: they reveal damage and writes by
//! other programs, not a forger who recomputes them.

use rusqlite::functions::{Aggregate, Context, FunctionFlags};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension as _, Result, params};

type Sum = [u8; 32];

/// The chained table; its triggers are in its migration.
const JOURNAL: &str = "journal";

/// Defines the SQL functions of the triggers and of [`find_wrong`].
pub(super) fn define(conn: &Connection) -> Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC | FunctionFlags::SQLITE_INNOCUOUS;
    conn.create_scalar_function("row_hash", -1, flags, |values| Ok(hash(values, 0)))?;
    // A sum with one more row, or with one row less.
    conn.create_scalar_function("row_mix", -1, flags, |values| {
        let mut sum: Sum = values.get(0)?;
        mix(&mut sum, hash(values, 1));
        Ok(sum)
    })?;
    conn.create_aggregate_function("rows_sum", -1, flags, RowsSum)
}

struct RowsSum;

impl Aggregate<Sum, Sum> for RowsSum {
    fn init(&self, _: &mut Context<'_>) -> Result<Sum> {
        Ok([0; 32])
    }

    fn step(&self, values: &mut Context<'_>, sum: &mut Sum) -> Result<()> {
        mix(sum, hash(values, 0));
        Ok(())
    }

    fn finalize(&self, _: &mut Context<'_>, sum: Option<Sum>) -> Result<Sum> {
        Ok(sum.unwrap_or_default())
    }
}

fn mix(sum: &mut Sum, hash: Sum) {
    sum.iter_mut().zip(hash).for_each(|(byte, other)| *byte ^= other);
}

/// Hash of the arguments from `first` on.
fn hash(values: &Context<'_>, first: usize) -> Sum {
    let mut hasher = blake3::Hasher::new();
    let mut add = |kind: u8, bytes: &[u8]| {
        hasher.update(&[kind]).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    for at in first..values.len() {
        match values.get_raw(at) {
            ValueRef::Null => add(0, &[]),
            ValueRef::Integer(number) => add(1, &number.to_le_bytes()),
            ValueRef::Real(number) => add(2, &number.to_le_bytes()),
            ValueRef::Text(text) => add(3, text),
            ValueRef::Blob(bytes) => add(4, bytes),
        }
    }
    *hasher.finalize().as_bytes()
}

/// The tables with a sum of their own, except the journal.
fn tables(conn: &Connection) -> Result<Vec<String>> {
    conn.prepare(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name NOT IN ('journal', 'sums')",
    )?
    .query_map([], |row| row.get(0))?
    .collect()
}

/// The columns of a table as arguments, each with a prefix.
fn columns(conn: &Connection, table: &str, prefix: &str) -> Result<String> {
    let names: Vec<String> = conn
        .prepare("SELECT name FROM pragma_table_info(?) ORDER BY cid")?
        .query_map([table], |row| row.get(0).map(|name: String| format!("{prefix}\"{name}\"")))?
        .collect::<Result<_>>()?;
    Ok(names.join(", "))
}

/// Covers every table with triggers, and computes the sums of what is there. Follows each migration.
pub(super) fn cover(conn: &Connection) -> Result<()> {
    for table in tables(conn)? {
        let [now, old, new] = ["", "OLD.", "NEW."].map(|prefix| columns(conn, &table, prefix));
        let (now, old, new) = (now?, old?, new?);
        let triggers = [
            ("added", "INSERT", format!("rows = rows + 1, sum = row_mix(sum, {new})")),
            ("changed", "UPDATE", format!("sum = row_mix(row_mix(sum, {old}), {new})")),
            ("removed", "DELETE", format!("rows = rows - 1, sum = row_mix(sum, {old})")),
        ];
        for (what, event, change) in triggers {
            conn.execute_batch(&format!(
                "DROP TRIGGER IF EXISTS sum_of_{what}_{table};
                 CREATE TRIGGER sum_of_{what}_{table} AFTER {event} ON {table}
                 BEGIN UPDATE sums SET {change} WHERE name = '{table}'; END;"
            ))?;
        }
        conn.execute(
            &format!("INSERT OR REPLACE INTO sums (name, rows, sum) SELECT ?, count(*), rows_sum({now}) FROM {table}"),
            [&table],
        )?;
    }
    Ok(())
}

/// Compares every row with the sums; returns the first difference.
pub(super) fn find_wrong(conn: &Connection) -> Result<Option<String>> {
    let values = "sequence, at_ms, kind, actor, exec, text, detail, stdin";
    let broken: Option<i64> = conn
        .query_row(
            &format!(
                "SELECT sequence FROM (SELECT sequence, sum,
                 row_hash(lag(sum) OVER (ORDER BY sequence), {values}) AS due FROM journal)
                 WHERE sum IS NOT due LIMIT 1"
            ),
            [],
            |row| row.get(0),
        )
        .optional()?;
    if let Some(sequence) = broken {
        return Ok(Some(format!("entry {sequence} of the journal, or the entry before it, is not what was written")));
    }
    let last = "coalesce((SELECT sum FROM journal ORDER BY sequence DESC LIMIT 1), zeroblob(32))";
    if !is_sum(conn, JOURNAL, last)? {
        return Ok(Some("the end of the journal is not what was written".into()));
    }
    for table in tables(conn)? {
        let of = columns(conn, &table, "")?;
        if !is_sum(conn, &table, &format!("rows_sum({of})"))? {
            return Ok(Some(format!("the rows of {table} are not what was written")));
        }
    }
    Ok(None)
}

/// Whether a table has the recorded number of rows, and this expression is the recorded sum.
fn is_sum(conn: &Connection, table: &str, sum: &str) -> Result<bool> {
    let (rows, sum): (i64, Sum) =
        conn.query_row(&format!("SELECT count(*), {sum} FROM {table}"), [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    conn.query_row(
        "SELECT count(*) = 1 FROM sums WHERE name = ? AND rows = ? AND sum = ?",
        params![table, rows, sum],
        |row| row.get(0),
    )
}
