//! A kernel's history as pages of rows, for a move to another host: exported from one `state.db`, imported into another.
//!
//! Host-specific rows stay: mounts, MCP servers, lease, consents, idempotency keys, transition. A page is JSON, so nothing
//! that arrives is interpreted as SQL or as a database file; the tables' types and checks apply to each value.

use std::collections::{HashMap, HashSet};

use rusqlite::{params, params_from_iter};
use serde::{Deserialize, Serialize};

use super::cell::{AtMost, Cell};
use super::journal::{self, NewEntry};
use super::{StateHandle, executions, grants, origin};
use crate::catalog::error::CatalogError;
use crate::catalog::row::bytes;
use crate::catalog::sqlite::{Db, Kind, Result};
use crate::catalog::thread::Pending;
use crate::core::error::Error;
use crate::core::ids::{CheckpointId, Digest};
use crate::core::limits;
use crate::core::origin::Origin;

/// The moved tables, in the order of the pages: columns, and the key, in whose order the rows are.
const TABLES: &[(&str, &[&str], &str)] = &[
    ("journal", &["sequence", "at_ms", "kind", "actor", "exec", "text", "detail", "stdin"], "sequence"),
    (
        "executions",
        &[
            "id",
            "journal",
            "started_at_ms",
            "status",
            "code",
            "err",
            "duration_us",
            "ended_at_ms",
            "output_bytes",
            "truncated_bytes",
        ],
        "id",
    ),
    (
        "results",
        &[
            "exec",
            "value",
            "output",
            "runs",
            "stdout_object",
            "stdout_bytes",
            "stderr_object",
            "stderr_bytes",
            "stdout",
            "stderr",
            "displays",
            "tail",
            "tail_runs",
        ],
        "exec",
    ),
    (
        "checkpoints",
        &[
            "number",
            "id",
            "name",
            "description",
            "type",
            "creator",
            "at_ms",
            "parent",
            "pinned",
            "restore_point",
            "restored_at_ms",
            "journal",
            "manifest",
            "files",
            "state_bytes",
            "step",
            "step_name",
            "agent",
            "summary",
            "compacted",
            "machine_bytes",
        ],
        "number",
    ),
    ("head", &["one", "checkpoint", "undo", "journal"], "one"),
    ("origin", &["one", "kind", "generation", "kernel", "name", "checkpoint", "restored"], "one"),
    ("steps", &["number", "name", "agent", "begun_at_ms", "completed_at_ms"], "number"),
    ("agent", &["one", "name"], "one"),
    (
        "decisions",
        &[
            "id",
            "title",
            "text",
            "state",
            "agent",
            "step",
            "opened_by",
            "opened_at_ms",
            "locked_by",
            "locked_at_ms",
            "superseded_by",
            "superseded_at_ms",
            "restored",
        ],
        "id",
    ),
    (
        "artifacts",
        &["name", "version", "object", "bytes", "content_type", "put_by", "at_ms", "reverts_to", "restored"],
        "name, version",
    ),
    ("compacted", &["sequence", "checkpoint"], "sequence, checkpoint"),
];

/// The first tables, which are the journal: they reference no checkpoint.
const JOURNAL: usize = 3;

/// Columns of a table, at most.
const MOST_COLUMNS: usize = 24;

/// The end of code that waited when its kernel left, as its client saw it there.
const MOVED_UNSTARTED: &str = "the kernel moved to another host before this ran";

/// Tables that a move leaves behind.
#[cfg(test)]
const LEFT: &[&str] = &["blob_grants", "consents", "keys", "lease", "mcp_servers", "mounts", "sums", "transition"];

/// Rows of one table.
#[derive(Serialize, Deserialize)]
struct Page {
    table: usize,
    rows: AtMost<{ limits::HANDOVER_PAGE_ROWS }, AtMost<MOST_COLUMNS, Cell>>,
}

/// The position of the next page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Position {
    table: usize,
    row: u64,
    /// The newest rows of the journal's tables that are exported: later ones may be added between two pages.
    newest: Option<Newest>,
}

