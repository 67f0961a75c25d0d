//! Requests to a kernel's task other than executions: mounts, servers, stops, leases, records.

use std::rc::Rc;

use tokio::sync::oneshot;

use super::command::{Actor, Change, Command, Message, StartMode, StopMode};
use crate::core::checkpoint::Checkpoint;
use crate::core::error::{Error, Result};
use crate::core::ids::CheckpointId;
use crate::core::info::{McpInfo, McpTransport, MountInfo, ToolInfo};
use crate::core::kernel::State;
use crate::core::name::KernelName;
use crate::core::retention::Retention;
use crate::core::spec_update::SpecUpdate;
use crate::core::workflow::{self, Outcome};
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::transition::ExclusiveTransition;

impl Kernel {
    /// Adds a mount.
    ///
    /// # Errors
    /// `invalidArgument`, `alreadyExists`, `refused`, and worker errors.
    pub async fn mount(&self, change: Change, mount: MountInfo) -> Result<()> {
        self.ask(|reply| Command::Mount(change, mount, reply)).await
    }

    /// Removes a mount.
    ///
    /// # Errors
    /// `notFound`, and worker errors.
    pub async fn unmount(&self, change: Change, path: String) -> Result<()> {
        self.ask(|reply| Command::Unmount(change, path, reply)).await
    }

    /// The mounts: the allowed paths of the specification and those added since.
    ///
    /// # Errors
    /// Database errors.
    pub async fn mounts(&self) -> Result<Vec<MountInfo>> {
        self.ask(Command::Mounts).await
    }

    /// Adds an MCP server.
    ///
    /// # Errors
    /// `refused` (allow-list), `alreadyExists`.
    pub async fn register_mcp(&self, change: Change, name: String, transport: McpTransport) -> Result<()> {
        self.ask(|reply| Command::RegisterMcp(change, name, transport, reply)).await
    }

