//! Databases of an earlier format open with their content.

use rusqlite::Connection;

use super::sqlite::{Db, Kind};
use super::*;
use crate::core::freeze::on_failure::OnFailure;
use crate::core::ids::{CheckpointId, Epoch, WorkerId};
use crate::core::kernel::transition::{Record, Transition};
use crate::core::workflow::Options;

/// A database of this kind in an earlier format, filled by these statements.
fn earlier(dir: &std::path::Path, kind: Kind, format: usize, fill: &str) -> std::path::PathBuf {
    let path = dir.join(kind.file_name());
    let conn = Connection::open(&path).expect("created");
    conn.pragma_update(None, "application_id", kind.application_id()).expect("set");
    for migration in &kind.migrations()[..format] {
        conn.execute_batch(migration).expect("migrated");
    }
    conn.execute_batch(fill).expect("filled");
    conn.pragma_update(None, "user_version", format as i64).expect("set");
    path
}

#[test]
fn interrupted_restore_is_migrated() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let fill = "INSERT INTO restoring (one, target, safety, actor, at_ms, supersede_decisions, with_artifacts)
                VALUES (1, x'0102030405060708090a0b0c0d0e0f10', x'ff000000000000000000000000000000', 'me \"x\"', 5, 0, 1)";
    let path = earlier(dir.path(), Kind::State, 7, fill);
    let db = Db::open(Kind::State, &path, Durability::Process).expect("opened");
    let mut target = [0; 16];
    (1..=16).zip(&mut target).for_each(|(n, byte)| *byte = n);
    let mut safety = [0; 16];
    safety[0] = 0xff;
    let restore = Transition::Restore {
        target: CheckpointId::from_bytes(target),
        safety: CheckpointId::from_bytes(safety),
        options: Options { supersede_decisions: false, with_artifacts: true, with_memory: false },
    };
    let text: String =
        db.sql("read", |c| c.query_row("SELECT record FROM transition", [], |row| row.get(0))).expect("one transition");
    let record: Record = serde_json::from_str(&text).expect("a record");
    assert_eq!(record, Record::open(restore, "me \"x\"".into(), 5));
}

/// Their protocol differs: an epoch that no kernel has lets recovery end them.
#[test]
fn earlier_workers_are_not_adopted() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let fill = "INSERT INTO workers (id, kernel, epoch, build, secret, pid, start_ticks, socket)
                VALUES (zeroblob(16), zeroblob(16), 1, 'b', x'01', 77, 9000000000, '/run/w.sock')";
    let path = earlier(dir.path(), Kind::Catalog, 3, fill);
    let db = Db::open(Kind::Catalog, &path, Durability::Process).expect("opened");
    let found = workers::list(&db).expect("readable");
    assert_eq!(found.len(), 1);
    let WorkerRow { id, epoch, record, .. } = &found[0];
    assert_eq!((*id, *epoch), (WorkerId::from_bytes([0; 16]), Epoch(0)));
    // The process is still known, so it can be ended.
    assert_eq!(record, r#"{"socket":"/run/w.sock","process":{"pid":77,"start_ticks":9000000000},"run_as":null}"#);
}

#[test]
fn earlier_groups_resume() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let fill = "INSERT INTO groups (id, uid, name, created_at_ms) VALUES (zeroblob(16), 7, 'shop', 1)";
    let path = earlier(dir.path(), Kind::Catalog, 7, fill);
    let db = Db::open(Kind::Catalog, &path, Durability::Process).expect("opened");
    let read = |row: &rusqlite::Row<'_>| Ok((group_pauses::read_on_failure(row, 0)?, row.get(1)?));
    let found: (OnFailure, Option<String>) = db
        .sql("read", |c| c.query_row("SELECT on_failure, paused FROM groups WHERE name = 'shop'", [], read))
        .expect("one group");
    assert_eq!(found, (OnFailure::Resume, None));
}

#[test]
fn earlier_rows_get_checksums() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let fill = "INSERT INTO journal (sequence, at_ms, kind, actor, exec, text) VALUES
                (1, 1, 1, 'me', 1, 'x = 1'), (2, 2, 2, 'me', NULL, 'hello'), (5, 3, 3, 'me', NULL, 'later');
                INSERT INTO executions (id, journal, started_at_ms, status) VALUES (1, 1, 1, 0);
                INSERT INTO results (exec, stdout) VALUES (1, x'610a');
                INSERT INTO mounts (path, source, writable) VALUES ('/data', '/srv', 0);";
    let path = earlier(dir.path(), Kind::State, 9, fill);
    let (migrated, grown) = (dir.path().join("migrated.db"), dir.path().join("grown.db"));
    let db = Db::open(Kind::State, &path, Durability::Process).expect("opened");
    db.check_rows().expect("whole");
    db.close().expect("closed");
    std::fs::copy(&path, &migrated).expect("copied");
    // The rows of a database of the present format have the same checksums.
    let db = Db::open_or_create(Kind::State, &grown, Durability::Process).expect("made");
    db.sql("fill", |c| c.execute_batch(fill)).expect("filled");
    let sums = |db: &Db| -> Vec<(String, i64, Vec<u8>)> {
        db.sql("read", |c| {
            c.prepare("SELECT name, rows, sum FROM sums ORDER BY name")?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
                .collect()
        })
        .expect("readable")
    };
    let migrated = Db::open(Kind::State, &migrated, Durability::Process).expect("opened");
    assert_eq!(sums(&migrated), sums(&db));
    assert_eq!(sums(&db).iter().map(|(_, rows, _)| rows).sum::<i64>(), 6);
}
