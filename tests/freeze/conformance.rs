//! What every kind of data source keeps to, by one suite. `DataSource` in `src/supervisor/freeze/sources/mod.rs` is the
//! interface.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rusqlite::Connection;
use ryokan::sys::fault;

use super::filesystems::walk;
use super::postgres::{Server, add_password};
use super::postgres_server::Cluster;
use super::sources::PROGRAM;
use crate::support::{Host, User, until};

/// A source, as another program sees it.
pub(super) trait Source {
    /// The arguments of `group add` that name it.
    fn member(&self) -> [String; 2];
    /// Makes version `n` the content: another schema and other rows, or other files. Says whether it could.
    fn put(&self, n: u32) -> bool;
    /// Everything that a freeze must hold. Fails if something is left of an operation.
    fn state(&self) -> String;
    /// Makes a capture fail, and what it reports.
    fn spoil(&self) -> Option<&'static str> {
        None
    }
    /// Ends that.
    fn mend(&self) {}
    /// Whether a change between two looks of a freeze fails it. Otherwise the freeze holds the content of one moment.
    fn finds_changes(&self) -> bool {
        true
    }
}

const RESTORE: [&str; 4] = ["--yes", "restore", "conform", "one"];

fn freezes(host: &Host) -> usize {
    host.ok(&["log", "conform", "--json"]).lines().count()
}

/// Runs a command of a daemon that waits at a fault's label, and what another program does there. Says whether the command
/// succeeded, and what it said.
pub fn held(host: &mut Host, label: &str, args: &[&str], meanwhile: impl FnOnce()) -> (bool, String) {
    let file = host.path("hold");
    let reached = file.with_extension("reached");
    let _ = fs::remove_file(&reached);
    fs::write(&file, "").unwrap();
    host.kill();
    host.env(fault::VARIABLE, &format!("{label}=hold"));
    host.env(fault::HOLD, &file.display().to_string());
    host.launch();
    let mut command = host.command("ryokan");
    command.arg("--no-autostart").args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let running = command.spawn().unwrap();
    until(label, || reached.exists());
    meanwhile();
    fs::remove_file(&file).unwrap();
    let output = running.wait_with_output().unwrap();
    host.kill();
    host.env(fault::VARIABLE, "");
    host.launch();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn conforms(host: &mut Host, source: &dyn Source) {
    host.ok(&["group", "new", "conform"]);
    let [kind, target] = source.member();
    assert!(source.put(1));
    host.ok(&["group", "add", "conform", &kind, &target, "--name", "source"]);
    // A revision is repeatable, and a changed source has another one.
    let one = source.state();
    host.ok(&["freeze", "conform", "-m", "one"]);
    assert_eq!(source.state(), one, "a freeze changes nothing");
    assert_eq!(host.ok(&["lock", "conform"]), host.ok(&["lock", "conform"]));
    assert!(host.ok(&["lock", "conform", "--check"]).contains("as at the newest"));
    assert!(source.put(2), "writers are admitted");
    let two = source.state();
    assert_eq!(host.cli(&["lock", "conform", "--check"]).status.code(), Some(1));
    assert!(!host.ok(&["diff", "conform"]).contains("no differences"));
    // A restore gives what was frozen, and the undo what was before.
    host.ok(&RESTORE);
    assert_eq!(source.state(), one);
    host.ok(&["--yes", "undo", "conform"]);
    assert_eq!(source.state(), two);
    // A change between the first look and the capture is found, or the freeze holds one moment.
    let before = freezes(host);
    let change = || assert!(source.put(3), "a freeze keeps no writers waiting");
    let (done, said) = held(host, "freeze.member.snapshot", &["freeze", "conform", "-m", "changed"], change);
    let three = source.state();
    assert_eq!(
        (done, freezes(host)),
        (!source.finds_changes(), before + usize::from(!source.finds_changes())),
        "{said}"
    );
    assert!(done || said.contains("changed"), "{said}");
    if done {
        assert!(source.put(2));
        host.ok(&["--yes", "restore", "conform", "changed"]);
        assert_eq!(source.state(), three);
    }
    // One that changed after the safety freeze is not replaced: no program loses what it wrote.
    let before = source.state();
    let mut written = false;
    let (done, said) = held(host, "freeze.member.switch", &RESTORE, || written = source.put(4));
    let now = source.state();
    assert_eq!(done, !written, "{said}");
    assert!(source.put(4));
    let expected = match done {
        true => one.clone(),
        false => source.state(),
    };
    assert!(now == expected && now != before, "{said}: {now}");
    assert!(done || said.contains("every member is as it was"), "{said}");
    // A failed freeze is not visible, and the source goes on.
    if let Some(why) = source.spoil() {
        let before = freezes(host);
        let output = host.cli(&["freeze", "conform"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        source.mend();
        assert!(!output.status.success() && said.contains(why), "{said}");
        assert_eq!((freezes(host), source.state()), (before, now_of(source, 4)));
    }
    // So does one whose daemon ends within the pause.
    host.kill();
    host.env(fault::VARIABLE, "freeze.member.snapshot=kill");
    host.launch();
    let _ = host.cli(&["freeze", "conform"]);
    assert!(host.ends_soon(), "{}", host.log());
    host.kill();
    host.env(fault::VARIABLE, "");
    host.launch();
    until("the source goes on", || source.put(5));
    let five = source.state();
    host.ok(&["freeze", "conform"]);
    assert_eq!(source.state(), five);
    host.ok(&["--yes", "group", "rm", "conform"]);
}

/// The state of a version.
fn now_of(source: &dyn Source, n: u32) -> String {
    assert!(source.put(n), "writers are admitted");
    source.state()
}

struct Sqlite {
    path: PathBuf,
}

impl Sqlite {
    fn new(path: PathBuf, journal: &str) -> Sqlite {
        Connection::open(&path).unwrap().pragma_update(None, "journal_mode", journal).unwrap();
        Sqlite { path }
    }

    fn spoilt(&self) -> PathBuf {
        self.path.with_extension("whole")
    }
}

impl Source for Sqlite {
    fn member(&self) -> [String; 2] {
        ["--database".into(), self.path.display().to_string()]
    }

    fn put(&self, n: u32) -> bool {
        let database = Connection::open(&self.path).unwrap();
        database.busy_timeout(std::time::Duration::ZERO).unwrap();
        let statements = format!(
            "BEGIN IMMEDIATE; DROP TABLE IF EXISTS t; CREATE TABLE t (x, c{n}); INSERT INTO t \
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {n}000) SELECT i, {n} FROM n; COMMIT;"
        );
        database.execute_batch(&statements).is_ok()
    }

    fn state(&self) -> String {
        let database = Connection::open(&self.path).unwrap();
        let read = "SELECT (SELECT group_concat(sql) FROM sqlite_schema), count(*), sum(x) FROM t";
        let row = |row: &rusqlite::Row<'_>| {
            Ok(format!("{} {} {}", row.get::<_, String>(0)?, row.get::<_, i64>(1)?, row.get::<_, i64>(2)?))
        };
        let left = fs::read_dir(self.path.parent().unwrap()).unwrap().flatten();
        assert!(!left.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().ends_with(".ryokan")));
        database.query_row(read, [], row).unwrap()
    }

    fn spoil(&self) -> Option<&'static str> {
        fs::rename(&self.path, self.spoilt()).unwrap();
        fs::write(&self.path, "this is no database".repeat(100)).unwrap();
        Some("database_damaged")
    }

    fn mend(&self) {
        fs::rename(self.spoilt(), &self.path).unwrap();
    }
}

