//! The daemon's calls to init, as plain types.

use tokio::sync::oneshot;

use super::daemon::{Daemon, Finish};
use super::ports::PortConnection;
use super::process::{ProcessSink, ProcessStart};
use crate::core::error::{Error, Result};
use crate::core::exec::{Stream, TerminalSize};
use crate::core::ids::ExecId;
use crate::link::binding::KernelBinding;
use crate::link::types::{StateChunk, StateHeads, WorkerUsage};

/// Where the answer to a call goes.
pub type Answer<T> = oneshot::Sender<Result<T>>;

/// A call from the daemon, with the number of its connection.
#[derive(Debug)]
pub struct WorkerCall {
    /// The connection that carried the call.
    pub connection: u64,
    /// The call.
    pub what: Call,
}

/// A chunk of an entry of the stored state.
#[derive(Debug)]
pub struct StatePiece {
    /// The entry's summary for people.
    pub meta_json: String,
    /// Length of the entry's whole body, bytes.
    pub size: u64,
    /// The available bytes from the requested offset.
    pub data: Vec<u8>,
}

/// A call of the daemon to init.
#[derive(Debug)]
pub enum Call {
    /// Become the worker's daemon.
    Attach {
        /// The way to the daemon. Dropping it closes the connection.
        daemon: Daemon,
        /// Receives the report.
        answer: Answer<Report>,
    },
    /// The connection closed.
    Gone,
    /// Start an execution.
    Start(Start, Answer<Started>),
    /// Pass further standard input.
    Stdin {
        /// The execution.
        exec: ExecId,
        /// The bytes.
        data: Vec<u8>,
        /// Whether the input ends here.
        end: bool,
        /// Answered once the pipe has taken the bytes.
        answer: Answer<()>,
    },
    /// Interrupt an execution.
    Interrupt(ExecId, Answer<()>),
    /// Forget an execution that ended.
    Acknowledge(ExecId, Answer<()>),
    /// One request frame without `id`; the answer is the `reply` frame.
    Request(Vec<u8>, Answer<Vec<u8>>),
    /// A `dynamic_tools` frame.
    DynamicTools(Vec<u8>, Answer<()>),
    /// Replace the engine's state: the entries follow.
    LoadBegin(Answer<()>),
    /// One chunk of an entry.
    LoadEntry(StateChunk, Answer<()>),
    /// No more entries; the answer is the engine's `reply` frame.
    LoadEnd(Answer<Vec<u8>>),
    /// Add a mount.
    Bind(Bind, Answer<()>),
    /// Become the worker of a kernel; once, for a warm worker.
    BindKernel(Box<KernelBinding>, Answer<Report>),
    /// Remove a mount.
    Unbind(String, Answer<()>),
    /// Report current resource usage.
    Usage(Answer<WorkerUsage>),
    /// List the stored state entries without their bodies.
    Heads(Answer<StateHeads>),
    /// Read a stored state entry.
    Entry(String, u64, Answer<Option<StatePiece>>),
    /// Fork a snapshot of the engine. Answered with the reason if there is none, else empty.
    Keep {
        /// The checkpoint of the snapshot.
        of: String,
        /// The checkpoint whose snapshot must not be evicted for the new one.
        spare: String,
        /// Whether it may only evict other transient snapshots.
        transient: bool,
        /// Where the answer goes.
        answer: Answer<String>,
    },
    /// Make a checkpoint's snapshot the engine. Answered with the differences, as a `missed` frame.
    Wake(String, Answer<Vec<u8>>),
    /// Apply one change to the stored state.
    Revise(Revision, Answer<()>),
    /// Stop every process inside.
    Freeze(bool, Answer<()>),
    /// Resume every process inside.
    Thaw(Answer<()>),
    /// Pause every process inside, until a resume or a stop.
    Suspend {
        /// Whether it is for a copy of the machine only.
        copied: bool,
        /// Answered once they are stopped.
        answer: Answer<()>,
    },
    /// End the pause.
    Resume(Answer<()>),
    /// Use the descriptor of that token as this attachment's execution channel.
    ExecChannel(u64, Answer<()>),
    /// Start a program beside the engine. Answered when its sandbox is verified.
    Spawn(ProcessStart, ProcessSink, Answer<()>),
    /// Send a signal to a process's program.
    Signal(ExecId, i32, Answer<()>),
    /// Set the size of a process's terminal.
    Resize(ExecId, TerminalSize, Answer<()>),
    /// Connect to a TCP port of the kernel's own loopback.
    Connect(u16, Answer<PortConnection>),
    /// End every process. Answered when their ends were reported.
    EndProcesses(Answer<()>),
    /// Save and end. Answered when the state is saved.
    Stop {
        /// Time for the exit that follows, milliseconds.
        grace_ms: u64,
        /// Receives the answer.
        answer: Answer<()>,
    },
}

