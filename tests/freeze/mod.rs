//! Groups: a kernel, a repository and a database that are frozen and restored as one.

mod conformance;
mod crash_safety;
mod failures;
mod filesystems;
mod full_disk;
mod gate;
mod gate_workspaces;
mod hostile_imports;
mod kept_commits;
mod labels;
mod moving;
mod nested_databases;
mod parked;
mod pause;
mod paused;
mod planted_links;
mod portable;
mod portable_submodules;
mod postgres;
mod postgres_server;
mod provenance;
mod removal;
mod repositories;
mod restore;
mod server_recovery;
mod sources;
mod submodules;
mod unfinished;
mod worktrees;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rusqlite::Connection;
use ryokan::core::engine::EngineName;

use crate::support::{Host, UNPRIVILEGED, User, kernel, out};

/// A host with a kernel `agent`, a repository `code`, a database `data`, and the group `shop` of them.
struct Shop {
    host: Host,
    user: User,
}

impl Shop {
    fn new(user: User) -> Shop {
        Shop::of(Host::prepare(user), user)
    }

    /// A shop with the freezes `old` and `new`: in the second, code and data are newer. Returns both commits.
    fn with_newer_data(user: User) -> (Shop, String, String) {
        let shop = Shop::new(user);
        let old = shop.git(&["rev-parse", "HEAD"]);
        shop.host.ok(&["freeze", "shop", "-m", "old"]);
        shop.write("app.py", "two");
        let new = shop.commit("second");
        shop.sql("ALTER TABLE accounts ADD COLUMN note TEXT; PRAGMA user_version = 2;");
        shop.host.ok(&["freeze", "shop", "-m", "new"]);
        (shop, old, new)
    }

    fn of(mut host: Host, user: User) -> Shop {
        host.launch();
        let shop = Shop { host, user };
        let (code, data) = (shop.code(), shop.data());
        std::fs::create_dir(&code).unwrap();
        let database = Connection::open(&data).unwrap();
        database
            .execute_batch(
                "PRAGMA journal_mode = WAL; PRAGMA user_version = 1; CREATE TABLE accounts (id INTEGER PRIMARY KEY, amount INTEGER);
                 INSERT INTO accounts VALUES (1, 500), (2, 500);",
            )
            .unwrap();
        drop(database);
        shop.give();
        shop.git(&["init", "-q", "-b", "main"]);
        shop.write("app.py", "one");
        shop.commit("first");
        shop.host.with(async |client| {
            out(&kernel(&client, "agent", EngineName::Kaish).await, "x=1; echo 1 > f").await;
        });
        shop.host.ok(&["group", "new", "shop"]);
        shop.host.ok(&["group", "add", "shop", "--kernel", "agent"]);
        shop.host.ok(&["group", "add", "shop", "--repository", &code.display().to_string()]);
        shop.host.ok(&["group", "add", "shop", "--database", &data.display().to_string(), "--name", "data"]);
        shop
    }

    fn code(&self) -> PathBuf {
        self.host.path("home").join("code")
    }

    fn data(&self) -> PathBuf {
        self.host.path("home").join("shop.db")
    }

    /// Gives everything in the home to the daemon's user.
    fn give(&self) {
        if self.user == User::Unprivileged && nix::unistd::geteuid().is_root() {
            let owner = format!("{UNPRIVILEGED}:{UNPRIVILEGED}");
            let done = Command::new("chown").args(["-R", &owner]).arg(self.host.path("home")).status().unwrap();
            assert!(done.success());
        }
    }

