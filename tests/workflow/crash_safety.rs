//! A daemon killed while it locks a decision or a restore changes records: the next daemon has all of the change or
//! nothing.

use ryokan::core::engine::EngineName;
use ryokan::core::workflow::DecisionState::{Locked, Open, Superseded};
use ryokan::core::workflow::Options;
use ryokan::rpc::client::{HostClient, run_local};
use ryokan::sys::fault;

use super::{checkpoints, content, named, put, states};
use crate::support::{Host, User, kernel};

fn armed(host: &mut Host, fault: &str) {
    host.kill();
    host.env(fault::VARIABLE, fault);
    host.launch();
}

#[test]
fn decision_lock_is_atomic() {
    let mut host = Host::prepare(User::Own);
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        k.open_decision("a", "", "", 0).await.unwrap();
    });
    for (point, locked) in [("before_commit=kill", false), ("before_commit=eio", false), ("after_commit=kill", true)] {
        armed(&mut host, &format!("state.checkpoints.add.{point}"));
        let answered = run_local(async {
            let client = HostClient::connect(&host.socket(), "test").await?;
            client.open_kernel("k").await?.0.lock_decision(1, 0).await
        });
        answered.unwrap().expect_err("it met the fault");
        armed(&mut host, "");
        host.with(async |client| {
            let (k, _) = client.open_kernel("k").await.unwrap();
            let expected = if locked { Locked } else { Open };
            assert_eq!(states(&k).await, [expected], "{point}");
            assert_eq!(checkpoints(&k).await.len(), usize::from(locked), "{point}");
        });
    }
}

#[test]
fn record_restore_is_atomic() {
    let mut host = Host::prepare(User::Own);
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        put(&k, "report", "first").await;
        k.begin_step("one", 0).await.unwrap();
        k.checkpoint(&named("then")).await.unwrap();
        k.complete_step(0).await.unwrap();
        put(&k, "report", "second").await;
        k.open_decision("later", "", "", 0).await.unwrap();
    });
    let asked = Options { supersede_decisions: true, with_artifacts: true, with_memory: false };
    for point in ["state.transition.begin.after_commit=kill", "state.restore.finish.before_commit=kill"] {
        armed(&mut host, point);
        let answered = run_local(async {
            let client = HostClient::connect(&host.socket(), "test").await?;
            client.open_kernel("k").await?.0.restore_with("then", asked, 0).await
        });
        answered.unwrap().expect_err("it was killed");
        armed(&mut host, "");
        host.with(async |client| {
            let (k, _) = client.open_kernel("k").await.unwrap();
            // The restore is finished before anything runs: its options are recorded with it.
            crate::support::out(&k, "echo settled").await;
            assert_eq!(content(&k, "report").await, "first", "{point}");
            assert_eq!(states(&k).await, [Superseded], "{point}");
            let steps = k.workflow().await.unwrap().steps;
            assert!(steps[0].completed_at_ms.is_none(), "{point}: {steps:?}");
            k.undo(0).await.unwrap();
            assert_eq!(content(&k, "report").await, "second", "{point}");
            assert_eq!(states(&k).await, [Open], "{point}");
            assert!(k.workflow().await.unwrap().steps[0].completed_at_ms.is_some(), "{point}");
        });
    }
}
