//! The notice on a terminal while a command waits for a busy kernel.

use crate::support::{Host, Terminal, until};

const CTRL_C: &str = "\x03";

#[test]
fn terminal_shows_wait_reason() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut runs = Terminal::start(&host, &["exec", "k", "sleep 60; echo done"]);
    until("it runs", || host.ok(&["show", "k", "--json"]).contains("\"busy\""));
    let mut waits: Vec<Terminal> = [&["vars", "k"][..], &["exec", "k", "echo second"], &["stop", "k"]]
        .into_iter()
        .map(|args| Terminal::start(&host, args))
        .collect();
    for terminal in &mut waits {
        terminal.wait_for("waiting: kernel k is busy with execution 1; see it: ryokan exec k --attach 1");
    }
    // No notice about one's own execution, and none without a terminal.
    let quiet = host.command("ryokan").args(["vars", "k"]).stderr(std::process::Stdio::piped()).spawn().expect("runs");
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(runs.shown(), "");
    runs.press(CTRL_C);
    runs.wait_for("interrupting");
    let quiet = quiet.wait_with_output().expect("ended");
    assert_eq!((quiet.status.success(), String::from_utf8_lossy(&quiet.stderr).as_ref()), (true, ""));
}
