//! Processes and everything else that happens to a kernel: executions, checkpoints, restores, stops, killed clients and
//! daemons.

use std::process::Stdio;
use std::time::Duration;

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::rpc::client::KernelClient;

use super::{Inside, bash, count, detached, each_user, finish, program, says, script};
use crate::support::{Host, eventually, kernel, out, run, until};

#[test]
fn process_runs_beside_execution() {
    each_user(|host| {
        host.with(async |client| {
            for engine in EngineName::ALL {
                let k = kernel(&client, engine.name(), engine).await;
                let code = ExecRequest::code(Inside { kernel: &k, engine }.sleep());
                let running = k.run(&code).await.expect("accepted");
                eventually("it runs", || async { k.info().await.expect("info").state == "busy" }).await;
                assert_eq!(says(&k, "echo beside; ls -d /workspace").await, "beside\n/workspace");
                assert_eq!(k.info().await.expect("info").state, "busy");
                running.cancel().await.expect("cancelled");
                running.result().await.expect("a result");
                assert_eq!(says(&k, "echo later").await, "later");
            }
        });
    });
}

/// A checkpoint names a running program, which goes on; a restore of it says so, and ends the program.
pub(crate) async fn checkpoint_names(host: &Host, kernel: &KernelClient, name: &str) {
    let files = kernel.files().await.expect("its files");
    let process = kernel.spawn(&detached(script("while :; do date >> log; sleep 0.02; done"))).await;
    let process = process.expect("accepted");
    eventually("it writes", async || files.stat(b"log", true).await.is_ok()).await;
    let taken = CheckpointRequest::new(CheckpointType::Manual, "with");
    let checkpoint = kernel.checkpoint(&taken).await.expect("taken");
    let shown = host.ok(&["log", name, "--json"]);
    assert!(shown.contains(&checkpoint.id.to_string()), "{shown}");
    assert_eq!(kernel.processes().await.expect("listed").len(), 1, "it goes on");
    let preview = host.ok(&["restore", name, "with", "--preview"]);
    assert!(preview.contains("date >> log"), "{preview}");
    let restored = kernel.restore_checkpoint("with", 0).await.expect("restored");
    assert!(restored.missed.iter().any(|entry| entry.reason.contains("date >> log")), "{:?}", restored.missed);
    let end = process.execution.result().await.expect("a result").end;
    assert!(matches!(end.status, ExecStatus::Interrupted | ExecStatus::Lost), "{end:?}");
    assert_eq!(says(kernel, "echo again").await, "again");
}

#[test]
fn checkpoint_names_running_process() {
    each_user(|host| {
        host.with(async |client| {
            checkpoint_names(&host, &bash(&client, "k").await, "k").await;
            assert_eq!(count("sh -c while :; do date >> log; sleep 0.02; done"), 0);
        });
    });
}

/// A Python kernel is restored by replacing its engine's process.
#[test]
fn replaced_engine_ends_processes() {
    each_user(|host| {
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Python).await;
            run(&k, "x = 1").await;
            k.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, "one")).await.expect("taken");
            run(&k, "x = 2").await;
            let process = k.spawn(&program(&["sleep", "4444"])).await.expect("accepted");
            eventually("it runs", || async { count("sleep 4444") == 1 }).await;
            let restored = k.restore_checkpoint("one", 0).await.expect("restored");
            let ended: Vec<(String, String)> = restored.ended.into_iter().map(|job| (job.id, job.command)).collect();
            assert_eq!(ended, [(format!("process {}", process.execution.exec()), "sleep 4444".to_owned())]);
            let end = process.execution.result().await.expect("a result").end;
            assert!(matches!(end.status, ExecStatus::Interrupted | ExecStatus::Lost), "{end:?}");
            assert_eq!(count("sleep 4444"), 0);
            assert_eq!(out(&k, "print(x)").await, "1");
            assert_eq!(says(&k, "echo again").await, "again");
        });
    });
}

