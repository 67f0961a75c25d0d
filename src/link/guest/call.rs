//! What the daemon may want of init, in plain types.

use tokio::sync::oneshot;

use super::daemon::{Daemon, Finish};
use crate::core::error::{Error, Result};
use crate::core::exec::Stream;
use crate::core::ids::ExecId;
use crate::link::binding::KernelBinding;
use crate::link::types::{StateChunk, StateHead, WorkerUsage};

/// Where a call's answer goes.
pub type Answer<T> = oneshot::Sender<Result<T>>;

/// A call of the daemon, with the number of its connection.
#[derive(Debug)]
pub struct WorkerCall {
    /// Which connection it came over.
    pub connection: u64,
    /// What is wanted.
    pub what: Call,
}

/// A piece of one entry of the stored state.
#[derive(Debug)]
pub struct StatePiece {
    /// What people see of the entry.
    pub meta_json: String,
    /// Bytes of its whole body.
    pub size: u64,
    /// Those from the offset that was asked for, as many as are at hand.
    pub data: Vec<u8>,
}

/// What the daemon may want of init.
#[derive(Debug)]
pub enum Call {
    /// Become the worker's daemon.
    Attach {
        /// How to reach it. Dropping it closes its connection.
        daemon: Daemon,
        /// The report goes there.
        answer: Answer<Report>,
    },
    /// The connection closed.
    Gone,
    /// Start an execution.
    Start(Start, Answer<Started>),
    /// More standard input.
    Stdin {
        /// For which execution.
        exec: ExecId,
        /// The bytes.
        data: Vec<u8>,
        /// Whether that was all.
        end: bool,
        /// Answered when the pipe took it.
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
    /// Mount something.
    Bind(Bind, Answer<()>),
    /// Be that kernel's worker; for a slot, once.
    BindKernel(Box<KernelBinding>, Answer<Report>),
    /// Take a mount away.
    Unbind(String, Answer<()>),
    /// What is used now.
    Usage(Answer<WorkerUsage>),
    /// The stored state entries without their bodies.
    Heads(Answer<Vec<StateHead>>),
    /// A stored state entry.
    Entry(String, u64, Answer<Option<StatePiece>>),
    /// Have the engine keep a copy of itself; answered with why there is none, or nothing.
    Keep {
        /// Of which checkpoint.
        of: String,
        /// The checkpoint whose copy does not go for it.
        spare: String,
        /// Where the answer goes.
        answer: Answer<String>,
    },
    /// Make the copy of that checkpoint the engine; answered with what is not as it was, as a `missed` frame.
    Wake(String, Answer<Vec<u8>>),
    /// One change of the stored state.
    Revise(Revision, Answer<()>),
    /// Stop everything inside for a moment.
    Freeze(bool, Answer<()>),
    /// Let it go on.
    Thaw(Answer<()>),
    /// Take the descriptor of that number as this attachment's execution channel.
    ExecChannel(u64, Answer<()>),
    /// Save and end; answered when the state is saved.
    Stop {
        /// For the exit that follows, milliseconds.
        grace_ms: u64,
        /// Where the answer goes.
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
            | Call::ExecChannel(_, answer)
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
    /// Standard input that is there at once.
    pub stdin: Vec<u8>,
    /// More follows.
    pub stdin_open: bool,
    /// Whether there is any.
    pub has_stdin: bool,
    /// 0: none.
    pub timeout_ms: u64,
    /// How much output to keep until the end is acknowledged.
    pub output_kept_bytes: u64,
    /// Earlier executions to forget.
    pub acknowledged: Vec<ExecId>,
}

/// Pieces of output in the order in which they came.
pub type Chunks = Vec<(Stream, Vec<u8>)>;

/// What became of an execution by the time its start is answered.
#[derive(Debug)]
pub enum Started {
    /// Output and end follow as calls of the daemon.
    Runs,
    /// It is over already; this is all that it wrote.
    Ended(Finish, Chunks),
}

/// A change of the stored state that the engine has made already.
#[derive(Debug)]
pub struct Revision {
    /// Which entry; empty: none, this only ends the changes.
    pub key: String,
    /// What people see of it.
    pub meta_json: Vec<u8>,
    /// A piece of its body.
    pub data: Vec<u8>,
    /// More of this entry follows.
    pub more: bool,
    /// The entry is no longer there.
    pub gone: bool,
    /// All changes have come: they are stored, in one transaction.
    pub last: bool,
}

/// A mount to make.
#[derive(Debug)]
pub struct Bind {
    /// Where the engine sees it.
    pub path: String,
    /// Where the host has it.
    pub source: String,
    /// Whether the engine may change it.
    pub writable: bool,
    /// Not 0: the detached mount that came under that number.
    pub token: u64,
}

/// What a daemon is told when it attaches.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Engine by name.
    pub engine: String,
    /// Its version.
    pub engine_version: String,
    /// Layers in force.
    pub sandbox: Vec<String>,
    /// Known executions and whether they run.
    pub executions: Vec<(ExecId, bool)>,
    /// The last `jobs` frame.
    pub jobs_json: Vec<u8>,
    /// The last `missed` frame.
    pub missed_json: Vec<u8>,
    /// Paths inside at which something of the host's is mounted.
    pub mounts: Vec<String>,
    /// Entries given to the engine at start.
    pub restored_entries: u32,
    /// Those that it could not build: a JSON list.
    pub not_restored_json: Vec<u8>,
}
