//! Damaged, foreign, newer, cut and unwritable databases: a typed error with the path, and no harm to others.

use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;

use super::crash_tests::{audit, config, kernel};
use super::state::{ExecBegin, NewEntry};
use super::*;
use crate::core::error::ErrorCode;
use crate::core::exec::ExecRequest;
use crate::core::ids::KernelId;
use crate::sys::fault::tests::run_child;

const ID: KernelId = KernelId::from_bytes([1; 16]);

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time")
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn entry(n: usize) -> Entry {
    Entry { key: format!("var/v{n}"), meta_json: "{}".into(), body: vec![n as u8; 300] }
}

/// A catalog with two kernels and something in every database, closed.
fn filled(dir: &Path) -> Vec<std::path::PathBuf> {
    let catalog = Catalog::open(&config(dir)).expect("opened");
    let handle = catalog.handle();
    let mut paths = vec![dir.join("catalog.db")];
    runtime().block_on(async {
        for n in 1..=2u8 {
            let id = KernelId::from_bytes([n; 16]);
            let files = handle.create_kernel_files(id).await.expect("made");
            handle.insert_kernel(kernel(id, &format!("k{n}")), None, Notes::default()).await.expect("inserted");
            for i in 0..100 {
                let request = ExecRequest::code(format!("step {i} {}", "x".repeat(100)));
                let begin = ExecBegin { request, actor: "me".into(), at_ms: i };
                handle.state(id).begin_exec(begin).await.expect("begun");
            }
            let engine = EngineDb::open(&files.engine_db, Durability::Process).expect("opened");
            engine.apply(&Changes { puts: (0..100).map(entry).collect(), ..Changes::default() }).expect("stored");
            engine.close().expect("closed");
            paths.extend([files.state_db, files.engine_db]);
        }
        handle.append_audit((0..50).map(|n| audit(&format!("a{n}"))).collect()).await.expect("written");
    });
    catalog.stop();
    paths
}

fn kind_of(path: &Path) -> Kind {
    [Kind::Catalog, Kind::State, Kind::Engine]
        .into_iter()
        .find(|kind| path.ends_with(kind.file_name()))
        .expect("one of ours")
}

fn opened_and_checked(path: &Path) -> Result<(), CatalogError> {
    Db::open(kind_of(path), path, Durability::Process).and_then(|db| db.check())
}

fn assert_corrupt(error: CatalogError, path: &Path, what: &str) {
    assert!(matches!(&error, CatalogError::Corrupt { path: named, .. } if named == path), "{what}: {error:?}");
    assert_eq!(crate::core::error::Error::from(error).code, ErrorCode::Corrupt);
}

#[test]
fn damaged_page_is_detected() {
    let dir = dir();
    let paths = filled(dir.path());
    for path in &paths {
        let whole = std::fs::read(path).expect("readable");
        // https://www.sqlite.org/fileformat2.html#page_size
        let page_bytes = usize::from(u16::from_be_bytes([whole[16], whole[17]]));
        for page in 0..whole.len() / page_bytes {
            let mut broken = whole.clone();
            broken[page * page_bytes..page * page_bytes + 16].fill(0xa5);
            std::fs::write(path, &broken).expect("written");
            let error = opened_and_checked(path).expect_err("damaged");
            assert_corrupt(error, path, &format!("page {page}"));
        }
        for other in paths.iter().filter(|other| *other != path) {
            opened_and_checked(other).expect("unharmed");
        }
        std::fs::write(path, &whole).expect("written");
        opened_and_checked(path).expect("whole again");
    }
}

#[test]
fn truncated_database_is_detected() {
    let dir = dir();
    for path in filled(dir.path()) {
        let whole = std::fs::read(&path).expect("readable");
        for length in [0, 1, 99, 100, 4096, 5000, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).expect("written");
            assert_corrupt(opened_and_checked(&path).expect_err("cut"), &path, &format!("cut to {length}"));
        }
        std::fs::write(&path, &whole).expect("written");
    }
}

