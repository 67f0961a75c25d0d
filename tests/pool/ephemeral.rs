//! Ephemeral kernels: journalled as any other kernel, and removed with their connection.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::spec::Net;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::session::Session as _;

use super::reserved_workers::{folders, standing_on};
use super::{pooled, ready};
use crate::support::{Host, User, eventually, out, run, spec, users};

/// A host with one warm worker, whose daemon has this fault.
fn small_pool_with(fault: &str) -> Host {
    let mut host = Host::prepare(User::Own);
    host.configure("[pool]\npool_size = 1\nmin_idle = 1\nmax_pool_size = 2\n");
    host.env(ryokan::sys::fault::VARIABLE, fault);
    host.launch();
    host
}

/// Creates an ephemeral kernel.
async fn throw_away(client: &HostClient, name: &str) -> KernelClient {
    let mut wanted = spec(name, EngineName::Kaish);
    wanted.ephemeral = true;
    client.create_kernel(&wanted, "").await.expect("made").0
}

#[test]
fn refused_ephemeral_execution_never_runs() {
    let host = small_pool_with("state.exec.begin.before_commit=eio");
    host.with(async |client| {
        ready(&client, "kaish").await;
        let k = throw_away(&client, "k").await;
        let id = k.info().await.expect("info").id.to_string();
        k.run(&ExecRequest::code("echo ran > late")).await.err().expect("it is refused");
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!host.data().join("kernels").join(id).join("workspace/late").exists(), "it did not run");
        // The kernel works as before.
        assert_eq!(out(&k, "echo well").await, "well");
        assert_eq!(journalled(&k).await, ["done"]);
    });
}

/// A refusal while another execution runs, or before there is a worker.
#[test]
fn refused_begin_spares_other_executions() {
    let mut host = Host::prepare(User::Own);
    host.configure("[pool]\npool_size = 0\nmin_idle = 0\nmax_pool_size = 0\n");
    for (refused, pair) in [(2, ["sleep 1; echo first", "echo second"]), (1, ["echo first", "echo second"])] {
        host.env(ryokan::sys::fault::VARIABLE, &format!("state.exec.begin.before_commit:{refused}=eio"));
        host.launch();
        host.with(async |client| {
            let k = throw_away(&client, "k").await;
            let asked = [k.run(&ExecRequest::code(pair[0])).await, k.run(&ExecRequest::code(pair[1])).await];
            for (n, (asked, code)) in (1..).zip(asked.into_iter().zip(pair)) {
                match asked {
                    Ok(asked) if n != refused => {
                        let said = asked.result().await.expect("a result").stdout;
                        assert!(code.as_bytes().ends_with(said.trim_ascii_end()), "{code}");
                    }
                    Err(_) if n == refused => {}
                    other => panic!("{n}: {:?}", other.err()),
                }
            }
            eventually("the kernel is idle", async || k.info().await.expect("info").state == "ready").await;
            let (info, journal) = (k.info().await.expect("info"), host.ok(&["journal", "k", "--json"]));
            assert_eq!(info.executions, 1, "{journal}");
            assert_eq!(info.version, journal.lines().count() as u64 + 1, "{journal}");
            assert!(!host.ok(&["events", "--json"]).contains("journal_failed"));
        });
        host.kill();
    }
}

#[test]
fn ephemeral_journal_matches_results() {
    for user in users() {
        let host = pooled(user);
        host.with(async |client| {
            ready(&client, "kaish").await;
            let k = throw_away(&client, "k").await;
            for n in 1..=8_u64 {
                assert_eq!(out(&k, &format!("echo {n}")).await, n.to_string());
                assert_eq!(k.info().await.expect("info").version, n + 1, "each makes one");
            }
            let both = futures::join!(out(&k, "echo a"), out(&k, "sleep 0.01; echo b"));
            assert_eq!(both, ("a".into(), "b".into()));
            let mut more = ExecRequest::code("echo more");
            more.expected_version = k.info().await.expect("info").version;
            assert_eq!(k.execute(more).await.expect("runs").stdout, b"more\n");
            assert_eq!(journalled(&k).await, vec!["done"; 11]);
        });
    }
}

/// The statuses of a kernel's executions, as its journal has them.
async fn journalled(kernel: &KernelClient) -> Vec<String> {
    let mut statuses = Vec::new();
    let read = kernel.each_journal_entry(0, 0, async |entry| {
        statuses.push(entry.status);
        Ok(())
    });
    read.await.expect("a journal");
    statuses
}

