//! Servers that outlived a daemon which was killed: found by the mark in their environment, and ended.

use std::fs;
use std::os::unix::fs::MetadataExt;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

/// The environment variable that names the daemon a server belongs to.
pub(super) const MARK: &str = "RYOKAN_MCP_OF";
/// Environment that is looked at, bytes.
const ENVIRONMENT_BYTES: u64 = 4 << 20;

/// Kills every process of this user that carries `mark` and gives how many there were. For a daemon's start, when it
/// holds its runtime directory alone and has no servers of its own yet. What a server started inherits the mark, so
/// grandchildren that left its group are found too.
pub fn end(mark: &str) -> usize {
    let wanted = format!("{MARK}={mark}");
    let mut ended = 0;
    // A process may start another while we look: look again until there is nothing, but not forever.
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
