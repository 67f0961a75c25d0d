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
    assert!(shop.host.ok(&["lock", "shop", "--check"]).contains("is at"), "a descendant may use the data");
    // Both together may go back, and the data alone.
    shop.host.ok(&["--yes", "restore", "shop", "old"]);
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), old);
    shop.host.ok(&["--yes", "undo", "shop"]);
    shop.host.ok(&["--yes", "restore", "shop", "old", "--member", "data"]);
    assert_eq!(shop.read("app.py").as_deref(), Some("three"));
}
