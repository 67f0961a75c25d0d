//! A PostgreSQL database as a member, on a server of the test's own.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use ryokan::sys::fault;

use super::crash_safety::{killed, killed_at_start};
use super::pause::{Held, checkpoints};
use super::{Shop, Writer};
use crate::support::{Host, User, users};

const SECRET: &str = "hunter2-is-secret";

/// Where the programs of the server are.
pub fn programs() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        versions.map(|entry| entry.path().join("bin")).filter(|bin| bin.join("initdb").exists()).collect();
    found.sort();
    found.pop().expect("PostgreSQL is missing: scripts/check installs it (Debian: postgresql)")
}

/// A server on a Unix socket. It refuses to run as root: then it runs as the user of Debian's package.
pub struct Server {
    folder: tempfile::TempDir,
}

impl Server {
    pub fn start() -> Server {
        let folder = tempfile::Builder::new().prefix("rypg").tempdir_in("/tmp").unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(folder.path().join("secret"), SECRET).unwrap();
        let server = Server { folder };
        let done = server
            .own("initdb", &["-A", "scram-sha-256", "-U", "shop", "-E", "UTF8", "--no-locale", "-N", "--pwfile"])
            .arg(server.folder.path().join("secret"))
            .arg(server.data())
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let options =
            format!("-c listen_addresses= -c fsync=off -c unix_socket_directories={}", server.folder.path().display());
        let log = server.folder.path().join("log");
        let started = server
            .own("pg_ctl", &["start", "-w", "-o", &options, "-l"])
            .arg(&log)
            .arg("-D")
            .arg(server.data())
            .status();
        assert!(started.unwrap().success(), "{}", fs::read_to_string(log).unwrap_or_default());
        server.sql("postgres", "CREATE DATABASE shop");
        server.sql(
            "shop",
            "CREATE TABLE accounts (id int PRIMARY KEY, amount int); INSERT INTO accounts VALUES (1, 500), (2, 500)",
        );
        server
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// A program of the server, as the server's user.
    fn own(&self, program: &str, args: &[&str]) -> Command {
        let program = programs().join(program);
        let mut command = if nix::unistd::geteuid().is_root() {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command.args(args).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    pub fn psql(&self, database: &str, statement: &str) -> Output {
        let mut command = Command::new(programs().join("psql"));
        command
            .args(["-X", "-q", "-A", "-t", "-w", "-v", "ON_ERROR_STOP=1", "-U", "shop", "-h"])
            .arg(self.folder.path());
        command.args(["-d", database, "-c", statement]).env("PGPASSWORD", SECRET).output().unwrap()
    }

    pub fn sql(&self, database: &str, statement: &str) -> String {
        let output = self.psql(database, statement);
        assert!(output.status.success(), "{statement}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn databases(&self) -> String {
        self.sql("postgres", "SELECT datname FROM pg_database WHERE datname LIKE 'shop%' ORDER BY 1").replace('\n', " ")
    }

    pub fn connection(&self) -> String {
        format!("dbname=shop host={} user=shop", self.folder.path().display())
    }

    /// Everything, as text. No inactive copy is left.
    fn state(&self) -> String {
        assert_eq!(self.databases(), "shop");
        let rows = self.sql("shop", "SELECT * FROM accounts ORDER BY id");
        let sum = self.sql("shop", "SELECT sum(amount) FROM accounts");
        assert_eq!(sum, "1000", "a torn database: {rows}");
        format!("{rows} {}", self.sql("shop", "SELECT relname FROM pg_class WHERE relname LIKE 'new%'"))
    }

    fn change(&self) {
        self.sql("shop", "UPDATE accounts SET amount = 900 WHERE id = 1");
        self.sql("shop", "UPDATE accounts SET amount = 100 WHERE id = 2");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.own("pg_ctl", &["stop", "-m", "immediate", "-D"]).arg(self.data()).status();
    }
}

/// Gives the daemon a password file.
pub fn add_password(host: &mut Host, user: User) {
    let file = host.path("config").join("pgpass");
    fs::write(&file, format!("*:*:*:*:{SECRET}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    if user == User::Unprivileged {
        std::os::unix::fs::chown(&file, Some(crate::support::UNPRIVILEGED), None).unwrap();
    }
    host.env("PGPASSFILE", &file.display().to_string());
}

/// A group `plant` with the kernel and the database.
fn plant(user: User, server: &Server) -> Shop {
    let mut host = Host::prepare(user);
    add_password(&mut host, user);
    let shop = Shop::of(host, user);
    shop.host.ok(&["group", "new", "plant"]);
    shop.host.ok(&["group", "add", "plant", "--kernel", "agent"]);
    shop.host.ok(&["group", "add", "plant", "--postgres", &server.connection()]);
    shop
}

const RESTORE: [&str; 4] = ["--yes", "restore", "plant", "1"];

fn refused(shop: &Shop, command: &[&str], part: &str) {
    let output = shop.host.cli(command);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && reported.contains(part), "{command:?}: {reported}");
}

/// Whether a file below a folder holds a text.
fn holds(folder: &std::path::Path, text: &str) -> Option<PathBuf> {
    for entry in fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        let found = match path.is_dir() {
            true => holds(&path, text),
            false => fs::read(&path).ok()?.windows(text.len()).any(|part| part == text.as_bytes()).then_some(path),
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

#[test]
fn postgres_is_restored_as_one() {
    for user in users() {
        let server = Server::start();
        let shop = plant(user, &server);
        let (frozen, kernel) = (server.state(), shop.kernel_state());
        shop.host.ok(&["freeze", "plant"]);
        assert_eq!(server.state(), frozen, "a freeze changes nothing");
        server.change();
        server.sql("shop", "CREATE TABLE news (x int)");
        shop.host.with(async |client| {
            let agent = client.open_kernel("agent").await.expect("it is there").0;
            crate::support::out(&agent, "x=2; echo 2 > f").await;
        });
        let (changed, later) = (server.state(), shop.kernel_state());
        let diff = shop.host.ok(&["diff", "plant"]);
        assert!(diff.contains("~ schema schema") && diff.contains("+ rows public.news  0"), "{diff}");
        server.sql("postgres", "ALTER DATABASE shop SET work_mem = '5MB'; ALTER DATABASE shop CONNECTION LIMIT 9");
        let restored = shop.host.cli(&RESTORE);
        let said = String::from_utf8_lossy(&restored.stderr).into_owned();
        assert!(restored.status.success() && said.contains("its settings, its connection limit;"), "{said}");
        assert_eq!((server.state(), shop.kernel_state()), (frozen.clone(), kernel.clone()));
        shop.host.ok(&["--yes", "undo", "plant"]);
        assert_eq!((server.state(), shop.kernel_state()), (changed, later));
        // What was there cannot be dropped: the restored database serves all the same.
        server.sql("postgres", "ALTER DATABASE shop IS_TEMPLATE true");
        shop.host.ok(&RESTORE);
        assert_eq!(server.databases(), "shop shop_ryokan_new");
        server.sql("postgres", "ALTER DATABASE shop_ryokan_new IS_TEMPLATE false");
        server.sql("postgres", "DROP DATABASE shop_ryokan_new");
        assert_eq!(server.state(), frozen);
        let subscribe = "CREATE SUBSCRIPTION news CONNECTION 'dbname=x' PUBLICATION p WITH (connect = false)";
        server.sql("shop", subscribe);
        shop.host.ok(&["freeze", "plant", "-m", "subscribed"]);
        refused(&shop, &RESTORE, "has subscriptions: news");
        server.sql("shop", "ALTER SUBSCRIPTION news SET (slot_name = NONE)");
        server.sql("shop", "DROP SUBSCRIPTION news");
        shop.host.ok(&["--yes", "restore", "plant", "subscribed"]);
        assert_eq!(
            (server.state(), server.sql("shop", "SELECT count(*) FROM pg_subscription")),
            (frozen.clone(), "0".into())
        );
        // A database that is gone.
        server.sql("postgres", "DROP DATABASE shop WITH (FORCE)");
        refused(&shop, &["freeze", "plant"], "no database shop");
        shop.host.ok(&RESTORE);
        assert_eq!(server.state(), frozen);
        shop.host.ok(&["--yes", "undo", "plant"]);
        assert_eq!(server.databases(), "");
        shop.host.ok(&RESTORE);
        // The password is in no file of the daemon.
        shop.host.ok(&["audit"]);
        assert_eq!(holds(&shop.host.data(), SECRET), None);
        assert!(!shop.host.log().contains(SECRET));
        refused(&shop, &["group", "add", "plant", "--postgres", "dbname=shop password=x"], "a password is not taken");
        refused(&shop, &["group", "add", "plant", "--postgres", &format!("{}x", server.connection())], "");
    }
}

#[test]
fn postgres_stays_whole_under_writes() {
    let server = Server::start();
    let shop = plant(users()[0], &server);
    let (folder, program) = (server.folder.path().to_owned(), programs().join("psql"));
    // Each write is one transaction; connections that a restore ends fail.
    let writer = Writer::run(move || {
        let mut command = Command::new(&program);
        command.args(["-X", "-q", "-w", "-U", "shop", "-d", "shop", "-h"]).arg(&folder).env("PGPASSWORD", SECRET);
        command.args(["-1", "-c", "UPDATE accounts SET amount = amount - 1 WHERE id = 1"]);
        command.args(["-c", "UPDATE accounts SET amount = amount + 1 WHERE id = 2"]).stderr(Stdio::null());
        command.stdout(Stdio::null()).status().unwrap();
    });
    for n in 0..3 {
        shop.host.ok(&["freeze", "plant", "-m", &format!("n{n}")]);
        server.state();
    }
    // A role that may only read freezes as often.
    server.sql("postgres", &format!("CREATE ROLE reader LOGIN PASSWORD '{SECRET}' IN ROLE pg_read_all_data"));
    let reader = server.connection().replace("user=shop", "user=reader");
    shop.host.ok(&["group", "new", "seen"]);
    shop.host.ok(&["group", "add", "seen", "--postgres", &reader]);
    for _ in 0..2 {
        shop.host.ok(&["freeze", "seen"]);
    }
    for _ in 0..2 {
        let before = writer.moves();
        shop.host.ok(&["--yes", "restore", "plant", "n0"]);
        server.state();
        crate::support::until("writes after the restore", || writer.moves() > before + 2);
        server.state();
    }
    writer.end();
    server.state();
}

#[test]
fn killed_postgres_restore_is_whole() {
    let server = Server::start();
    let mut shop = plant(*users().last().unwrap(), &server);
    shop.host.ok(&["freeze", "plant"]);
    let frozen = server.state();
    server.change();
    let changed = server.state();
    for fault in [
        "freeze.member.snapshot:2=kill",
        "freeze.member.prepare:2=kill",
        "freeze.member.switch:2=kill",
        "source.postgres.switch=kill",
        "source.postgres.switched=kill",
        "catalog.group.restored.before_commit=kill",
        "catalog.group.restored.after_commit=kill",
        "freeze.quiesced.clear.unlink=kill",
    ] {
        killed(&mut shop, fault, &RESTORE);
        shop.host.launch();
        let is_committed = fault.contains("after_commit") || fault.contains("clear");
        assert_eq!(
            server.state(),
            if is_committed { frozen.clone() } else { changed.clone() },
            "{fault}\n{}",
            shop.host.log()
        );
        if is_committed {
            shop.host.ok(&["--yes", "undo", "plant"]);
            assert_eq!(server.state(), changed);
        }
    }
    // A recovery that is killed is repeated.
    killed(&mut shop, "catalog.group.restored.before_commit=kill", &RESTORE);
    killed_at_start(&mut shop, "freeze.member.revert=kill");
    killed_at_start(&mut shop, "freeze.quiesced.clear.unlink=kill");
    shop.host.launch();
    assert_eq!(server.state(), changed);
    for fault in ["source.postgres.switch=eio", "source.postgres.switched=eio"] {
        shop.host.kill();
        shop.host.env(fault::VARIABLE, fault);
        shop.host.launch();
        refused(&shop, &RESTORE, "as it was");
        assert_eq!(server.state(), changed, "{fault}");
    }
}

/// The snapshot holds although rows change before the dump; definitions cannot change until then.
#[test]
fn dump_follows_pause() {
    let server = Server::start();
    let mut shop = plant(users()[0], &server);
    let (frozen, before) = (server.state(), checkpoints(&shop));
    let mut held = Held::begin(&mut shop, "plant", 2);
    crate::support::until("the kernel's checkpoint", || checkpoints(&shop) > before);
    server.change();
    server.sql("shop", "CREATE TABLE news (x int)");
    let changed = server.state();
    let emptied = server.psql("shop", "SET lock_timeout = '200ms'; TRUNCATE accounts");
    assert!(String::from_utf8_lossy(&emptied.stderr).contains("lock timeout"), "an older snapshot would be empty");
    assert!(held.is_under_way());
    assert!(held.end(), "{}", shop.host.log());
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ryokan'";
    crate::support::until("the end of the transaction", || server.sql("postgres", sessions) == "0");
    shop.host.ok(&["--yes", "restore", "plant", "held"]);
    assert_eq!(server.state(), frozen);
    shop.host.ok(&["--yes", "undo", "plant"]);
    assert_eq!(server.state(), changed);
    // A daemon that ends during the store leaves no transaction.
    killed(&mut shop, "freeze.member.store:2=kill", &["freeze", "plant"]);
    crate::support::until("the end of the transaction", || server.sql("postgres", sessions) == "0");
    shop.host.launch();
    shop.host.ok(&["freeze", "plant"]);
}

/// A dump would hold what the options of foreign data say, in the store and in exports.
#[test]
fn dump_holds_no_credentials() {
    const FOREIGN: &str = "correct-horse-is-secret";
    let server = Server::start();
    let shop = plant(users()[0], &server);
    server.sql("shop", "CREATE FOREIGN DATA WRAPPER away");
    server.sql("shop", "CREATE SERVER other FOREIGN DATA WRAPPER away OPTIONS (host 'far')");
    let options = format!("(user 'far', sslkey '/k', passfile '/p', password_required 'false', password '{FOREIGN}')");
    server.sql("shop", &format!("CREATE USER MAPPING FOR shop SERVER other OPTIONS {options}"));
    refused(&shop, &["freeze", "plant"], "option password of the user mapping of role shop for server other");
    refused(&shop, &["freeze", "plant"], "DROP password");
    server.sql("shop", "ALTER USER MAPPING FOR shop SERVER other OPTIONS (DROP password)");
    server.sql("shop", &format!("ALTER SERVER other OPTIONS (ADD link 'pg://far:{FOREIGN}@other/shop')"));
    refused(&shop, &["freeze", "plant"], "option link of server other");
    server.sql("shop", "ALTER SERVER other OPTIONS (DROP link)");
    server.sql("shop", &format!("CREATE FOREIGN TABLE far (x int) SERVER other OPTIONS (apikey '{FOREIGN}')"));
    refused(&shop, &["freeze", "plant"], "option apikey of foreign table public.far");
    assert_eq!(shop.host.ok(&["log", "plant", "--json"]), "");
    assert_eq!(holds(&shop.host.data(), FOREIGN), None);
    assert!(!shop.host.log().contains(FOREIGN));
    server.sql("shop", "DROP FOREIGN TABLE far");
    shop.host.ok(&["freeze", "plant", "-m", "clean"]);
    let mapping = "SELECT array_length(umoptions, 1) FROM pg_user_mappings";
    server.sql("shop", "ALTER USER MAPPING FOR shop SERVER other OPTIONS (DROP sslkey)");
    shop.host.ok(&["--yes", "restore", "plant", "clean"]);
    assert_eq!(server.sql("shop", mapping), "4", "options without secrets are restored");
}

/// Who may create objects in a database decides what a bare name in it means.
#[test]
fn foreign_functions_are_not_called() {
    let server = Server::start();
    let shop = plant(users()[0], &server);
    server.sql("shop", "CREATE SCHEMA bad; CREATE TABLE bad.called (name text)");
    for (name, arguments, answer) in
        [("pg_export_snapshot", "", "'forged'"), ("format", "text, name, name", "'accounts'")]
    {
        let body = format!("INSERT INTO bad.called VALUES ('{name}'); SELECT {answer}::text");
        let made = format!("CREATE FUNCTION bad.{name}({arguments}) RETURNS text LANGUAGE sql AS $$ {body} $$");
        server.sql("shop", &made);
    }
    server.sql("shop", "ALTER DATABASE shop SET search_path = bad, public, pg_catalog");
    shop.host.ok(&["freeze", "plant"]);
    shop.host.ok(&["diff", "plant", "1"]);
    assert_eq!(server.sql("shop", "SELECT name FROM bad.called"), "");
}

#[test]
fn diff_counts_rows() {
    let server = Server::start();
    let shop = plant(users()[0], &server);
    server.sql("shop", "CREATE SCHEMA other; CREATE TABLE other.\"odd (name\" (x int); CREATE TABLE gone (x int)");
    shop.host.ok(&["freeze", "plant", "-m", "one"]);
    let same = shop.host.ok(&["diff", "plant", "one"]);
    assert!(same.contains("? content rows  (not compared: ") && !same.contains("~ rows"), "{same}");
    server.sql("shop", "INSERT INTO accounts SELECT n, 0 FROM generate_series(3, 7) n; DROP TABLE gone");
    server.sql("shop", "INSERT INTO other.\"odd (name\" VALUES (1), (2)");
    shop.host.ok(&["freeze", "plant", "-m", "two"]);
    // From dump to dump, and from dump to the present.
    for diff in [shop.host.ok(&["diff", "plant", "one", "two"]), shop.host.ok(&["diff", "plant", "one"])] {
        assert!(diff.contains("~ rows public.accounts  2 → 7"), "{diff}");
        assert!(diff.contains("~ rows other.\"odd (name\"  0 → 2"), "{diff}");
        assert!(diff.contains("- rows public.gone"), "{diff}");
    }
    assert!(!shop.host.ok(&["diff", "plant", "two"]).contains("~ rows"));
}
