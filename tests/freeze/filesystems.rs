//! Freezes and restores on each file system, with each driver: random changes, and equality afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use rusqlite::Connection;
use ryokan::core::engine::EngineName;
use serde_json::Value;

use super::conformance::{Queue, Source as _};
use super::postgres::{Server, add_password};
use super::postgres_server::Cluster;
use super::{Writer, amounts};
use crate::support::{Host, User, kernel, out};

/// Freezes per seed.
const ROUNDS: usize = 3;
const SEEDS: [u64; 2] = [1, 0x5eed];

/// Random numbers, the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// A PostgreSQL database of an estate.
enum Postgres {
    None,
    /// As a dump.
    Dumped(Server),
    /// With its whole server.
    Whole(Cluster),
}

impl Postgres {
    fn sql(&self, statement: &str) -> String {
        match self {
            Postgres::None => String::new(),
            Postgres::Dumped(server) => server.sql("shop", statement),
            Postgres::Whole(cluster) => cluster.sql("shop", statement),
        }
    }
}

/// A group `all` of a kernel, a repository, two databases and a directory in one place, and perhaps of PostgreSQL.
struct Estate {
    host: Host,
    place: PathBuf,
    postgres: Postgres,
    queue: Option<Queue>,
}

impl Estate {
    fn new(host: Host, place: PathBuf) -> Estate {
        Estate::with(host, place, Postgres::None)
    }

    fn with(host: Host, place: PathBuf, postgres: Postgres) -> Estate {
        let estate = Estate { host, place, postgres, queue: None };
        for folder in ["code", "files"] {
            fs::create_dir_all(estate.place.join(folder)).unwrap();
        }
        for journal in ["wal", "delete"] {
            let database = estate.open(journal);
            database.pragma_update(None, "journal_mode", journal).unwrap();
            database
                .execute_batch(
                    "CREATE TABLE t (id INTEGER PRIMARY KEY, body BLOB);
                     CREATE TABLE accounts (id INTEGER PRIMARY KEY, amount INTEGER);
                     INSERT INTO accounts VALUES (1, 500), (2, 500);",
                )
                .unwrap();
        }
        estate.git(&["init", "-q", "-b", "main"]);
        estate.git(&["commit", "-q", "--allow-empty", "-m", "first"]);
        estate.host.with(async |client| drop(kernel(&client, "agent", EngineName::Kaish).await));
        estate.host.ok(&["group", "new", "all"]);
        let path = |name: &str| estate.place.join(name).display().to_string();
        estate.host.ok(&["group", "add", "all", "--kernel", "agent"]);
        estate.host.ok(&["group", "add", "all", "--repository", &path("code")]);
        estate.host.ok(&["group", "add", "all", "--directory", &path("files")]);
        for journal in ["wal", "delete"] {
            let file = path(&format!("{journal}.db"));
            estate.host.ok(&["group", "add", "all", "--database", &file, "--name", journal]);
        }
        estate.postgres.sql("CREATE TABLE t (id int PRIMARY KEY, body text)");
        match &estate.postgres {
            Postgres::None => {}
            Postgres::Dumped(server) => {
                drop(estate.host.ok(&["group", "add", "all", "--postgres", &server.connection()]))
            }
            Postgres::Whole(_) => drop(estate.host.ok(&["group", "add", "all", "--server", "main"])),
        }
        estate
    }

    /// With a member of the user's own programs, which the host's configuration names.
    fn and(mut self, queue: Queue) -> Estate {
        queue.put(0);
        self.host.ok(&["group", "add", "all", "--command", "queue"]);
        self.queue = Some(queue);
        self
    }

    fn open(&self, journal: &str) -> Connection {
        Connection::open(self.place.join(format!("{journal}.db"))).unwrap()
    }

