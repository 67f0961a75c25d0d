//! Start, death, restart and end of servers.

use std::path::Path;
use std::time::{Duration, Instant};

use ryokan::core::error::ErrorCode;
use ryokan::core::value::Value;
use ryokan::mcp::{CallError, Launch, McpServers, Timing};

use super::fixture::{alive, by_name, entry, info, launch, registered, run, servers, until, words};

async fn call(servers: &McpServers, tool: &str) -> Result<String, (ErrorCode, String)> {
    match servers.call(tool, &Value::Null).await {
        Ok(output) => Ok(output.text),
        Err(CallError::Call(error)) => Err((error.code, error.message)),
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn crashed_server_restarts() {
    run(async {
        let servers = registered(&["ok"]).await;
        for _ in 0..3 {
            let (code, message) = call(&servers, "s__crash").await.expect_err("it crashed");
            assert_eq!(code, ErrorCode::Unavailable);
            assert!(message.contains("ended during the call"), "{message}");
            assert!(message.contains("exited with code 7") && message.contains("I fall"), "{message}");
            assert_eq!(info(&servers).state, "connecting");
            // The next call waits for it.
            assert_eq!(call(&servers, "s__echo").await, Ok("{}".into()));
            assert_eq!((info(&servers).state.as_str(), info(&servers).error.as_str()), ("ready", ""));
        }
    });
}

#[test]
fn server_start_failure_reason() {
    run(async {
        let missing = {
            let mut entry = entry("missing", &[]);
            entry.transport = ryokan::core::info::McpTransport::Stdio {
                command: "/no/such/program".into(),
                args: Vec::new(),
                env: Vec::new(),
            };
            entry
        };
        let servers = servers([entry("s", &["die"]), missing], launch());
        let error = servers.register("s", &by_name()).await.expect_err("it dies");
        assert_eq!(error.code, ErrorCode::Unavailable);
        for part in ["did not start", "exited with code 3", "cannot find my data"] {
            assert!(error.message.contains(part), "{part}: {error}");
        }
        let error = servers.register("missing", &by_name()).await.expect_err("the program is missing");
        assert!(error.message.contains("/no/such/program") && error.message.contains("No such file"), "{error}");
        assert!(servers.list().is_empty(), "a server that did not start is not registered");

        // Without waiting it stays registered and is retried, at growing intervals.
        servers.start("s", &by_name()).expect("allowed");
        until("it failed", || info(&servers).state == "failed").await;
        assert!(info(&servers).error.contains("cannot find my data"));
        let (code, message) = call(&servers, "s__echo").await.expect_err("the server is not running");
        assert!(code == ErrorCode::Unavailable && message.contains("is not there"), "{message}");
    });
}

#[test]
fn mute_server_start_times_out() {
    run(async {
        let timing = Timing { start: Duration::from_millis(500), ..launch().timing };
        let servers = servers([entry("s", &["mute"])], Launch { timing, ..launch() });
        let start = Instant::now();
        let error = servers.register("s", &by_name()).await.expect_err("it is mute");
        assert!(error.message.contains("was not ready within 500ms"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(120));
    });
}

#[test]
fn dropped_registration_is_undone() {
    run(async {
        let servers = servers([entry("s", &["mute"])], launch());
        let asked = by_name();
        assert!(tokio::time::timeout(Duration::from_millis(100), servers.register("s", &asked)).await.is_err());
        assert!(servers.list().is_empty());
    });
}

async fn family(dir: &Path) -> (McpServers, Vec<String>) {
    let file = dir.join("pids");
    let servers = registered(&["orphan", &file.display().to_string()]).await;
    let pids = words(&file).await;
    assert!(pids.len() == 2 && pids.iter().all(|pid| alive(pid)));
    (servers, pids)
}

#[test]
fn server_process_group_killed() {
    let dir = tempfile::tempdir().expect("a directory");
    run(async {
        let (dropped, pids) = family(dir.path()).await;
        drop(dropped);
        until("the group is gone", || !pids.iter().any(|pid| alive(pid))).await;
        std::fs::remove_file(dir.path().join("pids")).expect("there");

        let (kept, pids) = family(dir.path()).await;
        kept.unregister("s").await.expect("there");
        until("the group is gone", || !pids.iter().any(|pid| alive(pid))).await;
        std::fs::remove_file(dir.path().join("pids")).expect("there");

        let (kept, pids) = family(dir.path()).await;
        kept.shutdown().await;
        until("the group is gone", || !pids.iter().any(|pid| alive(pid))).await;
    });
    // The daemon's exit: nothing runs any more that could clean up.
    std::fs::remove_file(dir.path().join("pids")).expect("there");
    let (servers, pids) = run(family(dir.path()));
    drop(servers);
    crate::support::until("the group is gone", || !pids.iter().any(|pid| alive(pid)));
}

#[test]
fn dead_leader_noticed() {
    let dir = tempfile::tempdir().expect("a directory");
    run(async {
        let (servers, pids) = family(dir.path()).await;
        let leader = nix::unistd::Pid::from_raw(pids[0].parse().expect("a number"));
        nix::sys::signal::kill(leader, nix::sys::signal::Signal::SIGKILL).expect("killed");
        until("it is noticed", || !alive(&pids[1])).await;
        assert_eq!(call(&servers, "s__echo").await, Ok("{}".into()));
    });
}

#[test]
fn stubborn_server_killed() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("pid");
    run(async {
        let servers = registered(&["stubborn", &file.display().to_string()]).await;
        let pids = words(&file).await;
        let start = Instant::now();
        servers.unregister("s").await.expect("there");
        assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
        until("it is gone", || !alive(&pids[0])).await;
    });
}

#[test]
fn clean_exit_skips_grace() {
    run(async {
        let grace = Duration::from_secs(500);
        let timing = Timing { stop_grace: grace, ..launch().timing };
        let servers = servers([entry("s", &["ok"])], Launch { timing, ..launch() });
        servers.register("s", &by_name()).await.expect("registered");
        let start = Instant::now();
        servers.shutdown().await;
        assert!(start.elapsed() < grace / 2, "{:?}", start.elapsed());
    });
}

#[test]
fn server_restart_during_shutdown() {
    run(async {
        let servers = registered(&["ok"]).await;
        let ending = servers.shutdown();
        servers.start("s", &by_name()).expect("the name is free at once");
        ending.await;
        assert_eq!(call(&servers, "s__echo").await, Ok("{}".into()));
        // A dropped future unregisters, too.
        drop(servers.unregister("s"));
        assert!(servers.list().is_empty());
    });
}

#[test]
fn unregister_fails_pending_call() {
    run(async {
        let servers = registered(&["ok"]).await;
        let slow = call(&servers, "s__slow");
        let end = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            servers.unregister("s").await.expect("there");
        };
        let start = Instant::now();
        let (slow, ()) = tokio::join!(slow, end);
        assert_eq!(slow.expect_err("it was cut off").0, ErrorCode::Unavailable);
        // Before it would have answered.
        assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
    });
}

#[test]
fn orphaned_mcp_servers_found() {
    let dir = tempfile::tempdir().expect("a directory");
    let mark = dir.path().display().to_string();
    // A leftover of a killed daemon: a server with its own session that ignores its closed input.
    let mut orphan = std::process::Command::new("setsid")
        .args(["sleep", "1000"])
        .env("RYOKAN_MCP_OF", &mark)
        .spawn()
        .expect("started");
    let mut other = std::process::Command::new("sleep")
        .arg("1000")
        .env("RYOKAN_MCP_OF", format!("{mark}x"))
        .spawn()
        .expect("started");
    std::thread::sleep(Duration::from_millis(100));
    assert!(ryokan::mcp::orphans::end(&mark) >= 1);
    assert!(!orphan.wait().expect("reaped").success());
    assert!(other.try_wait().expect("known").is_none(), "another daemon's server was ended");
    other.kill().expect("killed");
    other.wait().expect("reaped");
    assert_eq!(ryokan::mcp::orphans::end(&mark), 0);
}
