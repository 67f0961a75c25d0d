//! Stops every process inside for a moment, so that its state can be read. Runs in init.
//!
//! Uses SIGSTOP on the whole PID namespace: no cgroup or right is needed and it works the same
//! everywhere. Processes that were stopped before stay stopped afterwards.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::init::{Init, proc_file};
use super::usage::processes;

/// Time for all processes to stop. A process that waits for a device stops only after its answer.
const STOPS_WITHIN: Duration = Duration::from_secs(1);
/// Interval of polling.
const LOOK_AGAIN: Duration = Duration::from_micros(100);

/// The processes that were stopped already.
#[derive(Debug, Default)]
pub struct Frozen {
    stopped_before: Vec<i32>,
}

impl Init {
    /// Stops every process but init; none of them writes once this has returned.
    ///
    /// # Errors
    /// If a process did not stop in time; then all resume.
    pub fn freeze(&self) -> Result<Frozen, String> {
        let stopped_before =
            processes().into_iter().map(|p| p.pid).filter(|pid| all_threads(*pid, is_stopped)).collect();
        let frozen = Frozen { stopped_before };
        match kill(Pid::from_raw(-1), Signal::SIGSTOP) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(format!("cannot stop the kernel's processes: {error}")),
        }
        let until = Instant::now() + STOPS_WITHIN;
        loop {
            let Some(pid) = one_that_runs() else { return Ok(frozen) };
            if Instant::now() > until {
                let name = proc_file(pid, "comm").unwrap_or_default();
                self.thaw(frozen);
                return Err(format!("process {:?} does not stop: it may be waiting for a device", name.trim_end()));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Resumes every stopped process.
    pub fn thaw(&self, frozen: Frozen) {
        // A process that is gone needs nothing.
        if frozen.stopped_before.is_empty() {
            let _ = kill(Pid::from_raw(-1), Signal::SIGCONT);
            return;
        }
        for process in processes().into_iter().filter(|p| !frozen.stopped_before.contains(&p.pid)) {
            let _ = kill(Pid::from_raw(process.pid), Signal::SIGCONT);
        }
    }
}

/// Finds a process that has not stopped. A process that waits in `vfork` for a stopped child cannot
/// stop, but runs no code either; its state is that of a process waiting for a device.
fn one_that_runs() -> Option<i32> {
    let all: Vec<i32> = processes().into_iter().map(|process| process.pid).collect();
    let rests = |pid: i32| all_threads(pid, |state| is_stopped(state) || is_dead(state));
    let moving: Vec<i32> = all.iter().copied().filter(|pid| !rests(*pid)).collect();
    if moving.is_empty() {
        return None;
    }
    let waited_for: Vec<i32> = all.iter().filter(|pid| rests(**pid)).filter_map(|pid| parent(*pid)).collect();
    let waits = |pid: i32| {
        waited_for.contains(&pid) && all_threads(pid, |state| is_stopped(state) || is_dead(state) || state == 'D')
    };
    moving.into_iter().find(|pid| !waits(*pid))
}

/// The fourth field of a `stat` file.
fn parent(pid: i32) -> Option<i32> {
    let stat = proc_file(pid, "stat").ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Whether all threads of a process are in such a state; true for a process that is gone.
fn all_threads(pid: i32, state_is: impl Fn(char) -> bool) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    tasks.flatten().filter_map(|task| task.file_name().into_string().ok()).all(|task| {
        let stat = proc_file(pid, &format!("task/{task}/stat"));
        stat.ok().and_then(|stat| state(&stat)).is_none_or(&state_is)
    })
}

/// The third field of a `stat` file; the name before it may contain any character, parentheses
/// included.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

fn is_stopped(state: char) -> bool {
    matches!(state, 'T' | 't')
}

fn is_dead(state: char) -> bool {
    matches!(state, 'Z' | 'X' | 'x')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_state_parses_any_name() {
        assert_eq!(state("42 (a) b) (c) T 1 1"), Some('T'));
        assert_eq!(state("42 (x"), None);
        assert_eq!(state("42 (x)"), None);
    }

    #[test]
    fn running_process_is_not_stopped() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().expect("started");
        let pid = child.id() as i32;
        assert!(!all_threads(pid, is_stopped));
        kill(Pid::from_raw(pid), Signal::SIGSTOP).expect("stopped");
        let until = Instant::now() + Duration::from_secs(10);
        while !all_threads(pid, is_stopped) {
            assert!(Instant::now() < until, "it does not stop");
            std::thread::sleep(LOOK_AGAIN);
        }
        child.kill().expect("killed");
        child.wait().expect("collected");
        assert!(all_threads(pid, is_stopped), "a process that is gone stands in nobody's way");
    }
}
