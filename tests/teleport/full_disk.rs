//! Moves to and from a host whose disk is really full.

use std::path::Path;
use std::process::{Command, Stdio};

use super::*;
use crate::faults::full_disk::SmallDisk;
use crate::support::until;

/// A program between source and target that holds the link at a moment: after that many bytes, or before the seal. It
/// tells so by the file `held`, and goes on once there is `go`.
const HOLD: &str = "
import os, sys, time
at, folder, seen, held = sys.argv[1], sys.argv[2], 0, False
with open(1, 'wb') as to:
    while piece := os.read(0, 65536):
        seen += len(piece)
        if not held and (b'\"message\":\"seal\"' in piece if at == 'seal' else seen >= int(at)):
            held = True
            open(folder + '/held', 'w').close()
            while not os.path.exists(folder + '/go'):
                time.sleep(0.02)
        to.write(piece)
        to.flush()
";

fn held_move(source: &Host, target: &Host, at: &str, folder: &Path) -> Command {
    let script = folder.join("hold.py");
    std::fs::write(&script, HOLD).expect("written");
    let link = format!("exec:/usr/bin/python3 {} {at} {} | ", script.display(), folder.display());
    let mut command = source.command("ryokan");
    command.args(["--no-autostart", "teleport", "demo", "--to", &to(target).replacen("exec:exec ", &link, 1)]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Takes all of the disk, the reserve included.
fn fill(host: &Host, disk: &SmallDisk) {
    disk.fill();
    let _ = std::fs::remove_file(host.data().join("reserve"));
    disk.fill();
}

#[test]
fn full_target_gets_nothing() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("ignored, because only root can mount a small disk");
        return;
    }
    let here = Host::start();
    let mut there = Host::prepare(User::Own);
    let disk = SmallDisk::of(&there, User::Own);
    there.launch();
    here.ok(&["new", "demo", "--engine", "python"]);
    // The generator is in no checkpoint: it lives only while the worker does.
    here.ok(&["exec", "demo", "import os; _ = open('large', 'wb').write(os.urandom(5 << 20)); g = iter(range(9))"]);
    let stayed = |count: u32, what: &str| {
        until(&format!("{what}: the abort arrives"), || undecided(&here).is_empty() && undecided(&there).is_empty());
        assert!(is_live(&here, "demo") && state(&there, "demo").is_none(), "{what}");
        assert_eq!(here.ok(&["exec", "demo", "print(next(g))"]), format!("{count}\n"), "{what}: the worker continues");
        until(&format!("{what}: nothing is left"), || left_over(&there).is_empty());
    };
    fill(&there, &disk);
    let refused = teleport(&here, "demo", &there, &[]);
    assert!(!refused.status.success(), "{refused:?}");
    stayed(0, "full before the offer");
    disk.free();
    // Within the copy, and when everything has arrived.
    for (count, at) in [(1, "1000000"), (2, "seal")] {
        let folder = tempfile::tempdir().expect("a folder");
        let running = held_move(&here, &there, at, folder.path()).spawn().expect("it runs");
        until("the link is held", || folder.path().join("held").exists());
        fill(&there, &disk);
        std::fs::write(folder.path().join("go"), "").expect("written");
        let failed = running.wait_with_output().expect("it ends");
        assert!(!failed.status.success(), "full at {at}: {failed:?}");
        stayed(count, &format!("full at {at}"));
        disk.free();
    }
    moved(&here, "demo", &there, &[]);
    assert_eq!(there.ok(&["exec", "demo", "print(os.path.getsize('large'))"]), "5242880\n");
    // A source that is full keeps the kernel, or moves it whole.
    there.ok(&["exec", "demo", "x = 'kept'"]);
    fill(&there, &disk);
    let moved_back = teleport(&there, "demo", &here, &[]).status.success();
    let (live, _) = one_is_left(&here, &there, "full at the source");
    assert_eq!(std::ptr::eq(live, &here), moved_back);
    disk.free();
    if !moved_back {
        moved(&there, "demo", &here, &[]);
    }
    assert_eq!(here.ok(&["exec", "demo", "print(x, os.path.getsize('large'))"]), "kept 5242880\n");
}
