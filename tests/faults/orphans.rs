//! Processes end with their kernel, however the daemon ends. The names follow kaijutsu's tests of
//! the same purpose.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;

use super::{Bystander, inits, marked, marker, nothing_is_left, remove_all, strike, tree, until};
use crate::support::{Host, User, eventually, kernel, out, run, users};

/// A process that tries to leave its kernel: its own session, no parent, signals ignored.
fn runaway(marker: &str) -> String {
    format!("/bin/sh -c 'trap \"\" TERM HUP INT; setsid /bin/sleep {marker} >/dev/null 2>&1 & exit 0'")
}

#[test]
fn orphan_guard_on_sigkill() {
    for user in users() {
        let mut host = Host::prepare(user);
        // Long enough for a look at the waiting workers.
        host.configure("[daemon]\norphan_grace = \"10s\"\n");
        host.launch();
        let bystander = Bystander::new();
        let (one, two) = (marker(), marker());
        host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            out(&shell, "x=saved").await;
            run(&shell, &runaway(&one)).await;
            let python = kernel(&client, "p", EngineName::Python).await;
            python
                .run(&ExecRequest::code(format!("import os\nos.system('/bin/sleep {two}')")))
                .await
                .expect("accepted");
            eventually("both run", || async { marked(&one).len() == 1 && !marked(&two).is_empty() }).await;
        });
        host.kill();
        std::thread::sleep(Duration::from_millis(300));
        assert!(!host.workers().is_empty() && !marked(&one).is_empty(), "a worker waits for the next daemon");
        // Far before the end of the default grace of 600 s.
        until("the end of the orphans", || {
            host.workers().is_empty() && marked(&one).is_empty() && marked(&two).is_empty()
        });
        bystander.check();
        host.launch();
        host.with(async |client| {
            let (shell, info) = client.open_kernel("k").await.expect("still known");
            assert_eq!(info.state, "stopped", "{info:?}");
            assert_eq!(out(&shell, "echo $x").await, "saved");
        });
        remove_all(&host);
    }
}

#[test]
fn orphan_guard_on_sigterm() {
    for user in users() {
        let mut host = Host::start_as(user);
        let bystander = Bystander::new();
        let (one, two) = (marker(), marker());
        host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            out(&shell, "x=saved").await;
            run(&shell, &runaway(&one)).await;
            let python = kernel(&client, "p", EngineName::Python).await;
            out(&python, &format!("import subprocess\nchild = subprocess.Popen(['/bin/sleep', '{two}'])")).await;
            eventually("both run", || async { (marked(&one).len(), marked(&two).len()) == (1, 1) }).await;
        });
        host.signal(Signal::SIGTERM);
        assert!(host.wait().success(), "{}", host.log());
        assert!(host.workers().is_empty(), "workers are gone when the daemon is");
        assert_eq!((marked(&one), marked(&two)), (vec![], vec![]));
        bystander.check();
        host.launch();
        host.with(async |client| {
            let (shell, _) = client.open_kernel("k").await.expect("still known");
            assert_eq!(out(&shell, "echo $x").await, "saved");
        });
        remove_all(&host);
    }
}

#[test]
fn kill_reaps_whole_process_tree() {
    let host = Host::start();
    let bystander = Bystander::new();
    host.with(async |client| {
        let other = kernel(&client, "other", EngineName::Kaish).await;
        out(&other, "x=other").await;
        let others = host.workers();
        for how in ["stop", "remove", "kill"] {
            let (run_away, in_front) = (marker(), marker());
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            run(&shell, &runaway(&run_away)).await;
            let code = format!("/bin/sh -c '/bin/sh -c \"/bin/sleep {in_front}; true\"; true'");
            shell.run(&ExecRequest::code(code)).await.expect("accepted");
            eventually("all of it runs", || async { marked(&in_front).len() == 1 && marked(&run_away).len() == 1 })
                .await;
            let init = inits(&host).into_iter().find(|pid| !others.contains(pid)).expect("its init");
            let all = tree(init);
            assert!(all.len() >= 5, "init, engine, two shells and two sleeps: {all:?}");
            match how {
                "stop" => shell.stop(true).await.expect("stops"),
                "remove" => shell.remove(0).await.expect("removed"),
                _ => strike(init),
            }
            let left = || -> Vec<u32> { all.iter().copied().filter(|pid| Host::is_alive(*pid)).collect() };
            eventually(how, || async { left().is_empty() }).await;
            assert_eq!((marked(&run_away), marked(&in_front)), (vec![], vec![]), "{how}");
            assert_eq!(out(&other, "echo $x").await, "other");
            assert!(others.iter().all(|pid| Host::is_alive(*pid)), "the other kernel's worker was touched");
            bystander.check();
            if how != "remove" {
                client.remove_kernel("k", 0).await.expect("removed");
            }
        }
    });
    remove_all(&host);
}

