//! What dies: a worker that is ready, one that is being bound, the daemon, an engine again and again.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;

use super::{READY, pool_of, pooled, pooled_with, ready, until, worker_of};
use crate::support::{Host, User, kernel, out, users};

fn send(signal: Signal, to: &[u32]) {
    to.iter().for_each(|pid| kill(Pid::from_raw(*pid as i32), signal).expect("it is there"));
}

/// The inits among a host's processes: children of its daemon.
fn inits(host: &Host) -> Vec<u32> {
    let is_child = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse::<i32>().ok());
        parent == Some(host.pid())
    };
    host.workers().into_iter().filter(is_child).collect()
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn workers_that_are_killed_before_anybody_came_are_replaced() {
    let host = pooled(User::Own);
    host.with(async |client| {
        ready(&client, "kaish").await;
        ready(&client, "python").await;
        let killed = inits(&host);
        assert_eq!(killed.len() as u32, 2 * READY);
        send(Signal::SIGKILL, &killed);
        let pool = until(&client, "kaish", |pool| pool.total_destroyed == u64::from(READY) && pool.idle == READY).await;
        assert_eq!(pool.creation_errors, 0, "{pool:?}");
        ready(&client, "python").await;
        assert!(inits(&host).iter().all(|pid| !killed.contains(pid)));
        assert_eq!(out(&kernel(&client, "k", EngineName::Kaish).await, "echo well").await, "well");
    });
}

#[test]
fn a_worker_that_is_killed_as_it_is_bound_costs_nobody_anything() {
    let host = pooled(User::Own);
    host.with(async |client| {
        ready(&client, "kaish").await;
        ready(&client, "python").await;
        let waiting = inits(&host);
        // They take no call any more, so the kernel's start hangs in the middle.
        send(Signal::SIGSTOP, &waiting);
        let first = kernel(&client, "k", EngineName::Kaish).await;
        let (said, ()) = tokio::join!(out(&first, "echo well"), async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(pool_of(&client, "kaish").await.taken, 1);
            send(Signal::SIGKILL, &waiting);
        });
        assert_eq!(said, "well");
        assert!(!waiting.contains(&worker_of(&host, "k")));
        until(&client, "kaish", |pool| pool.active == 0 && pool.idle == READY).await;
    });
}

#[test]
fn a_daemon_that_is_killed_with_a_full_pool_leaves_nothing() {
    for user in users() {
        let mut host = pooled(user);
        host.with(async |client| {
            ready(&client, "kaish").await;
            ready(&client, "python").await;
            out(&kernel(&client, "k", EngineName::Kaish).await, "x=1").await;
        });
        let before = host.workers();
        let kept = worker_of(&host, "k");
        host.kill();
        // The kernel's worker waits for the next daemon; who has no kernel waits for nobody.
        wait_for("workers without a kernel outlive their daemon", || {
            let alive = host.workers();
            alive.contains(&kept) && alive.len() <= 2
        });
        host.launch();
        host.with(async |client| {
            ready(&client, "kaish").await;
            let k = client.open_kernel("k").await.expect("there").0;
            assert_eq!(out(&k, "echo $x").await, "1");
        });
        assert_eq!(worker_of(&host, "k"), kept);
        assert!(before.contains(&kept));
        host.signal(Signal::SIGTERM);
        host.wait();
        wait_for("workers outlive a daemon that was stopped", || host.workers().is_empty());
        let sockets = std::fs::read_dir(host.path("run").join("ryokan/workers")).map_or(0, Iterator::count);
        assert_eq!(sockets, 0, "sockets are left");
    }
}

#[test]
fn an_engine_that_never_starts_is_tried_less_and_less_and_named() {
    let host = pooled_with(User::Own, "[engines.python]\ncommand = \"/usr/bin/false\"\n");
    host.with(async |client| {
        ready(&client, "kaish").await;
        let failing = until(&client, "python", |pool| pool.creation_errors >= 3).await;
        assert!(failing.trouble.contains("the engine did not start"), "{failing:?}");
        tokio::time::sleep(Duration::from_secs(2)).await;
        // Without a pause it would be some dozens.
        let later = pool_of(&client, "python").await;
        assert!(later.creation_errors < 15 && later.idle == 0, "{later:?}");
        let shown = host.ok(&["pool"]);
        assert!(shown.contains("trouble python") && shown.contains("the engine did not start"), "{shown}");
        assert_eq!(out(&kernel(&client, "k", EngineName::Kaish).await, "echo well").await, "well");
    });
}

#[test]
fn a_daemon_that_nobody_uses_ends_however_many_workers_wait() {
    let host = Host::prepare(User::Own);
    host.configure("[daemon]\nidle_exit = \"1s\"\n[pool]\npool_size = 2\n");
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
