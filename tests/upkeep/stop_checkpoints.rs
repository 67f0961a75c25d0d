//! The checkpoint before a stop, the queue without abandoned requests, and the version that never lags.

use std::time::Duration;

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::ExecRequest;

use super::{host, log, manual, names, taking};
use crate::support::{Host, User, eventually, kernel, out, spec, users};

#[test]
fn idle_stop_checkpoints() {
    for user in users() {
        let host = host(user);
        host.with(async |client| {
            let mut wanted = spec("k", EngineName::Kaish);
            wanted.idle_timeout_ms = Some(200);
            let k = client.create_kernel(&wanted, "").await.expect("made").0;
            out(&k, "x=1; echo one > file").await;
            let stopped = async || k.info().await.expect("info").state == "stopped";
            eventually("the idle stop", stopped).await;
            let all = log(&k).await;
            assert_eq!((all.len(), all[0].name.as_str(), all[0].kind), (1, "before idle stop", CheckpointType::Auto));
            // No change, or only messages: no further checkpoint.
            for _ in 0..2 {
                k.message("user", "hello").await.expect("said");
                k.start().await.expect("started");
                eventually("the idle stop", stopped).await;
            }
            assert_eq!(log(&k).await.len(), 1, "{user:?}: never for chatter");
            out(&k, "x=2").await;
            eventually("the idle stop", stopped).await;
            assert_eq!(log(&k).await.len(), 2);
            k.restore_checkpoint(&all[0].id.to_string(), 0).await.expect("restored");
            eventually("the idle stop", stopped).await;
            assert_eq!(log(&k).await.len(), 3, "the safety checkpoint, and none of the restored state");
            assert_eq!(out(&k, "echo $x; cat file").await, "1\none");
        });
    }
}

#[test]
fn every_stop_checkpoints() {
    let mut host = host(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        out(&k, "x = 1").await;
        k.stop(false).await.expect("stopped");
        assert_eq!(names(&k).await, ["before stop"]);
        out(&k, "x = 2").await;
        let running = k.run(&ExecRequest::code("import time; time.sleep(60)")).await.expect("accepted");
        eventually("it runs", async || k.info().await.expect("info").state == "busy").await;
        k.stop(true).await.expect("stopped");
        running.result().await.expect("it was interrupted");
        assert_eq!(names(&k).await, ["before stop", "before stop"]);
        out(&k, "x = 3").await;
    });
    host.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(host.wait().success(), "{}", host.log());
    host.launch();
    host.with(async |client| {
        let k = client.open_kernel("k").await.expect("there").0;
        assert_eq!(names(&k).await, ["before the daemon's stop", "before stop", "before stop"]);
        out(&k, "x = 4").await;
        k.restore_checkpoint("before the daemon's stop", 0).await.expect("restored");
        assert_eq!(out(&k, "print(x)").await, "3");
        // An ephemeral kernel is never resumed.
    });
    host.ok(&["run", "echo gone"]);
}

#[test]
fn failed_checkpoint_allows_stop() {
    let mut host = Host::prepare(User::Own);
    host.configure("[upkeep]\ninterval = \"never\"\n");
    host.env(ryokan::sys::fault::VARIABLE, "state.checkpoints.add.before_commit=eio");
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        out(&k, "x=1").await;
        k.stop(false).await.expect("it stops all the same");
        assert_eq!((k.info().await.expect("info").state.as_str(), log(&k).await.len()), ("stopped", 0));
        assert_eq!(out(&k, "echo $x").await, "1", "and nothing of its state is lost");
    });
    let events = host.ok(&["events", "k", "--json"]);
    assert!(events.contains("stop_checkpoint_failed"), "{events}");
}

#[test]
fn abandoned_wait_leaves_queue() {
    let mut host = Host::prepare(User::Own);
    host.configure("[limits]\nexecutions_queued = 2\n");
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let running = k.run(&ExecRequest::code("sleep 600")).await.expect("accepted");
        eventually("it runs", async || k.info().await.expect("info").state == "busy").await;
        for round in 0..4 {
            // Abandoned by their own deadline, and by a client that drops the call.
            let short =
                CheckpointRequest { wait: Duration::from_millis(100), ..taking(CheckpointType::Manual, "short") };
            assert_eq!(k.checkpoint(&short).await.expect_err("it waits").code, ErrorCode::Deadline, "round {round}");
            let long = taking(CheckpointType::Manual, "dropped");
            let dropped = tokio::time::timeout(Duration::from_millis(100), k.checkpoint(&long)).await;
            assert!(dropped.is_err());
        }
        // If one of those eight requests remained, the queue of two would be full.
        let waited = async || {
            let one = k.run(&ExecRequest::code("echo one")).await;
            one.is_ok()
        };
        eventually("there is room", waited).await;
        k.interrupt_execution(running.exec()).await.expect("interrupted");
        out(&k, "echo").await;
        assert_eq!(log(&k).await.len(), 0, "no later checkpoints either");
    });
}

#[test]
fn shown_version_matches_journal() {
    let host = host(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        for round in 0..15 {
            let checkpoint = async { manual(&k, &format!("c{round}")).await };
            let runs = async {
                for _ in 0..4 {
                    out(&k, "x=1").await;
                    k.message("user", "word").await.expect("said");
                }
            };
            futures::join!(checkpoint, runs);
            let mut newest = 0;
            k.each_journal_entry(0, 0, async |entry| {
                newest = entry.sequence;
                Ok(())
            })
            .await
            .expect("a journal");
            assert_eq!(k.info().await.expect("info").version, newest + 1, "round {round}");
        }
    });
}
