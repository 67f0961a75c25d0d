//! External commands whose output goes straight to the session's pipes or the next pipeline stage.
//!
//! kaish passes a command's output through 10 MiB rings after the command has ended: lossy and
//! late. Here the child writes directly to the session's own pipe, and pipeline output is forwarded
//! while the command runs. Captured output (`$(…)`, `> file`) is complete or the command fails.
//! Background jobs remain with kaish.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use kaish_kernel::interpreter::ExecResult;
use kaish_kernel::scheduler::{PipeReader, PipeWriter};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

/// Destination of a child's output stream.
pub enum Target {
    /// The session's pipe.
    Session(Stdio),
    /// The next pipeline stage.
    Stage,
    /// Kept for kaish to capture or redirect: complete, or the command fails.
    Kept,
}

/// A fully resolved command.
pub struct Run {
    /// Its name as written, for messages.
    pub name: String,
    /// The program.
    pub executable: PathBuf,
    /// Its arguments.
    pub argv: Vec<String>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// Its whole environment.
    pub env: Vec<(String, String)>,
    /// Bytes of standard input that were read already.
    pub stdin_prefix: Option<Vec<u8>>,
    /// The rest of standard input.
    pub stdin_pipe: Option<PipeReader>,
    /// Standard output.
    pub stdout: Target,
    /// Standard error.
    pub stderr: Target,
    /// Input of the next pipeline stage, if a target is [`Target::Stage`].
    pub stage: Option<PipeWriter>,
    /// Ends the command when cancelled.
    pub cancel: CancellationToken,
    /// Time from `SIGTERM` to `SIGKILL`.
    pub kill_grace: Duration,
}

/// Limit of captured standard output (`$(…)`, `> file`), bytes. kaish copies it up to three times,
/// so a larger limit would not fit a kernel's memory. Its own limit is 10 MiB.
const CAPTURED_BYTES: usize = 64 << 20;
/// Limit of standard error kept for a redirect, bytes.
const KEPT_BYTES: usize = 16 << 20;
/// Exit code of a command whose captured output exceeded the limit; same as kaish's.
const CODE_TRUNCATED: i64 = 3;
const COPY_BYTES: usize = 64 << 10;

/// Runs the command to its end.
pub async fn run(mut run: Run) -> ExecResult {
    let mut command = Command::new(&run.executable);
    command.args(&run.argv).current_dir(&run.cwd).env_clear().envs(run.env.drain(..));
    command.process_group(0).kill_on_drop(true);
    let has_stdin = run.stdin_prefix.is_some() || run.stdin_pipe.is_some();
    command.stdin(if has_stdin { Stdio::piped() } else { Stdio::null() });
    let merged = matches!((&run.stdout, &run.stderr), (Target::Stage, Target::Stage));
    let mut shared = None;
    if merged {
        // One pipe for both, as in `2>&1
        // `, which keeps the order of writes.
        match merged_pipe(&mut command) {
            Ok(reader) => shared = Some(reader),
            Err(error) => return ExecResult::failure(126, format!("{}: {error}", run.name)),
        }
    } else {
        command.stdout(stdio(&mut run.stdout)).stderr(stdio(&mut run.stderr));
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let code = if error.kind() == io::ErrorKind::PermissionDenied { 126 } else { 127 };
            return ExecResult::failure(code, format!("{}: {error}", run.name));
        }
    };
    // The parent's copies of the child's ends close here; otherwise a merged pipe would never end.
    drop(command);
    drive(&mut child, run, shared).await
}

fn stdio(target: &mut Target) -> Stdio {
    match std::mem::replace(target, Target::Stage) {
        Target::Session(stdio) => stdio,
        Target::Stage => Stdio::piped(),
        Target::Kept => {
            *target = Target::Kept;
            Stdio::piped()
        }
    }
}

fn merged_pipe(command: &mut Command) -> io::Result<tokio::net::unix::pipe::Receiver> {
    let (reader, writer) = io::pipe()?;
    command.stdout(Stdio::from(std::os::fd::OwnedFd::from(writer.try_clone()?)));
    command.stderr(Stdio::from(std::os::fd::OwnedFd::from(writer)));
    tokio::net::unix::pipe::Receiver::from_owned_fd(reader.into())
}

