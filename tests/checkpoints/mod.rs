//! Checkpoints as their users meet them: taken, listed, restored, undone; and what happens when something comes in between.

mod broken;
mod comparing;
mod cost;
mod drivers;
mod going_back;
mod many;
mod model;
mod references;
mod turns;

use serde_json::Value;

use crate::support::Host;

/// A checkpoint by the command line; its id.
fn checkpoint(host: &Host, kernel: &str, name: &str) -> String {
    let taken: Value = serde_json::from_str(&host.ok(&["checkpoint", kernel, "-m", name, "--json"])).unwrap();
    taken["id"].as_str().unwrap().to_owned()
}

/// All checkpoints, newest first.
fn log(host: &Host, kernel: &str) -> Vec<Value> {
    host.ok(&["log", kernel, "--json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
