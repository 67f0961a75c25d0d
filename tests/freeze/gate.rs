//! The rehydration gate.

use std::os::unix::fs::PermissionsExt as _;

use ryokan::sys::fault;

use super::Shop;
use super::conformance::held;
use crate::support::{Host, users};

#[test]
fn newer_data_needs_newer_code() {
    let (shop, old, new) = Shop::with_newer_data(users()[0]);
    assert!(shop.host.ok(&["lock", "shop"]).contains(&new));
    assert!(shop.host.ok(&["lock", "shop", "--check"]).contains("as at"));
    // The code alone goes back: the data would be newer than it.
    let refused = shop.host.cli(&["--yes", "restore", "shop", "old", "--member", "code"]);
    let reported = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{reported}");
    assert!(reported.contains(&new[..10]) && reported.contains("or restore the whole group"), "{reported}");
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), new);
    // By hand: the check says so.
    shop.git(&["checkout", "-q", "--detach", &old]);
    assert_eq!(shop.host.cli(&["lock", "shop", "--check"]).status.code(), Some(4));
    shop.git(&["checkout", "-q", "main"]);
    shop.write("app.py", "three");
    shop.commit("third");
    let checked = shop.host.cli(&["lock", "shop", "--check"]);
    let reported = String::from_utf8_lossy(&checked.stdout).into_owned();
    // A descendant may use the data.
    assert_eq!((checked.status.code(), reported.contains("is at")), (Some(1), true), "{reported}");
    // Both together may go back, and the data alone.
    shop.host.ok(&["--yes", "restore", "shop", "old"]);
    // Code in a conflict is judged by nothing.
    shop.git(&["checkout", "-q", "-b", "side"]);
    shop.write("app.py", "side");
    shop.git(&["commit", "-q", "-a", "-m", "side"]);
    shop.git(&["-c", "alias.conflict=!git merge -q main || true", "conflict"]);
    let refused = shop.host.cli(&["--yes", "restore", "shop", "new", "--member", "data"]);
    let reported = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(4) && reported.contains("end the merge"), "{reported}");
    shop.git(&["merge", "--abort"]);
    shop.git(&["checkout", "-q", "--detach", &old]);
    // An index makes another schema of the same version.
    shop.host.ok(&["--yes", "restore", "shop", "new"]);
    shop.sql("CREATE INDEX notes ON accounts (note)");
    shop.git(&["checkout", "-q", "--detach", &old]);
    assert_eq!(shop.host.cli(&["lock", "shop", "--check"]).status.code(), Some(4));
    shop.host.ok(&["--yes", "restore", "shop", "old"]);
    shop.git(&["checkout", "-q", "main"]);
    shop.sql("ALTER TABLE accounts ADD COLUMN note TEXT; PRAGMA user_version = 2;");
    shop.host.ok(&["--yes", "restore", "shop", "old"]);
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), old);
    shop.host.ok(&["--yes", "undo", "shop"]);
    shop.host.ok(&["--yes", "restore", "shop", "old", "--member", "data"]);
    assert_eq!(shop.read("app.py").as_deref(), Some("three"));
}

