//! `kill -9` of the daemon at many moments: the next daemon has everything acknowledged, and
//! nothing more.

use std::time::Duration;

use nix::sys::signal::Signal;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecStatus, OutputEvent};
use ryokan::core::ids::ExecId;

use super::{Bystander, inits, remove_all};
use crate::support::{Host, User, eventually, kernel, out, spec, users};

/// A host with a neighbour whose worker is live and holds state.
fn host(user: User) -> (Host, Vec<u32>) {
    let host = Host::start_as(user);
    let workers = host.with(async |client| {
        out(&kernel(&client, "neighbour", EngineName::Kaish).await, "y=mine").await;
        host.workers()
    });
    (host, workers)
}

/// Kills the daemon that long after an operation's begin, or else after its end.
async fn struck<T>(host: &Host, delay_ms: Option<u64>, operation: impl Future<Output = T>) -> T {
    let Some(delay_ms) = delay_ms else {
        let done = operation.await;
        host.signal(Signal::SIGKILL);
        return done;
    };
    let strike = async {
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
        host.signal(Signal::SIGKILL);
    };
    tokio::join!(operation, strike).0
}

fn the_neighbour_is_well(host: &Host, workers: &[u32]) {
    assert!(workers.iter().all(|pid| Host::is_alive(*pid)), "the neighbour's worker survives\n{}", host.log());
    host.with(async |client| {
        let (neighbour, _) = client.open_kernel("neighbour").await.expect("still there");
        assert_eq!(out(&neighbour, "echo $y").await, "mine");
    });
}

#[test]
fn daemon_kill_during_worker_start() {
    for user in users() {
        let (mut host, neighbour) = host(user);
        let bystander = Bystander::new();
        // From an immediate kill to one after the kernel is ready.
        for (round, delay_ms) in [0, 5, 20, 60, 120, 250, 1500].into_iter().enumerate() {
            let name = format!("k{round}");
            host.with(async |client| {
                let shell = kernel(&client, &name, EngineName::Kaish).await;
                let starting = tokio::task::spawn_local(async move { shell.start().await });
                tokio::time::sleep(Duration::from_millis(delay_ms)).await;
                host.signal(Signal::SIGKILL);
                let _ = starting.await;
            });
            host.restart();
            the_neighbour_is_well(&host, &neighbour);
            host.with(async |client| {
                let (shell, info) = client.open_kernel(&name).await.expect("it was acknowledged");
                assert!(["created", "stopped", "ready", "crashed"].contains(&info.state.as_str()), "{info:?}");
                assert_eq!(out(&shell, "echo works").await, "works");
                client.remove_kernel(&name, 0).await.expect("removed");
            });
            // A worker that the killed daemon never recorded exits by itself or is ended; none
            // remains.
            let only = || host.workers().len() == neighbour.len();
            super::until("the end of half-started workers", only);
        }
        bystander.check();
        remove_all(&host);
    }
}

#[test]
fn daemon_kill_during_execution() {
    for user in users() {
        let (mut host, neighbour) = host(user);
        let bystander = Bystander::new();
        let (busy, streaming) = host.with(async |client| {
            let shell = kernel(&client, "busy", EngineName::Kaish).await;
            out(&shell, "x=before").await;
            let busy = shell.run(&ExecRequest::code("sleep 2; x=after; echo end")).await.expect("accepted").exec();
            let queued = shell.run(&ExecRequest::code("echo queued")).await.expect("accepted").exec();
            assert_eq!(queued, ExecId(busy.0 + 1));
            let shell = kernel(&client, "streaming", EngineName::Python).await;
            let code = "import time\nfor i in range(200):\n    print('%05d' % i, 'x' * 994)\n    time.sleep(0.01)";
            let streaming = shell.run(&ExecRequest::code(code)).await.expect("accepted");
            let mut seen = 0;
            let lost = streaming
                .output(0, async |event| {
                    if let OutputEvent::Stdout(data) = &event {
                        seen += data.len();
                    }
                    if seen > 20_000 {
                        host.signal(Signal::SIGKILL);
                    }
                    Ok(())
                })
                .await;
            assert!(lost.is_err(), "the reader gets an error");
            (busy, streaming.exec())
        });
        host.restart();
        the_neighbour_is_well(&host, &neighbour);
        host.with(async |client| {
            let (shell, _) = client.open_kernel("busy").await.expect("there");
            let result = shell.execution(busy).await.expect("known").result().await.expect("a result");
            assert_eq!((result.end.status, &result.stdout[..]), (ExecStatus::Done, &b"end\n"[..]), "{result:?}");
            assert_eq!(out(&shell, "echo $x").await, "after");
            // The queued execution was acknowledged, so it has an end: either status.
            let queued = shell.execution(ExecId(busy.0 + 1)).await.expect("known").result().await.expect("a result");
            assert!([ExecStatus::Done, ExecStatus::Lost].contains(&queued.end.status), "{queued:?}");
            let (shell, _) = client.open_kernel("streaming").await.expect("there");
            let execution = shell.execution(streaming).await.expect("known");
            let mut text = Vec::new();
            execution
                .output(0, async |event| {
                    if let OutputEvent::Stdout(data) = event {
                        text.extend(data);
                    }
                    Ok(())
                })
                .await
                .expect("the whole of it");
            let lines: Vec<&str> = std::str::from_utf8(&text).unwrap().lines().collect();
            assert_eq!(lines.len(), 200, "no line is lost or repeated");
            assert!(
                lines.iter().enumerate().all(|(i, line)| line.starts_with(&format!("{i:05} x")) && line.len() == 1000)
            );
            assert_eq!(execution.result().await.expect("a result").end.status, ExecStatus::Done);
        });
        bystander.check();
        remove_all(&host);
    }
}

