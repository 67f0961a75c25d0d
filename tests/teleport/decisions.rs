//! Decisions about moves: durable before anything acts on them, delivered to their own target only, and reported as made.

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
