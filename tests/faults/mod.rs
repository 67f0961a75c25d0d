//! Dying processes, full disks, damage and misbehaviour.
//!
//! Nothing acknowledged is lost, nothing is left behind, and no other kernel or process is
//! affected.

mod daemon_killed;
mod damage;
mod disk_errors;
pub mod fault_points;
pub mod full_disk;
mod invalid_names;
mod kill_loop;
mod load;
mod malformed_messages;
mod orphans;
mod recovery;
mod speculative_start;
mod stalled_clients;
mod workers_killed;

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Host, until};

/// An argument of `sleep` that no other process of this machine has.
fn marker() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("4321.{:08}{:04}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|pid| Host::is_alive(*pid)).collect()
}

/// Processes with that argument.
fn marked(marker: &str) -> Vec<u32> {
    let has = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|argument| argument == marker.as_bytes())
    };
    processes().into_iter().filter(has).collect()
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn children(of: u32) -> Vec<u32> {
    processes().into_iter().filter(|pid| parent(*pid) == Some(of)).collect()
}

/// A process and its descendants.
fn tree(of: u32) -> Vec<u32> {
    let parents: BTreeMap<u32, u32> = processes().into_iter().filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let mut found = vec![of];
    let mut next = 0;
    while next < found.len() {
        let here = found[next];
        found.extend(parents.iter().filter(|(_, parent)| **parent == here).map(|(pid, _)| *pid));
        next += 1;
    }
    found
}

/// The inits of this host's workers: worker processes whose parent is not one of them.
fn inits(host: &Host) -> Vec<u32> {
    let workers = host.workers();
    // One that has ended since has no parent.
    workers.iter().copied().filter(|pid| parent(*pid).is_some_and(|parent| !workers.contains(&parent))).collect()
}

/// The engine of an init: its child.
fn engine(init: u32) -> u32 {
    children(init).first().copied().expect("an init has an engine")
}

fn strike(pid: u32) {
    kill(Pid::from_raw(pid as i32), Signal::SIGKILL).unwrap();
}

/// Resident memory of a process, KiB.
fn rss(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// A process that does not belong to ryokan and must survive.
struct Bystander(Child);

impl Bystander {
    fn new() -> Bystander {
        Bystander(Command::new("/bin/sleep").arg("1000").spawn().unwrap())
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn check(&self) {
        assert!(Host::is_alive(self.0.id()), "an unrelated process was killed");
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// After the removal of all kernels: no process, directory, socket or cgroup is left.
fn nothing_is_left(host: &Host) {
    until("the end of every worker", || host.workers().is_empty());
    let left: Vec<_> = fs::read_dir(host.data().join("kernels")).unwrap().flatten().map(|e| e.path()).collect();
    assert!(left.is_empty(), "{left:?}\n{}", host.log());
    if let Some(base) = ryokan::sandbox::delegated_cgroup() {
        let own = host.with(async |client| format!("worker-{}-", client.ping().await.expect("it answers").0));
        let of_host = |name: &String| name.starts_with(&own);
        let cgroups =
            || fs::read_dir(&base).into_iter().flatten().flatten().map(|e| e.file_name().into_string().unwrap());
        assert!(cgroups().all(|name| !of_host(&name)), "cgroups are left: {:?}", cgroups().collect::<Vec<_>>());
    }
    // The sockets of a worker go after its end is noticed.
    until("the end of every socket", || {
        let names = |folder| fs::read_dir(host.path("run").join("ryokan").join(folder)).into_iter().flatten().flatten();
        ["kernels", "workers"].into_iter().flat_map(names).next().is_none()
    });
}

/// Removes every kernel and checks that nothing is left.
fn remove_all(host: &Host) {
    host.with(async |client| {
        for info in client.list_kernels(&Default::default()).await.expect("kernels") {
            client.remove_kernel(info.spec.name.as_str(), 0).await.expect("removed");
        }
    });
    nothing_is_left(host);
}