impl Call {
    /// Answers with an error.
    pub fn refuse(self, error: Error) {
        match self {
            Call::Gone => {}
            Call::Attach { answer, .. } => drop(answer.send(Err(error))),
            Call::Keep { answer, .. } => drop(answer.send(Err(error))),
            Call::Request(_, answer) | Call::LoadEnd(answer) | Call::Wake(_, answer) => drop(answer.send(Err(error))),
            Call::Start(_, answer) => drop(answer.send(Err(error))),
            Call::BindKernel(_, answer) => drop(answer.send(Err(error))),
            Call::Connect(_, answer) => drop(answer.send(Err(error))),
            Call::Usage(answer) => drop(answer.send(Err(error))),
            Call::Heads(answer) => drop(answer.send(Err(error))),
            Call::Entry(_, _, answer) => drop(answer.send(Err(error))),
            Call::Stdin { answer, .. }
            | Call::Interrupt(_, answer)
            | Call::Acknowledge(_, answer)
            | Call::DynamicTools(_, answer)
            | Call::LoadBegin(answer)
            | Call::LoadEntry(_, answer)
            | Call::Revise(_, answer)
            | Call::Bind(_, answer)
            | Call::Unbind(_, answer)
            | Call::Freeze(_, answer)
            | Call::Thaw(answer)
            | Call::Suspend { answer, .. }
            | Call::Resume(answer)
            | Call::ExecChannel(_, answer)
            | Call::Spawn(_, _, answer)
            | Call::Signal(_, _, answer)
            | Call::Resize(_, _, answer)
            | Call::EndProcesses(answer)
            | Call::Stop { answer, .. } => drop(answer.send(Err(error))),
        }
    }
}

/// An execution to start.
#[derive(Debug)]
pub struct Start {
    /// Its number.
    pub exec: ExecId,
    /// An `exec` or `call` frame without `id`.
    pub request_json: Vec<u8>,
    /// Standard input known at the start.
    pub stdin: Vec<u8>,
    /// Whether more input follows.
    pub stdin_open: bool,
    /// Whether there is any input.
    pub has_stdin: bool,
    /// Timeout, milliseconds; 0: none.
    pub timeout_ms: u64,
    /// Output to keep until the end is acknowledged, bytes.
    pub output_kept_bytes: u64,
    /// Earlier executions to forget.
    pub acknowledged: Vec<ExecId>,
}

/// Chunks of output, in order.
pub type Chunks = Vec<(Stream, Vec<u8>)>;

/// State of an execution when its start is answered.
#[derive(Debug)]
pub enum Started {
    /// The execution runs; output and end follow as calls to the daemon.
    Runs,
    /// The execution has ended; this is its whole output.
    Ended(Finish, Chunks),
}

/// A change of the stored state that the engine has made already.
#[derive(Debug)]
pub struct Revision {
    /// The entry's key; empty: no entry, this only ends the changes.
    pub key: String,
    /// The entry's summary for people.
    pub meta_json: Vec<u8>,
    /// A chunk of its body.
    pub data: Vec<u8>,
    /// Whether more of this entry follows.
    pub more: bool,
    /// Whether the entry was deleted.
    pub gone: bool,
    /// Whether this is the last change; all are then stored in one transaction.
    pub last: bool,
}

/// A mount to make.
#[derive(Debug)]
pub struct Bind {
    /// Path inside.
    pub path: String,
    /// Path on the host.
    pub source: String,
    /// Whether the engine may write.
    pub writable: bool,
    /// Token of the detached mount; 0: none.
    pub token: u64,
}

/// The report to a daemon that attaches.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Engine by name.
    pub engine: String,
    /// Its version.
    pub engine_version: String,
    /// Layers in force.
    pub sandbox: Vec<String>,
    /// Known executions, and whether each is running.
    pub executions: Vec<(ExecId, bool)>,
    /// The last `jobs` frame.
    pub jobs_json: Vec<u8>,
    /// The last `missed` frame.
    pub missed_json: Vec<u8>,
    /// Paths inside with mounts from the host.
    pub mounts: Vec<String>,
    /// Whether every process inside is paused.
    pub is_suspended: bool,
    /// Number of entries given to the engine at start.
    pub restored_entries: u32,
    /// Entries that the engine could not build, as a JSON list.
    pub not_restored_json: Vec<u8>,
}