#[test]
fn kernel_damage_is_isolated() {
    let dir = dir();
    let paths = filled(dir.path());
    let file = std::fs::OpenOptions::new().write(true).open(&paths[1]).expect("opened");
    file.write_all_at(&[0; 4096], 4096).expect("written");
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let handle = catalog.handle();
    runtime().block_on(async {
        let error = handle.state(ID).exec_count().await.expect_err("damaged");
        assert_corrupt(error, &paths[1], "state.db");
        // Requests of both kernels at once, on any thread.
        let (bad, good) = (handle.state(ID).running_execs(), handle.state(KernelId::from_bytes([2; 16])).exec_count());
        assert!(bad.await.is_err());
        assert_eq!(good.await.expect("unharmed"), 100);
        assert_eq!(handle.kernels(None).await.expect("unharmed").len(), 2);
    });
}

#[test]
fn foreign_and_newer_databases_are_refused() {
    let dir = dir();
    let paths = filled(dir.path());
    std::fs::copy(&paths[0], &paths[1]).expect("copied");
    assert_corrupt(opened_and_checked(&paths[1]).expect_err("foreign"), &paths[1], "a catalog in place of a state");
    let conn = rusqlite::Connection::open(&paths[2]).expect("opened");
    conn.pragma_update(None, "user_version", 99).expect("set");
    drop(conn);
    let before = std::fs::read(&paths[2]).expect("readable");
    let error = opened_and_checked(&paths[2]).expect_err("newer");
    assert!(matches!(error, CatalogError::Newer { found: 99, known: 1, .. }), "{error}");
    assert_eq!(crate::core::error::Error::from(error).code, ErrorCode::Unsupported);
    assert_eq!(std::fs::read(&paths[2]).expect("readable"), before, "not touched");
    let missing = dir.path().join("none/state.db");
    assert!(matches!(Db::open(Kind::State, &missing, Durability::Process), Err(CatalogError::Missing { .. })));
}

#[test]
fn engine_db_has_single_owner() {
    let dir = dir();
    let path = dir.path().join("engine.db");
    let first = EngineDb::open(&path, Durability::Process).expect("opened");
    first.apply(&Changes { puts: vec![entry(1)], ..Changes::default() }).expect("stored");
    let error = EngineDb::open(&path, Durability::Process).expect_err("one owner only");
    assert!(matches!(error, CatalogError::InUse { .. }), "{error}");
    first.close().expect("closed");
    assert_eq!(EngineDb::open(&path, Durability::Process).expect("free").heads().expect("readable").len(), 1);
}

#[test]
fn body_digest_detects_damage() {
    let dir = dir();
    let path = dir.path().join("engine.db");
    let db = EngineDb::open(&path, Durability::Process).expect("opened");
    let big = Entry { body: vec![3; (2 << 20) + 5], ..entry(1) };
    db.apply(&Changes { puts: vec![entry(0), big], ..Changes::default() }).expect("stored");
    db.close().expect("closed");
    let conn = rusqlite::Connection::open(&path).expect("opened");
    conn.execute("UPDATE chunks SET body = zeroblob(1048576) WHERE part = 1", []).expect("changed");
    drop(conn);
    let db = EngineDb::open(&path, Durability::Process).expect("opens: its pages are sound");
    assert_corrupt(db.entry("var/v1").expect_err("damaged"), &path, "body");
    assert_corrupt(db.check().expect_err("damaged"), &path, "body");
    assert_eq!(db.entry("var/v0").expect("unharmed"), Some(entry(0)));
}

/// The child of [`unprivileged_engine_db_open`]: as user `nobody`, it opens permitted files through
/// a descriptor and is refused the others.
#[test]
fn unprivileged_open_child() {
    use std::os::fd::AsRawFd as _;
    let Some(dir) = std::env::var_os("RYOKAN_CRASH_DIR") else { return };
    let dir = Path::new(&dir);
    let own = std::fs::File::open(dir.join("own")).expect("root may");
    let locked = std::fs::File::open(dir.join("locked")).expect("root may");
    let nobody = nix::unistd::Uid::from_raw(65534);
    nix::unistd::setresuid(nobody, nobody, nobody).expect("root may");
    nix::sys::prctl::set_dumpable(true).expect("allowed");
    assert!(std::fs::read_dir(dir).is_err(), "the path itself cannot be walked");
    let at =
        |dir: &std::fs::File, name: &str| std::path::PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()));
    let db = EngineDb::open(&at(&own, "engine.db"), Durability::Process).expect("through the descriptor");
    db.apply(&Changes { puts: vec![entry(1)], ..Changes::default() }).expect("stored");
    db.close().expect("closed");
    for name in ["engine.db", "new.db"] {
        let error = EngineDb::open(&at(&locked, name), Durability::Process).expect_err("not writable");
        assert!(matches!(error, CatalogError::ReadOnly { .. }), "{error:?}");
    }
    println!("\nack done");
}

