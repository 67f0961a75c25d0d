//! Plain types between a kernel's task and its worker.

use crate::core::error::{Error, Result};
use crate::core::exec::{ExecEnd, ExecRequest, OutputEvent, Stream};
use crate::core::ids::{Digest, ExecId};
use crate::core::kernel::CrashCause;
use crate::core::missed::MissedEntry;
use crate::core::value::Value;

pub use crate::link::frames::Job;

/// Receives what a worker reports. Implemented by the kernel's task.
///
/// For one execution the calls to `output`, `event` and `ended` keep the worker's order, and each
/// waits until the previous one has returned. Awaiting inside `output` or `event` slows the code
/// down.
#[async_trait::async_trait(?Send)]
pub trait WorkerListener {
    /// Receives output. `offset` counts both streams' bytes of this execution. After a re-attach
    /// the output repeats from its beginning.
    async fn output(&self, exec: ExecId, offset: u64, stream: Stream, data: Vec<u8>);
    /// Receives a rich or structured form of a result.
    async fn event(&self, exec: ExecId, event: OutputEvent);
    /// Reports the end of an execution. The worker remembers it until
    /// [`crate::link::host::WorkerLink::acknowledge`].
    fn ended(&self, exec: ExecId, end: ExecEnd, output_bytes: u64);
    /// Announces that the following end is the worker's last: its engine is gone and it takes no
    /// more work.
    fn last(&self) {}
    /// Calls a dynamic tool and returns a value and a text. The call is dropped if the execution is
    /// interrupted.
    async fn tool_call(&self, exec: ExecId, name: String, args: Value) -> Result<(Value, String)>;
    /// Reports the running background jobs.
    fn jobs(&self, jobs: Vec<Job>);
    /// Reports everything that the saved state lacks.
    fn missed(&self, missed: Vec<MissedEntry>);
    /// Receives output of jobs while no execution runs.
    fn background(&self, stream: Stream, data: Vec<u8>);
    /// Reports that the engine is gone; the worker's exit follows.
    fn dying(&self, cause: CrashCause);
    /// Reports that the link closed: the worker ended, or another daemon attached.
    fn disconnected(&self);
}

/// A worker's report to a daemon that attaches.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerReport {
    /// Engine by name.
    pub engine: String,
    /// The engine's own version.
    pub engine_version: String,
    /// Sandbox layers in force, one line each.
    pub sandbox: Vec<String>,
    /// Unacknowledged executions: running (`true`) or ended. Their output and end are sent again.
    pub executions: Vec<(ExecId, bool)>,
    /// Background jobs.
    pub jobs: Vec<Job>,
    /// Entries that the saved state lacks.
    pub missed: Vec<MissedEntry>,
    /// Paths inside with mounts from the host.
    pub mounts: Vec<String>,
    /// Whether every process inside is paused.
    pub is_suspended: bool,
    /// Number of state entries given to the engine at the worker's start.
    pub restored_entries: u32,
    /// Entries that the engine could not rebuild.
    pub not_restored: Vec<MissedEntry>,
}

/// An execution to start.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerExec {
    /// Its number.
    pub exec: ExecId,
    /// Code or tool, environment, standard input, timeout.
    pub request: ExecRequest,
    /// Output that the worker keeps for a returning daemon, bytes.
    pub output_kept: u64,
}

/// Whether a text is a complete program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CodeCheck {
    /// Complete.
    Complete,
    /// Incomplete; an editor may start the next line with `indent`.
    Incomplete {
        /// White space for the next line.
        indent: String,
    },
    /// Invalid, regardless of further input.
    Invalid,
}

/// Completions of a piece of code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Completions {
    /// Offset where the replaced text starts, bytes.
    pub start: usize,
    /// The replacements.
    pub matches: Vec<String>,
}

/// One chunk of a state entry for an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct StateChunk {
    /// `kind/name`.
    pub key: String,
    /// The entry's metadata, one JSON object.
    pub meta_json: Vec<u8>,
    /// At most [`crate::core::limits::FRAME_TAIL_BYTES`].
    pub data: Vec<u8>,
    /// Whether the next chunk belongs to the same key.
    pub more: bool,
}

/// A state entry without its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateHead {
    /// `kind/name`.
    pub key: String,
    /// The entry's metadata, one JSON object.
    pub meta_json: String,
    /// BLAKE3 of the body.
    pub digest: Digest,
    /// Length of the body, bytes.
    pub size: u64,
    /// The execution that last changed the entry.
    pub exec: Option<ExecId>,
}

/// Whether `engine.db` has the engine's state before the running execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateBefore {
    /// A worker of an earlier build does not say it.
    Unknown,
    /// It has, or nothing runs.
    Saved,
    /// Changes of an earlier execution could not be stored.
    Unsaved,
    /// Background work of the engine may have changed the state since.
    Background,
}

/// The entries of `engine.db`, which the running execution does not change until its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateHeads {
    /// By key, without bodies.
    pub heads: Vec<StateHead>,
    /// The running execution.
    pub under_way: Option<ExecId>,
    /// Whether they are the state before it.
    pub before: StateBefore,
}

/// A whole state entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateEntry {
    /// `kind/name`.
    pub key: String,
    /// The entry's metadata, one JSON object.
    pub meta_json: String,
    /// The engine's own encoding.
    pub body: Vec<u8>,
}

/// Current resource usage of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkerUsage {
    /// Memory of all its processes, bytes.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Total processor time, microseconds.
    pub cpu_us: u64,
    /// Workspace size at the last measurement, bytes.
    pub workspace_bytes: u64,
}

/// Converts a failed Cap'n Proto call into an error for clients.
pub(crate) fn from_capnp(error: &capnp::Error) -> Error {
    if let Some(ours) = Error::from_line(&error.extra) {
        return ours;
    }
    match error.kind {
        capnp::ErrorKind::Disconnected => Error::lost("the worker ended during the call"),
        capnp::ErrorKind::Unimplemented => Error::unsupported("the worker does not support this call"),
        _ => Error::internal(format!("call to the worker: {error}")),
    }
}
