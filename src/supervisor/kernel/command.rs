//! Requests to a kernel's task.

use std::cell::Cell;
use std::rc::Rc;

use futures::future::LocalBoxFuture;
use tokio::sync::oneshot;

use super::execution::Execution;
use crate::catalog::state::{Finished, Restored};
use crate::core::checkpoint::Checkpoint;
use crate::core::error::Result;
use crate::core::exec::{ExecRequest, ExecStatus};
use crate::core::ids::{CheckpointId, ExecId};
use crate::core::info::{GivenMount, McpInfo, McpTransport, MountInfo, ToolInfo};
use crate::core::name::KernelName;
use crate::core::retention::Retention;
use crate::core::spec_update::SpecUpdate;
use crate::core::workflow::{self, Outcome};
use crate::link::host::WorkerLink;
pub use crate::supervisor::host::actor::Actor;
use crate::supervisor::kernel::transition::ExclusiveTransition;

/// Work on a worker between executions. The closure replies to the caller; it receives an error if there is no worker.
pub type Operation = Box<dyn FnOnce(Result<Rc<WorkerLink>>) -> LocalBoxFuture<'static, ()>>;

/// A change by a client, ordered by version.
#[derive(Debug)]
pub struct Change {
    /// The requester.
    pub actor: Actor,
    /// The version that the requester expects; 0: any.
    pub expected_version: u64,
}

/// State of a queued request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Queued.
    Waits,
    /// Started.
    Begun,
    /// Abandoned by the caller.
    GivenUp,
}

/// State of a queued request, shared by the caller and the queue.
pub type Waiting = Rc<Cell<Turn>>;

/// Effect of an operation on the kernel's history.
#[derive(Debug)]
pub enum Trace {
    /// Read-only.
    None,
    /// A transition. It writes its own journal entry and is the only change that runs while a transition record exists.
    Transition(Change),
    /// Recovery of a transition. It precedes all queued work and ignores the limits.
    Recovery,
    /// A change that writes its own journal entry when it completes.
    InitialState(Change),
    /// A change whose text is journalled before it runs, and again if it fails.
    Journalled(Change, String),
}

/// A message of an agent or a person.
#[derive(Debug)]
pub struct Message {
    /// Role of the author, such as `user`.
    pub role: String,
    /// Text of the message.
    pub text: String,
    /// Idempotency key; empty: none.
    pub key: String,
}

/// Reply channel of a request.
pub type Reply<T> = oneshot::Sender<Result<T>>;

/// A request to a kernel's task.
pub enum Command {
    /// Journal and queue an execution.
    Run(Box<ExecRequest>, Actor, Reply<Rc<Execution>>),
    /// Journal and start a process beside the engine.
    Spawn(Box<ExecRequest>, Actor, Reply<Rc<Execution>>),
    /// Interrupt an execution, or remove it from the queue.
    Interrupt(ExecId, Actor, Reply<Option<ExecStatus>>),
    /// Run an operation on the worker in queue order, unless the caller abandoned it.
    Operate(Trace, Operation, Option<Waiting>, Reply<()>),
    /// Add a mount.
    Mount(Change, MountInfo, Reply<()>),
    /// Remove a mount.
    Unmount(Change, String, Reply<()>),
    /// List the mounts.
    Mounts(Reply<Vec<MountInfo>>),
    /// Add an MCP server.
    RegisterMcp(Change, String, McpTransport, Reply<()>),
    /// Remove an MCP server.
    UnregisterMcp(Change, String, Reply<()>),
    /// List the MCP servers and their tools.
    McpServers(Reply<(Vec<McpInfo>, Vec<ToolInfo>)>),
    /// Start the worker.
    Start(Actor, StartMode, Reply<()>),
    /// Stop the worker; replies when the worker has ended.
    Stop(Actor, StopMode, Reply<()>),
    /// The operation under way has paused the worker.
    Suspended {
        /// It has saved its memory, and the reply follows the worker's end.
        release: bool,
        /// The next start of the daemon starts the kernel, if this one is stopped meanwhile.
        until_start: bool,
        /// The outcome.
        reply: Reply<()>,
    },
    /// Journal a message; returns its number.
    Message(Change, Message, Reply<u64>),
    /// Change the workflow records; with an idempotency key.
    Work(Change, Box<workflow::Change>, String, Reply<Outcome>),
    /// Take, renew (with the token) or release (with a time of 0) a lease; returns token and expiry.
    Lease(Actor, String, Vec<u8>, u64, Reply<(Vec<u8>, i64)>),
    /// Detach every mount that is not in this list, before a restore.
    DetachMounts(Vec<GivenMount>, Reply<()>),
    /// Reattach the detached mounts: the restore was cancelled.
    ReattachMounts(Reply<()>),
    /// End a restore: replace mounts and servers, and write its record.
    Restored(Box<Restored>, Reply<Finished>),
    /// Remove a checkpoint; returns the version.
    ForgetCheckpoint(Change, Box<Checkpoint>, Reply<u64>),
    /// Take a checkpoint and stop the worker if the kernel is idle, because memory is short. Returns whether the stop
    /// began.
    StopIfIdle(Reply<bool>),
    /// Commit an archive transition if the kernel still equals this checkpoint; returns the version.
    Archive(Actor, CheckpointId, Rc<ExclusiveTransition>, Reply<u64>),
    /// Commit an unarchive transition, once files and state are back in place; returns the version.
    Unarchive(Actor, Rc<ExclusiveTransition>, Reply<u64>),
    /// Commit a handover transition with this text; returns the version.
    Depart(Actor, String, Rc<ExclusiveTransition>, oneshot::Sender<()>, Reply<u64>),
    /// Finish an interrupted archive, unarchive or handover transition.
    Settle(Reply<()>),
    /// Check whether this change is allowed now.
    Admit(Change, Reply<()>),
    /// Check whether the kernel may be removed now.
    AdmitRemoval(Change, Reply<()>),
    /// Set the retention of automatic checkpoints.
    Retain(Change, Retention, Reply<()>),
    /// Change the specification; returns the version.
    Update(Change, Box<SpecUpdate>, Reply<u64>),
    /// Change the name; returns the version.
    Rename(Change, KernelName, Reply<u64>),
    /// A queued caller may have given up.
    LeaveQueue,
    /// Retry deferred work: the workspace is no longer frozen, or a transition has lost its owner.
    Wake,
    /// Stop the worker and the task; the caller deletes the files.
    Remove(Change, Reply<()>),
}

/// What a start does with memory that is kept in the kernel's folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartMode {
    /// The worker continues it, or the start fails.
    WithMemory,
    /// It is discarded: the worker loads the saved state.
    WithoutMemory,
}

impl StartMode {
    /// The mode of a request.
    pub const fn of(without_memory: bool) -> StartMode {
        if without_memory { StartMode::WithoutMemory } else { StartMode::WithMemory }
    }
}

/// How to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Wait for running and queued executions first.
    WhenIdle,
    /// Interrupt the running execution.
    Force,
    /// As `Force`, because the daemon stops.
    Daemon {
        /// Whether the next daemon starts the kernel.
        resumes: bool,
    },
    /// Detach from the worker without stopping it: the daemon restarts.
    Release,
}