/// The newest rows of the journal's tables at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Newest {
    entry: i64,
    execution: i64,
}

/// The end of an import.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The checkpoints that moved; the others are removed.
    pub checkpoints: HashSet<CheckpointId>,
    /// The manifests that replace those of checkpoints.
    pub manifests: Vec<(CheckpointId, Digest)>,
    /// The origin of the state from now on.
    pub origin: Origin,
    /// The blobs that the kernel may read.
    pub blobs: Vec<Digest>,
    /// The journal entry.
    pub entry: NewEntry,
}

impl StateHandle {
    /// The format of the history: hosts exchange it only if it is the same.
    pub fn history_format() -> i64 {
        Kind::State.format()
    }

    /// The page at a position, with the position of the next one; `None` at the end.
    ///
    /// # Errors
    /// Database errors.
    pub fn history_page(&self, at: Position) -> Pending<Option<(Vec<u8>, Position)>> {
        self.read(move |db| export(db, at, TABLES.len()))
    }

    /// As [`Self::history_page`], of the journal alone: entries, executions, results.
    ///
    /// # Errors
    /// Database errors.
    pub fn journal_page(&self, at: Position) -> Pending<Option<(Vec<u8>, Position)>> {
        self.read(move |db| export(db, at, JOURNAL))
    }

    /// Imports a page into the database of a kernel that has no row yet.
    ///
    /// # Errors
    /// `Refused` if the page is malformed, `Sqlite` if a value violates its table.
    pub fn import_history(&self, page: Vec<u8>) -> Pending<()> {
        self.import_tables(page, TABLES.len())
    }

    /// As [`Self::import_history`], of the journal alone.
    ///
    /// # Errors
    /// As [`Self::import_history`].
    pub fn import_journal(&self, page: Vec<u8>) -> Pending<()> {
        self.import_tables(page, JOURNAL)
    }

    fn import_tables(&self, page: Vec<u8>, tables: usize) -> Pending<()> {
        self.write("state.history.import", move |db| import(db, &page, tables))
    }

    /// Ends an import.
    ///
    /// # Errors
    /// Database errors.
    pub fn begin_moved(&self, arrival: Arrival) -> Pending<()> {
        self.write("state.history.begin", move |db| {
            keep_only(db, &arrival.checkpoints)?;
            for (checkpoint, manifest) in &arrival.manifests {
                db.sql("replace manifest", |c| {
                    c.prepare_cached("UPDATE checkpoints SET manifest = ? WHERE id = ?")?
                        .execute(params![manifest.as_bytes(), checkpoint.as_bytes()])
                        .map(drop)
                })?;
            }
            executions::refuse_queued(db, MOVED_UNSTARTED, arrival.entry.at_ms)?;
            origin::put(db, &arrival.origin)?;
            grants::grant_blobs(db, &arrival.blobs, arrival.entry.at_ms)?;
            journal::append_one(db, arrival.entry).map(drop)
        })
    }

    /// Every checkpoint's id and manifest.
    ///
    /// # Errors
    /// Database errors.
    pub fn checkpoint_manifests(&self) -> Pending<Vec<(CheckpointId, Digest)>> {
        self.read(|db| {
            db.sql("list manifests", |c| {
                c.prepare_cached("SELECT id, manifest FROM checkpoints ORDER BY number")?
                    .query_map([], |row| {
                        Ok((CheckpointId::from_bytes(bytes(row, 0)?), Digest::from_bytes(bytes(row, 1)?)))
                    })?
                    .collect()
            })
        })
    }
}

