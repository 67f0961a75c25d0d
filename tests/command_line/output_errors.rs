//! Failed writes of output are errors of the command line and do not end a durable kernel.

use std::fs::File;
use std::process::Stdio;

use crate::support::{Host, User};

#[test]
fn write_error_keeps_execution() {
    let host = Host::start_as(User::Own);
    host.ok(&["new", "stays", "--engine", "bash"]);
    for args in [&["exec", "stays", "for n in 1 2 3; do echo $n; sleep 0.1; done; done=1"][..], &["run", "echo x"]] {
        let full = File::options().write(true).open("/dev/full").expect("a device that is full");
        let mut command = host.command("ryokan");
        let output = command.args(args).stdout(full).stderr(Stdio::piped()).output().expect("runs");
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(said.contains("could not write the output: No space left on device"), "{args:?}: {said}");
        assert_eq!(output.status.code(), Some(125), "{args:?}: {said}");
        // Where the execution continues, the message names the way to attach.
        assert_eq!(said.contains("ryokan exec stays --attach 1"), args[0] == "exec", "{said}");
    }
    assert_eq!(host.ok(&["exec", "stays", "echo $done"]), "1\n", "the execution ran to its end");
}

#[test]
fn ephemeral_worker_crash_message() {
    let host = Host::start_as(User::Own);
    let output = host.cli(&["run", "--engine", "python", "import os; os.kill(os.getpid(), 9)"]);
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.contains("the worker exited during execution 1") && !said.contains("continues"), "{said}");
}

#[test]
fn shell_exit_reports_lost_state() {
    let host = Host::start_as(User::Own);
    host.ok(&["new", "k", "--engine", "bash"]);
    host.ok(&["exec", "k", "x=1"]);
    let output = host.cli(&["exec", "k", "x=2; kill -9 $$"]);
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.contains("the shell ended: this execution's changes to the shell are lost"), "{said}");
    assert_eq!(host.ok(&["exec", "k", "echo $x"]), "1\n");
}

#[test]
fn ephemeral_run_reports_ended_jobs() {
    let host = Host::start_as(User::Own);
    for (engine, code, what) in [
        ("bash", "sleep 30 & sleep 31 & echo well", "sleep 30 and 1 more"),
        ("kaish", "sleep 30 &\necho well", "sleep 30"),
        ("node", "setTimeout(() => {}, 30000); console.log('well')", "1 timer"),
        (
            "python",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(30,)).start()\nprint('well')",
            "Thread",
        ),
    ] {
        let output = host.cli(&["run", "--engine", engine, code]);
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(String::from_utf8_lossy(&output.stdout).contains("well"), "{engine}");
        let warned =
            said.lines().any(|line| line.contains("background jobs end with the kernel: ") && line.contains(what));
        assert!(output.status.success() && warned, "{engine}: {said}");
        let alone = host.cli(&["run", "--engine", engine, "1"]);
        let said = String::from_utf8_lossy(&alone.stderr);
        assert!(!said.contains("background jobs end"), "{engine}: {said}");
    }
}

#[test]
fn kaish_parse_error_names_bash() {
    let host = Host::start_as(User::Own);
    for (code, hinted) in [("[ a = b ]", true), ("(cd /tmp)", true), ("echo \"open", true), ("cat absent", false)] {
        let output = host.cli(&["run", code]);
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(!output.status.success() && said.contains("--engine bash") == hinted, "{code}: {said}");
    }
}