    fn git(&self, args: &[&str]) -> String {
        let mut command = Command::new("git");
        command.arg("-C").arg(self.place.join("code")).args(["-c", "user.name=t", "-c", "user.email=t@t"]).args(args);
        let output = command.env("HOME", self.host.path("home")).output().unwrap();
        assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Changes every member.
    fn change(&self, random: &mut Random) {
        for _ in 0..1 + random.below(6) {
            let (n, size) = (random.below(12), 1 + random.below(600_000));
            let path = self.place.join("files").join(format!("d{}", n % 3)).join(format!("f{n}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match random.below(5) {
                0 => drop(fs::remove_file(&path)),
                1 => drop(fs::remove_dir_all(path.parent().unwrap())),
                _ => {
                    fs::write(&path, vec![random.below(256) as u8; size as usize]).unwrap();
                    let mode = if random.below(2) == 0 { 0o640 } else { 0o755 };
                    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
                }
            }
        }
        for journal in ["wal", "delete"] {
            let database = self.open(journal);
            for _ in 0..1 + random.below(4) {
                let (id, size) = (random.below(10) as i64, random.below(200_000) as i64);
                database.execute("INSERT OR REPLACE INTO t VALUES (?, randomblob(?))", [id, size]).unwrap();
                database.execute("DELETE FROM t WHERE id = ?", [random.below(10) as i64]).unwrap();
            }
            if random.below(4) == 0 {
                database.execute_batch(&format!("CREATE TABLE t{} (x)", random.0)).unwrap();
            }
        }
        let (id, size) = (random.below(10), random.below(3000));
        self.postgres.sql(&format!(
            "INSERT INTO t SELECT {id}, string_agg(md5(n::text), '') FROM generate_series(0, {size}) n \
             ON CONFLICT (id) DO UPDATE SET body = EXCLUDED.body; DELETE FROM t WHERE id = {}",
            random.below(10)
        ));
        if random.below(4) == 0 {
            self.postgres.sql(&format!("CREATE TABLE t{} (x int)", random.0));
        }
        for _ in 0..1 + random.below(4) {
            self.change_code(random);
        }
        if let Some(queue) = &self.queue {
            queue.put(random.below(1000) as u32);
        }
        let (n, value) = (random.below(5), random.below(1000));
        let code = format!("x={value}; seq 1 {} > k{n}; rm -f k{}", 1 + value * 40, (n + 1) % 5);
        self.host.with(async |client| drop(out(&client.open_kernel("agent").await.expect("there").0, &code).await));
    }

    /// Changes files, index, branches or commits of the repository.
    fn change_code(&self, random: &mut Random) {
        let (n, other) = (random.below(4), random.below(4));
        let (file, commit) = (self.place.join("code").join(format!("s{n}")), ["commit", "-q", "--allow-empty", "-m"]);
        match random.below(12) {
            0 => {
                self.git(&["add", "-A"]);
                self.git(&[&commit[..], &[&random.0.to_string()]].concat());
            }
            1 => drop(self.git(&["add", "-A"])),
            2 => drop(fs::remove_file(&file)),
            // Also of a link, and of a file that is not there.
            3 => drop(fs::rename(&file, file.with_file_name(format!("s{other}")))),
            4 => {
                let _ = fs::remove_file(&file);
                std::os::unix::fs::symlink(format!("s{other}"), &file).unwrap();
            }
            5 => drop(self.git(&["checkout", "-q", "-B", &format!("b{n}")])),
            6 => drop(self.git(&["checkout", "-q", "--detach"])),
            7 if self.git(&["rev-list", "--count", "HEAD"]).trim() != "1" => {
                self.git(&["reset", "-q", ["--soft", "--mixed", "--hard"][other as usize % 3], "HEAD~1"]);
            }
            8 => {
                let folder = self.place.join("code").join(format!("d{n}"));
                fs::create_dir_all(&folder).unwrap();
                fs::write(folder.join("x"), other.to_string()).unwrap();
            }
            more => {
                let _ = fs::remove_file(&file);
                fs::write(&file, random.below(u64::MAX >> 33).to_string()).unwrap();
                let mode = if more == 9 { 0o755 } else { 0o644 };
                fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            }
        }
    }

    /// Everything that a freeze captures.
    fn state(&self) -> BTreeMap<String, String> {
        let mut state = BTreeMap::new();
        let folder = self.place.join("files");
        walk(&folder, &folder, &mut state);
        let rows = "SELECT md5(string_agg(id || body, ' ' ORDER BY id)) FROM t";
        let tables =
            "SELECT string_agg(relname, ' ' ORDER BY relname) FROM pg_class WHERE relkind = 'r' AND oid > 16383";
        state.insert("postgres".into(), format!("{} {}", self.postgres.sql(rows), self.postgres.sql(tables)));
        for journal in ["wal", "delete"] {
            let database = self.open(journal);
            let whole: String = database.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
            assert_eq!(whole, "ok");
            let mut rows = database.prepare("SELECT id, body FROM t").unwrap();
            let rows = rows.query_map([], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, Vec<u8>>(1)?))).unwrap();
            for row in rows {
                let (id, body) = row.unwrap();
                state.insert(format!("{journal} {id}"), blake3::hash(&body).to_hex().to_string());
            }
            let mut tables = database.prepare("SELECT name FROM sqlite_schema ORDER BY name").unwrap();
            let tables = tables.query_map([], |row| row.get::<_, String>(0)).unwrap();
            state.insert(journal.into(), tables.map(Result::unwrap).collect::<Vec<_>>().join(" "));
        }
        walk(&self.place, &self.place.join("code"), &mut state);
        state.retain(|name, _| !name.starts_with("code/.git"));
        state.insert("status".into(), self.git(&["status", "--porcelain"]));
        state.insert("commit".into(), self.git(&["rev-parse", "HEAD"]));
        state.insert("index".into(), self.git(&["ls-files", "--stage"]));
        if let Some(queue) = &self.queue {
            state.insert("queue".into(), queue.state());
        }
        let code = "echo $x; ls; /usr/bin/sha256sum *";
        let kernel =
            self.host.with(async |client| out(&client.open_kernel("agent").await.expect("there").0, code).await);
        state.insert("kernel".into(), kernel);
        state
    }

