//! `ryokan top` without a terminal: refusals and snapshots.

use super::command_line::{parts, ryokan};
use super::fake::Fake;

#[test]
fn top_requires_terminal() {
    let fake = Fake::start();
    let (exit, stdout, stderr) = parts(ryokan(&fake, &["top"]).output().unwrap());
    assert_eq!((exit, stdout.as_str()), (2, ""));
    assert_eq!(
        stderr,
        "error: top needs a terminal to draw on\nhint: for a list: ryokan ls, ryokan pool, or ryokan top --once\n"
    );
    assert!(fake.log.lines().is_empty(), "the daemon got no request");
}

#[test]
fn top_once_prints_text() {
    let fake = Fake::start();
    let (exit, stdout, stderr) = parts(ryokan(&fake, &["top", "--once"]).output().unwrap());
    assert_eq!((exit, stderr.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][0], "fake");
    assert_eq!(
        lines[0][2..],
        ["1", "kernel,", "1", "ready;", "memory", "0", "B,", "disk", "0", "B,", "0", "executions"]
    );
    assert_eq!(lines[2], ["NAME", "ENGINE", "STATE", "SINCE", "EXECUTIONS", "MEMORY", "DISK", "IDLE", "JOBS"]);
    assert_eq!((&lines[3][..6], lines[3][8]), (&["demo", "python", "ready", "-", "0", "-"][..], "1"));
    assert_eq!((lines[5][0], lines[6][0], lines[6][7], lines[6][8]), ("ENGINE", "python", "2", "3"), "{stdout}");
}

#[test]
fn top_once_prints_json() {
    let fake = Fake::start();
    for args in [&["top", "--json"][..], &["top", "--once", "--json"]] {
        let (exit, stdout, _) = parts(ryokan(&fake, args).output().unwrap());
        let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(exit, 0);
        let fields: Vec<&String> = json.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["at_ms", "host", "kernels", "pools", "totals"]);
        assert_eq!(json["host"]["name"], "fake");
        let kernel = &json["kernels"][0];
        assert_eq!((&kernel["name"], &kernel["since_ms"]), (&"demo".into(), &serde_json::Value::Null));
        assert_eq!(kernel["jobs"], serde_json::json!([{ "id": "1", "command": "sleep 9" }]));
        assert_eq!(json["pools"][0]["target"], 3);
        let totals = serde_json::json!({ "kernels": 1, "states": { "ready": 1 }, "memory_bytes": 0, "disk_bytes": 0, "executions": 0 });
        assert_eq!(json["totals"], totals);
    }
}

#[test]
fn top_without_daemon_fails() {
    let fake = Fake::start();
    let mut command = ryokan(&fake, &["top", "--once"]);
    command.env("RYOKAN_SOCKET", fake.socket.with_file_name("nobody.sock"));
    assert_eq!(parts(command.output().unwrap()).0, 69);
}
