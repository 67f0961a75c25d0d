//! Runs `git`: one command at a time, without hooks, with a bounded output.
//!
//! Each command inherits a locked log file as its standard error. A daemon that finds the lock taken waits: a command of
//! the former daemon still runs.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

use crate::core::error::{Error, Result};
use crate::core::limits;

/// Size from which on the log is emptied, bytes.
const LOG_BYTES: u64 = 1 << 20;
/// Part of the log that an error repeats, bytes.
const SHOWN_BYTES: u64 = 500;

/// Settings that keep git from running other programs and from work of its own.
const SETTINGS: [&str; 9] = [
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.splitIndex=false",
    "core.quotePath=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "submodule.recurse=false",
    "advice.addEmbeddedRepo=false",
    "core.alternateRefsCommand=",
];

/// The variables of the daemon's environment that git receives.
const KEPT: [&str; 3] = ["PATH", "HOME", "XDG_CONFIG_HOME"];

/// Runs git commands, one at a time.
#[derive(Debug)]
pub struct Git {
    log: Flock<File>,
}

/// One git command.
#[derive(Debug, Default)]
pub(super) struct Call<'a> {
    pub args: &'a [&'a str],
    pub env: &'a [(&'a str, &'a Path)],
    /// The repository's work tree.
    pub repository: Option<&'a Path>,
    /// Bytes for its standard input.
    pub input: &'a [u8],
    /// A file as its standard input.
    pub from: Option<&'a Path>,
    /// A new file for its standard output.
    pub to: Option<&'a Path>,
}

/// Kills a command with everything that it started, unless it has ended.
struct Running(Option<i32>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended just now.
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
    }
}

impl Git {
    /// Opens the log, and waits for commands of a former daemon. Blocks.
    ///
    /// # Errors
    /// `deadline` if such a command does not end.
    pub fn open(log: PathBuf) -> Result<Git> {
        let failed = |error: std::io::Error| Error::internal(format!("{}: {error}", log.display()));
        let mut file = File::options().create(true).append(true).read(true).open(&log).map_err(failed)?;
        let deadline = std::time::Instant::now() + limits::GIT_ORPHAN;
        let locked = loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(locked) => break locked,
                Err((unlocked, Errno::EWOULDBLOCK)) if std::time::Instant::now() < deadline => {
                    file = unlocked;
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Err((_, Errno::EWOULDBLOCK)) => {
                    return Err(Error::deadline("a git command of a former daemon does not end"));
                }
                Err((_, error)) => return Err(failed(error.into())),
            }
        };
        Ok(Git { log: locked })
    }

    /// Runs a command; returns its exit code and its output.
    pub(super) async fn run(&self, call: Call<'_>) -> Result<(i32, Vec<u8>)> {
        let started = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::unsupported("git is not installed on this host")
                .reason("git")
                .hint("install git, then try again"),
            _ => Error::unavailable(format!("git could not be started: {error}")),
        };
        let failed = |error: std::io::Error| Error::unavailable(format!("git: {error}"));
        if self.log.metadata().map_err(failed)?.len() > LOG_BYTES {
            self.log.set_len(0).map_err(failed)?;
        }
        let mut command = Command::new("git");
        command.env_clear().envs(KEPT.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs([("LC_ALL", "C"), ("GIT_TERMINAL_PROMPT", "0"), ("GIT_OPTIONAL_LOCKS", "0")]);
        command.env("GIT_NO_LAZY_FETCH", "1").envs(call.env.iter().copied());
        for setting in SETTINGS {
            command.args(["-c", setting]);
        }
        if let Some(path) = call.repository {
            command.arg("-C").arg(path).arg("--git-dir").arg(path.join(".git")).arg("--work-tree").arg(path);
        }
        command.args(call.args).process_group(0).kill_on_drop(true);
        command.stdin(match call.from {
            Some(file) => Stdio::from(File::open(file).map_err(failed)?),
            None => Stdio::piped(),
        });
        command.stdout(match call.to {
            Some(file) => Stdio::from(File::create(file).map_err(failed)?),
            None => Stdio::piped(),
        });
        command.stderr(Stdio::from(self.log.try_clone().map_err(failed)?));
        let mut child = command.spawn().map_err(started)?;
        let mut running = Running(child.id().and_then(|id| i32::try_from(id).ok()));
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let feed = async {
            if let Some(mut stdin) = stdin {
                // A command that needs no more of it closes it.
                let _ = stdin.write_all(call.input).await;
            }
        };
        let read = async {
            let mut output = Vec::new();
            if let Some(stdout) = stdout {
                stdout.take(limits::GIT_OUTPUT_BYTES + 1).read_to_end(&mut output).await.map_err(failed)?;
            }
            match output.len() as u64 > limits::GIT_OUTPUT_BYTES {
                true => Err(Error::refused("git's output is too large").reason("git_output")),
                false => Ok(output),
            }
        };
        let ((), output) = futures::join!(feed, read);
        let (output, status) = (output?, child.wait().await.map_err(failed)?);
        running.0 = None;
        Ok((status.code().unwrap_or(-1), output))
    }

    /// Runs a command that must succeed; returns its output.
    pub(super) async fn ok(&self, call: Call<'_>) -> Result<Vec<u8>> {
        let (name, at) = (call.args.first().copied().unwrap_or_default().to_owned(), self.log.metadata());
        let path = call.repository.map(|path| format!(" in {}", path.display())).unwrap_or_default();
        match self.run(call).await? {
            (0, output) => Ok(output),
            (code, _) => {
                let said = self.said_since(at.map(|meta| meta.len()).unwrap_or_default());
                Err(Error::refused(format!("git {name}{path} failed ({code}): {said}")).reason("git"))
            }
        }
    }

    fn said_since(&self, at: u64) -> String {
        let mut bytes = Vec::new();
        let mut log: &File = &self.log;
        // The text is for people; without it the exit code remains.
        let _ = log.seek(SeekFrom::Start(at)).and_then(|_| log.take(SHOWN_BYTES).read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).trim().replace('\n', "; ")
    }
}
