//! Starting the daemon when none answers: once, however many command lines start at the same time.
//!
//! ```text
//! connect ─ answers ─▶ done
//!    └ nobody ─▶ lock ─▶ connect again ─ answers ─▶ done (another one started it)
//!                              └ nobody ─▶ ryokand --on-demand ─▶ connect until the deadline ─▶ done | its log's last lines
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
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

/// Pause between two tries to start a daemon while another one ends.
const ANOTHER_LOOK_AGAIN: Duration = Duration::from_millis(250);
/// Pause between two looks at what is not there yet.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How much of the daemon's log is shown when it does not start.
const LOG_LINES: usize = 15;
/// The longest end of the log that is read for that, bytes.
const LOG_TAIL_BYTES: u64 = 16 << 10;

/// The daemon on `socket`, started if none answers.
pub async fn connect(socket: &Path, client: &str, on_terminal: bool) -> Result<HostClient, Failure> {
    match HostClient::connect(socket, client).await {
        Err(error) if error.code == ErrorCode::Unavailable && nobody_listens(socket) => {}
        answered => return Ok(answered?),
    }
    let deadline = Instant::now() + limits::DAEMON_START;
    let _lock = lock(socket, deadline).await?;
    if let Ok(host) = HostClient::connect(socket, client).await {
        return Ok(host);
    }
    if on_terminal {
        eprintln_quietly("starting ryokand…");
    }
    let (ending, mut told) = (Instant::now() + limits::DAEMON_EXIT_WAIT, false);
    let mut daemon = Daemon::spawn()?;
    let mut deadline = deadline;
    loop {
        if !nobody_listens(socket) {
            return Ok(HostClient::connect(socket, client).await?);
        }
        match daemon.has_failed() {
            // One that ends takes its time, and listens no more.
            Some(Failed::AnotherRuns) if Instant::now() < ending => {
                if !std::mem::replace(&mut told, true) {
                    eprintln_quietly("waiting for a ryokand that is about to end…");
                }
                tokio::time::sleep(ANOTHER_LOOK_AGAIN).await;
                daemon = Daemon::spawn()?;
                deadline = Instant::now() + limits::DAEMON_START;
            }
            Some(why) => return Err(daemon.failure(&why.to_string()).into()),
            None => {}
        }
        if Instant::now() >= deadline {
            return Err(daemon.failure(&format!("no socket after {:?}", limits::DAEMON_START)).into());
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Whether there is no socket, or one that a dead daemon left.
fn nobody_listens(socket: &Path) -> bool {
    match std::os::unix::net::UnixStream::connect(socket) {
        Ok(_) => false,
        Err(e) => matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused),
    }
}

async fn lock(socket: &Path, deadline: Instant) -> Result<Flock<File>> {
    let folder = socket.parent().unwrap_or(Path::new("/"));
    let failed = |e: &dyn std::fmt::Display| Error::unavailable(format!("could not prepare {}: {e}", folder.display()));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|e| failed(&e))?;
    let path = folder.join("autostart.lock");
    let open = || OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let mut file = open().map_err(|e| failed(&e))?;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(locked),
            Err((back, nix::errno::Errno::EWOULDBLOCK)) if Instant::now() < deadline => file = back,
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                return Err(Error::unavailable(format!("another ryokan holds {} too long", path.display()))
                    .hint("see whether it hangs in starting ryokand"));
            }
            Err((_, errno)) => return Err(failed(&errno)),
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Why a daemon did not come.
enum Failed {
    AnotherRuns,
    Ended(String),
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failed::AnotherRuns => f.write_str("another one holds its data"),
            Failed::Ended(how) => f.write_str(how),
        }
    }
}

struct Daemon {
    child: std::process::Child,
    log: PathBuf,
    /// Where its own lines begin.
    log_start: u64,
}

impl Daemon {
    fn spawn() -> Result<Daemon> {
        let folder = paths::state_dir()?;
        let path = folder.join("ryokand.log");
        let no_log = |e: io::Error| Error::unavailable(format!("could not open the log {}: {e}", path.display()));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(no_log)?;
        let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&path).map_err(no_log)?;
        let log_start = log.metadata().map_err(no_log)?.len();
        let program = program();
        let mut command = Command::new(&program);
        command.arg("--on-demand").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Out of reach of the terminal's Ctrl-C and hang-up; it ends by itself when nobody needs it.
        command.process_group(0).current_dir("/");
        let child = command.spawn().map_err(|e| {
            Error::unavailable(format!("could not start {}: {e}", program.display()))
                .hint("install ryokand beside ryokan or in PATH")
        })?;
        Ok(Daemon { child, log: path, log_start })
    }

    /// Why it will not come, if that is known.
    fn has_failed(&mut self) -> Option<Failed> {
        match self.child.try_wait() {
            Ok(Some(status)) if status.code() == Some(EXIT_ANOTHER_RUNS.into()) => Some(Failed::AnotherRuns),
            Ok(Some(status)) => Some(Failed::Ended(format!("it ended with {status}"))),
            Ok(None) => None,
            Err(e) => Some(Failed::Ended(e.to_string())),
        }
    }

    fn failure(&self, why: &str) -> Error {
        let lines = self.last_lines().unwrap_or_default();
        let shown = if lines.is_empty() { String::new() } else { format!("; its log says:\n{lines}") };
        Error::unavailable(format!("ryokand did not start: {why}{shown}"))
            .hint(format!("the whole log: {}; what this host lacks: ryokan doctor", self.log.display()))
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
