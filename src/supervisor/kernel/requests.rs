//! Requests to a kernel's task beside executions: mounts, servers, stops, leases, records.

use std::rc::Rc;

use super::command::{Actor, Change, Command, Message, StopMode};
use crate::core::checkpoint::Checkpoint;
use crate::core::error::Result;
use crate::core::ids::CheckpointId;
use crate::core::info::{McpInfo, McpTransport, MountInfo, ToolInfo};
use crate::core::retention::Retention;
use crate::core::workflow::{self, Outcome};
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::transition::ExclusiveTransition;

impl Kernel {
    /// Adds a mount.
    ///
    /// # Errors
    /// `invalidArgument`, `alreadyExists`, `refused`, and those of the worker.
    pub async fn mount(&self, change: Change, mount: MountInfo) -> Result<()> {
        self.ask(|reply| Command::Mount(change, mount, reply)).await
    }

    /// Takes a mount away.
    ///
    /// # Errors
    /// `notFound`, and those of the worker.
    pub async fn unmount(&self, change: Change, path: String) -> Result<()> {
        self.ask(|reply| Command::Unmount(change, path, reply)).await
    }

    /// The mounts: the allowed paths of its specification and those added since.
    ///
    /// # Errors
    /// Those of the database.
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

    /// Takes an MCP server away.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn unregister_mcp(&self, change: Change, name: String) -> Result<()> {
        self.ask(|reply| Command::UnregisterMcp(change, name, reply)).await
    }

    /// The MCP servers and their tools.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn mcp_servers(&self) -> Result<(Vec<McpInfo>, Vec<ToolInfo>)> {
        self.ask(Command::McpServers).await
    }

    /// Starts the worker and waits until it is ready.
    ///
    /// # Errors
    /// Why it could not be started.
    pub async fn start(&self, actor: Actor) -> Result<()> {
        self.ask(|reply| Command::Start(actor, reply)).await?;
        self.with_worker(None, |_| async { Ok(()) }).await
    }

    /// Ends the worker; returns when it has ended.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn stop(&self, actor: Actor, mode: StopMode) -> Result<()> {
        self.ask(|reply| Command::Stop(actor, mode, reply)).await
    }

    /// The tools that MCP servers offer now. Asks nobody: the task itself may be waiting for who wants to know.
    pub(crate) fn offered_tools(&self) -> Vec<ToolInfo> {
        self.tools.borrow().upgrade().map(|tools| tools.list().1).unwrap_or_default()
    }

    /// Appends a message to the journal; gives its number.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), and those of the database.
    pub async fn message(&self, change: Change, message: Message) -> Result<u64> {
        self.ask(|reply| Command::Message(change, message, reply)).await
    }

    /// Changes what is recorded of the work, where that takes no checkpoint.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), those of the change and of the database.
    pub(crate) async fn work(&self, change: Change, what: workflow::Change, key: String) -> Result<Outcome> {
        self.ask(|reply| Command::Work(change, Box::new(what), key, reply)).await
    }

    /// Takes or renews a lease (`ttl_ms` 0 releases it); gives the token and the end.
    ///
    /// # Errors
    /// `busy` while another holds it.
    pub async fn lease(&self, actor: Actor, holder: String, token: Vec<u8>, ttl_ms: u64) -> Result<(Vec<u8>, i64)> {
        self.ask(|reply| Command::Lease(actor, holder, token, ttl_ms, reply)).await
    }

    /// Removes a checkpoint; gives the version with that.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), `notFound`.
    pub(crate) async fn forget_checkpoint(&self, change: Change, checkpoint: Checkpoint) -> Result<u64> {
        self.ask(|reply| Command::ForgetCheckpoint(change, Box::new(checkpoint), reply)).await
    }

    /// Changes how long checkpoints that ryokan takes by itself are kept.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), and the catalog's.
    pub(crate) async fn change_retention(&self, change: Change, retention: Retention) -> Result<()> {
        self.ask(|reply| Command::Retain(change, retention, reply)).await
    }

    /// Puts the kernel away, if it is what this checkpoint holds: its files go.
    ///
    /// # Errors
    /// `conflict` if it was used meanwhile.
    pub(crate) async fn archive(
        &self,
        actor: Actor,
        checkpoint: CheckpointId,
        transition: Rc<ExclusiveTransition>,
    ) -> Result<u64> {
        self.ask_patiently(|reply| Command::Archive(actor, checkpoint, transition, reply)).await
    }

    /// Its files and its state are in their places again.
    ///
    /// # Errors
    /// The databases': it is archived still.
    pub(crate) async fn unarchive(&self, actor: Actor, transition: Rc<ExclusiveTransition>) -> Result<u64> {
        self.ask_patiently(|reply| Command::Unarchive(actor, transition, reply)).await
    }

    /// Ends an archiving, or its reversal, that was interrupted.
    ///
    /// # Errors
    /// Those of the recovery.
    pub(crate) async fn settle(&self) -> Result<()> {
        self.ask(Command::Settle).await
    }

    /// Ends its worker as after its idle time, if nobody uses it; its next use starts it. Whether that began.
    ///
    /// # Errors
    /// If the kernel is gone.
    pub(crate) async fn stop_if_idle(&self) -> Result<bool> {
        self.ask(Command::StopIfIdle).await
    }

    /// Whether somebody may change the kernel now: for changes that are made elsewhere.
    ///
    /// # Errors
    /// `busy` (leased to somebody else), `conflict` (version).
    pub(crate) async fn admit(&self, actor: &Actor, expected_version: u64) -> Result<()> {
        let change = Change { actor: actor.clone(), expected_version };
        self.ask(|reply| Command::Admit(change, reply)).await
    }

    /// Ends worker and task.
    ///
    /// # Errors
    /// `conflict`.
    pub async fn remove(&self, change: Change) -> Result<()> {
        self.ask(|reply| Command::Remove(change, reply)).await
    }
}
