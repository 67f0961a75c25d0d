//! Groups with an operation that cannot be ended, or with a broken member.

use std::path::PathBuf;

use ryokan::sys::fault;

use super::Shop;
use super::crash_safety::killed;
use crate::support::{Host, User, until, users};

/// A group whose restore was killed after it changed every member, and whose repository is gone.
fn unfinished() -> (Shop, PathBuf, String) {
    unfinished_beside(|_| ())
}

/// The same on a host with other groups.
fn unfinished_beside(others: impl FnOnce(&Shop)) -> (Shop, PathBuf, String) {
    let mut shop = Shop::new(*users().last().unwrap());
    others(&shop);
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

/// What another group shares with it is between two states: neither frozen nor restored.
#[test]
fn shared_members_await_other_group() {
    let (shop, away, wrecked) = unfinished_beside(|shop| {
        let data = shop.data().display().to_string();
        shop.host.ok(&["group", "new", "other"]);
        shop.host.ok(&["group", "add", "other", "--database", &data, "--name", "rows"]);
        shop.host.ok(&["--yes", "freeze", "other", "-m", "good"]);
        shop.host.ok(&["--yes", "restore", "other", "good"]);
        shop.host.ok(&["group", "new", "apart"]);
        let free = shop.host.path("home").join("free.db");
        std::fs::copy(shop.data(), &free).unwrap();
        shop.give();
        shop.host.ok(&["group", "add", "apart", "--database", &free.display().to_string()]);
    });
    let state = shop.amounts();
    for command in [
        &["freeze", "other"][..],
        &["--yes", "restore", "other", "good"],
        &["--yes", "undo", "other"],
        &["--yes", "teleport", "other", "--to", "exec:true"],
    ] {
        refused(&shop, command, 4, "a restore of group shop, which shares member rows");
        refused(&shop, command, 4, "group_unfinished");
    }
    assert_eq!((shop.amounts(), shop.host.ok(&["log", "other", "--json"]).lines().count()), (state, 2));
    shop.host.ok(&["freeze", "apart"]);
    std::fs::rename(away, shop.code()).unwrap();
    shop.host.ok(&["freeze", "shop"]);
    assert_eq!(shop.state(), wrecked);
    shop.host.ok(&["freeze", "other"]);
}

/// The end of another group's operation admits no code to a kernel that is between two states.
#[test]
fn shared_kernel_awaits_both_groups() {
    let mut shop = Shop::new(*users().last().unwrap());
    shop.host.ok(&["group", "new", "other"]);
    shop.host.ok(&["group", "add", "other", "--kernel", "agent"]);
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    let is_left = |shop: &Shop| shop.host.ok(&["log", "agent", "--json"]).contains("freeze of other");
    // A freeze of the other group that is not withdrawn, either.
    killed(&mut shop, "catalog.freeze.seal.before_commit=kill", &["freeze", "other"]);
    let stays = "state.checkpoints.withdraw.before_commit=eio";
    shop.host.env(fault::VARIABLE, stays);
    shop.host.launch();
    let faults = format!("{stays},catalog.group.restored.before_commit=kill");
    killed(&mut shop, &faults, &["--yes", "restore", "shop", "good"]);
    let away = shop.code().with_file_name("away");
    std::fs::rename(shop.code(), &away).unwrap();
    shop.host.env(fault::VARIABLE, stays);
    shop.host.launch();
    for group in ["shop", "other"] {
        assert!(shop.host.ok(&["group", "show", group]).contains("interrupted"), "{group}");
    }
    assert!(is_left(&shop));
    shop.host.ok(&["--yes", "group", "rm", "other", "--abandon"]);
    assert!(!is_left(&shop));
    refused(&shop, &["exec", "agent", "echo ran"], 125, "has not ended");
    std::fs::rename(away, shop.code()).unwrap();
    shop.host.ok(&["freeze", "shop"]);
    shop.host.ok(&["exec", "agent", "echo ran"]);
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

/// A freeze that failed, and whose checkpoint could not be withdrawn, leaves nothing visible for long.
#[test]
fn failed_withdrawals_are_retried() {
    let mut shop = Shop::new(User::Own);
    let checkpoints = |shop: &Shop| shop.host.ok(&["log", "agent", "--json"]).lines().count();
    let before = checkpoints(&shop);
    shop.host.kill();
    shop.host.configure("[upkeep]\ninterval = \"1s\"\n");
    shop.host.env(fault::VARIABLE, "freeze.member.store:2=eio,state.checkpoints.withdraw.before_commit=eio");
    shop.host.launch();
    assert!(!shop.host.cli(&["freeze", "shop"]).status.success());
    until("a withdrawal", || !shop.host.ok(&["group", "show", "shop"]).contains("interrupted"));
    assert_eq!((shop.freezes(), checkpoints(&shop)), (0, before));
}
