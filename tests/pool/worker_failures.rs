//! Failures: of a warm worker, of a worker being bound, of the daemon, of an engine repeatedly.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::info::PoolInfo;
use ryokan::rpc::client::{ExecutionClient, HostClient, KernelClient};

use super::{READY, both_ready, pool_of, pooled, pooled_with, ready, until, with_full_pools, worker_of};
use crate::support::{Host, User, kernel, out, spec, users};

fn send(signal: Signal, to: &[u32]) {
    to.iter().for_each(|pid| kill(Pid::from_raw(*pid as i32), signal).expect("it is there"));
}

/// The inits among a host's processes: children of its spawner.
pub(super) fn inits(host: &Host) -> Vec<u32> {
    children(host.spawner().expect("a spawner"))
}

fn children(of: u32) -> Vec<u32> {
    let report_text = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    report_text.split_whitespace().map(|pid| pid.parse().expect("a process")).collect()
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// For every kind of stop, no client waits for a stopped worker.
#[test]
fn stopped_warm_workers_replaced() {
    for user in users() {
        let host = pooled_with(user, "maintenance_interval = \"1s\"\n[pool.engines.python]\npool_size = 0\n");
        host.with(async |client| {
            ready(&client, "kaish").await;
            let stopped = inits(&host);
            assert_eq!(stopped.len() as u32, READY);
            // One worker by its init, the other by its engine.
            send(Signal::SIGSTOP, &[stopped[0], children(stopped[1])[0]]);
            let is_well = |pool: &PoolInfo| pool.total_destroyed == u64::from(READY) && pool.idle == READY;
            until(&client, "kaish", is_well).await;
            assert!(inits(&host).iter().all(|pid| !stopped.contains(pid)));
            assert_eq!(out(&kernel(&client, "k", EngineName::Kaish).await, "echo well").await, "well");
            let (taken, worker) = (pool_of(&client, "kaish").await, worker_of(&host, "k"));
            assert_eq!(taken.missed, 0, "it waited for a worker: {taken:?}");
            assert!(!stopped.contains(&worker), "it waited for a stopped worker");
            // Healthy workers are left alone.
            tokio::time::sleep(Duration::from_secs(3)).await;
            let pool = pool_of(&client, "kaish").await;
            assert_eq!((pool.total_destroyed, pool.trouble.as_str()), (u64::from(READY), ""), "{pool:?}");
        });
    }
}

#[test]
fn killed_warm_workers_replaced() {
    with_full_pools(User::Own, async |host, client, killed| {
        assert_eq!(killed.len() as u32, 2 * READY);
        send(Signal::SIGKILL, &killed);
        let pool = until(&client, "kaish", |pool| pool.total_destroyed == u64::from(READY) && pool.idle == READY).await;
        assert_eq!(pool.creation_errors, 0, "{pool:?}");
        ready(&client, "python").await;
        assert!(inits(host).iter().all(|pid| !killed.contains(pid)));
        assert_eq!(out(&kernel(&client, "k", EngineName::Kaish).await, "echo well").await, "well");
    });
}

#[test]
fn killed_spawner_replaced() {
    for user in users() {
        let mut host = pooled(user);
        let (spawner, before) = host.with(async |client| {
            both_ready(&host, &client).await;
            let k = kernel(&client, "k", EngineName::Kaish).await;
            assert_eq!(out(&k, "x=41; echo well").await, "well");
            ready(&client, "kaish").await;
            let (spawner, before) = (host.spawner().expect("a spawner"), worker_of(&host, "k"));
            send(Signal::SIGKILL, &[spawner]);
            assert_eq!(out(&k, "echo $x").await, "41");
            // More kernels than warm workers: some start cold.
            for n in 0..2 * READY {
                let name = format!("after{n}");
                assert_eq!(out(&kernel(&client, &name, EngineName::Kaish).await, "echo well").await, "well");
            }
            let pool = ready(&client, "kaish").await;
            assert_eq!((pool.creation_errors, pool.trouble.as_str()), (0, ""), "{pool:?}");
            assert_eq!(worker_of(&host, "k"), before);
            (spawner, before)
        });
        let next = host.spawner().expect("another one");
        assert_ne!(next, spawner);
        // The spawner belongs to the daemon and ends with it; the workers wait for the next daemon.
        host.kill();
        wait_for("the spawner stays", || !Host::is_alive(next));
        assert!(Host::is_alive(before));
        host.launch();
        assert_eq!(host.ok(&["exec", "k", "echo $x"]), "41\n");
    }
}

#[test]
fn hanging_spawner_replaced() {
    with_full_pools(User::Own, async |host, client, _| {
        let spawner = host.spawner().expect("a spawner");
        send(Signal::SIGSTOP, &[spawner]);
        // No worker of its kind is ready.
        let mut odd = spec("odd", EngineName::Kaish);
        odd.memory_bytes = Some(290 << 20);
        let odd = client.create_kernel(&odd, "").await.expect("made").0;
        assert_eq!(out(&odd, "echo well").await, "well");
        assert_ne!(host.spawner(), Some(spawner));
    });
}

#[test]
fn worker_kill_during_binding() {
    with_full_pools(User::Own, async |host, client, waiting| {
        // They accept no calls any more, so the kernel's start blocks half-way.
        send(Signal::SIGSTOP, &waiting);
        let first = kernel(&client, "k", EngineName::Kaish).await;
        let (said, ()) = tokio::join!(out(&first, "echo well"), async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(pool_of(&client, "kaish").await.active, 1);
            send(Signal::SIGKILL, &waiting);
        });
        assert_eq!(said, "well");
        assert!(!waiting.contains(&worker_of(host, "k")));
        let after = until(&client, "kaish", |pool| pool.active == 0 && pool.idle == READY).await;
        assert_eq!((after.taken, after.missed), (0, 1), "{after:?}");
        let info = first.info().await.expect("info");
        assert_eq!((info.executions, info.state.as_str()), (1, "ready"));
        // No crash is reported.
        assert!(!host.ok(&["events", "k", "--json"]).contains("crash"));
    });
}

