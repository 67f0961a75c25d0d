//! Snapshots and moves under faults, each from a fixed seed, against real daemons and their stores.
//!
//! A test that fails names its seed. `RYOKAN_CHAOS_SEED=N` replays it, or tries another one.
//!
//! Those without faults, and those of pure rules, are beside what they test: `suspend_no_faults`, `suspend_crash_faults`
//! (tests/suspend), `checkpoint_no_faults` (tests/checkpoints), `teleport_no_faults` (moves.rs), `architecture_validation`,
//! `base_image_version_validation` (core/snapshot/mod.rs), `architecture_mismatch_faults`, `base_image_mismatch_faults`
//! (isolation/microvm/saved.rs).

use std::path::PathBuf;

use ryokan::sys::fault;

use super::crash_safety::{one_is_left, points};
use super::*;
use crate::support::{Random, until};

/// A program between source and target: `cut N` ends the link after N bytes, `flip N` changes the byte at N, `stall N`
/// loses everything from the N-th seal on.
const LINK: &str = "
import os, sys
kind, at, seen = sys.argv[1], int(sys.argv[2]), 0
with open(1, 'wb') as to:
    while piece := os.read(0, 65536):
        end = seen + len(piece)
        at -= kind == 'stall' and b'\"message\":\"seal\"' in piece
        if kind == 'stall' and at == 0:
            continue
        if kind == 'cut' and end >= at:
            to.write(piece[:at - seen])
            break
        if kind == 'flip' and seen <= at < end:
            piece = bytearray(piece)
            piece[at - seen] ^= 64
        to.write(piece)
        to.flush()
        seen = end
";

/// The seed of a test. A failure names it, and how to replay it.
struct Seed {
    test: &'static str,
    seed: u64,
    is_fixed: bool,
}

impl Seed {
    /// `RYOKAN_CHAOS_SEED`, or else this one.
    fn of(test: &'static str, fixed: u64) -> Seed {
        let set = std::env::var("RYOKAN_CHAOS_SEED").ok();
        let set = set.map(|text| text.parse().unwrap_or_else(|_| panic!("RYOKAN_CHAOS_SEED={text} is no number")));
        Seed { test, seed: set.unwrap_or(fixed), is_fixed: set.is_none() }
    }

    fn random(&self) -> Random {
        Random(self.seed)
    }

    fn replay(&self) -> String {
        let Seed { test, seed, .. } = self;
        format!("seed {seed}; it is replayed by RYOKAN_CHAOS_SEED={seed} cargo test --test runner {test}")
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} failed with {}", self.test, self.replay());
        }
    }
}

/// The transport to a host by a faulty link.
pub(super) fn by_link(target: &Host, kind: &str, at: u64) -> String {
    let script = target.path("link.py");
    std::fs::write(&script, LINK).unwrap();
    to(target).replacen("exec:exec ", &format!("exec:/usr/bin/python3 {} {kind} {at} | ", script.display()), 1)
}

/// A kernel with `MIB` MiB that do not compress, and a generator that only its worker has.
fn large_kernel(host: &Host) {
    host.ok(&["new", "demo", "--engine", "python"]);
    let fill = format!("import os; open('large', 'wb').write(os.urandom({MIB} << 20)); g = iter(range(99)); next(g)");
    host.ok(&["exec", "demo", &fill]);
}

const MIB: u64 = 6;

fn next(host: &Host) -> String {
    host.ok(&["exec", "demo", "print(next(g))"])
}

/// The kernel lives on the source only, and the target has nothing of it.
pub(super) fn stayed(source: &Host, target: &Host, what: &str) {
    until(&format!("{what}: the abort arrives"), || undecided(source).is_empty() && undecided(target).is_empty());
    assert!(is_live(source, "demo") && !is_live(target, "demo"), "{what}");
    until(&format!("{what}: nothing is left"), || left_over(target).is_empty());
}

