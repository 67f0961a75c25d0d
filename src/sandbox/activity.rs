//! Detects activity of leftover processes, threads and timers while no code is known to run. Runs
//! in init.
//!
//! Compares two cheap values that activity must change: the most recent process id of this PID
//! namespace (`/proc/loadavg`, the fifth field), and the total processor time of the present
//! processes.

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// The values at one check.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    last_pid: String,
    cpu_ns: i128,
}

/// Remembers the values of the last check.
#[derive(Debug, Default)]
pub struct ActivityProbe(Option<Seen>);

impl ActivityProbe {
    /// Whether any process but init has run since the last call. True at the first call, and where
    /// the host kernel lacks the values.
    pub fn has_activity(&mut self) -> bool {
        let seen = see();
        let same = seen.is_some() && self.0 == seen;
        self.0 = seen;
        !same
    }
}

fn see() -> Option<Seen> {
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    let last_pid = load.split_ascii_whitespace().nth(4)?.to_owned();
    let mut cpu_ns = 0;
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        if pid == 1 {
            continue;
        }
        // A process that has just ended changes the sum by its absence.
        let Ok(clock) = clock_getcpuclockid(Pid::from_raw(pid)) else { continue };
        let Ok(time) = clock_gettime(clock) else { continue };
        cpu_ns += i128::from(time.tv_sec()) * 1_000_000_000 + i128::from(time.tv_nsec());
    }
    Some(Seen { last_pid, cpu_ns })
}