#[test]
fn lock_names_what_changed() {
    let shop = Shop::new(users()[0]);
    let run = |code: &str| drop(shop.host.ok(&["exec", "agent", code]));
    run("echo one > uv.lock; mkdir -p node_modules/x; echo x > node_modules/x/yarn.lock");
    for name in ["Cargo.lock", "Gemfile.lock"] {
        shop.write(name, "one");
    }
    shop.host.ok(&["checkpoint", "agent"]);
    shop.host.ok(&["freeze", "shop", "-m", "first"]);
    let lock: toml::Table = shop.host.ok(&["lock", "shop"]).parse().expect("TOML");
    let paths: Vec<_> = lock["dependencies"].as_array().unwrap().iter().map(|one| one["path"].as_str()).collect();
    assert_eq!(paths, ["uv.lock", "Cargo.lock", "Gemfile.lock"].map(Some));
    assert_eq!(lock["kernel"][0]["engine"].as_str(), Some("kaish"));
    let version = lock["kernel"][0]["version"].as_str().expect("the engine's version");
    let freeze: serde_json::Value = serde_json::from_str(&shop.host.ok(&["log", "shop", "--json"])).unwrap();
    let frozen: toml::Table = freeze["lock"].as_str().unwrap().parse().expect("TOML");
    assert!(!version.is_empty() && frozen["kernel"][0]["version"].as_str() == Some(version), "{frozen}");
    assert!(lock["configuration"].as_str().is_some_and(|digest| digest.starts_with("blake3:")), "{lock}");
    let drivers: Vec<_> = frozen["storage"].as_array().unwrap().iter().map(|one| one["driver"].as_str()).collect();
    assert!(drivers.contains(&Some("git")) && drivers.contains(&Some("transaction")), "{drivers:?}");
    for (one, version) in frozen["storage"].as_array().unwrap().iter().zip(["Linux ", "git version ", "SQLite "]) {
        assert!(one["version"].as_str().unwrap().starts_with(version), "{one}");
        assert!(!one["file_system"].as_str().unwrap().is_empty(), "{one}");
    }
    assert!(freeze["lock"].as_str().unwrap().contains("journal_mode wal, page_size 4096"), "{frozen}");
    for command in [["lock", "shop", "--check"], ["lock", "agent", "--check"]] {
        assert!(shop.host.ok(&command).contains("as at"), "{command:?}");
    }
    run("echo two > uv.lock");
    shop.write("Cargo.lock", "two");
    let checked = |command: &[&str]| {
        let output = shop.host.cli(command);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, reported) = checked(&["lock", "shop", "--check", "first"]);
    assert_eq!(code, Some(1), "{reported}");
    for part in ["uv.lock of agent has other", "Cargo.lock of code has other", "kernel agent has other files"] {
        assert!(reported.contains(part), "{part}: {reported}");
    }
    let (code, reported) = checked(&["lock", "agent", "--check"]);
    assert!(code == Some(1) && reported.contains("uv.lock of agent"), "{reported}");
    assert_eq!(checked(&["lock", "agent", "--check", "none"]).0, Some(3));
    // A restore names what stays, and was other then.
    let restored = shop.host.cli(&["--yes", "restore", "shop", "first", "--member", "data"]);
    let said = String::from_utf8_lossy(&restored.stderr).into_owned();
    let stays = "Cargo.lock of code has other content since that freeze, and stays so";
    assert!(restored.status.success() && said.contains(stays) && !said.contains("Gemfile.lock"), "{said}");
    let restored = shop.host.cli(&["--yes", "restore", "shop", "first", "--member", "code"]);
    let said = String::from_utf8_lossy(&restored.stderr).into_owned();
    assert!(restored.status.success() && !said.contains("Cargo.lock"), "{said}");
    // Under a name that another place had.
    let other = shop.host.path("home").join("other.db");
    std::fs::copy(shop.data(), &other).unwrap();
    shop.give();
    shop.host.ok(&["group", "rm", "shop", "data"]);
    shop.host.ok(&["group", "add", "shop", "--database", &other.display().to_string(), "--name", "data"]);
    let restored = shop.host.cli(&["--yes", "restore", "shop", "first", "--member", "data"]);
    let said = String::from_utf8_lossy(&restored.stderr).into_owned();
    let elsewhere = format!("member data was {} at that freeze", shop.data().display());
    assert!(restored.status.success() && said.contains(&elsewhere), "{said}");
}

