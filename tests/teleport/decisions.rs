//! Decisions about moves: durable before anything acts on them, delivered to their own target only, and reported as made.

use std::path::PathBuf;

use super::failures::with_fault;
use super::*;
use crate::support::until;

/// A departure whose sync failed is written anew before its files are removed or its commit is sent.
#[test]
fn lost_departure_is_written_anew() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    let id = show(&here, "demo")["id"].as_str().expect("an id").to_owned();
    let file = here.data().join("kernels").join(id).join("workspace/f");
    // Both happen once before the pause.
    with_fault(&mut here, "handover.data.sync:2=eio,state.decision.rewrite.before_commit:2=kill");
    assert!(!teleport(&here, "demo", &there, &[]).status.success() && here.ends(), "it is only synced again");
    assert!(file.exists() && !prepared(&there).is_empty());
    // The next daemon does not trust what it reads, either.
    arm(&mut here, "state.decision.rewrite.before_commit=kill");
    assert!(here.ends() && file.exists() && !prepared(&there).is_empty());
    here.env(ryokan::sys::fault::VARIABLE, "");
    here.restart();
    until("the commit arrives", || handovers(&here).is_empty() && is_live(&there, "demo"));
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

/// The same at the target: a repeated commit is acknowledged after the activation was written anew.
#[test]
fn lost_activation_is_written_anew() {
    let (here, mut there) = pair(User::Own);
    set_up(&here, "demo");
    // Before the offer is accepted, and before a repeated commit is acknowledged.
    with_fault(&mut there, "handover.data.sync:3=eio,catalog.decision.rewrite.before_commit:2=kill");
    assert_eq!(moved(&here, "demo", &there, &[])["acknowledged"], false);
    until("the repeated commit arrives", || !Host::is_alive(there.pid() as u32));
    assert_eq!(handovers(&here)[0]["state"], "committing");
    arm(&mut there, "catalog.decision.rewrite.before_commit=kill");
    assert!(there.ends(), "a start renames the directory before the activation is durable");
    there.env(ryokan::sys::fault::VARIABLE, "");
    there.restart();
    until("the commit is acknowledged", || {
        here.cli(&["teleport", "demo", "--abort"]);
        handovers(&here).is_empty()
    });
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

/// A transport that leads to one host, and to the other while a file exists.
fn switched(here: &Host, one: &Host, other: &Host) -> (String, PathBuf) {
    let switch = here.path("switch");
    let (one, other) = (to(one), to(other));
    let command = |to: &str| to.strip_prefix("exec:").expect("a command").to_owned();
    let (one, other) = (command(&one), command(&other));
    (format!("exec:if test -e {}; then {other}; else {one}; fi", switch.display()), switch)
}

/// A source that ended at the fault, whose transport leads elsewhere from then on; waits until it notices.
fn misled(fault: &str, state: &str) -> (Host, Host, Host, String, PathBuf) {
    let (mut here, there) = pair(User::Own);
    let other = Host::start();
    set_up(&here, "demo");
    let (way, switch) = switched(&here, &there, &other);
    with_fault(&mut here, fault);
    assert!(!here.cli(&["teleport", "demo", "--to", &way]).status.success() && here.ends(), "{fault}");
    std::fs::write(&switch, "").expect("written");
    here.env(ryokan::sys::fault::VARIABLE, "");
    here.restart();
    let problem = || handovers(&here)[0]["problem"].as_str().expect("a text").to_owned();
    until("the problem is shown", || !problem().is_empty());
    assert!(problem().contains("leads to host"), "{}", problem());
    assert!(here.ok(&["teleport", "--status"]).contains("leads to host"));
    assert_eq!(handovers(&here)[0]["state"], state);
    assert_eq!((prepared(&there).is_empty(), handovers(&other)), (false, Vec::new()));
    (here, there, other, way, switch)
}

#[test]
fn commit_waits_for_its_target() {
    let (here, there, other, _, switch) = misled("handover.data.sync:2=kill", "committing");
    std::fs::remove_file(switch).expect("removed");
    until("the commit arrives", || {
        here.cli(&["teleport", "demo", "--abort"]);
        handovers(&here).is_empty() && is_live(&there, "demo")
    });
    assert_eq!((is_live(&here, "demo"), state(&other, "demo")), (false, None));
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

/// Neither a repetition nor a later move to the other host ends what the first target has.
#[test]
fn abort_waits_for_its_target() {
    let (here, there, other, way, switch) = misled("state.transition.commit.before_commit=kill", "aborting");
    let went = here.cli(&["teleport", "demo", "--to", &way]);
    assert!(went.status.success() && is_live(&other, "demo"), "{went:?}");
    assert_eq!((undecided(&here).len(), prepared(&there).is_empty()), (1, false));
    std::fs::remove_file(switch).expect("removed");
    until("the abort arrives", || {
        here.cli(&["teleport", "demo", "--abort"]);
        handovers(&here).is_empty() && handovers(&there).is_empty()
    });
    assert_eq!((state(&there, "demo"), is_live(&other, "demo")), (None, true));
}

/// What an abort reports is what happens, also while the departure is written.
#[test]
fn abort_reports_what_happened() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    let held = here.path("held");
    std::fs::write(&held, "").expect("written");
    here.env(ryokan::sys::fault::HOLD, held.to_str().expect("a path"));
    with_fault(&mut here, "state.transition.commit.before_commit=hold");
    let way = to(&there);
    let start = |args: &[&str]| {
        let mut command = here.command("ryokan");
        command.arg("--no-autostart").args(args).stdout(std::process::Stdio::piped());
        command.stderr(std::process::Stdio::piped()).spawn().expect("it starts")
    };
    let moving = start(&["teleport", "demo", "--to", &way]);
    until("the target is prepared", || handovers(&there).iter().any(|one| one["state"] == "prepared"));
    let mut aborting = start(&["teleport", "demo", "--abort"]);
    // It has no outcome before the departure has one.
    let early = (0..20).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        aborting.try_wait().expect("a status").is_some()
    });
    std::fs::remove_file(&held).expect("removed");
    let (moved, aborted) = (moving.wait_with_output().expect("ended"), aborting.wait_with_output().expect("ended"));
    let (_, at) = (one_is_left(&here, &there, "an abort"), is_live(&there, "demo"));
    assert_eq!(moved.status.success(), at, "{moved:?}");
    let said = String::from_utf8_lossy(&aborted.stderr).into_owned();
    assert_eq!((aborted.status.code(), said.contains("too late")), if at { (Some(4), true) } else { (Some(0), false) });
    assert!(!early || !at, "it was reported before it was decided");
}

