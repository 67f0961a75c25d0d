//! `ryokan top` on a real terminal, with a real daemon.
//!
//! Only changed cells are written, and a blank cell between two words is not one: so the tests wait
//! for single words.

use nix::sys::signal::{Signal, kill};
use nix::sys::termios::LocalFlags;
use nix::unistd::Pid;

use crate::support::{Host, Terminal, until};

/// Leaves the alternate screen.
const LEFT: &str = "\x1b[?1049l";

/// The terminal's line settings: echo, whole lines, signals.
fn usual() -> LocalFlags {
    LocalFlags::ECHO | LocalFlags::ICANON | LocalFlags::ISIG
}

fn state_of(host: &Host, kernel: &str) -> String {
    let json: serde_json::Value = serde_json::from_str(&host.ok(&["show", kernel, "--json"])).unwrap();
    json["state"].as_str().unwrap().to_owned()
}

#[test]
fn top_stop_restores_terminal() {
    let host = Host::start();
    let mut terminal = Terminal::start(&host, &["top"]);
    terminal.wait_for("kernels;");
    assert!(!terminal.settings().local_flags.intersects(usual()), "keys come one by one, unseen");
    host.ok(&["new", "apricot"]);
    terminal.wait_for("apricot");
    terminal.wait_for("created");
    host.ok(&["exec", "apricot", "echo x"]);
    terminal.wait_for("ready");
    terminal.press("x");
    terminal.wait_for("stop");
    terminal.wait_for("apricot?");
    assert_eq!(state_of(&host, "apricot"), "ready", "it asks first");
    terminal.press("y");
    terminal.wait_for("stopped");
    until("it is stopped", || state_of(&host, "apricot") == "stopped");
    terminal.press("cripe\r");
    until("the checkpoint is taken", || host.ok(&["log", "apricot"]).contains("ripe"));
    terminal.press("\r");
    terminal.wait_for("journal,");
    terminal.press("q");
    terminal.wait_for("MEMORY");
    terminal.press("q");
    terminal.wait_for_raw(LEFT);
    terminal.ended();
    assert!(terminal.settings().local_flags.contains(usual()));
}

#[test]
fn top_waits_for_daemon_restart() {
    let mut host = Host::start();
    host.ok(&["new", "plum"]);
    let mut terminal = Terminal::start(&host, &["top"]);
    terminal.wait_for("plum");
    host.kill();
    terminal.wait_for("waiting");
    host.launch();
    terminal.wait_for("connected");
    host.ok(&["new", "quince"]);
    terminal.wait_for("quince");
    terminal.press("q");
    terminal.ended();
}

#[test]
fn top_restores_terminal_on_signal() {
    let host = Host::start();
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT] {
        let mut terminal = Terminal::start(&host, &["top"]);
        terminal.wait_for("kernels;");
        kill(Pid::from_raw(terminal.pid() as i32), signal).unwrap();
        terminal.wait_for_raw(LEFT);
        until("keys are the shell's again", || terminal.settings().local_flags.contains(usual()));
    }
}
