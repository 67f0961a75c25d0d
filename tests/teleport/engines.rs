//! Kernels of all engines, which move while a process in them writes and a step fails; and a suspended one.

use super::failures::with_fault;
use super::*;
use crate::support::until;

/// An engine, code that sets its state, and code that shows it.
const ENGINES: [(&str, &str, &str); 4] = [
    ("kaish", "x=7; echo one > f", "echo \"f$x\"; cat f"),
    (
        "python",
        "x = 7\ndef f(): return f'f{x}'\nwith open('f', 'w') as file: print('one', file=file)",
        "print(f()); print(open('f').read(), end='')",
    ),
    ("bash", "x=7; f() { echo f$x; }; echo one > f", "f; cat f"),
    (
        "node",
        "let x = 7; function f() { return 'f' + x } require('fs').writeFileSync('f', 'one\\n')",
        "console.log(f() + '\\n' + require('fs').readFileSync('f', 'utf8').trim())",
    ),
];
const SHOWN: &str = "f7\none\n";

/// Writes a file anew, with ascending numbers.
const TICKS: &str = "i=0; while :; do i=$((i+1)); echo $i > next; mv next ticks; done";

/// Failures of the target and of the source, before and in the pause.
const FAULTS: [(bool, &str); 4] = [
    (false, "state.history.import.before_commit=eio"),
    (false, "catalog.handover.put.after_commit=kill"),
    (true, "state.transition.begin.before_commit=eio"),
    (true, "state.transition.commit.before_commit=kill"),
];

/// The number that the process in the kernel wrote last.
fn ticks(host: &Host, name: &str) -> u64 {
    let shown = host.ok(&["spawn", name, "--", "cat", "ticks"]);
    shown.trim().parse().unwrap_or_else(|_| panic!("half a file: {shown:?}"))
}

/// Starts the process, which ends with its daemon.
fn writes(host: &Host, name: &str) {
    host.ok(&["spawn", name, "-d", "--", "sh", "-c", TICKS]);
    until("it writes", || host.cli(&["spawn", name, "--", "cat", "ticks"]).status.success());
}

#[test]
fn writing_kernels_survive_failures() {
    let (mut here, mut there) = pair(User::Own);
    for (name, set, view) in ENGINES {
        here.ok(&["new", name, "--engine", name]);
        here.ok(&["exec", name, set]);
        for (of_source, fault) in FAULTS {
            let what = format!("{name}, {fault}");
            with_fault(if of_source { &mut here } else { &mut there }, fault);
            writes(&here, name);
            assert!(!teleport(&here, name, &there, &["--allow-missing=processes"]).status.success(), "{what}");
            if fault.ends_with("kill") {
                let victim = if of_source { &mut here } else { &mut there };
                assert!(victim.ends(), "{what}");
                victim.env(ryokan::sys::fault::VARIABLE, "");
                victim.restart();
                if of_source {
                    writes(&here, name);
                }
            }
            until(&format!("{what}: the abort arrives"), || {
                undecided(&here).is_empty() && undecided(&there).is_empty()
            });
            assert_eq!((is_live(&here, name), is_live(&there, name)), (true, false), "{what}");
            let before = ticks(&here, name);
            until(&format!("{what}: it writes on"), || ticks(&here, name) != before);
            assert_eq!(here.ok(&["exec", name, view]), SHOWN, "{what}");
        }
        // The target dies once more, after the decision.
        let before = ticks(&here, name);
        with_fault(&mut there, "catalog.handover.activate.before_commit=kill");
        moved(&here, name, &there, &["--allow-missing=processes"]);
        assert!(there.ends(), "{name}");
        there.env(ryokan::sys::fault::VARIABLE, "");
        there.restart();
        until(&format!("{name}: the commit arrives"), || undecided(&here).is_empty() && is_live(&there, name));
        assert_eq!(there.ok(&["exec", name, view]), SHOWN, "{name}");
        assert!(ticks(&there, name) >= before, "{name}: what was written before the pause is there");
    }
    there.ok(&["verify"]);
}

/// The source is killed between its decision and the end of the worker: nothing of the kernel runs on there.
#[test]
fn departed_code_stands_still() {
    let (mut here, mut there) = pair(User::Own);
    here.ok(&["new", "demo", "--engine", "bash"]);
    let written = workspace(&here, "demo").join("ticks");
    here.ok(&["exec", "demo", &format!("( {TICKS} ) &")]);
    until("it writes", || written.exists());
    with_fault(&mut here, "state.transition.commit.after_commit=kill");
    assert!(!teleport(&here, "demo", &there, &["--allow-missing=processes"]).status.success() && here.ends());
    let last = std::fs::read_to_string(&written).expect("written");
    for _ in 0..100 {
        std::thread::sleep(std::time::Duration::from_millis(10));
        assert_eq!(std::fs::read_to_string(&written).expect("written"), last);
    }
    here.env(ryokan::sys::fault::VARIABLE, "");
    here.restart();
    until("the commit arrives", || undecided(&here).is_empty() && is_live(&there, "demo"));
    assert!(ticks(&there, "demo") <= last.trim().parse().expect("a number"));
    // A start has nothing to decide about a kernel that arrived long ago.
    with_fault(&mut there, "handover.data.sync=eio");
    assert_eq!(there.ok(&["exec", "demo", "echo here"]), "here\n");
}

/// A move is a use of the kernel: after a failed one it goes on here.
#[test]
fn suspended_kernel_moves() {
    let (here, mut there) = pair(User::Own);
    set_up(&here, "demo");
    here.ok(&["suspend", "demo"]);
    with_fault(&mut there, "state.history.import.before_commit=eio");
    assert!(!teleport(&here, "demo", &there, &[]).status.success());
    until("the abort arrives", || undecided(&here).is_empty());
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
    here.ok(&["suspend", "demo"]);
    moved(&here, "demo", &there, &[]);
    assert_eq!((is_live(&here, "demo"), is_live(&there, "demo")), (false, true));
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}
