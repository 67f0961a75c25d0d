//! Garbage is removed, and nothing else.

use std::cell::Cell;

use ryokan::core::engine::EngineName;
use ryokan::core::retention::Retention;
use ryokan::core::upkeep::GcThing;

use super::{auto, bytes_of, gc, host, log, manual, packs, sound};
use crate::support::{Host, User, eventually, kernel, out, until, users};

/// Python code that writes `count` incompressible files of a megabyte.
fn noise(count: usize) -> String {
    format!("import os\nfor n in range({count}): open(f'noise{{n}}', 'wb').write(os.urandom(1 << 20))")
}

#[test]
fn gc_dry_run_changes_nothing() {
    for user in users() {
        let host = host(user);
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Python).await;
            k.set_retention(&Retention { newest: Some(2), keep_for_ms: None }, 0).await.expect("set");
            out(&k, &noise(8)).await;
            auto(&k, "large").await;
            let blob = k.put_blob(&vec![7; 300_000]).await.expect("stored");
            out(&k, "import os\nfor n in range(8): os.remove(f'noise{n}')").await;
            manual(&k, "small").await;
            let large = bytes_of(&packs(&host));
            assert!(large > 8 << 20, "{large}");
            out(&k, "x = 1").await;
            auto(&k, "one").await;
            auto(&k, "two").await;
            eventually("the large checkpoint is removed", async || log(&k).await.len() == 3).await;
            let large = bytes_of(&packs(&host));
            let (items, would) = gc(&client, true).await;
            assert!(would.dry_run && would.bytes_removed > 8 << 20, "{would:?}");
            let objects = items.iter().filter(|item| matches!(item.thing, GcThing::Object { .. })).count() as u64;
            assert_eq!(objects, would.objects_kept + would.objects_removed, "every object is counted");
            for item in &items {
                match &item.thing {
                    GcThing::Checkpoint { .. } => assert!(item.stays, "{item:?}"),
                    GcThing::Object { digest, .. } if *digest == blob => {
                        assert_eq!((item.stays, item.why.as_str()), (true, "a blob of kernel k needs it"));
                    }
                    GcThing::Object { .. } if item.stays => assert!(item.why.contains("kernel k"), "{item:?}"),
                    GcThing::Object { .. } => assert_eq!(item.why, "nothing names it"),
                }
            }
            assert_eq!(bytes_of(&packs(&host)), large, "nothing was changed");
            let (_, done) = gc(&client, false).await;
            assert_eq!((done.objects_removed, done.objects_kept), (would.objects_removed, would.objects_kept));
            let left = bytes_of(&packs(&host));
            assert!(left < 1 << 20, "{user:?}: {left} of {large} bytes are left");
            // A second run finds nothing to do.
            let (_, again) = gc(&client, false).await;
            assert_eq!((again.objects_removed, again.packs_removed), (0, 0));
            assert_eq!(k.blob(blob).await.expect("a granted blob stays").len(), 300_000);
            k.restore_checkpoint("small", 0).await.expect("restored");
            assert_eq!(out(&k, "print(os.listdir('.'))").await, "[]");
        });
        sound(&host, "after collection");
    }
}

