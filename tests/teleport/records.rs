//! Records that need no worker, while their kernel leaves.

use ryokan::sys::fault;

use super::*;
use crate::support::until;

const MESSAGE: [&str; 5] = ["message", "demo", "late", "--role", "user"];

/// Each is refused while the kernel is sealed, or it is at the target: none is acknowledged and left behind.
#[test]
fn acknowledged_records_move() {
    let (here, mut there) = pair(User::Own);
    set_up(&here, "demo");
    let hold = there.path("hold");
    std::fs::write(&hold, "").expect("written");
    there.env(fault::HOLD, hold.to_str().expect("a path"));
    arm(&mut there, "handover.data.sync=hold");
    let file = here.path("file");
    std::fs::write(&file, "late").expect("written");
    let blob = ["blob", "put", "demo", file.to_str().expect("a path")];
    let pin = ["checkpoint", "demo", "--pin-ref", "one"];
    let before = 1 + here.ok(&["journal", "demo", "--json"]).lines().count();
    let report = std::thread::scope(|scope| {
        let moving = scope.spawn(|| moved(&here, "demo", &there, &[]));
        until("the target prepares", || hold.with_extension("reached").exists());
        let records = [&MESSAGE[..], &blob, &pin].map(|args| here.cli(args));
        // Code waits for the outcome; its client gets it.
        let waiting = scope.spawn(|| here.cli(&["exec", "demo", "echo ran > ran"]));
        let journal = || here.cli(&["journal", "demo", "--json"]).stdout.split(|byte| *byte == b'\n').count();
        let is_waiting = (0..600).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(100));
            journal() > before
        });
        std::fs::remove_file(&hold).expect("removed");
        assert!(is_waiting, "the code was not accepted");
        for refused in records {
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(!refused.status.success() && said.contains("is being moved to another host"), "{said}");
        }
        let report = moving.join().expect("it moves");
        let refused = waiting.join().expect("an answer");
        assert!(String::from_utf8_lossy(&refused.stderr).contains("moved to"), "{refused:?}");
        report
    });
    assert_eq!(report["acknowledged"], true, "{report}");
    let journal = there.ok(&["journal", "demo"]);
    assert!(!journal.contains("late") && !journal.contains("echo ran"), "it never ran: {journal}");
    assert_eq!(there.ok(&["exec", "demo", "ls ran || echo none"]).lines().last(), Some("none"));
    // There, all of them are accepted.
    there.ok(&MESSAGE);
    there.ok(&pin);
    there.ok(&["verify"]);
}

/// A departure that fails, and whose record cannot be deleted, may be in the database: its abort waits.
#[test]
fn failed_departure_ends_before_abort() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    // Before the code resumes, when the move ends, and before its abort is sent.
    let clear = ["", ":2", ":3"].map(|nth| format!("state.transition.clear.before_commit{nth}=eio"));
    arm(&mut here, &format!("state.transition.commit.before_commit=eio,{}", clear.join(",")));
    assert!(!teleport(&here, "demo", &there, &[]).status.success());
    assert!(!prepared(&there).is_empty(), "the target keeps it until the source has decided");
    until("the abort arrives", || {
        here.cli(&["teleport", "demo", "--abort"]);
        handovers(&here).is_empty() && handovers(&there).is_empty()
    });
    assert!(is_live(&here, "demo") && state(&there, "demo").is_none());
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}
