//! Jobs and unsavable state that end with their worker: neither is lost silently.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::rpc::client::KernelClient;

use super::dialect::Dialect;
use super::each;
use crate::pool::worker_of;
use crate::support::{Host, eventually, out, run};

/// The background job of every dialect.
const JOB: [&str; 2] = ["/bin/sleep", "86421"];

/// Processes of the host that run the job.
fn running() -> usize {
    let is_job = |entry: &std::fs::DirEntry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        line.strip_suffix(b"\0").is_some_and(|line| line.split(|byte| *byte == 0).eq(JOB.map(str::as_bytes)))
    };
    std::fs::read_dir("/proc").expect("readable").flatten().filter(is_job).count()
}

/// The reported entries of one kind, with their details.
fn shown(host: &Host, kernel: &str, kind: &str) -> Vec<String> {
    let events = host.ok(&["events", kernel, "--json"]);
    let all = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("an event"));
    all.filter(|event| event["kind"] == kind).map(|event| event["detail"].to_string()).collect()
}

/// Leaves both behind, and expects a report of each.
async fn leave(k: &KernelClient, d: &Dialect) {
    for code in [d.job, d.unsaved] {
        out(k, code).await;
    }
    let jobs = k.jobs().await.expect("jobs");
    assert!(jobs.len() == 1 && jobs[0].command.contains(&JOB.join(" ")), "{}: {jobs:?}", d.engine);
    // Its fork may still be on its way to the program.
    eventually("its job runs", async || running() == 1).await;
    let missed = k.missed().await.expect("missed entries");
    let named = missed.iter().find(|entry| entry.key == d.unsaved_key);
    assert!(named.is_some_and(|entry| !entry.reason.is_empty()), "{}: {missed:?}", d.engine);
    assert!(missed.iter().all(|entry| entry.key != "var/x"), "{}: var/x is saved: {missed:?}", d.engine);
}

#[test]
fn jobs_and_unsaved_state_reported() {
    each("left", async |host, _, k, d| {
        let name = k.info().await.expect("info").spec.name.to_string();
        let both = || ["state_not_captured", "jobs_killed"].map(|kind| shown(host, &name, kind));
        run(k, d.set).await;
        assert_eq!(
            (k.jobs().await.expect("jobs").len(), k.missed().await.expect("missed entries").len()),
            (0, 0),
            "{}",
            d.engine
        );
        k.stop(false).await.expect("stopped");
        assert_eq!(both(), [const { Vec::<String>::new() }; 2], "{}: nothing is reported if all is saved", d.engine);
        for (times, killed) in [(1, false), (2, true)] {
            leave(k, d).await;
            let worker = worker_of(host, &name);
            match killed {
                false => k.stop(false).await.expect("stopped"),
                true => kill(Pid::from_raw(worker as i32), Signal::SIGKILL).expect("there"),
            }
            eventually("both are reported", async || both().iter().all(|shown| shown.len() == times)).await;
            let [state, jobs] = both();
            assert!(state[times - 1].contains(d.unsaved_key), "{} {killed}: {state:?}", d.engine);
            assert!(jobs[times - 1].contains(&JOB.join(" ")), "{} {killed}: {jobs:?}", d.engine);
            eventually("its job has ended", async || running() == 0).await;
            // Saved state returns; ended jobs do not.
            assert_eq!(out(k, d.show).await, "41", "{} {killed}", d.engine);
            assert!(k.jobs().await.expect("jobs").is_empty(), "{} {killed}", d.engine);
        }
        assert_eq!(both().map(|shown| shown.len()), [2, 2], "{}: one report each", d.engine);
    });
}

/// A value that ended with its worker stays listed until its name is bound again.
#[test]
fn ended_names_stay_listed() {
    let mut host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", "g = (i for i in range(9)); x = 1"]);
    host.ok(&["stop", "k"]);
    let is_listed = |host: &Host| {
        let json: serde_json::Value = serde_json::from_str(&host.ok(&["show", "k", "--json"])).expect("JSON");
        let keys: Vec<_> =
            json["missed"].as_array().expect("a list").iter().map(|entry| entry["key"].clone()).collect();
        assert_eq!(host.ok(&["show", "k"]).contains("var/g"), keys.contains(&"var/g".into()), "{json}");
        !keys.is_empty()
    };
    assert!(is_listed(&host), "stopped");
    let failed = host.cli(&["exec", "k", "next(g)"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(said.contains("NameError") && said.contains("note: \"g\" was not saved"), "{said}");
    assert!(host.ok(&["journal", "k", "--full"]).contains("\"g\" was not saved"), "the journal has it too");
    assert!(!String::from_utf8_lossy(&host.cli(&["exec", "k", "other"]).stderr).contains("note:"));
    assert!(is_listed(&host), "started");
    host.ok(&["stop", "k"]);
    host.restart();
    host.ok(&["exec", "k", "x"]);
    assert!(is_listed(&host), "after a restart of the daemon");
    host.ok(&["exec", "k", "g = 5"]);
    assert!(!is_listed(&host), "bound again");
    host.ok(&["stop", "k"]);
    assert_eq!(shown(&host, "k", "state_not_captured").len(), 1);
}
