//! Forked snapshots of the engine's process: validation, memory cost, and replacing the engine by
//! one. Runs in init.
//!
//! The engine forks them; only the host kernel's facts are trusted here. A snapshot has every
//! sandbox layer of the engine, because no layer can be dropped and a fork inherits all.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::init::{Exit, Init, proc_file};
use super::usage::{Process, anonymous_bytes, processes};
use crate::sys::pidfd;

/// Time for all processes to end. A process that waits for a device ends only after its answer.
const ENDS_WITHIN: Duration = Duration::from_secs(1);
/// Interval of polling.
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// OOM score of snapshots: the first to be killed when memory is short.
const FIRST_TO_GO: &str = "1000";
/// OOM score of the engine, as at its start.
const ORDINARY: &str = "0";

impl Init {
    /// Opens a process as a snapshot: a child of init, so only init can reap it.
    ///
    /// # Errors
    /// The violated condition.
    pub fn adopt_snapshot(&self, pid: i32) -> Result<OwnedFd, String> {
        if pid <= 1 {
            return Err("it is no process of this kernel".into());
        }
        let process = pidfd::open(Pid::from_raw(pid)).map_err(|error| format!("it is gone: {error}"))?;
        // Checked after opening the descriptor, so the descriptor is of this very process.
        match proc_file(pid, "stat").ok().and_then(|stat| parent(&stat)) {
            Some(1) => {}
            Some(_) => return Err("its parent lives".into()),
            None => return Err("it is gone".into()),
        }
        // Best effort: the memory budget applies as well.
        let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), FIRST_TO_GO);
        Ok(process)
    }

    /// Ends every process inside but one and the `spared`. Returns that one's exit if it ended.
    ///
    /// # Errors
    /// If a process did not end in time.
    pub fn leave_only(&self, pid: i32, spared: &[i32]) -> Result<Option<Exit>, String> {
        let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), ORDINARY);
        let until = Instant::now() + ENDS_WITHIN;
        let mut its_end = None;
        loop {
            let others = processes().into_iter().map(|process| process.pid);
            let others: Vec<i32> = others.filter(|other| *other != pid && !spared.contains(other)).collect();
            // Their orphans become init's children and are reaped here, too.
            let ended = self.reap();
            its_end = its_end.or(ended.iter().find(|(ended, _)| *ended == pid).map(|(_, cause)| *cause));
            let left: Vec<i32> =
                others.into_iter().filter(|other| !ended.iter().any(|(pid, _)| pid == other)).collect();
            if left.is_empty() {
                return Ok(its_end);
            }
            if Instant::now() > until {
                return Err(format!("{} processes do not end", left.len()));
            }
            for other in left {
                match kill(Pid::from_raw(other), Signal::SIGKILL) {
                    Ok(()) | Err(Errno::ESRCH) => {}
                    Err(error) => return Err(format!("process {other} cannot be ended: {error}")),
                }
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Memory that ending these snapshots would free, and free memory beside them. The first is an
    /// upper bound if it is at most `enough` and at most half of the total.
    pub fn snapshots_memory(&self, engine: i32, copies: &[i32], enough: u64) -> (u64, u64) {
        let all = processes();
        let of = |pid: i32| all.iter().find(|process| process.pid == pid);
        let copies: Vec<&Process> = copies.iter().filter_map(|pid| of(*pid)).collect();
        let limit = self.plan.limits.memory_bytes;
        let resident: u64 = all.iter().map(|process| process.resident_bytes).sum::<u64>() + self.scratch_used();
        let most: u64 = copies.iter().map(|copy| copy.resident_bytes).sum();
        // This counts shared pages once per process. If even that is little, the exact figures are
        // not needed; their cost grows with their size.
        if most <= enough && most <= limit.saturating_sub(resident) / 2 {
            return (most, limit.saturating_sub(resident));
        }
        let used: u64 = self.usage().memory_bytes;
        let shares: u64 =
            copies.iter().map(|copy| anonymous_bytes(copy.pid).map_or(copy.resident_bytes, |of| of.share)).sum();
        // The snapshots' share of pages shared with the engine would become the engine's own.
        let kept = anonymous_bytes(engine).map_or(0, |of| of.resident.saturating_sub(of.share));
        (shares.saturating_sub(kept), limit.saturating_sub(used))
    }
}

/// The fourth field of a `stat` file; the name before it may contain any character.
fn parent(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parent_pid_parses_any_name() {
        assert_eq!(parent("42 (a) 7 b) (c) T 3 1"), Some(3));
        assert_eq!(parent("42 (x"), None);
    }
}
