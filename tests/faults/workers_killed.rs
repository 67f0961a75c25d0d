//! `kill -9` of init and of the engine, when idle, busy and streaming: the kernel keeps its state,
//! and its neighbour is not affected.

use std::time::Duration;

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecStatus, OutputEvent};

use super::{Bystander, engine, inits, marked, marker, remove_all, strike};
use crate::support::{Host, eventually, kernel, out, run, users};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    Idle,
    Executing,
    Streaming,
}

#[test]
fn worker_kill_keeps_state() {
    for user in users() {
        let host = Host::start_as(user);
        let bystander = Bystander::new();
        host.with(async |client| {
            let other = kernel(&client, "other", EngineName::Kaish).await;
            out(&other, "y=untouched").await;
            let others = host.workers();
            for language in [EngineName::Kaish, EngineName::Python] {
                for whole in [true, false] {
                    for moment in [Moment::Idle, Moment::Executing, Moment::Streaming] {
                        if language == EngineName::Python && moment == Moment::Idle {
                            continue;
                        }
                        let what = format!("{user:?} {language:?} init: {whole} {moment:?}");
                        let beside = other.run(&ExecRequest::code("sleep 0.3; echo $y")).await.expect("accepted");
                        let shell = kernel(&client, "k", language).await;
                        let kaish = language == EngineName::Kaish;
                        out(&shell, if kaish { "x=kept" } else { "x = 'kept'" }).await;
                        let one = marker();
                        let init = inits(&host).into_iter().find(|pid| !others.contains(pid)).expect("its init");
                        let victim = if whole { init } else { engine(init) };
                        let code = match (moment, kaish) {
                            (Moment::Idle, _) => None,
                            (Moment::Executing, true) => Some(format!("x=lost; /bin/sleep {one}")),
                            (Moment::Executing, false) => {
                                Some(format!("x = 'lost'; import os; os.system('/bin/sleep {one}')"))
                            }
                            (Moment::Streaming, true) => Some("x=lost; while true; do echo line; done".into()),
                            (Moment::Streaming, false) => Some("x = 'lost'\nwhile True: print('line')".into()),
                        };
                        let running = match &code {
                            Some(code) => Some(shell.run(&ExecRequest::code(code.as_str())).await.expect("accepted")),
                            None => None,
                        };
                        match (moment, &running) {
                            (Moment::Executing, _) => {
                                eventually("it runs", || async { !marked(&one).is_empty() }).await;
                                strike(victim);
                            }
                            (Moment::Streaming, Some(running)) => {
                                let (mut seen, mut struck, mut last) = (0, false, None);
                                running
                                    .output(0, async |event| {
                                        if let OutputEvent::Stdout(data) = &event {
                                            seen += data.len();
                                        }
                                        if seen > 100_000 && !struck {
                                            struck = true;
                                            strike(victim);
                                        }
                                        last = Some(event);
                                        Ok(())
                                    })
                                    .await
                                    .expect("delivered to the end");
                                assert!(
                                    matches!(last, Some(OutputEvent::ExitCode(code)) if code != 0),
                                    "{what}: {last:?}"
                                );
                            }
                            _ => strike(victim),
                        }
                        if let Some(running) = running {
                            let result = running.result().await.expect("an end");
                            assert_eq!(result.end.status, ExecStatus::Lost, "{what}: {:?}", result.end);
                            assert!(!result.end.err.is_empty());
                            let mut statuses = Vec::new();
                            shell
                                .each_journal_entry(0, 0, async |entry| {
                                    statuses.push(entry.status);
                                    Ok(())
                                })
                                .await
                                .expect("the journal");
                            assert_eq!(statuses.last().map(String::as_str), Some("lost"), "{what}: {statuses:?}");
                        }
                        eventually("its whole tree has ended", || async { !Host::is_alive(init) }).await;
                        assert!(marked(&one).is_empty(), "{what}");
                        let kept = out(&shell, if kaish { "echo $x" } else { "print(x)" }).await;
                        assert_eq!(kept, "kept", "{what}");
                        let result = beside.result().await.expect("an end");
                        assert_eq!(
                            (result.end.status, &result.stdout[..]),
                            (ExecStatus::Done, &b"untouched\n"[..]),
                            "{what}"
                        );
                        assert!(others.iter().all(|pid| Host::is_alive(*pid)), "{what}: the neighbour was touched");
                        client.remove_kernel("k", 0).await.expect("removed");
                        eventually("its worker has ended", || async { host.workers().len() == others.len() }).await;
                    }
                }
            }
        });
        bystander.check();
        remove_all(&host);
    }
}

/// Killed repeatedly between executions, a kernel loses nothing acknowledged.
#[test]
fn variables_survive_worker_kills() {
    let host = Host::start();
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        out(&shell, "n=0").await;
        for round in 1..=2 {
            out(&shell, "n=$((n + 1))").await;
            strike(inits(&host)[0]);
            // The daemon may not have noticed: an execution then is lost, or runs in the next
            // worker.
            let result = run(&shell, "echo $n").await;
            match result.end.status {
                ExecStatus::Done => assert_eq!(result.stdout, format!("{round}\n").into_bytes()),
                ExecStatus::Lost => {}
                other => panic!("{other:?}: {result:?}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(out(&shell, "echo $n").await, round.to_string());
        }
    });
    remove_all(&host);
}