/// Moves a kernel under each fault of one side; returns those under which it stayed.
fn moves_with(faults: &[&'static str], of_source: bool) -> Vec<&'static str> {
    let (mut here, mut there) = pair(User::Own);
    set_up(&here, "demo");
    let mut at_here = true;
    let mut met = Vec::new();
    for (round, fault) in faults.iter().enumerate() {
        let (source, target) = if at_here { (&mut here, &mut there) } else { (&mut there, &mut here) };
        // Something that the target lacks.
        source.ok(&["exec", "demo", &format!("echo {round} > r")]);
        arm(if of_source { source } else { target }, fault);
        if !teleport(source, "demo", target, &[]).status.success() {
            met.push(*fault);
            stayed(source, target, fault);
            assert_eq!(source.ok(&["exec", "demo", VIEW]), "2 two deep\n", "{fault}");
            arm(if of_source { source } else { target }, "");
            moved(source, "demo", target, &[]);
        }
        arm(if of_source { source } else { target }, "");
        until(&format!("{fault}: it arrives"), || is_live(target, "demo") && undecided(source).is_empty());
        assert!(!is_live(source, "demo"), "{fault}");
        let view = target.ok(&["exec", "demo", &format!("{VIEW} $(cat r)")]);
        assert_eq!(view, format!("2 two deep {round}\n"), "{fault}");
        at_here = !at_here;
    }
    for host in [&here, &there] {
        host.ok(&["verify"]);
    }
    met
}

#[test]
fn teleport_storage_faults() {
    let faults = [
        "workspace.file.read=eio",
        "store.pack.write=enospc",
        "state.checkpoints.add.before_commit=enospc",
        "catalog.handover.put.before_commit=eio",
        "state.transition.begin.before_commit=eio",
    ];
    let met = moves_with(&faults, true);
    assert!(met.len() >= 4, "the kernel stayed under {met:?} only");
}

#[test]
fn storage_failures() {
    let faults = [
        "store.pack.create=eio",
        "store.pack.write=enospc",
        "kernel.files.dir.create=enospc",
        "state.history.import.before_commit=eio",
        "kernel.engine.adopt=eio,engine.state.replace.before_commit=enospc",
        "state.history.begin.before_commit=eio",
        "catalog.handover.put.before_commit=enospc",
    ];
    let met = moves_with(&faults, false);
    assert!(met.len() >= 5, "the kernel stayed under {met:?} only");
}

#[test]
fn interrupted_midway() {
    let (here, there) = pair(User::Own);
    large_kernel(&here);
    let seed = Seed::of("interrupted_midway", 3);
    let mut random = seed.random();
    // Each try begins where the former one was cut: all together send more than one of them could.
    for (count, at) in [400, 900 << 10, (1 << 20) + random.below(1 << 20), 1500 << 10].into_iter().enumerate() {
        let cut = here.cli(&["teleport", "demo", "--to", &by_link(&there, "cut", at)]);
        assert!(!cut.status.success(), "cut at {at}: {cut:?}");
        stayed(&here, &there, &format!("cut at {at}"));
        assert_eq!(next(&here), format!("{}\n", count + 1), "cut at {at}: the same worker continues");
    }
    let report = moved(&here, "demo", &there, &[]);
    assert!(report["sent_bytes"].as_u64() < Some(MIB << 20), "what arrived before is not sent again: {report}");
    assert_eq!(there.ok(&["exec", "demo", "import os; print(os.path.getsize('large'))"]), format!("{}\n", MIB << 20));
    assert!(!is_live(&here, "demo"));
}

/// The largest file of the store.
fn pack(host: &Host) -> PathBuf {
    let mut folders = vec![host.data().join("store")];
    let mut largest = (0, PathBuf::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let found = entry.metadata().unwrap();
            match found.is_dir() {
                true => folders.push(entry.path()),
                false => largest = largest.max((found.len(), entry.path())),
            }
        }
    }
    largest.1
}

fn flip(file: &std::path::Path, at: u64) {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 64], at).unwrap();
}