fn kill_those_left(pids: &[u32]) {
    for pid in pids {
        let _ = kill(Pid::from_raw(*pid as i32), Signal::SIGKILL);
    }
}

/// Stops the workers, so that the bind for the first execution of a new kernel never completes.
async fn start_on_stopped(client: &HostClient, name: &str, workers: &[u32]) -> (KernelClient, ExecutionClient) {
    send(Signal::SIGSTOP, workers);
    let k = kernel(client, name, EngineName::Kaish).await;
    let asked = k.run(&ExecRequest::code("echo ran > f; echo ran")).await.expect("accepted");
    (k, asked)
}

/// The execution waits for a worker whose bind never completes.
#[test]
fn interrupted_before_binding_never_runs() {
    with_full_pools(User::Own, async |host, client, waiting| {
        let (k, asked) = start_on_stopped(&client, "k", &waiting).await;
        k.interrupt_execution(asked.exec()).await.expect("asked");
        kill_those_left(&waiting);
        let ended = asked.result().await.expect("a result");
        assert_eq!((ended.end.status, ended.stdout.len()), (ExecStatus::Interrupted, 0), "{:?}", ended.end);
        assert_eq!(out(&k, "test -e f || echo nothing").await, "nothing");
        // The same while its kernel is stopped.
        ready(&client, "kaish").await;
        let waiting = inits(host);
        let (k, asked) = start_on_stopped(&client, "stopped", &waiting).await;
        let (stopped, ()) = tokio::join!(k.stop(true), async {
            let ended = asked.result().await.expect("a result").end;
            let never_ran = (ExecStatus::Interrupted, "the kernel was stopped before it ran");
            assert_eq!((ended.status, ended.err.as_str()), never_ran);
            kill_those_left(&waiting);
        });
        stopped.expect("stopped");
        assert_eq!(out(&k, "test -e f || echo nothing").await, "nothing");
    });
}

#[test]
fn dead_warm_engine_replaced() {
    for (signal, engine, code) in
        [(Signal::SIGKILL, EngineName::Kaish, "echo well"), (Signal::SIGSTOP, EngineName::Python, "print('well')")]
    {
        with_full_pools(User::Own, async |host, client, inits| {
            let engines: Vec<u32> = inits.iter().flat_map(|init| children(*init)).collect();
            assert_eq!(engines.len() as u32, 2 * READY, "each has one");
            send(signal, &engines);
            // At once, even if the daemon has not noticed yet.
            assert_eq!(out(&kernel(&client, "k", engine).await, code).await, "well");
            let worker = worker_of(host, "k");
            assert!(!inits.contains(&worker), "{worker} of {inits:?}");
            until(&client, engine.name(), |pool| pool.idle == pool.target && pool.creating == 0).await;
        });
    }
}

