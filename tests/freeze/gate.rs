//! The rehydration gate.

use super::Shop;
use crate::support::users;

#[test]
fn newer_data_needs_newer_code() {
    let shop = Shop::new(users()[0]);
    let old = shop.git(&["rev-parse", "HEAD"]);
    shop.host.ok(&["freeze", "shop", "-m", "old"]);
    shop.write("app.py", "two");
    let new = shop.commit("second");
    shop.sql("ALTER TABLE accounts ADD COLUMN note TEXT; PRAGMA user_version = 2;");
    shop.host.ok(&["freeze", "shop", "-m", "new"]);
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
    shop.write("Cargo.lock", "one");
    shop.host.ok(&["checkpoint", "agent"]);
    shop.host.ok(&["freeze", "shop", "-m", "first"]);
    let lock: toml::Table = shop.host.ok(&["lock", "shop"]).parse().expect("TOML");
    let paths: Vec<_> = lock["dependencies"].as_array().unwrap().iter().map(|one| one["path"].as_str()).collect();
    assert_eq!(paths, [Some("uv.lock"), Some("Cargo.lock")]);
    assert_eq!(lock["kernel"][0]["engine"].as_str(), Some("kaish"));
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
}
