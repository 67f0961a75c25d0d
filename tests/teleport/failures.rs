//! Steps that fail on one side, and targets that do not answer.

use std::time::Instant;

use super::*;
use crate::support::until;

pub(super) fn with_fault(host: &mut Host, fault: &str) {
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
    let report = moved(&here, "demo", &there, &[]);
    let begun = Instant::now();
    assert_eq!(report["acknowledged"], false, "{report}");
    until("the commit arrives", || is_live(&there, "demo"));
    let took = begun.elapsed();
    assert!(took < ryokan::core::limits::HANDOVER_HELLO / 2, "it waited for the other target: {took:?}");
    let left = handovers(&here);
    assert!(left.iter().any(|one| one["name"] == "hung" && one["state"] == "aborting"), "{left:?}");
}

/// Files and engine state that are written while the kernel runs only save time.
#[test]
fn move_succeeds_without_preview() {
    let (here, mut there) = pair(User::Own);
    for (name, fault) in [
        ("made", "workspace.spare.make=eio"),
        ("placed", "workspace.spare.place=eio"),
        ("staged", "engine.state.revise.before_commit=eio"),
        ("published", "kernel.engine.adopt=eio"),
    ] {
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

/// Everything of the kernel of [`lab`]: its variables, and its files with their contents.
const EVERYTHING: &str = "
import hashlib, os
names = sorted(os.path.join(folder, name) for folder, _, names in os.walk('.') for name in names)
files = {name: hashlib.sha256(open(name, 'rb').read()).hexdigest()[:12] for name in names}
print(sorted((k, v) for k, v in globals().items() if type(v) in (int, str, list) and k[0] != '_'), files)
";

/// A kernel with variables, many files, a checkpoint, and a generator that only its worker has.
fn lab(host: &Host) {
    host.ok(&["new", "demo", "--engine", "python"]);
    let fill = "
import os
x, words = 1, ['a']
for i in range(40): os.makedirs(f'd{i % 4}', exist_ok=True); open(f'd{i % 4}/f{i}', 'wb').write(os.urandom(2000 * i))
g = iter(range(99)); r = next(g)
";
    host.ok(&["exec", "demo", fill]);
    host.ok(&["checkpoint", "demo", "-m", "before"]);
}

/// Work after a failed move: variables and files change, appear and disappear.
fn works_on(host: &Host) {
    host.ok(&[
        "exec",
        "demo",
        "x += 1; words.append('b'); y = 'new'; open('d0/f4', 'ab').write(b'more'); os.remove('d1/f1')",
    ]);
    host.ok(&["exec", "demo", "os.rename('d2/f2', 'd3/moved'); open('late', 'w').write('late')"]);
    host.ok(&["checkpoint", "demo", "-m", "between"]);
    host.ok(&["exec", "demo", "words.append('c')"]);
}

/// After a failed move, the kernel works here as before; the second one carries everything that was written between.
fn second_move_carries_all(here: &Host, there: &Host, what: &str) {
    until(&format!("{what}: the abort arrives"), || undecided(here).is_empty() && undecided(there).is_empty());
    assert_eq!((is_live(here, "demo"), is_live(there, "demo")), (true, false), "{what}");
    assert_eq!(here.ok(&["exec", "demo", "print(next(g))"]), "1\n", "{what}: the same worker continues");
    works_on(here);
    let all = here.ok(&["exec", "demo", EVERYTHING]);
    assert!(all.contains("'c'") && all.contains("late"), "{all}");
    moved(here, "demo", there, &[]);
    assert_eq!(there.ok(&["exec", "demo", EVERYTHING]), all, "{what}");
    assert!(there.ok(&["log", "demo"]).contains("between"), "{what}");
    there.ok(&["verify"]);
}

/// The source fails while it exports: at its first capture, and in the pause after everything was copied.
#[test]
fn export_failure() {
    for fault in ["workspace.file.read=eio", "state.transition.begin.before_commit=eio"] {
        let (mut here, there) = pair(User::Own);
        lab(&here);
        // Something that no checkpoint has read.
        here.ok(&["exec", "demo", "open('unread', 'w').write('unread')"]);
        with_fault(&mut here, fault);
        let failed = teleport(&here, "demo", &there, &[]);
        assert!(!failed.status.success(), "{fault} was not met");
        second_move_carries_all(&here, &there, fault);
    }
}

/// The target fails while it imports what was sent in full: before its history, in it, and at its record.
#[test]
fn import_failure() {
    let faults = [
        // Neither what was written ahead can be used, nor can it be written anew.
        "kernel.engine.adopt=eio,engine.state.replace.before_commit=eio",
        "state.history.import.before_commit=enospc",
        "catalog.handover.put.before_commit=eio",
        // What a failed sync has lost is sent again.
        "handover.data.sync=eio",
    ];
    for fault in faults {
        let (here, mut there) = pair(User::Own);
        lab(&here);
        with_fault(&mut there, fault);
        let failed = teleport(&here, "demo", &there, &[]);
        assert!(!failed.status.success(), "{fault} was not met");
        second_move_carries_all(&here, &there, fault);
    }
}

/// A kernel returns before its first move was acknowledged: nothing of that move is left.
#[test]
fn return_acknowledges_first_move() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    let closed = here.path("closed");
    let way = to(&there).replacen("exec:", &format!("exec:test ! -e {} || exit 1; ", closed.display()), 1);
    // The departure is decided, and its commit not sent.
    with_fault(&mut here, "handover.data.sync:2=kill");
    let ended = here.cli(&["teleport", "demo", "--to", &way]);
    assert!(!ended.status.success() && here.ends(), "{ended:?}");
    std::fs::write(&closed, "").unwrap();
    here.env(ryokan::sys::fault::VARIABLE, "");
    here.restart();
    assert_eq!(handovers(&here)[0]["state"], "committing");
    there.ok(&["teleport", "--resolve", &prepared(&there), "--live", "--yes"]);
    there.ok(&["exec", "demo", "x=3"]);
    moved(&there, "demo", &here, &[]);
    assert_eq!(handovers(&here).iter().filter(|one| one["state"] != "live").count(), 0, "{:?}", handovers(&here));
    std::fs::remove_file(&closed).unwrap();
    let again = here.cli(&["--json", "teleport", "demo", "--to", &way]);
    assert!(again.status.success(), "{again:?}");
    assert_eq!(there.ok(&["exec", "demo", "echo $x"]), "3\n");
}