#[test]
fn restart_leaves_no_orphans() {
    let mut host = Host::start_as(User::Unprivileged);
    let bystander = Bystander::new();
    let names = ["idle", "struck", "stopped"];
    host.with(async |client| {
        for name in names {
            out(&kernel(&client, name, EngineName::Kaish).await, &format!("x={name}")).await;
        }
        client.open_kernel("stopped").await.expect("there").0.stop(false).await.expect("stops");
    });
    for round in 0..3 {
        let before = inits(&host);
        assert_eq!(before.len(), 2, "round {round}");
        host.kill();
        // Its worker dies while no daemon runs.
        let victim = before[round % 2];
        strike(victim);
        until("its end", || !Host::is_alive(victim));
        host.launch();
        let mut said = Vec::new();
        host.with(async |client| {
            for info in client.list_kernels(&Default::default()).await.expect("kernels") {
                said.push((info.spec.name.to_string(), info.state.clone()));
            }
        });
        let live = said.iter().filter(|(_, state)| state == "ready").count();
        assert_eq!(said.len(), 3, "{said:?}");
        assert_eq!(live, 1, "only live kernels are reported as live: {said:?}");
        let now = inits(&host);
        assert_eq!(now.len(), 1, "{said:?}");
        assert!(before.contains(&now[0]), "the other worker was adopted");
        host.with(async |client| {
            for name in names {
                let (shell, _) = client.open_kernel(name).await.expect("there");
                assert_eq!(out(&shell, "echo $x").await, name);
            }
            client.open_kernel("stopped").await.expect("there").0.stop(false).await.expect("stops");
        });
        bystander.check();
    }
    remove_all(&host);
}

#[test]
fn background_job_survives_client_disconnect() {
    for user in users() {
        let mut host = Host::start_as(user);
        let job = marker();
        host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            out(&shell, &format!("/bin/sleep {job} &")).await;
            eventually("it runs", || async { marked(&job).len() == 1 }).await;
        });
        let pid = marked(&job);
        host.with(async |client| {
            let (shell, _) = client.open_kernel("k").await.expect("there");
            let jobs = shell.jobs().await.expect("jobs");
            assert!(jobs.len() == 1 && jobs[0].command.contains(&job), "{jobs:?}");
            assert_eq!(out(&shell, "echo next").await, "next");
        });
        assert_eq!(marked(&job), pid, "the job survived its client");
        host.restart();
        assert_eq!(marked(&job), pid, "the job survived the daemon");
        host.with(async |client| {
            let (shell, _) = client.open_kernel("k").await.expect("there");
            assert_eq!(shell.jobs().await.expect("jobs").len(), 1);
        });
        remove_all(&host);
        assert!(marked(&job).is_empty());
        nothing_is_left(&host);
    }
}

#[test]
fn stop_during_start_leaves_no_worker() {
    let host = Host::start();
    let bystander = Bystander::new();
    for force in [true, false] {
        // From before the worker's process to after its readiness.
        for delay_ms in [0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 400] {
            host.with(async |client| {
                let shell = kernel(&client, "k", EngineName::Kaish).await;
                let running = shell.run(&ExecRequest::code("echo started")).await.expect("accepted");
                tokio::time::sleep(Duration::from_millis(delay_ms)).await;
                if !force {
                    shell.stop(true).await.expect("stops");
                    running.result().await.expect("an end");
                }
                client.remove_kernel("k", 0).await.expect("removed");
            });
            let gone = || host.workers().is_empty();
            // A start under way ends by itself, at its deadline of 30 s at the latest.
            let deadline = Instant::now() + Duration::from_secs(180);
            while !gone() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(gone(), "after {delay_ms} ms: {:?} survive without a kernel\n{}", survivors(&host), host.log());
        }
    }
    bystander.check();
    nothing_is_left(&host);
}

/// Each remaining worker process: its id, name, state and what it waits for.
fn survivors(host: &Host) -> Vec<String> {
    let about = |pid: u32, file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let line = |pid| {
        let stat = about(pid, "stat");
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim().chars().next());
        format!("{pid} {} {state:?} in {}", about(pid, "comm").trim(), about(pid, "stack"))
    };
    host.workers().into_iter().map(line).collect()
}
