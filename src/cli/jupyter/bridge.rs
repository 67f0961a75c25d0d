//! The Jupyter side: sockets of a connection file, and the answers to a front end's requests.
//!
//! Cells and everything else on the shell channel are handled in order; the control channel beside them.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::kill;
use nix::unistd::Pid;
use serde::Deserialize;
use serde_json::{Value as Json, json};
use tokio::net::TcpListener;

use super::RunArgs;
use super::cell::{Cell as CellOutput, Ended};
use super::input::{self, Asker, Input};
use super::install::language;
use super::message::{Message, PROTOCOL, Signer};
use super::session::Session;
use super::zmtp::{self, Listener, PeerId, Router, Sender};
use crate::cli::context::Context;
use crate::cli::drive::Signals;
use crate::cli::exit;
use crate::cli::failure::Failure;
use crate::cli::forward::{OwnSocket, bind_private};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::exec::OutputEvent;
use crate::core::info::CodeStatus;
use crate::core::limits;

/// How often the bridge looks whether Jupyter still lives.
const PARENT_CHECK: Duration = Duration::from_secs(1);
/// Time for an interrupted cell to end before the kernel ends.
const LAST_CELL: Duration = Duration::from_secs(3);

/// A connection file.
#[derive(Deserialize)]
struct Connection {
    transport: String,
    ip: String,
    shell_port: u16,
    control_port: u16,
    stdin_port: u16,
    iopub_port: u16,
    hb_port: u16,
    key: String,
    signature_scheme: String,
}

impl Connection {
    fn read(path: &Path) -> std::result::Result<Connection, Failure> {
        use std::io::Read as _;
        let mut text = Vec::new();
        let file = std::fs::File::open(path).map_err(|error| Failure::of_file("read", path, &error))?;
        file.take(limits::JUPYTER_FILE_BYTES)
            .read_to_end(&mut text)
            .map_err(|error| Failure::of_file("read", path, &error))?;
        let wrong = |why: String| Failure::usage(format!("{}: {why}", path.display()), "Jupyter writes this file");
        let connection: Connection = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        match (connection.signature_scheme.as_str(), connection.key.is_empty()) {
            ("hmac-sha256", false) => Ok(connection),
            _ => Err(wrong("messages must be signed with hmac-sha256".into())),
        }
    }

    /// Listens on one of the ports.
    async fn listen(&self, port: u16, files: &mut Vec<OwnSocket>) -> Result<Listener> {
        let failed = |error: std::io::Error| Error::refused(format!("cannot listen for Jupyter on {port}: {error}"));
        if self.transport == "ipc" {
            let (listener, own) = bind_private(format!("{}-{port}", self.ip).as_ref()).map_err(failed)?;
            files.push(own);
            return Ok(Listener::Unix(listener));
        }
        let address: std::result::Result<SocketAddr, _> = format!("{}:{port}", self.ip).parse();
        match address {
            Ok(address) if self.transport == "tcp" && address.ip().is_loopback() => {
                Ok(Listener::Tcp(TcpListener::bind(address).await.map_err(failed)?))
            }
            _ => Err(Error::unsupported(format!(
                "Jupyter's address {}://{} is not of this host",
                self.transport, self.ip
            ))
            .hint("use 127.0.0.1, or --KernelManager.transport=ipc")),
        }
    }
}

/// What all channels share.
struct Bridge<'a> {
    session: Session<'a>,
    signer: Signer,
    iopub: Sender,
    input: Input,
    with_html: bool,
    count: Cell<u64>,
    /// Set by a request to end.
    is_ending: Cell<bool>,
    /// Whether a cell runs.
    is_busy: Cell<bool>,
}

