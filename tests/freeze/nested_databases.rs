//! A database inside a repository: a restore of the repository does not touch its files, whatever git would do.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rusqlite::Connection;

use super::{Shop, Writer, amounts};
use crate::support::users;

const ADD: [&str; 4] = ["group", "add", "shop", "--database"];

/// Makes a database in the repository, which git neither tracks nor ignores.
fn nested(shop: &Shop, journal: &str) -> PathBuf {
    let path = shop.code().join("data/shop.db");
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    let database = Connection::open(&path).unwrap();
    database
        .execute_batch(&format!(
            "PRAGMA journal_mode = {journal}; CREATE TABLE accounts (id INTEGER PRIMARY KEY, amount INTEGER);
             INSERT INTO accounts VALUES (1, 500), (2, 500);"
        ))
        .unwrap();
    drop(database);
    shop.give();
    path
}

fn add(shop: &Shop, path: &Path) {
    shop.host.ok(&[&ADD[..], &[path.to_str().unwrap(), "--name", "inner"]].concat());
}

fn inode(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().ino()
}

/// The commit of a change of `app.py` alone.
fn second(shop: &Shop) {
    shop.write("app.py", "two");
    shop.git(&["commit", "-q", "-a", "-m", "second"]);
}

#[test]
fn restore_keeps_nested_writers() {
    for journal in ["wal", "delete"] {
        let shop = Shop::new(users()[0]);
        let path = nested(&shop, journal);
        add(&shop, &path);
        let before = inode(&path);
        let writer = Writer::start(&path);
        let moves = Arc::clone(&writer.moves);
        // Commits during the freeze are no change of the repository.
        for _ in 0..3 {
            shop.host.ok(&["freeze", "shop"]);
        }
        second(&shop);
        shop.host.ok(&["--yes", "restore", "shop", "1", "--member", "code"]);
        assert_eq!((shop.read("app.py").as_deref(), inode(&path)), (Some("one"), before), "{journal}");
        let at = writer.moves();
        crate::support::until("writes after the restore", || writer.moves() > at);
        shop.host.ok(&["--yes", "undo", "shop"]);
        assert_eq!((shop.read("app.py").as_deref(), inode(&path)), (Some("two"), before), "{journal}");
        writer.end();
        // Nothing that was acknowledged is lost.
        let moved = i64::try_from(moves.load(Ordering::Relaxed)).unwrap();
        assert_eq!(amounts(&path), Ok((500 - moved, 500 + moved)), "{journal}");
        // The whole group, while others write.
        let writer = Writer::start(&path);
        let restored = (0..20).any(|_| shop.host.cli(&["--yes", "restore", "shop", "1"]).status.success());
        assert!(restored, "{}", shop.host.log());
        let at = writer.moves();
        crate::support::until("writes after the restore", || writer.moves() > at);
        writer.end();
        assert_eq!((shop.read("app.py").as_deref(), inode(&path)), (Some("one"), before), "{journal}");
        amounts(&path).expect("a whole database");
    }
}

/// Freezes from before the database was a member hold its files as those of the repository.
#[test]
fn older_freezes_spare_databases() {
    let shop = Shop::new(users()[0]);
    let path = nested(&shop, "wal");
    shop.host.ok(&["freeze", "shop", "-m", "old"]);
    add(&shop, &path);
    let (before, open) = (inode(&path), Connection::open(&path).unwrap());
    open.execute_batch(
        "UPDATE accounts SET amount = amount - 5 WHERE id = 1; UPDATE accounts SET amount = 505 WHERE id = 2",
    )
    .unwrap();
    // Not committed: code at an older commit would be refused under the schema that is there now.
    shop.write("app.py", "two");
    shop.host.ok(&["--yes", "restore", "shop", "old"]);
    assert_eq!((shop.read("app.py").as_deref(), inode(&path)), (Some("one"), before));
    assert_eq!(amounts(&path), Ok((495, 505)));
    assert!(!shop.host.ok(&["diff", "shop", "old"]).contains("shop.db"));
    shop.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!((shop.read("app.py").as_deref(), inode(&path)), (Some("two"), before));
    assert_eq!(amounts(&path), Ok((495, 505)));
}

