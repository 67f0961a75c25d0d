//! Kernels that move between two daemons.

mod architectures;
mod crash_safety;
mod decisions;
mod engines;
mod failures;
mod full_disk;
mod hostile;
mod hostile_fuzz;
mod moves;
mod operator;
mod pause;
mod records;
mod seed;
mod simulation;
mod ssh;
mod system_wide;
mod whole;
mod wire_faults;

use std::process::Output;

use ryokan::core::engine::EngineName;
use serde_json::Value;

use crate::support::{Host, User, kernel, out};

pub(crate) use architectures::marked;
pub(crate) use crash_safety::one_is_left;
pub(crate) use hostile::machine_offer;
pub(crate) use wire_faults::faulty;

/// The transport to a host's daemon.
fn to(host: &Host) -> String {
    let command = host.command("ryokan");
    // The daemon that runs it is of the same user.
    let program = host.path("bin").join("ryokan");
    let variables: Vec<String> = command
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_str()?.to_owned(), value?.to_str()?.to_owned())))
        .filter(|(name, _)| name != ryokan::sys::fault::VARIABLE)
        .map(|(name, value)| format!("{name}='{value}'"))
        .collect();
    format!("exec:exec env -i {} {} --no-autostart pipe", variables.join(" "), program.display())
}

pub(crate) fn teleport(from: &Host, name: &str, target: &Host, more: &[&str]) -> Output {
    let to = to(target);
    let mut args = vec!["--json", "teleport", name, "--to", &to];
    args.extend(more);
    from.cli(&args)
}

/// A successful move; returns its report.
pub(crate) fn moved(from: &Host, name: &str, target: &Host, more: &[&str]) -> Value {
    let output = teleport(from, name, target, more);
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{errors}\nsource:\n{}\ntarget:\n{}", from.log(), target.log());
    serde_json::from_str(&text).expect("a report")
}

pub(crate) fn show(host: &Host, name: &str) -> Value {
    serde_json::from_str(&host.ok(&["--json", "show", name])).expect("JSON")
}

/// The state of a kernel, if the host has it.
pub(crate) fn state(host: &Host, name: &str) -> Option<String> {
    let list: Value = serde_json::from_str(&host.ok(&["--json", "ls"])).expect("JSON");
    let list = list.as_array().expect("a list");
    list.iter().find(|one| one["name"] == name).map(|one| one["state"].as_str().expect("a name").to_owned())
}

/// Whether the kernel can be used on this host.
fn is_live(host: &Host, name: &str) -> bool {
    state(host, name).is_some_and(|state| state != "departed")
}

fn handovers(host: &Host) -> Vec<Value> {
    serde_json::from_str(&host.ok(&["--json", "teleport", "--status"])).expect("a list")
}

/// Those that are not the record of a kernel that arrived.
fn undecided(host: &Host) -> Vec<Value> {
    handovers(host).into_iter().filter(|one| one["state"] != "live").collect()
}

/// The handover of the only prepared kernel.
fn prepared(host: &Host) -> String {
    let all = handovers(host);
    let waits: Vec<&Value> = all.iter().filter(|one| one["state"] == "prepared").collect();
    assert_eq!(waits.len(), 1, "{all:?}");
    waits[0]["id"].as_str().expect("an id").to_owned()
}

/// A kernel with a variable, a file, a named checkpoint and output.
fn set_up(host: &Host, name: &str) {
    host.with(async |client| {
        let k = kernel(&client, name, EngineName::Kaish).await;
        assert_eq!(out(&k, "x=1; echo one > f; echo hello").await, "hello");
        host.ok(&["checkpoint", name, "-m", "one"]);
        out(&k, "x=2; echo two > f; mkdir d; echo deep > d/g").await;
    });
}

/// A kernel's workspace.
fn workspace(host: &Host, name: &str) -> std::path::PathBuf {
    let shown: Value = serde_json::from_str(&host.ok(&["--json", "show", name])).expect("JSON");
    host.workspace(shown["id"].as_str().expect("an id"))
}

const VIEW: &str = "echo $x $(cat f) $(cat d/g)";

fn pair(user: User) -> (Host, Host) {
    (Host::start_as(user), Host::start_as(user))
}

/// Starts the host's daemon again with this fault, if there is one. Its start may meet the fault.
pub(crate) fn arm(host: &mut Host, fault: &str) {
    host.kill();
    host.env(ryokan::sys::fault::VARIABLE, fault);
    if fault.is_empty() {
        host.launch();
        return;
    }
    host.spawn();
    crate::support::until("the daemon serves or is dead", || {
        let serves = std::os::unix::net::UnixStream::connect(host.socket()).is_ok();
        serves || !Host::is_alive(host.pid() as u32)
    });
}

/// What a host has of no kernel that it lists.
fn left_over(host: &Host) -> Vec<String> {
    let list: Value = serde_json::from_str(&host.ok(&["--json", "ls"])).expect("JSON");
    let known: Vec<&str> = list.as_array().expect("a list").iter().filter_map(|one| one["id"].as_str()).collect();
    let names = |folder: &str| {
        let entries = std::fs::read_dir(host.data().join(folder)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let kernels = names("kernels").into_iter().filter(|name| !known.contains(&name.as_str()));
    kernels.chain(names("prepared")).collect()
}
