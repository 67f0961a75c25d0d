//! Each daemon killed at each labelled step of a move: exactly one live copy, whole, and the next try succeeds.

use ryokan::sys::fault;

use super::*;
use crate::support::until;

/// Steps that make part of a move durable, on either side.
const FAMILIES: &[&str] = &[
    "catalog.decision.",
    "catalog.handover.",
    "engine.state.revise",
    "handover.data.",
    "catalog.kernel.update",
    "kernel.files.",
    "kernel.engine.",
    "state.checkpoints.add",
    "state.decision.",
    "state.history.",
    "state.transition.",
    "store.pack.sync",
    "workspace.checkout.folder",
    "workspace.spare.",
];

/// Those that no source passes.
const OF_TARGETS: &[&str] = &["engine.state.revise", "kernel.engine.adopt"];

pub(super) fn points() -> Vec<(&'static str, String)> {
    let is_part = |name: &str| FAMILIES.iter().any(|family| name.starts_with(family));
    fault::points()
        .filter(|(label, _)| is_part(label.name))
        .map(|(label, point)| (label.name, point.to_string()))
        .collect()
}

/// Both hosts come back; exactly one has the kernel, and neither waits for the other.
pub(crate) fn one_is_left<'a>(here: &'a Host, there: &'a Host, what: &str) -> (&'a Host, &'a Host) {
    until(&format!("{what}: the decision reaches the other host"), || {
        let is_open = |one: &Value| one["state"] != "live";
        !handovers(here).iter().any(is_open) && !handovers(there).iter().any(is_open)
    });
    let live = (is_live(here, "demo"), is_live(there, "demo"));
    match live {
        (true, false) => (here, there),
        (false, true) => (there, here),
        _ => panic!("{what}: live copies: {live:?}\nsource:\n{}\ntarget:\n{}", here.log(), there.log()),
    }
}

fn killed_at_each_step(of_source: bool) -> Vec<&'static str> {
    let (mut here, mut there) = pair(User::Own);
    set_up(&here, "demo");
    let mut killed = Vec::new();
    let mut at_here = true;
    for (name, point) in points().into_iter().filter(|(name, _)| !of_source || !OF_TARGETS.contains(name)) {
        let what = format!("{point} of the {}", if of_source { "source" } else { "target" });
        // The kernel is wherever the last round left it.
        let (source, target) = if at_here { (&mut here, &mut there) } else { (&mut there, &mut here) };
        let victim: &mut Host = if of_source { source } else { target };
        victim.kill();
        victim.env(fault::VARIABLE, &format!("{point}=kill"));
        victim.spawn();
        // Its start may pass the point, too.
        until(&format!("{what}: it serves or is dead"), || {
            let serves = std::os::unix::net::UnixStream::connect(victim.socket()).is_ok();
            serves || !Host::is_alive(victim.pid() as u32)
        });
        let output = teleport(source, "demo", target, &[]);
        let victim: &mut Host = if of_source { source } else { target };
        let died = if output.status.success() { !Host::is_alive(victim.pid() as u32) } else { victim.ends_soon() };
        if died {
            killed.push(name);
        }
        victim.env(fault::VARIABLE, "");
        victim.restart();
        if !of_source {
            // The source repeats its decision at once after a restart, and with pauses otherwise.
            source.restart();
        }
        let (live, _) = one_is_left(&here, &there, &what);
        assert_eq!(live.ok(&["exec", "demo", VIEW]), "2 two deep\n", "{what}");
        at_here = std::ptr::eq(live, &here);
        if output.status.success() {
            continue;
        }
        let (live, other) = if at_here { (&here, &there) } else { (&there, &here) };
        moved(live, "demo", other, &[]);
        at_here = !at_here;
    }
    killed
}

#[test]
fn source_killed_at_each_step() {
    let killed = killed_at_each_step(true);
    for label in [
        "catalog.handover.put",
        "state.decision.rewrite",
        "state.transition.begin",
        "state.transition.commit",
        "kernel.files.clear",
    ] {
        assert!(killed.contains(&label), "{label} was not reached: {killed:?}");
    }
}

#[test]
fn target_killed_at_each_step() {
    let killed = killed_at_each_step(false);
    for label in [
        "catalog.decision.rewrite",
        "catalog.handover.put",
        "catalog.handover.activate",
        "engine.state.revise",
        "kernel.engine.adopt",
        "kernel.files.adopt",
        "state.history.import",
        "workspace.spare.place",
    ] {
        assert!(killed.contains(&label), "{label} was not reached: {killed:?}");
    }
}