#[test]
fn teleport_corruption() {
    let (here, there) = pair(User::Own);
    large_kernel(&here);
    let seed = Seed::of("teleport_corruption", 5);
    let mut random = seed.random();
    for count in 1..=4 {
        // Chunks that arrived before are not sent again: all four are within what the first one would send.
        let at = (64 << 10) + random.below(MIB << 17);
        let damaged = here.cli(&["teleport", "demo", "--to", &by_link(&there, "flip", at)]);
        assert!(!damaged.status.success(), "changed at {at}: {damaged:?}");
        stayed(&here, &there, &format!("changed at {at}"));
        assert_eq!(next(&here), format!("{count}\n"), "changed at {at}");
    }
    // On the source's disk.
    here.ok(&["checkpoint", "demo"]);
    let (pack, at) = (pack(&here), MIB << 19);
    flip(&pack, at);
    let fresh = Host::start();
    let damaged = teleport(&here, "demo", &fresh, &[]);
    assert!(!damaged.status.success(), "a damaged object was sent: {damaged:?}");
    stayed(&here, &fresh, "a damaged object");
    assert_eq!(next(&here), "5\n");
    flip(&pack, at);
    moved(&here, "demo", &fresh, &[]);
    fresh.ok(&["verify"]);
}

#[test]
fn checkpoint_state_faults() {
    let mut host = Host::start();
    host.ok(&["new", "k"]);
    let faults = [
        "workspace.file.read=eio",
        "store.pack.write=enospc",
        "state.checkpoints.add.before_commit=eio",
        "state.checkpoints.add.before_commit=enospc",
    ];
    for (round, fault) in faults.iter().enumerate() {
        let name = |what: &str| format!("{what}{round}");
        host.ok(&["exec", "k", &format!("x=old{round}; echo old{round} > f")]);
        host.ok(&["checkpoint", "k", "-m", &name("old")]);
        host.ok(&["exec", "k", &format!("x=new{round}; echo new{round} > f")]);
        arm(&mut host, fault);
        let refused = host.cli(&["checkpoint", "k", "-m", &name("new")]);
        assert!(!refused.status.success(), "{fault} was not met");
        let view = || host.ok(&["exec", "k", "echo $x $(cat f)"]);
        assert_eq!(view(), format!("new{round} new{round}\n"), "{fault}");
        assert!(!host.ok(&["log", "k"]).contains(&name("new")), "{fault}: half a checkpoint is visible");
        host.ok(&["checkpoint", "k", "-m", &name("new")]);
        for what in ["old", "new"] {
            host.ok(&["restore", "k", &name(what), "--yes"]);
            assert_eq!(view(), format!("{what}{round} {what}{round}\n"), "{fault}");
        }
    }
    host.ok(&["verify"]);
}

#[test]
fn concurrent_operations() {
    let (here, there) = pair(User::Own);
    let names = ["a", "b", "c"];
    for name in names {
        set_up(&here, name);
    }
    let outcomes = std::thread::scope(|scope| {
        let all = names.map(|name| {
            let (here, there) = (&here, &there);
            let [first, second] = [0, 1].map(|_| scope.spawn(move || teleport(here, name, there, &[])));
            let written = scope.spawn(move || here.cli(&["exec", name, "echo written > w"]));
            let taken = scope.spawn(move || here.cli(&["checkpoint", name, "-m", "meanwhile"]));
            let back = scope.spawn(move || here.cli(&["suspend", name]));
            (name, [first, second, written, taken, back])
        });
        all.map(|(name, threads)| (name, threads.map(|thread| thread.join().unwrap())))
    });
    for (name, [first, second, written, taken, suspended]) in outcomes {
        let went = [&first, &second].map(|output| output.status.success());
        for output in [&first, &second, &written, &taken, &suspended] {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(matches!(output.status.code(), Some(0 | 4)), "{name}: {said}");
        }
        let live = (is_live(&here, name), is_live(&there, name));
        assert_eq!(live, (went == [false, false], went != [false, false]), "{name}: {went:?}");
        assert_ne!(went, [true, true], "{name} moved twice");
        let host = if live.0 { &here } else { &there };
        assert_eq!(host.ok(&["exec", name, VIEW]), "2 two deep\n", "{name}");
        if written.status.success() {
            assert_eq!(host.ok(&["exec", name, "cat w"]).trim(), "written", "{name}: an acknowledged write is lost");
        }
        assert!(!taken.status.success() || host.ok(&["log", name]).contains("meanwhile"), "{name}");
    }
    until("nothing is left", || handovers(&here).is_empty() && left_over(&there).is_empty());
}

