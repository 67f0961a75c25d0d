//! A PostgreSQL server as a member: captured by snapshots of its Btrfs subvolume.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ryokan::sys::fault;

use super::crash_safety::{killed, killed_at_start};
use super::postgres::programs;
use super::{Shop, Writer};
use crate::support::{Host, Mounted, UNPRIVILEGED, User, until};

/// A server `main` in a subvolume, with programs that start and stop it.
pub struct Cluster {
    /// The folder with the data directory and the socket.
    pub place: PathBuf,
    user: u32,
}

fn done(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn uid_of(name: &str) -> u32 {
    done(Command::new("id").args(["-u", name])).parse().unwrap()
}

impl Cluster {
    /// Makes and starts it on a mounted Btrfs, and configures it, and more, for a daemon that does not run yet.
    pub fn make(mounted: &Mounted, host: &Host, user: User, more: &str) -> Cluster {
        let place = mounted.path().join("pg");
        fs::create_dir(&place).unwrap();
        let cluster = Cluster { place, user: if user == User::Own { uid_of("postgres") } else { UNPRIVILEGED } };
        done(Command::new("btrfs").args(["subvolume", "create"]).arg(cluster.data()));
        if user == User::Unprivileged {
            done(Command::new("chattr").arg("+C").arg(cluster.data()));
        }
        fs::create_dir(cluster.place.join("socket")).unwrap();
        for path in [cluster.data(), cluster.place.join("socket")] {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            std::os::unix::fs::chown(&path, Some(cluster.user), Some(cluster.user)).unwrap();
        }
        if user == User::Unprivileged {
            std::os::unix::fs::chown(&cluster.place, Some(cluster.user), Some(cluster.user)).unwrap();
        }
        // It wants a name for its user.
        let names = mounted.path().join("names");
        fs::write(&names, format!("server:x:{0}:{0}::/:/bin/false\n", cluster.user)).unwrap();
        let script = "mount --bind \"$1\" /etc/passwd && shift && exec \"$@\"";
        let mut init = Command::new("unshare");
        init.args(["-m", "sh", "-c", script, "sh"]).arg(names).args(cluster.as_user()).arg(programs().join("initdb"));
        done(init.args(["-A", "trust", "-U", "shop", "-E", "UTF8", "--no-locale", "-N", "-D"]).arg(cluster.data()));
        let options = format!("-c listen_addresses= -c unix_socket_directories={}", cluster.socket().display());
        // A daemon as root is not the server's user.
        let own = if user == User::Own { cluster.as_user().join(" ") } else { String::new() };
        let control = format!(
            "#!/bin/sh\nenv > {0}/environment\n[ -e {0}/broken-$1 ] && exit 7\n\
             [ -e {0}/late-$1 ] && {{ {own} {1}/pg_ctl $1 -W -m smart -D {0}/data; sleep 60; }}\nexec {own} {1}/pg_ctl $1 -w -m fast -D {0}/data -l {0}/socket/log -o '{options}'\n",
            cluster.place.display(),
            programs().display()
        );
        fs::write(cluster.control(), control).unwrap();
        fs::set_permissions(cluster.control(), fs::Permissions::from_mode(0o755)).unwrap();
        cluster.control_as_user("start");
        cluster.sql("postgres", "CREATE DATABASE shop");
        cluster.sql(
            "shop",
            "CREATE TABLE accounts (id int PRIMARY KEY, amount int); INSERT INTO accounts VALUES (1, 500), (2, 500)",
        );
        host.configure(&cluster.configuration("120s", more));
        cluster
    }

    /// A configuration of it and more.
    pub fn configuration(&self, timeout: &str, more: &str) -> String {
        let argv = |verb: &str| format!("[{:?}, {verb:?}]", self.control().display().to_string());
        format!(
            "[postgres.main]\ndata = {:?}\nconnection = \"dbname=postgres host={} user=shop\"\nprograms = {:?}\nstart = {}\nstop = {}\ntimeout = {timeout:?}\n{more}",
            self.data(),
            self.socket().display(),
            programs(),
            argv("start"),
            argv("stop")
        )
    }

    pub fn data(&self) -> PathBuf {
        self.place.join("data")
    }

    pub fn socket(&self) -> PathBuf {
        self.place.join("socket")
    }

    fn control(&self) -> PathBuf {
        self.place.join("control")
    }

    fn as_user(&self) -> Vec<String> {
        let user = self.user.to_string();
        ["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"].map(str::to_owned).to_vec()
    }

    pub fn control_as_user(&self, verb: &str) {
        let user = self.as_user();
        let own = fs::read_to_string(self.control()).unwrap().contains("setpriv");
        let mut command = Command::new(if own { "sh" } else { "setpriv" });
        if !own {
            command.args(&user[1..]);
            command.arg("sh");
        }
        // A server keeps its output.
        let status = command.arg(self.control()).arg(verb).stdin(Stdio::null()).stdout(Stdio::null()).status();
        assert!(status.unwrap().success(), "{verb}");
    }

    pub fn psql(&self, database: &str, statement: &str) -> std::process::Output {
        let mut command = Command::new(programs().join("psql"));
        command.args(["-X", "-q", "-A", "-t", "-w", "-v", "ON_ERROR_STOP=1", "-U", "shop", "-h"]).arg(self.socket());
        command.args(["-d", database, "-c", statement]).output().unwrap()
    }

    pub fn sql(&self, database: &str, statement: &str) -> String {
        let output = self.psql(database, statement);
        assert!(output.status.success(), "{statement}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Everything, as text. Nothing is left beside the data directory, nor in it.
    pub fn state(&self) -> String {
        let left: Vec<_> = fs::read_dir(&self.place).unwrap().flatten().map(|entry| entry.file_name()).collect();
        assert!(!left.iter().any(|name| name == ".data.ryokan"), "{left:?}");
        assert!(!self.data().join("ryokan.restored").exists());
        let databases = "SELECT string_agg(datname, ' ' ORDER BY 1) FROM pg_database";
        let tables = "SELECT string_agg(relname || ' ' || relnatts, ' ' ORDER BY 1) FROM pg_class WHERE relkind = 'r' AND oid > 16383";
        let sum = self.sql("shop", "SELECT sum(amount) FROM accounts");
        assert_eq!(sum, "1000", "a torn server");
        let rows = self.sql("shop", "SELECT md5(string_agg(accounts::text, ' ' ORDER BY id)) FROM accounts");
        format!("{} | {} | {rows}", self.sql("postgres", databases), self.sql("shop", tables))
    }

    pub fn change(&self) {
        self.sql("shop", "UPDATE accounts SET amount = CASE id WHEN 1 THEN 900 ELSE 100 END");
        self.sql("shop", "CREATE TABLE news (x int)");
        self.sql("postgres", "CREATE DATABASE other");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Also one that a failed test left in another place.
        let beside = self.place.join(".data.ryokan");
        if beside.exists() {
            let _ = fs::set_permissions(beside, fs::Permissions::from_mode(0o711));
        }
        for data in [self.data(), self.place.join(".data.ryokan/new"), self.place.join(".data.ryokan/trial")] {
            let user = self.as_user();
            let mut command = Command::new(&user[0]);
            command.args(&user[1..]).arg(programs().join("pg_ctl")).args(["stop", "-m", "immediate", "-D"]).arg(data);
            let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
    }
}

/// A group `plant` of the kernel and the server. The mount outlives both.
pub fn plant(user: User) -> Option<(Mounted, Shop, Cluster)> {
    let (mounted, host) = Host::prepare_on("btrfs", user)?;
    let cluster = Cluster::make(&mounted, &host, user, "");
    let shop = Shop::of(host, user);
    shop.host.ok(&["group", "new", "plant"]);
    shop.host.ok(&["group", "add", "plant", "--kernel", "agent"]);
    shop.host.ok(&["group", "add", "plant", "--server", "main"]);
    Some((mounted, shop, cluster))
}

pub const RESTORE: [&str; 4] = ["--yes", "restore", "plant", "1"];
pub const UNDO: [&str; 3] = ["--yes", "undo", "plant"];

pub fn refused(shop: &Shop, command: &[&str], part: &str) {
    let output = shop.host.cli(command);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && reported.contains(part), "{command:?}: {reported}");
}

#[test]
fn server_is_restored_as_one() {
    for user in [User::Own, User::Unprivileged] {
        let Some((_mounted, shop, cluster)) = plant(user) else { return };
        let (frozen, kernel) = (cluster.state(), shop.kernel_state());
        let taken: serde_json::Value = serde_json::from_str(&shop.host.ok(&["freeze", "plant", "--json"])).unwrap();
        let member = &taken["cost"]["members"][1];
        assert_eq!((member["driver"].as_str(), member["growth"].as_str()), (Some("subvolume"), Some("constant")));
        assert!(taken["notes"].to_string().contains("the server's credentials: verifiers of passwords"), "{taken}");
        assert_eq!(cluster.state(), frozen, "a freeze changes nothing");
        assert!(shop.host.ok(&["lock", "plant", "--check"]).contains("as at the newest"));
        cluster.change();
        shop.host.with(async |client| {
            let agent = client.open_kernel("agent").await.expect("it is there").0;
            crate::support::out(&agent, "x=2; echo 2 > f").await;
        });
        let (changed, later) = (cluster.state(), shop.kernel_state());
        refused(&shop, &["lock", "plant", "--check"], "");
        let diff = shop.host.ok(&["diff", "plant"]);
        assert!(diff.contains("~ schema schema") && diff.contains("? content rows  (not compared: "), "{diff}");
        shop.host.ok(&RESTORE);
        assert_eq!((cluster.state(), shop.kernel_state()), (frozen.clone(), kernel.clone()));
        // A user's service manager is reached by the one, and psql's options are none of the server's.
        let environment = fs::read_to_string(cluster.place.join("environment")).unwrap();
        assert!(environment.contains("XDG_RUNTIME_DIR=") && !environment.contains("PGOPTIONS="), "{environment}");
        let attributes = done(Command::new("lsattr").arg("-d").arg(cluster.data()));
        let is_no_cow = attributes.split(' ').next().unwrap().contains('C');
        assert_eq!(is_no_cow, user == User::Unprivileged, "{attributes}");
        // It is a subvolume again: it can be frozen.
        shop.host.ok(&["freeze", "plant"]);
        shop.host.ok(&UNDO);
        assert_eq!((cluster.state(), shop.kernel_state()), (changed.clone(), later));
        if user == User::Unprivileged {
            continue;
        }
        // A data directory that is gone.
        cluster.control_as_user("stop");
        fs::rename(cluster.data(), cluster.place.join("away")).unwrap();
        refused(&shop, &["freeze", "plant"], "main");
        shop.host.ok(&RESTORE);
        assert_eq!(cluster.state(), frozen);
        let at_rest = || {
            let undone = shop.host.cli(&UNDO);
            let said = String::from_utf8_lossy(&undone.stderr).into_owned();
            assert!(undone.status.success() && said.contains("its server is stopped"), "{said}");
        };
        at_rest();
        assert!(!cluster.data().exists());
        fs::rename(cluster.place.join("away"), cluster.data()).unwrap();
        cluster.control_as_user("start");
        assert_eq!(cluster.state(), changed);
        // One that does not start.
        cluster.control_as_user("stop");
        let control = cluster.data().join("global/pg_control");
        let whole = fs::read(&control).unwrap();
        fs::write(&control, "damaged").unwrap();
        shop.host.ok(&RESTORE);
        assert_eq!(cluster.state(), frozen);
        at_rest();
        assert_eq!(fs::read_to_string(&control).unwrap(), "damaged");
        fs::write(&control, whole).unwrap();
        shop.host.ok(&["gc"]);
        shop.host.ok(&RESTORE);
        assert_eq!(cluster.state(), frozen);
        shop.host.ok(&["verify"]);
    }
}

#[test]
fn server_stays_whole_under_writes() {
    let Some((_mounted, shop, cluster)) = plant(User::Own) else { return };
    let (socket, program) = (cluster.socket(), programs().join("psql"));
    // Connections fail while the server is stopped.
    let writer = Writer::run(move || {
        let mut command = Command::new(&program);
        command.args(["-X", "-q", "-w", "-U", "shop", "-d", "shop", "-h"]).arg(&socket);
        command.args(["-1", "-c", "UPDATE accounts SET amount = amount - 1 WHERE id = 1"]);
        command.args(["-c", "UPDATE accounts SET amount = amount + 1 WHERE id = 2"]).stderr(Stdio::null());
        command.stdout(Stdio::null()).status().unwrap();
    });
    let amount = || cluster.sql("shop", "SELECT amount FROM accounts WHERE id = 2").parse::<i64>().unwrap();
    let before = amount();
    shop.host.ok(&["freeze", "plant", "-m", "under load"]);
    let after = amount();
    until("writes after the freeze", || amount() > after);
    writer.end();
    let last = cluster.state();
    shop.host.ok(&["--yes", "restore", "plant", "under load"]);
    cluster.state();
    assert!((before..=after).contains(&amount()), "{before} {} {after}", amount());
    shop.host.ok(&UNDO);
    assert_eq!(cluster.state(), last, "every acknowledged write is in the state before the restore");
}

#[test]
fn killed_server_restore_is_whole() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Own) else { return };
    let frozen = cluster.state();
    for fault in ["source.server.snapshot=kill", "freeze.member.store:2=kill"] {
        killed(&mut shop, fault, &["freeze", "plant"]);
        shop.host.launch();
        assert_eq!((cluster.state(), shop.freezes()), (frozen.clone(), 0), "{fault}");
    }
    shop.host.ok(&["freeze", "plant"]);
    cluster.change();
    let changed = cluster.state();
    for fault in [
        "source.server.stop=kill",
        "freeze.member.prepare:2=kill",
        "source.server.switch=kill",
        "source.server.switched=kill",
        "catalog.group.restored.before_commit=kill",
        "source.server.start=kill",
    ] {
        killed(&mut shop, fault, &RESTORE);
        shop.host.launch();
        let is_committed = fault.contains("start");
        let expected = if is_committed { &frozen } else { &changed };
        assert_eq!(cluster.state(), *expected, "{fault}\n{}", shop.host.log());
    }
    shop.host.ok(&UNDO);
    // A recovery that is killed is repeated.
    killed(&mut shop, "source.server.switched=kill", &RESTORE);
    killed_at_start(&mut shop, "freeze.member.revert=kill");
    killed_at_start(&mut shop, "source.server.start=kill");
    shop.host.launch();
    assert_eq!(cluster.state(), changed);
    for fault in ["source.server.switched=eio", "source.server.switch=eio"] {
        shop.host.kill();
        shop.host.env(fault::VARIABLE, fault);
        shop.host.launch();
        refused(&shop, &RESTORE, "as it was");
        assert_eq!(cluster.state(), changed, "{fault}");
    }
}

#[test]
fn failing_server_programs_go_back() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Own) else { return };
    shop.host.ok(&["freeze", "plant"]);
    cluster.change();
    let changed = cluster.state();
    let broken = |verb: &str| cluster.place.join(format!("broken-{verb}"));
    fs::write(broken("stop"), "").unwrap();
    refused(&shop, &RESTORE, "exit code 7");
    fs::remove_file(broken("stop")).unwrap();
    assert_eq!(cluster.state(), changed);
    // A start that fails is repeated by the next operation.
    fs::write(broken("start"), "").unwrap();
    let output = shop.host.cli(&RESTORE);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && reported.contains("member main still does not work"), "{reported}");
    assert!(!cluster.psql("shop", "SELECT 1").status.success());
    fs::remove_file(broken("start")).unwrap();
    shop.host.ok(&UNDO);
    assert_eq!(cluster.state(), changed);
    // What another hand wrote in a restored server, before the restore is reverted, is kept.
    killed(&mut shop, "catalog.group.restored.before_commit=kill", &RESTORE);
    cluster.control_as_user("start");
    cluster.sql("shop", "CREATE TABLE foreign_work (x int)");
    shop.host.launch();
    assert_eq!(cluster.state(), changed);
    let beside = fs::read_dir(&cluster.place).unwrap().flatten().map(|entry| entry.path());
    let kept: Vec<PathBuf> = beside.filter(|path| path.display().to_string().contains("data.kept-")).collect();
    assert!(kept.len() == 1 && shop.host.log().contains(&kept[0].display().to_string()), "{kept:?}");
}