struct Directory {
    path: PathBuf,
}

impl Source for Directory {
    fn member(&self) -> [String; 2] {
        ["--directory".into(), self.path.display().to_string()]
    }

    /// Of the same size each time.
    fn put(&self, n: u32) -> bool {
        let sub = self.path.join("sub");
        fs::create_dir_all(&sub).unwrap();
        fs::write(sub.join("b"), n.to_string().repeat(100_000)).unwrap();
        fs::set_permissions(sub.join("b"), fs::Permissions::from_mode(0o600 + n)).unwrap();
        fs::write(self.path.join("a"), n.to_string()).is_ok()
    }

    fn state(&self) -> String {
        let mut state = BTreeMap::new();
        walk(&self.path, &self.path, &mut state);
        assert!(!self.path.with_file_name(".files.ryokan").exists());
        // Without times.
        state.values_mut().for_each(|value| *value = value.split(' ').next_back().unwrap().to_owned() + &value[..7]);
        format!("{state:?}")
    }

    fn spoil(&self) -> Option<&'static str> {
        drop(std::os::unix::net::UnixListener::bind(self.path.join("socket")).unwrap());
        Some("socket (a socket)")
    }

    fn mend(&self) {
        fs::remove_file(self.path.join("socket")).unwrap();
    }
}

/// The user's own programs, one of which identifies the data.
pub(super) struct Queue {
    folder: PathBuf,
}

impl Queue {
    pub fn new(folder: PathBuf) -> Queue {
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("program"), PROGRAM).unwrap();
        fs::set_permissions(folder.join("program"), fs::Permissions::from_mode(0o755)).unwrap();
        Queue { folder }
    }

    pub fn configuration(&self) -> String {
        let program = self.folder.join("program").display().to_string();
        let verbs = ["freeze", "capture", "thaw", "restore", "revision"];
        format!("[sources.queue]\n{}", verbs.map(|verb| format!("{verb} = [{program:?}, {verb:?}]\n")).concat())
    }
}