#[test]
fn roundtrip_under_faults() {
    let (mut here, mut there) = pair(User::Own);
    set_up(&here, "demo");
    let seed = Seed::of("roundtrip_under_faults", 11);
    let (mut random, points) = (seed.random(), points());
    let (mut at_here, mut failed) = (true, 0);
    for round in 0..12 {
        let (source, target) = if at_here { (&mut here, &mut there) } else { (&mut there, &mut here) };
        source.ok(&["exec", "demo", &format!("echo {round} > r")]);
        let (_, point) = &points[random.index(points.len())];
        let fault = format!("{point}:{}={}", 1 + random.below(2), ["eio", "enospc", "kill"][random.index(3)]);
        let of_source = random.below(2) == 0;
        arm(if of_source { source } else { target }, &fault);
        let output = teleport(source, "demo", target, &[]);
        failed += usize::from(!output.status.success());
        // The source repeats its decision at once after a restart.
        for host in [&mut here, &mut there] {
            arm(host, "");
        }
        let what = format!("round {round}, {fault} of the {}", if of_source { "source" } else { "target" });
        let (live, other) = one_is_left(&here, &there, &what);
        assert_eq!(live.ok(&["exec", "demo", &format!("{VIEW} $(cat r)")]), format!("2 two deep {round}\n"), "{what}");
        assert!(!output.status.success() || std::ptr::eq(live, if at_here { &there } else { &here }), "{what}");
        until(&format!("{what}: nothing is left"), || left_over(other).is_empty());
        at_here = std::ptr::eq(live, &here);
    }
    assert!(failed > 0 || !seed.is_fixed, "no fault was met");
    for host in [&here, &there] {
        host.ok(&["verify"]);
    }
}

