//! `ryokan daemon` with a real daemon.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::support::{Host, until};

#[test]
fn daemon_status_names_process() {
    let mut host = Host::start();
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "x=1"]);
    let shown: serde_json::Value = serde_json::from_str(&host.ok(&["daemon", "status", "--json"])).unwrap();
    assert_eq!((&shown["running"], &shown["pid"], &shown["kernels"]), (&true.into(), &host.pid().into(), &1.into()));
    assert_eq!(shown["log_file"], host.path("daemon.log").display().to_string());
    assert!(shown["memory_bytes"].as_u64() > Some(1 << 20) && shown["kernels_with_worker"] == 1, "{shown}");
    assert!(host.ok(&["daemon", "status"]).contains("1 with a worker"));

    assert!(host.ok(&["daemon", "stop"]).contains(&format!("pid {}", host.pid())));
    assert!(host.ends(), "the stop returns after the daemon's end");
    assert!(host.ok(&["daemon", "stop"]).contains("no daemon answers"), "a second stop is no error");
    let none = host.cli(&["daemon", "status", "--json"]);
    assert_eq!(none.status.code(), Some(3));
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&none.stdout).unwrap()["running"], false);
    host.launch();
    assert_eq!(host.ok(&["exec", "k", "echo $x"]), "1\n", "the kernel was saved");
}

#[test]
fn daemon_log_follows_file() {
    let host = Host::start();
    let last = host.ok(&["daemon", "log", "-n", "1"]);
    assert_eq!(last.lines().count(), 1, "{last}");
    assert!(host.log().contains(last.trim_end()));
    let mut following = host.command("ryokan");
    following.args(["daemon", "log", "-f", "-n", "0"]).stdout(Stdio::piped());
    let mut following = following.spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let (sent, received) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        while let Some(Ok(line)) = lines.next() {
            let _ = sent.send(line);
        }
    });
    let mut log = std::fs::File::options().append(true).open(host.path("daemon.log")).unwrap();
    let mut seen = Vec::new();
    until("a new line is followed", || {
        std::io::Write::write_all(&mut log, b"a line of \x1b[31mthe test\n").unwrap();
        seen.extend(received.try_iter());
        seen.iter().any(|line| line.contains("the test") && !line.contains('\u{1b}'))
    });
    following.kill().unwrap();
    following.wait().unwrap();
}
