//! Kernels in virtual machines move to another host, and into another isolation.

use super::{COUNTER, Machines, pair, users};
use crate::support::{Host, User, until};
use crate::teleport::{arm, faulty, machine_offer, moved, one_is_left, show, state, teleport};

const SEE: &str = "print(x, open('f').read())";
/// In memory only: a generator, and a thread that counts.
const MEMORY: &str = "
x = 41; open('f', 'w').write('kept'); g = (n for n in range(100)); next(g)
";
const COUNTS: &str = "a = count; time.sleep(1); print(count > a)";

#[test]
fn machine_moves_and_returns() {
    let _pair = pair();
    for user in users() {
        let (here, there) = (Machines::start(user), Machines::start(user));
        here.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
        here.run("lab", &format!("{COUNTER}{MEMORY}"));
        here.ok(&["checkpoint", "lab", "-m", "before"]);
        here.run("lab", "x += 1; next(g)");
        let report = moved(&here, "lab", &there, &[]);
        assert_eq!(report["kind"], "teleport", "{report}\n{}", there.log());
        let first = report["sent_bytes"].as_u64().expect("a number");
        until("the machine's end", || here.machines().is_empty());
        assert_eq!(state(&here, "lab").as_deref(), Some("departed"));
        // It goes on by itself, with all of its memory.
        until("the machine goes on", || there.machines().len() == 1);
        assert_eq!(there.run("lab", SEE), "42 kept", "{user:?}\n{}", there.log());
        assert_eq!(there.run("lab", "print(next(g))"), "2", "{user:?}\n{}", there.log());
        let moved_here = "import os; print(os.environ['RYOKAN_EPOCH'])";
        assert_eq!(there.run("lab", moved_here), "2", "{user:?}: code of the memory reads that it moved");
        assert_eq!(there.run("lab", COUNTS), "True", "{user:?}: the thread goes on");
        assert!(there.ok(&["log", "lab"]).contains("before"), "{user:?}: with its checkpoints");
        there.run("lab", "x += 1");
        let report = moved(&there, "lab", &here, &["--kind", "teleport"]);
        let back = report["sent_bytes"].as_u64().expect("a number");
        eprintln!("{user:?}: {first} bytes sent, then {back}; paused for {} ms", report["pause_ms"]);
        assert!(back * 2 < first, "{user:?}: only what changed is sent back: {first}, then {back}");
        until("the machine's end", || there.machines().is_empty());
        assert_eq!(here.run("lab", SEE), "43 kept", "{user:?}\n{}", here.log());
        assert_eq!(here.run("lab", "print(next(g))"), "3", "{user:?}\n{}", here.log());
        here.ok(&["restore", "lab", "before", "--yes"]);
        assert_eq!(here.run("lab", SEE), "41 kept", "{user:?}\n{}", here.log());
    }
}

