//! Starting a worker: what the daemon gives it, what it reports, and how the daemon waits for both.
//!
//! ```text
//!  daemon ── stdin: length, document, secret ──▶ outer ──▶ init
//!  daemon ◀─ stdout: {"pid":N} {"ready":…} or {"failed":…} ─┘
//! ```
//!
//! Nothing secret is ever in an argument or the environment. The secret comes last, so that init reads it only after the
//! engine's process was forked off: no copy of it is in the engine's memory.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Interest, Lines};
use tokio::net::unix::pipe;

use super::engines::EngineSettings;
use super::init::Ready;
use super::program::WorkerProgram;
use super::spawning::Spawned;
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;
use crate::rpc::worker_proof::{PROOF_BYTES, WorkerIdentity};
use crate::sandbox::SandboxPlan;
use crate::sys::pidfd;
use crate::sys::process::parent;
use crate::sys::watched::watch;

/// Version and sources of this program. Another build speaks another protocol between daemon and worker.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), "+", env!("RYOKAN_SOURCES"));

/// Largest document, bytes.
const DOCUMENT_BYTES: usize = 1 << 20;
/// Longest line of a report, bytes.
const LINE_BYTES: usize = 4 << 20;

/// What a worker is started with; the secret travels beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaunchDocument {
    /// The worker.
    pub worker: WorkerId,
    /// The kernel that it executes.
    pub kernel: KernelId,
    /// The kernel's name, for the code inside.
    pub name: KernelName,
    /// The ownership under which it starts.
    pub epoch: Epoch,
    /// [`BUILD`] of the daemon: a worker of another build refuses to start.
    pub build: String,
    /// The interpreter.
    pub engine: EngineName,
    /// The interpreter's settings.
    pub engine_settings: EngineSettings,
    /// The sandbox.
    pub plan: SandboxPlan,
    /// The private socket; the one for descriptors is beside it.
    pub socket: PathBuf,
    /// Life without a daemon, milliseconds.
    pub orphan_grace_ms: u64,
    /// Output held while no daemon listens, bytes.
    pub output_buffer_bytes: usize,
    /// Whether saved state must survive a loss of power: every save then waits for the disk.
    #[serde(default)]
    pub power_safe: bool,
    /// Memory that copies of the engine may take, bytes; 0: none are kept.
    #[serde(default)]
    pub rollback_bytes: u64,
    /// How the state that it loads came to be, and its generation: for the code inside.
    #[serde(default)]
    pub origin: (OriginKind, u32),
}

impl LaunchDocument {
    /// A document with the limits of this release.
    pub fn new(
        identity: &WorkerIdentity,
        name: KernelName,
        engine: EngineName,
        plan: SandboxPlan,
        socket: PathBuf,
    ) -> Self {
        LaunchDocument {
            worker: identity.worker,
            kernel: identity.kernel,
            name,
            epoch: identity.epoch,
            build: identity.build.clone(),
            engine,
            engine_settings: EngineSettings::default(),
            plan,
            socket,
            orphan_grace_ms: u64::try_from(limits::ORPHAN_GRACE.as_millis()).unwrap_or(u64::MAX),
            output_buffer_bytes: limits::OUTPUT_BUFFER_BYTES,
            power_safe: false,
            rollback_bytes: 0,
            origin: (OriginKind::Original, 0),
        }
    }

    /// The identity that both ends prove.
    pub fn identity(&self, secret: [u8; PROOF_BYTES]) -> WorkerIdentity {
        WorkerIdentity {
            worker: self.worker,
            kernel: self.kernel,
            epoch: self.epoch,
            build: self.build.clone(),
            secret,
        }
    }

    /// Reads a document and nothing after it.
    ///
    /// # Errors
    /// If it is none of this build, or the stream's own errors.
    pub fn read(from: &mut impl Read) -> io::Result<LaunchDocument> {
        let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > DOCUMENT_BYTES {
            return Err(wrong(format!("a launch document of {length} bytes")));
        }
        let mut json = vec![0; length];
        from.read_exact(&mut json)?;
        let document: LaunchDocument = serde_json::from_slice(&json).map_err(|e| wrong(e.to_string()))?;
        if document.build != BUILD {
            return Err(wrong(format!("the daemon is of build {}, this worker of {BUILD}", document.build)));
        }
        Ok(document)
    }

    fn to_bytes(&self) -> Result<Vec<u8>> {
        let json = serde_json::to_vec(self).map_err(|e| Error::internal(format!("encode the launch document: {e}")))?;
        let length = u32::try_from(json.len()).ok().filter(|length| *length as usize <= DOCUMENT_BYTES);
        let length = length.ok_or_else(|| Error::invalid("the launch document is too large"))?;
        Ok([&length.to_le_bytes()[..], &json].concat())
    }
}

/// What a worker that starts says, one JSON object on a line each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportLine {
    /// Init's process, as the host sees it.
    Pid(i32),
    /// The engine is ready in a complete sandbox, its state is loaded, the private socket answers.
    Ready(Ready),
    /// It never will be. Nothing untrusted runs.
    Failed(Error),
}

impl ReportLine {
    /// Writes the line.
    ///
    /// # Errors
    /// The stream's.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        to.write_all(&line)?;
        to.flush()
    }
}

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

    pub(super) fn of(pid: u32, pidfd: OwnedFd) -> WorkerProcess {
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
    document: &LaunchDocument,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> LaunchDocument {
        let identity = WorkerIdentity {
            worker: WorkerId::from_bytes([1; 16]),
            kernel: KernelId::from_bytes([2; 16]),
            epoch: Epoch(3),
            build: BUILD.into(),
            secret: [0xa5; 32],
        };
        let name = "demo".parse().expect("a name");
        LaunchDocument::new(&identity, name, EngineName::Kaish, SandboxPlan::new("/k"), "/s".into())
    }

    #[test]
    fn a_document_is_read_to_its_last_byte_and_no_further() {
        let bytes = [document().to_bytes().expect("encodes"), vec![0xa5; 32]].concat();
        let mut rest = &bytes[..];
        assert_eq!(LaunchDocument::read(&mut rest).expect("reads"), document());
        assert_eq!(rest, [0xa5; 32]);
    }

    #[test]
    fn a_document_of_another_build_is_refused() {
        let other = LaunchDocument { build: "0.0.1+other".into(), ..document() };
        let bytes = other.to_bytes().expect("encodes");
        let error = LaunchDocument::read(&mut &bytes[..]).expect_err("refused");
        assert!(error.to_string().contains("0.0.1+other"), "{error}");
    }

    #[test]
    fn reports_are_one_line_each() {
        let mut text = Vec::new();
        ReportLine::Pid(7).write(&mut text).expect("written");
        ReportLine::Failed(Error::unsupported("a\nb")).write(&mut text).expect("written");
        let lines: Vec<_> = text.split(|b| *b == b'\n').filter(|line| !line.is_empty()).collect();
        assert_eq!(lines[0], br#"{"pid":7}"#);
        assert_eq!(lines.len(), 2);
    }
}
