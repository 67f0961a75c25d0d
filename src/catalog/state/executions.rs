//! Executions: recorded before they start, closed once.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rusqlite::{OptionalExtension as _, Row, params};
use serde::{Deserialize, Serialize};

use super::output::{Kept, OutputRecord, Runs};
use crate::catalog::error::CatalogError;
use crate::catalog::row::{bytes, signed, to_json, unsigned, wrong};
use crate::catalog::sqlite::{Db, Result};
use crate::core::exec::{CODE_LOST, Display, ExecEnd, ExecRequest, ExecStatus, Program, Stream, Work};
use crate::core::ids::{Digest, ExecId};
use crate::core::limits;
use crate::core::value::Value;

/// An execution that is about to start.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecBegin {
    /// The request.
    pub request: ExecRequest,
    /// The requester: the client's name and its uid.
    pub actor: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
}

/// Result of beginning an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    /// The execution is new.
    New {
        /// Its number.
        exec: ExecId,
        /// The number of its entry in the journal.
        journal: u64,
    },
    /// An execution with the same key exists: nothing was written.
    Before(ExecId),
}

/// The end of an execution.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecClose {
    /// How it ended.
    pub end: ExecEnd,
    /// Its output.
    pub output: OutputRecord,
    /// Milliseconds since 1970.
    pub at_ms: i64,
}

/// A recorded execution.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecRecord {
    /// Its number.
    pub exec: ExecId,
    /// The request.
    pub request: ExecRequest,
    /// The requester.
    pub actor: String,
    /// Milliseconds since 1970.
    pub started_at_ms: i64,
    /// Its end and time (milliseconds since 1970); `None` while it runs.
    pub ended: Option<(ExecEnd, i64)>,
    /// Bytes of output kept.
    pub output_bytes: u64,
    /// Bytes of output discarded.
    pub truncated_bytes: u64,
}

/// Fields of a request besides code, key and input. Absent fields are defaults: most requests store nothing here.
#[derive(Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Rest {
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<Program>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<(String, String)>,
    #[serde(skip_serializing_if = "is_default")]
    stdin_open: bool,
    #[serde(skip_serializing_if = "is_default")]
    timeout_ms: u64,
    #[serde(skip_serializing_if = "is_default")]
    output_limit_bytes: u64,
    #[serde(skip_serializing_if = "is_default")]
    expected_version: u64,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

pub(super) fn begin(db: &Db, begin: &ExecBegin) -> Result<Begun> {
    let ExecBegin { request, actor, at_ms } = begin;
    let key = (!request.key.is_empty()).then_some(request.key.as_str());
    if let Some(before) = key.map(|key| find_key(db, key, *at_ms)).transpose()?.flatten() {
        return Ok(Begun::Before(before));
    }
    let command_line;
    let (text, args, process) = match &request.what {
        Work::Code(code) => (code, None, None),
        Work::Call { name, args } => (name, Some(args.to_json()), None),
        Work::Process(program) => {
            command_line = program.command_line();
            (&command_line, None, Some(program.clone()))
        }
    };
    // Variables of processes are often secrets: their names are kept.
    let value = |value: &String| if process.is_some() { String::new() } else { value.clone() };
    let rest = Rest {
        args,
        env: request.env.iter().map(|(name, of)| (name.clone(), value(of))).collect(),
        process: process.clone(),
        stdin_open: request.stdin_open,
        timeout_ms: request.timeout_ms,
        output_limit_bytes: request.output_limit_bytes,
        expected_version: request.expected_version,
    };
    let detail = if is_default(&rest) { None } else { Some(to_json(db.path(), "a request", &rest)?) };
    let stdin = (!request.stdin.is_empty()).then_some(request.stdin.as_slice());
    db.sql("begin execution", |c| {
        let exec: i64 =
            c.prepare_cached("SELECT coalesce(max(id), 0) + 1 FROM executions")?.query_row([], |row| row.get(0))?;
        let sequence: i64 = c
            .prepare_cached(
                "INSERT INTO journal (at_ms, kind, actor, exec, text, detail, stdin) VALUES (?, 1, ?, ?, ?, ?, ?)",
            )?
            .insert(params![at_ms, actor, exec, text, detail, stdin])?;
        c.prepare_cached("INSERT INTO executions (id, journal, key, started_at_ms) VALUES (?, ?, ?, ?)")?
            .execute(params![exec, sequence, key, at_ms])?;
        Ok(Begun::New { exec: ExecId(exec as u64), journal: sequence as u64 })
    })
}