#[test]
fn memory_stays_where_it_cannot_continue() {
    let _pair = pair();
    // The target allows less than the machine has.
    let here = Machines::start(User::Own);
    let there = Machines::configured(User::Own, "[limits]\nteleport_snapshot = \"100MiB\"\n");
    here.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    here.run("lab", &format!("{COUNTER}{MEMORY}"));
    let refused = teleport(&here, "lab", &there, &["--kind", "teleport"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("size_too_large"), "{said}");
    assert_eq!(here.run("lab", "print(next(g))"), "1", "it continues here");
    let report = moved(&here, "lab", &there, &[]);
    let why = report["kind_reason"].as_str().unwrap_or_default();
    assert!(report["kind"] == "checkpoint" && why.contains("kind teleport with"), "{report}");
    assert_eq!(there.run("lab", SEE), "41 kept", "{}", there.log());
    // What does not run has no memory to move.
    there.ok(&["stop", "lab"]);
    let refused = teleport(&there, "lab", &here, &["--kind", "teleport"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("no memory to move"), "{said}");
    assert_eq!(moved(&there, "lab", &here, &[])["kind"], "checkpoint");
    assert_eq!(here.run("lab", SEE), "41 kept", "{}", here.log());
}

#[test]
fn killed_memory_move_keeps_one_copy() {
    let _pair = pair();
    let (mut here, mut there) = (Machines::start(User::Own), Machines::start(User::Own));
    here.ok(&["new", "demo", "--isolation", "microvm", "--engine", "python"]);
    here.run("demo", &format!("{COUNTER}{MEMORY}"));
    let mut at_here = true;
    let points = [
        (true, "machine.checkpoint.stored:2", false),
        (true, "state.transition.begin.after_commit", false),
        (true, "state.transition.commit.after_commit", true),
        (false, "machine.install.done", false),
        (false, "catalog.handover.put.after_commit", false),
        (false, "catalog.handover.activate.after_commit", true),
    ];
    for (at, (of_source, point, moves)) in points.into_iter().enumerate() {
        let (source, target) = if at_here { (&mut here, &mut there) } else { (&mut there, &mut here) };
        arm(if of_source { source } else { target }, &format!("{point}=kill"));
        let output = teleport(source, "demo", target, &["--kind", "teleport"]);
        let victim = if of_source { &mut *source } else { &mut *target };
        let died = if output.status.success() { !Host::is_alive(victim.pid() as u32) } else { victim.ends_soon() };
        assert!(died, "{point} was not reached\n{}", victim.log());
        arm(victim, "");
        source.restart();
        let (live, _) = one_is_left(&here, &there, point);
        assert_eq!(std::ptr::eq(live, &*here) != at_here, moves, "{point}");
        at_here = std::ptr::eq(live, &*here);
        let (live, other) = if at_here { (&here, &there) } else { (&there, &here) };
        assert_eq!(live.run("demo", "print(next(g), x)"), format!("{} 41", at + 1), "{point}\n{}", live.log());
        assert_eq!(live.run("demo", COUNTS), "True", "{point}");
        until("the end of the other machine", || other.machines().is_empty());
    }
    // A machine that does not start at the target is kept there, and continues at the next use.
    let (source, target) = if at_here { (&mut here, &mut there) } else { (&mut there, &mut here) };
    arm(target, "machine.installed.start=eio");
    moved(source, "demo", target, &["--kind", "teleport"]);
    until("the failure is logged", || target.log().contains("goes on at its next use"));
    assert_eq!(target.run("demo", "print(next(g), x)"), "7 41", "{}", target.log());
    assert_eq!(target.run("demo", COUNTS), "True", "the thread goes on");
    assert!(!target.ok(&["events", "demo", "--json"]).contains("memory_lost"));
    // One that started and is not seeded ends: files and saved state are left, and an event says so.
    arm(source, "machine.copy.seed=eio");
    moved(target, "demo", source, &["--kind", "teleport"]);
    until("the loss is published", || source.ok(&["events", "demo", "--json"]).contains("memory_lost"));
    assert_eq!(source.run("demo", SEE), "41 kept", "{}", source.log());
}

/// Target, wire or source fail while the machine is sent: it goes on here, and the last move carries what it did since.
#[test]
fn import_failure() {
    let _pair = pair();
    // What waits for a stalled wire is held no longer than this.
    let stalls = "[teleport]\nstall_timeout = \"10s\"\n";
    let (mut here, mut there) = (Machines::configured(User::Own, stalls), Machines::with_template(User::Own, ""));
    there.env(ryokan::sys::fault::VARIABLE, "catalog.handover.put.before_commit=eio");
    there.launch();
    here.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    here.run("lab", &format!("{COUNTER}{MEMORY}"));
    let failed = teleport(&here, "lab", &there, &["--kind", "teleport"]);
    assert!(!failed.status.success(), "the fault was not met: {failed:?}");
    until("the abort arrives", || here.ok(&["teleport", "--status"]) == "no moves\n");
    assert_eq!((state(&there, "lab"), there.machines().len()), (None, 0));
    assert_eq!(here.run("lab", "print(next(g), x)"), "1 41", "the same machine continues\n{}", here.log());
    assert_eq!(here.run("lab", COUNTS), "True", "its thread goes on");
    let stays = |here: &Machines, there: &Machines, count: u32, what: &str| {
        until("the abort arrives", || {
            [here, there].iter().all(|host| host.ok(&["teleport", "--status"]) == "no moves\n")
        });
        assert_eq!((state(there, "lab"), there.machines().len()), (None, 0), "{what}");
        let continues = here.run("lab", "print(next(g), x)");
        assert_eq!(continues, format!("{count} 41"), "{what}: the same machine continues\n{}", here.log());
    };
    let (piece, seal) = (("there", "piece"), ("there", "seal"));
    let faults = [(piece, "cut"), (piece, "flip"), (seal, "cut"), (seal, "stall")];
    for (count, (frame, fault)) in (2..).zip(faults) {
        let (way, reached) = faulty(&there, frame, fault);
        let failed = here.cli(&["teleport", "lab", "--to", &way, "--kind", "teleport"]);
        assert!(!failed.status.success() && reached.exists(), "{fault} at {frame:?}: {failed:?}");
        stays(&here, &there, count, fault);
    }
    arm(&mut here, "store.pack.write=enospc");
    let failed = teleport(&here, "lab", &there, &["--kind", "teleport"]);
    assert!(!failed.status.success(), "the source's fault was not met: {failed:?}");
    arm(&mut here, "");
    stays(&here, &there, 6, "a full disk of the source");
    arm(&mut there, "store.pack.write=enospc");
    let failed = teleport(&here, "lab", &there, &["--kind", "teleport"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("disk_full"), "the target's fault was not met: {said}");
    arm(&mut there, "");
    stays(&here, &there, 7, "a full disk of the target");
    here.run("lab", "x += 1; open('f', 'a').write(' more'); open('late', 'w').write('late')");
    moved(&here, "lab", &there, &["--kind", "teleport"]);
    until("the machine's end", || here.machines().is_empty());
    let see = "print(next(g), x, open('f').read(), open('late').read())";
    assert_eq!(there.run("lab", see), "8 42 kept more late", "{}", there.log());
    assert_eq!(there.run("lab", COUNTS), "True", "its thread goes on");
}

#[test]
fn moves_change_isolation() {
    // The other host has no image.
    let (here, there) = (Machines::start(User::Own), Host::start());
    here.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    here.run("lab", "x = 41; open('f', 'w').write('kept')");
    let refused = teleport(&here, "lab", &there, &[]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("image"), "{said}");
    assert_eq!(here.run("lab", SEE), "41 kept", "it continues here");
    let (way, reached) = faulty(&there, ("there", "seal"), "cut");
    let failed = here.cli(&["teleport", "lab", "--to", &way, "--isolation", "process"]);
    assert!(!failed.status.success() && reached.exists(), "{failed:?}");
    until("the abort arrives", || here.ok(&["teleport", "--status"]) == "no moves\n");
    assert_eq!((here.run("lab", SEE), state(&there, "lab")), ("41 kept".into(), None), "it continues here");
    moved(&here, "lab", &there, &["--isolation", "process"]);
    assert_eq!(there.ok(&["exec", "lab", SEE]).trim(), "41 kept", "{}", there.log());
    assert_eq!(show(&there, "lab")["isolation"], "process");
    there.ok(&["exec", "lab", "x += 1"]);
    moved(&there, "lab", &here, &["--isolation", "microvm"]);
    assert_eq!(here.run("lab", SEE), "42 kept", "{}", here.log());
    assert_eq!(here.machines().len(), 1);
    foreign_memory_is_refused(&here);
}

/// Memory of another machine is refused by its rule, or left behind where the source allows that.
fn foreign_memory_is_refused(target: &Machines) {
    let machine = |architecture: &str, image: &str| {
        serde_json::json!({
            "architecture": architecture, "base_image_version": image, "host": "00".repeat(16),
            "content": { "memory_bytes": 1, "disk_bytes": 1, "machine": {
                "vmm": "QEMU", "build": "", "machine_type": "", "cpu_model": "", "ram_bytes": 1, "processors": 1,
            } },
        })
    };
    let other = if cfg!(target_arch = "x86_64") { "aarch64" } else { "x86_64" };
    let (before, image) = (target.machines(), super::image());
    for (machine, rule) in [
        (machine(other, &image), "architecture_mismatch"),
        (machine(std::env::consts::ARCH, &"f".repeat(40)), "base_image_mismatch"),
        (machine(std::env::consts::ARCH, &image), "vmm_mismatch"),
    ] {
        let refused = machine_offer(target, &machine, false);
        assert!(refused.contains("\"refused\"") && refused.contains(rule), "{rule}: {refused}");
        let accepted = machine_offer(target, &machine, true);
        assert!(accepted.contains("\"accept\"") && accepted.contains("\"checkpoint\""), "{rule}: {accepted}");
    }
    assert_eq!((state(target, "offered"), target.machines()), (None, before));
}
