//! The daemon as a process: its status, its end, its log. None of these starts one.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::Interest;

use super::context::{CLIENT, Context};
use super::drive::Signals;
use super::failure::Failure;
use super::journal::until_signal;
use super::{exit, paths, render};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::info::{KernelFilter, ProcessInfo};
use crate::core::limits;
use crate::core::quantity::format_size;
use crate::rpc::client::{HostClient, connect_stream};
use crate::sys;

/// Interval at which a followed log is read.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(250);
/// Bytes of the log's end that are searched for the last lines.
const TAIL_BYTES: u64 = 1 << 20;

/// `ryokan daemon`
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The action.
    #[command(subcommand)]
    pub action: DaemonAction,
}

/// Actions on the daemon.
#[derive(Debug, Subcommand)]
pub enum DaemonAction {
    /// Show its process, version, uptime and memory; exit code 3 if none answers
    Status,
    /// Stop it and wait for its end; kernels save their state, programs beside them end and are named
    Stop,
    /// Print the end of its log: of the file or journal that it writes
    Log {
        /// Continue with new lines until Ctrl-C
        #[arg(short, long)]
        follow: bool,
        /// Number of lines
        #[arg(short = 'n', long, value_name = "N", default_value_t = 100)]
        lines: usize,
    },
}

/// Executes an action.
pub async fn daemon(context: &Context, args: DaemonArgs) -> Result<(), Failure> {
    match args.action {
        DaemonAction::Status => status(context).await,
        DaemonAction::Stop => stop(context).await,
        DaemonAction::Log { follow, lines } => log(context, follow, lines).await,
    }
}

/// A daemon that answers.
struct Running {
    host: HostClient,
    /// Its process, if it is visible from here.
    process: Option<u32>,
}

impl Running {
    fn visible_process(&self) -> Result<u32> {
        self.process.ok_or_else(|| {
            Error::unsupported("the daemon's process is not visible from here")
                .hint("it is an older version, or runs in a container: use its service manager")
        })
    }
}

/// The daemon, if one answers, and its socket.
async fn running(context: &Context) -> Result<(Option<Running>, PathBuf), Failure> {
    let (socket, _) = context.socket()?;
    let connecting = async {
        let stream = connect_stream(&socket, limits::CLIENT_HELLO).await?;
        let listener = sys::socket::peer(&stream).map_or(0, |peer| peer.pid);
        let host = HostClient::greet(stream, CLIENT, limits::CLIENT_HELLO).await?;
        Ok::<_, Error>(Running { process: process_of(listener.cast_unsigned(), host.info().pid), host })
    };
    match connecting.await {
        Ok(running) => Ok((Some(running), socket)),
        Err(error) if error.code == ErrorCode::Unavailable => Ok((None, socket)),
        Err(error) => Err(error.into()),
    }
}

/// The daemon's process: the one that listens, or the child of a service manager that listens for it. Its own word is not
/// enough, because a signal goes there: a daemon in another PID namespace knows another number of itself.
fn process_of(listener: u32, claimed: u32) -> Option<u32> {
    match is_daemon(listener) {
        true => Some(listener),
        false => {
            (listener > 0 && is_daemon(claimed) && sys::process::parent(claimed) == Some(listener)).then_some(claimed)
        }
    }
}

fn is_daemon(pid: u32) -> bool {
    pid > 0 && std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "ryokand")
}

async fn status(context: &Context) -> Result<(), Failure> {
    let (running, socket) = running(context).await?;
    let shown = socket.display();
    let Some(Running { host, process }) = running else {
        let json = || serde_json::json!({ "running": false, "socket": socket });
        context.show(json, || format!("no daemon answers on {shown}\n"))?;
        return Err(Failure::Quiet(exit::NOT_FOUND));
    };
    let kernels = host.list_kernels(&KernelFilter::default()).await?;
    let workers = kernels.iter().filter(|kernel| matches!(kernel.state.as_str(), "ready" | "busy")).count();
    let pid = process.unwrap_or(host.info().pid);
    let (uptime, memory) = (process.and_then(uptime), process.and_then(memory));
    let version = &host.info().version;
    let json = || {
        serde_json::json!({
            "running": true, "socket": socket, "pid": pid, "version": version,
            "uptime_ms": uptime.map(|uptime| u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX)),
            "kernels": kernels.len(), "workers": workers, "memory_bytes": memory,
        })
    };
    let text = || {
        let known = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_owned());
        let seconds = |uptime: Duration| humantime::format_duration(Duration::from_secs(uptime.as_secs())).to_string();
        format!(
            "process  {pid}\nversion  {}\nsocket   {shown}\nuptime   {}\nmemory   {}\nkernels  {}, {} running\n",
            render::plain(version),
            known(uptime.map(seconds)),
            known(memory.map(format_size)),
            kernels.len(),
            workers,
        )
    };
    context.show(json, text)
}