    /// Restores some members of the group after a change of all; the others stay.
    fn part_is_restored(&self, random: &mut Random, name: &str, frozen: &BTreeMap<String, String>) {
        self.change(random);
        let before = self.state();
        let mut expected = before.clone();
        let mut args = vec!["--yes", "restore", "all", name];
        // What the names of a member's entries begin with.
        let members = [("files", "d"), ("wal", "wal"), ("delete", "delete"), ("agent", "kernel"), ("queue", "queue")];
        let members = members.into_iter().filter(|(member, _)| *member != "queue" || self.queue.is_some());
        for (at, (member, of)) in members.enumerate() {
            if at > 0 && random.below(2) == 0 {
                continue;
            }
            args.extend(["--member", member]);
            let is_of = |entry: &str| match member {
                // Folders `d0` to `d2`, which are not the database `delete`.
                "files" => entry.starts_with(of) && !entry.starts_with("delete"),
                _ => entry == of || entry.starts_with(&format!("{of} ")),
            };
            expected.retain(|entry, _| !is_of(entry));
            expected.extend(frozen.iter().filter(|(entry, _)| is_of(entry)).map(|(k, v)| (k.clone(), v.clone())));
        }
        let restored = self.host.cli(&args);
        let said = String::from_utf8_lossy(&restored.stderr);
        // Data that was written by newer code than is there stays away.
        assert!(restored.status.success() || said.contains("was recorded with commit"), "{args:?}: {said}");
        assert_eq!(self.state(), if restored.status.success() { expected } else { before }, "{args:?}");
    }

    fn freeze(&self, name: &str) -> BTreeMap<String, String> {
        let taken: Value = serde_json::from_str(&self.host.ok(&["freeze", "all", "-m", name, "--json"])).unwrap();
        let members = taken["cost"]["members"].as_array().unwrap().iter();
        let text = |member: &Value, key: &str| member[key].as_str().unwrap().to_owned();
        members.map(|member| (text(member, "name"), text(member, "driver"))).collect()
    }
}

