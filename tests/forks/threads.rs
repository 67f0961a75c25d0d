//! Threads: a state of their own in the workspace of another kernel.

use std::time::Duration;

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::fork::Forking;
use ryokan::rpc::client::KernelClient;

use super::{folders, show};
use crate::support::{Host, User, eventually, kernel, out, users};

fn named(name: &str) -> CheckpointRequest {
    CheckpointRequest::new(CheckpointType::Manual, name)
}

async fn thread(kernel: &KernelClient, name: &str, engine: Option<EngineName>) -> KernelClient {
    kernel.thread(&name.parse().unwrap(), engine, "").await.expect("made").0
}

#[test]
fn thread_shares_files_and_mounts() {
    for user in users() {
        let mut host = Host::start_as(user);
        std::fs::create_dir(host.path("given")).unwrap();
        std::fs::write(host.path("given").join("who"), "given").unwrap();
        host.ok(&["new", "k"]);
        host.ok(&["mount", "k", "/given", host.path("given").to_str().unwrap()]);
        host.ok(&["mount", "k", "/workspace/inner", host.path("given").to_str().unwrap()]);
        host.ok(&["exec", "k", "x=1; echo one > f"]);
        host.ok(&["new", "t", "--share", "k"]);
        host.ok(&["new", "py", "--share", "t", "--engine", "python"]);
        for name in ["t", "py"] {
            // A thread of a thread shares the same workspace.
            assert_eq!(show(&host, name)["thread_of"], show(&host, "k")["id"], "{user:?}");
            assert_eq!(show(&host, name)["origin"]["kind"], "original", "{user:?}");
        }
        assert_eq!(
            host.ok(&["exec", "t", "echo ${x:-none} $(cat f /given/who inner/who)"]),
            "none one\ngivengiven\n",
            "{user:?}"
        );
        assert_eq!(host.ok(&["exec", "py", "print(open('f').read(), open('/given/who').read())"]), "one\n given\n");
        host.ok(&["exec", "py", "open('g', 'w').write('from py'); x = 2"]);
        host.ok(&["exec", "t", "x=3; cat g > h"]);
        assert_eq!(host.ok(&["exec", "k", "echo $x $(cat h)"]), "1 from py\n", "{user:?}");
        host.restart();
        assert_eq!(host.ok(&["exec", "t", "echo $x $(cat g)"]), "3 from py\n", "{user:?}: after a restart");
        for name in ["k", "t", "py"] {
            host.ok(&["stop", name]);
        }
        host.restart();
        assert_eq!(host.ok(&["exec", "py", "print(x, open('h').read())"]), "2 from py\n", "{user:?}: all stopped");
        // The mountpoint stays while other sessions may use it.
        host.ok(&["unmount", "k", "/workspace/inner"]);
        assert_eq!(host.ok(&["exec", "t", "cat inner/who"]), "given", "{user:?}");
    }
}

#[test]
fn owner_removal_needs_flag() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "k"]);
        host.ok(&["exec", "k", "echo kept > f"]);
        host.ok(&["new", "t", "--share", "k"]);
        host.ok(&["new", "u", "--share", "t"]);
        let refused = host.cli(&["rm", "k", "--yes"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(4), "{user:?}: {said}");
        assert!(said.contains('t') && said.contains('u') && said.contains("--with-threads"), "{user:?}: {said}");
        assert_eq!(host.ok(&["exec", "k", "cat f"]), "kept\n", "{user:?}");
        // A thread may be removed at any time; its removal affects no other session.
        host.ok(&["rm", "t", "--yes"]);
        assert_eq!(host.ok(&["exec", "u", "cat f"]), "kept\n", "{user:?}");
        let removed = host.ok(&["rm", "k", "--with-threads", "--yes"]);
        assert_eq!(removed, "removed u\nremoved k\n", "{user:?}");
        assert_eq!(folders(&host), 0, "{user:?}");
        // Through the interface, by the capability.
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Kaish).await;
            thread(&k, "t", None).await;
            let refused = k.remove(0).await.unwrap_err();
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Conflict, "threads"));
            client.remove_with_threads("k", 0).await.unwrap();
        });
        assert_eq!(folders(&host), 0, "{user:?}");
    }
}