/// Removes the rows of other checkpoints; those after them follow the nearest one that is kept.
fn keep_only(db: &Db, kept: &HashSet<CheckpointId>) -> Result<()> {
    let rows: Vec<(CheckpointId, Option<CheckpointId>)> = db.sql("list checkpoints", |c| {
        c.prepare_cached("SELECT id, parent FROM checkpoints")?
            .query_map([], |row| {
                let parent: Option<Vec<u8>> = row.get(1)?;
                let parent = parent.and_then(|parent| Some(CheckpointId::from_bytes(parent.try_into().ok()?)));
                Ok((CheckpointId::from_bytes(bytes(row, 0)?), parent))
            })?
            .collect()
    })?;
    let left: HashMap<CheckpointId, Option<CheckpointId>> =
        rows.iter().filter(|(id, _)| !kept.contains(id)).copied().collect();
    let mut known = HashMap::new();
    for (id, parent) in rows.iter().filter(|(id, _)| kept.contains(id)) {
        let next = nearest_kept(*parent, &left, &mut known);
        if next != *parent {
            db.sql("follow checkpoint", |c| {
                c.prepare_cached("UPDATE checkpoints SET parent = ? WHERE id = ?")?
                    .execute(params![next.map(|parent| *parent.as_bytes()), id.as_bytes()])
                    .map(drop)
            })?;
        }
    }
    for id in left.keys() {
        db.sql("leave checkpoint", |c| {
            c.prepare_cached("DELETE FROM checkpoints WHERE id = ?")?.execute([id.as_bytes()]).map(drop)
        })?;
    }
    Ok(())
}

/// The nearest ancestor that is not left behind. The rows come from elsewhere, and may follow each other.
fn nearest_kept(
    parent: Option<CheckpointId>,
    left: &HashMap<CheckpointId, Option<CheckpointId>>,
    known: &mut HashMap<CheckpointId, Option<CheckpointId>>,
) -> Option<CheckpointId> {
    let (mut next, mut passed) = (parent, Vec::new());
    while let Some((at, before)) = next.and_then(|at| Some((at, left.get(&at)?))) {
        if let Some(found) = known.get(&at) {
            next = *found;
            break;
        }
        if passed.len() > left.len() {
            next = None;
            break;
        }
        passed.push(at);
        next = *before;
    }
    known.extend(passed.into_iter().map(|at| (at, next)));
    next
}

fn malformed(why: impl std::fmt::Display) -> CatalogError {
    CatalogError::Refused(Box::new(Error::corrupt(format!("the history of a moved kernel: {why}"))))
}

fn newest_rows(db: &Db) -> Result<Newest> {
    db.sql("find newest rows", |c| {
        let sql =
            "SELECT (SELECT coalesce(max(sequence), 0) FROM journal), (SELECT coalesce(max(id), 0) FROM executions)";
        c.prepare_cached(sql)?.query_row([], |row| Ok(Newest { entry: row.get(0)?, execution: row.get(1)? }))
    })
}

/// The page at a position of the first `tables`.
fn export(db: &Db, mut at: Position, tables: usize) -> Result<Option<(Vec<u8>, Position)>> {
    let newest = match at.newest {
        Some(newest) => newest,
        None => newest_rows(db)?,
    };
    at.newest = Some(newest);
    while let Some((table, columns, order)) = TABLES[..tables].get(at.table) {
        let last = match at.table {
            0 => Some(newest.entry),
            1..JOURNAL => Some(newest.execution),
            _ => None,
        };
        let within = if last.is_some() { format!("WHERE {order} <= ?3") } else { String::new() };
        let listed = columns.join(", ");
        let sql = format!("SELECT {listed} FROM {table} {within} ORDER BY {order} LIMIT ?1 OFFSET ?2");
        let (rows, is_last) = db.sql("export history", |c| {
            let mut statement = c.prepare_cached(&sql)?;
            let most = limits::HANDOVER_PAGE_ROWS as i64;
            let page = [most, i64::try_from(at.row).unwrap_or(i64::MAX)];
            let mut found = statement.query(params_from_iter(page.into_iter().chain(last)))?;
            let (mut rows, mut size) = (Vec::new(), 0);
            while let Some(row) = found.next()? {
                let mut cells = Vec::with_capacity(columns.len());
                for column in 0..columns.len() {
                    let cell = Cell(row.get(column)?);
                    size += cell.bytes();
                    cells.push(cell);
                }
                rows.push(AtMost(cells));
                if size >= limits::HANDOVER_PAGE_TARGET {
                    return Ok((rows, false));
                }
            }
            let is_last = rows.len() < limits::HANDOVER_PAGE_ROWS;
            Ok((rows, is_last))
        })?;
        let next = if is_last {
            Position { table: at.table + 1, row: 0, ..at }
        } else {
            Position { row: at.row + rows.len() as u64, ..at }
        };
        if !rows.is_empty() {
            let page = serde_json::to_vec(&Page { table: at.table, rows: AtMost(rows) }).map_err(malformed)?;
            return Ok(Some((page, next)));
        }
        at = next;
    }
    Ok(None)
}

