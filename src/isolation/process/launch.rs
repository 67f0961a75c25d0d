//! Launches a worker: sends its document and secret, reads its reports, and bounds the wait.
//!
//! ```text
//!  daemon ── stdin: length, document, secret ──▶ outer ──▶ init
//!  daemon ◀─ stdout: {"pid":N} {"ready":{}} or {"failed":…} ─┘
//! ```
//!
//! Arguments and environment hold no secret. The secret is sent last, and init reads it after forking the engine's
//! process: the engine's memory holds no copy.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Interest, Lines};
use tokio::net::unix::pipe;

use super::program::WorkerProgram;
use super::spawning::Spawned;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::bootstrap::{LaunchDocument, ReportLine};
use crate::link::frames::parse_bounded;
use crate::link::handshake::PROOF_BYTES;
use crate::sandbox::SandboxPlan;
use crate::sys::pidfd;
use crate::sys::process::parent;
use crate::sys::watched::watch;

/// Longest line of a report, bytes.
const LINE_BYTES: usize = 4 << 20;

/// A worker's init as a process of the host.
#[derive(Debug)]
pub struct WorkerProcess {
    /// Its process id.
    pub pid: u32,
    pidfd: OwnedFd,
}

impl WorkerProcess {
    /// Finds a process by its id. For a process of a former daemon, the caller must then prove its identity.
    ///
    /// # Errors
    /// `ESRCH` if there is no such process; the kernel's other errors.
    pub fn find(pid: u32) -> io::Result<WorkerProcess> {
        let number = i32::try_from(pid).map_err(|_| io::Error::from(Errno::ESRCH))?;
        Ok(WorkerProcess { pid, pidfd: pidfd::open(Pid::from_raw(number))? })
    }

    /// The same process for another user.
    ///
    /// # Errors
    /// Those of duplicating a descriptor.
    pub(crate) fn try_clone(&self) -> io::Result<WorkerProcess> {
        Ok(WorkerProcess { pid: self.pid, pidfd: self.pidfd.try_clone()? })
    }

    /// Whether the process has ended; also true before its parent reaps it.
    ///
    /// # Errors
    /// The kernel's errors.
    pub fn has_ended(&self) -> io::Result<bool> {
        let mut polled = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut polled, PollTimeout::ZERO)? > 0)
    }

    pub(crate) fn of(pid: u32, pidfd: OwnedFd) -> WorkerProcess {
        WorkerProcess { pid, pidfd }
    }

    /// Kills the process and everything in its sandbox.
    pub fn kill(&self) {
        // An error means that the process has ended.
        let _ = pidfd::signal(self.pidfd.as_fd(), Signal::SIGKILL);
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    /// If the process cannot be watched.
    pub async fn ended(&self) -> io::Result<()> {
        let watched = watch(self.pidfd.try_clone()?, Interest::READABLE)?;
        drop(watched.readable().await?);
        Ok(())
    }
}

/// Starts a worker, waits until it serves and returns its init. On failure, everything started is killed.
///
/// `stderr` receives init's own messages. `record` is called with init's process id as soon as it is known. Init gets
/// its secret only after `record` has succeeded, and ends without it: so every serving worker is recorded.
///
/// # Errors
/// That of `record`. The worker's report: `Unsupported` with reason `sandbox-LAYER`, `Corrupt` for its state, …;
/// `Deadline` shortly after [`limits::WORKER_START`]; `Unavailable` if the program cannot be run.
pub async fn start(
    document: &LaunchDocument<SandboxPlan>,
    secret: &[u8; PROOF_BYTES],
    program: &WorkerProgram,
    stderr: BorrowedFd<'_>,
    record: impl AsyncFnOnce(u32) -> Result<()>,
) -> Result<WorkerProcess> {
    let bytes = document.to_bytes()?;
    // The processes to kill on failure.
    let mut begun = Vec::new();
    let starting = async {
        let (mut stdin, mut lines, pid) = begin(program, &bytes, stderr, &mut begun).await?;
        record(pid).await?;
        // A worker that cannot read reports the reason on its stdout.
        let _ = stdin.write_all(secret).await;
        drop(stdin);
        match next_line(&mut lines).await? {
            Some(ReportLine::Ready {}) => Ok(()),
            other => unready(other),
        }
    };
    let outcome = match tokio::time::timeout(limits::WORKER_START + Duration::from_secs(2), starting).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Error::deadline("the worker was not ready in time")),
    };
    match (outcome, begun.pop()) {
        (Ok(()), Some(process)) => {
            // The outer process ends by itself after it has started init.
            for outer in begun {
                let _ = outer.ended().await;
            }
            Ok(process)
        }
        (outcome, last) => {
            for process in begun.iter().chain(&last) {
                process.kill();
                let _ = tokio::time::timeout(limits::WORKER_STOP, process.ended()).await;
            }
            Err(outcome.err().unwrap_or_else(|| Error::internal("the worker reported no process")))
        }
    }
}

/// A worker's report lines.
type Reports = Lines<BufReader<pipe::Receiver>>;

/// Spawns a worker and sends its document; returns its pipes and init's process id. Adds each process to `begun`, init
/// last.
///
/// Retries once if the worker ends without a report: its spawner may have ended and taken the new worker along.
async fn begin(
    program: &WorkerProgram,
    document: &[u8],
    stderr: BorrowedFd<'_>,
    begun: &mut Vec<WorkerProcess>,
) -> Result<(pipe::Sender, Reports, u32)> {
    let mut again = true;
    loop {
        let Spawned { process: outer, mut stdin, stdout, spawner } = program.spawn(stderr).await?;
        begun.push(outer);
        let mut lines = BufReader::new(stdout).lines();
        // As in [`start`].
        let _ = stdin.write_all(document).await;
        let said = next_line(&mut lines).await?;
        let init = match said {
            Some(ReportLine::Pid(pid)) => init_of(pid, spawner),
            None => None,
            other => return unready(other),
        };
        match init {
            Some(init) => {
                let pid = init.pid;
                begun.push(init);
                return Ok((stdin, lines, pid));
            }
            // An init whose spawner has just ended ends, too: it gets no secret.
            None if std::mem::take(&mut again) => {}
            None => return Err(lost()),
        }
    }
}

/// Init, if it is still running. Its parent is checked after the descriptor was opened, so that the descriptor refers
/// to that process.
fn init_of(pid: i32, spawner: u32) -> Option<WorkerProcess> {
    let process = WorkerProcess::find(u32::try_from(pid).ok()?).ok()?;
    (parent(process.pid) == Some(spawner)).then_some(process)
}

fn lost() -> Error {
    Error::internal("the worker ended before it was ready")
}

/// The error for an unexpected report line.
fn unready<T>(line: Option<ReportLine>) -> Result<T> {
    Err(match line {
        Some(ReportLine::Failed(error)) => error,
        Some(_) => Error::internal("the worker's reports come in a wrong order"),
        None => lost(),
    })
}

async fn next_line(lines: &mut Reports) -> Result<Option<ReportLine>> {
    let strange = |what: String| Error::internal(format!("the worker's report: {what}"));
    let Some(line) = lines.next_line().await.map_err(|e| strange(e.to_string()))? else { return Ok(None) };
    if line.len() > LINE_BYTES {
        return Err(strange(format!("a line of {} bytes", line.len())));
    }
    parse_bounded(line.as_bytes()).map(Some).map_err(|e| strange(e.to_string()))
}

impl std::os::fd::AsRawFd for WorkerProcess {
    fn as_raw_fd(&self) -> i32 {
        self.pidfd.as_raw_fd()
    }
}
