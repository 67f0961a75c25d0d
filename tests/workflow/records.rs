//! The records themselves: order, versions, keys, rights, and their checkpoints.

use ryokan::core::checkpoint::CheckpointType::{self, Auto, Conflict, Manual};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::rights::Right;
use ryokan::core::workflow::DecisionState::{Locked, Open, Superseded};
use ryokan::core::workflow::Source;

use super::{artifacts, checkpoints, content, decisions, named, put, states};
use crate::support::{Host, kernel, out, users};

#[test]
fn workflow_checkpoints() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        k.message("user", "hello").await.unwrap();
        k.begin_step("one", 0).await.unwrap();
        k.open_decision("a", "why", "", 0).await.unwrap();
        put(&k, "report", "text").await;
        out(&k, "echo chatter").await;
        assert!(checkpoints(&k).await.is_empty(), "nothing of that is a boundary");
        let (step, taken) = k.complete_step(0).await.unwrap();
        assert!(step.completed_at_ms.is_some());
        assert_eq!((taken.kind, taken.name.as_str(), taken.step), (Auto, "step 1 completed: one", 1));
        let (decision, before) = k.lock_decision(1, 0).await.unwrap();
        assert_eq!((decision.state, before.kind), (Locked, Auto));
        let handed = k.hand_over("reviewer", "please look", 0).await.unwrap();
        assert_eq!((handed.kind, handed.agent.as_str()), (Auto, "reviewer"));
        k.checkpoint(&ryokan::core::checkpoint::CheckpointRequest::new(Conflict, "two opinions")).await.unwrap();
        let kinds: Vec<CheckpointType> = checkpoints(&k).await.into_iter().map(|one| one.kind).collect();
        assert_eq!(kinds, [Conflict, Auto, Auto, Auto]);
        // The checkpoint before a decision holds it open; the checkpoint of a step holds the step completed.
        k.restore_checkpoint(&before.id.to_string(), 0).await.unwrap();
        assert_eq!(k.workflow().await.unwrap().agent, "");
        assert_eq!(states(&k).await, [Locked], "and restoring alone changes no decision");
        assert!(k.workflow().await.unwrap().steps[0].completed_at_ms.is_some());
        // A refused change takes no checkpoint.
        let there = checkpoints(&k).await.len();
        for error in [
            k.complete_step(0).await.err().unwrap(),
            k.lock_decision(1, 0).await.err().unwrap(),
            k.hand_over("reviewer", "", 1).await.err().unwrap(),
        ] {
            assert_eq!(error.code, ErrorCode::Conflict, "{error:?}");
        }
        assert_eq!(k.lock_decision(9, 0).await.err().unwrap().code, ErrorCode::NotFound);
        assert_eq!(checkpoints(&k).await.len(), there);
    });
}

#[test]
fn workflow_changes_bump_version() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Python).await;
            let version = async || k.info().await.unwrap().version;
            let start = version().await;
            k.begin_step("one", start).await.unwrap();
            assert_eq!(version().await, start + 1);
            let stale = k.open_decision("late", "", "", start).await.unwrap_err();
            assert_eq!(stale.code, ErrorCode::Conflict, "{stale:?}");
            let opened = k.open_decision("which way", "left", "key", start + 1).await.unwrap();
            // A retry with the former version returns the same decision and changes nothing.
            let again = k.open_decision("which way", "left", "key", start + 1).await.unwrap();
            assert_eq!((opened.id, again.id, version().await), (1, 1, start + 2));
            let misused = k.message_once("user", "text", "key", 0).await.unwrap_err();
            assert_eq!(misused.code, ErrorCode::AlreadyExists, "{misused:?}");
            let said = k.message_once("user", "text", "said", 0).await.unwrap();
            assert_eq!(k.message_once("user", "text", "said", 7).await.unwrap(), said);
            k.supersede_decision(1, 0).await.unwrap();
            assert_eq!(states(&k).await, [Superseded]);
            let mut texts = Vec::new();
            let each = k.each_journal_entry(start - 1, 0, async |entry| {
                texts.push(entry.text);
                Ok(())
            });
            each.await.unwrap();
            assert_eq!(
                texts,
                ["step 1 begun: one", "decision 1 opened: which way", "user: text", "decision 1 superseded: which way"]
            );
            assert_eq!(version().await, start + 4);
        });
    }
}

