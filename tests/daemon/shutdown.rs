//! Stops of kernels and of the daemon.

use nix::sys::signal::Signal;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;

use super::metrics::{reported, value};
use crate::support::{Host, WAITS, eventually, kernel, out};

#[test]
fn daemon_stop_interrupts_executions() {
    let mut host = Host::start();
    host.with(async |client| {
        let long = [("k", EngineName::Kaish, "sleep 60"), ("p", EngineName::Python, "import time; time.sleep(60)")];
        for (name, engine, code) in long {
            let made = kernel(&client, name, engine).await;
            made.run(&ExecRequest::code(code)).await.expect("accepted");
            eventually("it runs", async || made.info().await.expect("info").state == "busy").await;
        }
    });
    host.signal(Signal::SIGTERM);
    assert!(host.ends(), "the daemon still runs");
    host.launch();
    for name in ["k", "p"] {
        let journal = host.ok(&["journal", name, "--json"]);
        assert!(
            journal.contains("interrupted") && journal.contains("its kernel was stopped (daemon stopped)"),
            "{journal}"
        );
    }
}

/// Every change reported to a client is in the events, even if the daemon stops at once.
#[test]
fn last_events_survive_daemon_stop() {
    let mut host = Host::start();
    for round in 0..5 {
        let name = format!("k{round}");
        host.with(async |client| drop(kernel(&client, &name, EngineName::Kaish).await));
        host.signal(Signal::SIGTERM);
        host.wait();
        host.launch();
        assert!(host.ok(&["events", &name]).contains("kernel_created"), "{name}");
    }
}

/// A queued stop is cancelled if its client disconnects.
#[test]
fn queued_stop_cancelled_with_client() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let running = k.run(&ExecRequest::code(format!("x=1; {WAITS}"))).await.expect("accepted");
        eventually("it runs", async || k.info().await.expect("info").state == "busy").await;
        let queued = k.run(&ExecRequest::code("x=2")).await.expect("accepted");
        let clients = || value(&reported(&host), "ryokan_clients");
        let mut stop = host.command("ryokan").args(["stop", "k"]).spawn().expect("spawned");
        eventually("it is connected", async || clients() == 2.0).await;
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert!(stop.try_wait().expect("waited").is_none(), "the stop is queued");
        stop.kill().expect("killed");
        stop.wait().expect("ended");
        eventually("its disconnection is noticed", async || clients() == 1.0).await;
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        host.release(&k).await;
        running.result().await.expect("a result");
        queued.result().await.expect("a result");
        assert_eq!(out(&k, "echo $x").await, "2");
    });
    assert!(!host.ok(&["events", "k"]).contains("kernel_stopping"));
}