/// The daemon dies at each journal write: no client has received a result that the journal lacks.
#[test]
fn ephemeral_result_follows_journal() {
    for write in ["begin", "end"] {
        let host = small_pool_with(&format!("state.exec.{write}.before_commit=kill"));
        host.with(async |client| {
            ready(&client, "kaish").await;
            let k = throw_away(&client, "k").await;
            let reported = match k.run(&ExecRequest::code("echo reported")).await {
                Ok(run) => run.result().await.is_ok(),
                Err(_) => false,
            };
            assert!(!reported, "{write}");
        });
    }
}

/// More short executions than a worker remembers, in immediate succession: each is acknowledged in time.
#[test]
fn many_short_executions_all_run() {
    let host = pooled(User::Own);
    host.with(async |client| {
        ready(&client, "kaish").await;
        let k = throw_away(&client, "k").await;
        let first = k.run(&ExecRequest::code("sleep 0.2")).await.expect("begun");
        let mut all = vec![first];
        for n in 0..40 {
            all.push(k.run(&ExecRequest::code(format!("x={n}"))).await.expect("waits"));
        }
        for execution in all {
            assert_eq!(execution.result().await.expect("a result").end.code, 0);
        }
        assert_eq!(out(&k, "echo $x").await, "39");
        assert!(journalled(&k).await.iter().all(|status| status == "done"));
    });
}

/// A worker killed during or right after its bind: its execution goes to another worker, or is lost, in the journal
/// too.
#[test]
fn killed_worker_leaves_no_execution_open() {
    let host = pooled(User::Own);
    host.with(async |client| {
        for n in 0..12_u64 {
            ready(&client, "kaish").await;
            let k = throw_away(&client, &format!("k{n}")).await;
            let id = k.info().await.expect("info").id.to_string();
            let worker = standing_on(&host, &id).expect("a worker");
            let kill = async {
                tokio::time::sleep(Duration::from_micros(n * 300)).await;
                let _ = kill(Pid::from_raw(worker as i32), Signal::SIGKILL);
            };
            let (ran, ()) = futures::join!(run(&k, "sleep 0.3"), kill);
            let status = ran.end.status.name();
            assert_eq!(journalled(&k).await, [status], "killed after {} µs", n * 300);
            assert!(matches!(status, "lost" | "done"), "{status}");
        }
        assert!(!host.ok(&["events", "--json"]).contains("journal_failed"));
    });
}

#[test]
fn ephemeral_socket_comes_and_goes() {
    let host = pooled(User::Own);
    host.with(async |client| {
        let socket = host.kernel_socket("away");
        throw_away(&client, "away").await;
        eventually("its socket is there", async || socket.exists()).await;
        client.remove_kernel("away", 0).await.expect("removed");
        // A kernel that is removed at once leaves no worker behind.
        throw_away(&client, "away").await;
        client.remove_kernel("away", 0).await.expect("removed");
        tokio::time::sleep(Duration::from_millis(50)).await;
        eventually("its socket is gone", async || !socket.exists()).await;
    });
}

/// With the full sandbox, and with a weaker one, which has its own audit line.
#[test]
fn unrecorded_ephemeral_kernel_is_refused() {
    for (net, action) in [(None, "kernel.create"), (Some(Net::Host), "kernel.create_weaker")] {
        let mut host = Host::prepare(User::Own);
        host.configure("[sandbox]\nnet_host_allowed = true\n[pool]\npool_size = 1\nmin_idle = 1\nmax_pool_size = 2\n");
        host.env(ryokan::sys::fault::VARIABLE, "catalog.kernel.insert.before_commit=eio");
        host.launch();
        host.with(async |client| {
            ready(&client, "kaish").await;
            ready(&client, "python").await;
            let mut wanted = spec("k", EngineName::Kaish);
            (wanted.ephemeral, wanted.net) = (true, net);
            client.create_kernel(&wanted, "").await.err().expect("it cannot be recorded");
            client.open_kernel("k").await.err().expect("there is none");
            let audit = host.ok(&["audit", "--json"]);
            assert!(audit.contains("\"kernel.create\""), "the refusal is recorded: {audit}");
            eventually("its folder goes", async || {
                let slots: u32 = client.pools().await.expect("pools").iter().map(|pool| pool.total).sum();
                folders(&host).len() as u32 == slots
            })
            .await;
            // The next kernel works as any other.
            let k = client.create_kernel(&wanted, "").await.expect("made").0;
            let audit = host.ok(&["audit", "--json"]);
            assert!(audit.contains(&format!("\"{action}\"")), "{audit}");
            assert_eq!(out(&k, "echo well").await, "well");
        });
    }
}
