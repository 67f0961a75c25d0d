//! MCP servers of one kernel and the tools that they offer in it.
//!
//! Servers start with the worker or at registration; they end with the worker. The engine's list of tools follows their
//! changes.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::core::error::{Error, Result};
use crate::core::info::{McpInfo, McpTransport, ToolInfo};
use crate::core::name::KernelName;
use crate::core::value::Value;
use crate::link::host::{DynamicTool, WorkerLink};
use crate::mcp::allow::AllowList;
use crate::mcp::{CallError, Launch, McpServers};
use crate::supervisor::host::events::Events;

/// MCP servers of a kernel.
pub struct Tools {
    event_name: RefCell<String>,
    servers: Rc<McpServers>,
    wanted: RefCell<Vec<(String, McpTransport)>>,
    events: Rc<Events>,
    follower: RefCell<Option<Follower>>,
}

/// The task that sends each change of the list to the engine.
struct Follower {
    task: JoinHandle<()>,
    /// The change that the engine has; closed when the task ends.
    sent: watch::Receiver<u64>,
}

impl Tools {
    /// Registers servers without starting them.
    pub fn new(
        kernel: KernelName,
        event_name: String,
        allow: Arc<AllowList>,
        launch: Launch,
        wanted: Vec<(String, McpTransport)>,
        events: Rc<Events>,
    ) -> Rc<Self> {
        let servers = Rc::new(McpServers::new(kernel, allow, launch));
        Rc::new(Tools {
            event_name: RefCell::new(event_name),
            servers,
            wanted: RefCell::new(wanted),
            events,
            follower: RefCell::new(None),
        })
    }

    /// Destination of events.
    pub(crate) fn events(&self) -> &Rc<Events> {
        &self.events
    }

    /// Refuses a new name for the kernel under which a registered server would not be allowed.
    ///
    /// # Errors
    /// `refused`.
    pub(crate) fn check_rename(&self, kernel: &KernelName) -> Result<()> {
        self.servers.check_rename(kernel, &self.wanted.borrow())
    }

    /// Changes the kernel's name.
    pub(crate) fn rename(&self, kernel: KernelName, event_name: String) {
        self.servers.rename(kernel);
        self.event_name.replace(event_name);
    }

    /// The servers and their tools. A registered server that is not running is listed as `stopped`.
    pub fn list(&self) -> (Vec<McpInfo>, Vec<ToolInfo>) {
        let mut servers = self.servers.list();
        for (name, _) in self.wanted.borrow().iter() {
            if !servers.iter().any(|server| server.name == *name) {
                servers.push(McpInfo { name: name.clone(), state: "stopped".into(), tools: 0, error: String::new() });
            }
        }
        servers.sort_by(|a, b| a.name.cmp(&b.name));
        (servers, self.servers.tools())
    }

    /// The servers and their tools, once the running engine has these tools.
    ///
    /// Otherwise code that is sent after this answer could miss a tool that the answer names.
    pub fn list_offered(&self) -> impl Future<Output = (Vec<McpInfo>, Vec<ToolInfo>)> + use<> {
        let listed = self.list();
        let change = *self.servers.changes().borrow();
        let sent = self.follower.borrow().as_ref().map(|follower| follower.sent.clone());
        async move {
            if let Some(mut sent) = sent {
                // Fails only when the worker has ended.
                let _ = sent.wait_for(|sent| *sent >= change).await;
            }
            listed
        }
    }

    /// Starts a server that the configuration allows.
    ///
    /// # Errors
    /// `refused`, `alreadyExists`, `busy`, `invalidArgument`.
    pub fn register(&self, name: &str, transport: &McpTransport) -> Result<()> {
        if self.wanted.borrow().iter().any(|(there, _)| there == name) {
            return Err(Error::already_exists(format!("MCP server {name:?} is registered already")));
        }
        self.servers.start(name, transport)?;
        self.wanted.borrow_mut().push((name.to_owned(), transport.clone()));
        Ok(())
    }

    /// Stops a server.
    pub fn unregister(&self, name: &str) {
        self.wanted.borrow_mut().retain(|(there, _)| there != name);
        // Removed now, stopped in the background; a server that did not run needs no stop.
        let ending = self.servers.unregister(name);
        tokio::task::spawn_local(async move { ending.await.ok() });
    }

    /// Replaces the registered servers. A server that the configuration no longer allows is reported as an event.
    pub fn replace(&self, wanted: &[(String, McpTransport)]) {
        let before = self.wanted.borrow().clone();
        for (name, _) in before.iter().filter(|server| !wanted.contains(server)) {
            self.unregister(name);
        }
        for (name, transport) in wanted.iter().filter(|server| !before.contains(server)) {
            if let Err(error) = self.register(name, transport) {
                self.wanted.borrow_mut().push((name.clone(), transport.clone()));
                let detail = serde_json::json!({ "server": name, "error": error.message, "hint": error.hint });
                self.events.publish(&self.event_name.borrow(), "mcp_not_started", detail);
            }
        }
    }

    /// Starts the registered servers and updates the engine's tool list until [`Tools::detach`].
    pub fn attach(&self, link: &Rc<WorkerLink>) {
        if self.wanted.borrow().is_empty() && self.servers.list().is_empty() {
            self.follow(link);
            return;
        }
        let running: Vec<String> = self.servers.list().into_iter().map(|server| server.name).collect();
        for (name, transport) in self.wanted.borrow().iter().filter(|(name, _)| !running.contains(name)) {
            if let Err(error) = self.servers.start(name, transport) {
                let detail = serde_json::json!({ "server": name, "error": error.message, "hint": error.hint });
                self.events.publish(&self.event_name.borrow(), "mcp_not_started", detail);
            }
        }
        self.follow(link);
    }

    fn follow(&self, link: &Rc<WorkerLink>) {
        let (servers, link) = (Rc::clone(&self.servers), Rc::downgrade(link));
        let mut changes = servers.changes();
        let (sends, receives) = watch::channel(0);
        let task = tokio::task::spawn_local(async move {
            let mut sent = Vec::new();
            loop {
                let change = *changes.borrow_and_update();
                let tools: Vec<DynamicTool> = servers.tools().into_iter().map(dynamic).collect();
                let Some(link) = link.upgrade() else { return };
                if tools != sent {
                    if let Err(error) = link.dynamic_tools(&tools).await {
                        tracing::debug!(%error, "the engine did not get its list of tools");
                    }
                    sent = tools;
                }
                drop(link);
                sends.send_replace(change);
                if changes.changed().await.is_err() {
                    return;
                }
            }
        });
        if let Some(former) = self.follower.borrow_mut().replace(Follower { task, sent: receives }) {
            former.task.abort();
        }
    }

    /// Stops every server; they start again with the next worker.
    pub fn detach(&self) {
        if let Some(follower) = self.follower.borrow_mut().take() {
            follower.task.abort();
        }
        tokio::task::spawn_local(self.servers.shutdown());
    }

    /// Calls a tool by its `server__tool` name.
    ///
    /// # Errors
    /// The tool's failure, or the reason why the call failed.
    pub async fn call(&self, name: &str, args: Value) -> Result<(Value, String)> {
        match self.servers.call(name, &args).await {
            Ok(output) => Ok((output.value, output.text)),
            Err(CallError::Tool { message, .. }) => Err(Error::refused(message).reason("tool_failed")),
            Err(CallError::Call(error)) => Err(error),
        }
    }
}

fn dynamic(tool: ToolInfo) -> DynamicTool {
    let schema = serde_json::from_str(&tool.schema_json).unwrap_or_default();
    DynamicTool { name: tool.name, description: tool.description, schema }
}
