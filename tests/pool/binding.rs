//! Environment of a kernel that adopts a warm worker.

use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecStatus;
use ryokan::core::limits;
use ryokan::core::spec::AllowedPath;
use ryokan::core::value::Value;
use ryokan::rpc::convert::spec::SpecRequest;

use super::{READY, pooled, pooled_with, ready, worker_of};
use crate::support::{kernel, out, run, spec, users};

#[test]
fn kernel_takes_warm_worker() {
    for user in users() {
        let host = pooled(user);
        host.with(async |client| {
            let before = ready(&client, "kaish").await;
            assert_eq!((before.idle, before.target, before.taken), (READY, READY, 0));
            let waiting = host.workers();
            let first = kernel(&client, "first", EngineName::Kaish).await;
            assert_eq!(
                out(&first, "echo $RYOKAN_KERNEL $RYOKAN_ORIGIN $RYOKAN_GENERATION $RYOKAN_EPOCH; pwd").await,
                "first original 0 1\n/workspace"
            );
            let init = worker_of(&host, "first");
            assert!(waiting.contains(&init), "{init} was not among {waiting:?}");
            assert_eq!(
                out(&first, "/bin/hostname; cat /etc/hostname /etc/hosts").await,
                "first\nfirst\n127.0.0.1 localhost first\n::1 localhost ip6-localhost"
            );
            // A new worker is made in its place.
            let after = ready(&client, "kaish").await;
            assert_eq!((after.idle, after.active, after.taken, after.missed), (READY, 1, 1, 0));
            let second = kernel(&client, "second", EngineName::Kaish).await;
            run(&first, "x=1; echo secret > /tmp/left; echo secret > /dev/shm/left; echo secret > mine").await;
            let seen = out(&second, "ls /tmp /dev/shm /workspace; echo \"x=$x\"; /usr/bin/env").await;
            assert!(!seen.contains("left") && !seen.contains("mine") && !seen.contains("first"), "{seen}");
            assert!(seen.contains("RYOKAN_KERNEL=second") && seen.contains("x=\n"), "{seen}");
            // Nothing reveals that the worker was waiting.
            let reported =
                out(&second, "cat /proc/self/mountinfo; /bin/sh -c 'tr \"\\0\" \"\\n\" < /proc/self/environ'").await;
            assert!(!reported.contains("slot") && !reported.contains("first"), "{reported}");
            // It ends with its kernel and is never reused.
            client.remove_kernel("first", 0).await.expect("removed");
            super::until(&client, "kaish", |pool| (pool.active, pool.total_destroyed) == (1, 1)).await;
            assert!(!crate::support::Host::is_alive(init));
        });
    }
}

