//! Data sources: a directory, and one that the user's own programs capture and restore.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;

use ryokan::sys::fault;

use super::Shop;
use super::crash_safety::{armed, killed, killed_at_start, points};
use crate::support::{Host, User, until, users};

/// A program with its data, its log and a mark while it is frozen, in the home. `fail-VERB` makes it fail once,
/// `slow-VERB` hang, `meddle` write to the directory while that is frozen, `lie` print another revision each time, and
/// `lie-restore` bring other data back.
pub const PROGRAM: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 8
echo "$1" >> log
if [ -e "fail-$1" ]; then rm "fail-$1"; echo "no $1 today" >&2; exit 3; fi
if [ -e "slow-$1" ]; then sleep 61; fi
case $1 in
freeze) touch frozen ;;
thaw) rm -f frozen ;;
capture) [ -e frozen ] || exit 9; if [ -e meddle ]; then printf "$(cat meddle)" > ../uploads/a; fi; env > environment; cat data ;;
restore) [ -e frozen ] || exit 9; cat > data.new; mv data.new data
  if [ -e lie-restore ]; then rm lie-restore; echo other > data; fi
  if [ -e lie-always ]; then echo other > data; fi ;;
revision) if [ -e lie ]; then echo x >> lie; cat lie; fi; cat data ;;
esac
"#;

/// A group `plant` of the directory `uploads` and of the command source `queue`, and the folder with the directory.
struct Plant(Shop, PathBuf);

impl Plant {
    fn new(user: User) -> Plant {
        let host = Host::prepare(user);
        let home = host.path("home");
        Plant::of(host, user, home)
    }

