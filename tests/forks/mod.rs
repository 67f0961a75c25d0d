//! Kernels created from kernels, from a user's view: forks and threads, and interruptions.

mod crash_safety;
mod export;
mod fork;
mod origin;
mod prepared_copies;
mod threads;

use serde_json::Value;

use crate::support::Host;

/// Output of `show` for a kernel.
fn show(host: &Host, kernel: &str) -> Value {
    serde_json::from_str(&host.ok(&["show", kernel, "--json"])).unwrap()
}

/// All checkpoints, newest first.
fn log(host: &Host, kernel: &str) -> Vec<Value> {
    host.ok(&["log", kernel, "--json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Number of kernel directories in the daemon's data.
fn folders(host: &Host) -> usize {
    std::fs::read_dir(host.data().join("kernels")).unwrap().count()
}
