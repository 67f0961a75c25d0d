//! The rehydration gate for code and data in the workspaces of kernels.

use rusqlite::Connection;

use super::Shop;
use crate::support::users;

fn newer(shop: &Shop, args: &[&str], parts: &[&str]) {
    let output = shop.host.cli(args);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{args:?}: {reported}");
    assert!(parts.iter().all(|part| reported.contains(part)), "{args:?}: {reported}");
}

/// A repository in the workspace at a commit of this digit.
fn commit(shop: &Shop, digit: &str) {
    let script = format!(
        "mkdir -p lib/.git/refs/heads; echo 'ref: refs/heads/main' > lib/.git/HEAD; echo {} > lib/.git/refs/heads/main",
        digit.repeat(40)
    );
    shop.host.ok(&["spawn", "agent", "--", "sh", "-ec", &script]);
}

fn at(shop: &Shop) -> String {
    shop.host.ok(&["exec", "agent", "cat lib/.git/refs/heads/main"]).trim().chars().take(1).collect()
}

fn version(shop: &Shop) -> i64 {
    Connection::open(shop.data()).unwrap().query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap()
}

#[test]
fn code_in_workspace_is_judged() {
    let shop = Shop::new(users()[0]);
    commit(&shop, "a");
    shop.host.ok(&["freeze", "shop", "-m", "old"]);
    commit(&shop, "b");
    shop.sql("PRAGMA user_version = 2;");
    shop.host.ok(&["freeze", "shop", "-m", "new"]);
    assert!(shop.host.ok(&["lock", "shop", "--check"]).contains("as at"));
    // The kernel alone goes back: its code would be older than the data.
    let parts = ["agent:lib", "bbbbbbbbbb", "older"];
    newer(&shop, &["--yes", "restore", "shop", "old", "--member", "agent"], &parts);
    assert_eq!((at(&shop).as_str(), version(&shop)), ("b", 2));
    // By hand: the check says so.
    commit(&shop, "a");
    newer(&shop, &["lock", "shop", "--check"], &parts);
    shop.sql("PRAGMA user_version = 1;");
    // The data alone comes: the kernel stays at older code, which only the safety freeze knows.
    newer(&shop, &["--yes", "restore", "shop", "new", "--member", "data"], &parts);
    assert_eq!((at(&shop).as_str(), version(&shop)), ("a", 1));
    shop.host.ok(&["exec", "agent", "echo goes on"]);
    // Both together, and older data under newer code.
    shop.host.ok(&["--yes", "restore", "shop", "new"]);
    assert_eq!((at(&shop).as_str(), version(&shop)), ("b", 2));
    shop.host.ok(&["--yes", "restore", "shop", "old", "--member", "data"]);
    assert_eq!((at(&shop).as_str(), version(&shop)), ("b", 1));
    // What was never recorded is not judged.
    shop.sql("PRAGMA user_version = 2;");
    commit(&shop, "c");
    assert_eq!(shop.host.cli(&["lock", "shop", "--check"]).status.code(), Some(1));
}

/// A database in the workspace with this schema; the newest one is only in its write-ahead log.
fn put(shop: &Shop, version: i64) {
    let file = shop.host.path("home").join("inside.db");
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{suffix}", file.display()));
    }
    let database = Connection::open(&file).unwrap();
    database
        .execute_batch(&format!(
            "PRAGMA user_version = 1; CREATE TABLE t (x); PRAGMA journal_mode = WAL; PRAGMA user_version = {version};"
        ))
        .unwrap();
    shop.give();
    for suffix in ["", "-wal"] {
        shop.host.ok(&["cp", &format!("{}{suffix}", file.display()), &format!("agent:inside.db{suffix}")]);
    }
}

#[test]
fn data_in_workspace_is_judged() {
    let shop = Shop::new(users()[0]);
    let old = shop.git(&["rev-parse", "HEAD"]);
    put(&shop, 1);
    shop.host.ok(&["freeze", "shop", "-m", "old"]);
    shop.write("app.py", "two");
    let new = shop.commit("second");
    put(&shop, 2);
    shop.host.ok(&["freeze", "shop", "-m", "new"]);
    let lock: toml::Table = shop.host.ok(&["lock", "shop"]).parse().expect("TOML");
    let of = |one: &&toml::Value| one["path"].as_str() == Some("inside.db");
    let locked = lock["database"].as_array().unwrap().iter().find(of).expect("it is listed");
    assert_eq!((locked["name"].as_str(), locked["user_version"].as_integer()), (Some("agent"), Some(2)));
    assert!(shop.host.ok(&["lock", "shop", "--check"]).contains("as at"));
    // The code alone goes back: what the kernel has would be newer.
    let parts = ["agent:inside.db", &new[..10], "older"];
    newer(&shop, &["--yes", "restore", "shop", "old", "--member", "code"], &parts);
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), new);
    shop.git(&["checkout", "-q", "--detach", &old]);
    newer(&shop, &["lock", "shop", "--check"], &parts);
    put(&shop, 1);
    // The kernel alone comes, with data that the code is too old for.
    newer(&shop, &["--yes", "restore", "shop", "new", "--member", "agent"], &parts);
    shop.host.ok(&["--yes", "restore", "shop", "new"]);
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), new);
    assert!(shop.host.ok(&["lock", "shop"]).contains("user_version = 2"));
}