#[test]
fn daemon_kill_during_create_or_remove() {
    let (mut host, neighbour) = host(User::Own);
    let bystander = Bystander::new();
    // Files that take a while to copy and to delete.
    let source = host.path("source");
    for folder in 0..20 {
        let folder = source.join(folder.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        for file in 0..50 {
            std::fs::write(folder.join(file.to_string()), "content").unwrap();
        }
    }
    let kernels = host.data().join("kernels");
    let folders = || -> Vec<String> {
        std::fs::read_dir(&kernels).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    let (mut finished, mut cut) = (0, 0);
    for delay_ms in [0, 2, 5, 10, 20, 40, 80, 160].map(Some).into_iter().chain([None]) {
        let key = format!("after {delay_ms:?}");
        let acknowledged = host.with(async |client| {
            let mut wanted = spec("new", EngineName::Kaish);
            wanted.from_dir = Some(source.clone());
            let create = async { client.create_kernel(&wanted, &key).await.is_ok() };
            struck(&host, delay_ms, create).await
        });
        host.restart();
        the_neighbour_is_well(&host, &neighbour);
        let there = host.with(async |client| {
            let there = match client.open_kernel("new").await {
                Ok((shell, _)) => {
                    assert_eq!(
                        out(&shell, "cat /workspace/19/49 /workspace/0/0").await,
                        "contentcontent",
                        "the fork is complete"
                    );
                    true
                }
                Err(error) => {
                    assert_eq!(error.code, ryokan::core::error::ErrorCode::NotFound, "{error}");
                    assert_eq!(
                        folders().len(),
                        1,
                        "no trace is left after {delay_ms:?} ms: {:?}\n{}",
                        folders(),
                        host.log()
                    );
                    false
                }
            };
            assert!(there || !acknowledged, "an acknowledged kernel is there");
            // The same key again returns that kernel, or creates the first one.
            client.create_kernel(&spec("new", EngineName::Kaish), &key).await.expect("made or found");
            there
        });
        finished += u32::from(there);
        cut += u32::from(!there);
        let removed = host.with(async |client| {
            let (shell, _) = client.open_kernel("new").await.expect("there");
            shell.start().await.expect("starts");
            let remove = async { client.remove_kernel("new", 0).await.is_ok() };
            struck(&host, delay_ms, remove).await
        });
        host.restart();
        the_neighbour_is_well(&host, &neighbour);
        host.with(async |client| match client.open_kernel("new").await {
            Ok((shell, _)) => {
                assert!(!removed, "an acknowledged removal is undone");
                assert_eq!(out(&shell, "echo works").await, "works");
                client.remove_kernel("new", 0).await.expect("removed");
            }
            Err(_) => assert_eq!(folders().len(), 1, "{delay_ms:?} ms: {:?} is left\n{}", folders(), host.log()),
        });
        super::until("the end of all workers but the neighbour's", || inits(&host).len() == 1);
        assert!(!host.kernel_socket("new").exists(), "its socket is gone");
    }
    assert!(finished > 0 && cut > 0, "the moments differ: {finished} whole, {cut} cut");
    bystander.check();
    remove_all(&host);
}

#[test]
fn repeated_daemon_kills_lose_nothing() {
    let mut host = Host::start();
    for round in 0..5 {
        host.with(async |client| {
            let shell = match round {
                0 => kernel(&client, "k", EngineName::Kaish).await,
                _ => client.open_kernel("k").await.expect("there").0,
            };
            if round > 0 {
                assert_eq!(out(&shell, "echo $n").await, format!("{}", round - 1));
            }
            out(&shell, &format!("n={round}")).await;
            let sequence = shell.message("user", &format!("round {round}")).await.expect("said");
            assert_eq!(shell.info().await.expect("info").version, sequence + 1);
        });
        host.restart();
    }
    host.with(async |client| {
        let (shell, _) = client.open_kernel("k").await.expect("there");
        let mut said = Vec::new();
        let keep = async |entry: ryokan::core::info::JournalEntry| {
            if entry.kind == "message" {
                said.push(entry.text);
            }
            Ok(())
        };
        shell.each_journal_entry(0, 0, keep).await.expect("the journal");
        assert_eq!(said, (0..5).map(|round| format!("user: round {round}")).collect::<Vec<_>>());
        eventually("the kernel is idle", || async { shell.info().await.expect("info").state == "ready" }).await;
    });
    remove_all(&host);
}

/// The daemon may die between the end of an execution in its journal and the acknowledgement to the
/// worker.
#[test]
fn worker_survives_repeated_adoption() {
    let mut host = Host::start();
    host.with(async |client| out(&kernel(&client, "k", EngineName::Kaish).await, "n=0").await);
    let worker = host.workers();
    for round in 1..=10 {
        host.kill();
        host.env(ryokan::sys::fault::VARIABLE, "state.exec.end.after_commit=kill");
        host.launch();
        let exec = host.with(async |client| {
            let (shell, _) = client.open_kernel("k").await.expect("there");
            let running = shell.run(&ExecRequest::code(format!("n={round}; echo $n"))).await.expect("accepted");
            assert!(running.result().await.is_err(), "round {round}: the daemon did not die");
            running.exec()
        });
        host.env(ryokan::sys::fault::VARIABLE, "");
        host.restart();
        host.with(async |client| {
            let (shell, _) = client.open_kernel("k").await.expect("there");
            let result = shell.execution(exec).await.expect("known").result().await.expect("a result");
            assert_eq!(result.end.status, ExecStatus::Done, "round {round}: {:?}", result.end);
            assert_eq!(out(&shell, "echo $n").await, round.to_string(), "round {round}");
        });
        assert_eq!(host.workers(), worker, "round {round}: the worker was adopted");
    }
    remove_all(&host);
}
