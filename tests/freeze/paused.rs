//! A freeze that fails, in a group that is paused then.

use std::path::PathBuf;
use std::process::Stdio;

use super::Shop;
use super::crash_safety::{armed, points};
use crate::support::{WAITS, until, users};

const STEPS: [&str; 7] = [
    "catalog.group.intent",
    "freeze.member.snapshot",
    "catalog.group.progress",
    "freeze.member.store",
    "state.checkpoints.add",
    "catalog.freeze.seal",
    "catalog.group.pause",
];
const PAUSING: [&str; 4] = ["freeze", "shop", "--on-failure", "pause"];

fn refused(shop: &Shop, command: &[&str], part: &str) {
    let output = shop.host.cli(command);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && reported.contains(part), "{command:?}: {reported}");
}

fn shown(shop: &Shop) -> serde_json::Value {
    serde_json::from_str(&shop.host.ok(&["group", "show", "shop", "--json"])).expect("JSON")
}

fn is_suspended(shop: &Shop) -> bool {
    shop.host.ok(&["show", "agent"]).contains("suspended")
}

fn workspace(shop: &Shop) -> PathBuf {
    let shown: serde_json::Value = serde_json::from_str(&shop.host.ok(&["show", "agent", "--json"])).expect("JSON");
    shop.host.workspace(shown["id"].as_str().expect("an id"))
}

/// Makes the next freeze fail at the last member, after the kernel was captured.
fn damage(shop: &Shop) -> Vec<u8> {
    let kept = std::fs::read(shop.data()).expect("there");
    std::fs::write(shop.data(), "this is no database".repeat(100)).expect("written");
    kept
}

#[test]
fn failed_freeze_pauses() {
    let mut shop = Shop::new(users()[0]);
    shop.host.ok(&["group", "set", "shop", "--on-failure", "pause"]);
    assert!(shop.host.ok(&["group", "show", "shop"]).contains("a failed freeze pauses"));
    let ticks = "while :; do echo >> ticks; sleep 0.05; done";
    shop.host.ok(&["spawn", "agent", "-d", "--", "sh", "-c", ticks]);
    let lines = |shop: &Shop| std::fs::read(workspace(shop).join("ticks")).map_or(0, |ticks| ticks.len());
    until("ticks", || lines(&shop) > 2);
    let kept = damage(&shop);
    refused(&shop, &["freeze", "shop"], "its kernels are paused");
    let reason = shown(&shop)["paused"].as_str().expect("a reason").to_owned();
    assert!(reason.contains("data") && shop.host.ok(&["group", "show", "shop"]).contains(&reason), "{reason}");
    assert!(is_suspended(&shop));
    let stopped = lines(&shop);
    refused(&shop, &["exec", "agent", "echo ran"], "a freeze of the group");
    refused(&shop, &["resume", "agent"], "a freeze of the group");
    refused(&shop, &["freeze", "shop"], "is paused");
    // The user's own data goes on.
    std::fs::write(shop.data(), &kept).expect("written");
    shop.wreck_data();
    assert_eq!(lines(&shop), stopped, "nothing ran inside");
    shop.host.ok(&["resume", "shop"]);
    until("more ticks", || lines(&shop) > stopped);
    // The pause outlives its daemon.
    damage(&shop);
    refused(&shop, &["freeze", "shop"], "its kernels are paused");
    shop.host.kill();
    shop.host.launch();
    assert!(shown(&shop)["paused"].is_string());
    refused(&shop, &["exec", "agent", "echo ran"], "a freeze of the group");
    until("the suspension", || is_suspended(&shop));
    std::fs::write(shop.data(), &kept).expect("written");
    shop.host.ok(&["resume", "shop"]);
    assert_eq!(shop.kernel_state(), "1 1");
    assert!(shown(&shop)["paused"].is_null() && shop.host.ok(&["audit"]).contains("group.pause"));
    shop.host.ok(&["freeze", "shop"]);
    // A freeze says otherwise.
    damage(&shop);
    refused(&shop, &["freeze", "shop", "--on-failure", "resume"], "was not frozen");
    assert_eq!(shop.kernel_state(), "1 1");
}