/// What a step did, and what the kernel holds after it.
type Outcome = (&'static str, bool, String);

/// Two hosts and one kernel, whose variable and file hold the number of the last execution.
struct Chaos {
    hosts: [Host; 2],
    at: usize,
    random: Random,
    number: u64,
    content: String,
    checkpoints: Vec<(String, String)>,
}

/// Steps whose failure a client sees or not.
const CHAOS: [&str; 12] = [
    "catalog.handover.put.before_commit",
    "catalog.handover.activate.before_commit",
    "catalog.kernel.update.before_commit",
    "engine.state.apply.before_commit",
    "engine.state.replace.before_commit",
    "handover.data.sync",
    "kernel.worker.resume",
    "kernel.worker.suspend",
    "state.checkpoints.add.before_commit",
    "state.transition.begin.before_commit",
    "store.pack.write",
    "workspace.place.rename",
];

impl Chaos {
    fn new(seed: &Seed) -> Chaos {
        let hosts = pair(User::Own);
        hosts.0.ok(&["new", "demo"]);
        hosts.0.ok(&["exec", "demo", "x=0; echo 0 > f"]);
        let (checkpoints, content) = (Vec::new(), "0 0".to_owned());
        Chaos { hosts: hosts.into(), at: 0, random: seed.random(), number: 0, content, checkpoints }
    }

    /// One operation; returns its name, whether it succeeded, and the contents that it may have led to.
    fn operate(&mut self) -> (&'static str, bool, Vec<String>) {
        let (chosen, host) = (self.random.below(6), &self.hosts[self.at]);
        let before = self.content.clone();
        match chosen {
            0 => {
                let taken = host.cli(&["checkpoint", "demo", "--json"]);
                if taken.status.success() {
                    let taken: Value = serde_json::from_slice(&taken.stdout).expect("JSON");
                    self.checkpoints.push((taken["id"].as_str().expect("an id").to_owned(), before.clone()));
                    return ("checkpoint", true, vec![before]);
                }
                ("checkpoint", false, vec![before])
            }
            1 if !self.checkpoints.is_empty() => {
                let (id, content) = self.checkpoints[self.random.index(self.checkpoints.len())].clone();
                let restored = host.cli(&["restore", "demo", &id, "--yes"]).status.success();
                ("restore", restored, if restored { vec![content] } else { vec![before, content] })
            }
            2 => {
                let suspended = host.cli(&["suspend", "demo"]).status.success();
                ("suspend", suspended && host.cli(&["resume", "demo"]).status.success(), vec![before])
            }
            3 | 4 => {
                let went = teleport(host, "demo", &self.hosts[1 - self.at], &[]).status.success();
                ("teleport", went, vec![before])
            }
            _ => {
                self.number += 1;
                let (number, old) = (self.number, before.split(' ').next_back().unwrap_or_default());
                let done = host.cli(&["exec", "demo", &format!("x={number}; echo {number} > f")]).status.success();
                let (after, half) = (format!("{number} {number}"), format!("{old} {number}"));
                ("exec", done, if done { vec![after] } else { vec![before, after, half] })
            }
        }
    }

    fn step(&mut self, with_faults: bool) -> Outcome {
        let armed = with_faults && self.random.below(2) == 0;
        let mut fault = String::from("no fault");
        if armed {
            let label = CHAOS[self.random.index(CHAOS.len())];
            fault = format!("{label}={}", ["eio", "enospc", "kill"][self.random.index(3)]);
            let victim = self.random.index(2);
            arm(&mut self.hosts[victim], &fault);
        }
        let (what, done, possible) = self.operate();
        if armed {
            for host in &mut self.hosts {
                arm(host, "");
            }
        }
        let told = format!("{what} with {fault}");
        let (live, _) = one_is_left(&self.hosts[0], &self.hosts[1], &told);
        let now = live.ok(&["exec", "demo", "echo $x $(cat f)"]).trim().to_owned();
        assert!(possible.contains(&now), "{told}: {now:?} is none of {possible:?}\n{}", live.log());
        self.at = usize::from(std::ptr::eq(live, &self.hosts[1]));
        self.content = now.clone();
        if now.split(' ').next() != now.split(' ').next_back() {
            let number = self.number;
            self.hosts[self.at].ok(&["exec", "demo", &format!("x={number}; echo {number} > f")]);
            self.content = format!("{number} {number}");
        }
        (what, done, now)
    }

    fn run(seed: &Seed, steps: usize, with_faults: bool) -> Vec<Outcome> {
        let mut chaos = Chaos::new(seed);
        let mut outcomes: Vec<Outcome> = (0..steps).map(|_| chaos.step(with_faults)).collect();
        for host in &chaos.hosts {
            host.ok(&["verify"]);
            until("nothing is left", || left_over(host).is_empty());
        }
        // Each checkpoint is whole, wherever the kernel is now.
        let host = &chaos.hosts[chaos.at];
        for (id, content) in &chaos.checkpoints {
            host.ok(&["restore", "demo", id, "--yes"]);
            let view = host.ok(&["exec", "demo", "echo $x $(cat f)"]);
            assert_eq!(view.trim(), content);
        }
        let log = host.ok(&["log", "demo", "--json"]);
        outcomes.push(("log", true, log.lines().count().to_string()));
        outcomes
    }
}

#[test]
fn snapshot_types_determinism() {
    let seed = Seed::of("snapshot_types_determinism", 2);
    let first = Chaos::run(&seed, 14, false);
    assert_eq!(first, Chaos::run(&seed, 14, false), "the same seed");
    assert!(first.iter().all(|(_, done, _)| *done), "{first:?}");
    if !seed.is_fixed {
        return;
    }
    for what in ["checkpoint", "restore", "suspend", "teleport", "exec"] {
        assert!(first.iter().any(|(done, _, _)| *done == what), "{what} is missing: {first:?}");
    }
}

#[test]
fn snapshot_types_chaos() {
    for fixed in [1, 4] {
        let seed = Seed::of("snapshot_types_chaos", fixed);
        let outcomes = Chaos::run(&seed, 18, true);
        let has_met = outcomes.iter().any(|(_, done, _)| !done);
        assert!(has_met || !seed.is_fixed, "no fault was met: {outcomes:?}");
        if !seed.is_fixed {
            break;
        }
    }
    // The list of faults names real ones.
    for point in CHAOS {
        assert!(fault::points().any(|(_, known)| known == point), "{point}");
    }
}
