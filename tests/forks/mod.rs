//! Kernels made from kernels, as their users meet them: forks and threads, and what happens when something comes in between.

mod crash_safety;
mod export;
mod fork;
mod origin;
mod prepared_copies;
mod threads;

use serde_json::Value;

use crate::support::Host;

/// What the command line tells of a kernel.
fn show(host: &Host, kernel: &str) -> Value {
    serde_json::from_str(&host.ok(&["show", kernel, "--json"])).unwrap()
}

/// All checkpoints, newest first.
fn log(host: &Host, kernel: &str) -> Vec<Value> {
    host.ok(&["log", kernel, "--json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Folders below the daemon's data that kernels have.
fn folders(host: &Host) -> usize {
    std::fs::read_dir(host.data().join("kernels")).unwrap().count()
}