#[test]
fn unfit_servers_are_refused() {
    let Some((mounted, shop, cluster)) = plant(User::Own) else { return };
    shop.host.ok(&["freeze", "plant"]);
    refused(&shop, &["group", "add", "shop", "--server", "none"], "no PostgreSQL server");
    refused(&shop, &["group", "add", "shop", "--server", "main"], "group plant has");
    // Its user could put another directory into a place of root's.
    let give = |user| std::os::unix::fs::chown(&cluster.place, Some(user), None).unwrap();
    give(cluster.user);
    refused(&shop, &["freeze", "plant"], "others than root can write");
    give(0);
    // A tablespace elsewhere is in no snapshot.
    let space = mounted.path().join("space");
    fs::create_dir(&space).unwrap();
    std::os::unix::fs::chown(&space, Some(cluster.user), Some(cluster.user)).unwrap();
    cluster.sql("postgres", &format!("CREATE TABLESPACE elsewhere LOCATION '{}'", space.display()));
    refused(&shop, &["freeze", "plant"], "tablespaces outside");
    cluster.sql("postgres", "DROP TABLESPACE elsewhere");
    // Neither is a subvolume in it.
    let inner = cluster.data().join("base/inner");
    done(Command::new("btrfs").args(["subvolume", "create"]).arg(&inner));
    refused(&shop, &["freeze", "plant"], "another subvolume");
    fs::remove_dir(&inner).unwrap();
    shop.host.ok(&["freeze", "plant"]);
    plain_directory_is_refused();
}

