//! A daemon killed, or refused by its disk, during a fork: the child is complete, or leaves no trace.

use std::path::Path;

use ryokan::core::engine::EngineName;
use ryokan::core::error::{Error, ErrorCode};
use ryokan::core::fork::Forking;
use ryokan::rpc::client::{HostClient, run_local};
use ryokan::sys::fault;

use super::folders;
use crate::support::{Host, User, kernel, out, until, users};

/// Steps that make part of a fork durable.
const FAMILIES: [&str; 8] = [
    "catalog.kernel.insert",
    "engine.state.replace",
    "kernel.files.",
    "state.checkpoints.add",
    "state.journal.append",
    "state.kernel.begin",
    "store.pack.",
    "workspace.",
];

/// Labels that must be passed.
const PASSED: [&str; 9] = [
    "catalog.kernel.insert",
    "engine.state.replace",
    "kernel.files.dir",
    "state.checkpoints.add",
    "state.journal.append",
    "state.kernel.begin",
    "workspace.checkout.file",
    "workspace.checkout.folder",
    "workspace.checkout.sync",
];

const SHOW: &str = "echo $x; cat f d/g; ls";

fn set_up(host: &Host) {
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        out(&k, "x=1; echo 1 > f; mkdir d; echo 2 > d/g; for i in $(seq 1 20); do echo $i > \"d/$i\"; done").await;
    });
}

/// Checks that the parent is unchanged and that every listed child is complete. Removes the children; returns their
/// number.
async fn look(client: &HostClient, what: &str) -> usize {
    let mut children = 0;
    for info in client.list_kernels(&Default::default()).await.expect("a list") {
        let kernel = client.open_kernel(info.spec.name.as_str()).await.expect("a listed kernel").0;
        assert_eq!(out(&kernel, SHOW).await, "1\n1\n2\nd\nf", "{what}: {}", info.spec.name);
        if info.spec.name.as_str() != "k" {
            children += 1;
            assert_ne!(info.origin.kind.name(), "original", "{what}");
            kernel.restore_checkpoint("latest", 0).await.expect("its fork point is whole");
            assert_eq!(out(&kernel, SHOW).await, "1\n1\n2\nd\nf", "{what}: restored");
            kernel.remove(0).await.expect("removed");
        }
    }
    children
}

#[test]
fn fork_crash_atomicity() {
    let mut host = Host::prepare(User::Own);
    let kernels = host.data().join("kernels");
    let killed = killed_at_each_step(&mut host, &kernels, &FAMILIES, fork_twice);
    for label in PASSED {
        assert!(killed.contains(&label), "{label} was not reached: {killed:?}");
    }
}

/// The same if a child's files are a snapshot of its parent's.
#[test]
fn btrfs_fork_crash_atomicity() {
    let Some((_mounted, mut host)) = Host::prepare_on("btrfs", User::Own) else { return };
    let kernels = host.data().join("kernels");
    let families = ["kernel.files.", "workspace."];
    let killed = killed_at_each_step(&mut host, &kernels, &families, fork_twice);
    for label in ["workspace.branch.empty", "workspace.branch.snapshot"] {
        assert!(killed.contains(&label), "{label} was not reached: {killed:?}");
    }
}

#[test]
fn import_crash_atomicity() {
    let file = {
        let host = Host::start();
        set_up(&host);
        host.cli(&["export", "k", "-"]).stdout
    };
    let mut host = Host::prepare(User::Own);
    let kernels = host.data().join("kernels");
    let killed = killed_at_each_step(&mut host, &kernels, &FAMILIES, async |client, round| {
        let mut upload = client.import_kernel(&format!("c{round}")).await?;
        upload.write(&file).await?;
        upload.finish(&[]).await.map(|_| 1)
    });
    // Its checkpoints and its first journal entry are written together with the other records.
    for label in PASSED.iter().filter(|label| !["state.journal.append", "state.checkpoints.add"].contains(label)) {
        assert!(killed.contains(label), "{label} was not reached: {killed:?}");
    }
}

