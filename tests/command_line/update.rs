//! `ryokan update` with real kernels.

use std::fs;

use ryokan::core::engine::EngineName;
use ryokan::core::spec::{AllowedPath, Net};
use ryokan::core::spec_update::SpecUpdate;

use crate::support::{Host, User, kernel, out};

#[test]
fn limits_wait_for_next_start() {
    let mut host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    assert_eq!(host.ok(&["update", "k", "--open-files", "700"]), "updated k\n", "it has no worker");
    assert_eq!(host.ok(&["exec", "k", "ulimit -n"]), "700\n");
    let said = host.ok(&["update", "k", "--open-files", "800", "--idle-timeout", "1h"]);
    assert!(said.contains("with its next start") && said.contains("open files 700 -> 800"), "{said}");
    assert!(!said.contains("idle"), "{said}");
    assert_eq!(host.ok(&["exec", "k", "ulimit -n; x=1"]), "700\n", "the worker keeps its limits");
    // The next daemon adopts the worker, and knows what it has.
    host.kill();
    host.launch();
    let shown = host.ok(&["show", "k"]);
    assert!(
        shown.contains("open files    700 (from the next start: 800)") && shown.contains("open files 700 -> 800"),
        "{shown}"
    );
    host.ok(&["stop", "k"]);
    assert!(!host.ok(&["show", "k"]).contains("at next start"));
    assert_eq!(host.ok(&["exec", "k", "ulimit -n; echo $x"]), "800\n1\n", "the state stays");
    assert!(host.ok(&["journal", "k"]).contains("updated: open files 700 -> 800"));
    assert!(host.ok(&["events", "k"]).contains("kernel_updated"));
    assert!(host.ok(&["audit", "k"]).contains("kernel.update"));
}

#[test]
fn paths_change_at_once() {
    let host = Host::start();
    let data = host.given(User::Own);
    fs::write(data.join("a"), "a").unwrap();
    let data = data.to_str().unwrap();
    host.ok(&["new", "k", "--engine", "bash"]);
    host.ok(&["exec", "k", "true"]);
    assert_eq!(host.ok(&["update", "k", "--allow-path", &format!("{data}:ro")]), "updated k\n");
    assert_eq!(host.ok(&["exec", "k", &format!("cat {data}/a")]), "a");
    assert!(!host.cli(&["exec", "k", &format!("echo b > {data}/b")]).status.success());
    let refused = host.cli(&["unmount", "k", data]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--remove-path"));
    host.ok(&["checkpoint", "k", "-m", "with path"]);
    assert_eq!(host.ok(&["update", "k", "--remove-path", data]), "updated k\n");
    assert!(!host.cli(&["exec", "k", &format!("cat {data}/a")]).status.success(), "the path is withdrawn at once");
    // Neither a restore nor a fork brings it back.
    host.ok(&["restore", "k", "with path", "--yes"]);
    host.ok(&["fork", "k", "child", "--from", "with path"]);
    for name in ["k", "child"] {
        assert!(!host.cli(&["exec", name, &format!("cat {data}/a")]).status.success(), "{name}");
        assert!(!host.ok(&["show", name]).contains(data), "{name}");
    }
    assert_eq!(host.cli(&["update", "k", "--remove-path", data]).status.code(), Some(3));
}

#[test]
fn fork_has_present_limits() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash", "--pids", "300"]);
    host.ok(&["checkpoint", "k", "-m", "before"]);
    host.ok(&["update", "k", "--pids", "100"]);
    assert!(host.ok(&["show", "k"]).contains("pids          300 (from the next start: 100)"));
    let changed = host.ok(&["diff", "k", "before"]);
    assert!(changed.contains("pids") && changed.contains("300"), "the checkpoint has its own: {changed}");
    host.ok(&["fork", "k", "child", "--from", "before"]);
    assert!(host.ok(&["show", "child"]).contains("pids          100"));
}

#[test]
fn wrong_updates_are_refused() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    let show = || {
        let mut shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", "k", "--json"])).unwrap();
        // Measured in the background.
        shown.as_object_mut().unwrap().remove("disk");
        shown
    };
    let before = show();
    for (arguments, code) in [
        (&["--memory", "900000G"][..], 2),
        (&["--memory", "1M"], 2),
        (&["--allow-path", "/proc"], 2),
        (&["--allow-path", "/absent"], 3),
        (&[], 2),
    ] {
        let done = host.cli(&[&["update", "k"], arguments].concat());
        assert_eq!(done.status.code(), Some(code), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    }
    assert_eq!(show(), before, "nothing has changed");
    host.ok(&["new", "thread", "--share", "k"]);
    assert_eq!(host.cli(&["update", "thread", "--workspace", "1G"]).status.code(), Some(4));
}

#[test]
fn update_checks_version_and_network() {
    let host = Host::start();
    host.with(async |client| {
        let opened = kernel(&client, "k", EngineName::Bash).await;
        out(&opened, "x=1").await;
        let version = opened.info().await.expect("info").version;
        let update = SpecUpdate { net: Some(Net::Host), ..SpecUpdate::default() };
        assert!(client.update_kernel("k", &update, version + 7).await.is_err());
        let update = SpecUpdate { cpu_milli: Some(500), ..update };
        match client.update_kernel("k", &update, version).await {
            Ok((after, waiting)) => {
                assert_eq!(after, version + 1);
                assert_eq!(waiting, opened.info().await.expect("info").at_next_start);
                assert!(waiting.contains(&"net none -> host".to_owned()), "{waiting:?}");
                assert_eq!(opened.info().await.expect("info").spec.net, Net::Host);
                assert_eq!(client.update_kernel("k", &update, 0).await.expect("nothing to do").0, after);
            }
            // Without Landlock's network scope or cgroups this host refuses, and nothing has changed.
            Err(error) => {
                assert_eq!(error.code, ryokan::core::error::ErrorCode::Unsupported, "{error}");
                assert_eq!(opened.info().await.expect("info").spec.net, Net::None);
            }
        }
        let twice = SpecUpdate { paths: vec![AllowedPath::new("/usr/share", false)], ..SpecUpdate::default() };
        assert!(client.update_kernel("k", &twice, 0).await.is_err(), "a system path");
    });
}
