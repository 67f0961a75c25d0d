//! What takes room on the disk: figures that add up to the real folders, and what a removal frees.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use ryokan::core::engine::EngineName;
use ryokan::core::info::KernelFilter;
use ryokan::core::rights::{Right, Rights};
use ryokan::core::usage::{DiskPart, KernelDisk};

use super::{gc, host, manual};
use crate::support::{User, kernel, out, users};

/// Room of a folder on the disk, as `du` counts it.
fn real(folder: &Path, linked: &mut HashSet<(u64, u64)>) -> u64 {
    let own = std::fs::symlink_metadata(folder).expect("there");
    if own.nlink() > 1 && !own.is_dir() && !linked.insert((own.dev(), own.ino())) {
        return 0;
    }
    let below = own.is_dir().then(|| std::fs::read_dir(folder).expect("readable").flatten());
    own.blocks() * 512 + below.into_iter().flatten().map(|entry| real(&entry.path(), linked)).sum::<u64>()
}

fn sum(parts: &[DiskPart]) -> u64 {
    parts.iter().map(|part| part.bytes).sum()
}

fn part(parts: &[DiskPart], what: &str) -> u64 {
    parts.iter().find(|part| part.what == what).unwrap_or_else(|| panic!("no {what}")).bytes
}

fn of<'a>(kernels: &'a [KernelDisk], name: &str) -> &'a KernelDisk {
    kernels.iter().find(|kernel| kernel.name == name).expect("a kernel")
}

/// Random bytes of a size in a file.
async fn fill(kernel: &ryokan::rpc::client::KernelClient, file: &str, mib: usize) {
    out(kernel, &format!("head -c {mib}M /dev/urandom > {file}")).await;
}

#[test]
fn figures_add_up_to_folders() {
    for user in users() {
        let host = host(user);
        host.with(async |client| {
            for name in ["one", "two"] {
                let kernel = kernel(&client, name, EngineName::Bash).await;
                fill(&kernel, "data", 3).await;
                out(&kernel, "ln data linked; ln -s / away; mkdir -p a/b; x=1; head -c 100000 /dev/zero > a/b/c").await;
                manual(&kernel, "taken").await;
                kernel.stop(false).await.expect("stopped");
            }
            let usage = client.disk_usage("").await.expect("measured");
            for kernel in &usage.kernels {
                let folder = host.data().join("kernels").join(kernel.id.to_string());
                assert_eq!(kernel.folder_bytes(), real(&folder, &mut HashSet::new()), "{kernel:?}");
                let workspace = part(&kernel.parts, "workspace");
                assert!((3 << 20..4 << 20).contains(&workspace), "a hard link counts once: {workspace}");
                assert!(kernel.checkpoints > 0 && kernel.stored_bytes > 3 << 20 && kernel.incomplete.is_empty());
            }
            assert_eq!(sum(&usage.host), real(&host.data(), &mut HashSet::new()), "{:?}", usage.host);
            let folders: u64 = usage.kernels.iter().map(KernelDisk::folder_bytes).sum();
            assert!(part(&usage.host, "kernels") >= folders);
            assert!(part(&usage.host, "objects") >= 6 << 20, "{:?}", usage.host);
            let shown = host.ok(&["du"]);
            assert!(shown.contains("unreferenced") && shown.contains("two"), "{shown}");
            assert!(host.ok(&["du", "one"]).contains("taken"));
            assert_eq!(sum(&usage.store), part(&usage.host, "objects"), "{:?}", usage.store);
            for kernel in &usage.kernels {
                assert_eq!(sum(&kernel.kept), kernel.stored_bytes, "{kernel:?}");
            }
            let json: serde_json::Value = serde_json::from_str(&host.ok(&["du", "one", "--json"])).expect("JSON");
            assert_eq!(json["each"].as_array().map(Vec::len), Some(json["checkpoints"].as_u64().unwrap_or(0) as usize));
            assert_eq!(host.cli(&["du", "none"]).status.code(), Some(3));
        });
    }
}

