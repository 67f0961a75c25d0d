//! Listing, following and removing kernels with the command line.

use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::rpc::client::HostClient;

use crate::support::{Host, eventually, out, spec, until, users};

fn listed(host: &Host) -> Vec<serde_json::Value> {
    serde_json::from_str(&host.ok(&["ls", "--json"])).unwrap()
}

fn spawn(host: &Host, args: &[&str]) -> Child {
    let mut command = host.command("ryokan");
    command.arg("--no-autostart").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

#[test]
fn list_shows_worker_memory() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "live", "--engine", "python"]);
        host.ok(&["new", "resting"]);
        host.ok(&["exec", "live", "data = bytearray(64 << 20)"]);
        let kernels = listed(&host);
        let used = |name: &str| kernels.iter().find(|k| k["name"] == name).unwrap()["memory_bytes"].as_u64().unwrap();
        assert!(used("live") > 64 << 20, "{kernels:?}");
        assert_eq!(used("resting"), 0, "no worker uses nothing");
        let text = host.ok(&["ls", "live"]);
        assert!(text.contains(" MiB "), "{text}");
    }
}

#[test]
fn removal_reported_to_waiters() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let running = spawn(&host, &["exec", "k", "sleep 600"]);
    until("it runs", || listed(&host)[0]["state"] == "busy");
    let queued = spawn(&host, &["exec", "k", "echo never"]);
    until("it waits", || listed(&host)[0]["executions"] == 2);
    host.ok(&["rm", "k", "--yes"]);
    for (child, said) in
        [(running, "error: kernel k was removed while execution 1 ran\n"), (queued, "error: kernel k was removed\n")]
    {
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.as_str()), (Some(125), said));
    }
}

#[test]
fn ephemeral_removed_with_client() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "mine"]);
        let mut run = spawn(&host, &["run", "sleep 600"]);
        until("it runs", || listed(&host).iter().any(|kernel| kernel["state"] == "busy"));
        assert_eq!(listed(&host).iter().filter(|kernel| kernel["ephemeral"] == true).count(), 1);
        run.kill().unwrap();
        run.wait().unwrap();
        until("it is removed", || listed(&host).len() == 1);
        assert_eq!(listed(&host)[0]["name"], "mine");
        until("its worker is gone", || host.workers().is_empty());
        // The kernel is unlisted before its files are deleted.
        until("its files are gone", || std::fs::read_dir(host.data().join("kernels")).unwrap().count() == 1);
    }
}

#[test]
fn ephemeral_removed_on_restart() {
    let mut host = Host::start();
    host.ok(&["new", "mine"]);
    let mut run = spawn(&host, &["run", "sleep 600"]);
    until("it runs", || listed(&host).iter().any(|kernel| kernel["state"] == "busy"));
    // The client is stopped first, so that it cannot ask the next daemon for the removal.
    kill(Pid::from_raw(run.id() as i32), Signal::SIGSTOP).unwrap();
    host.kill();
    run.kill().unwrap();
    run.wait().unwrap();
    host.launch();
    assert_eq!(listed(&host).len(), 1, "only the durable kernel");
    until("its worker is gone", || host.workers().is_empty());
    assert_eq!(std::fs::read_dir(host.data().join("kernels")).unwrap().count(), 1);
}

#[test]
fn ephemeral_ends_with_connection() {
    let host = Host::start();
    host.with(async |watcher| {
        let brief = async |client: HostClient| {
            let mut wanted = spec("brief", EngineName::Kaish);
            wanted.ephemeral = true;
            let (kernel, info) = client.create_kernel(&wanted, "key").await.expect("made");
            assert!(info.spec.ephemeral);
            assert_eq!(out(&kernel, "echo here").await, "here");
            // A short connection of another client has no effect.
            host.ok(&["exec", "brief", "echo there"]);
            assert_eq!(out(&kernel, "echo here").await, "here");
        };
        brief(HostClient::connect(&host.socket(), "brief").await.expect("the daemon answers")).await;
        eventually("it is gone", || async { watcher.open_kernel("brief").await.is_err() }).await;
    });
}

