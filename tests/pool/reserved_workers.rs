//! A new kernel adopts a warm worker and its directory. Reserved workers that stay unused, or no longer suit their
//! kernel, are replaced.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::ExecRequest;
use ryokan::rpc::client::KernelClient;
use ryokan::session::Session as _;

use super::worker_failures::inits;
use super::{READY, both_ready, pool_of, pooled, pooled_with, ready, until, with_full_pools, worker_of};
use crate::support::{Host, User, eventually, kernel, out, run, spec, users};

/// Directories of kernels, including those of warm workers, and the modes of the workspaces.
pub(super) fn folders(host: &Host) -> BTreeMap<String, u32> {
    let folder = host.data().join("kernels").read_dir().expect("a folder of kernels").flatten();
    let of = |entry: std::fs::DirEntry| {
        let mode = entry.path().join("workspace").metadata().map_or(0, |found| found.permissions().mode() & 0o777);
        (entry.file_name().to_string_lossy().into_owned(), mode)
    };
    folder.map(of).filter(|(name, _)| !name.starts_with('.')).collect()
}

/// The worker of this kernel's directory.
pub(super) fn standing_on(host: &Host, id: &str) -> Option<u32> {
    let of = |pid: &u32| {
        let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
        mounts.contains(id)
    };
    inits(host).into_iter().find(|pid| of(pid))
}

fn alive(workers: &[u32]) -> Vec<u32> {
    workers.iter().copied().filter(|pid| Host::is_alive(*pid)).collect()
}

async fn id_of(kernel: &KernelClient) -> String {
    kernel.info().await.expect("info").id.to_string()
}