/// Creates two children at once.
async fn fork_twice(client: HostClient, round: usize) -> Result<usize, Error> {
    let forking = Forking { count: 2, key: format!("round {round}"), ..Forking::of("c") };
    let forked = client.open_kernel("k").await?.0.fork(&forking).await?;
    forked.children.into_iter().try_fold(0, |made, (_, child)| child.map(|_| made + 1))
}

/// Kills the daemon during kernel creation, at each step of these families; returns the labels of the kills.
fn killed_at_each_step(
    host: &mut Host,
    kernels: &Path,
    families: &[&str],
    make: impl AsyncFn(HostClient, usize) -> Result<usize, Error>,
) -> Vec<&'static str> {
    host.configure("[daemon]\ndurability = \"power\"\n");
    host.launch();
    set_up(host);
    let folders = || kernels.read_dir().unwrap().count();
    let points = fault::points().filter(|(label, _)| families.iter().any(|family| label.name.starts_with(family)));
    let mut killed = Vec::new();
    for (round, (label, point)) in points.enumerate() {
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.spawn();
        until("the daemon serves or is dead", || {
            !Host::is_alive(host.pid() as u32) || std::os::unix::net::UnixStream::connect(host.socket()).is_ok()
        });
        let answered = run_local(async {
            let client = HostClient::connect(&host.socket(), "test").await?;
            make(client, round).await
        });
        let answered = answered.unwrap();
        if !Host::is_alive(host.pid() as u32) || (answered.is_err() && host.ends_soon()) {
            killed.push(label.name);
        }
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        let what = format!("{point}: {answered:?}");
        let known = host.with(async |client| client.list_kernels(&Default::default()).await.unwrap().len());
        assert_eq!(folders(), known, "{what}: something is left\n{}", host.log());
        let children = host.with(async |client| look(&client, &what).await);
        if let Ok(made) = answered {
            assert_eq!(children, made, "{what}: an acknowledged child is missing");
        }
        // Now the fork succeeds.
        host.with(async |client| {
            let k = client.open_kernel("k").await.unwrap().0;
            let again = k.fork(&Forking::of("again")).await.expect("forked");
            assert!(again.children.iter().all(|(_, made)| made.is_ok()), "{what}");
            assert_eq!(look(&client, &what).await, 1, "{what}");
        });
        assert_eq!(folders(), 1, "{what}");
    }
    killed
}

#[test]
fn failed_child_leaves_nothing() {
    for user in users() {
        for fault in [
            "workspace.checkout.file:7=enospc",
            "workspace.checkout.folder=eio",
            "engine.state.replace.before_commit=eio",
            "state.kernel.begin.before_commit=enospc",
            "catalog.kernel.insert.before_commit:2=eio",
        ] {
            let mut host = Host::prepare(user);
            host.env(fault::VARIABLE, fault);
            host.launch();
            set_up(&host);
            host.with(async |client| {
                let k = client.open_kernel("k").await.unwrap().0;
                let forked = k.fork(&Forking { count: 3, ..Forking::of("c") }).await.expect("the fork point is taken");
                let failed = forked.children.iter().filter(|(_, made)| made.is_err()).count();
                assert_eq!(failed, 1, "{user:?} {fault}");
                assert_eq!(folders(&host), 3, "{user:?} {fault}");
                assert_eq!(look(&client, fault).await, 2, "{user:?} {fault}");
            });
        }
    }
}

/// A fork's source stays until the fork is done; its store objects stay as long as a child needs them.
#[test]
fn parent_removal_conflicts_with_fork() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        out(&k, "for n in range(2000): open(f'f{n}', 'w').write('x' * n)").await;
        let removing = async {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            k.remove(0).await
        };
        let forking = Forking { count: 4, ..Forking::of("c") };
        let (forked, removed) = futures::join!(k.fork(&forking), removing);
        let forked = forked.expect("the fork was first");
        let refused = removed.expect_err("the removal was second");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Conflict, "forking"));
        k.remove(0).await.expect("removable now");
        for (name, made) in forked.children {
            let (child, _) = made.expect("made");
            assert_eq!(out(&child, "import os; print(len(os.listdir('.')))").await, "2000", "{name}");
            child.remove(0).await.unwrap();
        }
    });
    assert_eq!(folders(&host), 0);
}