#[test]
#[ignore = "needs root: becomes another user; scripts/check runs it"]
fn unprivileged_engine_db_open() {
    let dir = dir();
    let chown = |path: &Path| std::os::unix::fs::chown(path, Some(65534), Some(65534)).expect("root may");
    for name in ["own", "locked"] {
        let sub = dir.path().join(name);
        std::fs::create_dir(&sub).expect("made");
        EngineDb::open(&sub.join("engine.db"), Durability::Process).expect("made").close().expect("closed");
    }
    chown(&dir.path().join("own"));
    chown(&dir.path().join("own/engine.db"));
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).expect("root may");
    let mode = |name: &str, mode| {
        std::fs::set_permissions(dir.path().join(name), std::fs::Permissions::from_mode(mode)).expect("root may");
    };
    mode("locked/engine.db", 0o444);
    mode("locked", 0o555);
    let ran = run_child("catalog::damage_tests::unprivileged_open_child", dir.path(), None, &[]);
    assert_eq!(ran.acks, ["done"], "{}", ran.all);
    let db = EngineDb::open(&dir.path().join("own/engine.db"), Durability::Process).expect("opened");
    assert_eq!(db.heads().expect("readable").len(), 1);
}

#[test]
fn open_by_descriptor_path() {
    use std::os::fd::AsRawFd as _;
    let dir = dir();
    let handle = std::fs::File::open(dir.path()).expect("opened");
    let path = std::path::PathBuf::from(format!("/proc/self/fd/{}/engine.db", handle.as_raw_fd()));
    let db = EngineDb::open(&path, Durability::Process).expect("made");
    db.apply(&Changes { puts: vec![entry(1)], ..Changes::default() }).expect("stored");
    assert!(dir.path().join("engine.db-wal").exists() && !dir.path().join("engine.db-shm").exists());
    db.close().expect("closed");
    assert!(!dir.path().join("engine.db-wal").exists());
}

#[test]
#[ignore = "needs root: mounts a small tmpfs; scripts/check runs it"]
fn full_device_error_is_recoverable() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    let dir = dir();
    mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some("size=1m")).expect("root may");
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let handle = catalog.handle();
    runtime().block_on(async {
        handle.create_kernel_files(ID).await.expect("made");
        let state = handle.state(ID);
        let mark = || NewEntry {
            kind: super::state::EntryKind::Mark,
            at_ms: 1,
            actor: "me".into(),
            text: "x".repeat(10_000),
            detail_json: String::new(),
        };
        let mut written = 0;
        let error = loop {
            match state.append_journal(vec![mark()]).await {
                Ok(numbers) => written = numbers[0],
                Err(error) => break error,
            }
        };
        assert!(matches!(error, CatalogError::Full { .. }), "{error:?}");
        let error = handle.create_kernel_files(KernelId::from_bytes([2; 16])).await.expect_err("full");
        assert!(matches!(error, CatalogError::Full { .. }), "{error:?}");
        assert!(!dir.path().join("kernels").join("02".repeat(16)).exists());
        assert_eq!(
            state.journal(super::state::Direction::Before(u64::MAX), 1).await.expect("readable")[0].sequence,
            written
        );
        state.check().await.expect("sound");
        mount(None::<&str>, dir.path(), None::<&str>, MsFlags::MS_REMOUNT, Some("size=8m")).expect("root may");
        let numbers = state.append_journal(vec![mark()]).await.expect("there is room again");
        assert_eq!(numbers, [written + 1]);
    });
    catalog.stop();
    umount2(dir.path(), MntFlags::MNT_DETACH).expect("root may");
}