#[test]
fn figures_name_reasons() {
    let host = host(User::Own);
    host.with(async |client| {
        let one = kernel(&client, "one", EngineName::Bash).await;
        fill(&one, "data", 3).await;
        manual(&one, "taken").await;
        out(&one, "head -c 2M /dev/urandom | base64").await;
        host.ok(&["group", "new", "shop"]);
        host.ok(&["group", "add", "shop", "--kernel", "one"]);
        host.ok(&["freeze", "shop"]);
        std::fs::write(host.path("blob"), vec![7_u8; 5000]).expect("written");
        host.ok(&["blob", "put", "one", host.path("blob").to_str().expect("UTF-8")]);
        for args in [&["du", "--json"][..], &["du", "one", "--json"]] {
            let shown: serde_json::Value = serde_json::from_str(&host.ok(args)).expect("JSON");
            let parts = if args.len() == 2 { &shown["store"] } else { &shown["kept"] };
            let of = |what: &str| {
                let part = parts.as_array().expect("a list").iter().find(|part| part["what"] == what);
                let part = part.unwrap_or_else(|| panic!("no {what}: {shown}"));
                assert!(part["why"].as_str().is_some_and(|why| !why.is_empty()), "{part}");
                part["bytes"].as_u64().expect("a number")
            };
            assert!((3 << 20..4 << 20).contains(&of("checkpoints")), "{shown}");
            assert!((1 << 20..4 << 20).contains(&of("output")) && of("blobs") > 0, "{shown}");
            // Only the freeze itself: its kernel's part is a checkpoint.
            assert!(args.len() == 3 || of("freezes") > 0, "{shown}");
        }
        let shown: serde_json::Value = serde_json::from_str(&host.ok(&["du", "one", "--json"])).expect("JSON");
        let why: Vec<&str> =
            shown["each"].as_array().expect("a list").iter().filter_map(|one| one["why"].as_str()).collect();
        assert_eq!(why, ["freeze 1 of shop", "manual"]);
        let (all, text) = (host.ok(&["du"]), host.ok(&["du", "one"]));
        for wanted in ["OBJECTS FOR", "output of executions", "kept until their kernel"] {
            assert!(all.contains(wanted) && text.contains(wanted), "{wanted}: {all}{text}");
        }
        assert!(all.contains("states of groups") && text.contains("freeze 1 of shop"), "{all}{text}");
    });
}

#[test]
fn removal_frees_what_is_not_shared() {
    let host = host(User::Own);
    host.with(async |client| {
        let kernel = kernel(&client, "one", EngineName::Bash).await;
        fill(&kernel, "both", 3).await;
        let first = manual(&kernel, "first").await;
        fill(&kernel, "late", 5).await;
        let second = manual(&kernel, "second").await;
        out(&kernel, "rm late").await;
        manual(&kernel, "third").await;
        let usage = client.disk_usage("one").await.expect("measured");
        let one = of(&usage.kernels, "one");
        let each = |id| one.each.iter().find(|one| one.id == id).expect("listed");
        assert!(each(first.id).freed_bytes < 1 << 20, "its file is in others: {one:?}");
        assert!((5 << 20..6 << 20).contains(&each(second.id).freed_bytes), "{one:?}");
        assert!(each(second.id).stored_bytes > 8 << 20);
        assert_eq!(one.freed_bytes, one.stored_bytes, "no other kernel");
        // The figure is what a removal and a collection give back.
        let before = part(&client.disk_usage("").await.expect("measured").host, "objects");
        let freed = each(second.id).freed_bytes;
        kernel.remove_checkpoint("second", 0).await.expect("removed");
        let after = client.disk_usage("").await.expect("measured").host;
        assert_eq!(before - part(&after, "objects"), freed);
        assert!(part(&after, "unreferenced") >= freed);
        gc(&client, false).await;
        let collected = client.disk_usage("").await.expect("measured").host;
        assert!(part(&after, "unreferenced") - part(&collected, "unreferenced") > 4 << 20, "{collected:?}");
        host.ok(&["fork", "one", "two"]);
        let usage = client.disk_usage("").await.expect("measured");
        assert!(of(&usage.kernels, "two").freed_bytes < 1 << 20, "it shares: {usage:?}");
        assert!(of(&usage.kernels, "one").freed_bytes < 1 << 20, "{usage:?}");
    });
}

