//! What passes between a kernel's task and its worker, in plain types.

use crate::core::error::{Error, Result};
use crate::core::exec::{ExecEnd, ExecRequest, OutputEvent, Stream};
use crate::core::ids::{Digest, ExecId};
use crate::core::missed::MissedEntry;
use crate::core::value::Value;

pub use crate::link::frames::Job;

/// Takes what a worker says. The kernel's task implements it.
///
/// For one execution `output`, `event` and `ended` come in the order in which the worker sent them, each after the one
/// before it has returned: awaiting inside `output` or `event` is what slows the code down.
#[async_trait::async_trait(?Send)]
pub trait WorkerListener {
    /// Bytes of output. `offset` counts both streams' bytes of this execution; after a re-attach output that was already
    /// seen comes again from its beginning.
    async fn output(&self, exec: ExecId, offset: u64, stream: Stream, data: Vec<u8>);
    /// A rich or structured form of a result.
    async fn event(&self, exec: ExecId, event: OutputEvent);
    /// The execution is over; the worker remembers it until [`crate::link::host::WorkerLink::acknowledge`].
    fn ended(&self, exec: ExecId, end: ExecEnd, output_bytes: u64);
    /// The end that follows at once is this worker's last: its engine is gone, it takes no more work.
    fn last(&self) {}
    /// The code calls a dynamic tool. The call is dropped if the execution is interrupted. Gives the value and a text.
    async fn tool_call(&self, exec: ExecId, name: String, args: Value) -> Result<(Value, String)>;
    /// The background jobs that run now.
    fn jobs(&self, jobs: Vec<Job>);
    /// All that the engine's state does not capture now.
    fn missed(&self, missed: Vec<MissedEntry>);
    /// What jobs wrote while no execution ran.
    fn background(&self, stream: Stream, data: Vec<u8>);
    /// The engine is gone; the worker's exit follows.
    fn dying(&self, cause: WorkerCause);
    /// The link is closed: the worker ended, or another daemon attached.
    fn disconnected(&self);
}

/// What a worker reports when a daemon attaches.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerReport {
    /// Engine by name.
    pub engine: String,
    /// The engine's own version.
    pub engine_version: String,
    /// Sandbox layers in force, one line each.
    pub sandbox: Vec<String>,
    /// Executions that run (`true`), or ended and were not acknowledged: their output and end come again.
    pub executions: Vec<(ExecId, bool)>,
    /// Background jobs.
    pub jobs: Vec<Job>,
    /// What the state does not capture now.
    pub missed: Vec<MissedEntry>,
    /// Paths inside at which something of the host's is mounted.
    pub mounts: Vec<String>,
    /// State entries that the engine was given when the worker started.
    pub restored_entries: u32,
    /// Those of them that the engine could not build again.
    pub not_restored: Vec<MissedEntry>,
}

/// An execution to start.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerExec {
    /// Its number.
    pub exec: ExecId,
    /// Code or tool, environment, standard input, timeout.
    pub request: ExecRequest,
    /// Bytes of output that the worker keeps for a daemon that comes back.
    pub output_kept: u64,
}

/// Why a worker ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerCause {
    /// The engine exited.
    Exited(i32),
    /// A signal ended the engine.
    Signalled(i32),
    /// The memory limit.
    OutOfMemory,
    /// The workspace's limit.
    DiskFull,
    /// The engine did not stop when interrupted, or did not answer.
    Unresponsive,
    /// The engine broke the contract.
    Protocol(String),
    /// The sandbox could not be built.
    Sandbox(String),
}