fn uptime(pid: u32) -> Option<Duration> {
    let ticks = sys::process::start_ticks(pid).ok()?;
    let per_second = u64::try_from(nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??).ok()?;
    let since_boot: f64 = std::fs::read_to_string("/proc/uptime").ok()?.split(' ').next()?.parse().ok()?;
    Duration::try_from_secs_f64(since_boot).ok()?.checked_sub(Duration::from_secs(ticks.checked_div(per_second)?))
}

/// Resident memory of a process, bytes.
fn memory(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

async fn stop(context: &Context) -> Result<(), Failure> {
    let (running, socket) = running(context).await?;
    let Some(running) = running else {
        let text = || format!("no daemon answers on {}\n", socket.display());
        return context.show(|| serde_json::json!({ "stopped": false }), text);
    };
    let pid = running.visible_process()?;
    let internal = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            Error::refused(format!("may not stop process {pid}: it belongs to another user"))
        }
        _ => Error::internal(format!("could not stop process {pid}: {error}")),
    };
    // This process, not a successor with its number.
    let process = sys::pidfd::open(Pid::from_raw(pid.cast_signed())).map_err(internal)?;
    if !is_daemon(pid) {
        return Err(internal(io::ErrorKind::NotFound.into()).into());
    }
    let ends = programs(&running.host).await;
    if !ends.is_empty() {
        let named = ends.iter().map(|(kernel, process)| format!("{} of {kernel}", render::process(process)));
        context.say(&format!("ends: {}", named.collect::<Vec<_>>().join(", ")));
        // A script is not held up.
        if context.terminal.can_ask {
            context.confirm("stop the daemon")?;
        }
    }
    drop(running);
    let ended = sys::watched::watch(process, Interest::READABLE).map_err(internal)?;
    match sys::pidfd::signal(ended.get_ref().as_fd(), Signal::SIGTERM) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
        sent => sent.map_err(internal)?,
    }
    let Ok(waited) = tokio::time::timeout(limits::DAEMON_EXIT_WAIT, ended.readable()).await else {
        let still = format!("process {pid} has not ended within {} s", limits::DAEMON_EXIT_WAIT.as_secs());
        return Err(Error::deadline(still).hint("see what it waits for: ryokan daemon log").into());
    };
    drop(waited.map_err(internal)?);
    let json = || {
        let ended = ends.iter().map(|(kernel, process)| {
            serde_json::json!({ "kernel": kernel, "process": process.exec.0, "argv": process.argv })
        });
        serde_json::json!({ "stopped": true, "ended": ended.collect::<Vec<_>>() })
    };
    context.show(json, || format!("stopped (process {pid})\n"))
}

/// The programs beside engines, which end with the daemon, and their kernels; those of kernels that this user sees.
async fn programs(host: &HostClient) -> Vec<(String, ProcessInfo)> {
    let mut found = Vec::new();
    for info in host.list_kernels(&KernelFilter::default()).await.unwrap_or_default() {
        // A kernel that is removed meanwhile has none.
        let Ok((kernel, _)) = host.open_kernel(&info.id.to_string()).await else { continue };
        let processes = kernel.processes().await.unwrap_or_default();
        found.extend(processes.into_iter().map(|process| (info.spec.name.to_string(), process)));
    }
    found
}