    fn git(&self, args: &[&str]) -> String {
        let mut command = Command::new("git");
        command.arg("-C").arg(self.code()).args([
            "-c",
            "safe.directory=*",
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
        ]);
        let output = command.args(args).env("HOME", self.host.path("home")).output().unwrap();
        assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        self.give();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.code().join(name), text).unwrap();
        self.give();
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.code().join(name)).ok()
    }

    fn commit(&self, message: &str) -> String {
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "-m", message]);
        self.git(&["rev-parse", "HEAD"])
    }

    fn sql(&self, text: &str) {
        let database = Connection::open(self.data()).unwrap();
        database.busy_timeout(std::time::Duration::from_secs(180)).unwrap();
        database.execute_batch(text).unwrap();
        drop(database);
        self.give();
    }

    /// The amounts; their sum is always 1000.
    fn amounts(&self) -> (i64, i64) {
        amounts(&self.data()).expect("a whole database")
    }

    fn kernel_state(&self) -> String {
        self.host.with(async |client| {
            let agent = client.open_kernel("agent").await.expect("it is there").0;
            out(&agent, "echo $x $(cat f)").await
        })
    }

    /// Everything that a freeze captures, as text.
    fn state(&self) -> String {
        let files = [self.read("app.py"), self.read("new.txt"), self.read("staged.txt")];
        let status = self.git(&["status", "--porcelain"]);
        format!(
            "{} | {:?} {status:?} {} | {:?}",
            self.kernel_state(),
            files,
            self.git(&["rev-parse", "HEAD"]),
            self.amounts()
        )
    }

    /// Dirty, staged and untracked work in the repository.
    fn work(&self) {
        self.write("app.py", "one, changed");
        self.write("staged.txt", "staged");
        self.git(&["add", "staged.txt"]);
        self.write("new.txt", "untracked");
    }

    /// Another state of every member.
    fn wreck(&self) {
        self.host.with(async |client| {
            let agent = client.open_kernel("agent").await.expect("it is there").0;
            out(&agent, "x=2; echo 2 > f").await;
        });
        self.git(&["checkout", "-q", "-f", "main"]);
        std::fs::remove_file(self.code().join("new.txt")).unwrap();
        self.write("app.py", "two");
        self.commit("second");
        self.wreck_data();
    }

    fn wreck_data(&self) {
        self.sql("UPDATE accounts SET amount = 900 WHERE id = 1; UPDATE accounts SET amount = 100 WHERE id = 2;");
    }

    fn freezes(&self) -> usize {
        self.host.ok(&["log", "shop", "--json"]).lines().count()
    }
}

fn amounts(path: &Path) -> rusqlite::Result<(i64, i64)> {
    let database = Connection::open(path)?;
    database.busy_timeout(std::time::Duration::from_secs(180))?;
    let read =
        database.query_row("SELECT sum(amount * (id = 1)), sum(amount * (id = 2)) FROM accounts", [], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?;
    let whole: String = database.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
    assert_eq!((read.0 + read.1, whole.as_str()), (1000, "ok"), "a torn database");
    Ok(read)
}

/// Moves amounts between the accounts until dropped, and checks the sum each time.
struct Writer {
    stop: Arc<AtomicBool>,
    moves: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Writer {
    fn start(path: &Path) -> Writer {
        let database = Connection::open(path).unwrap();
        database.busy_timeout(std::time::Duration::from_secs(180)).unwrap();
        Writer::run(move || {
            database
                .execute_batch(
                    "BEGIN IMMEDIATE; UPDATE accounts SET amount = amount - 1 WHERE id = 1;
                     UPDATE accounts SET amount = amount + 1 WHERE id = 2; COMMIT;",
                )
                .unwrap();
            let sum: i64 = database.query_row("SELECT sum(amount) FROM accounts", [], |row| row.get(0)).unwrap();
            assert_eq!(sum, 1000, "the writer saw a torn database");
        })
    }

    /// Repeats a write.
    fn run(mut write: impl FnMut() + Send + 'static) -> Writer {
        let (stop, moves) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, counts) = (Arc::clone(&stop), Arc::clone(&moves));
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                write();
                counts.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        Writer { stop, moves, thread: Some(thread) }
    }

    fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().expect("the writer saw whole states only");
    }
}
