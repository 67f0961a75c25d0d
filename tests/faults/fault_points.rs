//! The daemon is killed at each labelled step of a durable operation.
//!
//! The next daemon has everything acknowledged; of anything else, all or nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::error::Result;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::ids::Digest;
use ryokan::core::value::Value;
use ryokan::rpc::client::{HostClient, KernelClient, run_local};
use ryokan::sys::fault::{self, LABELS};

use super::{remove_all, until};
use crate::support::{Host, User, kernel, out, spec};

/// Labels that this script does not pass, with the reason.
pub const ELSEWHERE: &[(&str, &str)] = &[
    ("engine.info.set", "the worker's"),
    ("engine.state.apply", "the worker's"),
    ("engine.state.replace", "the worker's"),
    ("engine.state.revise", "tests/teleport"),
    ("kernel.engine.adopt", "tests/teleport"),
    ("kernel.engine.recreate", "tests/checkpoints"),
    ("kernel.files.adopt", "tests/teleport"),
    ("kernel.files.clear", "tests/checkpoints"),
    ("machine.checkpoint.stored", "tests/microvm"),
    ("machine.copy.pages", "tests/microvm"),
    ("machine.copy.save", "tests/microvm"),
    ("machine.copy.seed", "tests/microvm"),
    ("machine.copy.split", "tests/microvm"),
    ("machine.install.done", "tests/microvm"),
    ("machine.installed.bound", "tests/microvm"),
    ("machine.installed.start", "tests/microvm"),
    ("machine.restore.recorded", "tests/microvm"),
    ("machine.resume.pages", "tests/microvm"),
    ("machine.started.record", "tests/microvm"),
    ("machine.suspend.compare", "tests/microvm"),
    ("machine.suspend.forget", "tests/microvm"),
    ("machine.suspend.pages", "tests/microvm"),
    ("machine.suspend.saved", "tests/microvm"),
    ("machine.suspend.seal", "tests/microvm"),
    ("machine.template.boot", "tests/microvm"),
    ("machine.template.exchange", "tests/microvm"),
    ("machine.template.proof", "tests/microvm"),
    ("machine.warm.seed", "tests/microvm"),
    ("machine.warm.bound", "tests/microvm"),
    ("machine.template.publish", "the folder of templates' own tests"),
    ("catalog.decision.rewrite", "tests/teleport"),
    ("catalog.groupmove.advance", "tests/teleport"),
    ("catalog.groupmove.forget", "tests/teleport"),
    ("catalog.groupmove.put", "tests/teleport"),
    ("catalog.handover.activate", "tests/teleport"),
    ("catalog.handover.forget", "tests/teleport"),
    ("catalog.handover.name", "tests/teleport"),
    ("catalog.handover.put", "tests/teleport"),
    ("handover.data.sync", "tests/teleport"),
    ("catalog.keys.forget", "not called yet"),
    ("catalog.keys.remember", "creation remembers its key in the kernel's own commit"),
    ("catalog.kernel.rename", "tests/command_line"),
    ("catalog.kernel.touch", "once in a while"),
    ("catalog.schema.migrate", "new databases are born in the present format"),
    ("catalog.freeze.remove", "tests/freeze"),
    ("catalog.freeze.seal", "tests/freeze"),
    ("catalog.group.add", "tests/freeze"),
    ("catalog.host.key", "tests/freeze"),
    ("catalog.trust.add", "tests/freeze"),
    ("catalog.trust.remove", "tests/freeze"),
    ("host.key.write", "tests/freeze"),
    ("catalog.group.adopt", "tests/freeze"),
    ("catalog.group.arrive", "tests/freeze"),
    ("catalog.group.clear", "tests/freeze"),
    ("catalog.group.create", "tests/freeze"),
    ("catalog.group.drop", "tests/freeze"),
    ("catalog.group.intent", "tests/freeze"),
    ("catalog.group.open", "tests/freeze"),
    ("catalog.group.pause", "tests/freeze"),
    ("catalog.group.pins", "tests/freeze"),
    ("catalog.group.progress", "tests/freeze"),
    ("catalog.group.unpinned", "tests/freeze"),
    ("catalog.group.remove", "tests/freeze"),
    ("catalog.group.restored", "tests/freeze"),
    ("catalog.group.set", "tests/freeze"),
    ("database.files.replace", "tests/freeze"),
    ("freeze.groups.dir", "tests/freeze"),
    ("freeze.import.kernel", "tests/freeze"),
    ("freeze.import.place", "tests/freeze"),
    ("freeze.import.seal", "tests/freeze"),
    ("freeze.import.sync", "tests/freeze"),
    ("freeze.kept.dir", "tests/freeze"),
    ("freeze.member.prepare", "tests/freeze"),
    ("freeze.member.revert", "tests/freeze"),
    ("freeze.member.snapshot", "tests/freeze"),
    ("freeze.member.store", "tests/freeze"),
    ("freeze.member.switch", "tests/freeze"),
    ("freeze.quiesced.clear", "tests/freeze"),
    ("freeze.quiesced.dir", "tests/freeze"),
    ("freeze.quiesced.record", "tests/freeze"),
    ("source.command.restore", "tests/freeze"),
    ("source.directory.discard", "tests/freeze"),
    ("source.directory.switch", "tests/freeze"),
    ("source.directory.switched", "tests/freeze"),
    ("source.postgres.switch", "tests/freeze"),
    ("source.postgres.switched", "tests/freeze"),
    ("source.server.checkout", "tests/freeze"),
    ("source.server.discard", "tests/freeze"),
    ("source.server.keep", "tests/freeze"),
    ("source.server.snapshot", "tests/freeze"),
    ("source.server.start", "tests/freeze"),
    ("source.server.stop", "tests/freeze"),
    ("source.server.switch", "tests/freeze"),
    ("source.server.switched", "tests/freeze"),
    ("repository.files.switch", "tests/freeze"),
    ("repository.head.switch", "tests/freeze"),
    ("repository.history.checkout", "tests/freeze"),
    ("repository.index.switch", "tests/freeze"),
    ("state.checkpoints.withdraw", "tests/freeze"),
    ("kernel.worker.resume", "tests/suspend"),
    ("kernel.worker.suspend", "tests/suspend"),
    ("state.checkpoints.add", "tests/checkpoints"),
    ("state.checkpoints.pin", "one row of one table, as a consent"),
    ("state.checkpoints.remove", "tests/upkeep"),
    ("state.checkpoints.prune", "tests/upkeep"),
    ("host.audit.head", "tests/upkeep"),
    ("state.restore.finish", "tests/checkpoints"),
    ("state.decision.rewrite", "tests/teleport"),
    ("state.transition.abort", "tests/checkpoints"),
    ("state.transition.begin", "tests/checkpoints"),
    ("state.transition.clear", "tests/checkpoints"),
    ("state.transition.commit", "tests/checkpoints"),
    ("state.consent.add", "nothing asks for consent yet"),
    ("state.history.begin", "tests/teleport"),
    ("state.history.import", "tests/teleport"),
    ("state.kernel.begin", "tests/forks"),
    ("state.mcp.put", "needs a server; tests/mcp"),
    ("state.mcp.remove", "needs a server; tests/mcp"),
    ("store.dropped.write", "tests/upkeep, and the store's own tests"),
    ("store.index.remove", "tests/upkeep, and the store's own tests"),
    ("store.index.write", "needs a large store"),
    ("store.pack.create", "the first write only"),
    ("store.pack.remove", "tests/upkeep, and the store's own tests"),
    ("store.pack.seal", "needs a full pack"),
    ("store.pack.sync_dir", "the first write, and each start after one"),
    ("store.pack.trim", "only where a writer died"),
];

