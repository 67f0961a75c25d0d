//! Detached processes that a command line joins and leaves.

use std::process::Stdio;

use super::{count, each_user};
use crate::support::{Host, Terminal, until};

fn detached(host: &Host, kernel: &str, args: &[&str]) -> String {
    host.ok(&[&["spawn", kernel, "-d"][..], args].concat()).trim().to_owned()
}

/// A terminal that is joined, left and joined again.
pub(crate) fn joined_terminal(host: &Host, kernel: &str) {
    let exec = detached(host, kernel, &["-t", "--", "bash", "--norc"]);
    assert!(host.ok(&["ps", kernel, "--json"]).contains("\"terminal\": true"));
    let mut first = Terminal::start(host, &["exec", kernel, "--attach", &exec]);
    first.enter("$ ", "x=5; stty size");
    first.wait_for("50 200");
    first.wait_for("$ ");
    // The first of the keys alone goes to the shell: its last command.
    first.press("\x10");
    first.press("\r");
    first.wait_for("50 200");
    first.press("\x10\x11");
    first.wait_for_raw(&format!("process {exec} continues"));
    first.ended_with(0);
    let mut second = Terminal::start(host, &["exec", kernel, "--attach", &exec]);
    second.enter("$ ", "echo x=$x; exit 3");
    second.wait_for("x=5\r");
    second.ended_with(3);
    assert!(host.ok(&["ps", kernel]).contains("no processes"));
}

#[test]
fn detached_terminal_is_joined() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        joined_terminal(&host, "k");
    });
}

#[test]
fn attached_process_survives_interrupt() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        let exec = detached(&host, "k", &["--", "sh", "-c", "yes up | head -c 500000; sleep 7777"]);
        let mut attached = Terminal::start(&host, &["exec", "k", "--attach", &exec]);
        attached.wait_for("up");
        attached.press("\x03");
        attached.wait_for(&format!("end it: ryokan kill k {exec}"));
        attached.ended_with(130);
        // A reader that exits leaves it running, too.
        let mut reading = host.command("ryokan");
        reading.args(["--no-autostart", "exec", "k", "--attach", &exec]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut reading = reading.spawn().expect("it runs");
        drop(reading.stdout.take());
        let ended = reading.wait_with_output().expect("it ends");
        assert_eq!(ended.status.code(), Some(141), "{ended:?}");
        until("it runs", || count("sleep 7777") == 1);
        host.ok(&["kill", "k", &exec]);
        until("it has ended", || count("sleep 7777") == 0);
    });
}

#[test]
fn kept_output_has_both_ends() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    let exec = detached(&host, "k", &["--output-limit", "10", "--", "printf", "0123456789beyond"]);
    until("it has ended", || host.ok(&["ps", "k", "--quiet"]).is_empty());
    let attached = host.cli(&["exec", "k", "--attach", &exec]);
    assert_eq!(attached.stdout, b"0123456789nd", "{attached:?}");
    assert!(String::from_utf8_lossy(&attached.stderr).starts_with("\nnote: 4 bytes of output were"), "{attached:?}");
    let refused = host.cli(&["spawn", "k", "--output-limit", "49M", "--", "true"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("at most 48 MiB are kept"), "{refused:?}");
}
