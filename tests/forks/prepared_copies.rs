//! The prepared copy for the next fork: its benefit, its absence, and that nothing depends on it.

use ryokan::core::error::ErrorCode;
use ryokan::core::fork::Forking;
use ryokan::rpc::client::{HostClient, run_local};
use ryokan::sys::fault;
use serde_json::Value;

use super::folders;
use crate::support::{Host, User, until, users};

const FILES: &str = "import os, shutil\nfor n in range(300):\n    os.makedirs(f'd{n % 9}', exist_ok=True)\n    open(f'd{n % 9}/f{n}', 'w').write(f'{n} ' * 500)\nos.link('d0/f0', 'linked')";
const CHANGE: &str = "open('d0/f9', 'a').write('more')\nos.remove('d1/f1')\nos.rename('d2', 'moved')\nopen('new', 'w').write('new')\nshutil.rmtree('d3')";
/// Keeps writing after the execution.
const WRITES: &str = "import threading, time\ndef write():\n    n = 0\n    while True:\n        n += 1\n        path = f'd{n % 9}/f{n % 300}'\n        os.makedirs(os.path.dirname(path), exist_ok=True)\n        open(path, 'w').write('changed')\n        os.rename(path, 'other'); os.rename('other', path)\n        time.sleep(0.0005)\nthreading.Thread(target=write, daemon=True).start()";
const VIEW: &str = "import hashlib\nfound = []\nfor at, inner, names in sorted(os.walk('.')):\n    inner.sort()\n    for name in sorted(names):\n        path = os.path.join(at, name)\n        s = os.stat(path)\n        found.append((path, s.st_mode, s.st_mtime_ns, s.st_nlink, open(path).read()))\nprint(len(found), hashlib.sha256(repr(found).encode()).hexdigest())";

fn events(host: &Host, kind: &str) -> Vec<Value> {
    let all = host.ok(&["events", "--json"]);
    let all = all.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|event| event["kind"] == kind).collect()
}

/// Source of each child's files, in order of creation.
fn made_from(host: &Host) -> Vec<String> {
    let created = events(host, "kernel_created").into_iter();
    created.filter_map(|event| event["detail"]["files"].as_str().map(str::to_owned)).collect()
}

fn prepared(host: &Host) -> usize {
    host.data().join("prepared").read_dir().map_or(0, Iterator::count)
}

#[test]
fn next_fork_uses_spare() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "k", "--engine", "python"]);
        host.ok(&["exec", "k", FILES]);
        host.ok(&["fork", "k", "a"]);
        until("a spare", || events(&host, "copy_prepared").len() == 1);
        assert_eq!((made_from(&host), prepared(&host)), (vec!["copy".into()], 1), "{user:?}");
        let before = host.ok(&["exec", "a", VIEW]);
        host.ok(&["exec", "k", CHANGE]);
        host.ok(&["fork", "k", "b"]);
        assert_eq!(made_from(&host), ["copy", "prepared_copy"], "{user:?}");
        assert_eq!(host.ok(&["exec", "b", VIEW]), host.ok(&["exec", "k", VIEW]), "{user:?}: as the parent is");
        assert_eq!(host.ok(&["exec", "a", VIEW]), before, "{user:?}: an earlier child keeps its own");
        host.ok(&["exec", "b", "open('d0/f0', 'w').write('other')"]);
        assert_eq!(host.ok(&["exec", "k", "open('d0/f0').read()[:4]"]), "'0 0 '\n", "{user:?}: nothing is shared");
        assert!(host.ok(&["diff", "b", "latest"]).contains("d0/f0"), "{user:?}");
        // A checkpoint's files, from before the change.
        until("another", || events(&host, "copy_prepared").len() == 2);
        let first = super::log(&host, "k").last().unwrap()["id"].as_str().unwrap().to_owned();
        host.ok(&["fork", "k", "c", "--from", &first]);
        assert_eq!((made_from(&host).len(), made_from(&host)[2].as_str()), (3, "prepared_copy"), "{user:?}");
        assert_eq!(host.ok(&["exec", "c", VIEW]), before, "{user:?}");
        until("a third", || events(&host, "copy_prepared").len() == 3);
        host.ok(&["rm", "k", "--yes"]);
        assert_eq!(prepared(&host), 0, "{user:?}: the copy is removed with its kernel");
    }
}

#[test]
fn no_spare_when_disabled_or_small() {
    let host = Host::prepare(User::Own);
    host.configure("[upkeep]\nprepared_copies = 0\n");
    let mut host = host;
    host.launch();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", FILES]);
    host.ok(&["fork", "k", "a"]);
    host.configure("[upkeep]\nprepared_copies = 1\n");
    host.restart();
    host.ok(&["new", "small", "--engine", "python"]);
    host.ok(&["exec", "small", "open('f', 'w').write('1')"]);
    host.ok(&["fork", "small", "s"]);
    host.ok(&["fork", "k", "b"]);
    until("the one that is worth it", || events(&host, "copy_prepared").len() == 1);
    assert_eq!(prepared(&host), 1);
    // The one that is kept is the newest.
    host.ok(&["fork", "b", "c"]);
    until("another one's", || events(&host, "copy_prepared").len() == 2);
    until("one of them is gone", || prepared(&host) == 1);
    assert_eq!(made_from(&host), ["copy"; 4]);
    assert_eq!(prepared(&host), 1, "of b");
    host.ok(&["archive", "b", "--yes"]);
    assert_eq!(prepared(&host), 0, "the copy is removed with the archived kernel");
}

