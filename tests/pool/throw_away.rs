//! Kernels that go with their client: what is told first, and what is written when; and where that cannot be written.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::limits;
use ryokan::core::spec::Net;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::session::Session as _;

use super::promises::{folders, standing_on};
use super::{pooled, ready};
use crate::support::{Host, User, eventually, out, run, spec, users};

/// A host with one worker of a kind, whose daemon meets that fault.
fn small_pool_with(fault: &str) -> Host {
    let mut host = Host::prepare(User::Own);
    host.configure("[pool]\npool_size = 1\nmin_idle = 1\nmax_pool_size = 2\n");
    host.env(ryokan::sys::fault::VARIABLE, fault);
    host.launch();
    host
}

/// A new kernel that goes with its client.
async fn throw_away(client: &HostClient, name: &str) -> KernelClient {
    let mut wanted = spec(name, EngineName::Kaish);
    wanted.ephemeral = true;
    client.create_kernel(&wanted, "").await.expect("made").0
}

/// What runs in a throw-away kernel begins before its journal has it; but not where that refuses it.
#[test]
fn an_execution_of_a_throw_away_kernel_that_its_journal_refuses_does_not_go_on() {
    let host = small_pool_with("state.exec.begin.before_commit=eio");
    host.with(async |client| {
        ready(&client, "kaish").await;
        ready(&client, "python").await;
        let k = throw_away(&client, "k").await;
        let id = k.info().await.expect("told").id.to_string();
        for _ in 0..2 {
            let said = k.run(&ExecRequest::code("sleep 1; echo ran > late")).await.err().expect("it is refused");
            assert!(said.message.contains("the journal of throw-away kernel k refused execution 1"), "{said}");
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!host.data().join("kernels").join(id).join("workspace/late").exists(), "it did not go on");
        client.remove_kernel("k", 0).await.expect("removed");
        // Another one is as any.
        let k = throw_away(&client, "k").await;
        assert_eq!(out(&k, "echo well").await, "well");
    });
}

/// What is refused while another one runs, or before there is a worker, takes nothing with it.
#[test]
fn what_the_journal_of_a_throw_away_kernel_refuses_takes_nothing_with_it() {
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
                    Err(error) if n == refused => assert!(error.message.contains("refused execution"), "{error}"),
                    other => panic!("{n}: {:?}", other.err()),
                }
            }
            let (info, journal) = (k.info().await.expect("told"), host.ok(&["journal", "k", "--json"]));
            assert_eq!((info.executions, info.state.as_str()), (1, "ready"), "{journal}");
            assert_eq!(info.version, journal.lines().count() as u64 + 1, "{journal}");
            assert!(!host.ok(&["events", "--json"]).contains("journal_failed"));
        });
        host.kill();
    }
}

