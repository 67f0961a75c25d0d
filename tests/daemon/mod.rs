//! The daemon as its clients see it: kernels keep their state when any process dies.

mod admission;
mod background_processes;
mod capacity;
mod command;
mod creation;
mod host_paths;
pub mod metrics;
mod shutdown;
pub mod system_wide;
mod upgrade;
mod workspace_limit;

use std::time::Duration;

use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus, OutputEvent};
use ryokan::core::rights::{Right, Rights};
use ryokan::core::spec::AllowedPath;
use ryokan::core::value::Value;
use ryokan::rpc::client::KernelClient;

use crate::session_suite;
use crate::support::{Host, User, WAITS, eventually, kernel, out, run, spec, users};

#[test]
fn kernel_state_survives_stop() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let shell = kernel(&client, "shell", EngineName::Kaish).await;
            assert_eq!(out(&shell, "x=5; echo $x").await, "5");
            assert_eq!(out(&shell, "echo $x").await, "5");
            let python = kernel(&client, "py", EngineName::Python).await;
            let result = run(&python, "y = 20\ny + 1").await;
            assert_eq!(result.end.value, Some(Value::Int(21)), "{:?}", result);
            assert_eq!(out(&python, "print(y * 2)").await, "40");
            for stopped in [&shell, &python] {
                stopped.stop(false).await.expect("stops");
                assert_eq!(stopped.info().await.expect("info").state, "stopped");
            }
            assert_eq!(out(&shell, "echo $x").await, "5", "the next worker has the state");
            assert_eq!(out(&python, "print(y)").await, "20");
        });
    }
}

#[test]
fn socket_session_suite() {
    let host = Host::start();
    host.with(async |client| {
        let shared = host.path("shared");
        std::fs::create_dir(&shared).unwrap();
        std::fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let give = |name: &str| {
            let mut wanted = spec(name, EngineName::Kaish);
            wanted.paths = vec![AllowedPath::new(&shared, true)];
            wanted
        };
        let (session, _) = client.create_kernel(&give("one"), "").await.expect("made");
        let (other, _) = client.create_kernel(&give("two"), "").await.expect("made");
        session_suite::suite(&session, &other, shared.to_str().unwrap()).await;
    });
}

#[test]
fn daemon_kill_loses_nothing() {
    for user in users() {
        let mut host = Host::without_pool(user);
        let (exec, pid) = host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            assert_eq!(out(&shell, "x=before; echo $x").await, "before");
            let code = format!("echo early; /bin/touch up; {WAITS}; echo late; x=after");
            let running = shell.run(&ExecRequest::code(code)).await.expect("accepted");
            let folder = host.workspace(shell.info().await.expect("info").id);
            eventually("it runs", || async { folder.join("up").exists() }).await;
            // The shell that waits has replaced a fork of the worker by then.
            tokio::time::sleep(Duration::from_secs(1)).await;
            (running.exec(), host.workers())
        });
        host.restart();
        assert_eq!(host.workers(), pid, "the worker survives");
        host.with(async |client| {
            let (shell, info) = client.open_kernel("k").await.expect("it is still there");
            assert_eq!(info.state, "busy", "{}", host.log());
            host.release(&shell).await;
            let result = shell.execution(exec).await.expect("known").result().await.expect("a result");
            assert_eq!(result.end.status, ExecStatus::Done);
            assert_eq!(String::from_utf8_lossy(&result.stdout), "early\nlate\n");
            assert_eq!(out(&shell, "echo $x").await, "after");
        });
    }
}

#[test]
fn killed_worker_replaced() {
    let host = Host::start();
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        out(&shell, "x=kept").await;
        let running = shell.run(&ExecRequest::code("sleep 60")).await.expect("accepted");
        eventually("it runs", || async { shell.info().await.expect("info").state == "busy" }).await;
        for pid in host.workers() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL);
        }
        let result = running.result().await.expect("an end");
        assert_eq!(result.end.status, ExecStatus::Lost, "{:?}", result.end);
        assert_eq!(out(&shell, "echo $x").await, "kept");
    });
}