/// Imports a page of one of the first `tables`.
fn import(db: &Db, page: &[u8], tables: usize) -> Result<()> {
    let page: Page = serde_json::from_slice(page).map_err(malformed)?;
    let (table, columns, key) = TABLES[..tables].get(page.table).ok_or_else(|| malformed("a table"))?;
    let keys = key.split(", ").filter_map(|name| columns.iter().position(|column| *column == name));
    let keys: Vec<usize> = keys.collect();
    let places = vec!["?"; columns.len()].join(", ");
    let sql = format!("INSERT INTO {table} ({}) VALUES ({places})", columns.join(", "));
    for AtMost(row) in page.rows.0 {
        if row.len() != columns.len() {
            return Err(malformed("a row"));
        }
        // SQLite chooses a number in place of NULL; and one more must follow each number.
        if keys.iter().any(|key| !row[*key].is_key()) {
            return Err(malformed("a key"));
        }
        db.sql("import history", |c| {
            c.prepare_cached(&sql)?.execute(params_from_iter(row.iter().map(|Cell(value)| value))).map(drop)
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::catalog::Durability;
    use crate::catalog::state::ExecBegin;
    use crate::core::exec::{ExecRequest, ExecStatus, Program, Work};

    fn database(folder: &std::path::Path, name: &str) -> Db {
        std::fs::create_dir(folder.join(name)).expect("made");
        let path = folder.join(name).join(Kind::State.file_name());
        Db::open_or_create(Kind::State, &path, Durability::Process).expect("a database")
    }

    fn pages(db: &Db) -> Vec<Vec<u8>> {
        let (mut at, mut pages) = (Position::default(), Vec::new());
        while let Some((page, next)) = export(db, at, TABLES.len()).expect("exported") {
            pages.push(page);
            at = next;
        }
        pages
    }

    /// A new table or column would be lost by a move.
    #[test]
    fn every_column_moves_or_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let db = database(folder.path(), "one");
        let names = |sql: &str| -> BTreeSet<String> {
            db.sql("read schema", |c| c.prepare(sql)?.query_map([], |row| row.get(0))?.collect()).expect("a schema")
        };
        let tables = names("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'");
        let known: BTreeSet<String> =
            TABLES.iter().map(|(table, ..)| *table).chain(LEFT.iter().copied()).map(str::to_owned).collect();
        assert_eq!(tables, known);
        for (table, columns, _) in TABLES {
            let mut there = names(&format!("SELECT name FROM pragma_table_info('{table}')"));
            // An idempotency key belongs to the host that gave it. The host that receives a row computes its checksum.
            there.remove("key");
            there.remove("sum");
            assert_eq!(there, columns.iter().map(|name| (*name).to_owned()).collect(), "{table}");
        }
    }

    #[test]
    fn left_checkpoints_are_bridged() {
        let folder = tempfile::tempdir().expect("a folder");
        let db = database(folder.path(), "one");
        let id = |n: u8| CheckpointId::from_bytes([n; 16]);
        // 1 ← 2 ← 3 ← 4, and 5 ↔ 6 after each other.
        for (n, parent) in
            [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(6)), (6, Some(5)), (7, Some(6))]
        {
            db.sql("fill", |c| {
                c.execute(
                    "INSERT INTO checkpoints (number, id, name, description, type, creator, at_ms, parent, pinned,
                         restore_point, journal, manifest, files, state_bytes)
                     VALUES (?1, ?2, '', '', 1, 'me', 1, ?3, 0, 0, 0, zeroblob(32), 0, 0)",
                    params![n, id(n).as_bytes(), parent.map(|parent| *id(parent).as_bytes())],
                )
            })
            .expect("a row");
        }
        keep_only(&db, &[id(1), id(4), id(7)].into()).expect("kept");
        let left: Vec<(u8, Option<Vec<u8>>)> = db
            .sql("read", |c| {
                c.prepare("SELECT number, parent FROM checkpoints ORDER BY number")?
                    .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                    .collect()
            })
            .expect("rows");
        assert_eq!(left, [(1, None), (4, Some(vec![1; 16])), (7, None)]);
    }

    #[test]
    fn history_round_trips() {
        let folder = tempfile::tempdir().expect("a folder");
        let (from, to) = (database(folder.path(), "from"), database(folder.path(), "to"));
        let fill = "
            WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 700)
            INSERT INTO journal (sequence, at_ms, kind, actor, exec, text, stdin)
            SELECT n, n, 1, 'me', n, 'x' || n, iif(n = 3, x'00ff', NULL) FROM n;
            INSERT INTO executions (id, journal, started_at_ms, key, status) VALUES (1, 1, 5, 'k', 0), (2, 2, 6, NULL, 0);
            INSERT INTO results (exec, stdout) VALUES (1, zeroblob(2000000)), (2, x'61');
            INSERT INTO agent (one, name) VALUES (1, 'a\u{1b}');";
        from.sql("fill", |c| c.execute_batch(fill)).expect("filled");
        let sent = pages(&from);
        assert!(sent.len() >= 7, "{}", sent.len());
        sent.iter().for_each(|page| import(&to, page, TABLES.len()).expect("imported"));
        assert_eq!(pages(&to), sent);
        let key: Option<String> = to
            .sql("read", |c| c.query_row("SELECT key FROM executions WHERE id = 1", [], |row| row.get(0)))
            .expect("one");
        assert_eq!(key, None);
        to.check_rows().expect("chained again");
    }

    #[test]
    fn journal_pages_have_no_other_table() {
        let folder = tempfile::tempdir().expect("a folder");
        let (from, to) = (database(folder.path(), "from"), database(folder.path(), "to"));
        let fill = "
            INSERT INTO journal (sequence, at_ms, kind, actor, exec, text) VALUES (1, 1, 1, 'me', 1, 'x');
            INSERT INTO executions (id, journal, started_at_ms, status) VALUES (1, 1, 5, 0);
            INSERT INTO results (exec, stdout) VALUES (1, x'61');
            INSERT INTO agent (one, name) VALUES (1, 'a');";
        from.sql("fill", |c| c.execute_batch(fill)).expect("filled");
        let (mut at, mut journal) = (Position::default(), Vec::new());
        while let Some((page, next)) = export(&from, at, JOURNAL).expect("exported") {
            journal.push(page);
            at = next;
        }
        assert_eq!(journal, pages(&from)[..3]);
        journal.iter().for_each(|page| import(&to, page, JOURNAL).expect("imported"));
        assert_eq!(pages(&to), journal);
        assert!(import(&to, &pages(&from)[3], JOURNAL).is_err(), "the agent is no part of the journal");
    }

    #[test]
    fn malformed_pages_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let db = database(folder.path(), "one");
        for page in [
            "",
            "{}",
            r#"{"table":99,"rows":[]}"#,
            r#"{"table":7,"rows":[[1]]}"#,
            r#"{"table":7,"rows":[[1,{}]]}"#,
            r#"{"table":7,"rows":[[2,"a"]]}"#,
            r#"{"table":7,"rows":[["one","a"]]}"#,
            r#"{"table":7,"rows":[[1,["not base64!"]]]}"#,
            r#"{"table":8,"rows":[[1,1,1,9,1,1,1,1,1,1,1,1,1]]}"#,
            r#"{"table":0,"rows":[[null,1,3,"a",null,"x",null,null]]}"#,
            r#"{"table":0,"rows":[[-1,1,3,"a",null,"x",null,null]]}"#,
            r#"{"table":0,"rows":[[9223372036854775807,1,3,"a",null,"x",null,null]]}"#,
            r#"{"table":10,"rows":[[1,null]]}"#,
        ] {
            assert!(import(&db, page.as_bytes(), TABLES.len()).is_err(), "{page}");
        }
        assert_eq!(pages(&db), Vec::<Vec<u8>>::new());
        // Nothing enters the journal before its newest entry.
        let entry = |sequence: u64| format!(r#"{{"table":0,"rows":[[{sequence},1,3,"a",null,"x",null,null]]}}"#);
        import(&db, entry(7).as_bytes(), TABLES.len()).expect("the first");
        assert!(import(&db, entry(5).as_bytes(), TABLES.len()).is_err());
    }

    /// A small page could otherwise use far more memory than its bytes.
    #[test]
    fn parsing_stops_at_bounds() {
        let parse = |rows: &str| serde_json::from_str::<Page>(&format!(r#"{{"table":0,"rows":{rows}}}"#)).err();
        let list = |of: &str, count: usize| format!("[{}]", vec![of; count].join(","));
        assert!(parse(&list("[]", limits::HANDOVER_PAGE_ROWS)).is_none());
        assert!(parse(&format!("[{}]", list("1", MOST_COLUMNS))).is_none());
        // What follows is not read: it is not even JSON.
        for rows in [
            list("[]", limits::HANDOVER_PAGE_ROWS + 1).replace("[]]", "[],!"),
            format!("[{}", list("1", MOST_COLUMNS + 1).replace("1]", "1,!")),
            r#"[[["a","a",!"#.to_owned(),
            "[[[[!".to_owned(),
        ] {
            let error = parse(&rows).expect("refused").to_string();
            assert!(!error.contains("expected value"), "{error}");
        }
    }

    fn begin(db: &Db, code: &str, process: bool) {
        let what = match process {
            true => Work::Process(Program { argv: vec![code.into()], ..Program::default() }),
            false => Work::Code(code.into()),
        };
        let request = ExecRequest { what, ..ExecRequest::default() };
        executions::begin(db, &ExecBegin { request, actor: "me".into(), at_ms: 1 }).expect("begun");
    }

    fn number(db: &Db, sql: &str) -> i64 {
        db.sql("count", |c| c.prepare(sql)?.query_row([], |row| row.get(0))).expect("a number")
    }

    /// Rows that are added between two pages stay behind, in all tables of the journal.
    #[test]
    fn later_rows_stay_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let (from, to) = (database(folder.path(), "from"), database(folder.path(), "to"));
        begin(&from, "one", false);
        let mut at = Position::default();
        while let Some((page, next)) = export(&from, at, TABLES.len()).expect("exported") {
            import(&to, &page, TABLES.len()).expect("imported");
            begin(&from, "later", false);
            at = next;
        }
        assert_eq!(number(&to, "SELECT count(*) FROM journal"), 1);
        assert_eq!(number(&to, "SELECT count(*) FROM executions"), 1);
        assert!(number(&from, "SELECT count(*) FROM executions") > 2);
    }

    /// Code that waited when the kernel left never ran; a process may have.
    #[test]
    fn queued_code_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let db = database(folder.path(), "one");
        begin(&db, "waits", false);
        begin(&db, "runs", true);
        executions::refuse_queued(&db, MOVED_UNSTARTED, 2).expect("refused");
        let ended = executions::get(&db, crate::core::ids::ExecId(1)).expect("read").expect("there").ended;
        assert_eq!(ended.expect("ended").0.status, ExecStatus::Refused);
        assert_eq!(executions::running(&db).expect("read"), [crate::core::ids::ExecId(2)]);
    }
}
