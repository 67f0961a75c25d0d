//! Steps that fail on one side, and targets that do not answer.

use std::time::Instant;

use super::*;
use crate::support::until;

fn with_fault(host: &mut Host, fault: &str) {
    host.kill();
    host.env(ryokan::sys::fault::VARIABLE, fault);
    host.launch();
}

#[test]
fn activation_completes_after_failed_sync() {
    let (here, mut there) = pair(User::Own);
    set_up(&here, "demo");
    // Two syncs prepare the kernel; the third is that of its activation.
    with_fault(&mut there, "handover.data.sync:3=eio");
    let report = moved(&here, "demo", &there, &[]);
    assert_eq!(report["acknowledged"], false, "the target acknowledges nothing that may be lost: {report}");
    until("the commit is repeated", || handovers(&here).is_empty());
    assert_eq!((is_live(&here, "demo"), is_live(&there, "demo")), (false, true));
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

#[test]
fn commit_follows_synced_departure() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    with_fault(&mut here, "handover.data.sync:2=eio");
    let report = moved(&here, "demo", &there, &[]);
    assert_eq!(report["acknowledged"], false, "no commit precedes a departure that may be lost: {report}");
    until("the commit follows", || handovers(&here).is_empty() && is_live(&there, "demo"));
    assert!(!is_live(&here, "demo"));
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

#[test]
fn hung_target_delays_no_other() {
    let (mut here, there) = pair(User::Own);
    for name in ["hung", "demo"] {
        set_up(&here, name);
    }
    let mut command = here.command("ryokan");
    command.args(["--no-autostart", "teleport", "hung", "--to", "exec:sleep 600"]);
    let mut waiting = command.spawn().unwrap();
    until("the move begins", || !handovers(&here).is_empty());
    // Its abort waits for a target that is connected to and never answers.
    with_fault(&mut here, "handover.data.sync:2=eio");
    let _ = waiting.wait();
    let begun = Instant::now();
    let report = moved(&here, "demo", &there, &[]);
    assert_eq!(report["acknowledged"], false, "{report}");
    until("the commit arrives", || is_live(&there, "demo"));
    let took = begun.elapsed();
    assert!(took < ryokan::core::limits::HANDOVER_HELLO / 2, "it waited for the other target: {took:?}");
    let left = handovers(&here);
    assert!(left.iter().any(|one| one["name"] == "hung" && one["state"] == "aborting"), "{left:?}");
}

/// Files that are written while the kernel runs only save time.
#[test]
fn move_succeeds_without_preview() {
    let (here, mut there) = pair(User::Own);
    for fault in ["workspace.spare.make=eio", "workspace.spare.place=eio"] {
        let name = if fault.contains("make") { "made" } else { "placed" };
        set_up(&here, name);
        with_fault(&mut there, fault);
        moved(&here, name, &there, &[]);
        assert_eq!(there.ok(&["exec", name, VIEW]), "2 two deep\n", "{fault}");
    }
    let left = || std::fs::read_dir(there.data().join("prepared")).map_or(0, Iterator::count);
    until("no copy is left", || left() == 0);
}

/// The decision is durable before anything of the kernel is removed.
#[test]
fn files_outlive_unsynced_departure() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    let id = show(&here, "demo")["id"].as_str().unwrap().to_owned();
    let file = here.data().join("kernels").join(id).join("workspace/f");
    assert!(file.exists(), "{file:?}");
    // The first sync is that of the record, the second that of the departure.
    with_fault(&mut here, "handover.data.sync:2=kill");
    assert!(!teleport(&here, "demo", &there, &[]).status.success());
    assert!(here.ends() && file.exists(), "a loss of power here would have left no copy");
    here.env(ryokan::sys::fault::VARIABLE, "");
    here.restart();
    until("the commit is repeated", || handovers(&here).is_empty() && is_live(&there, "demo"));
    until("the files are removed", || !file.exists());
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

/// A kernel returns before its first move was acknowledged: nothing of that move is left.
#[test]
fn return_acknowledges_first_move() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    let closed = here.path("closed");
    let way = to(&there).replacen("exec:", &format!("exec:test ! -e {} || exit 1; ", closed.display()), 1);
    with_fault(&mut here, "kernel.files.clear=kill");
    let ended = here.cli(&["teleport", "demo", "--to", &way]);
    assert!(!ended.status.success() && here.ends(), "{ended:?}");
    std::fs::write(&closed, "").unwrap();
    here.env(ryokan::sys::fault::VARIABLE, "");
    here.restart();
    if let Some(prepared) = handovers(&there).iter().find(|one| one["state"] == "prepared") {
        there.ok(&["teleport", "--resolve", prepared["id"].as_str().unwrap(), "--live", "--yes"]);
    }
    there.ok(&["exec", "demo", "x=3"]);
    moved(&there, "demo", &here, &[]);
    assert_eq!(handovers(&here).iter().filter(|one| one["state"] != "live").count(), 0, "{:?}", handovers(&here));
    std::fs::remove_file(&closed).unwrap();
    let again = here.cli(&["--json", "teleport", "demo", "--to", &way]);
    assert!(again.status.success(), "{again:?}");
    assert_eq!(there.ok(&["exec", "demo", "echo $x"]), "3\n");
}