/// The programs that `stop` and `archive` end are named. The kernel is archived at the end.
pub(crate) async fn ends_are_named(host: &Host, kernel: &KernelClient, name: &str) {
    let files = kernel.files().await.expect("its files");
    for command in ["stop", "archive"] {
        let process = kernel.spawn(&detached(script("> up; exec sleep 5555"))).await.expect("accepted");
        eventually("it runs", async || files.stat(b"up", true).await.is_ok()).await;
        files.remove(b"up", false).await.expect("removed");
        let ended = host.cli(&[command, name]);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        let exec = process.execution.exec();
        let named = format!("ended: process {exec} (sh -c '> up; exec sleep 5555')");
        assert!(ended.status.success() && said.contains(&named), "{said}");
        let end = process.execution.result().await.expect("a result").end;
        assert_eq!((end.status, end.code != 0), (ExecStatus::Interrupted, true), "{end:?}");
        let journal = host.ok(&["journal", name]);
        let entry = journal.lines().find(|line| line.contains(&format!("#{exec} "))).expect("an entry");
        assert!(entry.contains("interrupted") && entry.contains("sleep 5555"), "{entry}");
        assert!(kernel.processes().await.expect("listed").is_empty());
        if command == "stop" {
            assert_eq!(says(kernel, "echo again").await, "again", "the next one starts a worker");
            let quiet = host.cli(&["stop", name]);
            assert!(!String::from_utf8_lossy(&quiet.stderr).contains("ended"), "{quiet:?}");
        }
    }
}

#[test]
fn stop_ends_and_names_processes() {
    each_user(|host| {
        host.with(async |client| {
            ends_are_named(&host, &bash(&client, "k").await, "k").await;
            assert_eq!(count("sleep 5555"), 0);
        });
    });
}

/// A killed client ends its program, the script `text`, and no detached one.
pub(crate) fn killed_client(host: &Host, kernel: &str, text: &str, runs: impl Fn() -> bool) {
    let mut command = host.command("ryokan");
    command.args(["--no-autostart", "spawn", kernel, "--", "sh", "-c", text]);
    let mut client = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("started");
    until("it runs", &runs);
    let detached = host.ok(&["spawn", kernel, "-d", "--", "tail", "-f", "/dev/null"]);
    client.kill().expect("killed");
    client.wait().expect("ended");
    until("it ends", || !runs());
    let recorded = || host.ok(&["journal", kernel]).lines().any(|l| l.contains("interrupted") && l.contains(text));
    until("its end is recorded", recorded);
    let listed = host.ok(&["ps", kernel]);
    assert!(!listed.contains(text) && listed.contains("tail"), "a detached one goes on: {listed}");
    host.ok(&["kill", kernel, detached.trim()]);
}

#[test]
fn killed_client_ends_its_process() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        killed_client(&host, "k", "sleep 6666 & echo up; wait", || count("sleep 6666") == 1);
    });
}

#[test]
fn killed_daemon_leaves_no_process() {
    each_user(|mut host| {
        let (exec, before) = host.with(async |client| {
            let kernel = bash(&client, "k").await;
            run(&kernel, "kept=1").await;
            let before = host.workers();
            let process = kernel.spawn(&detached(script("sleep 7777 & sleep 7777"))).await.expect("accepted");
            eventually("it runs", || async { count("sleep 7777") == 2 }).await;
            (process.execution.exec(), before)
        });
        host.kill();
        // Its supervisor is a fork of init.
        until("only the worker is left", || count("sleep 7777") == 0 && host.workers() == before);
        host.launch();
        host.with(async |client| {
            let (kernel, _) = client.open_kernel("k").await.expect("it is still there");
            let end = kernel.execution(exec).await.expect("known").result().await.expect("a result").end;
            assert_eq!(end.status, ExecStatus::Lost, "{end:?}");
            assert_eq!(count("sleep 7777"), 0);
            assert_eq!(out(&kernel, "echo $kept").await, "1", "the engine is the same");
        });
    });
}

#[test]
fn idle_kernel_with_process_stays() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash", "--idle-timeout", "1s"]);
        host.with(async |client| {
            let (kernel, _) = client.open_kernel("k").await.expect("opened");
            let result = finish(&kernel, &script("sleep 4; echo slept")).await;
            assert_eq!((result.end.code, &result.stdout[..]), (0, &b"slept\n"[..]), "{:?}", result.end);
            let stopped = async || kernel.info().await.expect("info").state == "stopped";
            eventually("it stops when nothing runs", stopped).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        });
    });
}