#[test]
fn warm_worker_receives_state() {
    for user in users() {
        let host = pooled_with(user, "[pool.engines.bash]\n[pool.engines.node]\n");
        let given = host.given(user);
        for engine in EngineName::ALL {
            host.with(async |client| {
                ready(&client, engine.name()).await;
                let name = format!("k-{}", engine.name());
                let x = if engine == EngineName::Bash { Value::String("41".into()) } else { Value::Int(41) };
                let mut wanted = spec(&name, engine);
                wanted.paths = vec![AllowedPath { path: given.clone(), writable: true, real: None }];
                let (kernel, _) = client.create_kernel(&wanted, "").await.expect("made");
                let there = given.join("file").display().to_string();
                let (read, write) = match engine {
                    EngineName::Node => (
                        format!("process.stdout.write(require('fs').readFileSync({there:?}))"),
                        format!(
                            "let x = 41; const fs = require('fs'); fs.writeFileSync({:?}, 'new'); fs.writeFileSync('kept', 'kept')",
                            given.join("by").display().to_string()
                        ),
                    ),
                    EngineName::Kaish | EngineName::Bash => (
                        format!("cat {there}"),
                        format!("x=41; echo new > {}; echo kept > kept", given.join("by").display()),
                    ),
                    EngineName::Python => (
                        format!("print(open({there:?}).read(), end='')"),
                        format!(
                            "x = 41; y = lambda: x + 1; open({:?}, 'w').write('new'); open('kept', 'w').write('kept')",
                            given.join("by").display().to_string()
                        ),
                    ),
                };
                assert_eq!(out(&kernel, &read).await, "of the host");
                run(&kernel, &write).await;
                assert_eq!(std::fs::read_to_string(given.join("by")).expect("written").trim(), "new");
                assert_eq!(kernel.var("x").await.expect("x"), x);
                kernel.stop(true).await.expect("stopped");
                ready(&client, engine.name()).await;
                let taken = super::pool_of(&client, engine.name()).await.taken;
                // The next worker was warm, too, and has all the state.
                assert_eq!(kernel.var("x").await.expect("x"), x);
                assert_eq!(super::pool_of(&client, engine.name()).await.taken, taken + 1);
                assert_eq!(out(&kernel, &read).await, "of the host");
                // Information about the kernel itself is not part of its state, and stays when the state is loaded.
                host.ok(&["checkpoint", &name, "-m", "here"]);
                host.ok(&["restore", &name, "here", "--yes"]);
                let own = kernel.var_names().await.expect("names");
                assert!(own.iter().all(|var| !var.starts_with("RYOKAN")), "{own:?}");
                let reported = match engine {
                    EngineName::Kaish | EngineName::Bash => "/usr/bin/printenv RYOKAN_KERNEL",
                    EngineName::Node => "console.log(process.env.RYOKAN_KERNEL)",
                    EngineName::Python => "import os; print(os.environ['RYOKAN_KERNEL'])",
                };
                assert_eq!(out(&kernel, reported).await, name);
                let name = format!("t-{}", engine.name()).parse().expect("a name");
                let (thread, _) = kernel.thread(&name, None, "").await.expect("a thread");
                let kept = match engine {
                    EngineName::Kaish | EngineName::Bash => "cat kept",
                    EngineName::Node => "process.stdout.write(require('fs').readFileSync('kept'))",
                    EngineName::Python => "print(open('kept').read())",
                };
                assert_eq!(out(&thread, kept).await, "kept");
            });
        }
    }
}

#[test]
fn uncommon_kernel_gets_own_pool() {
    let host = pooled_with(crate::support::User::Own, "");
    host.with(async |client| {
        ready(&client, "kaish").await;
        let mut wanted = spec("small", EngineName::Kaish);
        wanted.memory_bytes = Some(256 << 20);
        let (small, _) = client.create_kernel(&wanted, "").await.expect("made");
        assert_eq!(out(&small, "echo small").await, "small");
        let pools = client.pools().await.expect("pools");
        let own = pools.iter().find(|pool| pool.memory_bytes == 256 << 20).expect("a pool of that kind");
        assert_eq!((own.taken, own.missed, own.pool_size), (0, 1, 1));
        let usual = pools.iter().find(|pool| pool.engine == "kaish" && pool.pool_size == READY).expect("the usual");
        assert_eq!(usual.taken, 0);
        // The next kernel of this kind finds a warm worker.
        let own = async || {
            let pools = client.pools().await.expect("pools");
            pools.into_iter().find(|pool| pool.memory_bytes == 256 << 20).expect("a pool of that kind")
        };
        crate::support::eventually("one is ready", async || own().await.idle == 1).await;
        let next = crate::support::spec("next", EngineName::Kaish);
        let (next, _) =
            client.create_kernel(&SpecRequest { memory_bytes: Some(256 << 20), ..next }, "").await.expect("made");
        assert_eq!(out(&next, "echo small").await, "small");
        assert_eq!(own().await.taken, 1);
    });
}

/// Each descriptor that root's kernel passes is held until all have arrived.
#[test]
fn warm_worker_binds_maximum_mounts() {
    for user in users() {
        let host = pooled(user);
        let paths: Vec<_> = (0..limits::MOUNTS).map(|n| host.path("home").join(format!("given{n}"))).collect();
        for (n, path) in paths.iter().enumerate() {
            std::fs::create_dir(path).expect("made");
            std::fs::write(path.join("file"), format!("{n}")).expect("written");
        }
        host.with(async |client| {
            ready(&client, "kaish").await;
            let given =
                paths.iter().map(|path| AllowedPath { path: path.clone(), writable: false, real: None }).collect();
            let wanted = SpecRequest { paths: given, ..spec("many", EngineName::Kaish) };
            let (many, _) = client.create_kernel(&wanted, "").await.expect("made");
            let last = paths.last().expect("one").join("file").display().to_string();
            assert_eq!(out(&many, &format!("cat {last}")).await, (limits::MOUNTS - 1).to_string());
            let pool = super::pool_of(&client, "kaish").await;
            assert_eq!((pool.taken, pool.missed), (1, 0));
        });
    }
}