/// If a user deletes prepared copies by hand, a fork only takes longer.
#[test]
fn removed_spare_falls_back_to_copy() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "k", "--engine", "python"]);
        host.ok(&["exec", "k", FILES]);
        host.ok(&["fork", "k", "a"]);
        let whole = host.ok(&["exec", "k", VIEW]);
        for (round, what) in ["all", "some"].into_iter().enumerate() {
            until("a spare", || events(&host, "copy_prepared").len() > round);
            let spare = host.data().join("prepared").read_dir().unwrap().next().unwrap().unwrap().path();
            std::fs::remove_dir_all(if what == "all" { spare } else { spare.join("workspace/d4") }).unwrap();
            let child = format!("child-of-{what}");
            host.ok(&["fork", "k", &child]);
            assert_eq!(host.ok(&["exec", &child, VIEW]), whole, "{user:?}: {what}");
        }
        assert_eq!(made_from(&host), ["copy", "copy", "prepared_copy"], "{user:?}");
        // Of a kernel at rest, and of a folder that its owner may not move.
        host.ok(&["exec", "k", "os.chmod('.', 0o555)"]);
        until("one more", || events(&host, "copy_prepared").len() > 2);
        for n in 3..5 {
            host.ok(&["stop", "k"]);
            host.ok(&["fork", "k", &format!("rest{n}")]);
            until("one more", || events(&host, "copy_prepared").len() > n);
        }
        assert_eq!(made_from(&host)[3..], ["prepared_copy", "prepared_copy"], "{user:?}");
        assert_eq!(host.ok(&["exec", "rest4", VIEW]), whole, "{user:?}");
        assert_eq!(host.ok(&["exec", "rest4", "oct(os.stat('.').st_mode)"]), "'0o40555'\n", "{user:?}");
    }
}

/// A snapshot reports the changes up to its creation: even while code writes, a child equals its tree, without a full
/// scan.
#[test]
fn btrfs_fork_of_writing_kernel() {
    let Some((_mounted, mut host)) = Host::prepare_on("btrfs", User::Own) else { return };
    host.launch();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", FILES]);
    host.ok(&["checkpoint", "k", "-m", "first"]);
    let whole = host.ok(&["exec", "k", VIEW]);
    host.ok(&["exec", "k", WRITES]);
    for n in 0..4 {
        let child = format!("c{n}");
        host.ok(&["fork", "k", &child, "--from", "first"]);
        assert_eq!(host.ok(&["exec", &child, VIEW]), whole, "{child}");
        host.ok(&["fork", "k", &format!("live{n}")]);
        let differs = host.ok(&["diff", &format!("live{n}"), "latest", "--json"]);
        assert!(!differs.contains("\"file\""), "{differs}");
    }
    let created = events(&host, "kernel_created");
    let ways = created.iter().filter(|event| event["detail"]["files"] == "snapshot");
    assert_eq!(ways.filter(|event| event["detail"]["full_walk"] == "").count(), 8, "{created:?}");
}

#[test]
fn daemon_kill_leaves_no_spare() {
    let mut host = Host::prepare(User::Own);
    host.launch();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", FILES]);
    let whole = host.ok(&["exec", "k", VIEW]);
    for (round, step) in ["", "workspace.spare.make", "workspace.spare.place"].into_iter().enumerate() {
        host.kill();
        host.env(fault::VARIABLE, &if step.is_empty() { String::new() } else { format!("{step}=kill") });
        host.launch();
        let made = events(&host, "copy_prepared").len();
        let fork = |name: &str| {
            let forking = Forking::of(format!("{name}-{round}"));
            let forked = run_local(async {
                HostClient::connect(&host.socket(), "test").await?.open_kernel("k").await?.0.fork(&forking).await
            });
            forked.unwrap()
        };
        let first = fork("first");
        if step != "workspace.spare.make" {
            assert!(first.is_ok(), "{step}: {:?}", first.err());
            until("a spare", || events(&host, "copy_prepared").len() > made);
        }
        if step == "workspace.spare.place" {
            let lost = fork("second").err().map(|error| error.code);
            assert_eq!(lost, Some(ErrorCode::Unavailable), "{step}: it died");
        }
        if !step.is_empty() {
            until("it died", || !Host::is_alive(host.pid() as u32));
        }
        host.env(fault::VARIABLE, "");
        host.kill();
        host.launch();
        until("nothing is left", || prepared(&host) == 0);
        let known: Value = serde_json::from_str(&host.ok(&["ls", "--json"])).unwrap();
        assert_eq!(folders(&host), known.as_array().unwrap().len(), "{step}");
        for kernel in known.as_array().unwrap() {
            let name = kernel["name"].as_str().unwrap();
            assert_eq!(host.ok(&["exec", name, VIEW]), whole, "{step}: {name}");
        }
    }
}
