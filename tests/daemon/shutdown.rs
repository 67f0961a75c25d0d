//! Stops of kernels and of the daemon.

use nix::sys::signal::Signal;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;

use super::metrics::{reported, value};
use crate::support::{Host, User, WAITS, eventually, kernel, out, until};

fn state(host: &Host, name: &str) -> String {
    let shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", name, "--json"])).expect("JSON");
    shown["state"].as_str().expect("a state").to_owned()
}

/// A stop, as at a shutdown of the host, and the next start of the daemon.
fn stop_and_start(host: &mut Host) {
    host.signal(Signal::SIGTERM);
    assert!(host.wait().success(), "{}", host.log());
    assert!(host.workers().is_empty(), "a wanted stop ends workers");
    host.launch();
}

#[test]
fn stopped_daemon_resumes_kernels() {
    let mut host = Host::prepare(User::Own);
    // They start one after the other.
    host.configure("[limits]\nworker_starts = 1\n");
    host.launch();
    for name in ["ran", "busy", "leased", "asleep", "halted", "created"] {
        host.ok(&["new", name, "--engine", "bash"]);
        if name != "created" {
            host.ok(&["exec", name, "x=1"]);
        }
    }
    host.ok(&["suspend", "asleep"]);
    host.ok(&["stop", "halted"]);
    host.with(async |client| {
        let (busy, _) = client.open_kernel("busy").await.expect("it is there");
        busy.run(&ExecRequest::code(WAITS)).await.expect("accepted");
        eventually("it runs", async || busy.info().await.expect("info").state == "busy").await;
        let (leased, _) = client.open_kernel("leased").await.expect("it is there");
        leased.lease("me", std::time::Duration::from_secs(600), &[]).await.expect("leased");
    });
    stop_and_start(&mut host);
    for name in ["ran", "busy"] {
        until("it runs", || state(&host, name) == "ready");
    }
    until("the other is named", || host.ok(&["events", "leased", "--json"]).contains("kernel_not_resumed"));
    for name in ["leased", "asleep", "halted"] {
        assert_eq!(state(&host, name), "stopped", "{name}");
    }
    assert_eq!(state(&host, "created"), "created");
    assert_eq!(host.ok(&["exec", "ran", "echo $x"]), "1\n");
    // A stop of the daemon counts once, and a stop by a client ends it.
    host.ok(&["exec", "asleep", "echo $x"]);
    host.ok(&["stop", "ran"]);
    stop_and_start(&mut host);
    until("it runs", || state(&host, "asleep") == "ready");
    for name in ["ran", "leased", "halted"] {
        assert_eq!(state(&host, name), "stopped", "{name}");
    }
    assert_eq!(host.ok(&["events", "leased", "--json"]).matches("kernel_not_resumed").count(), 1);
    // Without the switch, the next use starts kernels.
    for config in ["[daemon]\nresume_kernels = false\n", ""] {
        host.configure(config);
        stop_and_start(&mut host);
        // By then a resumed kernel would have started: starts are in turn.
        host.ok(&["exec", "created", ":"]);
        assert_eq!(state(&host, "asleep"), "stopped", "{config}");
        host.ok(&["stop", "created"]);
    }
    assert_eq!(host.ok(&["exec", "asleep", "echo $x"]), "1\n");
}

/// `suspend --all` is for a shutdown: its kernels run after it, those that a client suspended do not.
#[test]
fn suspended_host_resumes_kernels() {
    let mut host = Host::start();
    for name in ["one", "two", "asleep"] {
        host.ok(&["new", name, "--engine", "bash"]);
        host.ok(&["exec", name, "x=1"]);
    }
    host.ok(&["suspend", "asleep"]);
    host.ok(&["suspend", "--all"]);
    // Its use withdraws the mark, and a client suspends it again.
    host.ok(&["exec", "two", "x=2"]);
    host.ok(&["suspend", "two"]);
    stop_and_start(&mut host);
    until("it runs", || state(&host, "one") == "ready");
    assert_eq!([state(&host, "two"), state(&host, "asleep")], ["stopped", "stopped"]);
    assert_eq!(host.ok(&["exec", "one", "echo $x"]), "1\n");
    // Once: it rests after the next stop.
    host.ok(&["suspend", "one"]);
    stop_and_start(&mut host);
    host.ok(&["exec", "two", "echo $x"]);
    assert_eq!(state(&host, "one"), "stopped");
}

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
