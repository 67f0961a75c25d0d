//! Kernels that arrive at a system-wide daemon: each belongs to the user of the far end.

use super::*;
use crate::daemon::system_wide::SystemWide;
use crate::support::UNPRIVILEGED;

/// A program between source and target that ends after so many bytes.
const CUT: &str = "import os, sys
left = int(sys.argv[1])
while left > 0 and (piece := os.read(0, min(left, 65536))):
    os.write(1, piece)
    left -= len(piece)
";

/// The transport to the account of a user.
fn to_user(system: &SystemWide, uid: u32) -> String {
    let command = system.cli_command(uid, &["pipe"]);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<&str> = words.map(|word| word.to_str().expect("text")).collect();
    format!("exec:exec env -i HOME=/ PATH=/usr/bin:/bin {}", words.join(" "))
}

#[test]
fn arrivals_belong_to_their_user() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("ignored, because only root starts a system-wide daemon");
    }
    let (here, system) = (Host::start(), SystemWide::start(crate::support::NO_POOL));
    let (one, other) = (UNPRIVILEGED, UNPRIVILEGED + 1);
    here.ok(&["new", "k"]);
    here.ok(&["exec", "k", "/bin/sh -c 'dd if=/dev/urandom of=large bs=1M count=4 2>/dev/null'; x=1"]);
    here.ok(&["fork", "k", "c", "--count", "2"]);
    // What a cut move brought is not sent again to the same user, and is nothing that another one may refer to.
    let script = here.path("cut.py");
    std::fs::write(&script, CUT).expect("written");
    let command = to_user(&system, one);
    let command = command.strip_prefix("exec:exec ").expect("a command");
    here.ok(&["new", "cut"]);
    for n in 0..4 {
        here.ok(&["exec", "cut", &format!("/bin/sh -c 'dd if=/dev/urandom of=f{n} bs=256K count=1 2>/dev/null'")]);
    }
    let way = format!("exec:/usr/bin/python3 {} 700000 | {command}", script.display());
    assert!(!here.cli(&["teleport", "cut", "--to", &way]).status.success());
    let moved = |name: &str, uid: u32| -> u64 {
        let output = here.cli(&["--json", "teleport", name, "--to", &to_user(&system, uid)]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {said}\n{}\n{}", here.log(), system.log());
        let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
        report["sent_bytes"].as_u64().expect("a number")
    };
    let again = moved("cut", one);
    assert!(again < 700 << 10, "{again} bytes are sent again");
    assert!(system.cli(one, &["rm", "--yes", "cut"]).status.success());
    assert!(moved("c-1", one) > 4 << 20);
    // What another user has is sent all the same; what the user has is not.
    assert!(moved("c-2", other) > 4 << 20, "an address led to another user's objects");
    assert!(moved("k", one) < 1 << 20, "what the user's other kernel has was sent again");
    let names = |uid: u32| String::from_utf8(system.cli(uid, &["ls", "-q"]).stdout).expect("text");
    assert_eq!((names(one).as_str(), names(other).as_str()), ("c-1\nk\n", "c-2\n"));
    for (uid, name) in [(one, "c-1"), (other, "c-2"), (one, "k")] {
        let seen = system.cli(uid, &["exec", name, "/bin/sh -c 'stat -c %s large'; echo $x"]);
        assert_eq!(String::from_utf8_lossy(&seen.stdout), "4194304\n1\n", "{name}: {seen:?}\n{}", system.log());
        assert!(!system.cli(one + other - uid, &["show", name]).status.success(), "{name} is another user's");
    }
    for (uid, own) in [(one, ["c-1", "k"].as_slice()), (other, &["c-2"])] {
        let listed: Value =
            serde_json::from_slice(&system.cli(uid, &["--json", "teleport", "--status"]).stdout).unwrap();
        let listed = listed.as_array().unwrap();
        let names: Vec<&str> =
            listed.iter().map(|one| one["name"].as_str().unwrap()).filter(|name| *name != "cut").collect();
        assert_eq!(names.len(), own.len(), "{names:?}");
        assert!(own.iter().all(|name| names.contains(name)), "{names:?}");
        let foreign = system.cli(
            one + other - uid,
            &["--yes", "teleport", "--resolve", listed[0]["id"].as_str().unwrap(), "--discard"],
        );
        assert_eq!(foreign.status.code(), Some(3), "{foreign:?}");
    }
    // The transport's command would run as root.
    let refused = system.cli(one, &["--json", "teleport", "k", "--to", "exec:false"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(4) && said.contains("\"transport\""), "{said}");
    assert!(said.contains("ryokan export"), "no other user may move it either: {said}");
    for (uid, name) in [(one, "c-1"), (other, "c-2"), (one, "k")] {
        assert!(system.cli(uid, &["rm", "--yes", name]).status.success());
    }
}
