//! A wire that fails once, at each message of either direction: one live copy remains, and the second try carries all.

use std::path::PathBuf;
use std::process::Stdio;

use super::crash_safety::one_is_left;
use super::*;
use crate::support::until;

/// A frame, with its direction.
type Frame = (&'static str, &'static str);

/// Frames while the kernel runs.
const COPYING: [Frame; 12] = [
    ("there", "hello"),
    ("back", "hello"),
    ("there", "offer"),
    ("back", "accept"),
    ("there", "question"),
    ("back", "answer"),
    ("there", "chunks"),
    ("there", "object"),
    ("there", "chunk"),
    ("there", "piece"),
    ("there", "flush"),
    ("back", "flushed"),
];

/// Frames from the first written files to the end.
const DECIDING: [Frame; 7] = [
    ("there", "preview"),
    ("there", "previewState"),
    ("back", "previewed"),
    ("there", "seal"),
    ("back", "prepared"),
    ("there", "commit"),
    ("back", "live"),
];

/// Frames that a source waits for, or that a target never gets.
const STALLED: [Frame; 6] = [
    ("there", "hello"),
    ("back", "accept"),
    ("there", "object"),
    ("back", "previewed"),
    ("there", "seal"),
    ("back", "prepared"),
];

/// The transport to a host by a wire that fails once, and the file that exists from then on.
pub(crate) fn faulty(target: &Host, (side, frame): Frame, fault: &str) -> (String, PathBuf) {
    let (script, told) = (target.path("wire_faults.py"), target.path("told"));
    std::fs::write(&script, include_str!("wire_faults.py")).expect("written");
    let _ = std::fs::remove_file(&told);
    let command = to(target);
    let command = command.strip_prefix("exec:").expect("a command");
    let (script, shown) = (script.display(), told.display());
    (format!("exec:exec /usr/bin/python3 {script} {side} {frame} {fault} {shown} \"{command}\""), told)
}

/// Two hosts whose held kernels do not wait long for a wire without progress.
fn impatient_pair() -> (Host, Host) {
    let host = || {
        let mut host = Host::prepare(User::Own);
        host.configure("[teleport]\nstall_timeout = \"2s\"\n");
        host.launch();
        host
    };
    (host(), host())
}

/// Moves a kernel to and fro over a wire with the fault at each of the frames.
fn survives(fault: &str, frames: &[Frame], try_move: impl Fn(&Host, &str, &PathBuf)) {
    let (here, there) = impatient_pair();
    set_up(&here, "demo");
    let mut at_here = true;
    for (round, frame) in frames.iter().enumerate() {
        let what = format!("{fault} at {frame:?}");
        let (source, target) = if at_here { (&here, &there) } else { (&there, &here) };
        // Something that the target lacks, of one chunk and of several.
        let large = "dd if=/dev/urandom of=large bs=1M count=2 2>/dev/null";
        source.ok(&["exec", "demo", &format!("/bin/sh -c '{large}'; echo {round} > r")]);
        let (way, told) = faulty(target, *frame, fault);
        try_move(source, &way, &told);
        assert!(told.exists(), "{what}: it was not sent\n{}", source.log());
        let (live, _) = one_is_left(&here, &there, &what);
        let see = format!("{VIEW} $(cat r)");
        assert_eq!(live.ok(&["exec", "demo", &see]), format!("2 two deep {round}\n"), "{what}");
        if std::ptr::eq(live, source) {
            live.ok(&["exec", "demo", "echo late > late"]);
            moved(source, "demo", target, &[]);
            let see = format!("{see} $(cat late)");
            assert_eq!(target.ok(&["exec", "demo", &see]), format!("2 two deep {round} late\n"), "{what}");
        }
        assert!(is_live(target, "demo") && !is_live(source, "demo"), "{what}");
        at_here = !at_here;
    }
    for host in [&here, &there] {
        host.ok(&["verify"]);
    }
}

fn once(source: &Host, way: &str, _: &PathBuf) {
    // Either end may be what it leads to: the caller looks.
    source.cli(&["teleport", "demo", "--to", way]);
}

#[test]
fn wire_cut_while_copying() {
    survives("cut", &COPYING, once);
}

#[test]
fn wire_cut_while_deciding() {
    survives("cut", &DECIDING, once);
}

#[test]
fn bytes_flipped_while_copying() {
    survives("flip", &COPYING, once);
}

#[test]
fn bytes_flipped_while_deciding() {
    survives("flip", &DECIDING, once);
}

/// A kernel that is held is freed by itself; one that runs waits until a client cancels its move.
#[test]
fn stalled_wires_are_left() {
    survives("stall", &STALLED, |source, way, told| {
        let mut command = source.command("ryokan");
        command.args(["--no-autostart", "teleport", "demo", "--to", way]);
        let mut moving = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        until("the wire stalls", || told.exists());
        source.cli(&["teleport", "demo", "--abort"]);
        assert!(!moving.wait().expect("a status").success(), "{way}");
    });
}