    fn of(mut host: Host, user: User, place: PathBuf) -> Plant {
        let queue = host.path("home").join("queue");
        fs::create_dir(&queue).unwrap();
        fs::write(queue.join("program"), PROGRAM).unwrap();
        fs::set_permissions(queue.join("program"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(queue.join("data"), "one").unwrap();
        let program = queue.join("program").display().to_string();
        let argv: String =
            ["freeze", "capture", "thaw", "restore"].map(|verb| format!("{verb} = [{program:?}, {verb:?}]\n")).concat();
        host.configure(&format!(
            "[upkeep]\ngrace = \"0s\"\n[sources.queue]\n{argv}timeout = \"10s\"\nmax_size = \"1M\"\n"
        ));
        host.env("SECRET_TOKEN", "do-not-pass");
        let plant = Plant(Shop::of(host, user), place);
        let uploads = plant.uploads();
        fs::create_dir_all(uploads.join("sub/empty")).unwrap();
        fs::write(uploads.join("a"), "a1").unwrap();
        fs::write(uploads.join("sub/b"), "b1".repeat(100_000)).unwrap();
        fs::set_permissions(uploads.join("sub/b"), fs::Permissions::from_mode(0o750)).unwrap();
        std::os::unix::fs::symlink("sub/b", uploads.join("link")).unwrap();
        plant.0.give();
        let host = &plant.0.host;
        host.ok(&["group", "new", "plant"]);
        host.ok(&["group", "add", "plant", "--directory", &uploads.display().to_string()]);
        host.ok(&["group", "add", "plant", "--command", "queue"]);
        plant
    }

    fn uploads(&self) -> PathBuf {
        self.1.join("uploads")
    }

    fn queue(&self, name: &str) -> PathBuf {
        self.0.host.path("home").join("queue").join(name)
    }

    /// Makes the program fail or hang.
    fn arm(&self, name: &str) {
        fs::write(self.queue(name), "").unwrap();
        self.0.give();
    }

    fn files(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut folders = vec![self.uploads()];
        while let Some(folder) = folders.pop() {
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            for entry in entries {
                let path = entry.unwrap().path();
                let meta = fs::symlink_metadata(&path).unwrap();
                let text = match () {
                    () if meta.is_symlink() => format!("-> {}", fs::read_link(&path).unwrap().display()),
                    () if meta.is_dir() => String::from("/"),
                    () => blake3::hash(&fs::read(&path).unwrap()).to_hex()[..8].to_owned(),
                };
                let time = if meta.is_dir() { 0 } else { meta.mtime_nsec() };
                found.push(format!("{} {:o} {} {time} {text}", path.display(), meta.mode(), meta.uid()));
                if meta.is_dir() {
                    folders.push(path);
                }
            }
        }
        found.sort();
        found
    }

    /// Everything that a freeze captures; the program is never left frozen, and nothing is left beside the directory.
    fn state(&self) -> String {
        assert!(!self.queue("frozen").exists(), "the program is still frozen\n{}", self.0.host.log());
        assert!(!self.uploads().with_file_name(".uploads.ryokan").exists(), "a folder is left");
        format!("{:#?} {:?}", self.files(), fs::read_to_string(self.queue("data")).unwrap())
    }

    fn change(&self) {
        let uploads = self.uploads();
        fs::remove_dir_all(uploads.join("sub")).unwrap();
        fs::write(uploads.join("a"), "a2").unwrap();
        fs::write(uploads.join("new"), "n").unwrap();
        fs::write(self.queue("data"), "two").unwrap();
        self.0.give();
    }

    fn verbs(&self) -> Vec<String> {
        let text = fs::read_to_string(self.queue("log")).unwrap_or_default();
        fs::remove_file(self.queue("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn refused(&self, command: &[&str], part: &str) {
        let output = self.0.host.cli(command);
        let reported = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && reported.contains(part), "{command:?}: {reported}");
    }
}

const FREEZE: [&str; 2] = ["freeze", "plant"];
const RESTORE: [&str; 4] = ["--yes", "restore", "plant", "1"];

#[test]
fn sources_are_restored_as_one() {
    for user in users() {
        let plant = Plant::new(user);
        let host = &plant.0.host;
        let (frozen, inode) = (plant.state(), fs::metadata(plant.uploads()).unwrap().ino());
        host.ok(&FREEZE);
        assert_eq!(plant.verbs(), ["freeze", "capture", "thaw"]);
        assert_eq!(plant.state(), frozen, "a freeze changes nothing");
        let lock: toml::Table = host.ok(&["lock", "plant"]).parse().expect("TOML");
        assert_eq!(lock["directory"][0]["name"].as_str(), Some("uploads"));
        assert!(host.ok(&["lock", "plant", "--check"]).contains("as at the newest"));
        plant.change();
        plant.refused(&["lock", "plant", "--check"], "");
        let changed = plant.state();
        let diff = host.ok(&["diff", "plant", "1"]);
        assert!(
            diff.contains("~ file a  (content") && diff.contains("+ file new") && diff.contains("- file sub"),
            "{diff}"
        );
        assert!(diff.contains("? data data  (not compared: "), "{diff}");
        host.ok(&RESTORE);
        assert_eq!(plant.verbs(), ["freeze", "capture", "restore", "thaw"]);
        assert_eq!(plant.state(), frozen);
        assert_ne!(fs::metadata(plant.uploads()).unwrap().ino(), inode, "the directory was exchanged");
        host.ok(&["--yes", "undo", "plant"]);
        assert_eq!(plant.state(), changed);
        // Nothing that a freeze needs is garbage, without a grace either.
        host.ok(&["gc"]);
        host.ok(&RESTORE);
        assert_eq!(plant.state(), frozen);
        host.ok(&["verify"]);
        let environment = fs::read_to_string(plant.queue("environment")).unwrap();
        assert!(environment.contains("RYOKAN_SOURCE=queue") && environment.contains("PATH="), "{environment}");
        assert!(!environment.contains("do-not-pass"), "{environment}");
        // A directory that is missing is restored, and missing again after the undo.
        fs::remove_dir_all(plant.uploads()).unwrap();
        plant.refused(&FREEZE, "there is no");
        host.ok(&RESTORE);
        assert_eq!(plant.state(), frozen);
        host.ok(&["--yes", "undo", "plant"]);
        assert!(!plant.uploads().exists());
    }
}

#[test]
fn changing_directory_is_refused() {
    let plant = Plant::new(users()[0]);
    // Members are captured in the order of their names: the program runs between the lock and the capture of the
    // directory, then between its capture and its confirmation.
    for (before, name) in [("queue", "queue"), ("queue", "z")] {
        plant.0.host.ok(&["group", "rm", "plant", before]);
        plant.0.host.ok(&["group", "add", "plant", "--command", "queue", "--name", name]);
        plant.0.host.ok(&FREEZE);
        plant.verbs();
        // Of the same size, of another size, and of none.
        for content in ["a2", "a3", "longer", ""] {
            fs::write(plant.queue("meddle"), content).unwrap();
            plant.refused(&FREEZE, "(directory_changed)");
            assert_eq!(plant.verbs().last().map(String::as_str), Some("thaw"), "{content}");
        }
        fs::remove_file(plant.queue("meddle")).unwrap();
    }
    let writer = super::Writer::run({
        let path = plant.uploads().join("a");
        let mut count = 0u64;
        move || {
            count += 1;
            fs::write(&path, count.to_string()).unwrap();
        }
    });
    // A loaded host may delay the writer for the whole of a freeze, but not for each.
    until("a refusal", || {
        let output = plant.0.host.cli(&FREEZE);
        String::from_utf8_lossy(&output.stderr).contains("(directory_changed)")
    });
    writer.end();
    plant.0.host.ok(&FREEZE);
}

#[test]
fn unsafe_directories_are_refused() {
    let plant = Plant::new(users()[0]);
    let (host, uploads) = (&plant.0.host, plant.uploads().display().to_string());
    let socket = std::os::unix::net::UnixListener::bind(plant.uploads().join("socket")).unwrap();
    plant.refused(&FREEZE, "socket (a socket)");
    drop(socket);
    fs::remove_file(plant.uploads().join("socket")).unwrap();
    host.ok(&FREEZE);
    // A kernel keeps the former directory when it is exchanged.
    host.ok(&["mount", "agent", "/mnt/uploads", &uploads]);
    plant.refused(&RESTORE, "kernel agent uses");
    plant.refused(&FREEZE, "kernel agent uses");
    host.ok(&["unmount", "agent", "/mnt/uploads"]);
    host.ok(&RESTORE);
    // A directory is exchanged with everything in it.
    host.ok(&["group", "new", "other"]);
    let sub = plant.uploads().join("sub").display().to_string();
    plant.refused(&["group", "add", "plant", "--directory", &sub, "--name", "sub"], "overlap");
    plant.refused(&["group", "add", "other", "--directory", &sub], "group plant has");
    plant.refused(&["group", "add", "other", "--directory", &uploads], "group plant has");
    let taken = host.path("home").join(".free.ryokan");
    fs::create_dir_all(&taken).unwrap();
    fs::create_dir(host.path("home").join("free")).unwrap();
    plant.0.give();
    let free = host.path("home").join("free").display().to_string();
    plant.refused(&["group", "add", "other", "--directory", &free], "exists already");
    fs::remove_dir(&taken).unwrap();
    host.ok(&["group", "add", "other", "--directory", &free]);
    plant.refused(&["group", "add", "other", "--directory", "/proc/self"], "");
    plant.refused(
        &["group", "add", "other", "--directory", &plant.uploads().join("a").display().to_string()],
        "not a directory",
    );
}

#[test]
fn thaw_follows_every_freeze() {
    let plant = Plant::new(users()[0]);
    let state = plant.state();
    for (fault, part, verbs) in [
        ("fail-freeze", "no freeze today", &["freeze", "thaw"][..]),
        ("fail-capture", "no capture today", &["freeze", "capture", "thaw"]),
        ("slow-freeze", "did not end within 10s", &["freeze", "thaw"]),
        ("slow-capture", "did not end within 10s", &["freeze", "capture", "thaw"]),
    ] {
        plant.arm(fault);
        plant.refused(&FREEZE, part);
        assert_eq!(plant.verbs(), verbs, "{fault}");
        let _ = fs::remove_file(plant.queue(fault));
        assert_eq!(plant.state(), state, "{fault}");
    }
    // A thaw that fails is repeated by the next operation.
    plant.arm("fail-thaw");
    let done = plant.0.host.cli(&FREEZE);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && plant.queue("frozen").exists(), "{said}");
    for part in ["member queue still does not work", "no thaw today", "the next operation of group plant"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    plant.0.host.ok(&FREEZE);
    assert_eq!(plant.verbs(), ["freeze", "capture", "thaw", "thaw", "freeze", "capture", "thaw"]);
    assert_eq!(plant.state(), state);
    // So does the answer of a freeze that failed.
    plant.arm("fail-capture");
    plant.arm("fail-thaw");
    plant.refused(&FREEZE, "member queue still does not work: ");
    plant.0.host.ok(&["--json", "freeze", "plant"]);
    plant.verbs();
    // The size of the data is bounded, and what is too large is not stored.
    fs::write(plant.queue("data"), "x".repeat(1 << 20)).unwrap();
    plant.0.host.ok(&FREEZE);
    fs::write(plant.queue("data"), "x".repeat((1 << 20) + 1)).unwrap();
    plant.refused(&FREEZE, "wrote more than 1048576 bytes");
    plant.refused(&["group", "add", "plant", "--command", "none"], "no data source");
}

/// What a program writes to its standard error may hold a password: only the client that asked sees it.
#[test]
fn program_text_is_not_recorded() {
    const SECRET: &str = "swordfish-is-secret";
    let user = users()[0];
    let host = Host::prepare(user);
    let (code, program) = (host.path("home").join("code"), host.path("home").join("program"));
    fs::write(&program, format!("#!/bin/sh\necho 'password {SECRET}' >&2\n[ \"$1\" = thaw ] || exit 3\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let argv: String =
        ["freeze", "capture", "thaw", "restore"].map(|verb| format!("{verb} = [{program:?}]\n")).concat();
    host.configure(&format!("[sources.queue]\n{argv}[rebuild.shop]\nrepository = {code:?}\nrun = [{program:?}]\n"));
    let shop = Shop::of(host, user);
    let (host, old) = (&shop.host, shop.git(&["rev-parse", "HEAD"]));
    shop.write("app.py", "two");
    shop.commit("second");
    shop.sql("ALTER TABLE accounts ADD COLUMN note TEXT; PRAGMA user_version = 2;");
    host.ok(&["freeze", "shop", "-m", "new"]);
    shop.git(&["checkout", "-q", "--detach", &old]);
    shop.sql("ALTER TABLE accounts DROP COLUMN note; PRAGMA user_version = 1;");
    host.ok(&["group", "new", "plant"]);
    host.ok(&["group", "add", "plant", "--command", "queue"]);
    host.ok(&["new", "paused"]);
    host.ok(&["exec", "paused", "x=1"]);
    host.ok(&["group", "add", "plant", "--kernel", "paused"]);
    for (command, part) in [
        (&["freeze", "plant", "--on-failure", "pause"][..], "exit code 3"),
        (&["--yes", "restore", "shop", "new", "--member", "data"], "was not rebuilt"),
    ] {
        let refused = host.cli(command);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(part) && said.contains(SECRET), "{command:?}: {said}");
    }
    let (audit, shown) = (host.ok(&["audit", "--json"]), host.ok(&["group", "show", "plant", "--json"]));
    assert!(audit.contains("exit code 3; what it wrote is in the daemon's log of programs"), "{audit}");
    assert!(shown.contains("exit code 3"), "{shown}");
    let events = host.with(async |client| {
        let (mut events, mut seen) = (client.events(0).await.expect("events"), String::new());
        while let Ok(Ok(event)) = tokio::time::timeout(std::time::Duration::from_secs(1), events.next()).await {
            seen.push_str(&format!("{event:?}"));
        }
        seen
    });
    assert!(events.contains("group_paused"), "{events}");
    for (record, text) in [("audit", audit), ("group", shown), ("events", events), ("log", host.log())] {
        assert!(!text.contains(SECRET), "{record}: {text}");
    }
    let databases = ["catalog.db", "catalog.db-wal"].map(|name| fs::read(host.data().join(name)).unwrap_or_default());
    let holds = |bytes: &Vec<u8>| bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes());
    assert!(!databases.iter().any(holds) && databases.iter().any(|bytes| !bytes.is_empty()));
}

#[test]
fn failed_restore_of_sources_goes_back() {
    let plant = Plant::new(users()[0]);
    plant.0.host.ok(&FREEZE);
    let frozen = plant.state();
    plant.change();
    let changed = plant.state();
    plant.verbs();
    for fault in ["fail-restore", "slow-restore"] {
        plant.arm(fault);
        if fault.starts_with("slow") {
            // It hangs once: the flag is seen, and gone before the next attempt.
            let (flag, log) = (plant.queue(fault), plant.queue("log"));
            std::thread::spawn(move || {
                until("the restore", || fs::read_to_string(&log).is_ok_and(|log| log.contains("restore")));
                std::thread::sleep(std::time::Duration::from_secs(5));
                let _ = fs::remove_file(flag);
            });
        }
        plant.refused(&RESTORE, "every member is as it was");
        let verbs = plant.verbs();
        assert_eq!((verbs.first().unwrap().as_str(), verbs.last().unwrap().as_str()), ("freeze", "thaw"), "{verbs:?}");
        let _ = fs::remove_file(plant.queue(fault));
        assert_eq!(plant.state(), changed, "{fault}");
    }
    plant.0.host.ok(&RESTORE);
    assert_eq!(plant.state(), frozen);
}

#[test]
fn killed_daemon_thaws_sources() {
    let mut plant = Plant::new(*users().last().unwrap());
    let state = plant.state();
    let labels = ["freeze.quiesced.dir", "freeze.quiesced.record", "freeze.quiesced.clear", "freeze.member.snapshot"];
    for point in points(&labels) {
        if point.starts_with("freeze.quiesced.dir") {
            let _ = fs::remove_dir_all(plant.0.host.data().join("groups/quiesced"));
        }
        armed(&mut plant.0, &format!("{point}=kill"), &FREEZE);
        assert_eq!(plant.state(), state, "{point}");
        let verbs = plant.verbs();
        assert!(!verbs.iter().any(|verb| verb == "freeze") || verbs.last().unwrap() == "thaw", "{point}: {verbs:?}");
    }
    // A recovery that is killed is repeated.
    killed(&mut plant.0, "freeze.member.snapshot:2=kill", &FREEZE);
    assert!(plant.queue("frozen").exists());
    for point in points(&["freeze.quiesced.clear"]) {
        killed_at_start(&mut plant.0, &format!("{point}=kill"));
    }
    plant.0.host.launch();
    assert_eq!(plant.state(), state);
    plant.0.host.ok(&FREEZE);
}

#[test]
fn killed_restore_of_sources_is_whole() {
    killed_restore_is_whole(Plant::new(*users().last().unwrap()));
}

/// The directory is exchanged there, and its times are set afterwards.
#[test]
fn killed_restore_on_xfs_is_whole() {
    let Some((mounted, host)) = Host::prepare_on("xfs", User::Own) else { return };
    let place = mounted.path().join("user");
    fs::create_dir(&place).unwrap();
    killed_restore_is_whole(Plant::of(host, User::Own, place));
}

fn killed_restore_is_whole(mut plant: Plant) {
    plant.0.host.ok(&FREEZE);
    let frozen = plant.state();
    plant.change();
    let changed = plant.state();
    let labels = [
        "source.directory.switch",
        "source.directory.switched",
        "source.command.restore",
        "freeze.member.prepare",
        "catalog.group.restored",
    ];
    let mut faults: Vec<String> = points(&labels).iter().map(|point| format!("{point}=kill")).collect();
    faults.push("freeze.member.switch:2=kill".into());
    for fault in faults {
        killed(&mut plant.0, &fault, &RESTORE);
        plant.0.host.launch();
        let is_committed = fault == "catalog.group.restored.after_commit=kill";
        assert_eq!(plant.state(), if is_committed { frozen.clone() } else { changed.clone() }, "{fault}");
        if is_committed {
            plant.0.host.ok(&["--yes", "undo", "plant"]);
        }
    }
    // A recovery that is killed is repeated.
    killed(&mut plant.0, "catalog.group.restored.before_commit=kill", &RESTORE);
    killed_at_start(&mut plant.0, "freeze.member.revert=kill");
    killed_at_start(&mut plant.0, "freeze.member.revert:2=kill");
    plant.0.host.launch();
    assert_eq!(plant.state(), changed);
    for fault in ["source.directory.switched=eio", "source.command.restore=eio", "source.directory.switch=eio"] {
        plant.0.host.kill();
        plant.0.host.env(fault::VARIABLE, fault);
        plant.0.host.launch();
        plant.refused(&RESTORE, "as it was");
        assert_eq!(plant.state(), changed, "{fault}");
    }
    plant.0.host.kill();
    plant.0.host.env(fault::VARIABLE, "");
    plant.0.host.launch();
    plant.0.host.ok(&RESTORE);
    assert_eq!(plant.state(), frozen);
}

#[test]
fn half_removed_directories_are_never_exchanged() {
    let mut plant = Plant::new(*users().last().unwrap());
    plant.0.host.ok(&FREEZE);
    plant.change();
    let changed = plant.state();
    killed(&mut plant.0, "source.directory.discard=kill", &RESTORE);
    // What a removal would have come to.
    let beside = plant.uploads().with_file_name(".uploads.ryokan");
    let removed = ["new", "gone"].map(|name| fs::remove_file(beside.join(name).join("a")).is_ok());
    assert!(removed.contains(&true));
    plant.0.host.launch();
    assert_eq!(plant.state(), changed);
}

#[test]
fn foreign_files_are_kept() {
    let mut plant = Plant::new(*users().last().unwrap());
    plant.0.host.ok(&FREEZE);
    plant.change();
    let changed = plant.state();
    killed(&mut plant.0, "catalog.group.restored.before_commit=kill", &RESTORE);
    fs::write(plant.uploads().join("foreign"), "work").unwrap();
    plant.0.give();
    plant.0.host.launch();
    until("the recovery", || !plant.uploads().join("foreign").exists());
    assert_eq!(plant.state(), changed);
    let beside: Vec<PathBuf> =
        fs::read_dir(plant.0.host.path("home")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let kept = beside.iter().find(|path| path.display().to_string().contains("uploads.kept-")).expect("it is kept");
    assert_eq!(fs::read_to_string(kept.join("foreign")).unwrap(), "work");
    assert!(plant.0.host.log().contains(&kept.display().to_string()));
}
