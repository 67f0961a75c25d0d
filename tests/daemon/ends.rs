//! What is left of what went on when the daemon was told to end.

use nix::sys::signal::Signal;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;

use crate::support::{Host, eventually, kernel};

#[test]
fn an_execution_that_the_daemons_stop_interrupts_says_so() {
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
    assert!(host.ends(), "it goes on");
    host.launch();
    for name in ["k", "p"] {
        let journal = host.ok(&["journal", name, "--json"]);
        assert!(
            journal.contains("interrupted") && journal.contains("its kernel was stopped (daemon stopped)"),
            "{journal}"
        );
    }
}

/// Whatever was told to a client is in the events, though the daemon ends at once.
#[test]
fn the_last_events_of_a_daemon_that_ends_are_kept() {
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