#[test]
fn sighup_keeps_workers() {
    let mut host = Host::without_pool(User::Own);
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        out(&shell, "x=1").await;
    });
    let workers = host.workers();
    host.signal(nix::sys::signal::Signal::SIGHUP);
    assert!(host.wait().success(), "{}", host.log());
    assert_eq!(host.workers(), workers);
    host.launch();
    host.with(async |client| {
        let (shell, _) = client.open_kernel("k").await.expect("it is still there");
        assert_eq!(out(&shell, "echo $x").await, "1");
    });
    assert_eq!(host.workers(), workers);
}

#[test]
fn idle_kernel_stops_and_restarts() {
    let host = Host::without_pool(User::Own);
    host.with(async |client| {
        let mut wanted = spec("k", EngineName::Kaish);
        wanted.idle_timeout_ms = Some(300);
        let (shell, _) = client.create_kernel(&wanted, "").await.expect("made");
        assert_eq!(out(&shell, "x=7; echo $x").await, "7");
        eventually("it is stopped", || async { shell.info().await.expect("info").state == "stopped" }).await;
        assert!(host.workers().is_empty());
        assert_eq!(out(&shell, "echo $x").await, "7");
    });
}

#[test]
fn crash_breaker_opens_and_closes() {
    let host = Host::start();
    host.with(async |client| {
        let python = kernel(&client, "p", EngineName::Python).await;
        let crash = async || {
            let result = run(&python, "import os; os._exit(3)").await;
            assert_eq!(result.end.status, ExecStatus::Lost);
            assert!(result.end.err.contains("status 3"), "{:?}", result.end);
        };
        for _ in 0..3 {
            crash().await;
        }
        // On a slow host, three crashes may take longer than the breaker's window.
        for _ in 0..10 {
            let opens = eventually("the breaker opens", || async {
                python.info().await.expect("info").state_reason.contains("breaker")
            });
            if tokio::time::timeout(Duration::from_secs(10), opens).await.is_ok() {
                break;
            }
            crash().await;
        }
        let refused = python.run(&ExecRequest::code("1")).await.err().expect("the breaker is open");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Refused, "circuit_breaker"));
        python.start().await.expect("starts");
        assert_eq!(out(&python, "print(1)").await, "1");
    });
}

#[test]
fn rights_only_shrink() {
    let host = Host::start();
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        out(&shell, "x=1").await;
        let reader: Rights = [Right::Read].into_iter().collect();
        let weak = shell.attenuate(reader, "reader").await.expect("attenuated");
        assert_eq!(weak.var("x").await.expect("may read"), Value::Int(1));
        let refused = weak.run(&ExecRequest::code("x=2")).await.err().expect("may not execute");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Refused, "rights"));
        let again = weak.attenuate(Rights::ALL, "greedy").await.expect("attenuated");
        assert!(again.put_var("x", &Value::Int(2), 0).await.is_err(), "a dropped right stays dropped");
        let path = shell.publish(reader, "window").await.expect("published");
        let window = KernelClient::connect(&path).await.expect("connects");
        assert_eq!(window.var("x").await.expect("may read"), Value::Int(1));
        assert!(window.stop(true).await.is_err());
        let own = KernelClient::connect(&host.kernel_socket("k")).await.expect("the kernel's own socket");
        assert_eq!(out(&own, "echo $x").await, "1");
    });
}

