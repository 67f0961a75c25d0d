//! Starts the daemon if none answers, once for any number of concurrent command lines.
//!
//! ```text
//! connect ─ answers ─▶ done
//!    └ refused ─▶ lock ─▶ connect again ─ answers ─▶ done (another process started it)
//!                              └ refused ─▶ ryokand --on-demand ─▶ connect until the deadline ─▶ done | end of its log
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, MetadataExt as _, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use tokio::time::Instant;

use super::failure::Failure;
use super::paths;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::limits;
use crate::daemon::EXIT_ANOTHER_RUNS;
use crate::rpc::client::HostClient;

/// Pause between attempts to start a daemon while another one stops.
const RESTART_INTERVAL: Duration = Duration::from_millis(250);
/// Interval at which the socket and the lock are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Lines of the daemon's log shown after a failed start.
const LOG_LINES: usize = 15;
/// Bytes of the log's end read for that.
const LOG_TAIL_BYTES: u64 = 16 << 10;

/// Connects to the daemon on `socket`, and starts it if none answers.
pub async fn connect(socket: &Path, client: &str, on_terminal: bool) -> Result<HostClient, Failure> {
    match HostClient::connect_own(socket, client).await {
        Err(error) if error.code == ErrorCode::Unavailable && is_unserved(socket) => {}
        answered => return Ok(answered?),
    }
    let deadline = Instant::now() + limits::DAEMON_START;
    let _lock = lock(socket, deadline).await?;
    if let Ok(host) = HostClient::connect_own(socket, client).await {
        return Ok(host);
    }
    if on_terminal {
        eprintln_quietly("starting ryokand…");
    }
    let (stop_deadline, mut noticed) = (Instant::now() + limits::DAEMON_EXIT_WAIT, false);
    let mut daemon = Daemon::spawn()?;
    let mut deadline = deadline;
    loop {
        if !is_unserved(socket) {
            return Ok(HostClient::connect_own(socket, client).await?);
        }
        match daemon.has_failed() {
            // A stopping daemon no longer listens but still holds its data.
            Some(Failed::AnotherRuns) if Instant::now() < stop_deadline => {
                if !std::mem::replace(&mut noticed, true) {
                    eprintln_quietly("waiting for a stopping ryokand…");
                }
                tokio::time::sleep(RESTART_INTERVAL).await;
                daemon = Daemon::spawn()?;
                deadline = Instant::now() + limits::DAEMON_START;
            }
            Some(why) => return Err(daemon.failure(&why.to_string()).into()),
            None => {}
        }
        if Instant::now() >= deadline {
            return Err(daemon.failure(&format!("no socket after {:?}", limits::DAEMON_START)).into());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Whether the socket is missing or was left by a dead daemon.
fn is_unserved(socket: &Path) -> bool {
    match std::os::unix::net::UnixStream::connect(socket) {
        Ok(_) => false,
        Err(e) => matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused),
    }
}

async fn lock(socket: &Path, deadline: Instant) -> Result<Flock<File>> {
    let dir = socket.parent().unwrap_or(Path::new("/"));
    let failed = |e: &dyn std::fmt::Display| Error::unavailable(format!("could not prepare {}: {e}", dir.display()));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| failed(&e))?;
    // Another user may have made it meanwhile.
    let found = std::fs::symlink_metadata(dir).map_err(|e| failed(&e))?;
    if !found.is_dir() || found.uid() != nix::unistd::geteuid().as_raw() || found.mode() & 0o022 != 0 {
        return Err(failed(&"it is not a directory that only you can change"));
    }
    let path = dir.join("autostart.lock");
    let open = || OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let mut file = open().map_err(|e| failed(&e))?;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(locked),
            Err((back, nix::errno::Errno::EWOULDBLOCK)) if Instant::now() < deadline => file = back,
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                return Err(Error::unavailable(format!(
                    "another ryokan process holds {} for too long",
                    path.display()
                ))
                .hint("check whether that process hangs while it starts ryokand"));
            }
            Err((_, errno)) => return Err(failed(&errno)),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Why a daemon did not start.
enum Failed {
    AnotherRuns,
    Ended(String),
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failed::AnotherRuns => f.write_str("another ryokand holds its data directory"),
            Failed::Ended(how) => f.write_str(how),
        }
    }
}

struct Daemon {
    child: std::process::Child,
    log: PathBuf,
    /// Offset at which this daemon's lines begin.
    log_start: u64,
}

impl Daemon {
    fn spawn() -> Result<Daemon> {
        let dir = paths::state_dir()?;
        let path = dir.join("ryokand.log");
        let no_log = |e: io::Error| Error::unavailable(format!("could not open the log {}: {e}", path.display()));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(no_log)?;
        let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&path).map_err(no_log)?;
        let log_start = log.metadata().map_err(no_log)?.len();
        let program = program();
        let mut command = Command::new(&program);
        command.arg("--on-demand").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Its own process group: the terminal's Ctrl-C and hang-up do not reach it. It stops by itself when idle.
        command.process_group(0).current_dir("/");
        let child = command.spawn().map_err(|e| {
            Error::unavailable(format!("could not start {}: {e}", program.display()))
                .hint("install ryokand beside ryokan or in PATH")
        })?;
        Ok(Daemon { child, log: path, log_start })
    }

    /// Why it failed to start, if it did.
    fn has_failed(&mut self) -> Option<Failed> {
        match self.child.try_wait() {
            Ok(Some(status)) if status.code() == Some(EXIT_ANOTHER_RUNS.into()) => Some(Failed::AnotherRuns),
            Ok(Some(status)) => Some(Failed::Ended(format!("it exited with {status}"))),
            Ok(None) => None,
            Err(e) => Some(Failed::Ended(e.to_string())),
        }
    }

    fn failure(&self, why: &str) -> Error {
        let lines = self.last_lines().unwrap_or_default();
        let shown = if lines.is_empty() { String::new() } else { format!("; its log says:\n{lines}") };
        Error::unavailable(format!("ryokand did not start: {why}{shown}"))
            .hint(format!("read the full log {}, or check the host with `ryokan doctor`", self.log.display()))
    }

    fn last_lines(&self) -> io::Result<String> {
        let mut log = File::open(&self.log)?;
        let length = log.metadata()?.len();
        log.seek(SeekFrom::Start(self.log_start.max(length.saturating_sub(LOG_TAIL_BYTES))))?;
        let mut tail = Vec::new();
        log.take(LOG_TAIL_BYTES).read_to_end(&mut tail)?;
        let tail = String::from_utf8_lossy(&tail);
        let lines: Vec<&str> = tail.lines().collect();
        let last = lines.len().saturating_sub(LOG_LINES);
        Ok(lines[last..].iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n"))
    }
}

/// The daemon's program: beside this one, else in `PATH`.
pub fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|me| Some(me.parent()?.join("ryokand")));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from("ryokand"))
}

fn eprintln_quietly(text: &str) {
    use io::Write;
    let _ = writeln!(io::stderr(), "{text}");
}