/// Also if the freeze fails before anything was suspended; the removal of the member or of the group resumes.
#[test]
fn missing_member_pauses() {
    let shop = Shop::new(*users().last().unwrap());
    let away = shop.code().with_file_name("away");
    std::fs::rename(shop.code(), &away).unwrap();
    refused(&shop, &PAUSING, "its kernels are paused");
    until("the suspension", || is_suspended(&shop));
    refused(&shop, &["group", "add", "shop", "--kernel", "agent", "--name", "again"], "is paused");
    shop.host.ok(&["group", "rm", "shop", "agent"]);
    assert_eq!(shop.kernel_state(), "1 1");
    shop.host.ok(&["resume", "shop"]);
    shop.host.ok(&["group", "add", "shop", "--kernel", "agent"]);
    refused(&shop, &PAUSING, "its kernels are paused");
    shop.host.ok(&["--yes", "group", "rm", "shop"]);
    assert_eq!(shop.kernel_state(), "1 1");
}

/// Nothing runs in the kernel from the failure to the end of a restore, nor after it.
#[test]
fn paused_group_is_restored() {
    let shop = Shop::new(*users().last().unwrap());
    shop.work();
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    let frozen = shop.state();
    shop.wreck();
    let kept = damage(&shop);
    refused(&shop, &PAUSING, "its kernels are paused");
    std::fs::write(shop.data(), kept).expect("written");
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    refused(&shop, &["exec", "agent", "echo ran"], "a freeze of the group");
    until("the suspension", || is_suspended(&shop));
    shop.host.ok(&["resume", "shop"]);
    assert_eq!(shop.state(), frozen);
}

#[test]
fn running_code_pauses_at_end() {
    let shop = Shop::new(*users().last().unwrap());
    let mut command = shop.host.command("ryokan");
    command.args(["--no-autostart", "exec", "agent", WAITS]);
    let mut running = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("running code", || shop.host.ok(&["show", "agent"]).contains("busy"));
    refused(&shop, &[&PAUSING[..], &["--wait", "1s"]].concat(), "its kernels are paused");
    std::fs::write(workspace(&shop).join("go"), "").expect("written");
    assert!(running.wait().unwrap().success());
    until("the suspension", || is_suspended(&shop));
    shop.host.ok(&["resume", "shop"]);
    assert_eq!(shop.kernel_state(), "1 1");
}

#[test]
fn killed_freeze_pauses() {
    let mut shop = Shop::new(*users().last().unwrap());
    for point in points(&STEPS) {
        let (freezes, checkpoints) = (shop.freezes(), shop.host.ok(&["log", "agent", "--json"]).lines().count());
        let damaged = point.starts_with("catalog.group.pause").then(|| damage(&shop));
        armed(&mut shop, &format!("{point}=kill"), &PAUSING);
        if let Some(kept) = damaged {
            std::fs::write(shop.data(), kept).expect("written");
        }
        let (is_sealed, paused) = (shop.freezes() > freezes, !shown(&shop)["paused"].is_null());
        // Killed before it was recorded, the freeze had not begun.
        assert_eq!(paused, !is_sealed && point != "catalog.group.intent.before_commit", "{point}");
        assert_eq!(is_sealed, point == "catalog.freeze.seal.after_commit", "{point}");
        let now = shop.host.ok(&["log", "agent", "--json"]).lines().count();
        assert_eq!(now, checkpoints + usize::from(is_sealed), "{point}: a checkpoint is left");
        if paused {
            refused(&shop, &["exec", "agent", "echo ran"], "a freeze of the group");
            until("the suspension", || is_suspended(&shop));
            shop.host.ok(&["resume", "shop"]);
        }
        assert_eq!(shop.kernel_state(), "1 1", "{point}");
    }
    shop.host.ok(&["freeze", "shop"]);
}

#[test]
fn killed_pause_commands_are_whole() {
    let mut shop = Shop::new(*users().last().unwrap());
    for point in points(&["catalog.group.set"]) {
        armed(&mut shop, &format!("{point}=kill"), &["group", "set", "shop", "--on-failure", "pause"]);
        let done = shown(&shop)["on_failure"].as_str() == Some("pause");
        assert_eq!(done, point.ends_with("after_commit"), "{point}");
    }
    let kept = damage(&shop);
    refused(&shop, &["freeze", "shop"], "its kernels are paused");
    std::fs::write(shop.data(), kept).expect("written");
    for point in points(&["catalog.group.open"]) {
        armed(&mut shop, &format!("{point}=kill"), &["resume", "shop"]);
        assert_eq!(shown(&shop)["paused"].is_null(), point.ends_with("after_commit"), "{point}");
    }
    assert_eq!(shop.kernel_state(), "1 1");
}