/// A program of the configuration brings the code to what restored data needs.
#[test]
fn rebuild_admits_newer_data() {
    let user = users()[0];
    let host = Host::prepare(user);
    let (code, program, ran) =
        (host.path("home").join("code"), host.path("home").join("rebuild"), host.path("home").join("ran"));
    let script = |body: &str| {
        std::fs::write(&program, format!("#!/bin/sh\necho \"$RYOKAN_COMMIT\" >> {}\n{body}\n", ran.display())).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    script("cd \"$RYOKAN_REPOSITORY\" && git checkout -q --detach \"$RYOKAN_COMMIT\"");
    host.configure(&format!("[rebuild.shop]\nrepository = {code:?}\nrun = [{program:?}]\n"));
    let mut shop = Shop::of(host, user);
    let old = shop.git(&["rev-parse", "HEAD"]);
    shop.write("app.py", "two");
    let new = shop.commit("second");
    shop.sql("ALTER TABLE accounts ADD COLUMN note TEXT; PRAGMA user_version = 2;");
    shop.host.ok(&["freeze", "shop", "-m", "new"]);
    let back = || {
        shop.git(&["checkout", "-q", "--detach", &old]);
        shop.sql("ALTER TABLE accounts DROP COLUMN note; PRAGMA user_version = 1;");
    };
    let data = ["--yes", "restore", "shop", "new", "--member", "data"];
    back();
    let done = shop.host.cli(&data);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && said.contains("rebuilt"), "{said}");
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), new);
    assert_eq!(std::fs::read_to_string(&ran).unwrap(), format!("{new}\n"));
    assert!(shop.host.ok(&["audit", "--json"]).contains("group.rebuild"));
    // A check and a restore of the code itself run nothing; the latter chooses its commit.
    shop.git(&["checkout", "-q", "--detach", &old]);
    assert_eq!(shop.host.cli(&["lock", "shop", "--check"]).status.code(), Some(4));
    assert_eq!(std::fs::read_to_string(&ran).unwrap().lines().count(), 1);
    shop.sql("ALTER TABLE accounts DROP COLUMN note; PRAGMA user_version = 1;");
    // A program that does not help, and one that fails, change nothing.
    let broken = "cd \"$RYOKAN_REPOSITORY\" && echo broken > app.py && git add app.py";
    for (body, part, code) in [
        ("exit 0", "which is older", 4),
        ("echo why >&2; exit 3", "was not rebuilt", 69),
        (broken, "which is older", 4),
        (&*format!("{broken}; exit 3"), "was not rebuilt", 69),
    ] {
        script(body);
        let state = shop.state();
        let refused = shop.host.cli(&data);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(code) && said.contains(part), "{body}: {said}");
        assert_eq!(shop.state(), state, "{body}");
    }
    // A later failure undoes the rebuild, and so does an undo.
    let good = "cd \"$RYOKAN_REPOSITORY\" && git checkout -q --detach \"$RYOKAN_COMMIT\"";
    script(good);
    let state = shop.state();
    shop.host.ok(&data);
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), new);
    shop.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!(shop.state(), state);
    for fault in ["eio", "kill"] {
        shop.host.kill();
        shop.host.env(fault::VARIABLE, &format!("freeze.member.switch={fault}"));
        shop.host.launch();
        assert!(!shop.host.cli(&data).status.success(), "{fault}");
        shop.host.kill();
        shop.host.env(fault::VARIABLE, "");
        shop.host.launch();
        assert_eq!((shop.git(&["rev-parse", "HEAD"]), shop.state()), (old.clone(), state.clone()), "{fault}");
    }
}