/// A warm worker has the system paths mounted already: a later mount of a parent directory would cover them.
#[test]
fn mounts_never_hide_system_paths() {
    for user in users() {
        let mut host = crate::support::Host::prepare(user);
        let above = host.path("above");
        std::fs::create_dir_all(above.join("tools")).expect("made");
        if user == crate::support::User::Unprivileged {
            let own = Some(crate::support::UNPRIVILEGED);
            for path in [&above, &above.join("tools")] {
                std::os::unix::fs::chown(path, own, own).expect("given");
            }
        }
        let tools = above.join("tools").display().to_string();
        host.configure(&format!("[sandbox]\nsystem_paths = [{tools:?}]\n[pool]\npool_size = 2\n"));
        host.launch();
        host.with(async |client| {
            ready(&client, "kaish").await;
            let wanted = SpecRequest {
                paths: vec![AllowedPath { path: above.clone(), writable: true, real: None }],
                ..spec("k", EngineName::Kaish)
            };
            let (given, _) = client.create_kernel(&wanted, "").await.expect("made");
            let write = |below: &str| format!("/bin/sh -c 'echo x > {}/{below}/new && echo written'", above.display());
            assert_eq!(out(&given, &write(".")).await, "written");
            let written = run(&given, &write("tools")).await;
            assert!(written.end.status != ExecStatus::Done && !above.join("tools/new").exists(), "{:?}", written.end);
            kernel(&client, "other", EngineName::Kaish).await;
        });
        host.ok(&["exec", "other", "true"]);
        let refused = host.cli(&["mount", "other", &above.display().to_string(), &above.display().to_string(), "--rw"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("would hide"), "{said}");
    }
}

#[test]
fn preloaded_modules_hidden() {
    let host = pooled_with(
        crate::support::User::Own,
        "[engines.python]\npreload = [\"wave\", \"xml.dom.minidom\", \"there_is_no_such_module\"]\n",
    );
    host.with(async |client| {
        ready(&client, "python").await;
        let k = kernel(&client, "k", EngineName::Python).await;
        let code = "import sys; print('wave' in sys.modules, 'xml.dom.minidom' in sys.modules, 'wave' in globals())";
        assert_eq!(out(&k, code).await, "True True False");
        assert_eq!(super::pool_of(&client, "python").await.taken, 1);
        // A worker without preloaded modules loads them at import, and no sooner.
        let mut alone = spec("alone", EngineName::Python);
        alone.memory_bytes = Some(300 << 20);
        let (alone, _) = client.create_kernel(&alone, "").await.expect("made");
        assert_eq!(out(&alone, "import sys; print('wave' in sys.modules)").await, "False");
    });
    let log = host.log();
    assert!(log.contains("cannot be loaded in advance") && log.contains("there_is_no_such_module"), "{log}");
}

/// A waiting worker leaves no trace: its state is byte for byte that of a worker that did not wait.
#[test]
fn worker_rehearsal_leaves_no_trace() {
    use ryokan::session::Session as _;
    let host = pooled_with(crate::support::User::Own, "[pool.engines.bash]\n[pool.engines.node]\n");
    host.with(async |client| {
        for engine in EngineName::ALL {
            ready(&client, engine.name()).await;
            let waited = kernel(&client, &format!("waited-{engine}"), engine).await;
            let mut alone = spec(&format!("alone-{engine}"), engine);
            alone.memory_bytes = Some(280 << 20);
            let (alone, _) = client.create_kernel(&alone, "").await.expect("made");
            let (one, other) = (waited.snapshot().await.expect("saved"), alone.snapshot().await.expect("saved"));
            assert_eq!(super::pool_of(&client, engine.name()).await.taken, 1);
            assert_eq!(one, other, "{engine}");
            assert_eq!(waited.list_vars().await, alone.list_vars().await, "{engine}");
        }
    });
}
