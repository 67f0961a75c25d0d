//! Whether anything inside has run since the last look: for the time in which no code is known to run, but a process that was left behind, a
//! thread or a timer may.
//!
//! Two things are looked at, both cheap and none to be fooled: the number that the host kernel gave last to a process of this PID namespace
//! (`/proc/loadavg`, the fifth field), and the processor time of those that are there. Who does anything at all changes one of them.

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// What was seen at a look.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    last_pid: String,
    cpu_ns: i128,
}

/// Remembers the last look.
#[derive(Debug, Default)]
pub struct ActivityProbe(Option<Seen>);

impl ActivityProbe {
    /// Whether anything but init has run since this was asked last; the first time, and where the host kernel does not tell, yes.
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
        // One that has gone meanwhile makes a difference by that.
        let Ok(clock) = clock_getcpuclockid(Pid::from_raw(pid)) else { continue };
        let Ok(time) = clock_gettime(clock) else { continue };
        cpu_ns += i128::from(time.tv_sec()) * 1_000_000_000 + i128::from(time.tv_nsec());
    }
    Some(Seen { last_pid, cpu_ns })
}
