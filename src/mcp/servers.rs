//! The MCP servers of one kernel.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::watch;

use super::allow::{AllowList, SEPARATOR};
use super::convert::ToolOutput;
use super::process::Launch;
use super::server::{CallError, Server};
use crate::core::error::{Error, Result};
use crate::core::info::{McpInfo, McpTransport, ToolInfo};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::value::Value;

/// The servers of one kernel, on the `LocalSet` of its task. Dropping it kills every server's
/// process group at once; [`McpServers::shutdown`] ends them gracefully.
pub struct McpServers {
    kernel: RefCell<KernelName>,
    allow: Arc<AllowList>,
    launch: Launch,
    servers: RefCell<BTreeMap<String, Rc<Server>>>,
    changes: watch::Sender<u64>,
}

impl McpServers {
    /// Creates an empty set.
    pub fn new(kernel: KernelName, allow: Arc<AllowList>, launch: Launch) -> Self {
        Self {
            kernel: RefCell::new(kernel),
            allow,
            launch,
            servers: RefCell::default(),
            changes: watch::Sender::new(0),
        }
    }

    /// Registers a server and waits until it is ready. Dropping the future unregisters it.
    ///
    /// # Errors
    /// As [`McpServers::start`]; `unavailable` with the server's last output if it does not start.
    /// It is not registered then.
    pub async fn register(&self, name: &str, transport: &McpTransport) -> Result<McpInfo> {
        let server = self.insert(name, transport)?;
        let mut taken_back = TakeBack { servers: self, name, server: &server, keep: false };
        if let Err(why) = server.started().await {
            return Err(Error::unavailable(format!("MCP server {name:?} did not start: {why}"))
                .hint("try its command by hand, as the daemon's user"));
        }
        taken_back.keep = true;
        Ok(server.info())
    }

    /// Registers a server without waiting, as at a kernel's start. It connects and reconnects on
    /// its own.
    ///
    /// # Errors
    /// `refused` without an allow-list entry, `alreadyExists` for a name in use, `busy` at the
    /// limit, `invalidArgument` for an invalid name.
    pub fn start(&self, name: &str, transport: &McpTransport) -> Result<()> {
        self.insert(name, transport).map(drop)
    }

    /// Refuses a new name for the kernel under which a server would not be allowed.
    ///
    /// # Errors
    /// `refused`.
    pub fn check_rename(&self, kernel: &KernelName, wanted: &[(String, McpTransport)]) -> Result<()> {
        wanted.iter().try_for_each(|(name, transport)| self.allow.admit(kernel.as_str(), name, transport).map(drop))
    }

    /// Changes the kernel's name.
    pub fn rename(&self, kernel: KernelName) {
        self.kernel.replace(kernel);
    }

    fn insert(&self, name: &str, transport: &McpTransport) -> Result<Rc<Server>> {
        let mut servers = self.servers.borrow_mut();
        if servers.contains_key(name) {
            return Err(Error::already_exists(format!("MCP server {name:?} is registered already")));
        }
        if servers.len() >= limits::MCP_SERVERS {
            return Err(Error::busy(format!(
                "kernel {} has {} MCP servers already",
                self.kernel.borrow(),
                servers.len()
            )));
        }
        let admission = self.allow.admit(self.kernel.borrow().as_str(), name, transport)?;
        let server = Rc::new(Server::start(name, admission, self.launch.clone(), self.changes.clone()));
        servers.insert(name.to_owned(), Rc::clone(&server));
        Ok(server)
    }

    fn remove(&self, name: &str) -> Option<Rc<Server>> {
        let removed = self.servers.borrow_mut().remove(name);
        self.changed();
        removed
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Ends a server. It is unregistered when this returns and has ended when the future is done;
    /// pending calls fail. Dropping the future kills what still runs.
    ///
    /// # Errors
    /// The future returns `notFound` for an unknown name.
    pub fn unregister(&self, name: &str) -> impl Future<Output = Result<()>> + use<> {
        let removed = self.remove(name).ok_or_else(|| no_server(name));
        async move {
            removed?.stop().await;
            Ok(())
        }
    }

    /// Ends every server concurrently, bounded by the grace period. They are unregistered when this
    /// returns, so that others can start at once.
    pub fn shutdown(&self) -> impl Future<Output = ()> + use<> {
        let servers = std::mem::take(&mut *self.servers.borrow_mut());
        self.changed();
        async move {
            futures::future::join_all(servers.values().map(|server| server.stop())).await;
        }
    }

    /// The servers, by name.
    pub fn list(&self) -> Vec<McpInfo> {
        self.servers.borrow().values().map(|server| server.info()).collect()
    }

    /// The tools of all servers, named `server__tool`.
    pub fn tools(&self) -> Vec<ToolInfo> {
        self.servers.borrow().values().flat_map(|server| server.tools()).collect()
    }

    /// Increments whenever a server's state or tools change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Calls `server__tool` with named arguments. Dropping the future cancels the call.
    ///
    /// # Errors
    /// [`CallError::Tool`] if the tool reports a failure; else `notFound`, `invalidArgument`,
    /// `deadline`, `unavailable` with the reason, or `unsupported` for a tool that needs
    /// interaction.
    pub async fn call(&self, tool: &str, args: &Value) -> Result<ToolOutput, CallError> {
        let (name, tool) = tool
            .split_once(SEPARATOR)
            .ok_or_else(|| Error::not_found(format!("no MCP tool {tool:?}: they are named server{SEPARATOR}tool")))?;
        let server = self.servers.borrow().get(name).cloned().ok_or_else(|| no_server(name))?;
        server.call(tool, args).await
    }
}

fn no_server(name: &str) -> Error {
    let name: String = name.chars().take(super::allow::NAME_BYTES).collect();
    Error::not_found(format!("no MCP server {name:?} is registered"))
}

/// Removes a server whose registration was cancelled.
struct TakeBack<'s> {
    servers: &'s McpServers,
    name: &'s str,
    server: &'s Rc<Server>,
    keep: bool,
}

impl Drop for TakeBack<'_> {
    fn drop(&mut self) {
        // Another server may have been registered under that name meanwhile.
        let ours = self.servers.servers.borrow().get(self.name).is_some_and(|there| Rc::ptr_eq(there, self.server));
        if !self.keep && ours {
            self.servers.remove(self.name);
        }
    }
}