#[test]
fn versions_and_idempotency_keys() {
    let host = Host::start();
    host.with(async |client| {
        let (first, _) = client.create_kernel(&spec("k", EngineName::Kaish), "key").await.expect("made");
        let (_, again) = client.create_kernel(&spec("k", EngineName::Kaish), "key").await.expect("the same");
        assert_eq!(first.info().await.expect("info").id, again.id);
        let taken = client.create_kernel(&spec("k", EngineName::Kaish), "").await.err().expect("the name is taken");
        assert_eq!(taken.code, ErrorCode::AlreadyExists);
        let version = first.info().await.expect("info").version;
        out(&first, "x=1").await;
        assert_eq!(version, 1, "a new kernel is at 1: 0 means any");
        let stale = first.put_var("x", &Value::Int(2), version).await;
        assert_eq!(stale.expect_err("stale").code, ErrorCode::Conflict);
        let now = first.info().await.expect("info").version;
        first.put_var("x", &Value::Int(2), now).await.expect("the present version");
        let keyed = |code: &str| ExecRequest { key: "once".into(), ..ExecRequest::code(code) };
        let one = first.run(&keyed("echo once >> /workspace/log")).await.expect("accepted");
        one.result().await.expect("a result");
        let two = first.run(&keyed("echo once >> /workspace/log")).await.expect("accepted");
        assert_eq!(one.exec(), two.exec());
        assert_eq!(out(&first, "cat /workspace/log").await, "once");
        // A key with a different request is the client's error: no earlier answer is returned for
        // it.
        let with_input = ExecRequest { stdin: b"x".to_vec(), ..keyed("echo once >> /workspace/log") };
        for other in [keyed("echo twice >> /workspace/log"), with_input] {
            let refused = first.run(&other).await.err().expect("another request");
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Conflict, "key_used"), "{refused:?}");
        }
        let known = ExecRequest { output_limit_bytes: 1 << 10, ..keyed("echo once >> /workspace/log") };
        assert_eq!(first.run(&known).await.expect("the same").exec(), one.exec());
        let refused = client.create_kernel(&spec("other", EngineName::Kaish), "key").await.err().expect("another");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Conflict, "key_used"));
        assert_eq!(out(&first, "cat /workspace/log").await, "once");
    });
}

#[test]
fn lease_excludes_other_clients() {
    let mut host = Host::start();
    let token = host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        let lease = shell.lease("agent", Duration::from_secs(600), &[]).await.expect("taken");
        let busy = shell.run(&ExecRequest::code("echo no")).await.err().expect("leased");
        assert_eq!((busy.code, busy.reason.as_str()), (ErrorCode::Busy, "lease"));
        let mine = lease.kernel().await.expect("a kernel");
        assert_eq!(out(&mine, "echo yes").await, "yes");
        lease.token().to_vec()
    });
    host.restart();
    host.with(async |client| {
        let (shell, _) = client.open_kernel("k").await.expect("there");
        assert!(shell.run(&ExecRequest::code("echo no")).await.is_err(), "a lease survives the daemon");
        let lease = shell.lease("agent", Duration::from_secs(600), &token).await.expect("taken up again");
        assert_eq!(out(&lease.kernel().await.expect("a kernel"), "echo yes").await, "yes");
        lease.release().await.expect("released");
        assert_eq!(out(&shell, "echo free").await, "free");
    });
}

#[test]
fn output_streams_and_replays() {
    let host = Host::start();
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        let code = format!("echo 1; {WAITS}; echo 2; echo 3");
        let running = shell.run(&ExecRequest::code(code)).await.expect("accepted");
        let go = host.workspace(shell.info().await.expect("info").id).join("go");
        let mut seen = Vec::new();
        let reading = running.output(0, async |event| {
            if let OutputEvent::Stdout(data) = event {
                seen.extend(data);
                std::fs::write(&go, "").expect("written");
            }
            Ok(())
        });
        let read = tokio::time::timeout(Duration::from_secs(180), reading).await;
        read.expect("the first line does not wait for the last").expect("delivered");
        assert_eq!(seen, b"1\n2\n3\n");
        let mut again = Vec::new();
        let replay = shell.execution(running.exec()).await.expect("known");
        replay
            .output(2, async |event| {
                if let OutputEvent::Stdout(data) = event {
                    again.extend(data);
                }
                Ok(())
            })
            .await
            .expect("delivered");
        assert_eq!(again, b"2\n3\n");
    });
}

