//! Starting a worker: what the daemon gives it, what it reports, and how the daemon waits for both.
//!
//! ```text
//!  daemon ── stdin: length, document, secret ──▶ outer ──▶ init
//!  daemon ◀─ stdout: {"pid":N} {"ready":…} or {"failed":…} ─┘
//! ```
//!
//! Nothing secret is ever in an argument or the environment. The secret comes last, so that init reads it only after the
//! engine's process was forked off: no copy of it is in the engine's memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Interest, Lines};
use tokio::net::unix::pipe;

use super::program::WorkerProgram;
use super::spawning::Spawned;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::bootstrap::Ready;
use crate::link::bootstrap::{LaunchDocument, ReportLine};
use crate::link::handshake::PROOF_BYTES;
use crate::sandbox::SandboxPlan;
use crate::sys::pidfd;
use crate::sys::process::parent;
use crate::sys::watched::watch;

/// Longest line of a report, bytes.
const LINE_BYTES: usize = 4 << 20;

/// A started worker.
#[derive(Debug)]
pub struct Launch {
    /// Its init.
    pub process: WorkerProcess,
    /// What it said of itself.
    pub ready: Ready,
}

/// A worker's init as a process of the host.
#[derive(Debug)]
pub struct WorkerProcess {
    /// Its number.
    pub pid: u32,
    pidfd: OwnedFd,
}

impl WorkerProcess {
    /// Finds a process by its number; for one that a former daemon started, after its identity was proven.
    ///
    /// # Errors
    /// If there is none.
    pub fn find(pid: u32) -> io::Result<WorkerProcess> {
        let number = i32::try_from(pid).map_err(|_| io::Error::from(Errno::ESRCH))?;
        Ok(WorkerProcess { pid, pidfd: pidfd::open(Pid::from_raw(number))? })
    }

    pub(crate) fn of(pid: u32, pidfd: OwnedFd) -> WorkerProcess {
        WorkerProcess { pid, pidfd }
    }

    /// Kills it, and with it everything in its sandbox.
    pub fn kill(&self) {
        // An error means that it has ended.
        let _ = pidfd::signal(self.pidfd.as_fd(), Signal::SIGKILL);
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// If the process cannot be watched.
    pub async fn ended(&self) -> io::Result<()> {
        let watched = watch(self.pidfd.try_clone()?, Interest::READABLE)?;
        drop(watched.readable().await?);
        Ok(())
    }
}

/// Starts a worker and waits until it serves. What was started is killed if that fails.
///
/// `stderr` is where init's own messages go. `record` is called with init's process as soon as there is one. Init gets its
/// secret, without which it serves nobody and ends, only when that is done: so none is left whom nobody knows.
///
/// # Errors
/// That of `record`. What the worker reports: `Unsupported` with reason `sandbox-LAYER`, `Corrupt` for its state, …; `Deadline` after
/// [`limits::WORKER_START`] and a little; `Unavailable` if the program cannot be run.
pub async fn start(
    document: &LaunchDocument<SandboxPlan>,
    secret: &[u8; PROOF_BYTES],
    program: &WorkerProgram,
    stderr: BorrowedFd<'_>,
    record: impl AsyncFnOnce(u32) -> Result<()>,
) -> Result<Launch> {
    let bytes = document.to_bytes()?;
    // What is to end if this fails.
    let mut begun = Vec::new();
    let starting = async {
        let (mut stdin, mut lines, pid) = begin(program, &bytes, stderr, &mut begun).await?;
        record(pid).await?;
        // A worker that cannot read says why on its stdout.
        let _ = stdin.write_all(secret).await;
        drop(stdin);
        match next_line(&mut lines).await? {
            Some(ReportLine::Ready(ready)) => Ok(ready),
            other => unready(other),
        }
    };
    let outcome = match tokio::time::timeout(limits::WORKER_START + Duration::from_secs(2), starting).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Error::deadline("the worker was not ready in time")),
    };
    match (outcome, begun.pop()) {
        (Ok(ready), Some(process)) => {
            // The outer process ends by itself once init is there.
            for outer in begun {
                let _ = outer.ended().await;
            }
            Ok(Launch { process, ready })
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

/// What a worker says.
type Reports = Lines<BufReader<pipe::Receiver>>;

/// Spawns a worker and gives it its document; gives the way to it and its init's number. Adds to `begun` each process that there is then: init comes
/// last. Once more if it ends without a word: its spawner may have ended, and taken along what it had just begun.
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

/// Init, if it is still there. Its parent is looked at after the descriptor was opened: so the descriptor is of that very process.
fn init_of(pid: i32, spawner: u32) -> Option<WorkerProcess> {
    let process = WorkerProcess::find(u32::try_from(pid).ok()?).ok()?;
    (parent(process.pid) == Some(spawner)).then_some(process)
}

fn lost() -> Error {
    Error::internal("the worker ended before it was ready")
}

/// What it means that a line is not the one that was to come.
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
    serde_json::from_str(&line).map(Some).map_err(|e| strange(e.to_string()))
}

impl std::os::fd::AsRawFd for WorkerProcess {
    fn as_raw_fd(&self) -> i32 {
        self.pidfd.as_raw_fd()
    }
}