/// Starts the next daemon, whose kernel `k` still has this `x`.
fn relaunch(host: &mut Host, x: &str) {
    host.launch();
    host.with(async |client| {
        ready(&client, "kaish").await;
        let k = client.open_kernel("k").await.expect("there").0;
        assert_eq!(out(&k, "echo $x").await, x);
    });
}

#[test]
fn daemon_kill_during_binding() {
    for user in users() {
        let mut host = pooled(user);
        host.with(async |client| {
            both_ready(&host, &client).await;
            let k = kernel(&client, "k", EngineName::Kaish).await;
            out(&k, "x=41").await;
            k.stop(true).await.expect("stopped");
            ready(&client, "kaish").await;
        });
        let waiting = inits(&host);
        // The bind reaches the worker's socket; it is read when the daemon is gone.
        send(Signal::SIGSTOP, &waiting);
        let mut asks = host.command("ryokan").args(["exec", "k", "echo $x"]).spawn().expect("runs");
        host.with(async |client| {
            until(&client, "kaish", |pool| pool.active == 1).await;
        });
        std::thread::sleep(Duration::from_millis(200));
        host.kill();
        send(Signal::SIGCONT, &waiting);
        assert!(!asks.wait().expect("ended").success());
        relaunch(&mut host, "41");
        // At most one of them belongs to the kernel by now; it ends with the kernel.
        let left = || waiting.iter().filter(|pid| Host::is_alive(**pid)).count();
        wait_for("workers of the former pool are left", || left() <= 1);
        host.ok(&["stop", "k"]);
        wait_for("a worker has no kernel and stays", || left() == 0);
    }
}

#[test]
fn daemon_kill_with_full_pool() {
    for user in users() {
        let mut host = pooled(user);
        host.with(async |client| {
            both_ready(&host, &client).await;
            out(&kernel(&client, "k", EngineName::Kaish).await, "x=1").await;
        });
        let before = host.workers();
        let kept = worker_of(&host, "k");
        host.kill();
        // The kernel's worker waits for the next daemon; workers without a kernel exit.
        wait_for("workers without a kernel outlive their daemon", || {
            let alive = host.workers();
            alive.contains(&kept) && alive.len() <= 2
        });
        relaunch(&mut host, "1");
        assert_eq!(worker_of(&host, "k"), kept);
        assert!(before.contains(&kept));
        host.signal(Signal::SIGTERM);
        host.wait();
        wait_for("workers outlive a daemon that was stopped", || host.workers().is_empty());
        let sockets = std::fs::read_dir(host.path("run").join("ryokan/workers")).expect("readable").count();
        assert_eq!(sockets, 0, "sockets are left");
    }
}

#[test]
fn failing_engine_starts_back_off() {
    let host = pooled_with(User::Own, "[engines.python]\ncommand = \"/usr/bin/false\"\n");
    host.with(async |client| {
        ready(&client, "kaish").await;
        let failing = until(&client, "python", |pool| pool.creation_errors >= 3).await;
        assert!(failing.trouble.contains("the engine did not start"), "{failing:?}");
        tokio::time::sleep(Duration::from_secs(2)).await;
        // Without the back-off there would be dozens.
        let later = pool_of(&client, "python").await;
        assert!(later.creation_errors < 15 && later.idle == 0, "{later:?}");
        let shown = host.ok(&["pool"]);
        assert!(shown.contains("trouble python") && shown.contains("the engine did not start"), "{shown}");
        assert_eq!(out(&kernel(&client, "k", EngineName::Kaish).await, "echo well").await, "well");
    });
}

#[test]
fn idle_exit_with_warm_workers() {
    let host = Host::prepare(User::Own);
    // Time for the first client.
    host.configure("[daemon]\nidle_exit = \"10s\"\n[pool]\npool_size = 2\n");
    let mut daemon =
        host.command("ryokand").arg("--on-demand").stderr(std::process::Stdio::null()).spawn().expect("runs");
    wait_for("the daemon does not serve", || std::os::unix::net::UnixStream::connect(host.socket()).is_ok());
    host.with(async |client| {
        ready(&client, "kaish").await;
        client.remove_kernel("none", 0).await.expect_err("there is none");
    });
    wait_for("the daemon does not end", || !Host::is_alive(daemon.id()));
    assert!(daemon.wait().expect("ended").success());
    wait_for("workers outlive it", || host.workers().is_empty());
}
