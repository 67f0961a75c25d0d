//! Checkpoints from a user's view: taken, listed, restored, undone; and with interruptions.

mod archive;
mod concurrency;
mod cost;
mod crash_safety;
mod diff;
mod drivers;
mod memory;
mod memory_hostile;
mod model;
mod ordering;
mod references;
mod restore;
mod restore_recovery;

use serde_json::Value;

use crate::support::Host;

/// Waits until a daemon that may be killed at a labelled step serves, or has died.
fn until_served(host: &Host) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(180);
    while Host::is_alive(host.pid() as u32) && std::os::unix::net::UnixStream::connect(host.socket()).is_err() {
        assert!(std::time::Instant::now() < deadline, "the daemon neither serves nor dies");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Takes a checkpoint with the command line; returns its id.
fn checkpoint(host: &Host, kernel: &str, name: &str) -> String {
    let taken: Value = serde_json::from_str(&host.ok(&["checkpoint", kernel, "-m", name, "--json"])).unwrap();
    taken["id"].as_str().unwrap().to_owned()
}

/// All checkpoints, newest first.
fn log(host: &Host, kernel: &str) -> Vec<Value> {
    host.ok(&["log", kernel, "--json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
