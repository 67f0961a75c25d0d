//! What an operator decides: cancelling a move, and ending one whose other host is gone.

use super::failures::with_fault;
use super::*;
use crate::support::until;

/// The lines of the audit log about decisions of an operator.
fn resolved(host: &Host) -> Vec<Value> {
    let lines = host.ok(&["--json", "audit"]);
    let all = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line"));
    all.filter(|line| line["action"] == "handover.resolve").collect()
}

/// Checks the only decision in the audit log.
fn audited(host: &Host, id: &str, what: &str) {
    let lines = resolved(host);
    let detail = lines.first().map(|line| line["detail"].to_string()).unwrap_or_default();
    assert!(lines.len() == 1 && detail.contains(id) && detail.contains(what), "{lines:?}");
}

/// Ends the source at a step while the target is prepared.
fn source_dies(here: &mut Host, there: &Host, fault: &str) -> String {
    set_up(here, "demo");
    with_fault(here, fault);
    assert!(!teleport(here, "demo", there, &[]).status.success() && here.ends(), "{fault}");
    here.env(ryokan::sys::fault::VARIABLE, "");
    prepared(there)
}

#[test]
fn prepared_kernel_is_discarded() {
    let (mut here, there) = pair(User::Own);
    let id = source_dies(&mut here, &there, "state.transition.commit.before_commit=kill");
    let unsure = there.cli(&["teleport", "--resolve", &id, "--discard"]);
    assert!(!unsure.status.success() && prepared(&there) == id, "it is asked first: {unsure:?}");
    there.ok(&["teleport", "--resolve", &id, "--discard", "--yes"]);
    assert_eq!((handovers(&there), state(&there, "demo")), (Vec::new(), None));
    until("its files are removed", || left_over(&there).is_empty());
    audited(&there, &id, "discarded");
    let again = there.cli(&["teleport", "--resolve", &id, "--discard", "--yes"]);
    assert_eq!(again.status.code(), Some(3), "{again:?}");
    // The source had not departed: its abort has nothing to delete.
    here.restart();
    until("the abort is acknowledged", || handovers(&here).is_empty());
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
    moved(&here, "demo", &there, &[]);
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

#[test]
fn prepared_kernel_is_activated() {
    let (mut here, there) = pair(User::Own);
    let id = source_dies(&mut here, &there, "handover.data.sync:2=kill");
    there.ok(&["teleport", "--resolve", &id, "--live", "--yes"]);
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
    audited(&there, &id, "activated");
    for decision in ["--live", "--discard"] {
        let again = there.cli(&["teleport", "--resolve", &id, decision, "--yes"]);
        assert_eq!(again.status.code(), Some(3), "{decision}: {again:?}");
    }
    there.ok(&["exec", "demo", "x=3"]);
    // It had departed there: its commit finds the kernel alive.
    here.restart();
    until("the commit is acknowledged", || handovers(&here).is_empty());
    assert_eq!((is_live(&here, "demo"), is_live(&there, "demo")), (false, true));
    assert_eq!(there.ok(&["exec", "demo", "echo $x"]), "3\n");
}

#[test]
fn commit_is_not_cancelled() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    let closed = here.path("closed");
    let way = to(&there).replacen("exec:", &format!("exec:test ! -e {} || exit 1; ", closed.display()), 1);
    with_fault(&mut here, "handover.data.sync:2=kill");
    assert!(!here.cli(&["teleport", "demo", "--to", &way]).status.success() && here.ends());
    here.env(ryokan::sys::fault::VARIABLE, "");
    std::fs::write(&closed, "").expect("written");
    here.restart();
    let id = handovers(&here)[0]["id"].as_str().expect("an id").to_owned();
    let refuses = |args: &[&str], why: &str| {
        let refused = here.cli(args);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(4) && said.contains(why), "{args:?}: {said}");
        assert_eq!(handovers(&here)[0]["state"], "committing", "{args:?}");
    };
    refuses(&["teleport", "demo", "--abort"], "is committed");
    refuses(&["teleport", "--resolve", &id, "--live", "--yes"], "a move away from here");
    refuses(&["rm", "demo", "--yes"], "has not acknowledged");
    assert_eq!((is_live(&here, "demo"), resolved(&here)), (false, Vec::new()));
    std::fs::remove_file(&closed).expect("removed");
    // Looking for it wakes the repetition.
    until("the commit arrives", || {
        here.cli(&["teleport", "demo", "--abort"]);
        handovers(&here).is_empty() && is_live(&there, "demo")
    });
    let late = here.cli(&["teleport", "demo", "--abort"]);
    assert_eq!(late.status.code(), Some(4), "{late:?}");
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

