//! `ryokan daemon`: the daemon's status, its end, and its log. None of them starts a daemon.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::{Args, Subcommand};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::Interest;

use super::context::{CLIENT, Context};
use super::failure::Failure;
use super::{exit, paths, render};
use crate::core::error::{Error, ErrorCode};
use crate::core::info::{DaemonInfo, KernelFilter};
use crate::core::quantity::format_size;
use crate::rpc::client::HostClient;
use crate::sys::pidfd;
use crate::sys::watched::watch;

/// Interval at which a followed log is read.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(250);
/// Bytes of the log read at once.
const LOG_CHUNK_BYTES: u64 = 64 << 10;
/// Bytes of the log's end in which its last lines are searched.
const LOG_TAIL_BYTES: u64 = 4 << 20;

/// `ryokan daemon`
#[derive(Debug, Args)]
pub struct DaemonArgs {
    #[command(subcommand)]
    command: DaemonCommand,
}

#[derive(Debug, Subcommand)]
enum DaemonCommand {
    /// Show the daemon; exit code 3 if none answers
    Status,
    /// Stop the daemon and wait for its end; kernels are saved
    Stop,
    /// Print the end of the daemon's log
    Log(DaemonLogArgs),
}

/// `ryokan daemon log`
#[derive(Debug, Args)]
pub struct DaemonLogArgs {
    /// Continue with new lines until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// Number of last lines
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100)]
    lines: u32,
}

/// Shows, stops or reads the log of the daemon.
pub async fn daemon(context: &Context, args: DaemonArgs) -> Result<(), Failure> {
    match args.command {
        DaemonCommand::Status => status(context).await,
        DaemonCommand::Stop => stop(context).await,
        DaemonCommand::Log(args) => log(context, args).await,
    }
}

/// Connects to the daemon without starting one; `None` if none answers.
async fn answering(context: &Context) -> Result<(PathBuf, Option<HostClient>), Failure> {
    let (socket, _) = context.socket()?;
    match HostClient::connect(&socket, CLIENT).await {
        Ok(host) => Ok((socket, Some(host))),
        Err(error) if error.code == ErrorCode::Unavailable => Ok((socket, None)),
        Err(error) => Err(error.into()),
    }
}

async fn status(context: &Context) -> Result<(), Failure> {
    let (socket, host) = answering(context).await?;
    let Some(host) = host else {
        context.show(
            || serde_json::json!({ "running": false, "socket": socket }),
            || format!("no daemon answers on {}\n", socket.display()),
        )?;
        return Err(Failure::Quiet(exit::NOT_FOUND));
    };
    let (daemon, kernels) = (host.daemon().await?, host.list_kernels(&KernelFilter::default()).await?);
    let workers_memory: u64 = kernels.iter().map(|kernel| kernel.memory_bytes).sum();
    let live = kernels.iter().filter(|kernel| kernel.memory_bytes > 0).count();
    let now_ms = render::now_ms();
    let uptime_ms = now_ms.saturating_sub(daemon.started_at_ms).max(0);
    let version = &host.info().version;
    context.show(
        || {
            serde_json::json!({
                "running": true,
                "socket": socket,
                "version": version,
                "pid": daemon.pid,
                "started_at_ms": daemon.started_at_ms,
                "uptime_ms": uptime_ms,
                "memory_bytes": daemon.memory_bytes,
                "kernels": kernels.len(),
                "kernels_with_worker": live,
                "kernels_memory_bytes": workers_memory,
                "log_file": daemon.log_file,
                "log_unit": daemon.log_unit,
            })
        },
        || {
            let started = render::ago(daemon.started_at_ms, now_ms);
            format!(
                "ryokand {version}, pid {}, started {started}\nsocket   {}\nmemory   {}\nkernels  {}, {live} with a worker ({})\nlog      {}\n",
                daemon.pid,
                socket.display(),
                format_size(daemon.memory_bytes),
                kernels.len(),
                format_size(workers_memory),
                render::plain(&destination(&daemon)),
            )
        },
    )
}

fn destination(daemon: &DaemonInfo) -> String {
    match (daemon.log_file.as_str(), daemon.log_unit.as_str()) {
        ("", "") => "its standard error".to_owned(),
        ("", unit) => format!("journal of {unit}"),
        (file, _) => file.to_owned(),
    }
}

