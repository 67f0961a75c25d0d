//! Checkpoints and restores are queued, and never half taken.

use std::time::Duration;

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};

use super::log;
use crate::support::{Host, eventually, kernel, out, users};

fn named(name: &str) -> CheckpointRequest {
    CheckpointRequest::new(CheckpointType::Manual, name)
}

#[test]
fn checkpoint_waits_until_deadline() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let running = k.run(&ExecRequest::code("sleep 30; x=late")).await.unwrap();
        let short = CheckpointRequest { wait: Duration::from_millis(200), ..named("short") };
        assert_eq!(k.checkpoint(&short).await.unwrap_err().code, ErrorCode::Deadline);
        // It is not taken later either.
        k.interrupt_execution(running.exec()).await.unwrap();
        running.result().await.unwrap();
        out(&k, "echo").await;
        assert_eq!(log(&host, "k").len(), 0);
        let running = k.run(&ExecRequest::code("sleep 0.5; x=done")).await.unwrap();
        k.checkpoint(&named("waited")).await.unwrap();
        assert_eq!(running.result().await.unwrap().end.status, ExecStatus::Done);
        out(&k, "x=changed").await;
        k.restore_checkpoint("waited", 0).await.unwrap();
        assert_eq!(out(&k, "echo $x").await, "done");
        let running = k.run(&ExecRequest::code("sleep 30")).await.unwrap();
        k.checkpoint(&CheckpointRequest { interrupt: true, ..named("at once") }).await.unwrap();
        assert_eq!(running.result().await.unwrap().end.status, ExecStatus::Interrupted);
    });
}

#[test]
fn stale_version_rejects_restore() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        k.checkpoint(&named("one")).await.unwrap();
        let version = k.info().await.unwrap().version;
        let stale = CheckpointRequest { expected_version: version - 1, ..named("two") };
        assert_eq!(k.checkpoint(&stale).await.unwrap_err().code, ErrorCode::Conflict);
        assert_eq!(k.restore_checkpoint("one", version - 1).await.unwrap_err().code, ErrorCode::Conflict);
        assert_eq!(k.info().await.unwrap().version, version);
        k.restore_checkpoint("one", version).await.unwrap();
    });
}

#[test]
fn concurrent_restores_conflict() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        out(&k, "x = 1").await;
        k.checkpoint(&named("one")).await.unwrap();
        let (first, second) = futures::join!(k.restore_checkpoint("one", 0), k.restore_checkpoint("one", 0));
        let codes: Vec<_> = [&first, &second].iter().map(|r| r.as_ref().err().map(|e| e.code)).collect();
        assert!(codes.contains(&None) && codes.contains(&Some(ErrorCode::Conflict)), "{codes:?}");
        assert_eq!(out(&k, "print(x)").await, "1");
    });
}

#[test]
fn workspace_quiesced_during_capture() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Python).await;
            // A child writes the same number to two files, one after the other, as fast as it can.
            let busy = "import subprocess\nchild = subprocess.Popen(['python3', '-c', '''\nimport itertools\n\
                        for n in itertools.count():\n    open('a', 'w').write(str(n))\n    open('b', 'w').write(str(n))\n'''])\n\
                        import os, time\nwhile not os.path.exists('b'): time.sleep(0.05)";
            out(&k, busy).await;
            for round in 0..5 {
                k.checkpoint(&named(&format!("c{round}"))).await.unwrap();
            }
            // A file is empty for a moment while it is rewritten.
            out(&k, "def read(name):\n    while not (text := open(name).read()): pass\n    return text").await;
            let before = out(&k, "print(read('b'))").await;
            eventually("it continues afterwards", async || out(&k, "print(read('b'))").await != before).await;
            out(&k, "child.kill(); child.wait()").await;
            for round in 0..5 {
                k.restore_checkpoint(&format!("c{round}"), 0).await.unwrap();
                let read = out(&k, "print(open('a').read() or '-', open('b').read() or '-')").await;
                let numbers: Vec<Option<i64>> = read.split(' ').map(|n| n.trim().parse().ok()).collect();
                // One file may be empty for a moment; otherwise the two are at most one step apart.
                if let [Some(a), Some(b)] = numbers[..] {
                    assert!(a == b || a == b + 1, "{user:?}: {read}");
                }
            }
        });
    }
}

#[test]
fn vfork_parent_allows_checkpoint() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        // The parent of a `vfork` blocks, and cannot be stopped, until its child exits or execs.
        let program = "import ctypes\nlibc = ctypes.CDLL(None)\nif libc.vfork() == 0:\n    libc.pause()\n";
        out(&k, &format!("import subprocess, time\nchild = subprocess.Popen(['python3', '-c', {program:?}])")).await;
        // Reads of files block for moments only.
        let blocks = "blocked = 0\nfor _ in range(3000):\n    \
            state = open(f'/proc/{child.pid}/stat').read().rpartition(')')[2].split()[0]\n    \
            blocked = blocked + 1 if state == 'D' else 0\n    \
            if blocked == 10: break\n    time.sleep(0.05)\nassert blocked == 10, state";
        out(&k, blocks).await;
        k.checkpoint(&named("one")).await.unwrap();
        k.restore_checkpoint("one", 0).await.unwrap();
    });
}

#[test]
fn stop_waits_for_running_checkpoint() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        out(&k, "for n in range(3000): open(f'f{n}', 'w').write(str(n) * 100)").await;
        let taking = named("one");
        let stopped = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            k.stop(false).await
        };
        let (taken, stopped) = futures::join!(k.checkpoint(&taking), stopped);
        stopped.unwrap();
        taken.unwrap();
        assert_eq!(k.info().await.unwrap().state, "stopped");
    });
}

#[test]
fn mount_waits_for_running_restore() {
    let host = Host::start();
    std::fs::create_dir(host.path("given")).unwrap();
    let given = host.path("given").display().to_string();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        out(&k, "for n in range(2000): open(f'f{n}', 'w').write('x')").await;
        k.checkpoint(&named("one")).await.unwrap();
        out(&k, "import os\nfor n in range(2000): os.remove(f'f{n}')").await;
        let mounted = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            k.mount_at("/given", &given, false, 0).await
        };
        let (restored, mounted) = futures::join!(k.restore_checkpoint("one", 0), mounted);
        restored.unwrap();
        let there = async || k.mounts().await.unwrap().iter().any(|mount| mount.path == "/given");
        match mounted {
            Err(error) => assert_eq!((error.code, there().await), (ErrorCode::Conflict, false)),
            // Before or after the restore: the effect is there, or was undone by the restore.
            Ok(()) if there().await => {}
            Ok(()) => {
                k.undo(0).await.unwrap();
                assert!(there().await, "an acknowledged mount is gone");
            }
        }
    });
}
