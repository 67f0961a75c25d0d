//! Clients that read no output slow their own execution and nothing else.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecResult, ExecStatus};
use ryokan::core::ids::ExecId;
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
                    sender.send(running.exec()).expect("heard");
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
                tokio::time::timeout(Duration::from_secs(60), execution.result())
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