/// Runs a kernel for Jupyter until it ends it.
pub async fn run(context: &Context, args: &RunArgs) -> std::result::Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let parent = nix::unistd::getppid();
    // A program may be between: Jupyter names itself.
    let jupyter = std::env::var("JPY_PARENT_PID").ok().and_then(|pid| pid.parse().ok()).map(Pid::from_raw);
    let connection = Connection::read(&args.connection_file)?;
    let mut files = Vec::new();
    let mut shell = Router::new(connection.listen(connection.shell_port, &mut files).await?);
    let mut control = Router::new(connection.listen(connection.control_port, &mut files).await?);
    let stdin = Router::new(connection.listen(connection.stdin_port, &mut files).await?);
    let heartbeat = Router::new(connection.listen(connection.hb_port, &mut files).await?);
    let iopub = zmtp::publisher(connection.listen(connection.iopub_port, &mut files).await?);
    tokio::task::spawn_local(echo(heartbeat));
    let bridge = Bridge {
        session: Session::open(context, args).await?,
        signer: Signer::new(&connection.key),
        iopub,
        input: Input::new(stdin),
        with_html: args.kernels.html,
        count: Cell::default(),
        is_ending: Cell::default(),
        is_busy: Cell::default(),
    };
    bridge.publish(&json!({}), "status", json!({ "execution_state": "starting" })).await;
    let cells = async {
        while let Some((peer, frames)) = shell.recv().await {
            if let Some(message) = bridge.signer.read(frames) {
                bridge.on_shell(&mut shell, peer, message).await;
            }
        }
    };
    let controls = async {
        while let Some((peer, frames)) = control.recv().await {
            if let Some(message) = bridge.signer.read(frames) {
                bridge.on_control(&control.sender, peer, message).await;
            }
            if bridge.is_ending.get() {
                return;
            }
        }
    };
    let orphaned = async {
        while nix::unistd::getppid() == parent && jupyter.is_none_or(|pid| kill(pid, None).is_ok()) {
            tokio::time::sleep(PARENT_CHECK).await;
        }
    };
    let interrupts = async {
        loop {
            match signals.any().await {
                exit::INTERRUPTED => drop(bridge.session.interrupt().await),
                code => return code,
            }
        }
    };
    let code = tokio::select! {
        () = controls => return Ok(()),
        () = cells => return Ok(()),
        () = orphaned => exit::OK,
        code = interrupts => code,
    };
    // Without a farewell of Jupyter.
    bridge.session.close().await?;
    match code {
        exit::OK => Ok(()),
        code => Err(Failure::Quiet(code)),
    }
}

async fn echo(mut heartbeat: Router) {
    while let Some((peer, frames)) = heartbeat.recv().await {
        heartbeat.sender.send(peer, frames).await;
    }
}

