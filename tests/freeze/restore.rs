//! Freeze, wreck, restore as one, undo.

use std::time::Duration;

use rusqlite::Connection;

use super::conformance::held;
use super::{Shop, Writer};
use crate::support::users;

#[test]
fn group_is_restored_as_one() {
    for user in users() {
        let shop = Shop::new(user);
        shop.git(&["checkout", "-q", "--detach"]);
        shop.work();
        let frozen = shop.state();
        assert!(shop.host.ok(&["freeze", "shop", "-m", "good"]).contains("good"));
        assert_eq!(shop.state(), frozen, "a freeze changes nothing");
        shop.wreck();
        let wrecked = shop.state();
        assert_ne!(wrecked, frozen);
        shop.host.ok(&["spawn", "agent", "-d", "--", "sleep", "7719"]);
        let restored = shop.host.cli(&["--yes", "restore", "shop", "good"]);
        let said = String::from_utf8_lossy(&restored.stderr).into_owned();
        assert!(restored.status.success() && said.contains("member agent: ended: process"), "{said}");
        assert!(said.contains("sleep 7719"), "{said}");
        assert_eq!(shop.state(), frozen);
        shop.host.ok(&["--yes", "undo", "shop"]);
        assert_eq!(shop.state(), wrecked);
        assert_eq!(shop.git(&["symbolic-ref", "HEAD"]), "refs/heads/main", "undo returns to the branch");
        // Nothing that a freeze needs is garbage.
        shop.host.ok(&["gc"]);
        shop.host.ok(&["--yes", "restore", "shop", "1"]);
        assert_eq!(shop.state(), frozen);
        assert_eq!(shop.freezes(), 4);
    }
}

#[test]
fn writer_sees_whole_databases() {
    for mode in ["wal", "delete"] {
        let shop = Shop::new(users()[0]);
        shop.sql(&format!("PRAGMA journal_mode = {mode}"));
        database_stays_whole(&shop);
    }
}

fn database_stays_whole(shop: &Shop) {
    let writer = Writer::start(&shop.data());
    for n in 0..3 {
        shop.host.ok(&["freeze", "shop", "-m", &format!("n{n}")]);
        assert_eq!(super::amounts(&shop.data()).map(|(a, b)| a + b), Ok(1000));
    }
    let before = writer.moves();
    // A commit between the safety freeze and the switch refuses the restore, which can be repeated.
    let restored = (0..20).any(|_| shop.host.cli(&["--yes", "restore", "shop", "n0"]).status.success());
    assert!(restored, "{}", shop.host.log());
    let at = writer.moves();
    crate::support::until("writes after the restore", || writer.moves() > at);
    assert!(at >= before);
    writer.end();
    shop.amounts();
}

/// The mode of the file comes back, also under a program that has it open.
#[test]
fn database_mode_is_restored() {
    use std::os::unix::fs::PermissionsExt as _;
    for journal in ["wal", "delete"] {
        let shop = Shop::new(users()[0]);
        shop.sql(&format!("PRAGMA journal_mode = {journal}"));
        let open = Connection::open(shop.data()).unwrap();
        let rows = || open.query_row("SELECT count(*) FROM accounts", [], |row| row.get::<_, i64>(0)).unwrap();
        rows();
        let mode = || std::fs::metadata(shop.data()).unwrap().permissions().mode() & 0o777;
        let set = |mode| std::fs::set_permissions(shop.data(), std::fs::Permissions::from_mode(mode)).unwrap();
        set(0o640);
        shop.host.ok(&["freeze", "shop", "-m", "good"]);
        set(0o604);
        shop.wreck_data();
        shop.host.ok(&["--yes", "restore", "shop", "good"]);
        assert_eq!((mode(), shop.amounts(), rows()), (0o640, (500, 500), 2), "{journal}");
        shop.host.ok(&["--yes", "undo", "shop"]);
        assert_eq!((mode(), shop.amounts(), rows()), (0o604, (900, 100), 2), "{journal}");
    }
}

/// SQLite cannot change the page size of a database with a write-ahead log: nothing is changed, and the answer says how.
#[test]
fn other_page_size_is_refused() {
    let shop = Shop::new(users()[0]);
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.sql("PRAGMA journal_mode = delete; PRAGMA page_size = 8192; VACUUM; PRAGMA journal_mode = wal;");
    let state = shop.state();
    let refused = shop.host.cli(&["--yes", "restore", "shop", "good"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(4) && said.contains("pages of 8192 bytes"), "{said}");
    assert!(said.contains("PRAGMA journal_mode = delete"), "{said}");
    assert_eq!(shop.state(), state);
    shop.sql("PRAGMA journal_mode = delete");
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!(shop.amounts(), (500, 500));
}

#[test]
fn lost_database_is_restored() {
    let shop = Shop::new(users()[0]);
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    for wreck in [None, Some("this is no database".repeat(100))] {
        for suffix in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{suffix}", shop.data().display()));
        }
        if let Some(text) = &wreck {
            std::fs::write(shop.data(), text).unwrap();
        }
        shop.host.ok(&["--yes", "restore", "shop", "good"]);
        assert_eq!(shop.amounts(), (500, 500));
        shop.host.ok(&["--yes", "undo", "shop"]);
        assert_eq!(std::fs::read_to_string(shop.data()).ok(), wreck);
        shop.host.ok(&["--yes", "restore", "shop", "good"]);
    }
}