#[test]
fn stop_waits_for_earlier_executions() {
    let host = Host::start();
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        let ask = async |code: &str| shell.run(&ExecRequest::code(code)).await.expect("accepted");
        for before in ["created", "stopped", "ready"] {
            if before == "ready" {
                out(&shell, "echo up").await;
            }
            let (first, second) = (ask("sleep 0.2; x=1").await, ask("x=2; echo $x").await);
            let stop = async { shell.stop(false).await.expect("stops") };
            let after = async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                ask("echo after").await.result().await.expect("a result")
            };
            let ((), after) = tokio::time::timeout(Duration::from_secs(300), futures::future::join(stop, after))
                .await
                .unwrap_or_else(|_| panic!("a stop of a kernel that was {before} is answered"));
            assert_eq!(first.result().await.expect("a result").end.status, ExecStatus::Done);
            assert_eq!(second.result().await.expect("a result").stdout, b"2\n");
            assert_eq!(after.stdout, b"after\n", "a later execution starts the kernel again");
            let forced = [ask("sleep 30").await, ask("echo never").await];
            tokio::time::timeout(Duration::from_secs(300), shell.stop(true)).await.expect("in time").expect("stops");
            assert_eq!(shell.info().await.expect("info").state, "stopped", "nothing queued starts it again");
            for forced in forced {
                let end = forced.result().await.expect("a result").end;
                assert_eq!(end.status, ExecStatus::Interrupted, "{end:?}");
                assert!(end.err.contains("kernel was stopped"), "{end:?}");
            }
        }
    });
}

#[test]
fn queue_moves_to_next_worker() {
    let host = Host::start();
    host.with(async |client| {
        let python = kernel(&client, "p", EngineName::Python).await;
        out(&python, "x = 'kept'").await;
        let stubborn =
            "import time\nwhile True:\n    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass";
        let request = ExecRequest { timeout_ms: 300, ..ExecRequest::code(stubborn) };
        let first = python.run(&request).await.expect("accepted");
        let second = python.run(&ExecRequest::code("print(x)")).await.expect("accepted");
        assert_eq!(first.result().await.expect("an end").end.status, ExecStatus::Timeout);
        let third = python.run(&ExecRequest::code("print(x, 2)")).await.expect("accepted");
        for (waiting, said) in [(second, "kept\n"), (third, "kept 2\n")] {
            let result = waiting.result().await.expect("an end");
            assert_eq!((result.end.status, &*result.stdout), (ExecStatus::Done, said.as_bytes()), "{result:?}");
        }
    });
}