fn plain_directory_is_refused() {
    let mut host = Host::prepare(User::Own);
    let data = host.path("home").join("data");
    fs::create_dir(&data).unwrap();
    let programs: &Path = &programs();
    host.configure(&format!(
        "[postgres.main]\ndata = {data:?}\nconnection = \"dbname=x\"\nprograms = {programs:?}\nstart = [\"/bin/true\"]\nstop = [\"/bin/true\"]\n"
    ));
    host.launch();
    host.ok(&["group", "new", "plant"]);
    let output = host.cli(&["group", "add", "plant", "--server", "main"]);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(5) && reported.contains("no subvolume of Btrfs"), "{reported}");
}

/// Pauses the writer of the ledger.
const PAUSE: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 8
case $1 in
freeze) touch pause; until [ -e paused ] || [ -e ended ]; do sleep 0.02; done ;;
thaw) rm -f pause; while [ -e paused ]; do sleep 0.02; done ;;
capture) echo none ;;
restore) cat > /dev/null ;;
esac
"#;

/// Each row of the server has a file, and each file a row.
#[test]
fn transactions_span_server_and_files() {
    let Some((mounted, host)) = Host::prepare_on("btrfs", User::Own) else { return };
    let place = mounted.path().join("user");
    fs::create_dir_all(place.join("ledger")).unwrap();
    let program = place.join("program");
    fs::write(&program, PAUSE).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let argv = |verb: &str| format!("{verb} = [{:?}, {verb:?}]\n", program.display().to_string());
    let source = ["freeze", "capture", "thaw", "restore"].map(argv).concat();
    let cluster = Cluster::make(&mounted, &host, User::Own, &format!("[sources.writer]\n{source}"));
    cluster.sql("shop", "CREATE TABLE ledger (n int PRIMARY KEY)");
    let shop = Shop::of(host, User::Own);
    shop.host.ok(&["group", "new", "plant"]);
    shop.host.ok(&["group", "add", "plant", "--command", "writer"]);
    shop.host.ok(&["group", "add", "plant", "--directory", &place.join("ledger").display().to_string()]);
    shop.host.ok(&["group", "add", "plant", "--server", "main"]);
    let (socket, psql, folder) = (cluster.socket(), programs().join("psql"), place.clone());
    let writer = Writer::run(move || {
        if folder.join("pause").exists() {
            fs::write(folder.join("paused"), "").unwrap();
            until("the thaw", || !folder.join("pause").exists());
            fs::remove_file(folder.join("paused")).unwrap();
        }
        let ask = |statement: &str| {
            let mut command = Command::new(&psql);
            command.args(["-X", "-q", "-A", "-t", "-w", "-U", "shop", "-d", "shop", "-h"]).arg(&socket);
            let output = command.args(["-c", statement]).output().unwrap();
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
        };
        // The server starts after the thaw.
        let Some(n) = ask("SELECT count(*) + 1 FROM ledger") else { return };
        fs::write(folder.join("ledger").join(&n), &n).unwrap();
        if ask(&format!("INSERT INTO ledger VALUES ({n})")).is_none() {
            fs::remove_file(folder.join("ledger").join(&n)).unwrap();
        }
    });
    let rows = || cluster.sql("shop", "SELECT string_agg(n::text, ' ' ORDER BY n::text COLLATE \"C\") FROM ledger");
    let files = || {
        let mut names: Vec<String> = fs::read_dir(place.join("ledger"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names.join(" ")
    };
    for name in ["one", "two"] {
        let before = writer.moves();
        until("writes", || writer.moves() > before + 5);
        shop.host.ok(&["freeze", "plant", "-m", name]);
    }
    shop.host.ok(&["--yes", "restore", "plant", "one"]);
    let before = writer.moves();
    until("writes after the restore", || writer.moves() > before + 2);
    writer.end();
    fs::write(place.join("ended"), "").unwrap();
    assert_eq!(rows(), files());
    let mut lengths = Vec::new();
    for name in ["one", "two"] {
        shop.host.ok(&["--yes", "restore", "plant", name]);
        assert_eq!(rows(), files(), "{name}");
        lengths.push(rows().len());
    }
    assert!(0 < lengths[0] && lengths[0] < lengths[1], "{lengths:?}");
}