/// An end that comes at once is told before the journal has the beginning: who looks finds it there, and the version that it made.
#[test]
fn what_is_told_of_a_throw_away_kernel_at_once_is_in_its_journal() {
    for user in users() {
        let host = pooled(user);
        host.with(async |client| {
            ready(&client, "kaish").await;
            let k = throw_away(&client, "k").await;
            // More than may wait to be written, one after the other, and some at once.
            for n in 1..=2 * limits::EPHEMERAL_TOLD {
                assert_eq!(out(&k, &format!("echo {n}")).await, n.to_string());
                assert_eq!(k.info().await.expect("told").version, n as u64 + 1, "each makes one");
            }
            let many = 2 * limits::EPHEMERAL_TOLD;
            let both = futures::join!(out(&k, "echo a"), out(&k, "sleep 0.01; echo b"));
            assert_eq!(both, ("a".into(), "b".into()));
            // With the version that was told last: nothing that is written later makes it an old one.
            let mut more = ExecRequest::code("echo more");
            more.expected_version = k.info().await.expect("told").version;
            assert_eq!(k.execute(more).await.expect("runs").stdout, b"more\n");
            let mut told = Vec::new();
            k.each_journal_entry(0, 0, async |entry| {
                told.push((entry.exec, entry.status));
                Ok(())
            })
            .await
            .expect("a journal");
            let wanted: Vec<_> = (1..=many as u64 + 3).map(|exec| (exec, "done".to_owned())).collect();
            assert_eq!(told, wanted);
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

/// Whoever waits for an end that comes at once has it before the journal is asked for anything.
#[test]
fn what_is_over_at_once_in_a_throw_away_kernel_is_told_before_it_is_written() {
    // A busy machine may take longer than what is waited for.
    for _ in 0..8 {
        let host = small_pool_with("state.exec.begin.before_commit=kill");
        let told = host.with(async |client| {
            ready(&client, "kaish").await;
            let k = throw_away(&client, "k").await;
            let run = k.run(&ExecRequest::code("echo told")).await;
            match run {
                Ok(run) => run.result().await.is_ok_and(|result| result.stdout == b"told\n"),
                Err(_) => false,
            }
        });
        if told {
            return;
        }
    }
    panic!("the daemon ended, as it was to when it writes, before it told anything");
}

/// More short executions than a worker remembers, one right after the other: each is acknowledged in time.
#[test]
fn many_short_executions_wait_in_a_throw_away_kernel_and_all_run() {
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

/// A worker that ends right after it was told to begin: its execution is lost, in the journal too, or goes to another one.
#[test]
fn a_worker_that_ends_as_it_begins_leaves_no_execution_without_an_end() {
    let host = pooled(User::Own);
    host.with(async |client| {
        for n in 0..12_u64 {
            ready(&client, "kaish").await;
            let k = throw_away(&client, &format!("k{n}")).await;
            let id = k.info().await.expect("told").id.to_string();
            eventually("its worker knows it", async || standing_on(&host, &id).is_some()).await;
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

/// What comes right behind an execution whose journal refuses it does not run, and takes no number from it.
#[test]
fn a_refused_journal_ends_what_comes_behind_with_a_key_or_without() {
    for key in ["", "again"] {
        let host = small_pool_with("state.exec.begin.before_commit=eio");
        host.with(async |client| {
            ready(&client, "kaish").await;
            let k = throw_away(&client, "k").await;
            // Told, or refused already on a busy machine.
            let _ = k.run(&ExecRequest::code("echo told")).await;
            let mut behind = ExecRequest::code("sleep 0.1; echo behind > late");
            behind.key = key.into();
            let refused = k.run(&behind).await.err().expect("it is refused");
            assert!(refused.hint.contains("make another one"), "{refused}");
            tokio::time::sleep(Duration::from_millis(300)).await;
            let id = k.info().await.expect("told").id.to_string();
            assert!(!host.data().join("kernels").join(id).join("workspace/late").exists());
            assert_eq!(journalled(&k).await, [""; 0]);
        });
    }
}

/// What was told before the journal refused it is not taken back; but nothing comes after it.
#[test]
fn a_throw_away_kernel_whose_journal_refuses_what_was_told_ends() {
    let host = small_pool_with("state.exec.begin.before_commit=eio");
    host.with(async |client| {
        ready(&client, "kaish").await;
        ready(&client, "python").await;
        let k = throw_away(&client, "k").await;
        let begun = k.run(&ExecRequest::code("echo told")).await;
        let said = match begun {
            Ok(begun) => begun.result().await.expect("a result").stdout,
            // A busy machine: it was not over at once.
            Err(error) if error.message.contains("refused execution 1") => b"told\n".to_vec(),
            Err(error) => panic!("{error}"),
        };
        assert_eq!(said, b"told\n");
        eventually("nothing runs in it any more", async || {
            let refused = k.run(&ExecRequest::code("sleep 0.05")).await.err();
            refused.is_some_and(|error| error.hint.contains("make another one"))
        })
        .await;
        client.remove_kernel("k", 0).await.expect("removed");
        let k = throw_away(&client, "k").await;
        assert_eq!(out(&k, "echo well").await, "well");
    });
}

#[test]
fn others_find_the_socket_of_a_throw_away_kernel_and_not_that_of_one_that_is_gone() {
    let host = pooled(User::Own);
    host.with(async |client| {
        let socket = host.kernel_socket("away");
        throw_away(&client, "away").await;
        eventually("its socket is there", async || socket.exists()).await;
        client.remove_kernel("away", 0).await.expect("removed");
        // Gone before its socket came: none comes.
        throw_away(&client, "away").await;
        client.remove_kernel("away", 0).await.expect("removed");
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!socket.exists());
    });
}

/// Nothing weaker than the whole sandbox is used before the audit log says so.
#[test]
fn a_throw_away_kernel_with_a_weaker_sandbox_is_written_down_first() {
    let mut host = Host::prepare(User::Own);
    host.configure("[sandbox]\nnet_host_allowed = true\n");
    host.env(ryokan::sys::fault::VARIABLE, "catalog.kernel.insert.before_commit=eio");
    host.launch();
    host.with(async |client| {
        let mut wanted = spec("k", EngineName::Kaish);
        (wanted.ephemeral, wanted.net) = (true, Some(Net::Host));
        client.create_kernel(&wanted, "").await.err().expect("it cannot be written down");
        client.create_kernel(&wanted, "").await.expect("made");
        assert!(host.ok(&["audit", "--json"]).contains("kernel.create_weaker"));
    });
}

/// Nobody waits for the record of a kernel that goes with its client.
#[test]
fn a_throw_away_kernel_that_cannot_be_recorded_goes_and_says_so() {
    let host = small_pool_with("catalog.kernel.insert.before_commit=eio");
    host.with(async |client| {
        ready(&client, "kaish").await;
        ready(&client, "python").await;
        let k = throw_away(&client, "k").await;
        let gone = async {
            while client.open_kernel("k").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        // Nothing of it waits for anything that waits for it.
        tokio::time::timeout(limits::WORKER_STOP / 2, gone).await.expect("it goes at once");
        let said = k.run(&ExecRequest::code("echo never")).await.err().expect("it is gone");
        assert!(said.message.contains("could not be recorded"), "{said}");
        assert!(host.ok(&["audit", "--json"]).contains("kernel.create"), "the refusal is written down");
        assert!(host.ok(&["events", "--json"]).contains("kernel_not_recorded"));
        eventually("its folder goes", async || {
            let slots: u32 = client.pools().await.expect("pools").iter().map(|pool| pool.total).sum();
            folders(&host).len() as u32 == slots
        })
        .await;
        // The next is as any.
        let k = throw_away(&client, "k").await;
        assert_eq!(out(&k, "echo well").await, "well");
    });
}