async fn log(context: &Context, follow: bool, lines: usize) -> Result<(), Failure> {
    let (running, _) = running(context).await?;
    let file = match &running {
        Some(running) => {
            let pid = running.visible_process()?;
            // A daemon of another user, or one whose stderr is the journal, has no readable file there.
            match std::fs::read_link(format!("/proc/{pid}/fd/2")) {
                Ok(path) if path.is_file() => path,
                Ok(path) if !path.to_string_lossy().starts_with("socket:") => {
                    return Err(Error::unsupported(format!("the daemon logs to {}", path.display())).into());
                }
                Ok(_) | Err(_) => return journal(pid, follow, lines),
            }
        }
        None => {
            let path = paths::state_dir()?.join("ryokand.log");
            match path.is_file() {
                true => path,
                false => {
                    return Err(Error::not_found(format!("no daemon answers, and there is no {}", path.display()))
                        .hint("of a service: journalctl --user -u ryokand")
                        .into());
                }
            }
        }
    };
    match follow {
        true => until_signal(&mut Signals::catch()?, print_file(context, &file, follow, lines)).await,
        false => print_file(context, &file, follow, lines).await,
    }
}

/// Becomes `journalctl`.
fn journal(pid: u32, follow: bool, lines: usize) -> Result<(), Failure> {
    use std::os::unix::process::CommandExt as _;
    let mut command = std::process::Command::new("journalctl");
    command.arg(format!("_PID={pid}")).args(["-n", &lines.to_string()]).args(follow.then_some("-f"));
    let error = command.exec();
    Err(Error::unsupported(format!("the daemon logs to the journal, and journalctl does not run: {error}")).into())
}

async fn print_file(context: &Context, path: &Path, follow: bool, lines: usize) -> Result<(), Failure> {
    let unreadable = |error: io::Error| Failure::of_file("read", path, &error);
    let mut file = File::open(path).map_err(unreadable)?;
    let length = file.metadata().map_err(unreadable)?.len();
    let begin = length.saturating_sub(TAIL_BYTES);
    file.seek(SeekFrom::Start(begin)).map_err(unreadable)?;
    let mut tail = Vec::new();
    (&mut file).take(TAIL_BYTES).read_to_end(&mut tail).map_err(unreadable)?;
    context.print(&last_lines(&String::from_utf8_lossy(&tail), lines))?;
    let mut at = begin + tail.len() as u64;
    loop {
        if !follow {
            return Ok(());
        }
        let length = file.metadata().map_err(unreadable)?.len();
        if length < at {
            at = 0;
        }
        file.seek(SeekFrom::Start(at)).map_err(unreadable)?;
        let mut more = Vec::new();
        (&mut file).take(TAIL_BYTES).read_to_end(&mut more).map_err(unreadable)?;
        // Whole lines only: the rest follows.
        let whole = more.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        at += whole as u64;
        context.print(&last_lines(&String::from_utf8_lossy(&more[..whole]), usize::MAX))?;
        tokio::time::sleep(FOLLOW_INTERVAL).await;
    }
}

/// The last lines of a text, printable on a terminal.
fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].iter().map(|line| format!("{}\n", render::plain(line))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lines_are_printable() {
        assert_eq!(last_lines("a\nb\x1b[2Jc\nd\n", 2).lines().count(), 2);
        assert!(!last_lines("b\x1b[2Jc", 2).contains('\x1b'));
        assert_eq!(last_lines("", 2), "");
    }

    #[test]
    fn only_listening_daemon_is_trusted() {
        let folder = tempfile::tempdir().expect("a directory");
        let program = folder.path().join("ryokand");
        // A copy could be busy: a fork of another test may still have it open for writing.
        std::os::unix::fs::symlink("/bin/sleep", &program).expect("linked");
        let mut daemon = std::process::Command::new(&program).arg("600").spawn().expect("started");
        let (own, pid) = (std::process::id(), daemon.id());
        // The kernel lets the parent continue before it gives the child its new name.
        let named = (0..1000).any(|_| {
            is_daemon(pid) || {
                std::thread::sleep(Duration::from_millis(10));
                false
            }
        });
        let found = [(pid, 1), (own, pid), (0, pid), (1, pid), (own, own)].map(|(peer, says)| process_of(peer, says));
        daemon.kill().and_then(|()| daemon.wait()).expect("ended");
        assert!(named, "it is called ryokand");
        // It listens itself; a service manager listens for it; another PID namespace; another process.
        assert_eq!(found, [Some(pid), Some(pid), None, None, None]);
    }

    #[test]
    fn own_process_has_uptime_and_memory() {
        let pid = std::process::id();
        assert!(uptime(pid).is_some_and(|uptime| uptime < Duration::from_secs(86_400)));
        assert!(memory(pid).is_some_and(|bytes| bytes > 1 << 20));
        assert_eq!(memory(0), None);
    }
}
