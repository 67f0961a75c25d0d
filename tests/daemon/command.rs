//! `ryokan daemon`.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use ryokan::rpc::client::{HostClient, run_local};

use crate::support::{Host, Terminal, User, users};

/// Only root's tests meet a daemon of another user.
#[test]
fn foreign_server_is_refused() {
    for user in users() {
        let host = Host::start_as(user);
        let connected = run_local(async { HostClient::connect_own(&host.socket(), "test").await.map(drop) }).unwrap();
        let reason = connected.err().map(|error| error.reason);
        let is_foreign = user == User::Unprivileged && nix::unistd::geteuid().is_root();
        assert_eq!(reason, is_foreign.then(|| "foreign_server".to_owned()), "{user:?}");
    }
}

#[test]
fn daemon_command_shows_and_stops() {
    for user in users() {
        let mut host = Host::start_as(user);
        host.ok(&["new", "k", "--engine", "bash"]);
        host.ok(&["exec", "k", "kept=1"]);
        let status: Value = serde_json::from_str(&host.ok(&["daemon", "status", "--json"])).unwrap();
        assert_eq!(status["pid"].as_i64(), Some(host.pid().into()), "{status}");
        assert_eq!((&status["running"], &status["kernels"], &status["workers"]), (&true.into(), &1.into(), &1.into()));
        assert!(status["memory_bytes"].as_u64() > Some(1 << 20) && status["uptime_ms"].is_u64(), "{status}");
        assert!(host.ok(&["daemon", "status"]).contains("kernels  1, 1 running"));
        let log = host.ok(&["daemon", "log"]);
        assert!(log.contains("starting") && host.ok(&["daemon", "log", "-n", "1"]).lines().count() == 1, "{log}");
        // Programs beside engines end: they are named, and a person is asked.
        host.ok(&["spawn", "k", "-d", "--", "sleep", "1000"]);
        let mut terminal = Terminal::start(&host, &["daemon", "stop"]);
        terminal.wait_for("(sleep 1000) of k");
        terminal.wait_for("stop the daemon? [y/N]");
        terminal.press("n\r");
        terminal.ended_with(1);
        let stopped = host.cli(&["daemon", "stop"]);
        assert!(String::from_utf8_lossy(&stopped.stdout).contains("stopped (process"), "{stopped:?}");
        assert!(String::from_utf8_lossy(&stopped.stderr).contains("(sleep 1000) of k"), "{stopped:?}");
        host.wait();
        assert!(host.workers().is_empty(), "kernels saved their state");
        assert!(host.ok(&["daemon", "stop"]).contains("no daemon answers"));
        let status = host.cli(&["daemon", "status"]);
        assert_eq!(status.status.code(), Some(3));
        assert!(String::from_utf8_lossy(&status.stdout).contains("no daemon answers"));
        host.launch();
        assert_eq!(host.ok(&["exec", "k", "echo $kept"]), "1\n");
    }
}

#[test]
fn followed_log_ends_with_ctrl_c() {
    let host = Host::start();
    let follows = |host: &Host, signal: Signal| {
        let mut command = host.command("ryokan");
        command.args(["daemon", "log", "-f"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it runs");
        let mut lines = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line");
        assert!(line.ends_with('\n'), "{line}");
        let pid = Pid::from_raw(child.id().cast_signed());
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        assert_eq!(children, "", "it has no child that could stay");
        kill(pid, signal).expect("sent");
        let mut text = String::new();
        child.stderr.take().expect("piped").read_to_string(&mut text).expect("read");
        (child.wait().expect("ended").code(), text)
    };
    assert_eq!(follows(&host, Signal::SIGINT), (Some(0), String::new()));
    assert_eq!(follows(&host, Signal::SIGTERM), (Some(143), String::new()));
}