#[test]
fn unmount_works_for_every_mount() {
    for user in users() {
        let mut host = Host::start_as(user);
        let given = host.path("given");
        std::fs::create_dir(&given).unwrap();
        std::fs::set_permissions(&given, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::write(given.join("seen"), "seen").unwrap();
        let source = given.display().to_string();
        for way in ["live", "before the start", "by another daemon"] {
            host.with(async |client| {
                let shell = match client.open_kernel("k").await {
                    Ok((shell, _)) => shell,
                    Err(_) => kernel(&client, "k", EngineName::Kaish).await,
                };
                match way {
                    "live" => drop(out(&shell, "echo up").await),
                    _ => shell.stop(false).await.expect("stops"),
                }
                shell.mount_at("/data", &source, false, 0).await.expect("mounted");
                assert_eq!(out(&shell, "cat /data/seen").await, "seen", "{way}");
            });
            if way == "by another daemon" {
                host.restart();
            }
            host.with(async |client| {
                let (shell, _) = client.open_kernel("k").await.expect("there");
                shell.unmount_at("/data", 0).await.unwrap_or_else(|error| panic!("{way}: {error}"));
                let after = run(&shell, "cat /data/seen").await;
                assert_ne!(after.end.code, 0, "{way}: the mount is still there");
                shell.mount_at("/data", &source, false, 0).await.expect("and once more");
                assert_eq!(out(&shell, "cat /data/seen").await, "seen", "{way}");
                shell.unmount_at("/data", 0).await.expect("and away again");
            });
        }
    }
}

#[test]
fn large_journal_is_read_completely() {
    let host = Host::start();
    host.with(async |client| {
        let python = kernel(&client, "p", EngineName::Python).await;
        for i in 0..5 {
            run(&python, &format!("{i} #{}", "x".repeat(700 << 10))).await;
        }
        for (limit, expected) in [(0, 5), (4, 4)] {
            let mut sequences = Vec::new();
            let read = python.each_journal_entry(0, limit, async |entry| {
                sequences.push(entry.sequence);
                Ok(())
            });
            read.await.expect("read");
            assert_eq!(sequences, (1..=expected).collect::<Vec<u64>>());
        }
    });
}

#[test]
fn idle_kernel_releases_permit() {
    let mut host = Host::prepare(crate::support::User::Own);
    host.configure("[limits]\nexecutions_in_flight = 1\n");
    host.launch();
    host.with(async |client| {
        let [one, two, three] = ["one", "two", "three"];
        let (one, two) = (kernel(&client, one, EngineName::Kaish).await, kernel(&client, two, EngineName::Kaish).await);
        let three = kernel(&client, three, EngineName::Kaish).await;
        two.start().await.expect("starts");
        eventually("it is ready", || async { two.info().await.expect("info").state == "ready" }).await;
        let first = one.run(&ExecRequest::code(WAITS)).await.expect("accepted");
        eventually("it runs", || async { one.info().await.expect("info").state == "busy" }).await;
        let waiting = two.run(&ExecRequest::code("echo never")).await.expect("accepted");
        waiting.cancel().await.expect("taken out of the queue");
        host.release(&one).await;
        first.result().await.expect("an end");
        let free = tokio::time::timeout(Duration::from_secs(180), run(&three, "echo free")).await;
        assert_eq!(free.expect("the permit was returned").stdout, b"free\n");
    });
}

#[test]
fn failed_creation_leaves_no_directory() {
    // Warm workers have directories of their own.
    let host = Host::without_pool(User::Own);
    host.with(async |client| {
        let mut wanted = spec("k", EngineName::Kaish);
        wanted.from_dir = Some("/nowhere/at/all".into());
        client.create_kernel(&wanted, "").await.err().expect("refused");
        assert_eq!(std::fs::read_dir(host.data().join("kernels")).unwrap().count(), 0);
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        shell.publish([Right::Read].into_iter().collect(), "window").await.expect("published");
        let taken = client.create_kernel(&spec("window", EngineName::Kaish), "").await.err().expect("taken");
        assert_eq!(taken.code, ErrorCode::AlreadyExists);
        shell.unpublish("window").await.expect("unpublished");
        kernel(&client, "window", EngineName::Kaish).await;
    });
}

#[test]
fn removal_leaves_no_files() {
    let host = Host::without_pool(User::Own);
    host.with(async |client| {
        let shell = kernel(&client, "gone", EngineName::Kaish).await;
        out(&shell, "echo data > /workspace/file").await;
        client.remove_kernel("gone", 0).await.expect("removed");
        let missing = client.open_kernel("gone").await.err().expect("gone");
        assert_eq!(missing.code, ErrorCode::NotFound);
        assert!(shell.info().await.is_err() || !host.kernel_socket("gone").exists());
    });
    assert!(host.workers().is_empty());
    assert_eq!(std::fs::read_dir(host.data().join("kernels")).unwrap().count(), 0);
    assert!(!host.kernel_socket("gone").exists());
}

#[test]
fn cli_end_to_end() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "demo"]);
        assert_eq!(host.ok(&["exec", "demo", "x=3; echo $x"]), "3\n");
        assert_eq!(host.ok(&["run", "--engine", "python", "print(6 * 7)"]), "42\n");
        assert_eq!(host.cli(&["exec", "demo", "exit 7"]).status.code(), Some(7), "the code's own status");
        assert_eq!(host.cli(&["show", "nobody"]).status.code(), Some(3), "not found");
        assert_eq!(host.cli(&["new", "demo"]).status.code(), Some(4), "conflict");
        assert_eq!(host.cli(&["new", "../x"]).status.code(), Some(2), "usage");
        let listed: serde_json::Value = serde_json::from_str(&host.ok(&["ls", "--json"])).expect("JSON");
        assert!(listed.to_string().contains("\"demo\""), "{listed}");
        let refused = host.cli(&["rm", "demo"]);
        assert!(!refused.status.success(), "without a terminal it needs --yes");
        host.ok(&["rm", "--yes", "demo"]);
    }
}