#[test]
fn concurrent_gc_loses_nothing() {
    let host = host(User::Own);
    host.with(async |client| {
        let mut kernels = Vec::new();
        for n in 0..50 {
            let k = kernel(&client, &format!("k{n}"), EngineName::Kaish).await;
            k.set_retention(&Retention { newest: Some(2), keep_for_ms: None }, 0).await.expect("set");
            kernels.push(k);
        }
        let done = Cell::new(false);
        let work = async {
            for round in 0..4 {
                let all = kernels.iter().enumerate().map(|(n, k)| async move {
                    // Some contents are shared, some return, some are new.
                    let code = format!(
                        "x={round}; echo same{} > same; echo {n} {round} > own; seq 1 {} > large",
                        round % 2,
                        20_000 + n * round
                    );
                    out(k, &code).await;
                    auto(k, &format!("c{round}")).await;
                });
                futures::future::join_all(all).await;
            }
            done.set(true);
        };
        let collections = Cell::new(0);
        let collect = async {
            while !done.get() {
                gc(&client, false).await;
                collections.set(collections.get() + 1);
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        futures::join!(work, collect);
        assert!(collections.get() > 0);
        for (n, k) in kernels.iter().enumerate() {
            k.restore_checkpoint("c2", 0).await.expect("it is whole");
            assert_eq!(out(k, "echo $x; cat same own").await, format!("2\nsame0\n{n} 2"));
        }
    });
    sound(&host, "after collections beside fifty kernels");
}

#[test]
fn gc_passes_over_removed_kernels() {
    let host = host(User::Own);
    host.with(async |client| {
        let mut kernels = Vec::new();
        for n in 0..40 {
            let k = kernel(&client, &format!("k{n}"), EngineName::Kaish).await;
            auto(&k, "one").await;
            kernels.push(format!("k{n}"));
        }
        let done = Cell::new(false);
        let remove = async {
            for name in &kernels {
                client.remove_kernel(name, 0).await.expect("removed");
            }
            done.set(true);
        };
        let collect = async {
            while !done.get() {
                // Both fail the test on an error.
                gc(&client, true).await;
                gc(&client, false).await;
                client.disk_usage("").await.expect("measured");
            }
        };
        futures::join!(remove, collect);
    });
    sound(&host, "after removals beside collections");
}

#[test]
fn gc_keeps_objects_in_use() {
    let host = host(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        // The tree of a comparison with the present belongs to no checkpoint, and the next capture builds upon it.
        out(&k, "import os\nfor n in range(200): open(f'f{n}', 'w').write(str(n) * 500)").await;
        manual(&k, "one").await;
        out(&k, "for n in range(200): open(f'f{n}', 'w').write(str(n) * 501)").await;
        k.diff("one", "", async |_| Ok(())).await.expect("compared");
        gc(&client, false).await;
        out(&k, "open('f0', 'w').write('changed')").await;
        manual(&k, "two").await;
        gc(&client, false).await;
        out(&k, "for n in range(200): os.remove(f'f{n}')").await;
        k.restore_checkpoint("two", 0).await.expect("restored");
        assert_eq!(out(&k, "print(open('f0').read(), len(open('f199').read()))").await, "changed 1503");
        // The next capture builds upon restored contents, too, even if their checkpoint is removed.
        k.restore_checkpoint("one", 0).await.expect("restored");
        manual(&k, "three").await;
        k.undo(0).await.expect("undone");
        for name in ["one", "two"] {
            k.remove_checkpoint(name, 0).await.expect("removed");
        }
        gc(&client, false).await;
        out(&k, "open('new', 'w').write('new')").await;
        manual(&k, "four").await;
        k.restore_checkpoint("three", 0).await.expect("restored");
        k.restore_checkpoint("four", 0).await.expect("restored");
        assert_eq!(out(&k, "print(open('new').read(), open('f0').read())").await, "new changed");
    });
    sound(&host, "with trees that were in use");
}

/// Sets a budget and an interval; work beyond the budget waits for the next runs.
#[test]
fn gc_runs_periodically() {
    let mut host = Host::prepare(User::Own);
    host.configure(
        "[upkeep]\ninterval = \"300ms\"\ngrace = \"0s\"\ncopy_limit = \"64M\"\n[defaults]\nkeep_checkpoints = 1\n",
    );
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        out(&k, &noise(6)).await;
        auto(&k, "large").await;
        assert!(bytes_of(&packs(&host)) > 6 << 20);
        out(&k, "import os\nfor n in range(6): os.remove(f'noise{n}')").await;
        auto(&k, "small").await;
        eventually("space is freed", async || bytes_of(&packs(&host)) < 1 << 20).await;
    });
    // The report follows the deletion.
    until("an event", || host.ok(&["events", "--json"]).contains("\"gc_done\""));
    until("an audit entry", || host.ok(&["audit"]).contains("host.gc"));
    // Idle runs do not write to the log again and again.
    let lines = || host.ok(&["audit"]).matches("host.gc").count();
    until("the runs are idle", || {
        let before = lines();
        std::thread::sleep(std::time::Duration::from_millis(1500));
        lines() == before
    });
}

#[test]
fn unreadable_kernel_blocks_gc() {
    let mut host = host(User::Own);
    host.with(async |client| {
        for name in ["bad", "good"] {
            let k = kernel(&client, name, EngineName::Kaish).await;
            out(&k, &format!("seq 1 50000 > {name}")).await;
            manual(&k, name).await;
        }
        client.remove_kernel("good", 0).await.expect("removed");
    });
    host.kill();
    let state_db = super::kernel_folder(&host).join("state.db");
    let mut wal = state_db.clone().into_os_string();
    wal.push("-wal");
    let _ = std::fs::remove_file(wal);
    let bytes = std::fs::read(&state_db).unwrap();
    std::fs::write(&state_db, vec![0x5a; bytes.len().max(4096)]).unwrap();
    host.launch();
    let before = bytes_of(&packs(&host));
    let refused = host.cli(&["gc"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("bad"), "{said}");
    assert_eq!(bytes_of(&packs(&host)), before);
    // Without the damaged kernel, all references are known.
    host.ok(&["rm", "bad", "--yes"]);
    host.ok(&["gc"]);
    assert!(bytes_of(&packs(&host)) < before);
}
