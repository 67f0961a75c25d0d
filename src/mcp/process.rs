//! A stdio server's process: start, standard error, end.
//!
//! The server leads its own process group, which is killed when [`Process`] is dropped: on
//! unregistering, with its kernel, at the daemon's exit. The leader stays unreaped until then, so
//! the group's id cannot be reused.
//!
//! If the daemon itself is killed, the server's standard input closes, at which servers end. The
//! next daemon finds and ends the others by the mark in their environment (`orphans.rs`).

use std::collections::VecDeque;
use std::process::Stdio;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};

use super::limits;
use super::orphans::MARK;

/// The account that runs a server when the daemon is root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Group id; there are no supplementary groups.
    pub gid: u32,
}

/// Time limits. Tests use shorter ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// For a server to start, answer `initialize` and list its tools.
    pub start: Duration,
    /// First delay before restarting a dead server.
    pub backoff_first: Duration,
    /// Longest such delay.
    pub backoff_max: Duration,
    /// Between closing the server's input and killing it.
    pub stop_grace: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            start: crate::core::limits::MCP_START,
            backoff_first: limits::BACKOFF_FIRST,
            backoff_max: limits::BACKOFF_MAX,
            stop_grace: limits::STOP_GRACE,
        }
    }
}

/// Looks up an environment variable.
pub type Environment = Rc<dyn Fn(&str) -> Option<String>>;

/// The settings for starting servers.
#[derive(Clone)]
pub struct Launch {
    /// The daemon's environment, for `${VAR}` and for `PATH`, `HOME` and `LANG`.
    pub env: Environment,
    /// An account other than the daemon's own.
    pub account: Option<Account>,
    /// The mark of this daemon's servers, for [`super::orphans::end`]: its runtime directory.
    pub mark: String,
    /// Time limits.
    pub timing: Timing,
}

impl Launch {
    /// Settings with this process's own environment and account.
    pub fn of_process(mark: impl Into<String>) -> Self {
        Self {
            env: Rc::new(|name| std::env::var(name).ok()),
            account: None,
            mark: mark.into(),
            timing: Timing::default(),
        }
    }
}

/// A running server with its process group.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    group: Pid,
    tail: Arc<Mutex<VecDeque<u8>>>,
    drain: tokio::task::AbortHandle,
}

/// Both ends of a server's standard streams.
pub(super) type Pipes = (ChildStdout, ChildStdin);

/// Why a server did not start. An account that may not execute it is named.
fn could_not_start(command: &str, account: Option<Account>, error: &std::io::Error) -> String {
    let failed = format!("could not start {command:?}: {error}");
    match account.filter(|_| error.kind() == std::io::ErrorKind::PermissionDenied) {
        None => failed,
        Some(Account { uid, gid }) => format!(
            "{failed}: it runs as sandbox.worker_user (uid {uid}, gid {gid}); let that account execute the program, enter \
             every directory above it and read its interpreter, or configure another account"
        ),
    }
}

impl Process {
    /// Starts a program with only `PATH`, `HOME` and `LANG` of the daemon's environment.
    pub(super) fn start(
        command: &str,
        args: &[String],
        env: &[(String, String)],
        launch: &Launch,
    ) -> Result<(Process, Pipes), String> {
        let mut program = Command::new(command);
        program.args(args).env_clear().env(MARK, &launch.mark);
        for name in ["PATH", "HOME", "LANG"] {
            if let Some(value) = (launch.env)(name) {
                program.env(name, value);
            }
        }
        program.envs(env.iter().map(|(name, value)| (name, value)));
        program.current_dir((launch.env)("HOME").filter(|_| launch.account.is_none()).unwrap_or_else(|| "/".into()));
        program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        program.process_group(0).kill_on_drop(true);
        if let Some(account) = launch.account {
            program.uid(account.uid).gid(account.gid).env("HOME", "/");
        }
        let mut child = program.spawn().map_err(|error| could_not_start(command, launch.account, &error))?;
        let pipes = child.stdout.take().zip(child.stdin.take());
        let (pid, pipes, stderr) = match (child.id(), pipes, child.stderr.take()) {
            (Some(pid), Some(pipes), Some(stderr)) => (pid, pipes, stderr),
            _ => return Err(format!("{command:?} ended before it began")),
        };
        let tail = Arc::new(Mutex::new(VecDeque::with_capacity(limits::STDERR_TAIL_BYTES)));
        let drain = tokio::spawn(drain(stderr, Arc::clone(&tail))).abort_handle();
        Ok((Process { child, group: Pid::from_raw(pid.cast_signed()), tail, drain }, pipes))
    }

    /// How the server ended, if it did. It stays unreaped.
    pub(super) fn ended(&self) -> Option<String> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.group), flags) {
            Ok(WaitStatus::StillAlive) => None,
            Ok(WaitStatus::Exited(_, code)) => Some(format!("exited with code {code}")),
            Ok(WaitStatus::Signaled(_, signal, _)) => Some(format!("was killed by {signal}")),
            Ok(_) => None,
            Err(_) => Some("ended".into()),
        }
    }

    /// Waits for the server's end, at most that long.
    pub(super) async fn wait(&self, within: Duration) -> Option<String> {
        const LOOK: Duration = Duration::from_millis(10);
        let deadline = tokio::time::Instant::now() + within;
        loop {
            match self.ended() {
                Some(how) => return Some(how),
                None if tokio::time::Instant::now() >= deadline => return None,
                None => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// The end of its standard error, as one line.
    pub(super) fn last_words(&self) -> String {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = tail.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let last = lines[lines.len().saturating_sub(4)..].join(" | ");
        super::convert::printable(&last, limits::ERROR_BYTES / 2)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The group may be gone already.
        let _ = killpg(self.group, Signal::SIGKILL);
        let _ = self.child.start_kill();
        self.drain.abort();
    }
}

async fn drain(mut stderr: ChildStderr, tail: Arc<Mutex<VecDeque<u8>>>) {
    let mut chunk = [0; 4096];
    while let Ok(read @ 1..) = stderr.read(&mut chunk).await {
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.extend(&chunk[..read]);
        let beyond = tail.len().saturating_sub(limits::STDERR_TAIL_BYTES);
        tail.drain(..beyond);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denied_server_names_account() {
        let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let absent = std::io::Error::from(std::io::ErrorKind::NotFound);
        let account = Some(Account { uid: 65534, gid: 65533 });
        let said = could_not_start("/root/server", account, &denied);
        assert!(said.contains("sandbox.worker_user (uid 65534, gid 65533)"), "{said}");
        assert!(!could_not_start("/root/server", account, &absent).contains("worker_user"));
        assert!(!could_not_start("/root/server", None, &denied).contains("worker_user"));
    }
}
