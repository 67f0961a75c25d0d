//! The daemon is killed at every durable step of retention and collection, and the disk fills up meanwhile. Every
//! visible checkpoint is complete, and no space leaks past the next collection.

use std::collections::BTreeSet;

use ryokan::core::engine::EngineName;
use ryokan::core::error::Result;
use ryokan::core::retention::Retention;
use ryokan::rpc::client::{HostClient, KernelClient, run_local};
use ryokan::sys::fault;

use super::{auto, bytes_of, gc, host, log, manual, packs, sound};
use crate::support::{Host, User, eventually, kernel, out};

/// Labels that collection and retention pass.
const LABELS: &[&str] = &[
    "state.checkpoints.prune",
    "state.checkpoints.remove",
    "store.dropped.write",
    "store.pack.remove",
    "store.pack.write",
    "store.pack.sync",
    "catalog.audit.append",
];

/// One round: files that become garbage, checkpoints that retention expires, one removal by request, a collection.
async fn script(client: &HostClient, round: usize) -> Result<()> {
    let k = client.open_kernel("k").await?.0;
    let run = async |code: String| -> Result<()> {
        k.run(&ryokan::core::exec::ExecRequest::code(code)).await?.result().await.map(drop)
    };
    let mine = format!("mine {round}");
    let waste =
        "import os\nopen('keep', 'wb').write(os.urandom(100_000))\nopen('waste', 'wb').write(os.urandom(2 << 20))";
    run(waste.into()).await?;
    k.checkpoint(&super::taking(ryokan::core::checkpoint::CheckpointType::Auto, &format!("auto {round}"))).await?;
    run("os.remove('waste')".into()).await?;
    k.checkpoint(&super::taking(ryokan::core::checkpoint::CheckpointType::Manual, &mine)).await?;
    run(format!("x = {round}")).await?;
    for n in 0..3 {
        k.checkpoint(&super::taking(ryokan::core::checkpoint::CheckpointType::Auto, &format!("later {n}"))).await?;
    }
    k.remove_checkpoint(&mine, 0).await?;
    client.gc(false, async |_| Ok(())).await.map(drop)
}

/// Every visible checkpoint is complete; after one collection, no unreferenced object and no excess space remain.
fn check(host: &Host, what: &str) {
    sound(host, what);
    host.with(async |client| {
        // Retention may still be removing checkpoints.
        eventually("one collection leaves nothing", async || {
            gc(&client, false).await;
            gc(&client, true).await.1.objects_removed == 0
        })
        .await;
        let (_, left) = gc(&client, true).await;
        let room = bytes_of(&packs(host));
        // Twice the live bytes, for packs of which seven tenths are live, and a little for objects without a file of
        // their own.
        assert!(room < 2 * left.bytes_kept + (1 << 20), "{what}: {room} bytes for {left:?}");
        let k = client.open_kernel("k").await.expect("there").0;
        restorable(&k, what).await;
    });
    sound(host, what);
}

async fn restorable(k: &KernelClient, what: &str) {
    let all = log(k).await;
    assert!(all.iter().any(|one| one.name == "base"), "{what}: {all:?}");
    for one in [all.first(), all.last()].into_iter().flatten() {
        k.restore_checkpoint(&one.id.to_string(), 0)
            .await
            .unwrap_or_else(|error| panic!("{what}: {}: {error}", one.name));
    }
}

fn prepared() -> Host {
    let mut host = Host::prepare(User::Own);
    // Synced as for power loss: all points are passed.
    host.configure("[upkeep]\ninterval = \"never\"\ngrace = \"0s\"\n[daemon]\ndurability = \"power\"\n");
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        k.set_retention(&Retention { newest: Some(2), keep_for_ms: None }, 0).await.expect("set");
        out(&k, "open('base', 'w').write('base' * 1000)").await;
        manual(&k, "base").await;
        auto(&k, "first").await;
    });
    host
}

fn has_died(host: &Host) -> bool {
    !Host::is_alive(host.pid() as u32)
}

#[test]
fn daemon_kill_during_gc() {
    let mut host = prepared();
    let points: Vec<(&str, String)> = fault::points()
        .filter(|(label, _)| LABELS.contains(&label.name))
        .map(|(label, point)| (label.name, point))
        .collect();
    let mut passed = BTreeSet::new();
    for (round, (label, point)) in points.into_iter().enumerate() {
        host.kill();
        // A checkpoint passes these labels as well; a later pass is the collection's.
        for pass in if label.starts_with("store.pack.") || label.starts_with("catalog") { vec![1, 12] } else { vec![1] }
        {
            let what = format!("{point}:{pass}");
            host.env(fault::VARIABLE, &format!("{what}=kill"));
            host.spawn();
            wait(&host);
            let outcome = run_local(async {
                let client = HostClient::connect(&host.socket(), "test").await?;
                script(&client, 100 * round + pass).await
            })
            .unwrap();
            if outcome.is_err() || has_died(&host) {
                let late = std::time::Instant::now() + std::time::Duration::from_secs(180);
                while !has_died(&host) {
                    assert!(std::time::Instant::now() < late, "{what}: {outcome:?}\n{}", host.log());
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                passed.insert(label);
            }
            host.kill();
            host.env(fault::VARIABLE, "");
            host.launch();
            check(&host, &what);
            host.kill();
        }
        host.launch();
    }
    assert_eq!(passed, LABELS.iter().copied().collect());
}

fn wait(host: &Host) {
    let late = std::time::Instant::now() + std::time::Duration::from_secs(180);
    while !has_died(host) && std::os::unix::net::UnixStream::connect(host.socket()).is_err() {
        assert!(std::time::Instant::now() < late, "{}", host.log());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn full_disk_aborts_only_gc() {
    for (point, pass) in
        [("store.dropped.write.create", 1), ("store.dropped.write.rename", 1), ("store.pack.write", 14)]
    {
        let mut host = prepared();
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}:{pass}=enospc"));
        host.launch();
        // It may fail, or succeed with the reserved space.
        let outcome = host.with(async |client| script(&client, 1).await);
        sound(&host, &format!("{point}: {outcome:?}"));
        check(&host, point);
    }
}

#[test]
fn audit_log_survives_daemon_kill() {
    for (_, point) in fault::points().filter(|(label, _)| label.name == "host.audit.head") {
        let mut host = host(User::Own);
        host.ok(&["new", "k"]);
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.launch();
        host.signal(nix::sys::signal::Signal::SIGTERM);
        assert!(!host.wait().success(), "{point} was not reached");
        host.env(fault::VARIABLE, "");
        host.launch();
        assert!(host.ok(&["audit", "--verify"]).contains("intact"), "{point}");
    }
}