#[test]
fn journal_tail() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    for number in 1..=5 {
        host.ok(&["exec", "k", &format!("echo {number}")]);
    }
    let shown = |args: &[&str]| -> Vec<u64> {
        let text = host.ok(&[&["journal", "k", "--json"], args].concat());
        let number =
            |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["sequence"].as_u64().unwrap();
        text.lines().map(number).collect()
    };
    assert_eq!(shown(&["--tail", "2"]), [4, 5]);
    assert_eq!(shown(&["-n", "1"]), [5]);
    assert_eq!(shown(&["-n", "0"]), [0; 0]);
    assert_eq!(shown(&["-n", "99"]), [1, 2, 3, 4, 5]);
    assert_eq!(shown(&[]), [1, 2, 3, 4, 5]);
}

#[test]
fn show_lists_unsaved_state() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", "x = 1"]);
    let reported = || host.ok(&["show", "k"]);
    assert!(!reported().contains("not saved"), "{}", reported());
    host.ok(&["exec", "k", "g = (i for i in range(3))"]);
    assert!(reported().contains("not saved     var/g"), "{}", reported());
}

#[test]
fn unmount_removes_mount_point() {
    for user in users() {
        let mut host = Host::start_as(user);
        let given = host.path("given");
        std::fs::create_dir(&given).unwrap();
        std::fs::set_permissions(&given, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::write(given.join("file"), "text").unwrap();
        let (folder, file) = (given.display().to_string(), given.join("file").display().to_string());
        host.ok(&["new", "k"]);
        host.ok(&["exec", "k", "mkdir -p own used"]);
        for way in ["live", "stopped", "by another daemon"] {
            if way != "live" {
                host.ok(&["stop", "k"]);
            }
            for (path, source) in
                [("own", &folder), ("made", &folder), ("a/b", &folder), ("a/file", &file), ("used/x", &folder)]
            {
                host.ok(&["mount", "k", &format!("/workspace/{path}"), source]);
            }
            assert_eq!(host.ok(&["exec", "k", "cat made/file a/file a/b/file used/x/file own/file"]), "text".repeat(5));
            match way {
                "stopped" => drop(host.ok(&["stop", "k"])),
                "by another daemon" => host.restart(),
                _ => {}
            }
            for path in ["own", "made", "a/file", "a/b", "used/x"] {
                host.ok(&["unmount", "k", &format!("/workspace/{path}")]);
            }
            assert_eq!(host.ok(&["exec", "k", "find . -type d | sort; find . -type f"]), "./own\n./used\n", "{way}");
        }
    }
}

#[test]
fn show_lists_mounts() {
    let host = Host::start();
    let source = host.path("home").join("given");
    std::fs::create_dir(&source).unwrap();
    host.ok(&["new", "k"]);
    host.ok(&["mount", "k", "/data", source.to_str().unwrap()]);
    let shown = host.ok(&["show", "k"]);
    assert!(shown.contains(&format!("mounts        /data from {}:ro\n", source.display())), "{shown}");
    let shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", "k", "--json"])).unwrap();
    assert_eq!(shown["mounts"][0]["path"], "/data");
}

/// Another kernel with the name of a removed one has events of its own only.
#[test]
fn events_exclude_former_kernel() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "echo a"]);
    host.ok(&["rm", "k", "--yes"]);
    std::thread::sleep(std::time::Duration::from_millis(5));
    host.ok(&["new", "k"]);
    let events = host.ok(&["events", "k", "--json"]);
    let kinds: Vec<String> = events
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["kind"].as_str().unwrap().to_owned())
        .collect();
    assert!(kinds.contains(&"kernel_created".to_owned()), "{kinds:?}");
    assert!(!kinds.iter().any(|kind| kind == "kernel_removed"), "{kinds:?}");
}

#[test]
fn interrupt_ends_running_execution() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    assert_eq!(host.cli(&["interrupt", "k"]).status.code(), Some(3), "nothing runs");
    let mut running = host.command("ryokan");
    let mut running = running.args(["exec", "k", "kept=1; sleep 600"]).spawn().unwrap();
    crate::support::until("the execution runs", || host.ok(&["show", "k"]).contains("busy"));
    assert_eq!(host.ok(&["interrupt", "k"]), "interrupted execution 1 of k\n");
    assert!(!running.wait().unwrap().success());
    assert_eq!(host.ok(&["interrupt", "k", "1"]), "execution 1 of k had ended already: interrupted\n");
    assert_eq!(host.ok(&["exec", "k", "echo $kept"]), "1\n");
    assert_eq!(host.ok(&["interrupt", "k", "2"]), "execution 2 of k had ended already: done\n");
    assert_eq!(host.cli(&["interrupt", "k", "99"]).status.code(), Some(3));
}
