//! The time in which a moving kernel is held, what is sent before it, and room for what arrives.

use std::time::{Duration, Instant};

use ryokan::core::limits;
use ryokan::sys::fault;

use super::seed::{by_link, stayed};
use super::*;
use crate::support::until;

/// A host whose held kernels wait for five seconds for a connection without progress.
fn impatient() -> Host {
    let mut host = Host::prepare(User::Own);
    host.configure("[teleport]\nstall_timeout = \"5s\"\n");
    host.launch();
    host
}

/// A kernel with a file, a variable, and a generator that only its worker has.
fn generator(host: &Host) {
    host.ok(&["new", "demo", "--engine", "python"]);
    host.ok(&["exec", "demo", "open('f', 'w').write('one'); x = 1; g = iter(range(99)); r = next(g)"]);
}

const SEE: &str = "print(next(g), x, open('f').read())";

#[test]
fn stalled_connection_frees_kernel() {
    let (mut here, there) = (impatient(), Host::start());
    generator(&here);
    let begun = Instant::now();
    let stalled = here.cli(&["teleport", "demo", "--to", &by_link(&there, "stall", 1)]);
    let (took, said) = (begun.elapsed(), String::from_utf8_lossy(&stalled.stderr).into_owned());
    assert!(!stalled.status.success() && said.contains("no answer in time"), "{said}");
    assert!(took < limits::HANDOVER_FRAME, "the kernel was held for {took:?}");
    stayed(&here, &there, "a stalled connection");
    assert_eq!(here.ok(&["exec", "demo", SEE]), "1 1 one\n", "the same worker continues");
    here.ok(&["exec", "demo", "x = 2; open('f', 'w').write('two')"]);
    // A slow host may need longer for a step.
    here.kill();
    here.configure("");
    here.launch();
    moved(&here, "demo", &there, &[]);
    assert_eq!(there.ok(&["exec", "demo", "print(x, open('f').read())"]), "2 two\n");
}

/// A target that reports is not stalled, however long it works.
#[test]
fn slow_target_is_awaited() {
    let (here, mut there) = (impatient(), Host::prepare(User::Own));
    let hold = there.path("hold");
    std::fs::write(&hold, "").expect("written");
    there.env(fault::HOLD, hold.to_str().expect("a path"));
    there.env(fault::VARIABLE, "handover.data.sync=hold");
    there.launch();
    generator(&here);
    let report = std::thread::scope(|scope| {
        let moving = scope.spawn(|| moved(&here, "demo", &there, &[]));
        until("the move begins", || !handovers(&here).is_empty());
        // Several times the time that a stalled one has.
        std::thread::sleep(Duration::from_secs(15));
        std::fs::remove_file(&hold).expect("removed");
        moving.join().expect("it moves")
    });
    assert!(report["pause_ms"].as_u64() > Some(5_000), "the target was not slow: {report}");
    assert_eq!(there.ok(&["exec", "demo", "print(x, open('f').read())"]), "1 one\n");
}

/// A target that reports without end holds the kernel no longer than the limit.
#[test]
fn long_pause_ends_move() {
    let (mut here, mut there) = (Host::prepare(User::Own), Host::prepare(User::Own));
    here.configure("[teleport]\npause_limit = \"2s\"\n");
    here.launch();
    let hold = there.path("hold");
    std::fs::write(&hold, "").expect("written");
    there.env(fault::HOLD, hold.to_str().expect("a path"));
    there.env(fault::VARIABLE, "handover.data.sync=hold");
    there.launch();
    generator(&here);
    let ended = teleport(&here, "demo", &there, &[]);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && said.contains("held for 2s"), "{said}");
    assert_eq!(here.ok(&["exec", "demo", SEE]), "1 1 one\n", "the same worker continues");
    std::fs::remove_file(&hold).expect("removed");
    stayed(&here, &there, "a long pause");
}

/// The number after a word in the last log line of that text.
fn logged(host: &Host, text: &str, word: &str) -> u64 {
    let log = host.log();
    let line = log.lines().rev().find(|line| line.contains(text)).unwrap_or_else(|| panic!("no {text} in {log}"));
    let line: String = line.chars().filter(|c| !c.is_control()).collect();
    let rest = line.split_once(&format!("{word}=")).unwrap_or_else(|| panic!("no {word} in {line}")).1;
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().expect("a number")
}

/// The log line of a completed move.
const MOVED: &str = "a kernel moved";