/// A program that makes the database anew during a restore keeps what it wrote.
#[test]
fn recreated_database_is_kept() {
    let mut shop = Shop::new(users()[0]);
    let (data, good) = (shop.data(), ["--yes", "restore", "shop", "good"]);
    let aside = shop.host.path("home").join("aside.db");
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.wreck_data();
    shop.sql("PRAGMA journal_mode = delete");
    std::fs::copy(&data, &aside).unwrap();
    let lose = |wreck: Option<&str>| {
        for suffix in ["", "-wal", "-shm", "-journal"] {
            let _ = std::fs::remove_file(format!("{}{suffix}", data.display()));
        }
        if let Some(text) = wreck {
            std::fs::write(&data, text.repeat(100)).unwrap();
        }
    };
    let recreate = || std::fs::rename(&aside, &data).unwrap();
    for wreck in [None, Some("this is no database")] {
        lose(wreck);
        let (done, said) = held(&mut shop.host, "freeze.member.switch:3", &good, recreate);
        assert!(!done && said.contains("database_written") && said.contains("as it was"), "{said}");
        assert_eq!(shop.amounts(), (900, 100), "{wreck:?}");
        std::fs::copy(&data, &aside).unwrap();
    }
    // Damaged in another way.
    lose(Some("this is no database"));
    let damage = || std::fs::write(&data, "nor is this".repeat(200)).unwrap();
    let (done, said) = held(&mut shop.host, "freeze.member.switch:3", &good, damage);
    assert!(!done && said.contains("database_written"), "{said}");
    assert_eq!(std::fs::read_to_string(&data).unwrap(), "nor is this".repeat(200));
    // As late as between the removal of what was there and the rename: it is kept apart.
    lose(None);
    let (done, said) = held(&mut shop.host, "database.files.replace", &good, recreate);
    assert!(!done && said.contains("database_written"), "{said}");
    let kept = said.split_whitespace().rfind(|word| word.contains("/kept/")).expect("where it is kept");
    assert_eq!(super::amounts(std::path::Path::new(kept)), Ok((900, 100)));
    assert!(!data.exists());
    shop.host.ok(&good);
    assert_eq!(shop.amounts(), (500, 500));
}

/// A database that is to be removed stays locked until it is: no commit goes into a file without a name.
#[test]
fn removed_database_stays_locked() {
    for journal in ["wal", "delete"] {
        let mut shop = Shop::new(users()[0]);
        shop.sql(&format!("PRAGMA journal_mode = {journal}"));
        shop.host.ok(&["freeze", "shop", "-m", "good"]);
        for suffix in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{suffix}", shop.data().display()));
        }
        shop.host.ok(&["--yes", "restore", "shop", "good"]);
        let open = Connection::open(shop.data()).unwrap();
        open.busy_timeout(Duration::ZERO).unwrap();
        let write = || open.execute_batch("UPDATE accounts SET amount = amount + 0");
        write().unwrap();
        let mut wrote = Ok(());
        let undo = ["--yes", "undo", "shop"];
        let (done, said) = held(&mut shop.host, "database.files.replace", &undo, || wrote = write());
        assert!(done && wrote.is_err(), "{journal}: {wrote:?}, {said}");
        assert!(!shop.data().exists(), "{journal}");
    }
}

/// A reader keeps the database from its change for longer than a step of another member may take.
#[test]
fn slow_database_is_awaited() {
    let mut shop = Shop::new(users()[0]);
    shop.sql("PRAGMA journal_mode = delete");
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.host.kill();
    shop.host.configure("[limits]\nfreeze_step = \"3s\"\n");
    shop.host.launch();
    shop.sql("UPDATE accounts SET amount = 900 WHERE id = 1; UPDATE accounts SET amount = 100 WHERE id = 2;");
    let reader = Connection::open(shop.data()).unwrap();
    reader.execute_batch("BEGIN").unwrap();
    reader.query_row("SELECT count(*) FROM accounts", [], |row| row.get::<_, i64>(0)).unwrap();
    let reading = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(4));
        drop(reader);
    });
    shop.host.ok(&["--yes", "restore", "shop", "good", "--member", "data"]);
    reading.join().unwrap();
    assert_eq!(shop.amounts(), (500, 500));
}