/// Sends SIGTERM and waits for the end of the process.
async fn stop(context: &Context) -> Result<(), Failure> {
    let (socket, host) = answering(context).await?;
    let Some(host) = host else {
        return context.show(
            || serde_json::json!({ "stopped": false, "socket": socket }),
            || format!("no daemon answers on {}\n", socket.display()),
        );
    };
    let pid = host.daemon().await?.pid;
    let no_process = |error: io::Error| {
        Error::unavailable(format!("process {pid} cannot be watched: {error}"))
            .hint("run this in the daemon's pid namespace")
    };
    let process = pidfd::open(Pid::from_raw(pid.cast_signed())).map_err(no_process)?;
    // The connection still answers, so the descriptor is that of the daemon and not of a later process.
    host.daemon().await?;
    pidfd::signal(process.as_fd(), Signal::SIGTERM).map_err(|error| {
        Error::refused(format!("daemon {pid} cannot be stopped: {error}"))
            .hint("only its own user and root may stop it")
    })?;
    let ended = watch(process, Interest::READABLE).map_err(no_process)?;
    drop(ended.readable().await.map_err(no_process)?);
    context.show(
        || serde_json::json!({ "stopped": true, "socket": socket, "pid": pid }),
        || format!("stopped ryokand (pid {pid})\n"),
    )
}

async fn log(context: &Context, args: DaemonLogArgs) -> Result<(), Failure> {
    let daemon = match answering(context).await?.1 {
        Some(host) => host.daemon().await?,
        None => {
            // An earlier daemon that a command started logged here.
            let file = paths::state_dir()?.join("ryokand.log");
            DaemonInfo { log_file: file.display().to_string(), ..DaemonInfo::default() }
        }
    };
    match (daemon.log_file.as_str(), daemon.log_unit.as_str()) {
        ("", "") => Err(Error::unsupported("the daemon logs to its standard error, which is no file")
            .hint("read it where the daemon was started")
            .into()),
        ("", unit) => {
            let mut journal = Command::new("journalctl");
            journal.args((!context.options.system).then_some("--user")).args(["--unit", unit, "--lines"]);
            journal.arg(args.lines.to_string()).args(args.follow.then_some("--follow"));
            let error = journal.exec();
            Err(Error::unavailable(format!("journalctl does not start: {error}")).into())
        }
        (file, _) => log_file(context, Path::new(file), args).await,
    }
}

/// Prints the last lines of a file, then follows it, also through its truncation and replacement.
async fn log_file(context: &Context, path: &Path, args: DaemonLogArgs) -> Result<(), Failure> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Error::not_found(format!("there is no log {}", path.display())),
        _ => Error::unavailable(format!("the log {} cannot be read: {error}", path.display())),
    };
    let mut file = File::open(path).map_err(failed)?;
    let mut at = tail_start(&mut file, args.lines).map_err(failed)?;
    loop {
        at += print_from(context, &mut file, at).map_err(failed)??;
        if !args.follow {
            return Ok(());
        }
        tokio::time::sleep(FOLLOW_INTERVAL).await;
        if let Ok(named) = std::fs::metadata(path) {
            let open = file.metadata().map_err(failed)?;
            if (named.dev(), named.ino()) != (open.dev(), open.ino()) {
                (file, at) = (File::open(path).map_err(failed)?, 0);
            } else if open.len() < at {
                at = 0;
            }
        }
    }
}

/// The offset at which the last `lines` lines begin.
fn tail_start(file: &mut File, lines: u32) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let from = length.saturating_sub(LOG_TAIL_BYTES);
    file.seek(SeekFrom::Start(from))?;
    let mut tail = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut tail)?;
    let whole = tail.strip_suffix(b"\n").unwrap_or(&tail);
    let breaks = whole.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at as u64);
    Ok(match lines {
        0 => length,
        lines => breaks.map(|at| from + at + 1).nth(lines as usize - 1).unwrap_or(from),
    })
}

/// Prints the complete lines from an offset; returns their length.
fn print_from(context: &Context, file: &mut File, at: u64) -> io::Result<Result<u64, Failure>> {
    file.seek(SeekFrom::Start(at))?;
    let (mut reader, mut printed) = (BufReader::new(file), 0);
    loop {
        let mut line = Vec::new();
        let length = (&mut reader).take(LOG_CHUNK_BYTES).read_until(b'\n', &mut line)? as u64;
        if length == 0 || (line.last() != Some(&b'\n') && length < LOG_CHUNK_BYTES) {
            return Ok(Ok(printed));
        }
        if let Err(failure) = context.print(&render::plain(&String::from_utf8_lossy(&line))) {
            return Ok(Err(failure));
        }
        printed += length;
    }
}
