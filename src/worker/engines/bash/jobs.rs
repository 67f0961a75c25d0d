//! Processes below the shell: background jobs, and targets of an interrupt.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::entries::one_line;
use crate::link::frames::Job;
use crate::sys::pidfd;

/// Known background jobs, including those of earlier shells.
#[derive(Default)]
pub struct Jobs {
    known: BTreeMap<i32, (String, OwnedFd)>,
}

/// Limit of inspected processes.
const PROCESSES: usize = 65_536;

impl Jobs {
    /// Updates the jobs. `shell`: between executions its children are jobs; `reported`: their names in
    /// bash.
    pub fn look(&mut self, shell: Pid, reported: &[(i32, String)]) {
        self.forget_ended();
        let children = children(shell.as_raw());
        for pid in children {
            let command = reported.iter().find(|(reported, _)| *reported == pid).map(|(_, command)| command.clone());
            let known = self.known.get_mut(&pid);
            match (known, command) {
                (Some((known, _)), Some(command)) => *known = one_line(command.as_bytes()),
                (Some(_), None) => {}
                (None, command) => {
                    let Ok(process) = pidfd::open(Pid::from_raw(pid)) else { continue };
                    let command = command.unwrap_or_else(|| command_line(pid));
                    self.known.insert(pid, (one_line(command.as_bytes()), process));
                }
            }
        }
        self.forget_ended();
    }

    /// Forgets ended jobs; returns whether there were any.
    pub fn forget_ended(&mut self) -> bool {
        let before = self.known.len();
        self.known.retain(|_, (_, process)| !has_ended(process.as_fd()));
        self.known.len() < before
    }

    /// The list for init.
    pub fn list(&self) -> Vec<Job> {
        self.known.iter().map(|(pid, (command, _))| Job { id: pid.to_string(), command: command.clone() }).collect()
    }

    /// Descriptors that become readable when a job ends.
    pub fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.known.values().map(|(_, process)| process.as_fd())
    }

    /// Whether the process is a job.
    pub fn has(&self, pid: i32) -> bool {
        self.known.contains_key(&pid)
    }

    /// Signals all jobs and their descendants.
    pub fn signal(&self, signal: Signal) {
        for (pid, (_, process)) in &self.known {
            for below in descendants(*pid, |_| false) {
                let _ = nix::sys::signal::kill(Pid::from_raw(below), signal);
            }
            let _ = pidfd::signal(process.as_fd(), signal);
        }
    }

    /// Whether there are no jobs.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }
}

fn has_ended(process: BorrowedFd<'_>) -> bool {
    let mut waiting = [PollFd::new(process, PollFlags::POLLIN)];
    poll(&mut waiting, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// The processes that an execution waits for: all below the shell except jobs and their
/// descendants. A job is a known one, or a process that ignores interrupts and quits as bash sets
/// for jobs.
pub fn foreground(shell: Pid, jobs: &Jobs) -> Vec<i32> {
    descendants(shell.as_raw(), |pid| jobs.has(pid) || ignores_interrupts(pid))
}

/// The descendants of a process, parents first, skipping the given ones with their descendants.
/// Siblings come youngest first: otherwise the end of a pipeline would see its input close and exit
/// as if it had succeeded, before its own signal.
fn descendants(pid: i32, passed_over: impl Fn(i32) -> bool) -> Vec<i32> {
    let mut found: Vec<i32> = Vec::new();
    let mut seen = HashSet::from([pid]);
    let mut next = vec![pid];
    while let Some(parent) = next.pop() {
        for child in children(parent).into_iter().rev() {
            if seen.insert(child) && seen.len() < PROCESSES && !passed_over(child) {
                found.push(child);
                next.push(child);
            }
        }
    }
    found
}

fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut found = Vec::new();
    for thread in threads.flatten() {
        match std::fs::read_to_string(thread.path().join("children")) {
            Ok(listed) => found.extend(listed.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok())),
            Err(_) => return children_by_parent(pid),
        }
    }
    found
}

/// For host kernels without the `children` files.
fn children_by_parent(parent: i32) -> Vec<i32> {
    let listed = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers
        .filter(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_ascii_whitespace());
            fields.and_then(|mut fields| fields.nth(1)?.parse().ok()) == Some(parent)
        })
        .collect()
}

fn ignores_interrupts(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    let both = 1 << (Signal::SIGINT as u64 - 1) | 1 << (Signal::SIGQUIT as u64 - 1);
    mask.is_some_and(|mask| mask & both == both)
}

fn command_line(pid: i32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> = line
        .split(|b| *b == 0)
        .filter(|word| !word.is_empty())
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    words.join(" ")
}

/// The shell's limits from `/proc/PID/limits`: name and both values.
pub fn limits(shell: Pid) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(format!("/proc/{shell}/limits")).unwrap_or_default();
    // Fixed-width columns: names contain blanks.
    let row = |line: &str| Some((line.get(..26)?.trim().to_owned(), line.get(26..)?.trim().to_owned()));
    text.lines().skip(1).filter_map(row).collect()
}

/// Open descriptors of the shell beyond its own and the machinery's, with their targets; of the
/// first three, those not leading to `outputs`.
pub fn open_descriptors(shell: Pid, outputs: &[(i32, String)]) -> Vec<(i32, String)> {
    let folder = format!("/proc/{shell}/fd");
    let listed = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let mut found: Vec<(i32, String)> = numbers
        .filter(|number| *number != 0 && !(241..=255).contains(number))
        .filter_map(|number| {
            let leads = std::fs::read_link(format!("{folder}/{number}")).ok()?.to_string_lossy().into_owned();
            Some((number, leads)).filter(|found| !outputs.contains(found))
        })
        .collect();
    found.sort();
    let closed = outputs.iter().filter(|(number, _)| std::fs::symlink_metadata(format!("{folder}/{number}")).is_err());
    found.extend(closed.map(|(number, _)| (*number, "nothing".to_owned())));
    found
}
