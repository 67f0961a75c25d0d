//! Clients that read no output slow their own execution and nothing else.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecResult, ExecStatus};
use ryokan::core::ids::ExecId;
use ryokan::core::limits;
use ryokan::rpc::client::{HostClient, run_local};

use super::{remove_all, rss};
use crate::support::{Host, eventually, kernel, out};

/// Bytes that the code writes.
const FLOOD_BYTES: u64 = 200_000_000;
/// Allowed growth of the daemon meanwhile, KiB.
const GROWTH_KIB: u64 = 32 << 10;

#[derive(Debug, Clone, Copy)]
enum Deaf {
    /// Reads its connection; its callback never answers.
    Callback,
    /// Does not even read its connection.
    Connection,
}

#[test]
fn stalled_client_costs_no_memory() {
    let host = Host::start();
    host.with(async |client| {
        out(&kernel(&client, "other", EngineName::Kaish).await, "x=1").await;
        kernel(&client, "k", EngineName::Kaish).await.start().await.expect("starts");
    });
    for deaf in [Deaf::Callback, Deaf::Connection] {
        let before = rss(host.pid());
        let leave = AtomicBool::new(false);
        let (sender, receiver) = std::sync::mpsc::channel::<ExecId>();
        let (most, result) = std::thread::scope(|scope| {
            scope.spawn(|| {
                run_local(async {
                    let client = HostClient::connect(&host.socket(), "deaf").await.expect("connects");
                    let (shell, _) = client.open_kernel("k").await.expect("there");
                    let code = format!("/usr/bin/head -c {FLOOD_BYTES} /dev/zero");
                    let running = shell.run(&ExecRequest::code(code)).await.expect("accepted");
                    sender.send(running.exec()).expect("received");
                    let reading = running.output(0, async |_| {
                        if matches!(deaf, Deaf::Connection) {
                            // Blocks the whole event loop.
                            while !leave.load(Ordering::Relaxed) {
                                std::thread::sleep(Duration::from_millis(10));
                            }
                        }
                        std::future::pending().await
                    });
                    let leaving = async {
                        while !leave.load(Ordering::Relaxed) {
                            tokio::time::sleep(Duration::from_millis(10)).await;
                        }
                    };
                    tokio::select! {
                        _ = reading => panic!("nothing was read"),
                        () = leaving => {}
                    }
                })
                .unwrap();
            });
            let exec = receiver.recv().expect("accepted");
            let mut most = 0;
            host.with(async |client| {
                let (other, _) = client.open_kernel("other").await.expect("there");
                let (shell, _) = client.open_kernel("k").await.expect("there");
                // Long enough for all of it to arrive without back-pressure.
                for round in 0..20 {
                    assert_eq!(out(&other, &format!("echo {round}")).await, round.to_string());
                    most = most.max(rss(host.pid()));
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                assert_eq!(shell.info().await.expect("info").state, "busy", "{deaf:?}: the code waits for its reader");
            });
            leave.store(true, Ordering::Relaxed);
            let result: ExecResult = host.with(async |client| {
                let (shell, _) = client.open_kernel("k").await.expect("there");
                let execution = shell.execution(exec).await.expect("known");
                tokio::time::timeout(Duration::from_secs(600), execution.result())
                    .await
                    .expect("it ends")
                    .expect("a result")
            });
            (most.max(rss(host.pid())), result)
        });
        eprintln!("{deaf:?}: {before} KiB before, {most} KiB at most");
        assert!(most < before + GROWTH_KIB, "{deaf:?}: memory grew from {before} to {most} KiB");
        assert_eq!(result.end.status, ExecStatus::Done, "{deaf:?}: {:?}", result.end);
        assert_eq!(result.stdout.len() as u64 + result.truncated_bytes, FLOOD_BYTES, "{deaf:?}: every byte is counted");
        host.with(async |client| {
            let (shell, _) = client.open_kernel("k").await.expect("there");
            eventually("it is ready", || async { shell.info().await.expect("info").state == "ready" }).await;
            assert_eq!(out(&shell, "echo next").await, "next");
        });
    }
    remove_all(&host);
}

#[test]
fn subscriptions_are_bounded() {
    let host = Host::start();
    host.with(async |client| {
        let mut held = Vec::new();
        for _ in 0..limits::SUBSCRIPTIONS {
            held.push(client.events(0).await.expect("accepted"));
        }
        let refused = client.events(0).await.map(drop).expect_err("one too many");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Busy, "subscriptions"));
        drop(held);
        eventually("a place is free", || async { client.events(0).await.is_ok() }).await;
    });
}

/// Writes events as an earlier daemon left them.
fn store_events(host: &mut Host, count: usize) {
    host.signal(nix::sys::signal::Signal::SIGTERM);
    host.wait();
    let mut catalog = rusqlite::Connection::open(host.data().join("catalog.db")).unwrap();
    let detail = serde_json::json!({ "text": "x".repeat(200) }).to_string();
    let written = catalog.transaction().unwrap();
    for _ in 0..count {
        written
            .execute("INSERT INTO events (at_ms, kernel, kind, detail) VALUES (1, '', 'test', ?)", [&detail])
            .unwrap();
    }
    written.commit().unwrap();
    drop(catalog);
    host.launch();
}

/// Clients that follow events and take none: each subscription costs little, and the daemon returns
/// the memory afterwards.
#[test]
fn unread_subscriptions_return_memory() {
    let mut host = Host::start();
    store_events(&mut host, 20_000);
    host.ok(&["ls"]);
    let before = rss(host.pid());
    let most = host.with(async |_| {
        let mut clients = Vec::new();
        for _ in 0..20 {
            let client = HostClient::connect(&host.socket(), "unread").await.expect("connects");
            let mut held = Vec::new();
            for _ in 0..limits::SUBSCRIPTIONS {
                held.push(client.events(0).await.expect("accepted"));
            }
            clients.push((client, held));
        }
        // Everything that the daemon would send without back-pressure arrives.
        tokio::time::sleep(Duration::from_secs(3)).await;
        rss(host.pid())
    });
    // The clients are gone with their event loop.
    let deadline = std::time::Instant::now() + Duration::from_secs(180);
    let mut after = rss(host.pid());
    while after > before + (20 << 10) && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(500));
        after = rss(host.pid());
    }
    eprintln!("640 subscriptions: {before} KiB before, {most} KiB at most, {after} KiB after");
    assert!(most < before + (80 << 10), "memory grew from {before} to {most} KiB");
    assert!(after <= before + (20 << 10), "memory stayed at {after} KiB after {before} KiB");
}

/// A large answer leaves free memory in the allocator; it is returned without a client's doing.
#[test]
fn unused_memory_returns_to_system() {
    let host = Host::start();
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        out(&shell, "x=1").await;
        let before = rss(host.pid());
        let mut most = before;
        for round in 0..4 {
            let request = ExecRequest::code(format!("echo {round} # {}", "x".repeat(1_000_000)));
            let pending = (0..48).map(|_| shell.run(&request));
            for run in futures::future::join_all(pending).await {
                run.expect("accepted").result().await.expect("a result");
            }
            most = most.max(rss(host.pid()));
        }
        eventually("memory is back", || async { rss(host.pid()) < before + (40 << 10) }).await;
        eprintln!("{before} KiB before, {most} KiB at most, {} KiB after", rss(host.pid()));
    });
    remove_all(&host);
}