#[test]
fn threads_quiesced_during_capture() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Python).await;
            let t = thread(&k, "t", None).await;
            // An execution of the thread writes the same number to two files as fast as it can.
            let busy = "import itertools\nfor n in itertools.count():\n    open('a', 'w').write(str(n))\n    open('b', 'w').write(str(n))";
            let running = t.run(&ExecRequest::code(busy)).await.unwrap();
            eventually("the thread writes", || async {
                out(&k, "import os; print(os.path.exists('b'))").await == "True"
            })
            .await;
            for round in 0..5 {
                k.checkpoint(&named(&format!("c{round}"))).await.expect("taken while the thread is frozen");
            }
            let refused = k.restore_checkpoint("c1", 0).await.unwrap_err();
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Conflict, "workspace_busy"), "{user:?}");
            t.interrupt_execution(running.exec()).await.unwrap();
            assert_eq!(running.result().await.unwrap().end.status, ExecStatus::Interrupted, "{user:?}: it ran until the interrupt");
            for round in 0..5 {
                k.restore_checkpoint(&format!("c{round}"), 0).await.unwrap();
                for session in [&k, &t] {
                    let read = out(session, "print(open('a').read() or '-', open('b').read() or '-')").await;
                    let numbers: Vec<Option<i64>> = read.split(' ').map(|n| n.trim().parse().ok()).collect();
                    if let [Some(a), Some(b)] = numbers[..] {
                        assert!(a == b || a == b + 1, "{user:?}: {read}");
                    }
                }
            }
            // Both at once: one after the other, and neither sees a partial change.
            let (one, other) = (named("of k"), named("of t"));
            let (one, other) = futures::join!(k.checkpoint(&one), t.checkpoint(&other));
            assert!(one.is_ok() && other.is_ok(), "{user:?}: {one:?} {other:?}");
        });
    }
}

#[test]
fn thread_restore_keeps_files() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        out(&k, "x=k; echo 1 > f").await;
        let t = thread(&k, "t", None).await;
        out(&t, "x=1").await;
        t.checkpoint(&named("one")).await.unwrap();
        k.checkpoint(&named("both")).await.unwrap();
        out(&t, "x=2; echo 2 > f").await;
        let done = t.restore_checkpoint("one", 0).await.unwrap();
        assert_eq!(out(&t, "echo $x $(cat f)").await, "1 2", "its own state");
        assert!(done.missed.iter().any(|missed| missed.key == "workspace"), "{:?}", done.missed);
        assert_eq!(done.files_changed, 0);
        // The owner of the files restores them, for all sessions, and changes no other session's state.
        k.restore_checkpoint("both", 0).await.unwrap();
        assert_eq!(
            (out(&t, "echo $x $(cat f)").await, out(&k, "echo $x $(cat f)").await),
            ("1 1".into(), "k 1".into())
        );
        k.undo(0).await.unwrap();
        assert_eq!(out(&t, "cat f").await, "2");
        t.undo(0).await.unwrap();
        assert_eq!(out(&t, "echo $x").await, "2");
        // A fork of a thread has its own files.
        let (child, info) = t.fork(&Forking::of("c")).await.unwrap().children.remove(0).1.unwrap();
        assert_eq!(info.thread_of, None);
        out(&child, "echo child > f").await;
        assert_eq!((out(&child, "echo $x $(cat f)").await, out(&k, "cat f").await), ("2 child".into(), "2".into()));
        // A restore blocks the other sessions: an execution requested meanwhile runs after it.
        out(&k, "for i in $(seq 1 500); do echo $i > \"n$i\"; done").await;
        k.checkpoint(&named("many")).await.unwrap();
        out(&k, "rm -f n1 n2 n3; for i in $(seq 4 500); do echo x > \"n$i\"; done").await;
        let asked = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            out(&t, "cat n1 n500 || echo gone").await
        };
        let (restored, seen) = futures::join!(k.restore_checkpoint("many", 0), asked);
        match restored {
            Ok(_) => assert!(seen == "1\n500" || seen.ends_with("gone"), "{seen}"),
            Err(error) => assert_eq!(error.reason, "workspace_busy"),
        }
    });
}