/// A restore of code removes no database that is a member no more, or never was one, under its writers.
#[test]
fn former_members_are_spared() {
    let shop = Shop::new(users()[0]);
    shop.host.ok(&["freeze", "shop", "-m", "before"]);
    let path = nested(&shop, "wal");
    add(&shop, &path);
    shop.host.ok(&["freeze", "shop", "-m", "old"]);
    shop.host.ok(&["group", "rm", "shop", "inner"]);
    let (before, open) = (inode(&path), Connection::open(&path).unwrap());
    open.execute_batch(
        "UPDATE accounts SET amount = amount - 5 WHERE id = 1; UPDATE accounts SET amount = 505 WHERE id = 2",
    )
    .unwrap();
    // Not committed: code at an older commit would be refused under the schema that is there now.
    shop.write("app.py", "two");
    shop.host.ok(&["--yes", "restore", "shop", "old", "--member", "code"]);
    assert_eq!((shop.read("app.py").as_deref(), inode(&path), amounts(&path)), (Some("one"), before, Ok((495, 505))));
    // A freeze whose code has no such file, taken before the database was there: nothing but its files says that it is one.
    let refused = shop.host.cli(&["--yes", "restore", "shop", "before", "--member", "code"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(4) && said.contains("data/shop.db") && said.contains("--database"), "{said}");
    assert_eq!((inode(&path), amounts(&path)), (before, Ok((495, 505))));
    // The safety freeze left it out, too, whether it is open or not.
    drop(open);
    shop.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!((shop.read("app.py").as_deref(), inode(&path), amounts(&path)), (Some("two"), before, Ok((495, 505))));
}

#[test]
fn tracked_database_is_refused() {
    let shop = Shop::new(users()[0]);
    let path = nested(&shop, "delete");
    shop.git(&["add", "data/shop.db"]);
    let refused = shop.host.cli(&[&ADD[..], &[path.to_str().unwrap(), "--name", "inner"]].concat());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(4) && said.contains("git rm --cached data/shop.db"), "{said}");
    shop.git(&["rm", "-q", "--cached", "data/shop.db"]);
    add(&shop, &path);
    // The repository is refused in the same way.
    shop.host.ok(&["group", "rm", "shop", "code"]);
    shop.git(&["add", "data/shop.db"]);
    let code = shop.code().display().to_string();
    let refused = shop.host.cli(&["group", "add", "shop", "--repository", &code]);
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    shop.git(&["rm", "-q", "--cached", "data/shop.db"]);
    shop.host.ok(&["group", "add", "shop", "--repository", &code]);
    // Tracked later: it is left out all the same.
    shop.host.ok(&["freeze", "shop", "-m", "untracked"]);
    shop.git(&["add", "data/shop.db"]);
    shop.git(&["commit", "-q", "-m", "database"]);
    let (before, open) = (inode(&path), Connection::open(&path).unwrap());
    open.execute_batch(
        "UPDATE accounts SET amount = amount - 5 WHERE id = 1; UPDATE accounts SET amount = 505 WHERE id = 2",
    )
    .unwrap();
    shop.host.ok(&["freeze", "shop", "-m", "tracked"]);
    for freeze in ["untracked", "tracked"] {
        shop.host.ok(&["--yes", "restore", "shop", freeze, "--member", "code"]);
        assert_eq!((inode(&path), amounts(&path)), (before, Ok((495, 505))), "{freeze}");
    }
    // A directory around it is exchanged as a whole, also by another group.
    shop.host.ok(&["group", "new", "other"]);
    let folder = path.parent().unwrap().display().to_string();
    for group in ["shop", "other"] {
        let refused = shop.host.cli(&["group", "add", group, "--directory", &folder]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(4) && said.contains("overlap"), "{said}");
    }
}
