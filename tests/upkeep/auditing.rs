//! The audit log: actors and actions are recorded and chained, and tampering is detected.

use ryokan::core::audit::AuditLine;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::rights::Right;
use ryokan::core::value::Value;
use ryokan::rpc::client::HostClient;
use ryokan::session::Session as _;

use super::{edit, gc, host, manual};
use crate::support::{Host, User, kernel, out, users};

async fn lines(client: &HostClient, kernel: &str) -> Vec<AuditLine> {
    let mut lines = Vec::new();
    let reported = client.audit(kernel, 0, 0, async |line| {
        lines.push(line);
        Ok(())
    });
    reported.await.expect("the log");
    lines
}

/// Operations on state and rights, and their refusals.
#[test]
fn state_operations_audited() {
    let host = host(User::Own);
    host.with(async |client| {
        let (k, other) = (kernel(&client, "k", EngineName::Kaish).await, kernel(&client, "o", EngineName::Kaish).await);
        k.start().await.expect("started");
        k.set_var("x", Value::Int(1)).await.expect("set");
        let state = k.snapshot().await.expect("taken");
        k.restore(&state.data).await.expect("restored");
        let blob = k.write_blob(b"blob").await.expect("written");
        k.grant_blob(blob, &other).await.expect("granted");
        k.stop(false).await.expect("stopped");
        let weak = k.attenuate([Right::Read].into_iter().collect(), "watcher").await.expect("a weaker one");
        assert!(weak.run(&ExecRequest::code("x=2")).await.is_err());
        assert!(weak.set_var("x", Value::Int(2)).await.is_err());
        assert!(weak.snapshot().await.is_err());
        assert!(weak.restore(&state.data).await.is_err());
        assert!(weak.stop(false).await.is_err());
        let all = lines(&client, "k").await;
        let count = |action: &str, outcome: &str| {
            all.iter().filter(|line| line.what.action == action && line.what.outcome == outcome).count()
        };
        for action in ["start", "set_var", "snapshot", "restore_state", "grant_blob", "stop", "attenuate"] {
            assert_eq!(count(&format!("kernel.{action}"), "done"), 1, "{action} in {all:#?}");
        }
        for action in ["run", "set_var", "snapshot", "restore_state", "stop"] {
            assert_eq!(count(&format!("kernel.{action}"), "refused"), 1, "{action} in {all:#?}");
        }
        let set = all.iter().find(|line| line.what.action == "kernel.set_var").unwrap();
        assert!(set.what.version_before < set.what.version_after, "{set:?}");
    });
}

#[test]
fn kernel_changes_audited() {
    for user in users() {
        let host = host(user);
        std::fs::create_dir(host.path("given")).unwrap();
        let given = host.path("given").display().to_string();
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Kaish).await;
            let one = manual(&k, "one").await;
            out(&k, "x=1").await;
            k.mount_at("/given", &given, false, 0).await.expect("mounted");
            k.restore_checkpoint("one", 0).await.expect("restored");
            k.undo(0).await.expect("undone");
            k.pin_checkpoint("one", true).await.expect("pinned");
            k.unmount_at("/given", 0).await.expect("unmounted");
            let lease = k.lease("me", std::time::Duration::from_secs(60), &[]).await.expect("leased");
            assert!(
                k.checkpoint(&super::taking(ryokan::core::checkpoint::CheckpointType::Manual, "no")).await.is_err()
            );
            lease.release().await.expect("released");
            let weak = k.attenuate([Right::Read].into_iter().collect(), "watcher").await.expect("a weaker one");
            assert!(weak.restore_checkpoint("one", 0).await.is_err());
            assert!(k.restore_checkpoint("nothing", 0).await.is_err());
            k.set_retention(&ryokan::core::retention::Retention { newest: Some(5), keep_for_ms: None }, 0)
                .await
                .expect("set");
            gc(&client, false).await;
            assert!(client.create_kernel(&crate::support::spec("k", EngineName::Kaish), "").await.is_err());
            let all = lines(&client, "").await;
            let found = |action: &str, outcome: &str| {
                all.iter().filter(|line| line.what.action == action && line.what.outcome == outcome).collect::<Vec<_>>()
            };
            for action in [
                "kernel.create",
                "kernel.mount",
                "kernel.unmount",
                "kernel.lease",
                "kernel.lease_release",
                "checkpoint.pin",
                "kernel.retention",
                "host.gc",
            ] {
                assert_eq!(found(action, "done").len(), 1, "{user:?}: {action} in {all:#?}");
            }
            assert_eq!(found("checkpoint.create", "done").len(), 3, "one of its own, two before restores");
            let restored = found("checkpoint.restore", "done");
            assert_eq!(restored.len(), 2);
            assert_eq!(restored[0].what.manifest, Some(one.manifest), "the line names the restored manifest");
            let (before, after) = (restored[0].what.version_before.unwrap(), restored[0].what.version_after.unwrap());
            assert!(before < after, "{before} {after}");
            assert_eq!(found("checkpoint.create", "busy").len(), 1, "refused for the lease");
            assert_eq!(found("checkpoint.restore", "notFound").len(), 1);
            assert_eq!(found("kernel.create", "alreadyExists").len(), 1);
            let refused = found("checkpoint.restore", "refused");
            assert_eq!((refused.len(), refused[0].what.client.as_str()), (1, "test/watcher"));
            // Of one kernel only, even after its removal.
            let id = k.info().await.expect("info").id.to_string();
            assert!(lines(&client, "k").await.iter().all(|line| line.what.kernel == id));
            client.remove_kernel("k", 0).await.expect("removed");
            assert_eq!(lines(&client, &id[..10]).await, lines(&client, &id).await);
            let unknown = client.audit("k", 0, 0, async |_| Ok(())).await.expect_err("no such name any more");
            assert!(unknown.hint.contains("the beginning of its id"), "{unknown:?}");
            assert_eq!(
                lines(&client, &id).await.last().map(|line| line.what.action.clone()),
                Some("kernel.remove".into())
            );
            assert_eq!(
                all.iter().map(|line| line.sequence).collect::<Vec<_>>(),
                (1..=all.len() as u64).collect::<Vec<_>>()
            );
        });
        let said = host.ok(&["audit", "--verify"]);
        assert!(said.contains("intact"), "{said}");
    }
}

