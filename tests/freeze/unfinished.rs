//! Groups with an operation that cannot be ended, or with a broken member.

use std::path::PathBuf;

use ryokan::sys::fault;

use super::Shop;
use crate::support::{Host, User, until, users};

/// A group whose restore was killed after it changed every member, and whose repository is gone.
fn unfinished() -> (Shop, PathBuf, String) {
    let mut shop = Shop::new(*users().last().unwrap());
    shop.work();
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.wreck();
    let wrecked = shop.state();
    restore_killed(&mut shop, &["--yes", "restore", "shop", "good"]);
    let away = shop.code().with_file_name("away");
    std::fs::rename(shop.code(), &away).unwrap();
    shop.host.launch();
    (shop, away, wrecked)
}

/// Runs a restore whose daemon ends just before the commit.
fn restore_killed(shop: &mut Shop, command: &[&str]) {
    shop.host.kill();
    shop.host.env(fault::VARIABLE, "catalog.group.restored.before_commit=kill");
    shop.host.launch();
    assert!(!shop.host.cli(command).status.success() && shop.host.ends());
    shop.host.wait();
    shop.host.env(fault::VARIABLE, "");
}

fn refused(shop: &Shop, command: &[&str], code: i32, part: &str) {
    let output = shop.host.cli(command);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{command:?}: {reported}");
    assert!(reported.contains(part), "{command:?}: {reported}");
}

#[test]
fn half_restored_kernel_runs_nothing() {
    let (shop, away, wrecked) = unfinished();
    assert!(shop.host.ok(&["group", "show", "shop"]).contains("interrupted"));
    let run = ["exec", "agent", "echo ran"];
    refused(&shop, &run, 125, "has not ended");
    // An attempt that fails changes nothing about that.
    refused(&shop, &["freeze", "shop"], 3, "code");
    refused(&shop, &run, 125, "has not ended");
    std::fs::rename(away, shop.code()).unwrap();
    shop.host.ok(&["freeze", "shop"]);
    assert_eq!(shop.state(), wrecked);
}

#[test]
fn unfinished_group_is_abandoned() {
    let (shop, away, _) = unfinished();
    refused(&shop, &["--yes", "group", "rm", "shop"], 4, "has not ended");
    shop.host.ok(&["--yes", "group", "rm", "shop", "--abandon"]);
    assert!(!shop.host.ok(&["group", "show"]).contains("shop"));
    assert!(shop.host.ok(&["audit"]).contains("group.abandon"));
    shop.host.ok(&["exec", "agent", "echo ran"]);
    std::fs::rename(away, shop.code()).unwrap();
    shop.host.ok(&["group", "new", "shop"]);
    refused(&shop, &["--yes", "group", "rm", "shop", "--abandon"], 4, "has ended");
}

#[test]
fn broken_member_is_no_obstacle() {
    let mut shop = Shop::new(*users().last().unwrap());
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    let spend = "UPDATE accounts SET amount = 900 WHERE id = 1; UPDATE accounts SET amount = 100 WHERE id = 2;";
    shop.sql(spend);
    let (away, only_data) =
        (shop.code().with_file_name("away"), ["--yes", "restore", "shop", "good", "--member", "data"]);
    std::fs::rename(shop.code(), &away).unwrap();
    // The safety freeze, the restore and its recovery pass over what cannot be opened.
    restore_killed(&mut shop, &only_data);
    shop.host.launch();
    assert_eq!(shop.amounts(), (900, 100));
    assert!(!shop.host.ok(&["group", "show", "shop"]).contains("interrupted"));
    let restored = shop.host.cli(&only_data);
    let reported = String::from_utf8_lossy(&restored.stderr).into_owned();
    assert!(restored.status.success() && reported.contains("member code is left out of the check"), "{reported}");
    assert_eq!(shop.amounts(), (500, 500));
    refused(&shop, &["--yes", "restore", "shop", "good"], 3, "code");
}

#[test]
fn lock_of_killed_git_is_removed() {
    let mut shop = Shop::new(*users().last().unwrap());
    shop.work();
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.wreck();
    let wrecked = shop.state();
    restore_killed(&mut shop, &["--yes", "restore", "shop", "good"]);
    let groups = std::fs::read_dir(shop.host.data().join("groups")).unwrap();
    let of = groups.map(|entry| entry.unwrap().path().join("code")).find(|path| path.is_dir());
    std::fs::write(of.expect("its files are kept").join("index.lock"), "").unwrap();
    shop.host.launch();
    assert_eq!(shop.state(), wrecked);
    assert!(!shop.host.ok(&["group", "show", "shop"]).contains("interrupted"));
}

#[test]
fn ignored_files_are_not_overwritten() {
    let shop = Shop::new(users()[0]);
    shop.write("settings", "of all");
    shop.commit("settings for all");
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.git(&["rm", "-q", "--cached", "settings"]);
    shop.write(".gitignore", "settings\n");
    shop.write("settings", "my own");
    let head = shop.commit("settings of each");
    refused(&shop, &["--yes", "restore", "shop", "good"], 4, "settings");
    assert_eq!((shop.read("settings").as_deref(), shop.git(&["rev-parse", "HEAD"])), (Some("my own"), head));
    std::fs::rename(shop.code().join("settings"), shop.code().with_file_name("mine")).unwrap();
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!(shop.read("settings").as_deref(), Some("of all"));
}

/// A source that could not be resumed, and a restore that could not be reverted, need no client.
#[test]
fn unfinished_groups_are_retried() {
    let host = Host::prepare(User::Own);
    let home = host.path("home").display().to_string();
    let argv = |verb: &str, code: &str| format!("{verb} = [\"/bin/sh\", \"-c\", {code:?}]\n");
    host.configure(&format!(
        "[upkeep]\ninterval = \"1s\"\n[sources.queue]\n{}{}{}{}",
        argv("freeze", "true"),
        argv("thaw", &format!("test ! -e {home}/closed && touch {home}/thawed")),
        argv("capture", "echo one"),
        argv("restore", "true"),
    ));
    let mut shop = Shop::of(host, User::Own);
    shop.host.ok(&["group", "new", "other"]);
    shop.host.ok(&["group", "add", "other", "--command", "queue"]);
    let (closed, thawed) = (format!("{home}/closed"), format!("{home}/thawed"));
    std::fs::write(&closed, "").unwrap();
    shop.host.ok(&["freeze", "other"]);
    assert!(!std::fs::exists(&thawed).unwrap());
    std::fs::remove_file(&closed).unwrap();
    until("a thaw", || std::fs::exists(&thawed).unwrap());
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.wreck_data();
    shop.write("app.py", "two");
    restore_killed(&mut shop, &["--yes", "restore", "shop", "good"]);
    let away = shop.code().with_file_name("away");
    std::fs::rename(shop.code(), &away).unwrap();
    shop.host.launch();
    assert!(shop.host.ok(&["group", "show", "shop"]).contains("interrupted"));
    std::fs::rename(away, shop.code()).unwrap();
    until("a revert", || !shop.host.ok(&["group", "show", "shop"]).contains("interrupted"));
    assert_eq!((shop.amounts(), shop.read("app.py").as_deref()), ((900, 100), Some("two")));
    shop.host.ok(&["exec", "agent", "echo ran"]);
}