#[test]
fn unknown_config_key_refused() {
    let mut host = Host::prepare(crate::support::User::Own);
    host.configure("[defaults]\nmemroy = \"1G\"\n");
    host.env("RYOKAN_LOG", "warn");
    host.spawn();
    assert!(!host.wait().success());
    let log = host.log();
    assert!(log.contains("memroy") && log.contains("memory"), "the key and the nearest one: {log}");
}

/// A job that writes without end adds at most one event per second, with the number of bytes.
#[test]
fn noisy_job_events_rate_limited() {
    let host = Host::start();
    host.with(async |client| {
        let python = kernel(&client, "p", EngineName::Python).await;
        let noise = "import os, threading, time\ndef noise():\n    while not os.path.exists('go'): time.sleep(0.05)\n    for _ in range(1500):\n        print('n' * 99, flush=True)\n        time.sleep(0.002)\nthreading.Thread(target=noise).start()";
        run(&python, noise).await;
        let mut events = client.events(0).await.expect("events");
        let began = std::time::Instant::now();
        host.release(&python).await;
        let (mut report_text, mut bytes) = (0u64, 0);
        while bytes < 150_000 {
            let event = tokio::time::timeout(Duration::from_secs(180), events.next()).await;
            let event = event.expect("all bytes are reported").expect("an event");
            if event.kind == "background_output" {
                let detail: serde_json::Value = serde_json::from_str(&event.detail_json).expect("JSON");
                report_text += 1;
                bytes += detail["bytes"].as_u64().expect("a count");
                let shown = detail["text"].as_str().expect("a text").len() as u64;
                assert_eq!(shown + detail["left_out"].as_u64().expect("a count"), detail["bytes"], "{detail}");
            }
        }
        let most = began.elapsed().as_secs() + 2;
        assert!((2..=most).contains(&report_text), "{report_text} events in {:?}", began.elapsed());
        assert_eq!(bytes, 150_000, "each byte is reported once");
    });
}

/// The daemon unblocks the signals that end it, even if it inherits a mask that blocks them.
#[test]
fn daemon_unblocks_inherited_signals() {
    use nix::sys::signal::{SigSet, Signal};
    let mut host = Host::prepare(crate::support::User::Own);
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.thread_block().unwrap();
    host.launch();
    signals.thread_unblock().unwrap();
    host.signal(Signal::SIGTERM);
    assert!(host.ends(), "the daemon still runs");
}

/// The command line recognises a running daemon by this exit status.
#[test]
fn second_daemon_exit_status() {
    let host = Host::start();
    let second = host.command("ryokand").output().unwrap();
    assert_eq!(second.status.code(), Some(75), "{second:?}");
    assert!(
        String::from_utf8_lossy(&second.stderr)
            .contains(&format!("another ryokand runs with this data (process {})", host.pid())),
        "{second:?}"
    );
}

/// A process that a killed daemon was starting holds its lock until exec.
#[test]
fn daemon_start_waits_for_lock() {
    let mut host = Host::start();
    host.kill();
    // On a slow host, the lock may be held for longer than the daemon waits.
    for _ in 0..5 {
        let lock = std::fs::File::open(host.data().join("lock")).expect("there");
        let held = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusiveNonblock).expect("free");
        host.spawn();
        std::thread::sleep(Duration::from_millis(200));
        drop(held);
        let serves = || std::os::unix::net::UnixStream::connect(host.socket()).is_ok();
        crate::support::until("it serves or ends", || serves() || !Host::is_alive(host.pid() as u32));
        if serves() {
            return;
        }
        host.wait();
    }
    panic!("it does not wait: {}", host.log());
}