#[test]
fn new_kernel_adopts_worker_directory() {
    for user in users() {
        let host = pooled_with(user, "[pool.engines.bash]\n[pool.engines.node]\n");
        for engine in EngineName::ALL {
            host.with(async |client| {
                ready(&client, engine.name()).await;
                let (before, waiting) = (folders(&host), inits(&host));
                let name = format!("k-{}", engine.name());
                let k = kernel(&client, &name, engine).await;
                let id = id_of(&k).await;
                assert!(before.contains_key(&id), "{engine}: {id} is none of {before:?}");
                // No process could write to it before the kernel owned it.
                assert_eq!((before[&id], folders(&host)[&id]), (0o500, 0o700), "{engine}");
                // It is empty and writable; its state belongs to the kernel from the start.
                let (list, set, get) = match engine {
                    EngineName::Kaish | EngineName::Bash => ("/bin/ls -A", "x=41; echo kept > f", "echo $x; cat f"),
                    EngineName::Python => (
                        "import os; print('\\n'.join(os.listdir('.')), end='')",
                        "x = 41; print('kept', file=open('f', 'w'))",
                        "print(x); print(open('f').read(), end='')",
                    ),
                    EngineName::Node => (
                        "for (const name of require('fs').readdirSync('.')) console.log(name)",
                        "var x = 41; require('fs').writeFileSync('f', 'kept\\n')",
                        "console.log(x); process.stdout.write(require('fs').readFileSync('f'))",
                    ),
                };
                assert_eq!(out(&k, list).await, "", "{engine}");
                assert!(waiting.contains(&worker_of(&host, &name)), "{engine}");
                run(&k, set).await;
                assert_eq!(out(&k, get).await, "41\nkept", "{engine}");
                // Another worker finds all of it, and so does a fork.
                k.stop(true).await.expect("stopped");
                assert_eq!(out(&k, get).await, "41\nkept", "{engine}");
                client.remove_kernel(&name, 0).await.expect("removed");
                ready(&client, engine.name()).await;
                assert!(!folders(&host).contains_key(&id));
            });
        }
        let given = host.given(user);
        // A warm worker adopted by a kernel that had a directory leaves none behind, and works as any other.
        host.with(async |client| {
            let k = kernel(&client, "older", EngineName::Kaish).await;
            run(&k, "x=41").await;
            k.stop(true).await.expect("stopped");
            ready(&client, "kaish").await;
            assert_eq!(out(&k, "echo $x").await, "41");
            for engine in EngineName::ALL {
                ready(&client, engine.name()).await;
            }
            let deadline = std::time::Instant::now() + Duration::from_secs(180);
            // The directories of the warm workers, and the kernel's.
            while folders(&host).len() as u32
                > client.pools().await.expect("pools").iter().map(|pool| pool.total).sum::<u32>()
            {
                assert!(std::time::Instant::now() < deadline, "{:?}", folders(&host));
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            host.ok(&["mount", "older", "/later", &given.display().to_string()]);
            assert_eq!(out(&k, "cat /later/file").await, "of the host");
        });
    }
}

#[test]
fn unused_reservation_expires() {
    for user in users() {
        with_full_pools(user, async |host, client, waiting| {
            let k = kernel(&client, "k", EngineName::Kaish).await;
            assert_eq!((pool_of(&client, "kaish").await.active, alive(&waiting).len()), (1, waiting.len()));
            let after = until(&client, "kaish", |pool| pool.active == 0).await;
            assert_eq!((after.taken, after.missed), (0, 0), "{after:?}");
            assert_eq!(alive(&waiting).len(), waiting.len() - 1);
            ready(&client, "kaish").await;
            assert_eq!(out(&k, "echo well > f; cat f").await, "well");
            assert!(Host::is_alive(worker_of(host, "k")));
        });
    }
}

#[test]
fn reserved_workers_evicted() {
    let mut host = Host::prepare(User::Own);
    host.configure("[limits]\nworkers = 2\n[pool]\npool_size = 1\nmin_idle = 1\nmax_pool_size = 1\n[pool.engines.python]\npool_size = 0\nmin_idle = 0\nmax_pool_size = 0\n");
    host.launch();
    host.with(async |client| {
        ready(&client, "kaish").await;
        let unused = kernel(&client, "unused", EngineName::Kaish).await;
        let waiting = inits(&host);
        // One worker is reserved for its kernel, another is warm; two of another engine need both places.
        let [one, other] =
            [kernel(&client, "one", EngineName::Python).await, kernel(&client, "other", EngineName::Python).await];
        assert_eq!(out(&one, "print(1)").await, "1");
        assert_eq!(out(&other, "print(2)").await, "2");
        assert!(alive(&waiting).is_empty());
        one.stop(true).await.expect("stopped");
        assert_eq!(out(&unused, "echo well").await, "well");
    });
}

/// Creates more kernels in succession than the limit of warm workers per kind.
#[test]
fn reserved_workers_bounded() {
    let host = pooled(User::Own);
    host.with(async |client| {
        for n in 0..12 {
            ready(&client, "kaish").await;
            kernel(&client, &format!("k{n}"), EngineName::Kaish).await;
            let pool = pool_of(&client, "kaish").await;
            assert!(pool.active <= pool.max_pool_size + 1, "{pool:?}");
        }
    });
}

#[test]
fn removal_ends_reserved_worker() {
    for user in users() {
        with_full_pools(user, async |host, client, waiting| {
            let k = kernel(&client, "k", EngineName::Kaish).await;
            let id = id_of(&k).await;
            client.remove_kernel("k", 0).await.expect("removed");
            assert_eq!(alive(&waiting).len(), waiting.len() - 1, "it has ended by then");
            assert!(!folders(host).contains_key(&id));
        });
    }
}

#[test]
fn daemon_kill_before_first_use() {
    for user in users() {
        let mut host = pooled(user);
        let waiting = host.with(async |client| {
            both_ready(&host, &client).await;
            kernel(&client, "k", EngineName::Kaish).await;
            inits(&host)
        });
        host.kill();
        // The kernel's worker, too: it is still unused.
        crate::support::until("all of them end", || alive(&waiting).is_empty());
        host.launch();
        assert_eq!(host.ok(&["exec", "k", "echo well > f; cat f"]), "well\n");
        host.with(async |client| drop(both_ready(&host, &client).await));
        // The directories of the former daemon's workers are gone.
        crate::support::until("only its own are left", || folders(&host).len() == 1 + 2 * READY as usize);
    }
}

#[test]
fn reserved_worker_death_is_harmless() {
    let host = pooled(User::Own);
    host.with(async |client| {
        ready(&client, "kaish").await;
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let id = id_of(&k).await;
        let its = standing_on(&host, &id).expect("a worker in the kernel's directory");
        kill(Pid::from_raw(its as i32), Signal::SIGKILL).expect("killed");
        until(&client, "kaish", |pool| pool.active == 0).await;
        ready(&client, "kaish").await;
        assert_eq!(out(&k, "echo well > f; cat f").await, "well");
    });
}

/// The first use is a checkpoint; a thread of the kernel may write before the kernel's own first use.
#[test]
fn first_use_without_execution() {
    for user in users() {
        let host = pooled(user);
        host.with(async |client| {
            ready(&client, "kaish").await;
            let k = kernel(&client, "k", EngineName::Kaish).await;
            host.ok(&["checkpoint", "k", "-m", "empty"]);
            host.ok(&["restore", "k", "empty", "--yes"]);
            assert_eq!(out(&k, "echo well > f; cat f").await, "well");
            k.stop(true).await.expect("stopped");
            assert_eq!(out(&k, "cat f").await, "well");
            ready(&client, "kaish").await;
            let owner = kernel(&client, "owner", EngineName::Kaish).await;
            let (thread, _) = owner.thread(&"thread".parse().expect("a name"), None, "").await.expect("a thread");
            assert_eq!(out(&thread, "echo well > f; cat f").await, "well");
            assert_eq!(out(&owner, "cat f; x=1; echo $x").await, "well\n1");
        });
    }
}

#[test]
fn mounts_before_first_use_are_kept() {
    for user in users() {
        let host = pooled(user);
        let given = host.given(user);
        host.with(async |client| {
            let waiting = both_ready(&host, &client).await;
            let k = kernel(&client, "k", EngineName::Kaish).await;
            let info = k.info().await.expect("info");
            assert_eq!((info.state.as_str(), info.memory_bytes), ("created", 0), "the kernel is unused");
            // Three programs can outlast the reservation on a busy machine; three requests do not.
            let source = given.to_str().expect("a path");
            k.mount("/later", source, false).await.expect("mounted");
            k.mount("/gone", source, false).await.expect("mounted");
            k.unmount("/gone").await.expect("unmounted");
            assert_eq!(out(&k, "cat /later/file; cat /gone/file || echo none").await, "of the hostnone");
            assert!(waiting.contains(&worker_of(&host, "k")), "the reserved worker was used");
            assert_eq!(out(&k, "/usr/bin/printenv RYOKAN_KERNEL; /usr/bin/hostname").await, "k\nk");
            // Nested mounts are visible in either order.
            ready(&client, "kaish").await;
            let deep = kernel(&client, "deep", EngineName::Kaish).await;
            std::fs::create_dir(given.join("sub")).expect("made");
            host.ok(&["mount", "deep", "/given/sub", &given.display().to_string()]);
            host.ok(&["mount", "deep", "/given", &given.display().to_string()]);
            assert_eq!(out(&deep, "cat /given/sub/file").await, "of the host");
            // A cold worker reports mounts that fail.
            ready(&client, "kaish").await;
            let odd = kernel(&client, "odd", EngineName::Kaish).await;
            // Its mounts identify it, if they are the host's own.
            let promised = standing_on(&host, &id_of(&odd).await);
            assert!(promised.is_some() || user != User::Own);
            host.ok(&["mount", "odd", "/file", &given.join("file").display().to_string()]);
            host.ok(&["mount", "odd", "/file/below", &given.display().to_string()]);
            let refused = odd.run(&ExecRequest::code("echo never")).await.expect("accepted").result().await;
            assert!(format!("{refused:?}").contains("/file"), "{refused:?}");
            host.ok(&["unmount", "odd", "/file/below"]);
            // A start under way may still report the former state.
            eventually("the expected state", async || {
                let ran = odd.run(&ExecRequest::code("cat /file")).await.expect("accepted").result().await;
                ran.expect("a result").stdout == b"of the host"
            })
            .await;
            assert!(!promised.is_some_and(Host::is_alive), "the reserved worker has ended");
        });
    }
}

/// A used kernel's worker waits for the next daemon, except that of an ephemeral kernel.
#[test]
fn daemon_kill_ends_ephemeral_workers() {
    for (user, pool) in users().into_iter().flat_map(|user| [(user, 2), (user, 0)]) {
        let mut host = Host::prepare(user);
        host.configure(&format!("[pool]\npool_size = {pool}\nmin_idle = {pool}\nmax_pool_size = {pool}\n"));
        host.launch();
        let [stays, goes] = host.with(async |client| {
            if pool > 0 {
                ready(&client, "kaish").await;
            }
            let stays = kernel(&client, "stays", EngineName::Kaish).await;
            out(&stays, "x=41").await;
            let mut away = spec("away", EngineName::Kaish);
            away.ephemeral = true;
            let (away, _) = client.create_kernel(&away, "").await.expect("made");
            out(&away, "x=1").await;
            let socket = host.kernel_socket("away");
            eventually("its socket is published", async || socket.exists()).await;
            let workers = ["stays", "away"].map(|name| worker_of(&host, name));
            // While its client is connected.
            kill(Pid::from_raw(host.pid()), Signal::SIGKILL).expect("killed");
            workers
        });
        host.kill();
        crate::support::until("it ends with the daemon", || !Host::is_alive(goes));
        assert!(Host::is_alive(stays));
        host.launch();
        assert_eq!(host.ok(&["exec", "stays", "echo $x"]), "41\n");
        let sockets = ["stays", "away"].map(|name| host.kernel_socket(name).exists());
        assert_eq!(sockets, [true, false], "the socket of a removed kernel is gone");
    }
}

#[test]
fn create_and_run_in_one_call() {
    for user in users() {
        let host = pooled(user);
        host.with(async |client| {
            ready(&client, "kaish").await;
            for (name, ephemeral) in [("away", true), ("stays", false)] {
                let mut wanted = spec(name, EngineName::Kaish);
                wanted.ephemeral = ephemeral;
                let code = ExecRequest::code("x=1; echo $RYOKAN_KERNEL");
                let (k, info, ran) = client.create_and_run(&wanted, "", &code).await.expect("made");
                let ran = ran.expect("it ran");
                assert_eq!((ran.end.code, ran.stdout), (0, format!("{name}\n").into_bytes()), "{}", info.spec.name);
                assert_eq!(out(&k, "echo $x").await, "1");
                let again = client.create_and_run(&wanted, "", &code).await.err().expect("it is there already");
                assert_eq!(again.code, ErrorCode::AlreadyExists);
            }
            // A refused execution leaves the kernel.
            let mut code = ExecRequest::code("echo never");
            code.expected_version = 77;
            let (k, _, ran) = client.create_and_run(&spec("odd", EngineName::Kaish), "", &code).await.expect("made");
            assert_eq!(ran.expect_err("refused").code, ErrorCode::Conflict);
            assert_eq!(out(&k, "echo well").await, "well");
        });
    }
}

#[test]
fn early_mounts_survive_daemon() {
    for user in users() {
        let mut host = pooled(user);
        let given = host.given(user);
        host.with(async |client| {
            ready(&client, "kaish").await;
            kernel(&client, "k", EngineName::Kaish).await;
        });
        host.ok(&["mount", "k", "/later", &given.display().to_string()]);
        host.kill();
        host.launch();
        assert_eq!(host.ok(&["exec", "k", "cat /later/file"]), "of the host");
    }
}

/// Every event of a kernel follows its creation event, which is published once and at once, however the kernel is
/// recorded.
#[test]
fn creation_event_comes_first() {
    let host = pooled(User::Own);
    host.with(async |client| {
        both_ready(&host, &client).await;
        let mut events = client.events(0).await.expect("events");
        while events.next_past().await.expect("an event").is_some() {}
        for n in 0..20 {
            let mut wanted = spec(&format!("k{n}"), EngineName::Kaish);
            wanted.ephemeral = n % 2 == 0;
            if n % 4 < 2 {
                // No other event is published: subscribers receive this one nevertheless.
                client.create_kernel(&wanted, "").await.expect("made");
            } else {
                // The preceding removal may still be on its way to the log.
                let code = ExecRequest::code("x=1");
                client.create_and_run(&wanted, "", &code).await.expect("made").2.expect("ran");
            }
            let reported = async {
                loop {
                    let event = events.next().await.expect("an event");
                    if event.kernel.ends_with(wanted.name.as_str()) {
                        return event.kind;
                    }
                }
            };
            let first = tokio::time::timeout(Duration::from_secs(120), reported).await.expect("the event is published");
            assert_eq!(first, "kernel_created", "k{n}");
            client.remove_kernel(wanted.name.as_str(), 0).await.expect("removed");
        }
    });
    let all = host.ok(&["events", "--json"]);
    assert_eq!(all.matches("\"kernel_created\"").count(), 20);
}