#[test]
fn states_are_compared() {
    for user in users() {
        let shop = Shop::new(user);
        shop.write("Cargo.lock", "one");
        shop.commit("lock");
        shop.host.ok(&["freeze", "shop", "-m", "a"]);
        // The entry of the checkpoint itself.
        assert_eq!(shop.host.ok(&["diff", "shop"]), "agent  kernel\n  + journal journal  1 entry\n");
        shop.host.with(async |client| {
            let agent = client.open_kernel("agent").await.expect("it is there").0;
            crate::support::out(&agent, "x=2; echo 2 > f; echo dep > Cargo.lock").await;
        });
        shop.write("app.py", "two");
        let commit = shop.commit("second");
        shop.work();
        shop.write("Cargo.lock", "two");
        shop.sql("CREATE TABLE notes (x); INSERT INTO accounts VALUES (3, 0); PRAGMA user_version = 2;");
        let present = shop.host.ok(&["diff", "shop", "--json"]);
        shop.host.ok(&["freeze", "shop", "-m", "b"]);
        // The same from freeze to freeze, although the present is another again.
        shop.write("app.py", "three");
        shop.sql("DROP TABLE notes; DELETE FROM accounts");
        for reported in [present, shop.host.ok(&["diff", "shop", "a", "b", "--json"])] {
            let lines: Vec<serde_json::Value> =
                reported.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let text = |line: &serde_json::Value, key: &str| line[key].as_str().unwrap().to_owned();
            let of = |member: &str, what: &str, name: &str| {
                let found =
                    lines.iter().find(|line| line["member"] == member && line["what"] == what && line["name"] == name);
                found.map(|line| {
                    (text(line, "deed"), text(line, "before"), text(line, "after"), line["details"].to_string())
                })
            };
            let changed = |before: &str, after: &str, details: &str| {
                Some(("changed".to_owned(), before.to_owned(), after.to_owned(), details.to_owned()))
            };
            let added = |after: &str, details: &str| {
                Some(("added".to_owned(), String::new(), after.to_owned(), details.to_owned()))
            };
            assert_eq!(of("code", "commit", &commit), added("second", "[]"), "{reported}");
            assert_eq!(of("code", "file", "app.py"), changed("", "", "[\"uncommitted\"]"), "{reported}");
            assert_eq!(of("code", "file", "new.txt"), added("", "[\"uncommitted\"]"), "{reported}");
            assert!(
                of("code", "dependencies", "Cargo.lock").is_some() && of("code", "index", "staged files").is_some()
            );
            assert_eq!(of("data", "rows", "accounts"), changed("2", "3", "[]"), "{reported}");
            assert_eq!(of("data", "rows", "notes"), None, "{reported}");
            assert!(
                of("data", "table", "notes")
                    .is_some_and(|(deed, _, after, _)| deed == "added" && after.contains("notes"))
            );
            assert_eq!(of("data", "table", "accounts"), None, "its definition is the same");
            assert_eq!(of("data", "schema", "user_version"), changed("1", "2", "[]"), "{reported}");
            assert!(of("agent", "state", "var/x").is_some() && of("agent", "file", "f").is_some(), "{reported}");
            assert!(of("agent", "dependencies", "Cargo.lock").is_some(), "{reported}");
        }
        // What is not whole is named.
        std::fs::remove_file(shop.data()).unwrap();
        assert!(shop.host.ok(&["diff", "shop", "b"]).contains("whole → absent"));
        shop.host.ok(&["group", "rm", "shop", "data"]);
        assert!(shop.host.ok(&["diff", "shop", "b"]).contains("- member data"));
        let missing = shop.host.cli(&["diff", "shop", "none"]);
        assert_eq!(missing.status.code(), Some(3));
    }
}

/// Git compares whole seconds, and trusts a file that is older than the index.
#[test]
fn change_within_second_is_captured() {
    let shop = Shop::new(users()[0]);
    for (n, (one, other)) in [("aaa", "bbb"), ("ccc", "ddd"), ("eee", "fff")].into_iter().enumerate() {
        shop.write("app.py", one);
        shop.commit(one);
        shop.write("app.py", other);
        std::thread::sleep(Duration::from_millis(1100));
        shop.host.ok(&["freeze", "shop", "-m", one]);
        shop.write("app.py", "another");
        shop.host.ok(&["--yes", "restore", "shop", one, "--member", "code"]);
        assert_eq!(shop.read("app.py").as_deref(), Some(other), "round {n}");
    }
}

