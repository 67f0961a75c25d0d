//! The notice on a terminal while a command waits for a busy kernel.

use ryokan::core::exec::ExecRequest;
use ryokan::core::ids::ExecId;

use crate::support::{Host, Terminal, eventually, until};

const CTRL_C: &str = "\x03";

#[test]
fn terminal_shows_wait_reason() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut runs = Terminal::start(&host, &["exec", "k", "sleep 600; echo done"]);
    until("it runs", || host.ok(&["show", "k", "--json"]).contains("\"busy\""));
    let mut silent = Terminal::start(&host, &["vars", "k", "--json"]);
    let mut waits: Vec<Terminal> =
        [&["vars", "k"][..], &["exec", "k", "echo second"], &["checkpoint", "k"], &["stop", "k"]]
            .into_iter()
            .map(|args| Terminal::start(&host, args))
            .collect();
    for terminal in &mut waits {
        terminal.wait_for("waiting for execution 1 of k (interrupt it: ryokan interrupt k;");
    }
    // No notice about one's own execution, and none without a terminal or with --json.
    let quiet = host.command("ryokan").args(["vars", "k"]).stderr(std::process::Stdio::piped()).spawn().expect("runs");
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!((runs.shown(), silent.shown()), (String::new(), String::new()));
    runs.press(CTRL_C);
    runs.wait_for("interrupting");
    let quiet = quiet.wait_with_output().expect("ended");
    assert_eq!((quiet.status.success(), String::from_utf8_lossy(&quiet.stderr).as_ref()), (true, ""));
}

/// A stop without other work in the queue puts the kernel into another state.
#[test]
fn waiting_stop_shows_reason() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut runs = Terminal::start(&host, &["exec", "k", "sleep 600; echo done"]);
    until("it runs", || host.ok(&["show", "k", "--json"]).contains("\"busy\""));
    let mut stops = Terminal::start(&host, &["stop", "k"]);
    until("the stop is accepted", || host.ok(&["show", "k", "--json"]).contains("\"stopping\""));
    let mut waits = Terminal::start(&host, &["vars", "k"]);
    for terminal in [&mut stops, &mut waits] {
        terminal.wait_for("waiting for execution 1 of k (interrupt it: ryokan interrupt k;");
    }
    runs.press(CTRL_C);
    runs.wait_for("interrupting");
    waits.wait_for("no variables");
    assert!(host.ok(&["journal", "k", "--json"]).contains("\"interrupted\""));
}

/// An execution that waits for another one is not shown as running.
#[test]
fn queued_executions_name_predecessor() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    host.with(async |client| {
        let (k, _) = client.open_kernel("k").await.expect("opened");
        let first = k.run(&ExecRequest::code("sleep 600")).await.expect("accepted");
        let second = k.run(&ExecRequest::code("echo second")).await.expect("accepted");
        let third = k.run(&ExecRequest::code("echo third")).await.expect("accepted");
        eventually("the first one runs", || async { k.info().await.expect("info").state == "busy" }).await;
        let lines = host.ok(&["journal", "k", "--json"]);
        let entries: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let of = |exec: ExecId| entries.iter().find(|entry| entry["exec"] == exec.0).expect("an entry").clone();
        assert_eq!(of(first.exec())["status"], "running");
        assert_eq!(
            (of(second.exec())["status"].clone(), of(second.exec())["err"].clone()),
            ("queued".into(), "queued behind #1".into())
        );
        assert_eq!(of(third.exec())["err"], "queued behind #2");
        assert!(host.ok(&["journal", "k"]).contains("queued behind #2"));
        k.interrupt_execution(first.exec()).await.expect("interrupted");
        assert_eq!(third.result().await.expect("a result").stdout, b"third\n");
        let after = host.ok(&["journal", "k"]);
        assert!(!after.contains("queued"), "{after}");
    });
}
