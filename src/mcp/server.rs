//! The life of a server, as one task.
//!
//! ```text
//!  connecting ──▶ ready ──(dies)──▶ connecting          a short pause, doubled each time
//!      │                                ▲
//!      └──(cannot start)──▶ failed ─────┘               tried again after the pause
//! ```
//! A call waits while the server connects, and fails at once with the reason in `failed`. A call
//! interrupted by the server's death is not repeated: it may have had its effect.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::model::{CallToolRequestParams, CallToolResponse};
use rmcp::service::{Peer, ServiceError};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::allow::{Admission, SEPARATOR};
use super::connect::{Connection, connect};
use super::convert::{self, ToolOutput, printable};
use super::limits;
use super::process::{Launch, Process};
use super::tools::{self, ToolList};
use super::wire::{Health, chain};
use crate::core::error::Error;
use crate::core::info::{McpInfo, ToolInfo};
use crate::core::value::Value;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CallError {
    /// The tool ran and reported a failure.
    #[error("{message}")]
    Tool {
        /// The tool's message.
        message: String,
        /// The tool's answer as a value.
        value: Box<Value>,
    },
    /// The call could not be made, or no answer arrived.
    #[error(transparent)]
    Call(#[from] Error),
}

/// State of a server.
#[derive(Debug, Clone)]
pub(super) enum State {
    /// Starting, or about to.
    Connecting,
    /// Ready for calls.
    Ready(Peer<RoleClient>, Arc<Health>),
    /// Not started; tried again later.
    Failed,
}

/// A registered server. Dropping it kills its process group at once.
pub(super) struct Server {
    shared: Rc<Shared>,
    task: RefCell<Option<tokio::task::JoinHandle<()>>>,
}

struct Shared {
    name: String,
    admission: Admission,
    launch: Launch,
    state: watch::Sender<State>,
    list: RefCell<ToolList>,
    /// The last failure; empty once the server is ready.
    error: RefCell<String>,
    process: RefCell<Option<Process>>,
    calls: Semaphore,
    timeouts: Cell<u32>,
    stop: CancellationToken,
    changes: watch::Sender<u64>,
}

/// How a connection ended.
enum Ended {
    Stopped,
    NeverReady(String),
    Died(String),
}

impl Server {
    /// Starts the server's task on the current `LocalSet`. Each change of its state or tools
    /// increments `changes`.
    pub(super) fn start(name: &str, admission: Admission, launch: Launch, changes: watch::Sender<u64>) -> Self {
        let shared = Rc::new(Shared {
            name: name.to_owned(),
            admission,
            launch,
            state: watch::Sender::new(State::Connecting),
            list: RefCell::default(),
            error: RefCell::default(),
            process: RefCell::default(),
            calls: Semaphore::new(limits::CALLS_IN_FLIGHT),
            timeouts: Cell::new(0),
            stop: CancellationToken::new(),
            changes,
        });
        let task = tokio::task::spawn_local(live(Rc::clone(&shared)));
        Self { shared, task: RefCell::new(Some(task)) }
    }

    /// Waits until the first connection is ready or has failed.
    pub(super) async fn started(&self) -> Result<(), String> {
        let mut state = self.shared.state.subscribe();
        let settled = state.wait_for(|state| !matches!(state, State::Connecting)).await;
        match settled.as_deref() {
            Ok(State::Ready(..)) => Ok(()),
            Ok(State::Connecting | State::Failed) | Err(_) => Err(self.shared.error.borrow().clone()),
        }
    }

    pub(super) fn info(&self) -> McpInfo {
        let shared = &self.shared;
        let (state, error) = match &*shared.state.borrow() {
            State::Connecting => ("connecting", shared.error.borrow().clone()),
            State::Ready(..) => ("ready", shared.list.borrow().note.clone()),
            State::Failed => ("failed", shared.error.borrow().clone()),
        };
        let tools = u32::try_from(shared.list.borrow().tools.len()).unwrap_or(u32::MAX);
        McpInfo { name: shared.name.clone(), state: state.into(), tools, error }
    }

    /// The server's tools, including those of a restarting server.
    pub(super) fn tools(&self) -> Vec<ToolInfo> {
        self.shared.list.borrow().tools.clone()
    }

    /// Calls a tool by its own name. Dropping the future cancels the call at the server.
    pub(super) async fn call(&self, tool: &str, args: &Value) -> Result<ToolOutput, CallError> {
        let shared = &self.shared;
        let name = &shared.name;
        let arguments =
            convert::arguments(args).map_err(|e| Error::invalid(format!("{name}{SEPARATOR}{tool}: {e}")))?;
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let within = shared.admission.entry.timeout;
        let Ok(answer) = timeout(within, shared.ask(tool, params)).await else {
            shared.missed();
            let late = Error::deadline(format!("MCP tool {name}{SEPARATOR}{tool} did not answer within {within:?}"));
            return Err(late.hint(format!("raise timeout of [mcp.servers.{}]", shared.admission.entry.name)).into());
        };
        let result = match answer? {
            CallToolResponse::Complete(result) => result,
            other => {
                tracing::debug!(server = name, ?other, "a tool asked for input or made a task");
                let what = format!("MCP tool {name}{SEPARATOR}{tool} needs an interaction that ryokan does not offer");
                return Err(Error::unsupported(what).into());
            }
        };
        let failed = result.is_error == Some(true);
        let output = convert::output(result)
            .map_err(|why| Error::unavailable(format!("MCP tool {name}{SEPARATOR}{tool} {why}")))?;
        if !failed {
            return Ok(output);
        }
        let message = match output.text.trim() {
            "" => format!("MCP tool {name}{SEPARATOR}{tool} failed without a word"),
            text => text.to_owned(),
        };
        Err(CallError::Tool { message, value: Box::new(output.value) })
    }

    /// Closes the server's input, waits for a grace period, then ends its process group.
    pub(super) async fn stop(&self) {
        self.shared.stop.cancel();
        let task = self.task.borrow_mut().take();
        if let Some(mut task) = task {
            // The task itself is bounded, below twice the grace.
            let patience = self.shared.launch.timing.stop_grace * 2 + Duration::from_secs(1);
            if timeout(patience, &mut task).await.is_err() {
                task.abort();
            }
        }
        drop(self.shared.process.take());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Here, not in the task: an aborted task is dropped only when its LocalSet runs again.
        self.shared.stop.cancel();
        drop(self.shared.process.take());
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Shared {
    fn enter(&self, state: State) {
        self.state.send_replace(state);
        self.changed();
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Counts a timed-out call. After several in a row the server counts as dead.
    fn missed(&self) {
        self.timeouts.set(self.timeouts.get().saturating_add(1));
        if self.timeouts.get() >= limits::TIMEOUTS_IN_A_ROW
            && let State::Ready(_, health) = &*self.state.borrow()
        {
            health.fail(format!("did not answer {} calls in a row", self.timeouts.get()));
        }
    }

    async fn ask(&self, tool: &str, params: CallToolRequestParams) -> Result<CallToolResponse, CallError> {
        let name = &self.name;
        let _permit = self.calls.acquire().await.map_err(|_| Error::unavailable("the server was removed"))?;
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| !matches!(state, State::Connecting)).await.map(|state| state.clone());
        let Ok(State::Ready(peer, health)) = settled else {
            let why = self.error.borrow().clone();
            return Err(Error::unavailable(format!("MCP server {name:?} is not there: {why}")).into());
        };
        let full = format!("{name}{SEPARATOR}{tool}");
        if !self.list.borrow().tools.iter().any(|listed| listed.name == full) {
            return Err(Error::not_found(format!("MCP server {name:?} has no tool {tool:?}")).into());
        }
        let answer = tokio::select! {
            answer = peer.call_tool_once(params) => answer,
            () = health.broken.cancelled() => Err(ServiceError::TransportClosed),
        };
        if !matches!(answer, Err(ServiceError::TransportClosed)) {
            self.timeouts.set(0);
        }
        match answer {
            Ok(response) => Ok(response),
            Err(ServiceError::McpError(e)) => {
                let message = printable(&e.message, limits::ERROR_BYTES);
                Err(Error::invalid(format!("MCP tool {full}: {message} (code {})", e.code.0)).into())
            }
            Err(ServiceError::TransportClosed) => Err(self.cut_off(&full, &health, state).await.into()),
            Err(ServiceError::TransportSend(e)) => {
                let why = chain(e.error.as_ref());
                Err(Error::unavailable(format!("MCP tool {full} did not answer: {why}")).into())
            }
            Err(e) => Err(Error::unavailable(format!("MCP tool {full}: {}", chain(&e))).into()),
        }
    }
}

impl Shared {
    /// Why a call was cut off: with the whole connection or, over HTTP, alone.
    async fn cut_off(&self, tool: &str, health: &Health, mut state: watch::Receiver<State>) -> Error {
        const MOMENT: Duration = Duration::from_millis(100);
        if timeout(MOMENT, health.broken.cancelled()).await.is_err() && !self.stop.is_cancelled() {
            let what = "the server broke off its answer, or it was larger than a message may be";
            return Error::unavailable(format!("MCP tool {tool}: {what}"));
        }
        // The server's task soon knows the exit code and the last output.
        let _ = timeout(Duration::from_secs(1), state.wait_for(|state| !matches!(state, State::Ready(..)))).await;
        let known = Some(self.error.borrow().clone()).filter(|why| !why.is_empty());
        let why = known.or_else(|| health.why()).unwrap_or_else(|| "the connection ended".into());
        Error::unavailable(format!("MCP server {:?} ended during the call: {why}", self.name))
    }
}

/// Wakes the waiters when the server's task ends, however it ends.
struct LastState(Rc<Shared>);

impl Drop for LastState {
    fn drop(&mut self) {
        self.0.error.replace("it was removed".into());
        self.0.enter(State::Failed);
    }
}

async fn live(shared: Rc<Shared>) {
    let _last = LastState(Rc::clone(&shared));
    let timing = shared.launch.timing;
    let mut pause = timing.backoff_first;
    loop {
        let started = Instant::now();
        let ended = session(&shared).await;
        drop(shared.process.take());
        let (state, why) = match ended {
            Ended::Stopped => return,
            Ended::NeverReady(why) => (State::Failed, why),
            Ended::Died(why) => (State::Connecting, why),
        };
        tracing::warn!(server = shared.name, why, "MCP server ended");
        if started.elapsed() >= limits::STABLE {
            pause = timing.backoff_first;
        }
        // A server that dies repeatedly must not make calls wait long.
        let state = if pause > Duration::from_secs(1) { State::Failed } else { state };
        shared.error.replace(why);
        shared.enter(state);
        tokio::select! {
            () = sleep(pause) => {}
            () = shared.stop.cancelled() => return,
        }
        pause = (pause * 2).min(timing.backoff_max);
        shared.enter(State::Connecting);
    }
}

/// One connection from its start to its end.
async fn session(shared: &Shared) -> Ended {
    let entry = &shared.admission.entry;
    let start = async {
        let connection = connect(entry, &shared.launch, &shared.process).await?;
        let list = tools::list(&shared.name, connection.service.peer()).await?;
        Ok::<_, String>((connection, list))
    };
    let within = shared.launch.timing.start;
    let started = tokio::select! {
        started = timeout(within, start) => started,
        () = shared.stop.cancelled() => return Ended::Stopped,
    };
    let (mut connection, list) = match started {
        Ok(Ok(started)) => started,
        Ok(Err(why)) => return Ended::NeverReady(shared.obituary(why).await),
        Err(_) => return Ended::NeverReady(shared.obituary(format!("was not ready within {within:?}")).await),
    };
    shared.list.replace(list);
    shared.error.replace(String::new());
    shared.timeouts.set(0);
    shared.enter(State::Ready(connection.service.peer().clone(), Arc::clone(&connection.health)));
    let died = serve(shared, &connection).await;
    let grace = shared.launch.timing.stop_grace;
    match died {
        Some(why) => {
            let why = shared.obituary(why).await;
            drop(shared.process.take());
            Ended::Died(why)
        }
        None => {
            let _ = connection.service.close_with_timeout(grace).await;
            drop(connection);
            let process = shared.process.take();
            if let Some(process) = process {
                process.wait(grace).await;
            }
            Ended::Stopped
        }
    }
}

/// Serves until the connection dies, and returns the reason; `None` if asked to stop.
async fn serve(shared: &Shared, connection: &Connection) -> Option<String> {
    // A server whose children hold its output open ends without closing it: only the signal reports
    // that.
    let mut children = signal(SignalKind::child()).ok();
    let peer = connection.service.peer();
    loop {
        let child = async {
            match &mut children {
                Some(children) => children.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shared.stop.cancelled() => return None,
            () = connection.health.broken.cancelled() => {
                return Some(connection.health.why().unwrap_or_else(|| "the connection ended".into()));
            }
            _ = child => {
                if shared.process.borrow().as_ref().is_some_and(|process| process.ended().is_some()) {
                    connection.health.fail("ended");
                }
            }
            () = connection.health.tools_changed.notified() => {
                match refresh(shared, peer, &connection.health).await {
                    Ok(list) => {
                        shared.list.replace(list);
                        shared.changed();
                    }
                    Err(why) => tracing::warn!(server = shared.name, why, "the list of tools stays as it was"),
                }
            }
        }
    }
}

async fn refresh(shared: &Shared, peer: &Peer<RoleClient>, health: &Health) -> Result<ToolList, String> {
    let ended = async {
        tokio::select! {
            () = shared.stop.cancelled() => {}
            () = health.broken.cancelled() => {}
        }
    };
    tokio::select! {
        listed = timeout(shared.launch.timing.start, tools::list(&shared.name, peer)) => {
            let list = listed.map_err(|_| "did not list its tools in time".to_owned())?;
            // Later changes are in the next list; the limited rate protects from constant change
            // notices.
            sleep(limits::REFRESH_PAUSE).await;
            list
        }
        () = ended => Err("the connection ended".into()),
    }
}

impl Shared {
    /// The reason of the end, with the exit code and last output of a process.
    async fn obituary(&self, why: String) -> String {
        const MOMENT: Duration = Duration::from_millis(200);
        let Some(process) = self.process.take() else { return why };
        let how = process.wait(MOMENT).await;
        // The last output may still be in the pipe.
        sleep(Duration::from_millis(20)).await;
        let words = process.last_words();
        let mut text = match how {
            Some(how) => format!("{why}; it {how}"),
            None => why,
        };
        if !words.is_empty() {
            text.push_str(&format!("; its last output: {words}"));
        }
        text
    }
}
