//! The context of a command: options, terminal, and the connection to the daemon.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Instant;

use super::args::Options;
use super::failure::Failure;
use super::paint::Paint;
use super::{autostart, paths};
use crate::core::info::KernelInfo;
use crate::daemon::paths::Mode;
use crate::rpc::client::{HostClient, KernelClient};

/// This program's name in journals.
pub const CLIENT: &str = concat!("ryokan-cli ", env!("CARGO_PKG_VERSION"));

/// The standard streams: which are terminals, and which may have colours.
pub struct Terminal {
    /// Whether a question can be asked.
    pub can_ask: bool,
    /// Whether stdin is a terminal.
    pub stdin: bool,
    /// Whether stdout is a terminal.
    pub stdout: bool,
    /// Whether stderr is a terminal.
    pub stderr: bool,
    /// For stdout.
    pub paint: Paint,
    /// For stderr.
    pub paint_stderr: Paint,
}

/// The context of a command.
pub struct Context {
    /// The command line's global options.
    pub options: Options,
    /// The standard streams.
    pub terminal: Terminal,
}

impl Context {
    pub fn new(options: Options) -> Self {
        let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
        let terminal = Terminal {
            can_ask: stdin.is_terminal() && stderr.is_terminal(),
            stdin: stdin.is_terminal(),
            stdout: stdout.is_terminal(),
            stderr: stderr.is_terminal(),
            paint: Paint::choose(options.color, &stdout),
            paint_stderr: Paint::choose(options.color, &stderr),
        };
        Context { options, terminal }
    }

    /// The daemon's socket, and whether to start a daemon: only for the default socket.
    pub fn socket(&self) -> Result<(PathBuf, bool), Failure> {
        match &self.options.socket {
            Some(socket) => Ok((socket.clone(), false)),
            None if self.options.system => Ok((paths::socket(Mode::System)?, false)),
            None => Ok((paths::socket(Mode::User)?, !self.options.no_autostart)),
        }
    }

    /// Connects to the daemon, and starts it if needed.
    pub async fn host(&self) -> Result<HostClient, Failure> {
        let (socket, may_start) = self.socket()?;
        let begun = Instant::now();
        let host = match may_start {
            true => autostart::connect(&socket, CLIENT, self.terminal.stderr).await?,
            false if self.options.socket.is_none() => HostClient::connect_own(&socket, CLIENT).await?,
            false => HostClient::connect(&socket, CLIENT).await?,
        };
        let (version, took) = (&host.info().version, begun.elapsed());
        tracing::info!(socket = %socket.display(), daemon = %version, ?took, "connected");
        Ok(host)
    }

    /// Opens a kernel by name or id.
    pub async fn kernel(&self, name: &str) -> Result<(KernelClient, KernelInfo), Failure> {
        open(&self.host().await?, name).await
    }

    /// Opens two kernels over one connection, for calls that take both.
    pub async fn two_kernels(&self, names: [&str; 2]) -> Result<[(KernelClient, KernelInfo); 2], Failure> {
        let host = self.host().await?;
        Ok([open(&host, names[0]).await?, open(&host, names[1]).await?])
    }

    /// Writes to stdout.
    pub fn print(&self, text: &str) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::of_output)
    }

    /// Writes one JSON document to stdout, indented.
    pub fn print_json(&self, json: &serde_json::Value) -> Result<(), Failure> {
        self.print(&format!("{json:#}\n"))
    }

    /// Writes JSON or, without `--json`, text.
    pub fn show(&self, json: impl FnOnce() -> serde_json::Value, text: impl FnOnce() -> String) -> Result<(), Failure> {
        match self.options.json {
            true => self.print_json(&json()),
            false => self.print(&text()),
        }
    }

    /// Writes a line for people to stderr; a closed stderr is no failure.
    pub fn say(&self, text: &str) {
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

async fn open(host: &HostClient, name: &str) -> Result<(KernelClient, KernelInfo), Failure> {
    let (kernel, info) = host.open_kernel(name).await?;
    let (id, engine) = (info.id, info.spec.engine.name());
    tracing::info!(kernel = %info.spec.name, %id, engine, state = %info.state, "kernel opened");
    Ok((kernel, info))
}
