//! Current resource usage of a worker, read from init's `/proc`. Runs in init.

use std::os::fd::OwnedFd;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::statvfs::fstatvfs;
use nix::sys::time::TimeValLike;
use nix::unistd::{SysconfVar, sysconf};

use super::cgroup::Cgroup;
use super::init::{Init, proc_file};

/// Usage of a kernel's processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Memory with each shared page counted once, `/tmp`, `/dev/shm` and init's own memory included.
    /// Where there is a cgroup, its figure without cached files, and init's memory.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub tasks: u32,
    /// Processor time since the start, ended processes included.
    pub cpu_us: u64,
}

/// A process as shown by `/proc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub pid: i32,
    pub tasks: u32,
    pub ticks: u64,
    /// Resident pages, each shared page in full.
    pub resident_bytes: u64,
}

impl Process {
    /// Parses a `stat` file; the name in it may contain any character, blanks and parentheses
    /// included.
    fn parse(pid: i32, stat: &str, page_bytes: u64) -> Option<Process> {
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // From the third field on: state is 0, utime 11, stime 12, cutime 13, cstime 14,
        // num_threads 17, rss 21.
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        Some(Process {
            pid,
            tasks: u32::try_from(number(17)?).ok()?,
            ticks: number(11)? + number(12)? + number(13)? + number(14)?,
            resident_bytes: number(21)? * page_bytes,
        })
    }
}

/// Every process but init.
pub(super) fn processes() -> Vec<Process> {
    let page_bytes = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096) as u64;
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| *pid != 1)
        .filter_map(|pid| Process::parse(pid, &proc_file(pid, "stat").ok()?, page_bytes))
        .collect()
}

/// A process's proportional memory: each shared page divided by its users.
pub(super) fn proportional_bytes(process: &Process) -> u64 {
    let kib = proc_file(process.pid, "smaps_rollup").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    kib.map_or(process.resident_bytes, |kib| kib * 1024)
}

/// A process's anonymous memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Anonymous {
    /// Total.
    pub resident: u64,
    /// Each shared page divided by its users.
    pub share: u64,
}

/// Anonymous memory; `None` if the process is gone or the host kernel lacks the figures.
pub(super) fn anonymous_bytes(pid: i32) -> Option<Anonymous> {
    let text = proc_file(pid, "smaps_rollup").ok()?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some(Anonymous { resident: bytes("Anonymous:")?, share: bytes("Pss_Anon:")? })
}

/// This process's anonymous memory, an upper bound: pages shared with the spawner count in full.
pub(super) fn own_rough_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}

/// This process's anonymous memory, its share of shared pages.
pub(super) fn own_bytes() -> u64 {
    let own = i32::try_from(std::process::id()).ok().and_then(anonymous_bytes);
    own.map_or_else(own_rough_bytes, |own| own.share)
}

/// Used bytes of a tmpfs.
pub(super) fn scratch_bytes(scratch: &OwnedFd) -> u64 {
    fstatvfs(scratch).map_or(0, |found| (found.blocks() - found.blocks_free()) * found.fragment_size())
}

impl Init {
    /// The current usage.
    pub fn usage(&self) -> Usage {
        let ticks_per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100).max(1) as u64;
        let processes = processes();
        let ended_us = getrusage(UsageWho::RUSAGE_CHILDREN).map_or(0, |used| {
            (used.user_time().num_microseconds() + used.system_time().num_microseconds()).unsigned_abs()
        });
        let live_us: u64 = processes.iter().map(|process| process.ticks * 1_000_000 / ticks_per_second).sum();
        let memory_bytes = match self.cgroup.as_ref().and_then(Cgroup::held_bytes) {
            Some(bytes) => bytes,
            None => processes.iter().map(proportional_bytes).sum::<u64>() + self.scratch_used(),
        };
        let memory_bytes = memory_bytes + own_bytes();
        Usage { memory_bytes, tasks: processes.iter().map(|process| process.tasks).sum(), cpu_us: live_us + ended_us }
    }

    pub(super) fn scratch_used(&self) -> u64 {
        self.engine.as_ref().map_or(0, |engine| scratch_bytes(&engine.scratch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_stat_parses_any_name() {
        let stat =
            "42 (a) b) (c) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 99 1000 250 18446744073709551615 1 1 0 0";
        let process = Process::parse(42, stat, 4096);
        assert_eq!(process, Some(Process { pid: 42, tasks: 3, ticks: 26, resident_bytes: 250 * 4096 }));
        assert_eq!(Process::parse(42, "42 (x", 4096), None);
        assert_eq!(Process::parse(42, "", 4096), None);
    }

    #[test]
    fn own_process_is_listed() {
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        let found = processes();
        let this = found.iter().find(|process| process.pid == own).expect("the test's own process is listed");
        assert!(this.resident_bytes > 0 && this.tasks > 0);
        assert!(proportional_bytes(this) > 0);
        let anonymous = anonymous_bytes(own).expect("the host kernel tells");
        assert!(anonymous.share > 0 && anonymous.share <= anonymous.resident);
        assert!(own_bytes() > 0 && own_bytes() <= own_rough_bytes() + (8 << 20));
    }
}