impl Source for Queue {
    fn member(&self) -> [String; 2] {
        ["--command".into(), "queue".into()]
    }

    fn put(&self, n: u32) -> bool {
        fs::write(self.folder.join("data"), n.to_string()).is_ok()
    }

    fn state(&self) -> String {
        assert!(!self.folder.join("frozen").exists(), "the program is still frozen");
        fs::read_to_string(self.folder.join("data")).unwrap()
    }

    fn spoil(&self) -> Option<&'static str> {
        fs::write(self.folder.join("fail-capture"), "").unwrap();
        Some("no capture today")
    }
}

const VERSION: &str = "SELECT string_agg(attname, ' ' ORDER BY attnum), (SELECT count(*) || ' ' || sum(x) FROM t) FROM \
                       pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped";

fn version(n: u32) -> String {
    format!(
        "DROP TABLE IF EXISTS t; CREATE TABLE t (x int, c{n} text); INSERT INTO t SELECT i, {n} FROM generate_series(1, {n}00) i"
    )
}

struct Dumped(Server);

impl Source for Dumped {
    fn member(&self) -> [String; 2] {
        ["--postgres".into(), self.0.connection()]
    }

    fn put(&self, n: u32) -> bool {
        self.0.psql("shop", &version(n)).status.success()
    }

    fn state(&self) -> String {
        let names = "SELECT string_agg(datname, ' ') FROM pg_database WHERE datname LIKE 'shop%'";
        assert_eq!(self.0.sql("postgres", names), "shop", "a copy is left");
        self.0.sql("shop", VERSION)
    }
}

struct Whole(Cluster);

impl Source for Whole {
    fn member(&self) -> [String; 2] {
        ["--server".into(), "main".into()]
    }

    fn put(&self, n: u32) -> bool {
        self.0.psql("shop", &version(n)).status.success()
    }

    fn state(&self) -> String {
        self.0.sql("shop", VERSION)
    }

    fn finds_changes(&self) -> bool {
        false
    }
}

fn prepared(configuration: &str) -> (Host, PathBuf) {
    let host = Host::prepare(User::Own);
    let place = host.path("home").join("user");
    fs::create_dir_all(&place).unwrap();
    host.configure(configuration);
    (host, place)
}

fn database(place: &Path, journal: &str) -> Sqlite {
    Sqlite::new(place.join(format!("{journal}.db")), journal)
}

#[test]
fn databases_conform() {
    let (mut host, place) = prepared("");
    host.launch();
    for journal in ["wal", "delete"] {
        conforms(&mut host, &database(&place, journal));
    }
}

#[test]
fn directory_conforms() {
    let (mut host, place) = prepared("");
    host.launch();
    conforms(&mut host, &Directory { path: place.join("files") });
}

#[test]
fn command_conforms() {
    let (mut host, place) = prepared("");
    let queue = Queue::new(place.join("queue"));
    host.configure(&queue.configuration());
    host.launch();
    conforms(&mut host, &queue);
    // One that lies about its data, or about its restore, is found.
    host.ok(&["group", "new", "conform"]);
    host.ok(&["group", "add", "conform", "--command", "queue"]);
    fs::write(queue.folder.join("lie"), "").unwrap();
    let refused = |args: &[&str], part: &str| {
        let output = host.cli(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(part), "{said}");
    };
    refused(&["freeze", "conform"], "changed");
    fs::remove_file(queue.folder.join("lie")).unwrap();
    host.ok(&["freeze", "conform", "-m", "one"]);
    let changed = now_of(&queue, 7);
    fs::write(queue.folder.join("lie-restore"), "").unwrap();
    refused(&RESTORE, "did not bring the data back");
    assert_eq!(queue.state(), changed);
    // Also on the way back: the group stays unfinished until the data is there.
    fs::write(queue.folder.join("lie-always"), "").unwrap();
    refused(&RESTORE, "did not bring the former data back");
    assert!(host.ok(&["group", "show", "conform"]).contains("interrupted"));
    refused(&["freeze", "conform"], "did not bring the former data back");
    fs::remove_file(queue.folder.join("lie-always")).unwrap();
    host.ok(&["freeze", "conform"]);
    assert_eq!(queue.state(), changed);
}

#[test]
fn dumped_database_conforms() {
    let source = Dumped(Server::start());
    let (mut host, _) = prepared("");
    add_password(&mut host, User::Own);
    host.launch();
    conforms(&mut host, &source);
}

#[test]
fn whole_server_conforms() {
    let Some((mounted, mut host)) = Host::prepare_on("btrfs", User::Own) else { return };
    let source = Whole(Cluster::make(&mounted, &host, User::Own, ""));
    host.launch();
    conforms(&mut host, &source);
}