    /// Removes an MCP server.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn unregister_mcp(&self, change: Change, name: String) -> Result<()> {
        self.ask(|reply| Command::UnregisterMcp(change, name, reply)).await
    }

    /// The MCP servers and their tools.
    ///
    /// # Errors
    /// Database errors.
    pub async fn mcp_servers(&self) -> Result<(Vec<McpInfo>, Vec<ToolInfo>)> {
        self.ask(Command::McpServers).await
    }

    /// Starts the worker and waits until it is ready.
    ///
    /// # Errors
    /// The reason why the worker could not be started.
    pub async fn start(&self, actor: Actor, mode: StartMode) -> Result<()> {
        self.ask(|reply| Command::Start(actor, mode, reply)).await?;
        self.with_worker(None, |_| async { Ok(()) }).await
    }

    /// Stops the worker; returns when it has ended.
    ///
    /// # Errors
    /// Database errors.
    pub async fn stop(&self, actor: Actor, mode: StopMode) -> Result<()> {
        self.ask(|reply| Command::Stop(actor, mode, reply)).await
    }

    /// Records that the caller's operation has paused the worker. `release`: its memory is saved, and it ends before this
    /// returns, so that the next use does not meet it.
    ///
    /// # Errors
    /// `conflict` if a stop has begun.
    pub(crate) async fn suspended(&self, release: bool, until_start: bool) -> Result<()> {
        self.ask_patiently(|reply| Command::Suspended { release, until_start, reply }).await
    }

    /// Resumes a suspended kernel.
    ///
    /// # Errors
    /// `conflict` if the kernel has no worker.
    pub async fn resume(&self, actor: Actor) -> Result<()> {
        self.admit(&actor, 0).await?;
        match self.view.borrow().state {
            State::Suspended => {}
            State::Starting | State::Ready | State::Busy { .. } | State::Stopping { .. } => return Ok(()),
            State::Created
            | State::Stopped { .. }
            | State::Crashed { .. }
            | State::Archived { .. }
            | State::Departed { .. } => return Err(self.not_in_memory("resumed")),
        }
        self.with_worker(None, |_| async { Ok(()) }).await
    }

    /// The refusal to suspend or resume a kernel without a worker.
    pub(crate) fn not_in_memory(&self, what: &str) -> Error {
        let (name, state) = (&self.spec().name, self.view.borrow().state.name());
        Error::conflict(format!("kernel {name} cannot be {what}: it is {state} and has no worker"))
            .reason("no_worker")
            .hint("its next use starts it from its saved state")
    }

    /// The tools that MCP servers offer now. Does not ask the task, which may be waiting for the caller.
    pub(crate) fn offered_tools(&self) -> Vec<ToolInfo> {
        self.tools.borrow().upgrade().map(|tools| tools.list().1).unwrap_or_default()
    }

    /// Appends a message to the journal; returns its number.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), and database errors.
    pub async fn message(&self, change: Change, message: Message) -> Result<u64> {
        self.ask(|reply| Command::Message(change, message, reply)).await
    }

    /// Changes the workflow records, for changes without a checkpoint.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), errors of the change and database errors.
    pub(crate) async fn work(&self, change: Change, what: workflow::Change, key: String) -> Result<Outcome> {
        self.ask(|reply| Command::Work(change, Box::new(what), key, reply)).await
    }

    /// Takes or renews a lease (`ttl_ms` 0 releases it); returns the token and the expiry.
    ///
    /// # Errors
    /// `busy` while another holds it.
    pub async fn lease(&self, actor: Actor, holder: String, token: Vec<u8>, ttl_ms: u64) -> Result<(Vec<u8>, i64)> {
        self.ask(|reply| Command::Lease(actor, holder, token, ttl_ms, reply)).await
    }

    /// Removes a checkpoint; returns the new version.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), `notFound`.
    pub(crate) async fn forget_checkpoint(&self, change: Change, checkpoint: Checkpoint) -> Result<u64> {
        self.ask(|reply| Command::ForgetCheckpoint(change, Box::new(checkpoint), reply)).await
    }

    /// Sets the retention of automatic checkpoints.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), and catalog errors.
    pub(crate) async fn change_retention(&self, change: Change, retention: Retention) -> Result<()> {
        self.ask(|reply| Command::Retain(change, retention, reply)).await
    }

    /// Changes the specification; returns the version.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), `refused`, `unsupported`, `notFound`, and catalog errors.
    pub(crate) async fn update(&self, change: Change, update: SpecUpdate) -> Result<u64> {
        self.ask(|reply| Command::Update(change, Box::new(update), reply)).await
    }

    /// Changes the kernel's name; returns the version.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), `alreadyExists`, `refused`, and catalog errors.
    pub(crate) async fn rename(&self, change: Change, name: KernelName) -> Result<u64> {
        self.ask(|reply| Command::Rename(change, name, reply)).await
    }

    /// Archives the kernel if it still equals this checkpoint; its files are removed.
    ///
    /// # Errors
    /// `conflict` if the kernel was used meanwhile.
    pub(crate) async fn archive(
        &self,
        actor: Actor,
        checkpoint: CheckpointId,
        transition: Rc<ExclusiveTransition>,
    ) -> Result<u64> {
        self.ask_patiently(|reply| Command::Archive(actor, checkpoint, transition, reply)).await
    }

    /// Commits the unarchive transition: files and state are back in place.
    ///
    /// # Errors
    /// Database errors; the kernel stays archived.
    pub(crate) async fn unarchive(&self, actor: Actor, transition: Rc<ExclusiveTransition>) -> Result<u64> {
        self.ask_patiently(|reply| Command::Unarchive(actor, transition, reply)).await
    }

    /// Commits the handover transition: the kernel lives on another host from now on. `decided` is notified as soon as
    /// that survives a loss of power, before the worker ends and the files are removed.
    ///
    /// # Errors
    /// Database errors; the kernel stays here.
    pub(crate) async fn depart(
        &self,
        actor: Actor,
        text: String,
        transition: Rc<ExclusiveTransition>,
        decided: oneshot::Sender<()>,
    ) -> Result<u64> {
        self.ask_patiently(|reply| Command::Depart(actor, text, transition, decided, reply)).await
    }

    /// Finishes an interrupted archive, unarchive or handover transition.
    ///
    /// # Errors
    /// Recovery errors.
    pub(crate) async fn settle(&self) -> Result<()> {
        self.ask(Command::Settle).await
    }

    /// Stops the worker as after its idle time, if the kernel is not in use; the next use starts it. Returns whether
    /// the stop began.
    ///
    /// # Errors
    /// If the kernel is gone.
    pub(crate) async fn stop_if_idle(&self) -> Result<bool> {
        self.ask(Command::StopIfIdle).await
    }

    /// Checks whether a client may change the kernel now, for changes that run elsewhere.
    ///
    /// # Errors
    /// `busy` (leased by another client), `conflict` (version).
    pub(crate) async fn admit(&self, actor: &Actor, expected_version: u64) -> Result<()> {
        let change = Change { actor: actor.clone(), expected_version };
        self.ask(|reply| Command::Admit(change, reply)).await
    }

    /// Checks whether the kernel may be removed now; that needs no history.
    ///
    /// # Errors
    /// `busy` (leased by another client), `conflict` (version).
    pub(crate) async fn admit_removal(&self, actor: &Actor, expected_version: u64) -> Result<()> {
        let change = Change { actor: actor.clone(), expected_version };
        self.ask(|reply| Command::AdmitRemoval(change, reply)).await
    }

    /// Stops worker and task.
    ///
    /// # Errors
    /// `conflict`.
    pub async fn remove(&self, change: Change) -> Result<()> {
        self.ask(|reply| Command::Remove(change, reply)).await
    }
}