#[test]
fn writes_during_copy_precede_pause() {
    const MIB: usize = 1 << 20;
    let (here, there) = pair(User::Own);
    here.ok(&["new", "demo", "--engine", "python"]);
    let write =
        |name: &str, mib: usize| format!("import os; open('{name}', 'wb').write(os.urandom({} << 10))", mib << 10);
    here.ok(&["exec", "demo", &write("first", 8)]);
    let report = std::thread::scope(|scope| {
        let moving = scope.spawn(|| moved(&here, "demo", &there, &["--limit-rate", "1M"]));
        until("the first files are captured", || here.ok(&["log", "demo"]).contains("teleport"));
        here.ok(&["exec", "demo", &write("second", 5)]);
        moving.join().expect("it moves")
    });
    assert!(report["sent_bytes"].as_u64() >= Some(13 * MIB as u64), "{report}");
    assert_eq!(logged(&here, MOVED, "rounds"), 2);
    let rest = logged(&here, MOVED, "rest_bytes");
    assert!(rest < MIB as u64, "{rest} bytes were left to the pause");
    let sizes = "import os; print(*(os.path.getsize(name) for name in ('first', 'second')))";
    assert_eq!(there.ok(&["exec", "demo", sizes]), format!("{} {}\n", 8 * MIB, 5 * MIB));
}

/// Moves the kernel, and runs code in it between what is copied ahead and the pause; returns what the code writes.
/// The source's first sync follows the copy.
fn moved_after(source: &mut Host, target: &Host, code: &str) -> (Output, String) {
    let hold = source.path("hold");
    std::fs::write(&hold, "").expect("written");
    let reached = hold.with_extension("reached");
    let _ = std::fs::remove_file(&reached);
    source.env(fault::HOLD, hold.to_str().expect("a path"));
    arm(source, "handover.data.sync=hold");
    let source = &*source;
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| teleport(source, "demo", target, &[]));
        until("all is copied", || reached.exists());
        let said = source.ok(&["exec", "demo", code]);
        std::fs::remove_file(&hold).expect("removed");
        (moving.join().expect("it ends"), said)
    })
}

/// In the pause only the engine state that changed since the copy is written; the kernel has that of its source.
#[test]
fn late_state_changes_arrive() {
    const LATE: &str = "
n += 1; changed = os.urandom(40_000 + n)
del globals()[f'v{n - 1}']; globals()[f'v{n}'] = os.urandom(1_300_000)
print(n, sorted((k, zlib.crc32(v)) for k, v in globals().items() if type(v) is bytes))
";
    let all = &LATE[LATE.find("print").expect("the last line")..];
    let (mut here, mut there) = pair(User::Own);
    here.ok(&["new", "demo", "--engine", "python"]);
    here.ok(&["exec", "demo", "import os, zlib; kept = os.urandom(1_500_000); n, changed, v0 = 0, b'', b''"]);
    // The second pass is that in the pause. A kill after it leaves a database that is complete, and no kernel's.
    arm(&mut there, "engine.state.revise.after_commit:2=kill");
    let (failed, said) = moved_after(&mut here, &there, LATE);
    assert!(!failed.status.success() && there.ends(), "{failed:?}");
    arm(&mut there, "");
    arm(&mut here, "");
    one_is_left(&here, &there, "a killed target");
    assert_eq!((is_live(&here, "demo"), here.ok(&["exec", "demo", all])), (true, said));
    until("nothing is left", || left_over(&there).is_empty());
    // A failure in the pause: all of the state is written anew.
    arm(&mut there, "engine.state.revise.before_commit:2=eio");
    let (moved, said) = moved_after(&mut here, &there, LATE);
    assert!(moved.status.success(), "{moved:?}: {}", there.log());
    assert!(there.log().contains("engine state that was written ahead is not used"), "{}", there.log());
    assert_eq!(there.ok(&["exec", "demo", all]), said);
    let (moved, said) = moved_after(&mut there, &here, LATE);
    assert!(moved.status.success(), "{moved:?}: {}", here.log());
    assert_eq!(here.ok(&["exec", "demo", all]), said);
    let count = |word| logged(&here, "engine state is completed in the pause", word);
    assert_eq!((count("written"), count("removed")), (3, 1), "{}", here.log());
}

#[test]
fn offer_names_size_of_kernel() {
    let (here, there) = pair(User::Own);
    here.ok(&["new", "demo", "--engine", "python"]);
    here.ok(&["exec", "demo", "import os; open('large', 'wb').write(os.urandom(3 << 20))"]);
    let file = here.path("sent");
    let way = to(&there).replacen("exec:exec ", &format!("exec:tee {} | ", file.display()), 1);
    here.ok(&["teleport", "demo", "--to", &way]);
    let sent = String::from_utf8_lossy(&std::fs::read(&file).expect("written")).into_owned();
    let offer = sent.split("\"message\":\"offer\"").nth(1).expect("an offer");
    let digits = offer.split("\"bytes\":").nth(1).expect("a size").chars();
    let bytes: u64 = digits.take_while(char::is_ascii_digit).collect::<String>().parse().expect("a number");
    assert!((3 << 20..8 << 20).contains(&bytes), "{bytes} bytes are offered");
}
