//! Ends: status, signal, timeout, kill, and what a program leaves running.

use std::time::{Duration, Instant};

use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::limits;

use super::{bash, count, detached, each_user, finish, program, says, script};
use crate::support::{eventually, out, run, until};

#[test]
fn exit_status_is_the_programs() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let end = async |text: &str| finish(&kernel, &script(text)).await.end;
            assert_eq!((end("exit 0").await.status, end("exit 7").await.code), (ExecStatus::Done, 7));
            let signalled = end("kill -KILL $$").await;
            assert_eq!((signalled.status, signalled.code), (ExecStatus::Failed, 137), "{signalled:?}");
            let missing = finish(&kernel, &program(&["nothing-here"])).await.end;
            assert_eq!((missing.status, missing.code), (ExecStatus::Refused, 127), "{missing:?}");
            let mut elsewhere = script("true");
            if let ryokan::core::exec::Work::Process(program) = &mut elsewhere.what {
                program.cwd = "/nowhere".into();
            }
            let nowhere = finish(&kernel, &elsewhere).await.end;
            assert_eq!((nowhere.status, nowhere.code), (ExecStatus::Refused, 126), "{nowhere:?}");
            assert!(nowhere.err.contains("/nowhere"), "{nowhere:?}");
            // The kernel goes on.
            assert_eq!(out(&kernel, "echo still").await, "still");
        });
    });
}

#[test]
fn signal_reaches_the_program() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let text = "trap 'echo got it; exit 3' USR1; echo ready > up; while :; do sleep 0.05; done";
            let process = kernel.spawn(&script(text)).await.expect("accepted");
            eventually("it waits", || async { says(&kernel, "cat up || true").await == "ready" }).await;
            kernel.signal_process(process.execution.exec(), 10).await.expect("sent");
            let result = process.execution.result().await.expect("a result");
            assert_eq!((result.end.code, &result.stdout[..]), (3, &b"got it\n"[..]));
            let gone = kernel.signal_process(process.execution.exec(), 10).await.expect_err("it has ended");
            assert_eq!(gone.code, ErrorCode::NotFound, "{gone}");
        });
    });
}

/// Also processes that left the session, and whose parents are gone.
#[test]
fn timeout_kills_whole_tree() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let text = "(setsid sh -c 'sleep 1111 & sleep 1111' &); sleep 1111 & trap '' TERM INT; echo up; wait";
            let request = ExecRequest { timeout_ms: 10_000, ..script(text) };
            let began = Instant::now();
            let process = kernel.spawn(&request).await.expect("accepted");
            eventually("all run", || async { count("sleep 1111") >= 3 }).await;
            let result = process.execution.result().await.expect("a result");
            assert_eq!((result.end.status, result.end.code), (ExecStatus::Timeout, 124), "{:?}", result.end);
            assert!(began.elapsed() < Duration::from_secs(600) && result.stdout == b"up\n", "{result:?}");
            assert_eq!(count("sleep 1111"), 0);
        });
    });
}

#[test]
fn fork_bomb_ends_with_its_process() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            run(&kernel, "kept=1").await;
            let request = ExecRequest { timeout_ms: 1500, ..script("b() { b & b & }; b; sleep 60") };
            let result = finish(&kernel, &request).await;
            assert!(matches!(result.end.status, ExecStatus::Timeout | ExecStatus::Failed), "{:?}", result.end);
            assert_eq!(out(&kernel, "echo $kept").await, "1", "the engine is the same");
        });
    });
}

/// As with `docker exec`: the end is that of the program, though its children hold its output open.
#[test]
fn leftover_child_delays_no_end() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let began = Instant::now();
            let result = finish(&kernel, &script("sleep 2222 & yes 2222 & echo done >&2")).await;
            assert_eq!((result.end.code, &result.stderr[..]), (0, &b"done\n"[..]), "{:?}", result.end);
            assert!(began.elapsed() < Duration::from_secs(600));
            // Its fork may still be on its way to the program.
            eventually("it goes on in the kernel", || async { count("sleep 2222") == 1 }).await;
            eventually("a writer to the closed output ends", || async { count("yes 2222") == 0 }).await;
            kernel.stop(false).await.expect("stopped");
            assert_eq!(count("sleep 2222"), 0);
        });
    });
}

#[test]
fn kill_ends_detached_process() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        let exec = host.ok(&["spawn", "k", "-d", "--", "sh", "-c", "echo begun; sleep 3333"]);
        let exec = exec.trim();
        until("it runs", || count("sleep 3333") == 1);
        let listed = host.ok(&["ps", "k"]);
        assert!(listed.contains("detached") && listed.contains("sleep 3333"), "{listed}");
        host.ok(&["kill", "k", exec]);
        assert!(host.ok(&["ps", "k"]).contains("no processes"));
        let attached = host.cli(&["exec", "k", "--attach", exec]);
        assert_eq!((attached.status.code(), &attached.stdout[..]), (Some(137), &b"begun\n"[..]));
        assert_eq!(host.cli(&["kill", "k", exec]).status.code(), Some(3));
    });
}

#[test]
fn limits_are_enforced() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let mut held = Vec::new();
            for _ in 0..limits::PROCESSES {
                held.push(kernel.spawn(&detached(program(&["sleep", "600"]))).await.expect("accepted"));
            }
            let beyond = kernel.spawn(&program(&["true"])).await.err().expect("refused");
            assert_eq!((beyond.code, beyond.reason.as_str()), (ErrorCode::Busy, "processes"), "{beyond}");
            for process in &held {
                kernel.interrupt_execution(process.execution.exec()).await.expect("ended");
            }
            for process in held {
                process.execution.result().await.expect("a result");
            }
            assert_eq!(says(&kernel, "echo room").await, "room");
            let long = "x".repeat(limits::PROCESS_ARGUMENT_MAX_BYTES + 1);
            assert!(kernel.spawn(&program(&["echo", &long])).await.is_err());
            let fits = "x".repeat(limits::PROCESS_ARGUMENT_MAX_BYTES);
            assert_eq!(finish(&kernel, &program(&["echo", &fits])).await.stdout.len(), fits.len() + 1);
        });
    });
}