impl WorkerCause {
    /// The cause in one word, as on the wire and in events.
    pub const fn kind(&self) -> &'static str {
        match self {
            WorkerCause::Exited(_) => "exited",
            WorkerCause::Signalled(_) => "signalled",
            WorkerCause::OutOfMemory => "outOfMemory",
            WorkerCause::DiskFull => "diskFull",
            WorkerCause::Unresponsive => "unresponsive",
            WorkerCause::Protocol(_) => "protocol",
            WorkerCause::Sandbox(_) => "sandbox",
        }
    }

    /// Exit code or signal number; 0 for the others.
    pub const fn status(&self) -> i32 {
        match self {
            WorkerCause::Exited(status) | WorkerCause::Signalled(status) => *status,
            WorkerCause::OutOfMemory
            | WorkerCause::DiskFull
            | WorkerCause::Unresponsive
            | WorkerCause::Protocol(_)
            | WorkerCause::Sandbox(_) => 0,
        }
    }

    /// What more there is to say; may be empty.
    pub fn detail(&self) -> &str {
        match self {
            WorkerCause::Protocol(detail) | WorkerCause::Sandbox(detail) => detail,
            WorkerCause::Exited(_)
            | WorkerCause::Signalled(_)
            | WorkerCause::OutOfMemory
            | WorkerCause::DiskFull
            | WorkerCause::Unresponsive => "",
        }
    }

    /// The cause of those three parts.
    pub fn from_parts(kind: &str, status: i32, detail: &str) -> Option<WorkerCause> {
        Some(match kind {
            "exited" => WorkerCause::Exited(status),
            "signalled" => WorkerCause::Signalled(status),
            "outOfMemory" => WorkerCause::OutOfMemory,
            "diskFull" => WorkerCause::DiskFull,
            "unresponsive" => WorkerCause::Unresponsive,
            "protocol" => WorkerCause::Protocol(detail.to_owned()),
            "sandbox" => WorkerCause::Sandbox(detail.to_owned()),
            _ => return None,
        })
    }
}

impl std::fmt::Display for WorkerCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WorkerCause::Exited(status) => write!(f, "the engine exited with status {status}"),
            WorkerCause::Signalled(signal) => write!(f, "signal {signal} ended the engine"),
            WorkerCause::OutOfMemory => f.write_str("the kernel's memory limit was reached"),
            WorkerCause::DiskFull => f.write_str("the workspace's size limit was reached"),
            WorkerCause::Unresponsive => f.write_str("the engine did not respond"),
            WorkerCause::Protocol(detail) => write!(f, "the engine broke its contract: {detail}"),
            WorkerCause::Sandbox(detail) => write!(f, "the sandbox could not be built: {detail}"),
        }
    }
}

/// Whether a text is a whole program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CodeCheck {
    /// It is.
    Complete,
    /// More must follow, which an editor may start with `indent`.
    Incomplete {
        /// White space for the next line.
        indent: String,
    },
    /// It never will be.
    Invalid,
}

/// Completions of a piece of code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Completions {
    /// Where the text begins that they replace, bytes.
    pub start: usize,
    /// The texts.
    pub matches: Vec<String>,
}

/// One chunk of a state entry on its way into an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct StateChunk {
    /// `kind/name`.
    pub key: String,
    /// The entry's meta data, one JSON object.
    pub meta_json: Vec<u8>,
    /// At most [`crate::core::limits::FRAME_TAIL_BYTES`].
    pub data: Vec<u8>,
    /// The same key goes on in the next chunk.
    pub more: bool,
}

/// A state entry without its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateHead {
    /// `kind/name`.
    pub key: String,
    /// The entry's meta data, one JSON object.
    pub meta_json: String,
    /// BLAKE3 of the body.
    pub digest: Digest,
    /// Length of the body, bytes.
    pub size: u64,
    /// Which execution changed it last.
    pub exec: Option<ExecId>,
}

/// A whole state entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateEntry {
    /// `kind/name`.
    pub key: String,
    /// The entry's meta data, one JSON object.
    pub meta_json: String,
    /// The engine's own encoding.
    pub body: Vec<u8>,
}

/// What a worker uses now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkerUsage {
    /// Memory of all its processes, bytes.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Processor time so far, microseconds.
    pub cpu_us: u64,
    /// The workspace, bytes, as last measured.
    pub workspace_bytes: u64,
}

/// Turns what Cap'n Proto says of a failed call into an error for clients.
pub(crate) fn from_capnp(error: &capnp::Error) -> Error {
    if let Some(ours) = Error::from_line(&error.extra) {
        return ours;
    }
    match error.kind {
        capnp::ErrorKind::Disconnected => Error::lost("the worker ended under the call"),
        capnp::ErrorKind::Unimplemented => Error::unsupported("this worker does not know the call"),
        _ => Error::internal(format!("call to the worker: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_cause_round_trips() {
        for cause in [
            WorkerCause::Exited(3),
            WorkerCause::Signalled(9),
            WorkerCause::OutOfMemory,
            WorkerCause::DiskFull,
            WorkerCause::Unresponsive,
            WorkerCause::Protocol("x".into()),
            WorkerCause::Sandbox("y".into()),
        ] {
            assert_eq!(WorkerCause::from_parts(cause.kind(), cause.status(), cause.detail()), Some(cause));
        }
        assert_eq!(WorkerCause::from_parts("other", 0, ""), None);
    }
}