/// Records an execution and its end and rolls back, to compile the statements ahead.
pub(super) fn rehearse(db: &Db) -> Result<()> {
    db.rehearse(|db| {
        let request = ExecRequest::code("\n");
        let Begun::New { exec, .. } = begin(db, &ExecBegin { request, actor: String::new(), at_ms: 0 })? else {
            return Ok(());
        };
        let mut output = OutputRecord { stdout: Kept::Inline(vec![b'\n']), ..OutputRecord::default() };
        output.runs.push(Stream::Stdout, 1);
        let end = ExecEnd { status: ExecStatus::Done, code: 0, ..ExecEnd::lost("") };
        self::end(db, exec, &ExecClose { end, output, at_ms: 0 })
    })
}

pub(super) fn find_key(db: &Db, key: &str, now_ms: i64) -> Result<Option<ExecId>> {
    let life_ms = i64::try_from(limits::KEY_LIFETIME.as_millis()).unwrap_or(i64::MAX);
    db.sql("find execution by key", |c| {
        c.prepare_cached("SELECT id FROM executions WHERE key = ? AND started_at_ms > ? ORDER BY id DESC LIMIT 1")?
            .query_row(params![key, now_ms.saturating_sub(life_ms)], |row| unsigned(row, 0).map(ExecId))
            .optional()
    })
}

pub(super) fn end(db: &Db, exec: ExecId, close: &ExecClose) -> Result<()> {
    let ExecClose { end, output, at_ms } = close;
    for kept in [&output.stdout, &output.stderr] {
        if matches!(kept, Kept::Inline(bytes) if bytes.len() > limits::OUTPUT_INLINE_BYTES) {
            return Err(CatalogError::Limit { what: "inline output", most: limits::OUTPUT_INLINE_BYTES as u64 });
        }
    }
    if output.tail.len() as u64 > limits::OUTPUT_TAIL_BYTES {
        return Err(CatalogError::Limit { what: "newest output", most: limits::OUTPUT_TAIL_BYTES });
    }
    if !output.is_consistent() {
        return Err(CatalogError::Conflict(format!("the order of execution {exec}'s output is not that of its bytes")));
    }
    let output_bytes = output.stdout.bytes() + output.stderr.bytes();
    let place = ExecStatus::ALL.iter().position(|status| *status == end.status);
    let closed = db.sql("end execution", |c| {
        c.prepare_cached(
            "UPDATE executions SET status = ?, code = ?, err = ?, duration_us = ?, ended_at_ms = ?, output_bytes = ?,
             truncated_bytes = ? WHERE id = ? AND status IS NULL",
        )?
        .execute(params![
            place.map(|place| place as i64),
            end.code,
            end.err,
            signed(end.duration_us),
            at_ms,
            signed(output_bytes),
            signed(output.truncated_bytes),
            signed(exec.0),
        ])
    })?;
    if closed == 0 {
        return Err(match get(db, exec)? {
            Some(_) => CatalogError::Conflict(format!("execution {exec} has ended already")),
            None => CatalogError::NotFound(format!("execution {exec}")),
        });
    }
    let is_silent = output_bytes == 0 && output.tail.is_empty() && output.displays.is_empty();
    if end.value.is_none() && end.output.is_none() && is_silent {
        return Ok(());
    }
    insert_results(db, exec, end, output)
}

