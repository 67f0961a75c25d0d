//! `ryokan pool`: JSON output, and `--watch` on a terminal.

use std::collections::BTreeSet;

use nix::sys::termios::LocalFlags;
use ryokan::core::engine::EngineName;

use crate::support::{Host, Terminal, User, eventually, kernel, out};

/// The field names that `docs/cli-json.md` promises.
fn promised() -> BTreeSet<String> {
    let promises = include_str!("../../docs/cli-json.md");
    let line = promises.lines().find_map(|line| line.strip_prefix("| `pool` | array of `{")).expect("a line of pools");
    line.split('}').next().expect("names").split(", ").map(str::to_owned).collect()
}

fn pooled() -> Host {
    let mut host = Host::prepare(User::Own);
    host.configure("[pool]\npool_size = 1\nmin_idle = 1\nmax_pool_size = 2\n");
    host.launch();
    host
}

fn reported(host: &Host) -> Vec<serde_json::Value> {
    serde_json::from_str(&host.ok(&["pool", "--json"])).expect("an array")
}

#[test]
fn pool_json_matches_daemon() {
    let host = pooled();
    host.with(async |client| {
        let settled = async || {
            let pools = client.pools().await.expect("pools");
            pools.iter().all(|pool| pool.idle == pool.target && pool.creating == 0)
        };
        eventually("all are ready", settled).await;
        let k = kernel(&client, "k", EngineName::Kaish).await;
        for n in 0..3 {
            out(&k, &format!("x={n}")).await;
        }
        // The pools may change between the two requests.
        eventually("both say the same", async || {
            let (pools, reported) = (client.pools().await.expect("pools"), reported(&host));
            for one in &reported {
                let fields = one.as_object().expect("an object").keys().cloned();
                assert_eq!(fields.collect::<BTreeSet<_>>(), promised());
            }
            assert_eq!(reported.len(), 2, "{reported:?}");
            settled().await && serde_json::json!(pools) == serde_json::Value::from(reported)
        })
        .await;
        let kaish = reported(&host).into_iter().find(|pool| pool["engine"] == "kaish").expect("a pool of kaish");
        for (field, is) in [("pool_size", 1), ("min_idle", 1), ("max_pool_size", 2), ("taken", 1), ("missed", 0)]
            .into_iter()
            .chain([("active", 1), ("idle", 1), ("total", 2), ("total_created", 2), ("total_executions", 3)])
        {
            assert_eq!(kaish[field], is, "{field} of {kaish}");
        }
        assert_eq!(kaish["trouble"], "", "{kaish}");
        let line = host.ok(&["pool"]);
        assert!(line.lines().next().is_some_and(|heads| heads.contains("ENGINE")), "{line}");
    });
}

#[test]
fn pool_watch_updates_until_ctrl_c() {
    let host = pooled();
    let mut terminal = Terminal::start(&host, &["pool", "--watch"]);
    terminal.wait_for("ENGINE");
    terminal.wait_for("kaish");
    let before = terminal.settings();
    assert!(before.local_flags.contains(LocalFlags::ECHO | LocalFlags::ICANON | LocalFlags::ISIG));
    // A pool that is created meanwhile.
    host.ok(&["new", "odd", "--memory", "300M"]);
    host.ok(&["exec", "odd", "echo well"]);
    terminal.wait_for("300 MiB");
    // Each refresh starts at the top and clears the screen.
    terminal.wait_for_raw("\x1b[H\x1b[J");
    terminal.press("\x03");
    terminal.ended_with(130);
    assert_eq!(terminal.settings().local_flags, before.local_flags);
    assert!(!terminal.shown().contains("error"), "{}", terminal.shown());
}