/// Older code under newer data by hand is not legal because a restore of something froze it, and an undo goes back to it.
#[test]
fn safety_freeze_admits_nothing() {
    let (shop, old, new) = Shop::with_newer_data(users()[0]);
    shop.git(&["checkout", "-q", "--detach", &old]);
    let refused = |args: &[&str]| {
        let output = shop.host.cli(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(4) && said.contains(&new[..10]), "{args:?}: {said}");
    };
    for member in ["data", "agent"] {
        refused(&["--yes", "restore", "shop", "new", "--member", member]);
    }
    // The whole group may be restored; its safety freeze holds what was there, and only an undo brings that back.
    shop.host.ok(&["--yes", "restore", "shop", "new"]);
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), new);
    refused(&["--yes", "restore", "shop", "old", "--member", "code"]);
    shop.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), old);
    refused(&["lock", "shop", "--check"]);
    refused(&["--yes", "restore", "shop", "new", "--member", "data"]);
    // A client who freezes it says that it belongs together.
    shop.host.ok(&["freeze", "shop", "-m", "meant"]);
    shop.host.ok(&["--yes", "restore", "shop", "new", "--member", "data"]);
}

/// A rewritten history is not called older, and what git cannot answer is no answer.
#[test]
fn rewritten_history_is_named() {
    let shop = Shop::new(users()[0]);
    shop.write("app.py", "two");
    let new = shop.commit("second");
    shop.host.ok(&["freeze", "shop", "-m", "new"]);
    let check = |code: i32, parts: &[&str]| {
        let output = shop.host.cli(&["lock", "shop", "--check"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(code) && parts.iter().all(|part| said.contains(part)),
            "{parts:?}: {said}"
        );
    };
    shop.git(&["commit", "-q", "--amend", "-m", "rewritten"]);
    let collect = || {
        shop.git(&["reflog", "expire", "--expire=now", "--all"]);
        shop.git(&["gc", "-q", "--prune=now"]);
    };
    collect();
    check(4, &["which does not follow from it", "freeze the group"]);
    // As of a freeze of an earlier release, nothing keeps the commit.
    for reference in shop.git(&["for-each-ref", "--format=%(refname)", "refs/ryokan"]).lines() {
        shop.git(&["update-ref", "-d", reference]);
    }
    collect();
    check(4, &[&format!("no longer has {}", &new[..10])]);
    // As the hint says.
    shop.host.ok(&["freeze", "shop"]);
    check(0, &[]);
    // The history cannot be followed.
    shop.write("app.py", "three");
    let third = shop.commit("third");
    shop.write("app.py", "four");
    shop.commit("fourth");
    let (object, away) =
        (shop.code().join(".git/objects").join(&third[..2]).join(&third[2..]), shop.host.path("home").join("away"));
    std::fs::rename(&object, &away).unwrap();
    check(4, &["git rev-list in", "failed"]);
    std::fs::rename(&away, &object).unwrap();
    check(1, &[]);
}

/// What is not restored may change until the restore holds: then it is judged once more.
#[test]
fn changes_during_restore_are_judged() {
    let (mut shop, old, new) = Shop::with_newer_data(users()[0]);
    let version = |shop: &Shop| -> i64 {
        let database = rusqlite::Connection::open(shop.data()).unwrap();
        database.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap()
    };
    let (code, data) = (shop.code(), shop.data());
    let migrate = || {
        let database = rusqlite::Connection::open(&data).unwrap();
        database.execute_batch("ALTER TABLE accounts ADD COLUMN note TEXT; PRAGMA user_version = 2;").unwrap();
    };
    let checkout = |commit: &str| {
        let path = code.display().to_string();
        let args = ["-c", "safe.directory=*", "-C", &path, "checkout", "-q", "--detach", commit];
        assert!(std::process::Command::new("git").args(args).status().unwrap().success());
    };
    let (old_code, new_data) = (
        ["--yes", "restore", "shop", "old", "--member", "code"],
        ["--yes", "restore", "shop", "new", "--member", "data"],
    );
    let older_data = |shop: &Shop| shop.host.ok(&["--yes", "restore", "shop", "old", "--member", "data"]);
    // The code that still runs migrates the data while the repository goes back.
    older_data(&shop);
    let (done, said) = held(&mut shop.host, "freeze.member.switch", &old_code, migrate);
    assert!(!done && said.contains("which is older") && said.contains("as it was"), "{said}");
    assert_eq!((shop.git(&["rev-parse", "HEAD"]), version(&shop)), (new.clone(), 2));
    // The user checks older code out while the data goes forward.
    older_data(&shop);
    let (done, said) = held(&mut shop.host, "freeze.member.switch", &new_data, || checkout(&old));
    assert!(!done && said.contains("which is older") && said.contains("as it was"), "{said}");
    assert_eq!((shop.git(&["rev-parse", "HEAD"]), version(&shop)), (old.clone(), 1));
    // A change that fits is no obstacle.
    checkout(&new);
    let note =
        || rusqlite::Connection::open(&data).unwrap().execute_batch("INSERT INTO accounts VALUES (3, 0)").unwrap();
    let (done, said) = held(&mut shop.host, "freeze.member.switch", &old_code, note);
    assert!(done, "{said}");
    assert_eq!((shop.git(&["rev-parse", "HEAD"]), version(&shop)), (old, 1));
}

/// A schema that no freeze has seen belongs to the code that made it during the restore.
#[test]
fn late_schema_needs_its_code() {
    let mut shop = Shop::new(users()[0]);
    shop.host.ok(&["freeze", "shop", "-m", "old"]);
    shop.write("app.py", "two");
    let new = shop.commit("second");
    let data = shop.data();
    let migrate = || {
        let database = rusqlite::Connection::open(&data).unwrap();
        database.execute_batch("ALTER TABLE accounts ADD COLUMN note TEXT; PRAGMA user_version = 2;").unwrap();
    };
    let code = ["--yes", "restore", "shop", "old", "--member", "code"];
    let (done, said) = held(&mut shop.host, "freeze.member.switch", &code, migrate);
    assert!(!done && said.contains("which is older") && said.contains(&new[..10]), "{said}");
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), new);
}

