//! Each guarantee of a restore, by name.

use ryokan::core::checkpoint::CheckpointType;
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::workflow::DecisionState::{Locked, Open, Superseded};
use ryokan::core::workflow::Options;

use super::{artifacts, checkpoints, content, named, put, states};
use crate::support::{Host, kernel, out, users};

#[test]
fn workflow_state_restored() {
    for user in users() {
        let mut host = Host::start_as(user);
        for engine in [EngineName::Kaish, EngineName::Python] {
            host.with(async |client| {
                let k = kernel(&client, engine.name(), engine).await;
                out(&k, "x=1").await;
                k.hand_over("planner", "", 0).await.unwrap();
                k.begin_step("gather", 0).await.unwrap();
                k.complete_step(0).await.unwrap();
                k.begin_step("write", 0).await.unwrap();
                let then = k.workflow().await.unwrap();
                let taken = k.checkpoint(&named("then")).await.unwrap();
                assert_eq!((taken.step, taken.step_name.as_str(), taken.agent.as_str()), (2, "write", "planner"));
                out(&k, "x=2").await;
                k.complete_step(0).await.unwrap();
                k.hand_over("reviewer", "look at the end", 0).await.unwrap();
                k.begin_step("review", 0).await.unwrap();
                let later = k.workflow().await.unwrap();
                assert_eq!((later.steps.len(), later.agent.as_str()), (3, "reviewer"));
                let version = k.info().await.unwrap().version;
                let done = k.restore_checkpoint("then", 0).await.unwrap();
                assert!(done.version > version);
                assert_eq!(
                    k.workflow().await.unwrap(),
                    then,
                    "{user:?} {engine:?}: steps and agent are what they were"
                );
                let show = if engine == EngineName::Kaish { "echo $x" } else { "print(x)" };
                assert_eq!(out(&k, show).await, "1");
                // The work continues from there, and an undo leads back.
                assert_eq!(k.begin_step("another", 0).await.unwrap_err().reason, "step_open");
                k.undo(0).await.unwrap();
                assert_eq!(k.workflow().await.unwrap(), later, "{user:?} {engine:?}: undone");
            });
        }
        host.kill();
        host.launch();
        host.with(async |client| {
            let (k, _) = client.open_kernel("kaish").await.unwrap();
            assert_eq!(k.workflow().await.unwrap().agent, "reviewer", "{user:?}: it outlives the daemon");
        });
    }
}

#[test]
fn decisions_are_superseded_only_when_asked() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        k.open_decision("before", "", "", 0).await.unwrap();
        k.checkpoint(&named("then")).await.unwrap();
        k.lock_decision(1, 0).await.unwrap();
        k.open_decision("after, open", "", "", 0).await.unwrap();
        k.open_decision("after, locked", "", "", 0).await.unwrap();
        k.lock_decision(3, 0).await.unwrap();
        let plain = k.restore_checkpoint("then", 0).await.unwrap();
        assert_eq!(plain.decisions_changed, 0);
        assert_eq!(states(&k).await, [Locked, Open, Locked], "only requested changes are made");
        let asked = Options { supersede_decisions: true, ..Options::default() };
        let done = k.restore_with("then", asked, 0).await.unwrap();
        assert_eq!(done.decisions_changed, 2);
        assert_eq!(states(&k).await, [Locked, Superseded, Superseded], "earlier decisions are unchanged");
        k.undo(0).await.unwrap();
        assert_eq!(states(&k).await, [Locked, Open, Locked], "an undo takes the marks back");
        k.undo(0).await.unwrap();
        assert_eq!(states(&k).await, [Locked, Superseded, Superseded], "and once more sets them again");
        // A restore does not revert a manual superseding.
        k.undo(0).await.unwrap();
        k.supersede_decision(2, 0).await.unwrap();
        k.undo(0).await.unwrap();
        k.undo(0).await.unwrap();
        assert_eq!(states(&k).await[1], Superseded);
    });
}