/// Content, mode and owner of the files below a folder.
pub fn walk(root: &Path, folder: &Path, state: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let (path, meta) = (entry.path(), entry.metadata().unwrap());
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let content = match meta.is_dir() {
            true => String::new(),
            false if meta.is_symlink() => fs::read_link(&path).unwrap().display().to_string(),
            false => format!("{} {}", meta.mtime_nsec(), blake3::hash(&fs::read(&path).unwrap()).to_hex()),
        };
        // Git does not keep times.
        let content = if name.starts_with("code") { content.split(' ').next_back().unwrap().into() } else { content };
        state.insert(name, format!("{:o} {} {content}", meta.mode(), meta.uid()));
        if meta.is_dir() {
            walk(root, &path, state);
        }
    }
}

fn restores_are_exact(estate: &Estate, expected: &[(&str, &str)]) {
    let (seeds, rounds, restores) = match estate.postgres {
        Postgres::None => (&SEEDS[..], ROUNDS, ROUNDS),
        // Each step takes seconds.
        Postgres::Dumped(_) | Postgres::Whole(_) => (&SEEDS[..1], 2, 1),
    };
    for seed in seeds {
        let mut random = Random(*seed);
        let mut frozen = Vec::new();
        for round in 0..rounds {
            estate.change(&mut random);
            let name = format!("s{seed}r{round}");
            frozen.push((estate.state(), name.clone()));
            let drivers = estate.freeze(&name);
            for (member, driver) in expected {
                assert_eq!(drivers[*member], *driver, "{member}");
            }
            assert_eq!(estate.state(), frozen[round].0, "seed {seed}: freeze {round} changes nothing");
        }
        for _ in 0..restores {
            estate.change(&mut random);
            let before = estate.state();
            let (state, name) = &frozen[random.below(rounds as u64) as usize];
            estate.host.ok(&["--yes", "restore", "all", name]);
            assert_eq!(estate.state(), *state, "seed {seed}: restore of {name}");
            estate.host.ok(&["--yes", "undo", "all"]);
            assert_eq!(estate.state(), before, "seed {seed}: undo of {name}");
            estate.host.ok(&["--yes", "restore", "all", name]);
            estate.part_is_restored(&mut random, name, state);
        }
    }
    let left: Vec<_> = fs::read_dir(&estate.place).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("ryokan")), "{left:?}");
}

/// Programs write to both databases during a freeze and a restore.
fn writers_see_whole_databases(estate: &Estate) {
    let place = |journal: &str| estate.place.join(format!("{journal}.db"));
    let writers = ["wal", "delete"].map(|journal| Writer::start(&place(journal)));
    estate.freeze("written");
    let begun = writers.each_ref().map(Writer::moves);
    // A commit between the safety freeze and the switch refuses the restore, which can be repeated.
    for journal in ["wal", "delete"] {
        let restore = ["--yes", "restore", "all", "written", "--member", journal];
        let restored = (0..20).any(|_| estate.host.cli(&restore).status.success());
        assert!(restored, "{journal}: {}", estate.host.log());
    }
    crate::support::until("writes after the restores", || {
        writers.iter().zip(begun).all(|(writer, begun)| writer.moves() > begun)
    });
    writers.into_iter().for_each(Writer::end);
    for journal in ["wal", "delete"] {
        amounts(&place(journal)).expect("a whole database");
    }
}

fn restores_are_exact_on(kind: &str, workspaces: &str) {
    let Some((mounted, mut host)) = Host::prepare_on(kind, User::Own) else { return };
    host.launch();
    let place = mounted.path().join("user");
    let expected =
        [("agent", workspaces), ("files", "reflink"), ("wal", "transaction"), ("delete", "clone"), ("code", "git")];
    let estate = Estate::new(host, place);
    let doctor = String::from_utf8_lossy(&estate.host.cli(&["doctor"]).stdout).into_owned();
    assert_eq!(doctor.contains("delete.db, "), kind == "btrfs", "{doctor}");
    estate.freeze("first");
    let first: Value = serde_json::from_str(&estate.host.ok(&["log", "all", "--json"])).unwrap();
    assert_eq!(first["lock"].as_str().unwrap().contains("subvolume "), kind == "btrfs", "{first}");
    restores_are_exact(&estate, &expected);
    writers_see_whole_databases(&estate);
}

