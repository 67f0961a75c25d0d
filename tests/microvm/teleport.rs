//! Kernels in virtual machines move to another host, and into another isolation.

use super::Machines;
use crate::support::{Host, User, until, users};
use crate::teleport::{moved, show, state, teleport};

const SEE: &str = "print(x, open('f').read())";

#[test]
fn machine_moves_and_returns() {
    for user in users() {
        let (here, there) = (Machines::start(user), Machines::start(user));
        here.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
        here.run("lab", "x = 41; open('f', 'w').write('kept')");
        here.ok(&["checkpoint", "lab", "-m", "before"]);
        here.run("lab", "x += 1");
        let report = moved(&here, "lab", &there, &[]);
        assert_eq!(report["kind"], "checkpoint", "{report}");
        until("the machine's end", || here.machines().is_empty());
        assert_eq!(state(&here, "lab").as_deref(), Some("departed"));
        assert_eq!(there.run("lab", SEE), "42 kept", "{user:?}\n{}", there.log());
        assert_eq!(there.machines().len(), 1, "{user:?}: it is a machine there");
        assert!(there.ok(&["log", "lab"]).contains("before"), "{user:?}: with its checkpoints");
        there.run("lab", "x += 1");
        moved(&there, "lab", &here, &[]);
        until("the machine's end", || there.machines().is_empty());
        assert_eq!(here.run("lab", SEE), "43 kept", "{user:?}\n{}", here.log());
        here.ok(&["restore", "lab", "before", "--yes"]);
        assert_eq!(here.run("lab", SEE), "41 kept", "{user:?}\n{}", here.log());
    }
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
    moved(&here, "lab", &there, &["--isolation", "process"]);
    assert_eq!(there.ok(&["exec", "lab", SEE]).trim(), "41 kept", "{}", there.log());
    assert_eq!(show(&there, "lab")["isolation"], "process");
    there.ok(&["exec", "lab", "x += 1"]);
    moved(&there, "lab", &here, &["--isolation", "microvm"]);
    assert_eq!(here.run("lab", SEE), "42 kept", "{}", here.log());
    assert_eq!(here.machines().len(), 1);
}
