//! Checkpoints with each capture driver, through daemon and worker, for root and for an ordinary user.

use ryokan::core::engine::EngineName;
use serde_json::Value;

use super::checkpoint;
use crate::support::{Host, kernel, out, users};

fn everything_comes_back_on(kind: &str, driver: &str) {
    for user in users() {
        let Some((_mounted, mut host)) = Host::prepare_on(kind, user) else { return };
        host.launch();
        let show = |host: &Host| -> Value { serde_json::from_str(&host.ok(&["show", "k", "--json"])).unwrap() };
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Kaish).await;
            out(&k, "seq 1 100000 > large; mkdir d; echo one > d/f; /usr/bin/ln large again").await;
            assert!(show(&host)["capture"].as_str().unwrap().starts_with(driver), "{}", show(&host));
            checkpoint(&host, "k", "one");
            out(&k, "seq 2 90000 > large; rm -r d; echo two > new").await;
            host.ok(&["restore", "k", "one", "--yes"]);
            let sum = out(&k, "tail -n 1 large; cat d/f; ls; /usr/bin/stat -c '%h' large").await;
            assert_eq!(sum.split_whitespace().collect::<Vec<_>>(), ["100000", "one", "again", "d", "large", "2"]);
            host.ok(&["undo", "k", "--yes"]);
            assert_eq!(out(&k, "tail -n 1 large; cat new; ls").await.split_whitespace().last(), Some("new"));
            assert!(show(&host)["capture"].as_str().unwrap().starts_with(driver), "{}", show(&host));
        });
        // The next daemon continues with the same files.
        host.kill();
        host.launch();
        host.with(async |client| {
            let k = client.open_kernel("k").await.unwrap().0;
            host.ok(&["restore", "k", "one", "--yes"]);
            assert_eq!(out(&k, "tail -n 1 large").await.trim(), "100000");
            let doctor: Vec<Value> = serde_json::from_str::<Value>(&host.ok(&["doctor", "--json"]))
                .map(|list| list.as_array().cloned().unwrap_or_default())
                .unwrap();
            let has = |name: &str| doctor.iter().find(|a| a["name"] == name).is_some_and(|a| a["present"] == true);
            assert_eq!((has("reflink"), has("btrfs")), (!driver.starts_with("tracked"), driver.starts_with("btrfs")));
        });
        // A fork has its own copy of the files.
        host.ok(&["fork", "k", "child"]);
        host.with(async |client| {
            let child = client.open_kernel("child").await.unwrap().0;
            let has =
                out(&child, "tail -n 1 large; /usr/bin/stat -c '%h' large; cat d/f; echo other > large; rm -r d").await;
            assert_eq!(has.split_whitespace().collect::<Vec<_>>(), ["100000", "2", "one"]);
            checkpoint(&host, "child", "changed");
            let k = client.open_kernel("k").await.unwrap().0;
            assert_eq!(out(&k, "tail -n 1 large; cat d/f").await.split_whitespace().last(), Some("one"));
            let shown: Value = serde_json::from_str(&host.ok(&["show", "child", "--json"])).unwrap();
            assert!(shown["capture"].as_str().unwrap().starts_with(driver), "{shown}");
        });
        host.ok(&["rm", "child", "--yes"]);
        host.ok(&["rm", "k", "--yes"]);
        let kernels = host.data().join("kernels");
        assert_eq!(kernels.read_dir().unwrap().count(), 0, "{kind}, {user:?}: nothing is left of a removed kernel");
    }
}

#[test]
fn checkpoints_by_clones_on_xfs() {
    everything_comes_back_on("xfs", "reflink (XFS has no subvolumes)");
}

#[test]
fn checkpoints_in_a_subvolume_of_btrfs() {
    everything_comes_back_on("btrfs", "btrfs");
}

#[test]
fn checkpoints_on_ext4_without_clones() {
    everything_comes_back_on("ext4", "tracked (ext4 shares no blocks between files");
}