/// A start that cannot read the departure decides nothing: an abort would delete the only copy.
#[test]
fn unreadable_departure_waits() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    let state = workspace(&here, "demo").with_file_name("state.db");
    with_fault(&mut here, "handover.data.sync:2=kill");
    assert!(!teleport(&here, "demo", &there, &[]).status.success() && here.ends());
    here.env(ryokan::sys::fault::VARIABLE, "");
    std::fs::rename(&state, state.with_extension("away")).expect("moved away");
    here.restart();
    let problem = || handovers(&here)[0]["problem"].as_str().is_some_and(|why| why.contains("cannot be read"));
    until("an attempt", problem);
    assert_eq!(handovers(&here)[0]["state"], "undecided");
    for args in [&["rm", "demo", "--yes"][..], &["teleport", "demo", "--abort"]] {
        let refused = here.cli(args);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("cannot be read from its records"), "{refused:?}");
    }
    assert_eq!(handovers(&there)[0]["state"], "prepared");
    here.kill();
    std::fs::rename(state.with_extension("away"), &state).expect("moved back");
    here.launch();
    until("the commit arrives", || handovers(&here).is_empty() && is_live(&there, "demo"));
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

#[test]
fn damaged_prepared_record_is_discarded() {
    let (mut here, mut there) = pair(User::Own);
    let id = source_dies(&mut here, &there, "state.transition.commit.before_commit=kill");
    there.kill();
    let catalog = rusqlite::Connection::open(there.data().join("catalog.db")).expect("opened");
    let changed = catalog.execute("UPDATE handovers SET record = '{' WHERE lower(hex(id)) = ?", [&id]);
    assert_eq!(changed.expect("changed"), 1);
    drop(catalog);
    there.launch();
    assert_eq!(handovers(&there)[0]["state"], "damaged");
    there.ok(&["teleport", "--resolve", &id, "--discard", "--yes"]);
    assert_eq!(handovers(&there), Vec::<Value>::new());
    there.restart();
    assert_eq!(left_over(&there), Vec::<String>::new());
    here.restart();
    until("the abort is acknowledged", || handovers(&here).is_empty());
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

/// The target of a committed move is gone for good: the decision is given up, and the kernel can be removed.
#[test]
fn outgoing_commit_is_given_up() {
    let (mut here, gone) = pair(User::Own);
    set_up(&here, "demo");
    with_fault(&mut here, "handover.data.sync:2=kill");
    assert!(!here.cli(&["teleport", "demo", "--to", &to(&gone)]).status.success() && here.ends());
    here.env(ryokan::sys::fault::VARIABLE, "");
    drop(gone);
    here.restart();
    let id = handovers(&here)[0]["id"].as_str().expect("an id").to_owned();
    here.ok(&["teleport", "--resolve", &id, "--discard", "--yes"]);
    assert_eq!((handovers(&here), is_live(&here, "demo")), (Vec::<Value>::new(), false));
    audited(&here, &id, "discarded");
    here.ok(&["rm", "demo", "--yes"]);
}

/// The target is gone for good: its abort is given up, and the kernel moves elsewhere.
#[test]
fn outgoing_abort_is_given_up() {
    let (mut here, gone) = pair(User::Own);
    set_up(&here, "demo");
    let once = here.path("once");
    let way = format!("exec:test ! -e {0} && touch {0} || exit 1; ", once.display());
    let way = to(&gone).replacen("exec:", &way, 1);
    with_fault(&mut here, "state.transition.begin.before_commit=eio");
    assert!(!here.cli(&["teleport", "demo", "--to", &way]).status.success());
    let left = handovers(&here);
    let id = left[0]["id"].as_str().expect("an id");
    assert_eq!((left.len(), left[0]["state"].as_str()), (1, Some("aborting")), "{left:?}");
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
    let live = here.cli(&["teleport", "--resolve", id, "--live", "--yes"]);
    assert_eq!(live.status.code(), Some(4), "an abort makes no second copy: {live:?}");
    assert_eq!(resolved(&here), Vec::<Value>::new());
    here.ok(&["teleport", "--resolve", id, "--discard", "--yes"]);
    assert_eq!(handovers(&here), Vec::<Value>::new());
    audited(&here, id, "discarded");
    let there = Host::start();
    moved(&here, "demo", &there, &[]);
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}