/// A database that is gone comes back with the attribute of its file, although its directory has none.
#[test]
fn restored_database_keeps_no_cow() {
    let Some((mounted, mut host)) = Host::prepare_on("btrfs", User::Own) else { return };
    host.launch();
    let place = mounted.path().join("user");
    fs::create_dir(&place).unwrap();
    let (path, plain) = (place.join("shop.db"), place.join("plain.db"));
    host.ok(&["group", "new", "all"]);
    for path in [&path, &plain] {
        fs::write(path, "").unwrap();
        if path.ends_with("shop.db") {
            assert!(Command::new("chattr").arg("+C").arg(path).status().unwrap().success());
        }
        Connection::open(path).unwrap().execute_batch("CREATE TABLE t (x); INSERT INTO t VALUES (7)").unwrap();
        host.ok(&["group", "add", "all", "--database", path.to_str().unwrap()]);
    }
    let is_no_cow = |path: &Path| {
        let listed = Command::new("lsattr").arg("-d").arg(path).output().unwrap();
        String::from_utf8(listed.stdout).unwrap().split(' ').next().unwrap().contains('C')
    };
    assert_eq!([&path, &plain].map(|path| is_no_cow(path)), [true, false]);
    host.ok(&["freeze", "all", "-m", "good"]);
    for path in [&path, &plain] {
        fs::remove_file(path).unwrap();
    }
    host.ok(&["--yes", "restore", "all", "good"]);
    assert_eq!([&path, &plain].map(|path| is_no_cow(path)), [true, false]);
    for path in [&path, &plain] {
        let x: i64 = Connection::open(path).unwrap().query_row("SELECT x FROM t", [], |row| row.get(0)).unwrap();
        assert_eq!(x, 7);
    }
}

#[test]
fn restores_are_exact_everywhere() {
    let mut host = Host::prepare(User::Own);
    let queue = Queue::new(host.path("home").join("queue"));
    host.configure(&queue.configuration());
    host.launch();
    let place = host.path("home").join("user");
    // What the file system of the temporary folder does is not known.
    let expected = [("wal", "transaction"), ("code", "git"), ("queue", "program")];
    restores_are_exact(&Estate::new(host, place).and(queue), &expected);
}

#[test]
fn restores_are_exact_on_ext4() {
    let Some((mounted, mut host)) = Host::prepare_on("ext4", User::Own) else { return };
    host.launch();
    let expected = [("agent", "tracked"), ("files", "tracked"), ("wal", "transaction"), ("delete", "shared-lock")];
    let estate = Estate::new(host, mounted.path().join("user"));
    restores_are_exact(&estate, &expected);
    writers_see_whole_databases(&estate);
}

#[test]
fn restores_are_exact_on_btrfs() {
    restores_are_exact_on("btrfs", "btrfs");
}

#[test]
fn restores_are_exact_on_xfs() {
    restores_are_exact_on("xfs", "reflink");
}

#[test]
fn dumped_database_restores_exactly() {
    let server = Server::start();
    let mut host = Host::prepare(User::Own);
    add_password(&mut host, User::Own);
    host.launch();
    let place = host.path("home").join("user");
    let estate = Estate::with(host, place, Postgres::Dumped(server));
    restores_are_exact(&estate, &[("shop", "snapshot"), ("code", "git")]);
    assert!(estate.host.ok(&["log", "all", "--json"]).contains("pg_dump -Fc"));
}

#[test]
fn whole_server_restores_exactly() {
    let Some((mounted, mut host)) = Host::prepare_on("btrfs", User::Own) else { return };
    let cluster = Cluster::make(&mounted, &host, User::Own, "");
    host.launch();
    let estate = Estate::with(host, mounted.path().join("user"), Postgres::Whole(cluster));
    restores_are_exact(&estate, &[("main", "subvolume"), ("files", "reflink"), ("agent", "btrfs")]);
}