/// A host with some history whose daemon has stopped, and the head of its log.
fn history() -> (Host, String) {
    let mut host = host(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        for n in 0..6 {
            out(&k, &format!("x={n}")).await;
            manual(&k, &format!("c{n}")).await;
        }
    });
    let proof: serde_json::Value = serde_json::from_str(&host.ok(&["audit", "--verify", "--json"])).unwrap();
    assert_eq!((&proof["whole"], &proof["lines"]), (&true.into(), &7.into()));
    host.kill();
    (host, proof["head"].as_str().unwrap().to_owned())
}

const OPEN: &str = "DROP TRIGGER audit_is_not_deleted; DROP TRIGGER audit_is_not_changed;";

/// Verification result after the log was changed.
fn broken_at(host: &mut Host, sql: &str, args: &[&str]) -> Option<u64> {
    let path = host.data().join("catalog.db");
    edit(&path, &format!("{OPEN}{sql}"));
    host.launch();
    let output = host.cli(&[&["audit", "--verify", "--json"], args].concat());
    let proof: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(if proof["whole"] == true { 0 } else { 1 }), "{proof}");
    proof["broken_at"].as_u64()
}

#[test]
fn audit_tampering_located() {
    for (sql, line) in [
        ("UPDATE audit SET outcome = 'refused' WHERE sequence = 3", 3),
        ("UPDATE audit SET manifest = zeroblob(32) WHERE sequence = 4", 4),
        ("DELETE FROM audit WHERE sequence = 2", 2),
        (
            "UPDATE audit SET sequence = -1 WHERE sequence = 5; UPDATE audit SET sequence = 5 WHERE sequence = 6; UPDATE audit SET sequence = 6 WHERE sequence = -1",
            5,
        ),
    ] {
        let (mut host, _) = history();
        assert_eq!(broken_at(&mut host, sql, &[]), Some(line), "{sql}");
    }
}

#[test]
fn audit_truncation_detected() {
    // The newest checkpoint covers all lines except the one about itself.
    let (mut host, head) = history();
    let _ = std::fs::remove_file(host.data().join("audit.head"));
    assert_eq!(broken_at(&mut host, "DELETE FROM audit WHERE sequence > 4", &[]), Some(5));
    host.kill();
    let (mut host, _) = {
        drop(host);
        history()
    };
    let _ = std::fs::remove_file(host.data().join("audit.head"));
    assert_eq!(
        broken_at(&mut host, "DELETE FROM audit WHERE sequence > 6", &[]),
        None,
        "a missing last line is not detected"
    );
    let output = host.cli(&["audit", "--verify", "--known", &head]);
    assert_eq!(output.status.code(), Some(1), "except with a copy of the head");
    // The daemon writes the head to a file when it stops.
    let mut host = super::host(User::Own);
    host.ok(&["new", "k"]);
    host.signal(nix::sys::signal::Signal::SIGTERM);
    host.wait();
    assert!(std::fs::read_to_string(host.data().join("audit.head")).unwrap().starts_with("1:"));
    assert_eq!(broken_at(&mut host, "DELETE FROM audit", &[]), Some(1));
    // A log that was restarted and has grown since does not match the file.
    for name in ["a", "b", "c"] {
        host.ok(&["new", name]);
    }
    host.signal(nix::sys::signal::Signal::SIGTERM);
    host.wait();
    host.launch();
    assert_eq!(host.cli(&["audit", "--verify"]).status.code(), Some(1));
}