async fn drive(child: &mut Child, mut run: Run, shared: Option<tokio::net::unix::pipe::Receiver>) -> ExecResult {
    let feeding = child.stdin.take().map(|stdin| {
        let (prefix, pipe) = (run.stdin_prefix.take(), run.stdin_pipe.take());
        Aborted(tokio::spawn(feed(stdin, prefix, pipe)))
    });
    let group = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
    let stage = run.stage.take();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let captures = matches!(run.stdout, Target::Kept);
    let mut captured = Kept::at_most(CAPTURED_BYTES);
    let mut kept = Kept::at_most(KEPT_BYTES);
    let status = {
        let streams = async {
            match (shared, stdout, stderr) {
                (Some(both), _, _) => pass_on(both, stage).await,
                (None, Some(out), Some(err)) if captures => {
                    tokio::join!(captured.take(out), kept.take(err));
                }
                (None, Some(out), None) if captures => captured.take(out).await,
                (None, Some(out), Some(err)) => {
                    tokio::join!(pass_on(out, stage), kept.take(err));
                }
                (None, Some(out), None) => pass_on(out, stage).await,
                (None, None, Some(err)) => kept.take(err).await,
                (None, None, None) => {}
            }
        };
        // A stream ends when the last process closes the pipe, perhaps a grandchild. As in a shell,
        // the command has ended when both the child and its pipes have.
        let whole = async { tokio::join!(child.wait(), streams).0 };
        tokio::select! {
            status = whole => Some(status),
            () = run.cancel.cancelled() => None,
        }
    };
    drop(feeding);
    let code = match status {
        Some(Ok(status)) => exit_code(status),
        Some(Err(error)) => return ExecResult::failure(1, format!("{}: cannot wait: {error}", run.name)),
        None => {
            end_group(child, group, run.kill_grace).await;
            130
        }
    };
    let mut result = ExecResult::success_text_or_bytes(captured.bytes).with_code(code);
    if captured.full {
        result.code = CODE_TRUNCATED;
    }
    result.err = kept.text(&run.name);
    if captured.full {
        result.err.push_str(&format!(
            "{}: output truncated: more than {} MiB cannot be captured; let the command write the file itself\n",
            run.name,
            CAPTURED_BYTES >> 20
        ));
    }
    result
}

/// Output kept for kaish.
struct Kept {
    bytes: Vec<u8>,
    most: usize,
    full: bool,
}

impl Kept {
    fn at_most(most: usize) -> Self {
        Kept { bytes: Vec::new(), most, full: false }
    }

    /// Keeps the output; when the limit is reached, closes the pipe, and the command gets a broken
    /// pipe.
    async fn take(&mut self, mut from: impl AsyncRead + Unpin) {
        let mut buffer = vec![0; COPY_BYTES];
        while let Ok(n @ 1..) = from.read(&mut buffer).await {
            let room = (self.most - self.bytes.len()).min(n);
            self.bytes.extend(&buffer[..room]);
            if room < n {
                self.full = true;
                return;
            }
        }
    }

    fn text(self, name: &str) -> String {
        let mut text = String::from_utf8_lossy(&self.bytes).into_owned();
        if self.full {
            text.push_str(&format!("\n{name}: standard error truncated: more than {} MiB\n", self.most >> 20));
        }
        text
    }
}

async fn pass_on(mut from: impl AsyncRead + Unpin, stage: Option<PipeWriter>) {
    let Some(stage) = stage else {
        return;
    };
    let mut buffer = vec![0; COPY_BYTES];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        let mut rest = &buffer[..n];
        while !rest.is_empty() {
            match stage.write_bytes(rest).await {
                Ok(written) => rest = &rest[written..],
                // The next stage reads no more; dropping our end tells the child.
                Err(_) => return,
            }
        }
    }
}

async fn feed(mut stdin: tokio::process::ChildStdin, prefix: Option<Vec<u8>>, pipe: Option<PipeReader>) {
    if let Some(prefix) = prefix
        && stdin.write_all(&prefix).await.is_err()
    {
        return;
    }
    let Some(mut pipe) = pipe else {
        return;
    };
    let mut buffer = vec![0; COPY_BYTES];
    while let Ok(n @ 1..) = pipe.read(&mut buffer).await {
        if stdin.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}

struct Aborted(tokio::task::JoinHandle<()>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn end_group(child: &mut Child, group: Option<Pid>, grace: Duration) {
    let signal = |signal| {
        if let Some(group) = group {
            // The group may be gone already.
            let _ = killpg(group, signal);
        }
    };
    signal(Signal::SIGTERM);
    // A stopped group would not handle its signal.
    signal(Signal::SIGCONT);
    if tokio::time::timeout(grace, child.wait()).await.is_err() {
        signal(Signal::SIGKILL);
        let _ = child.wait().await;
    } else {
        // Grandchildren that outlived their parent keep the group's id in use.
        signal(Signal::SIGKILL);
    }
}

fn exit_code(status: std::process::ExitStatus) -> i64 {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => i64::from(code),
        (None, Some(signal)) => 128 + i64::from(signal),
        (None, None) => 1,
    }
}
