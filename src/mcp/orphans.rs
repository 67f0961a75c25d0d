//! Ends servers that survived a killed daemon, found by a mark in their environment.

use std::fs;
use std::os::unix::fs::MetadataExt;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

/// The environment variable that identifies a server's daemon.
pub(super) const MARK: &str = "RYOKAN_MCP_OF";
/// Inspected length of an environment, bytes.
const ENVIRONMENT_BYTES: u64 = 4 << 20;

/// Kills every process of this user that carries `mark`, and returns their number. For a daemon's
/// start, when it holds its runtime directory exclusively and has no servers yet. Children inherit
/// the mark, so processes that left the server's group are found, too.
pub fn end(mark: &str) -> usize {
    let wanted = format!("{MARK}={mark}");
    let mut ended = 0;
    // A process may start another during the scan: repeat until none is found, with a limit.
    for _ in 0..10 {
        let found = find(&wanted);
        if found.is_empty() {
            break;
        }
        ended += found.into_iter().filter(|pid| kill(*pid, Signal::SIGKILL).is_ok()).count();
    }
    ended
}

fn find(wanted: &str) -> Vec<Pid> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let own = Pid::this();
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw));
    pids.filter(|pid| *pid != own && carries(*pid, wanted)).collect()
}

fn carries(pid: Pid, wanted: &str) -> bool {
    use std::io::Read;
    let root = geteuid().is_root();
    let path = format!("/proc/{pid}/environ");
    let Ok(file) = fs::File::open(path) else { return false };
    if !root && file.metadata().is_ok_and(|meta| meta.uid() != geteuid().as_raw()) {
        return false;
    }
    let mut environment = Vec::new();
    let read = file.take(ENVIRONMENT_BYTES).read_to_end(&mut environment);
    // A zombie's environment is empty: it is not found again while it waits to be reaped.
    read.is_ok() && environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes())
}