/// Lists show what `du` measures, without a walk of their own: the figures are those of the last measurement.
#[test]
fn lists_show_measured_figures() {
    for user in users() {
        let host = host(user);
        host.with(async |client| {
            let one = kernel(&client, "one", EngineName::Bash).await;
            fill(&one, "data", 3).await;
            manual(&one, "taken").await;
            out(&one, "rm data").await;
            one.stop(false).await.expect("stopped");
            crate::support::eventually("the list has figures", async || {
                let listed = client.list_kernels(&KernelFilter::default()).await.expect("listed");
                listed.iter().all(|info| info.disk.is_some_and(|disk| disk.history_bytes > 3 << 20))
            })
            .await;
            let usage = client.disk_usage("").await.expect("measured");
            let measured = of(&usage.kernels, "one");
            let disk = one.info().await.expect("there").disk.expect("measured");
            assert_eq!(disk.total_bytes(), measured.folder_bytes() + measured.freed_bytes);
            assert_eq!(disk.workspace_bytes, part(&measured.parts, "workspace"));
            assert_eq!(disk.history_bytes, part(&measured.parts, "journal") + measured.freed_bytes);
            assert_eq!(disk.saved_memory_bytes, 0);
            // A holder of fewer rights learns nothing about what other kernels share.
            let reader = one.attenuate(Rights::from_iter([Right::Read]), "reader").await.expect("attenuated");
            let known = reader.info().await.expect("there").disk.expect("measured");
            assert_eq!(known.history_bytes, part(&measured.parts, "journal"));
            assert_eq!(known.workspace_bytes, disk.workspace_bytes);
            // A client's write changes the files of a stopped kernel, and nothing else of it.
            let files = one.files().await.expect("its files");
            files.write(b"first", &[7; 10]).await.expect("written");
            client.disk_usage("").await.expect("measured");
            files.write(b"later", &vec![7; 2 << 20]).await.expect("written");
            client.disk_usage("").await.expect("measured");
            let disk = one.info().await.expect("there").disk.expect("measured");
            assert!((2 << 20..3 << 20).contains(&disk.workspace_bytes), "{disk:?}");
            assert!(host.ok(&["ls"]).contains("DISK") && host.ok(&["show", "one"]).contains("history "));
            let json: serde_json::Value = serde_json::from_str(&host.ok(&["show", "one", "--json"])).expect("JSON");
            assert_eq!(json["disk"]["workspace_bytes"], disk.workspace_bytes, "{json}");
        });
    }
}

/// The same files are read again only if something changed: a write is enough.
#[test]
fn background_figures_follow_changes() {
    let host = host(User::Own);
    host.with(async |client| {
        let one = kernel(&client, "one", EngineName::Bash).await;
        one.stop(false).await.expect("stopped");
        let files = one.files().await.expect("its files");
        let workspace = async || {
            let listed = client.list_kernels(&KernelFilter::default()).await.expect("listed");
            listed[0].disk.map(|disk| disk.workspace_bytes)
        };
        files.write(b"first", &vec![7; 1 << 20]).await.expect("written");
        crate::support::eventually("the first is measured", async || workspace().await >= Some(1 << 20)).await;
        files.write(b"later", &vec![7; 2 << 20]).await.expect("written");
        crate::support::eventually("the later is measured", async || workspace().await >= Some(3 << 20)).await;
        let history = async || {
            let listed = client.list_kernels(&KernelFilter::default()).await.expect("listed");
            listed[0].disk.map_or(0, |disk| disk.history_bytes)
        };
        let before = history().await;
        let noise: Vec<u8> = (0_u32..1 << 16).flat_map(|n| *blake3::hash(&n.to_le_bytes()).as_bytes()).collect();
        one.put_blob(&noise).await.expect("kept");
        crate::support::eventually("the blob is measured", async || history().await > before + (1 << 20)).await;
    });
}