impl Bridge<'_> {
    /// Sends to all front ends.
    async fn publish(&self, parent: &Json, kind: &str, content: Json) {
        let topic = format!("kernel.{}.{kind}", self.session.name()).into_bytes();
        self.iopub.publish(self.signer.write(vec![topic], kind, parent, &content)).await;
    }

    async fn status(&self, parent: &Json, state: &str) {
        self.publish(parent, "status", json!({ "execution_state": state })).await;
    }

    async fn reply(&self, to: &Sender, peer: PeerId, message: &Message, kind: &str, content: &Json) {
        let frames = self.signer.write(message.addresses.clone(), kind, &message.header, content);
        to.send(peer, frames).await;
    }

    async fn on_shell(&self, shell: &mut Router, peer: PeerId, message: Message) {
        self.status(&message.header, "busy").await;
        let sender = shell.sender.clone();
        let mut aborts = false;
        match message.kind() {
            "execute_request" => {
                self.is_busy.set(true);
                // A front end has the same routing id on all channels.
                let asker = Asker { front_end: sender.identity(peer), allows: message.content["allow_stdin"] == true };
                let content = self.execute(&message, &asker).await;
                self.is_busy.set(false);
                let stops = message.content["stop_on_error"].as_bool().unwrap_or(true);
                aborts = stops && content["status"] == "error";
                self.reply(&sender, peer, &message, "execute_reply", &content).await;
            }
            kind => {
                if let Some((kind, content)) = self.answer(kind, &message.content).await {
                    self.reply(&sender, peer, &message, kind, &content).await;
                }
            }
        }
        self.status(&message.header, "idle").await;
        while aborts && let Some((peer, frames)) = shell.try_recv() {
            self.abort(&sender, peer, frames).await;
        }
    }

    /// Answers a cell that was queued behind a failed one.
    async fn abort(&self, sender: &Sender, peer: PeerId, frames: zmtp::Frames) {
        let Some(message) = self.signer.read(frames) else { return };
        self.status(&message.header, "busy").await;
        if message.kind() == "execute_request" {
            let content = json!({ "status": "aborted", "execution_count": self.count.get() });
            self.reply(sender, peer, &message, "execute_reply", &content).await;
        } else if let Some((kind, content)) = self.answer(message.kind(), &message.content).await {
            self.reply(sender, peer, &message, kind, &content).await;
        }
        self.status(&message.header, "idle").await;
    }

    async fn on_control(&self, control: &Sender, peer: PeerId, message: Message) {
        self.status(&message.header, "busy").await;
        match message.kind() {
            "interrupt_request" => {
                let content = outcome(self.session.interrupt().await);
                self.reply(control, peer, &message, "interrupt_reply", &content).await;
            }
            "shutdown_request" => {
                let restart = message.content["restart"].as_bool().unwrap_or(false);
                let mut content = outcome(self.shut_down(restart).await);
                content["restart"] = json!(restart);
                self.reply(control, peer, &message, "shutdown_reply", &content).await;
                self.publish(&message.header, "shutdown_reply", content).await;
                self.is_ending.set(true);
            }
            kind => {
                if let Some((kind, content)) = self.answer(kind, &message.content).await {
                    self.reply(control, peer, &message, kind, &content).await;
                }
            }
        }
        self.status(&message.header, "idle").await;
        // What was sent is on its way to the front ends before the sockets close.
        if self.is_ending.get() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn shut_down(&self, restart: bool) -> Result<()> {
        if self.is_busy.get() {
            self.session.interrupt().await?;
            let ended = async {
                while self.is_busy.get() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            let _ = tokio::time::timeout(LAST_CELL, ended).await;
        }
        if restart { self.session.clear(self.is_busy.get()).await } else { self.session.close().await }
    }

    /// Runs a cell.
    async fn execute(&self, message: &Message, asker: &Asker) -> Json {
        let (code, parent) = (message.content["code"].as_str().unwrap_or_default(), &message.header);
        let is_silent = message.content["silent"].as_bool().unwrap_or(false);
        if code.trim().is_empty() {
            return self.done(self.count.get());
        }
        if !is_silent {
            self.count.set(self.count.get() + 1);
            let content = json!({ "code": code, "execution_count": self.count.get() });
            self.publish(parent, "execute_input", content).await;
        }
        let count = self.count.get();
        let output = RefCell::new(CellOutput::new(self.with_html));
        self.input.begin();
        let show = async |event: OutputEvent| {
            if let Some(number) = input::requested(&event) {
                self.input.request(&self.signer, &message.header, asker, number).await;
                return Ok(());
            }
            let shown = output.borrow_mut().take(event);
            for (kind, content) in shown {
                if !is_silent {
                    self.publish(parent, kind, content).await;
                }
            }
            Ok(())
        };
        let ran = tokio::select! {
            ran = self.session.run(code, (message.id(), asker.allows), &output, show) => ran,
            never = self.input.relay(&self.signer, &self.session) => match never {},
        };
        let (shown, ended) = match &ran {
            Ok(result) => output.borrow_mut().end(result, self.session.engine(), count),
            Err(error) => {
                let lines: Vec<&str> = [error.message.as_str(), error.hint.as_str()].into();
                let content = json!({ "ename": error.code.name(), "evalue": error.message, "traceback": lines });
                (vec![("error", content.clone())], Ended::Error(content))
            }
        };
        for (kind, content) in shown {
            // Errors of silent code are published, too.
            if !is_silent || kind == "error" {
                self.publish(parent, kind, content).await;
            }
        }
        match ended {
            Ended::Ok => self.done(count),
            Ended::Error(mut error) => {
                error["status"] = json!("error");
                error["execution_count"] = json!(count);
                error
            }
        }
    }

    fn done(&self, count: u64) -> Json {
        json!({ "status": "ok", "execution_count": count, "payload": [], "user_expressions": {} })
    }

    /// Answers a request that runs no code; `None` for one without an answer.
    async fn answer(&self, kind: &str, content: &Json) -> Option<(&'static str, Json)> {
        let code = content["code"].as_str().unwrap_or_default();
        let cursor = bytes_of(code, content["cursor_pos"].as_u64().map_or(usize::MAX, |at| at as usize));
        Some(match kind {
            "kernel_info_request" => ("kernel_info_reply", self.info()),
            "is_complete_request" => ("is_complete_reply", self.check(code).await),
            "complete_request" => ("complete_reply", self.complete(code, cursor).await),
            "inspect_request" => ("inspect_reply", self.inspect(code, cursor).await),
            "history_request" => ("history_reply", json!({ "status": "ok", "history": [] })),
            "comm_info_request" => ("comm_info_reply", json!({ "status": "ok", "comms": {} })),
            _ => return None,
        })
    }

    fn info(&self) -> Json {
        let engine = self.session.engine();
        let (mime, extension) = match engine {
            EngineName::Python => ("text/x-python", ".py"),
            EngineName::Node => ("text/javascript", ".js"),
            EngineName::Bash | EngineName::Kaish => ("text/x-sh", ".sh"),
        };
        let name = self.session.name();
        json!({
            "status": "ok", "protocol_version": PROTOCOL, "implementation": "ryokan",
            "implementation_version": env!("CARGO_PKG_VERSION"),
            "language_info": {
                "name": language(engine), "version": "", "mimetype": mime, "file_extension": extension,
                "pygments_lexer": language(engine), "nbconvert_exporter": "python",
            },
            "banner": format!("ryokan kernel {name}: ryokan checkpoint {name}, ryokan undo {name}, ryokan shell {name}"),
            "help_links": [], "supported_features": [],
        })
    }

    async fn check(&self, code: &str) -> Json {
        match self.session.with(async |kernel| kernel.check(code).await).await {
            Ok(checked) => match checked.status {
                CodeStatus::Complete => json!({ "status": "complete" }),
                CodeStatus::Incomplete => json!({ "status": "incomplete", "indent": checked.indent }),
                CodeStatus::Invalid => json!({ "status": "invalid" }),
            },
            Err(_) => json!({ "status": "unknown" }),
        }
    }

    async fn complete(&self, code: &str, cursor: usize) -> Json {
        match self.session.with(async |kernel| kernel.complete(code, cursor).await).await {
            Ok(found) => json!({
                "status": "ok", "matches": found.matches, "metadata": {},
                "cursor_start": characters_of(code, found.start), "cursor_end": characters_of(code, cursor),
            }),
            Err(error) => failed(&error),
        }
    }

    /// What the variable at the cursor is.
    async fn inspect(&self, code: &str, cursor: usize) -> Json {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let begin = code[..cursor]
            .rfind(|c| !is_name(c))
            .map_or(0, |at| at + code[at..].chars().next().map_or(1, char::len_utf8));
        let end = code[cursor..].find(|c| !is_name(c)).map_or(code.len(), |at| cursor + at);
        let name = &code[begin..end];
        let vars = match self.session.with(async |kernel| kernel.vars().await).await {
            Ok(vars) => vars,
            Err(error) => return failed(&error),
        };
        match vars.iter().find(|var| var.name == name) {
            Some(var) => {
                let text = format!("{}: {}\n{}", var.name, var.type_name, var.summary);
                json!({ "status": "ok", "found": true, "data": { "text/plain": text }, "metadata": {} })
            }
            None => json!({ "status": "ok", "found": false, "data": {}, "metadata": {} }),
        }
    }
}

fn outcome(done: Result<()>) -> Json {
    done.map_or_else(|error| failed(&error), |()| json!({ "status": "ok" }))
}

fn failed(error: &Error) -> Json {
    json!({ "status": "error", "ename": error.code.name(), "evalue": error.message, "traceback": [] })
}

/// The byte at which a character begins.
fn bytes_of(text: &str, character: usize) -> usize {
    text.char_indices().nth(character).map_or(text.len(), |(at, _)| at)
}

/// The number of characters before a byte.
fn characters_of(text: &str, byte: usize) -> usize {
    text.char_indices().take_while(|(at, _)| *at < byte).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_positions_convert() {
        let text = "aä€😀b";
        for (character, (byte, _)) in text.char_indices().enumerate() {
            assert_eq!((bytes_of(text, character), characters_of(text, byte)), (byte, character));
        }
        assert_eq!((bytes_of(text, 99), characters_of(text, 99)), (text.len(), 5));
    }
}