/// A read at an offset costs its own size, not that of the body; a missing part is reported.
#[test]
fn body_reads_at_any_offset() {
    const PART: usize = crate::core::limits::FRAME_TAIL_BYTES;
    let dir = dir();
    let path = dir.path().join("engine.db");
    let db = EngineDb::open(&path, Durability::Process).expect("opened");
    let body: Vec<u8> = (0..PART * 2 + 77).map(|n| (n % 251) as u8).collect();
    let large = Entry { key: "var/large".into(), meta_json: "{}".into(), body: body.clone() };
    db.apply(&Changes { puts: vec![large, entry(1)], ..Changes::default() }).expect("stored");
    for (key, body) in [("var/large", &body), ("var/v1", &entry(1).body)] {
        for step in [PART, 777_777] {
            let mut read = Vec::new();
            loop {
                let (head, piece) = db.piece(key, read.len() as u64).expect("readable").expect("there");
                assert!(head.size == body.len() as u64 && piece.len() <= PART);
                read.extend_from_slice(&piece[..piece.len().min(step)]);
                if piece.is_empty() {
                    break;
                }
            }
            assert_eq!(&read, body, "{key} by {step}");
        }
    }
    assert!(db.piece("var/none", 0).expect("readable").is_none());
    db.close().expect("closed");
    let raw = rusqlite::Connection::open(&path).expect("opened");
    raw.execute("DELETE FROM chunks WHERE part = 1", []).expect("removed");
    drop(raw);
    let db = EngineDb::open(&path, Durability::Process).expect("opened");
    assert_eq!(db.piece("var/large", 5).expect("there still").expect("there").1.len(), PART - 5);
    let lost = db.piece("var/large", PART as u64 + 5).expect_err("gone");
    assert!(matches!(lost, CatalogError::Corrupt { .. }), "{lost}");
}

/// What another program changes in a `state.db` is found, although its pages are sound.
#[test]
fn foreign_writes_are_found() {
    let dir = dir();
    let path = filled(dir.path()).swap_remove(1);
    let check = || Db::open(Kind::State, &path, Durability::Process).and_then(|db| db.check().and(db.check_rows()));
    check().expect("whole");
    let whole = std::fs::read(&path).expect("readable");
    let mut changed = whole.clone();
    let at = whole.windows(7).position(|bytes| bytes == b"step 42").expect("the code of an execution");
    changed[at + 5] = b'7';
    std::fs::write(&path, &changed).expect("written");
    let error = check().expect_err("changed");
    assert_corrupt(error, &path, "a byte");
    for (sql, wanted) in [
        ("UPDATE journal SET text = 'other' WHERE sequence = 17", "entry 17 of the journal"),
        ("UPDATE journal SET sum = NULL WHERE sequence = 17", "entry 17 of the journal"),
        ("DELETE FROM journal WHERE sequence = 17", "entry 18 of the journal"),
        ("DELETE FROM journal WHERE sequence = 100", "the end of the journal"),
        ("INSERT INTO journal (at_ms, kind, actor, text) VALUES (1, 3, 'me', 'x')", "entry 101 of the journal"),
        ("UPDATE executions SET status = 2 WHERE id = 5", "executions"),
        ("DELETE FROM executions WHERE id = 5", "executions"),
        ("INSERT INTO mounts (path, source, writable) VALUES ('/etc', '/etc', 1)", "mounts"),
        ("INSERT INTO transition (one, record) VALUES (1, '{}')", "transition"),
        ("DELETE FROM sums WHERE name = 'lease'", "lease"),
    ] {
        std::fs::write(&path, &whole).expect("written");
        let conn = rusqlite::Connection::open(&path).expect("opened");
        let triggers: Vec<String> = conn
            .prepare("SELECT name FROM sqlite_schema WHERE type = 'trigger'")
            .and_then(|mut found| found.query_map([], |row| row.get(0))?.collect())
            .expect("listed");
        triggers.iter().for_each(|name| conn.execute_batch(&format!("DROP TRIGGER {name}")).expect("dropped"));
        conn.execute(sql, []).expect("tampered");
        conn.close().expect("closed");
        let error = check().expect_err(sql).to_string();
        assert!(error.contains(wanted), "{sql}: {error}");
    }
}