#[test]
fn interrupted_restore_blocks_thread() {
    let mut host = Host::prepare(User::Own);
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        out(&k, "echo 1 > f; echo 1 > g").await;
        let t = thread(&k, "t", None).await;
        out(&t, "x=t").await;
        k.checkpoint(&named("one")).await.unwrap();
        out(&k, "echo 2 > f; echo 2 > g").await;
    });
    for point in
        ["state.transition.begin.after_commit", "workspace.place.rename:2", "state.restore.finish.before_commit"]
    {
        host.kill();
        host.env(ryokan::sys::fault::VARIABLE, &format!("{point}=kill"));
        host.launch();
        assert!(!host.cli(&["restore", "k", "one", "--yes"]).status.success(), "{point}");
        host.kill();
        host.env(ryokan::sys::fault::VARIABLE, "");
        host.launch();
        // The thread makes the first request.
        let seen = host.ok(&["exec", "t", "echo $x $(cat f g)"]);
        assert!(["t 1\n1\n", "t 2\n2\n"].contains(&seen.as_str()), "{point}: between two states: {seen:?}");
        assert_eq!(host.ok(&["exec", "k", "echo t $(cat f g)"]), seen, "{point}");
        host.ok(&["exec", "k", "echo 2 > f; echo 2 > g"]);
    }
}

#[test]
fn thread_creation_key_is_idempotent() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let name = "t".parse().unwrap();
        let first = k.thread(&name, None, "once").await.unwrap().1;
        assert_eq!(k.thread(&name, None, "once").await.unwrap().1.id, first.id);
        assert_eq!(k.thread(&name, None, "").await.err().unwrap().code, ErrorCode::AlreadyExists);
        let mut passing = crate::support::spec("passing", EngineName::Kaish);
        passing.ephemeral = true;
        let passing = client.create_kernel(&passing, "").await.unwrap().0;
        let refused = passing.thread(&"u".parse().unwrap(), None, "").await.err().unwrap();
        assert_eq!(refused.reason, "ephemeral");
        let (child, info) = passing.fork(&Forking::of("stays")).await.unwrap().children.remove(0).1.unwrap();
        assert!(!info.spec.ephemeral, "a fork of it stays");
        assert_eq!(out(&child, "echo here").await, "here");
    });
    assert_eq!(folders(&host), 4);
}

#[test]
fn lease_blocks_mutations() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let (a, b) = (thread(&k, "a", None).await, thread(&k, "b", None).await);
        k.checkpoint(&named("c")).await.unwrap();
        let minute = Duration::from_secs(60);
        let held = b.lease("me", minute, &[]).await.unwrap();
        let refused = client.remove_with_threads("k", 0).await.unwrap_err();
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Busy, "lease"));
        assert_eq!(out(&a, "echo here").await, "here", "nothing was removed before all could be");
        held.release().await.unwrap();
        let refused = client.remove_with_threads("k", 1_000).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Conflict);
        assert_eq!(out(&b, "echo here").await, "here");
        let held = k.lease("me", minute, &[]).await.unwrap();
        let from = Forking { from: "c".into(), ..Forking::of("child") };
        for refused in [
            k.thread(&"t".parse().unwrap(), None, "").await.err(),
            k.fork(&from).await.err(),
            k.pin_checkpoint("c", true).await.err(),
            client.remove_with_threads("k", 0).await.err(),
        ] {
            assert_eq!(refused.map(|error| error.reason).as_deref(), Some("lease"));
        }
        held.release().await.unwrap();
        let late = k.fork(&Forking { expected_version: 1_000, ..from }).await.err().unwrap();
        assert_eq!(late.code, ErrorCode::Conflict);
        client.remove_with_threads("k", 0).await.unwrap();
    });
}
