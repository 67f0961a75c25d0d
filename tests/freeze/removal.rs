//! Freezes are removed one by one, and old safety freezes by themselves.

use super::Shop;
use super::crash_safety::{armed, points};
use crate::support::{Host, users};

const FREEZE: [&str; 2] = ["freeze", "shop"];

fn numbers(shop: &Shop) -> Vec<u64> {
    let log = shop.host.ok(&["log", "shop", "--json"]);
    log.lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["number"].as_u64().unwrap())
        .collect()
}

fn pinned(shop: &Shop) -> usize {
    shop.host.ok(&["log", "agent", "--json"]).lines().filter(|line| line.contains("\"pinned\":true")).count()
}

#[test]
fn one_freeze_is_removed() {
    let (shop, old, new) = Shop::with_newer_data(users()[0]);
    let before = pinned(&shop);
    // A freeze keeps its checkpoints by their pins.
    let log = shop.host.ok(&["log", "agent", "--json"]);
    let kept: serde_json::Value =
        serde_json::from_str(log.lines().find(|line| line.contains("\"pinned\":true")).unwrap()).unwrap();
    let refused = shop.host.cli(&["checkpoint", "agent", "--unpin", kept["id"].as_str().unwrap()]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("of group shop needs checkpoint"), "{said}");
    assert_eq!(pinned(&shop), before);
    assert_eq!(
        shop.host.cli(&["group", "rm", "shop", "--freeze", "new"]).status.code(),
        Some(2),
        "it is to be confirmed"
    );
    shop.host.ok(&["--yes", "group", "rm", "shop", "--freeze", "new"]);
    assert_eq!((numbers(&shop), pinned(&shop)), (vec![1], before - 1));
    assert_eq!(shop.host.cli(&["--yes", "group", "rm", "shop", "--freeze", "new"]).status.code(), Some(3));
    assert!(shop.host.ok(&["audit", "--json"]).contains("group.forget"));
    // The gate knows what the data needs all the same.
    shop.git(&["checkout", "-q", "--detach", &old]);
    let checked = shop.host.cli(&["lock", "shop", "--check"]);
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(checked.status.code() == Some(4) && said.contains(&new[..10]), "{said}");
    shop.git(&["checkout", "-q", "main"]);
    // No number is given twice, and nothing that is left is garbage.
    shop.host.ok(&FREEZE);
    assert_eq!(numbers(&shop), [3, 1]);
    shop.host.ok(&["gc"]);
    shop.host.ok(&["--yes", "restore", "shop", "old"]);
    assert_eq!(shop.git(&["rev-parse", "HEAD"]), old);
    // Without its safety freeze there is nothing to undo.
    shop.host.ok(&["--yes", "group", "rm", "shop", "--freeze", "4"]);
    assert_eq!(shop.host.cli(&["--yes", "undo", "shop"]).status.code(), Some(3));
}

#[test]
fn killed_removal_is_whole() {
    let mut shop = Shop::new(users()[0]);
    for point in points(&["catalog.freeze.remove", "catalog.group.unpinned"]) {
        shop.host.ok(&FREEZE);
        let before = numbers(&shop);
        armed(&mut shop, &format!("{point}=kill"), &["--yes", "group", "rm", "shop", "--freeze", "latest"]);
        let is_done = numbers(&shop).len() < before.len();
        assert_eq!(is_done, point != "catalog.freeze.remove.before_commit", "{point}");
        // No checkpoint is kept for a freeze that is gone.
        assert_eq!(pinned(&shop), numbers(&shop).len(), "{point}");
        shop.host.ok(&["--yes", "restore", "shop", "1"]);
    }
    armed(&mut shop, "catalog.group.remove.after_commit=kill", &["--yes", "group", "rm", "shop"]);
    assert_eq!(pinned(&shop), 0);
}

/// Also those of restores that failed, as an arrival repeats them.
#[test]
fn failed_restores_leave_few_freezes() {
    let user = users()[0];
    let host = Host::prepare(user);
    host.configure("[defaults]\nkeep_checkpoints = 2\n");
    let shop = Shop::of(host, user);
    shop.host.ok(&FREEZE);
    // The image is found not to fit after the safety freeze.
    shop.sql("PRAGMA journal_mode = delete; PRAGMA page_size = 8192; VACUUM; PRAGMA journal_mode = wal;");
    for _ in 0..4 {
        assert!(!shop.host.cli(&["--yes", "restore", "shop", "1"]).status.success());
    }
    assert_eq!(numbers(&shop), [5, 4, 1]);
}

#[test]
fn old_safety_freezes_expire() {
    let user = users()[0];
    let host = Host::prepare(user);
    host.configure("[defaults]\nkeep_checkpoints = 2\n");
    let shop = Shop::of(host, user);
    shop.host.ok(&FREEZE);
    for _ in 0..4 {
        shop.host.ok(&["--yes", "restore", "shop", "1"]);
    }
    assert_eq!(numbers(&shop), [5, 4, 1]);
    shop.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!(numbers(&shop), [6, 5, 1]);
}