#[test]
fn checkpoints_carry_locks() {
    let shop = Shop::new(users()[0]);
    let commit = "00112233445566778899aabbccddeeff00112233";
    shop.host.with(async |client| {
        let agent = client.open_kernel("agent").await.expect("it is there").0;
        let code = format!(
            "mkdir -p lib/.git/refs/heads evil/.git; echo 'ref: refs/heads/main' > lib/.git/HEAD; \
             echo {commit} > lib/.git/refs/heads/main; /bin/sh -c 'ln -s /etc/passwd evil/.git/HEAD'"
        );
        crate::support::out(&agent, &code).await;
    });
    shop.host.ok(&["checkpoint", "agent"]);
    let lock: toml::Table = shop.host.ok(&["lock", "agent"]).parse().expect("TOML");
    let repositories = lock["repository"].as_array().unwrap();
    let of = |path: &str| repositories.iter().find(|one| one["path"].as_str() == Some(path)).expect("it is listed");
    assert_eq!((of("lib")["commit"].as_str(), of("lib")["branch"].as_str()), (Some(commit), Some("main")));
    // A link is not followed.
    assert_eq!(of("evil")["commit"].as_str(), Some(""));
}

#[test]
fn other_verbs_refuse_groups() {
    let shop = Shop::new(users()[0]);
    for verb in [&["diff", "shop", "a", "--stat"][..], &["checkpoint", "shop"]] {
        let output = shop.host.cli(verb);
        assert_eq!(output.status.code(), Some(5), "{verb:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for verb in [&["--yes", "rm", "agent"][..], &["teleport", "agent", "--to", "exec:true"]] {
        let refused = shop.host.cli(verb);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(4) && said.contains("is a member of group shop"), "{verb:?}: {said}");
    }
}

/// The safety freeze of a restore of some has all members; its undo brings back only those.
#[test]
fn partial_restore_freezes_all() {
    let mut shop = Shop::new(users()[0]);
    let agent = |shop: &Shop, code: &str| shop.host.ok(&["exec", "agent", code]);
    shop.host.ok(&["freeze", "shop", "-m", "old"]);
    shop.write("app.py", "two");
    shop.commit("second");
    agent(&shop, "echo two > f");
    let restored = shop.host.ok(&["--yes", "restore", "shop", "old", "--member", "code", "--json"]);
    let restored: serde_json::Value = serde_json::from_str(&restored).unwrap();
    let safety = restored["safety"].as_str().expect("an id");
    assert_eq!(shop.read("app.py").as_deref(), Some("one"));
    assert_eq!(agent(&shop, "cat f").trim(), "two");
    agent(&shop, "echo three > f");
    shop.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!(shop.read("app.py").as_deref(), Some("two"));
    assert_eq!(agent(&shop, "cat f").trim(), "three");
    // All of it, when asked. What else is not as it was is named.
    shop.write("app.py", "four");
    shop.host.kill();
    shop.host.configure("[limits]\nfreeze_step = \"31s\"\n");
    shop.host.launch();
    let restored = shop.host.cli(&["--yes", "restore", "shop", safety]);
    let said = String::from_utf8_lossy(&restored.stderr).into_owned();
    assert!(
        restored.status.success()
            && said.contains("the daemon has another configuration in ")
            && said.contains("[limits]"),
        "{said}"
    );
    assert_eq!((shop.read("app.py").as_deref(), agent(&shop, "cat f").trim()), (Some("two"), "two"));
}

/// As jj lays it out beside git: its store ignores itself, or does not.
#[test]
fn colocated_jj_stays_untouched() {
    let shop = Shop::new(users()[0]);
    let store = shop.code().join(".jj");
    std::fs::create_dir_all(store.join("repo/op_heads")).unwrap();
    let write = |text: &str| std::fs::write(store.join("repo/op_heads/head"), text).unwrap();
    // In jj, HEAD is detached.
    shop.git(&["checkout", "-q", "--detach"]);
    for ignores in [true, false] {
        match ignores {
            true => std::fs::write(store.join(".gitignore"), "/*\n").unwrap(),
            false => std::fs::remove_file(store.join(".gitignore")).unwrap(),
        }
        write("before");
        shop.write("app.py", "work");
        shop.host.ok(&["freeze", "shop", "-m", "jj"]);
        shop.write("app.py", "other");
        write("after");
        assert!(!shop.host.ok(&["diff", "shop", "latest"]).contains(".jj"), "{ignores}");
        shop.host.ok(&["--yes", "restore", "shop", "latest"]);
        assert_eq!(shop.read("app.py").as_deref(), Some("work"), "{ignores}");
        assert_eq!(std::fs::read_to_string(store.join("repo/op_heads/head")).unwrap(), "after", "{ignores}");
    }
    // Without a .git of its own there is nothing to capture it through.
    let alone = shop.host.path("home").join("alone");
    std::fs::create_dir_all(alone.join(".jj/repo")).unwrap();
    let refused = shop.host.cli(&["group", "add", "shop", "--repository", alone.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(5) && said.contains("colocate"), "{said}");
}