fn insert_results(db: &Db, exec: ExecId, end: &ExecEnd, output: &OutputRecord) -> Result<()> {
    let value = end.value.as_ref().map(|value| value.to_json().to_string());
    let structured = end.output.as_ref().map(|data| to_json(db.path(), "structured output", data)).transpose()?;
    let runs = output.runs.to_bytes();
    let displays = match output.displays.is_empty() {
        true => None,
        false => Some(to_json(db.path(), "displays", &output.displays.iter().map(Stored::of).collect::<Vec<_>>())?),
    };
    let tail = (!output.tail.is_empty()).then_some(&output.tail);
    let tail_runs = (!output.tail.is_empty()).then(|| output.tail_runs.to_bytes());
    let object = |kept: &Kept| match kept {
        Kept::Object { digest, .. } => Some(*digest.as_bytes()),
        Kept::Inline(_) => None,
    };
    fn inline(kept: &Kept) -> Option<&[u8]> {
        match kept {
            Kept::Inline(bytes) if !bytes.is_empty() => Some(bytes),
            Kept::Inline(_) | Kept::Object { .. } => None,
        }
    }
    db.sql("record results", |c| {
        c.prepare_cached(
            "INSERT INTO results (exec, value, output, runs, stdout_object, stdout_bytes, stderr_object, stderr_bytes,
             stdout, stderr, displays, tail, tail_runs) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute(params![
            signed(exec.0),
            value,
            structured,
            runs,
            object(&output.stdout),
            signed(output.stdout.bytes()),
            object(&output.stderr),
            signed(output.stderr.bytes()),
            inline(&output.stdout),
            inline(&output.stderr),
            displays,
            tail,
            tail_runs,
        ])
        .map(drop)
    })
}

/// The number of an execution's journal entry.
pub(super) fn entry(db: &Db, exec: ExecId) -> Result<Option<u64>> {
    db.sql("find execution", |c| {
        c.prepare_cached("SELECT journal FROM executions WHERE id = ?")?
            .query_row([signed(exec.0)], |row| unsigned(row, 0))
            .optional()
    })
}

pub(super) fn get(db: &Db, exec: ExecId) -> Result<Option<ExecRecord>> {
    db.sql("read execution", |c| {
        c.prepare_cached(
            "SELECT e.id, e.key, e.started_at_ms, e.status, e.code, e.err, e.duration_us, e.ended_at_ms, e.output_bytes,
             e.truncated_bytes, j.actor, j.text, j.detail, j.stdin, r.value, r.output
             FROM executions e JOIN journal j ON j.sequence = e.journal LEFT JOIN results r ON r.exec = e.id WHERE e.id = ?",
        )?
        .query_row([signed(exec.0)], read)
        .optional()
    })
}

fn read(row: &Row<'_>) -> rusqlite::Result<ExecRecord> {
    Ok(ExecRecord {
        exec: ExecId(unsigned(row, 0)?),
        request: read_request(row)?,
        actor: row.get(10)?,
        started_at_ms: row.get(2)?,
        ended: match read_status(row, 3)? {
            Some(status) => Some((read_end(row, status)?, row.get(7)?)),
            None => None,
        },
        output_bytes: unsigned(row, 8)?,
        truncated_bytes: unsigned(row, 9)?,
    })
}

fn read_request(row: &Row<'_>) -> rusqlite::Result<ExecRequest> {
    let rest = read_json::<Rest>(row, 12)?.unwrap_or_default();
    let text: String = row.get(11)?;
    let what = match (rest.args, rest.process) {
        (None, None) => Work::Code(text),
        (Some(args), _) => Work::Call { name: text, args: read_value(&args, 12)? },
        (None, Some(program)) => Work::Process(program),
    };
    Ok(ExecRequest {
        what,
        stdin: row.get::<_, Option<Vec<u8>>>(13)?.unwrap_or_default(),
        stdin_open: rest.stdin_open,
        env: rest.env,
        timeout_ms: rest.timeout_ms,
        output_limit_bytes: rest.output_limit_bytes,
        key: row.get::<_, Option<String>>(1)?.unwrap_or_default(),
        expected_version: rest.expected_version,
    })
}

fn read_end(row: &Row<'_>, status: ExecStatus) -> rusqlite::Result<ExecEnd> {
    let value = read_json::<serde_json::Value>(row, 14)?;
    Ok(ExecEnd {
        status,
        code: row.get(4)?,
        err: row.get(5)?,
        value: value.map(|json| read_value(&json, 14)).transpose()?,
        output: read_json(row, 15)?,
        duration_us: unsigned(row, 6)?,
    })
}

