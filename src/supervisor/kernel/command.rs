//! What can be asked of a kernel's task.

use std::cell::Cell;
use std::rc::Rc;

use futures::future::LocalBoxFuture;
use tokio::sync::oneshot;

use super::execution::Execution;
use crate::catalog::state::{Finished, Restored};
use crate::core::checkpoint::Checkpoint;
use crate::core::error::Result;
use crate::core::exec::ExecRequest;
use crate::core::ids::{CheckpointId, ExecId};
use crate::core::info::{GivenMount, McpInfo, McpTransport, MountInfo, ToolInfo};
use crate::core::retention::Retention;
use crate::core::workflow::{self, Outcome};
use crate::link::host::WorkerLink;
pub use crate::supervisor::host::actor::Actor;
use crate::supervisor::kernel::transition::ExclusiveTransition;

/// What runs on a worker between executions. The closure answers the caller itself; with an error, if there is no worker.
pub type Operation = Box<dyn FnOnce(Result<Rc<WorkerLink>>) -> LocalBoxFuture<'static, ()>>;

/// A change from outside, which takes its place in the order of versions.
#[derive(Debug)]
pub struct Change {
    /// Who asks.
    pub actor: Actor,
    /// The version that the caller knows; 0: any.
    pub expected_version: u64,
}

/// Where somebody is who waits for a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It has not come.
    Waits,
    /// It has come.
    Begun,
    /// Nobody waits for it any more.
    GivenUp,
}

/// A turn that is waited for: seen by who waits and by the queue.
pub type Waiting = Rc<Cell<Turn>>;

/// What an operation is to the kernel's history.
#[derive(Debug)]
pub enum Trace {
    /// It only looks.
    None,
    /// A transition: a change that journals itself, and the only one that is done while a record of one is there.
    Transition(Change),
    /// The wait for the recovery of a transition, before everything else that waits and whatever the limits say.
    Recovery,
    /// A change that journals itself once it is done.
    InitialState(Change),
    /// A change that is journalled under this text before it is done, and once more if it fails.
    Journalled(Change, String),
}

/// What an agent or a person said.
#[derive(Debug)]
pub struct Message {
    /// Who says it, such as `user`.
    pub role: String,
    /// What.
    pub text: String,
    /// Idempotency key; empty: none.
    pub key: String,
}

/// An answer that is awaited.
pub type Reply<T> = oneshot::Sender<Result<T>>;

/// A request to a kernel's task.
pub enum Command {
    /// Journal and queue an execution.
    Run(Box<ExecRequest>, Actor, Reply<Rc<Execution>>),
    /// Interrupt an execution, or take it out of the queue.
    Interrupt(ExecId, Actor, Reply<()>),
    /// Run an operation on the worker when its turn comes, if it is waited for until then.
    Operate(Trace, Operation, Option<Waiting>, Reply<()>),
    /// Add a mount.
    Mount(Change, MountInfo, Reply<()>),
    /// Take a mount away.
    Unmount(Change, String, Reply<()>),
    /// The mounts.
    Mounts(Reply<Vec<MountInfo>>),
    /// Add an MCP server.
    RegisterMcp(Change, String, McpTransport, Reply<()>),
    /// Take an MCP server away.
    UnregisterMcp(Change, String, Reply<()>),
    /// The MCP servers and their tools.
    McpServers(Reply<(Vec<McpInfo>, Vec<ToolInfo>)>),
    /// Start the worker.
    Start(Actor, Reply<()>),
    /// End the worker; answers when it has ended.
    Stop(Actor, StopMode, Reply<()>),
    /// Journal a message; gives its number.
    Message(Change, Message, Reply<u64>),
    /// Change what is recorded of the work; with an idempotency key.
    Work(Change, Box<workflow::Change>, String, Reply<Outcome>),
    /// Take, take up again (token), or with a time of 0 release a lease; gives token and end.
    Lease(Actor, String, Vec<u8>, u64, Reply<(Vec<u8>, i64)>),
    /// Take away what is mounted beside these: a restore begins.
    PartWithMounts(Vec<GivenMount>, Reply<()>),
    /// Mount again what was taken away so: it does not begin.
    TakeBackMounts(Reply<()>),
    /// End a restore: mounts and servers as they are from now on, and the record of it.
    Restored(Box<Restored>, Reply<Finished>),
    /// Remove a checkpoint; gives the version.
    ForgetCheckpoint(Change, Box<Checkpoint>, Reply<u64>),
    /// Checkpoint it and end its worker, if nobody uses it: memory is short. Whether that began.
    StopIfIdle(Reply<bool>),
    /// Commit an archiving, if the kernel is what this checkpoint holds; gives the version.
    Archive(Actor, CheckpointId, Rc<ExclusiveTransition>, Reply<u64>),
    /// Commit the end of an archive: files and state are in their places again; gives the version.
    Unarchive(Actor, Rc<ExclusiveTransition>, Reply<u64>),
    /// End an archiving, or its reversal, that was interrupted.
    Settle(Reply<()>),
    /// Whether this may be changed now.
    Admit(Change, Reply<()>),
    /// Keep checkpoints that ryokan takes by itself for so long.
    Retain(Change, Retention, Reply<()>),
    /// Whoever waited for their turn may have given up.
    LeaveQueue,
    /// Begin what could not be begun before: the workspace is no longer still, or a transition lacks its owner.
    Wake,
    /// End the worker and the task; what is on disk is the caller's to delete.
    Remove(Change, Reply<()>),
}

/// How to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Wait for what runs and what is queued before it.
    WhenIdle,
    /// Interrupt what runs.
    Force,
    /// As `Force`, because the daemon ends.
    Daemon,
    /// Let go of the worker without ending it: the daemon is restarted.
    Release,
}