/// Labels that only a first start passes.
const FIRST: &[&str] = &[
    "catalog.data.dir",
    "catalog.database.create",
    "catalog.host.first",
    "store.format.write",
    "store.layout.dir",
    "store.part.dir",
];

/// Duration of a lease that is not released.
const LEASE: Duration = Duration::from_millis(300);

/// Operations that were acknowledged before the daemon died.
#[derive(Default, Debug)]
struct Acknowledged {
    set: bool,
    mounted: bool,
    unmounted: bool,
    said: bool,
    said_once: bool,
    decided: bool,
    blob: Option<Digest>,
    large: Option<ryokan::core::ids::ExecId>,
    created: bool,
    removed: bool,
}

fn blob(round: usize) -> Vec<u8> {
    format!("blob of round {round} ").repeat(2000).into_bytes()
}

async fn script(
    client: &HostClient,
    host: &Host,
    round: usize,
    with_worker: bool,
    behind: bool,
    done: &mut Acknowledged,
) -> Result<()> {
    let k = client.open_kernel("k").await?.0;
    let result = k.run(&ExecRequest::code(format!("x={round}"))).await?.result().await?;
    done.set = result.end.status == ExecStatus::Done;
    k.mount_at("/given", host.path("given").to_str().unwrap(), false, 0).await?;
    done.mounted = true;
    k.unmount_at("/given", 0).await?;
    done.unmounted = true;
    k.message("user", &format!("round {round}")).await?;
    done.said = true;
    k.message_once("user", &format!("once in round {round}"), &format!("said {round}"), 0).await?;
    done.said_once = true;
    k.open_decision(&format!("decision of round {round}"), "", &format!("decided {round}"), 0).await?;
    done.decided = true;
    let lease = k.lease("me", LEASE, &[]).await?;
    // The lease may have expired.
    let _ = lease.release().await;
    done.blob = Some(k.put_blob(&blob(round)).await?);
    let large = k.run(&ExecRequest::code(format!("for i in $(seq 1 3000); do echo {round} $i; done"))).await?;
    large.result().await?;
    done.large = Some(large.exec());
    let new = client.create_kernel(&spec("new", EngineName::Kaish), "").await?.0;
    done.created = true;
    if with_worker {
        new.start().await?;
        new.stop(true).await?;
    }
    client.remove_kernel("new", 0).await?;
    done.removed = true;
    // Events are written in the background: waits for the daemon's death, if it is expected.
    let late = Instant::now() + Duration::from_secs(if behind { 60 } else { 0 });
    while Instant::now() < late {
        client.ping().await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

async fn check(client: &HostClient, host: &Host, what: &str, round: usize, done: &Acknowledged) {
    let what = format!("{what}: {done:?}");
    let k: KernelClient = client.open_kernel("k").await.expect("k was acknowledged").0;
    let x = match k.var("x").await.expect("readable") {
        Value::Int(x) => x,
        other => panic!("{what}: {other:?}"),
    };
    assert!(x == round as i64 || (!done.set && x == round as i64 - 1), "{what}: x is {x}");
    let mounts = k.mounts().await.expect("mounts");
    assert!(mounts.is_empty() || !done.unmounted, "{what}: {mounts:?}");
    if !mounts.is_empty() {
        assert_eq!(out(&k, "cat /given/seen").await, "seen", "{what}: a listed mount works");
        k.unmount_at("/given", 0).await.expect("unmounted");
    }
    let (mut last, mut unfinished, mut said) = (0, Vec::new(), Vec::new());
    k.each_journal_entry(0, 0, async |entry| {
        assert_eq!(entry.sequence, last + 1, "{what}: the journal has no hole");
        last = entry.sequence;
        if entry.status == "running" {
            unfinished.push(entry.exec);
        }
        if entry.kind == "message" {
            said.push(entry.text);
        }
        Ok(())
    })
    .await
    .expect("the journal is readable");
    assert!(unfinished.is_empty(), "{what}: {unfinished:?} have no end");
    assert!(said.contains(&format!("user: round {round}")) || !done.said, "{what}");
    // A repeated key returns the acknowledged result, or does the work now: once in any case.
    let once = format!("once in round {round}");
    let there = said.iter().filter(|text| text.ends_with(&once)).count();
    assert!(there == 1 || (there == 0 && !done.said_once), "{what}: said {there} times");
    let (title, key) = (format!("decision of round {round}"), format!("decided {round}"));
    let opened = k.open_decision(&title, "", &key, 0).await.expect("opened now or before").id;
    let mut decisions = 0;
    k.decisions(async |decision| {
        decisions += usize::from(decision.title == title);
        Ok(())
    })
    .await
    .expect("decisions");
    assert_eq!(decisions, 1, "{what}: decision {opened}");
    if let Some(digest) = done.blob {
        assert_eq!(k.blob(digest).await.expect("an acknowledged blob is there"), blob(round), "{what}");
    }
    if let Some(exec) = done.large {
        let result = k.execution(exec).await.expect("known").result().await.expect("a result");
        assert_eq!(result.stdout.iter().filter(|byte| **byte == b'\n').count(), 3000, "{what}: {:?}", result.end);
    }
    match client.open_kernel("new").await {
        Ok((new, _)) => {
            assert!(!done.removed, "{what}: a removed kernel is there");
            assert_eq!(out(&new, "echo whole").await, "whole", "{what}");
            client.remove_kernel("new", 0).await.expect("removed");
        }
        // After its acknowledgement it may be absent only if its removal, the next step of the
        // script, had begun.
        Err(error) => assert_eq!(error.code, ryokan::core::error::ErrorCode::NotFound, "{what}"),
    }
    let folders = std::fs::read_dir(host.data().join("kernels")).unwrap().count();
    assert_eq!(folders, 1, "{what}: something is left of `new`\n{}", host.log());
    assert_eq!(client.list_kernels(&Default::default()).await.expect("a list").len(), 1, "{what}");
    assert_eq!(out(&k, &format!("x={round}; echo $x")).await, round.to_string(), "{what}");
    if round.is_multiple_of(4) {
        // The memory of a worker over many daemons is another test's subject.
        k.stop(true).await.expect("stops");
    }
}

/// A host that passes every point: less is synced without durability against power loss.
fn durable() -> Host {
    let host = Host::prepare(User::Own);
    host.configure("[daemon]\ndurability = \"power\"\n");
    host
}

/// Whether the daemon ended by itself.
fn has_died(host: &Host) -> bool {
    !Host::is_alive(host.pid() as u32)
}

#[test]
fn daemon_kill_at_every_fault_point() {
    let began = Instant::now();
    let mut host = durable();
    host.launch();
    std::fs::create_dir(host.path("given")).unwrap();
    std::fs::write(host.path("given").join("seen"), "seen").unwrap();
    host.with(async |client| {
        out(&kernel(&client, "k", EngineName::Kaish).await, "x=0").await;
    });
    let (mut passed, mut missed) = (BTreeSet::new(), BTreeSet::new());
    let points = fault::points().filter(|(label, _)| {
        !FIRST.contains(&label.name)
            && !label.name.starts_with("workspace.")
            && !ELSEWHERE.iter().any(|(name, _)| *name == label.name)
    });
    for (round, (label, point)) in (1..).zip(points) {
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        let mut done = Acknowledged::default();
        host.spawn();
        until("the daemon serves or is dead", || {
            has_died(&host) || std::os::unix::net::UnixStream::connect(host.socket()).is_ok()
        });
        let with_worker = label.name.starts_with("catalog.worker") || label.name == "catalog.kernel.update";
        let behind = label.name.starts_with("catalog.events") || label.name.starts_with("catalog.audit");
        if label.name.starts_with("state.lease") {
            std::thread::sleep(LEASE);
        }
        let outcome = run_local(async {
            let client = HostClient::connect(&host.socket(), "test").await?;
            script(&client, &host, round, with_worker, behind, &mut done).await
        })
        .unwrap();
        if outcome.is_ok() && !has_died(&host) {
            missed.insert(point.clone());
        } else {
            until(&format!("death at {point} after {outcome:?}"), || has_died(&host));
            passed.insert(label.name);
        }
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        // A record that is written behind may hit the lease, too.
        if label.name.starts_with("state.lease") || behind {
            std::thread::sleep(LEASE);
        }
        host.with(async |client| check(&client, &host, &format!("{point} ({outcome:?})"), round, &done).await);
    }
    eprintln!("killed at {} labels in {:?}; never reached {missed:?}", passed.len(), began.elapsed());
    for label in LABELS {
        // The tests of the workspace and of checkpoints kill at each of these.
        let elsewhere = label.name.starts_with("workspace.")
            || FIRST.contains(&label.name)
            || ELSEWHERE.iter().any(|(name, _)| *name == label.name);
        assert!(elsewhere || passed.contains(label.name), "{} was not reached", label.name);
    }
    remove_all(&host);
}

#[test]
fn daemon_kill_during_first_start() {
    for (label, point) in fault::points().filter(|(label, _)| FIRST.contains(&label.name)) {
        let mut host = durable();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.spawn();
        until("its death", || has_died(&host) || std::os::unix::net::UnixStream::connect(host.socket()).is_ok());
        assert!(has_died(&host), "{point} was not reached");
        host.wait();
        host.env(fault::VARIABLE, "");
        host.launch();
        host.with(async |client| {
            kernel(&client, "k", EngineName::Kaish).await;
            assert_eq!(client.list_kernels(&Default::default()).await.expect("a list").len(), 1, "{}", label.name);
        });
    }
}