/// What is not restored may change until everything is held: then it is judged again, also in a group without kernels.
#[test]
fn late_changes_are_judged() {
    let user = users()[0];
    let host = Host::prepare(user);
    let program = host.path("home").join("program");
    // It runs while the members are suspended, before the safety freeze reads them.
    let body = "#!/bin/sh\ncd \"$(dirname \"$0\")\" || exit 8\nif [ \"$1 $(cat race)\" = \"freeze yes\" ]; then git -C code checkout -q --detach HEAD~1; fi\n";
    std::fs::write(&program, body).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let argv = ["freeze", "capture", "thaw", "restore"].map(|verb| format!("{verb} = [{program:?}, {verb:?}]\n"));
    host.configure(&format!("[sources.queue]\n{}", argv.concat()));
    let race = host.path("home").join("race");
    std::fs::write(&race, "no").unwrap();
    let shop = Shop::of(host, user);
    shop.host.ok(&["group", "rm", "shop", "agent"]);
    shop.host.ok(&["group", "add", "shop", "--command", "queue"]);
    shop.host.ok(&["freeze", "shop", "-m", "old"]);
    shop.write("app.py", "two");
    let new = shop.commit("second");
    shop.sql("ALTER TABLE accounts ADD COLUMN note TEXT; PRAGMA user_version = 2;");
    shop.host.ok(&["freeze", "shop", "-m", "new"]);
    shop.host.ok(&["--yes", "restore", "shop", "old", "--member", "data"]);
    std::fs::write(&race, "yes").unwrap();
    let refused = shop.host.cli(&["--yes", "restore", "shop", "new", "--member", "data"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(4) && said.contains("which is older") && said.contains(&new[..10]), "{said}");
    let version = || -> i64 {
        let database = rusqlite::Connection::open(shop.data()).unwrap();
        database.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap()
    };
    assert_eq!(version(), 1);
    std::fs::write(&race, "no").unwrap();
    shop.git(&["checkout", "-q", "main"]);
    shop.host.ok(&["--yes", "restore", "shop", "new", "--member", "data"]);
    assert_eq!(version(), 2);
}
