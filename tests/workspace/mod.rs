//! Databases inside a workspace: a capture without concurrent commits holds database and log of one moment.

mod sqlite;

use std::path::{Path, PathBuf};

use ryokan::store::Store;
use ryokan::workspace::{Durability, Tracker, WorkspacePaths, checkout};

fn places(dir: &Path, name: &str) -> WorkspacePaths {
    let places = WorkspacePaths {
        workspace: dir.join(name),
        staging: dir.join(format!("{name}.staging")),
        index: dir.join(format!("{name}.index")),
    };
    std::fs::create_dir(&places.workspace).unwrap();
    places
}

fn rows(path: &Path) -> (String, i64) {
    let database = rusqlite::Connection::open(path).unwrap();
    let verdict = database.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    (verdict, database.query_row("SELECT count(*) FROM t", [], |row| row.get(0)).unwrap())
}

#[test]
fn live_wal_capture_consistent() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store")).unwrap();
    let places_here = places(dir.path(), "workspace");
    let path: PathBuf = places_here.workspace.join("data.db");
    let mut tracker = Tracker::open(places_here).unwrap();
    let database = rusqlite::Connection::open(&path).unwrap();
    // Only explicit requests move the log into the database.
    database.execute_batch("PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=0; CREATE TABLE t(x TEXT)").unwrap();
    let mut captured = Vec::new();
    for round in 1..=6i64 {
        database.execute_batch("BEGIN").unwrap();
        for _ in 0..100 {
            database.execute("INSERT INTO t VALUES (?1)", ["x".repeat(500)]).unwrap();
        }
        database.execute_batch("COMMIT").unwrap();
        if round % 3 == 0 {
            // Some rows are in the database, some only in the log, and the log was restarted.
            database.execute_batch("PRAGMA wal_checkpoint(RESTART); INSERT INTO t VALUES ('after')").unwrap();
        }
        tracker.prepare(&store).unwrap();
        // No capture includes an uncommitted transaction.
        database.execute_batch("BEGIN; INSERT INTO t VALUES ('never')").unwrap();
        let collected = tracker.collect(&store).unwrap();
        database.execute_batch("ROLLBACK").unwrap();
        database.execute_batch("INSERT INTO t VALUES ('thawed')").unwrap();
        let tree = tracker.finish(collected).unwrap().tree;
        let count: i64 = database.query_row("SELECT count(*) FROM t", [], |row| row.get(0)).unwrap();
        captured.push((tree, count - 1));
    }
    assert!(path.with_extension("db-wal").metadata().unwrap().len() > 0, "the log is in use");
    for (n, (tree, count)) in captured.iter().enumerate() {
        let elsewhere = places(dir.path(), &format!("elsewhere{n}"));
        checkout(*tree, elsewhere.clone(), &store, Durability::Process).unwrap();
        assert_eq!(rows(&elsewhere.workspace.join("data.db")), ("ok".to_owned(), *count));
    }
    drop(database);
    for (tree, count) in captured.iter().rev() {
        tracker.restore(*tree, &store, Durability::Process).unwrap();
        assert_eq!(rows(&path), ("ok".to_owned(), *count));
    }
}