/// A damaged record is shown; the other kernels are recovered, and its files stay.
#[test]
fn damaged_record_spares_others() {
    let (here, mut there) = pair(User::Own);
    for name in ["first", "second"] {
        set_up(&here, name);
        moved(&here, name, &there, &[]);
    }
    let kernels = |host: &Host| host.data().join("kernels").read_dir().expect("readable").count();
    let before = kernels(&there);
    let damaged = handovers(&there)[0]["id"].as_str().expect("an id").to_owned();
    there.kill();
    let catalog = rusqlite::Connection::open(there.data().join("catalog.db")).expect("opened");
    let sql = "UPDATE handovers SET record = '{\"files\":' WHERE lower(hex(id)) = ?";
    assert_eq!(catalog.execute(sql, [&damaged]).expect("changed"), 1);
    drop(catalog);
    there.launch();
    let states: Vec<Value> = handovers(&there).iter().map(|one| one["state"].clone()).collect();
    assert_eq!(states, ["damaged", "live"]);
    assert!(handovers(&there)[0]["problem"].as_str().expect("a text").contains(&damaged));
    for name in ["first", "second"] {
        assert_eq!(there.ok(&["exec", name, VIEW]), "2 two deep\n", "{name}");
    }
    assert_eq!(kernels(&there), before);
}