/// The status in a column; `None` while the execution runs.
pub(super) fn read_status(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<ExecStatus>> {
    let place: Option<i64> = row.get(column)?;
    let status = |place| usize::try_from(place).ok().and_then(|place| ExecStatus::ALL.get(place).copied());
    let unknown = || wrong(column, rusqlite::types::Type::Integer, String::from("no such status"));
    place.map(|place| status(place).ok_or_else(unknown)).transpose()
}

fn read_json<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<T>> {
    match row.get_ref(column)?.as_str_or_null()? {
        None => Ok(None),
        Some(_) => crate::catalog::row::json(row, column).map(Some),
    }
}

fn read_value(json: &serde_json::Value, column: usize) -> rusqlite::Result<Value> {
    Value::from_json(json).map_err(|e| wrong(column, rusqlite::types::Type::Text, e.to_string()))
}

pub(super) fn output(db: &Db, exec: ExecId) -> Result<Option<OutputRecord>> {
    db.sql("read output", |c| {
        c.prepare_cached(
            "SELECT e.truncated_bytes, r.runs, r.stdout_object, r.stdout_bytes, r.stderr_object, r.stderr_bytes, r.stdout,
             r.stderr, r.displays, r.tail, r.tail_runs FROM executions e LEFT JOIN results r ON r.exec = e.id WHERE e.id = ?",
        )?
        .query_row([signed(exec.0)], |row| {
            let runs = |column: usize| {
                let no_order = || wrong(column, rusqlite::types::Type::Blob, String::from("no order of output"));
                Runs::from_bytes(row.get_ref(column)?.as_blob_or_null()?.unwrap_or_default()).ok_or_else(no_order)
            };
            Ok(OutputRecord {
                stdout: read_kept(row, 2, 3, 6)?,
                stderr: read_kept(row, 4, 5, 7)?,
                runs: runs(1)?,
                truncated_bytes: unsigned(row, 0)?,
                tail: row.get::<_, Option<Vec<u8>>>(9)?.unwrap_or_default(),
                tail_runs: runs(10)?,
                displays: read_displays(row, 8)?,
            })
        })
        .optional()
    })
}

/// A display in its column.
#[derive(Serialize, Deserialize)]
struct Stored {
    mime: String,
    /// Base64.
    data: String,
}

impl Stored {
    fn of(display: &Display) -> Stored {
        Stored { mime: display.mime.clone(), data: BASE64.encode(&display.data) }
    }
}

fn read_displays(row: &Row<'_>, column: usize) -> rusqlite::Result<Vec<Display>> {
    let stored: Vec<Stored> = read_json(row, column)?.unwrap_or_default();
    let display = |Stored { mime, data }: Stored| {
        let data = BASE64.decode(data).map_err(|e| wrong(column, rusqlite::types::Type::Text, e.to_string()))?;
        Ok(Display { mime, data })
    };
    stored.into_iter().map(display).collect()
}

fn read_kept(row: &Row<'_>, object: usize, length: usize, inline: usize) -> rusqlite::Result<Kept> {
    if row.get_ref(object)?.as_blob_or_null()?.is_some() {
        return Ok(Kept::Object { digest: Digest::from_bytes(bytes(row, object)?), bytes: unsigned(row, length)? });
    }
    Ok(Kept::Inline(row.get::<_, Option<Vec<u8>>>(inline)?.unwrap_or_default()))
}

/// Ends the code that has not ended as refused, in a kernel that was idle: it never ran. Processes may run.
pub(super) fn refuse_queued(db: &Db, why: &str, at_ms: i64) -> Result<()> {
    let place = ExecStatus::ALL.iter().position(|status| *status == ExecStatus::Refused);
    db.sql("refuse queued executions", |c| {
        c.prepare_cached(
            "UPDATE executions SET status = ?, code = ?, err = ?, duration_us = 0, ended_at_ms = ?, output_bytes = 0,
             truncated_bytes = 0
             WHERE status IS NULL AND NOT EXISTS (
                 SELECT 1 FROM journal WHERE sequence = executions.journal
                 AND json_extract(coalesce(detail, '{}'), '$.process') IS NOT NULL)",
        )?
        .execute(params![place.map(|place| place as i64), CODE_LOST, why, at_ms])
        .map(drop)
    })
}

pub(super) fn running(db: &Db) -> Result<Vec<ExecId>> {
    db.sql("list running executions", |c| {
        c.prepare_cached("SELECT id FROM executions WHERE status IS NULL ORDER BY id")?
            .query_map([], |row| unsigned(row, 0).map(ExecId))?
            .collect()
    })
}

pub(super) fn count(db: &Db) -> Result<u64> {
    db.sql("count executions", |c| {
        c.prepare_cached("SELECT coalesce(max(id), 0) FROM executions")?.query_row([], |row| unsigned(row, 0))
    })
}