#[test]
fn artifacts_have_versions_by_content() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Python).await;
            let other = kernel(&client, "other", EngineName::Kaish).await;
            let first = put(&k, "report", "first").await;
            assert_eq!((first.version, first.bytes, first.content_type.as_str()), (1, 5, "text/plain"));
            assert_eq!(put(&k, "report", "first").await.version, 1, "the same again is no other version");
            out(&k, "import os; os.mkdir('d'); open('d/second', 'w').write('second')").await;
            let file = |path: &str| Source::File(path.as_bytes().to_vec());
            let second = k.put_artifact("report", &file("/workspace/d/second"), "text/plain", "", 0).await.unwrap();
            assert_eq!((second.version, content(&k, "report").await.as_str()), (2, "second"));
            let back = k.revert_artifact("report", 1, 0).await.unwrap();
            assert_eq!((back.version, back.reverts_to, back.hash), (3, 1, first.hash));
            assert_eq!(k.revert_artifact("report", 1, 0).await.unwrap_err().code, ErrorCode::Conflict);
            assert_eq!(k.revert_artifact("report", 9, 0).await.unwrap_err().code, ErrorCode::NotFound);
            assert_eq!(artifacts(&k, "report").await.len(), 3);
            assert_eq!(artifacts(&k, "").await.len(), 1);
            // Only blobs that the kernel may read, and only files of its workspace.
            let stolen = other.put_artifact("stolen", &Source::Blob(first.hash.unwrap()), "", "", 0).await.unwrap_err();
            assert_eq!(stolen.code, ErrorCode::NotFound, "{stolen:?}");
            out(&k, "os.symlink('/etc/passwd', 'link')").await;
            for path in ["link", "../state.db", "/etc/passwd", "d", "nowhere"] {
                assert!(k.put_artifact("x", &file(path), "", "", 0).await.is_err(), "{user:?} {path}");
            }
        });
        assert_eq!(host.ok(&["work", "artifact", "get", "k", "report"]), "first");
        assert_eq!(host.ok(&["work", "artifact", "get", "k", "report", "--version", "2"]), "second");
        std::fs::write(host.path("home").join("f"), "from a file").unwrap();
        host.ok(&[
            "work",
            "artifact",
            "put",
            "k",
            "notes",
            host.path("home").join("f").to_str().unwrap(),
            "--type",
            "text/plain",
        ]);
        assert!(host.ok(&["work", "artifact", "ls", "k"]).contains("notes"));
    }
}

#[test]
fn workflow_records_require_right() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        k.open_decision("a", "", "", 0).await.unwrap();
        put(&k, "report", "text").await;
        let weak = k.attenuate([Right::Read].into_iter().collect(), "reader").await.unwrap();
        assert_eq!(weak.workflow().await.unwrap().steps.len(), 0);
        assert_eq!((decisions(&weak).await.len(), content(&weak, "report").await.as_str()), (1, "text"));
        for error in [
            weak.begin_step("no", 0).await.err().unwrap(),
            weak.complete_step(0).await.err().unwrap(),
            weak.hand_over("no", "", 0).await.err().unwrap(),
            weak.open_decision("no", "", "", 0).await.err().unwrap(),
            weak.lock_decision(1, 0).await.err().unwrap(),
            weak.supersede_decision(1, 0).await.err().unwrap(),
            weak.revert_artifact("report", 1, 0).await.err().unwrap(),
        ] {
            assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Refused, "rights"), "{error:?}");
        }
        let writer = k.attenuate([Right::Write].into_iter().collect(), "writer").await.unwrap();
        writer.begin_step("yes", 0).await.unwrap();
        assert!(writer.workflow().await.is_err());
        // A lease protects the records, too.
        let lease = k.lease("me", std::time::Duration::from_secs(60), &[]).await.unwrap();
        assert_eq!(k.begin_step("no", 0).await.unwrap_err().reason, "lease");
        lease.release().await.unwrap();
        assert_eq!(states(&k).await, [Open]);
        let taken = k.checkpoint(&named("manual")).await.unwrap();
        assert_eq!((taken.kind, taken.step), (Manual, 1));
    });
}

#[test]
fn cli_workflow_commands() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    assert!(host.ok(&["work", "step", "begin", "k", "gather"]).contains("step 1 gather current"));
    assert_eq!(host.cli(&["work", "step", "begin", "k", "more"]).status.code(), Some(4));
    let done: serde_json::Value = serde_json::from_str(&host.ok(&["work", "step", "complete", "k", "--json"])).unwrap();
    assert_eq!((done["step"]["index"].as_u64(), done["checkpoint"]["type"].as_str()), (Some(1), Some("auto")));
    host.ok(&["work", "handoff", "k", "writer", "-m", "your turn"]);
    assert!(host.ok(&["work", "step", "ls", "k"]).contains("agent: writer"));
    host.ok(&["work", "decision", "open", "k", "use SQLite", "-m", "it is everywhere"]);
    host.ok(&["work", "decision", "lock", "k", "1"]);
    assert!(host.ok(&["work", "decision", "show", "k", "1"]).contains("it is everywhere"));
    let all: serde_json::Value = serde_json::from_str(&host.ok(&["work", "decision", "ls", "k", "--json"])).unwrap();
    assert_eq!((all[0]["state"].as_str(), all[0]["agent"].as_str()), (Some("locked"), Some("writer")));
    host.ok(&["checkpoint", "k", "--conflict", "-m", "two ways"]);
    host.ok(&["work", "decision", "supersede", "k", "1"]);
    assert_eq!(host.cli(&["work", "decision", "lock", "k", "1"]).status.code(), Some(4));
    assert_eq!(host.cli(&["work", "decision", "show", "k", "7"]).status.code(), Some(3));
    let log = host.ok(&["log", "k"]);
    assert!(log.contains("conflict") && log.contains("before decision 1 is locked: use SQLite"), "{log}");
    let stat = host.ok(&["diff", "k", "step 1 completed: gather", "--stat"]);
    assert!(stat.contains("agent: 1 added") && stat.contains("decision: 1 added"), "{stat}");
    let reported = host.ok(&["diff", "k", "step 1 completed: gather"]);
    assert!(reported.contains("+ 1  use SQLite (superseded) (decision)"), "{reported}");
    let back =
        host.ok(&["restore", "k", "step 1 completed: gather", "--supersede-decisions", "--with-artifacts", "--yes"]);
    assert!(back.contains("k is at"), "{back}");
    assert!(!host.ok(&["work", "step", "ls", "k"]).contains("writer"));
}
