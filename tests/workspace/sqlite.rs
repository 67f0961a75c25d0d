//! A database in a workspace, with a process that commits continuously.
//!
//! Each restored capture looks as after a crash of that process, with every commit acknowledged before the capture. In
//! each driver; files open, log and index mapped.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use ryokan::store::Store;
use ryokan::sys::btrfs;
use ryokan::workspace::{DriverKind, Durability, Tracker, WorkspacePaths, checkout};

use super::rows;
use crate::support::Mounted;

const DATABASE: &str = "RYOKAN_TEST_DATABASE";
const ROUNDS: usize = 12;

/// The committing process; killed on drop.
struct Writer(Child);

impl Writer {
    fn start(database: &Path) -> Writer {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["workspace::sqlite::database_writer_process", "--exact", "--ignored", "--nocapture"]);
        Writer(command.env(DATABASE, database).stdout(Stdio::null()).spawn().unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id() as i32)
    }

    fn stop(&self) {
        kill(self.pid(), Signal::SIGSTOP).unwrap();
        let stopped = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(stopped, WaitStatus::Stopped(..)), "{stopped:?}");
    }

    fn go_on(&self) {
        kill(self.pid(), Signal::SIGCONT).unwrap();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// File beside the workspace with the number of acknowledged commits.
fn acknowledged(database: &Path) -> PathBuf {
    database.parent().unwrap().with_file_name("acknowledged")
}

fn count(path: &Path) -> i64 {
    let mut bytes = [0; 8];
    std::fs::File::open(path)
        .and_then(|file| file.read_exact_at(&mut bytes, 0))
        .map_or(0, |()| i64::from_le_bytes(bytes))
}

#[test]
#[ignore = "the process of other tests here, which name the database"]
fn database_writer_process() {
    let path = PathBuf::from(std::env::var_os(DATABASE).expect("run by another test"));
    let reported = std::fs::File::create(acknowledged(&path)).unwrap();
    let database = rusqlite::Connection::open(&path).unwrap();
    database.execute_batch("PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA wal_autocheckpoint=200;").unwrap();
    // Part of the database is written through a mapping, which sends no notifications.
    database.execute_batch("PRAGMA mmap_size=268435456; CREATE TABLE t(x TEXT)").unwrap();
    for n in 1i64.. {
        database.execute("INSERT INTO t VALUES (?1)", ["x".repeat(n as usize * 37 % 3000)]).unwrap();
        reported.write_all_at(&n.to_le_bytes(), 0).unwrap();
        // Fast, but limited, so that the captures do not grow with the machine's speed.
        if n % 10 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn each_capture_has_what_was_acknowledged(home: &Path, kind: DriverKind) {
    let store_dir = tempfile::tempdir().unwrap();
    let store = Store::open(&store_dir.path().join("store")).unwrap();
    let places = |name: &str| {
        let workspace = home.join(name);
        std::fs::create_dir(&workspace).unwrap();
        WorkspacePaths {
            workspace,
            staging: home.join(format!("{name}.staging")),
            index: home.join(format!("{name}.index")),
        }
    };
    let here = places("workspace");
    let path = here.workspace.join("data.db");
    let mut tracker = Tracker::open(here).unwrap();
    assert_eq!(tracker.driver().kind, kind);
    let writer = Writer::start(&path);
    let until = Instant::now() + Duration::from_secs(180);
    while count(&acknowledged(&path)) == 0 {
        assert!(Instant::now() < until, "nothing is committed");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut captured = Vec::new();
    for round in 0..ROUNDS {
        std::thread::sleep(Duration::from_millis(round as u64 * 7 % 40));
        tracker.prepare(&store).unwrap();
        writer.stop();
        let acknowledged = count(&acknowledged(&path));
        let collected = tracker.collect(&store);
        writer.go_on();
        // The process commits while the capture is stored.
        let tree = tracker.finish(collected.unwrap()).unwrap().tree;
        captured.push((tree, acknowledged));
    }
    drop(writer);
    assert!(captured[ROUNDS - 1].1 > captured[0].1, "it commits meanwhile: {captured:?}");
    for (n, (tree, acknowledged)) in captured.iter().enumerate() {
        let elsewhere = places(&format!("elsewhere{n}"));
        checkout(*tree, elsewhere.clone(), &store, Durability::Process).unwrap();
        let (verdict, rows) = rows(&elsewhere.workspace.join("data.db"));
        assert_eq!(verdict, "ok", "{kind:?}, capture {n}");
        // One further commit may be unacknowledged.
        assert!((*acknowledged..=acknowledged + 1).contains(&rows), "{kind:?}, capture {n}: {rows} of {acknowledged}");
    }
}

fn on(kind: &str, check: impl FnOnce(&Path)) {
    match Mounted::new(kind) {
        Ok(mounted) => check(&mounted.path()),
        Err(why) => eprintln!("ignored, because this host cannot mount {kind}: {why}"),
    }
}

#[test]
fn capture_has_acknowledged_commits() {
    let dir = tempfile::tempdir().unwrap();
    each_capture_has_what_was_acknowledged(dir.path(), DriverKind::Tracked);
}

#[test]
fn database_captured_by_reflink() {
    on("xfs", |at| each_capture_has_what_was_acknowledged(at, DriverKind::Reflink));
}

#[test]
fn database_captured_in_subvolume() {
    on("btrfs", |at| {
        let opened = std::fs::File::open(at).unwrap();
        btrfs::create(std::os::fd::AsFd::as_fd(&opened), "files").unwrap();
        each_capture_has_what_was_acknowledged(&at.join("files"), DriverKind::Btrfs);
    });
}
