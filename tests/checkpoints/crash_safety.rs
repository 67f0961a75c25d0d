//! A daemon killed during a checkpoint or a restore: the next daemon finds the kernel in one of its two states.

use ryokan::core::engine::EngineName;
use ryokan::rpc::client::{HostClient, run_local};
use ryokan::sys::fault;

use super::log;
use crate::support::{Host, User, kernel, out};

/// Steps that make part of a checkpoint or of a restore durable.
const FAMILIES: [&str; 5] =
    ["state.checkpoints.add", "state.transition.", "state.restore.", "workspace.", "store.pack."];

/// Changes the kernel's files to the second state: many files, and large enough to be cloned.
const TWO: &str = "x=2; echo 2 > f; rm -r d; echo 2 > only-two; \
    /bin/sh -c 'for i in $(seq 1 70); do { echo 2; seq 1 5000; } > m/$i; done'";

/// Makes a kernel with two states, the first as checkpoint `one`.
fn set_up(host: &Host) {
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let one = "x=1; echo 1 > f; mkdir -p d m; echo 1 > d/only-one; rm -f only-two; \
            /bin/sh -c 'for i in $(seq 1 70); do { echo 1; seq 1 5000; } > m/$i; done'";
        out(&k, one).await;
        host.ok(&["checkpoint", "k", "-m", "one"]);
        out(&k, TWO).await;
    });
}

/// The kernel's present state; it must be one of the two, completely.
async fn state(client: &HostClient, what: &str) -> String {
    let k = client.open_kernel("k").await.expect("the kernel is there").0;
    let shown = out(&k, "echo $x $(cat f) $(/bin/sh -c 'head -q -n 1 m/* | sort -u') $(ls)").await;
    let whole = match shown.split_whitespace().collect::<Vec<_>>()[..] {
        ["1", "1", "1", "d", "f", "m"] => "one",
        ["2", "2", "2", "f", "m", "only-two"] => "two",
        _ => panic!("{what}: between two states: {shown:?}"),
    };
    whole.to_owned()
}

#[test]
fn checkpoint_restore_crash_atomicity() {
    let mut host = Host::prepare(User::Own);
    let killed = killed_at_each_step(&mut host, &FAMILIES);
    for label in ["state.checkpoints.add", "state.transition.begin", "state.restore.finish"] {
        assert!(killed.contains(&label), "{label} was not reached: {killed:?}");
    }
    assert!(killed.iter().any(|label| label.starts_with("workspace.")), "{killed:?}");
}

/// The same with drivers that share blocks.
#[test]
fn block_sharing_crash_atomicity() {
    for kind in ["xfs", "btrfs"] {
        let Some((_mounted, mut host)) = Host::prepare_on(kind, User::Own) else { return };
        let killed = killed_at_each_step(&mut host, &["workspace."]);
        for label in ["workspace.file.read", "workspace.place.rename"] {
            assert!(killed.contains(&label), "{kind}: {label} was not reached: {killed:?}");
        }
        let kernel = host.data().join("kernels").read_dir().unwrap().next().unwrap().unwrap().path();
        let left: Vec<_> = kernel.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(
            !left.iter().any(|name| name.to_string_lossy().contains("moment")),
            "{kind}: a snapshot is left: {left:?}"
        );
    }
}

/// Kills the daemon during a restore and an undo, at each step of these families; returns the labels of the kills.
fn killed_at_each_step(host: &mut Host, families: &[&str]) -> Vec<&'static str> {
    host.configure("[daemon]\ndurability = \"power\"\n");
    host.launch();
    set_up(host);
    let points: Vec<_> =
        fault::points().filter(|(label, _)| families.iter().any(|family| label.name.starts_with(family))).collect();
    assert!(points.len() > 10, "{}", points.len());
    let mut killed = Vec::new();
    for (label, point) in points {
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.spawn();
        super::until_served(host);
        let answered = run_local(async {
            let client = HostClient::connect(&host.socket(), "test").await?;
            let k = client.open_kernel("k").await?.0;
            k.restore_checkpoint("one", 0).await?;
            k.undo(0).await
        })
        .unwrap();
        if !Host::is_alive(host.pid() as u32) || (answered.is_err() && host.ends_soon()) {
            killed.push(label.name);
        }
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        host.with(async |client| {
            let what = format!("{point}: {answered:?}");
            let at = state(&client, &what).await;
            assert!(answered.is_err() || at == "two", "{what}: an acknowledged undo was lost: {at}");
            let k = client.open_kernel("k").await.unwrap().0;
            // In either state, both directions are open.
            k.restore_checkpoint("one", 0).await.expect("restores");
            assert_eq!(state(&client, &what).await, "one");
            k.undo(0).await.expect("undoes");
            let two = state(&client, &what).await;
            if two != "two" {
                out(&k, TWO).await;
            }
        });
    }
    let ids: std::collections::BTreeSet<_> = log(host, "k").iter().map(|one| one["id"].to_string()).collect();
    assert_eq!(ids.len(), log(host, "k").len());
    killed
}

#[test]
fn failed_restore_rolls_back() {
    for fault in
        ["workspace.place.rename=eio", "workspace.staging.write=enospc", "state.restore.finish.before_commit=eio"]
    {
        let mut host = Host::prepare(User::Own);
        host.env(fault::VARIABLE, fault);
        host.launch();
        set_up(&host);
        host.with(async |client| {
            let k = client.open_kernel("k").await.unwrap().0;
            let waiting = async {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                state(&client, fault).await
            };
            let (failed, seen) = futures::join!(k.restore_checkpoint("one", 0), waiting);
            let failed = failed.expect_err("it was to fail");
            assert!(failed.message.ends_with("the kernel is as it was"), "{fault}: {failed:?}");
            assert_eq!(seen, "two", "{fault}: the queued execution saw the final state");
            assert_eq!(state(&client, fault).await, "two", "{fault}");
            let undone = k.undo(0).await.expect_err("nothing was restored");
            assert_eq!(undone.code, ryokan::core::error::ErrorCode::NotFound, "{fault}: {undone:?}");
            k.restore_checkpoint("one", 0).await.expect("the fault is over");
            assert_eq!(state(&client, fault).await, "one", "{fault}");
            k.undo(0).await.expect("undone");
            assert_eq!(state(&client, fault).await, "two", "{fault}");
        });
    }
}
