//! Runs `git`: one command at a time, without hooks, with a bounded output.
//!
//! Each command inherits the log, [`ProgramLog`], as its standard error.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::resource::Resource;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::programs::{Place, ProgramLog, RunningGroup};
use crate::sys::process::{bound, make_private_files};

/// Settings that keep git from running other programs and from work of its own.
const SETTINGS: [&str; 10] = [
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.splitIndex=false",
    "core.sparseCheckout=false",
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
    log: ProgramLog,
    version: OnceCell<String>,
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
    /// Bounds of its resources.
    pub limits: &'a [(Resource, u64)],
    /// Whether no other user can read the files that it makes.
    pub is_private: bool,
}

impl Git {
    /// Opens the log, and waits for commands of a former daemon. Blocks.
    ///
    /// # Errors
    /// `deadline` if such a command does not end.
    pub fn open(log: PathBuf) -> Result<Git> {
        let failed = |error: std::io::Error| Error::internal(format!("{}: {error}", log.display()));
        let opened = ProgramLog::open(&log, limits::GIT_ORPHAN).map_err(failed)?;
        let log = opened.ok_or_else(|| Error::deadline("a git command of a former daemon does not end"))?;
        Ok(Git { log, version: OnceCell::new() })
    }

    /// The version of the host's git, as the program prints it.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn version(&self) -> Result<String> {
        let ask = || async {
            let printed = self.ok(Call { args: &["version"], ..Call::default() }).await?;
            Ok::<_, Error>(String::from_utf8_lossy(&printed).lines().next().unwrap_or_default().to_owned())
        };
        self.version.get_or_try_init(ask).await.cloned()
    }

    /// Runs a command; returns its exit code and its output.
    pub(super) async fn run(&self, call: Call<'_>) -> Result<(i32, Vec<u8>)> {
        self.run_to(call).await.map(|(code, output, _)| (code, output))
    }

    /// As [`Self::run`], with the place of its text in the log.
    async fn run_to(&self, call: Call<'_>) -> Result<(i32, Vec<u8>, Place)> {
        let started = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::unsupported("git is not installed on this host")
                .reason("git")
                .hint("install git, then try again"),
            _ => Error::unavailable(format!("git could not be started: {error}")),
        };
        let failed = |error: std::io::Error| Error::unavailable(format!("git: {error}"));
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
        let (errors, place) = self.log.begin().map_err(failed)?;
        command.stderr(errors);
        if !call.limits.is_empty() {
            bound(command.as_std_mut(), call.limits);
        }
        if call.is_private {
            make_private_files(command.as_std_mut());
        }
        let mut child = command.spawn().map_err(started)?;
        let mut running = RunningGroup::of(child.id());
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
        running.ended();
        Ok((status.code().unwrap_or(-1), output, place))
    }

    /// Runs a command that must succeed; returns its output.
    pub(super) async fn ok(&self, call: Call<'_>) -> Result<Vec<u8>> {
        self.answer(call, |_| false).await.map(Option::unwrap_or_default)
    }

    /// Runs a command that says "no" by exit code 1; returns its output unless it does. Any other failure is an error.
    pub(super) async fn asks(&self, call: Call<'_>) -> Result<Option<Vec<u8>>> {
        self.answer(call, |code| code == 1).await
    }

    async fn answer(&self, call: Call<'_>, is_no: impl Fn(i32) -> bool) -> Result<Option<Vec<u8>>> {
        let name = call.args.first().copied().unwrap_or_default().to_owned();
        let path = call.repository.map(|path| format!(" in {}", path.display())).unwrap_or_default();
        match self.run_to(call).await? {
            (0, output, _) => Ok(Some(output)),
            (code, ..) if is_no(code) => Ok(None),
            // Programs of the user, such as git-lfs, write there, too.
            (code, _, place) => {
                let said = self.log.said_since(&place);
                Err(Error::refused(format!("git {name}{path} failed ({code})")).reason("git").said(said))
            }
        }
    }
}