#[test]
fn artifacts_are_reverted_only_when_asked() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        put(&k, "report", "first").await;
        put(&k, "same", "same").await;
        k.checkpoint(&named("then")).await.unwrap();
        put(&k, "report", "second").await;
        put(&k, "new", "new").await;
        let plain = k.restore_checkpoint("then", 0).await.unwrap();
        assert_eq!((plain.artifacts_changed, content(&k, "report").await.as_str()), (0, "second"));
        let asked = Options { with_artifacts: true, ..Options::default() };
        let done = k.restore_with("then", asked, 0).await.unwrap();
        assert_eq!(done.artifacts_changed, 2, "an unchanged artifact gets no version");
        assert_eq!(content(&k, "report").await, "first");
        let report = artifacts(&k, "report").await;
        let shown: Vec<_> = report.iter().map(|one| (one.version, one.reverts_to)).collect();
        assert_eq!(shown, [(3, 1), (2, 0), (1, 0)], "one more version, and none removed");
        let gone = k.artifact("new", 0).await.err().unwrap();
        assert_eq!((gone.code, gone.reason.as_str()), (ErrorCode::NotFound, "withdrawn"));
        assert!(k.artifact("new", 1).await.is_ok(), "its former version still exists");
        k.undo(0).await.unwrap();
        assert_eq!((content(&k, "report").await, content(&k, "new").await), ("second".into(), "new".into()));
        assert_eq!(artifacts(&k, "same").await.len(), 1);
    });
}

#[test]
fn audit_and_messages_never_restored() {
    let host = Host::start();
    let audit = || -> Vec<String> { host.ok(&["audit", "--json"]).lines().map(String::from).collect() };
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        k.checkpoint(&named("then")).await.unwrap();
        k.message("user", "remember this").await.unwrap();
        k.open_decision("decided", "", "", 0).await.unwrap();
        put(&k, "report", "text").await;
        let journal = async || {
            let mut all = Vec::new();
            let each = k.each_journal_entry(0, 0, async |entry| {
                all.push((entry.sequence, entry.text));
                Ok(())
            });
            each.await.unwrap();
            all
        };
        let (said, logged) = (journal().await, audit());
        let everything = Options { supersede_decisions: true, with_artifacts: true, with_memory: false };
        k.restore_with("then", everything, 0).await.unwrap();
        k.undo(0).await.unwrap();
        let (said_now, logged_now) = (journal().await, audit());
        assert!(said_now.starts_with(&said), "{said:?} {said_now:?}");
        assert!(logged_now.starts_with(&logged) && logged_now.len() > logged.len(), "{logged:?} {logged_now:?}");
        assert_eq!(logged_now.iter().filter(|line| line.contains("\"checkpoint.restore\"")).count(), 2);
        assert!(said_now.iter().any(|(_, text)| text == "user: remember this"));
    });
}

#[test]
fn safety_checkpoint_is_atomic() {
    let mut host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        out(&k, "x=1").await;
        let then = k.checkpoint(&named("then")).await.unwrap();
        out(&k, "x=2").await;
        let done = k.restore_checkpoint("then", 0).await.unwrap();
        let all = checkpoints(&k).await;
        assert_eq!((all.len(), all[0].id, all[0].kind), (2, done.safety, CheckpointType::System));
        assert_eq!((all[0].parent, all[1].id), (Some(then.id), then.id));
        // A refused restore leaves no safety checkpoint.
        k.restore_checkpoint("nowhere", 0).await.unwrap_err();
        k.restore_checkpoint("then", 1).await.unwrap_err();
        assert_eq!(checkpoints(&k).await.len(), 2);
    });
    // A restore whose end cannot be recorded did not happen, and undo refers to the previous restore.
    host.kill();
    host.env(ryokan::sys::fault::VARIABLE, "state.restore.finish.before_commit=eio");
    host.launch();
    host.with(async |client| {
        let (k, _) = client.open_kernel("k").await.unwrap();
        out(&k, "x=3").await;
        k.begin_step("kept", 0).await.unwrap();
        let asked = Options { supersede_decisions: true, with_artifacts: true, with_memory: false };
        k.restore_with("then", asked, 0).await.unwrap_err();
        assert_eq!(out(&k, "echo $x").await, "3");
        assert_eq!(k.workflow().await.unwrap().steps.len(), 1, "the work is as it was, too");
        k.undo(0).await.unwrap();
        assert_eq!(out(&k, "echo $x").await, "2", "undo reverts the last completed restore");
        assert!(k.workflow().await.unwrap().steps.is_empty());
    });
}

#[test]
fn foreign_checkpoint_refused() {
    let host = Host::start();
    host.with(async |client| {
        let mine = kernel(&client, "mine", EngineName::Kaish).await;
        let other = kernel(&client, "other", EngineName::Kaish).await;
        let taken = other.checkpoint(&named("theirs")).await.unwrap();
        for reference in [taken.id.to_string(), "theirs".into()] {
            let error = mine.restore_checkpoint(&reference, 0).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::NotFound, "{error:?}");
        }
        assert!(checkpoints(&mine).await.is_empty());
    });
}
