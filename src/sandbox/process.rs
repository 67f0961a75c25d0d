//! Processes beside the engine: init's side. Runs in init.
//!
//! ```text
//!  init ── fork ──▶ supervisor (N1, trusted, no rights) ── fork ──▶ child ── setns N2, confine, verify ──▶ program
//!    ▲                     │  reaps the tree, sends the exit                      │
//!    └───── exit ──────────┴───────── Born, Ready ▶ go, then the end of the socket ┘
//! ```
//!
//! The supervisor adopts the orphans of its tree, so that the whole tree can be found and ended.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::{Pid, pipe2, read};

use super::bind::LiveBind;
use super::child::{WORD_BYTES, Word};
use super::init::{Exit, Init, proc_file};
use super::layer::{Layer, SandboxError, SandboxReport, failed};
use super::process_child::{ProcessChild, Streams, supervise};
use super::spawn::{hear, unexpected};
use crate::core::exec::TerminalSize;
use crate::core::limits;
use crate::sys::namespace::{Forked, fork};
use crate::sys::pidfd;
use crate::sys::process::enlarge_pipe;
use crate::sys::socket::{receive_with_fds, send_with_fds};

/// Requested size of a process's pipes, granted if the user's quota allows.
const PIPE_BYTES: usize = 256 << 10;
/// Rounds in which a tree is stopped before it is killed.
const STOP_ROUNDS: usize = 16;

/// A program to run beside the engine.
#[derive(Debug, Clone)]
pub struct ProcessProgram {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Its whole environment.
    pub env: Vec<(String, String)>,
    /// Its working directory.
    pub cwd: String,
    /// Its terminal, in place of pipes.
    pub terminal: Option<TerminalSize>,
}

/// A process whose program is about to run. Init's ends are close-on-exec and non-blocking.
#[derive(Debug)]
pub struct SandboxedProcess {
    /// Its supervisor.
    pub tree: ProcessTree,
    /// The program's process.
    pub pidfd: OwnedFd,
    /// Closes when the program runs; readable with the reason if it cannot run.
    pub starting: OwnedFd,
    /// Readable with the exit; closes without one if the supervisor was killed.
    pub exit: OwnedFd,
    /// Where its output and input are.
    pub streams: ProcessStreams,
}

/// Init's ends of a process's streams.
#[derive(Debug)]
pub enum ProcessStreams {
    /// The read ends of two pipes.
    Pipes {
        /// Of its stdout.
        stdout: OwnedFd,
        /// Of its stderr.
        stderr: OwnedFd,
    },
    /// The end that controls its terminal.
    Terminal(OwnedFd),
}

/// Why a program did not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotRun {
    /// Exit code as in shells: 126 or 127.
    pub code: i32,
    /// The reason.
    pub why: String,
}

/// Init's ends of a process's descriptors.
struct Ends {
    starting: OwnedFd,
    exit: OwnedFd,
    /// None: a terminal.
    output: Option<(OwnedFd, OwnedFd)>,
    inside: Inside,
}

/// The process's ends.
struct Inside {
    report: OwnedFd,
    exit: OwnedFd,
    streams: Streams,
}

impl Ends {
    fn make(terminal: Option<TerminalSize>, stdin: Option<OwnedFd>) -> std::io::Result<Ends> {
        let pair = || socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
        let (starting, report) = pair()?;
        let (exit, exit_inside) = pair()?;
        for ours in [&starting, &exit] {
            fcntl(ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let (output, streams) = match terminal {
            Some(size) => (None, Streams::Terminal(size)),
            None => {
                let (stdout, stdout_inside) = output_pipe()?;
                let (stderr, stderr_inside) = output_pipe()?;
                (Some((stdout, stderr)), Streams::Pipes { stdin, stdout: stdout_inside, stderr: stderr_inside })
            }
        };
        Ok(Ends { starting, exit, output, inside: Inside { report, exit: exit_inside, streams } })
    }
}

/// Init's end is non-blocking.
fn output_pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (ours, inside) = pipe2(OFlag::O_CLOEXEC)?;
    fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    enlarge_pipe(&ours, PIPE_BYTES);
    Ok((ours, inside))
}

impl Init {
    /// Starts a program in the engine's tree, with every layer of the engine. `engine`: the
    /// engine's present process. Without `stdin` its input is empty, unless it has a terminal.
    ///
    /// # Errors
    /// The layer that failed. Nothing of the program has run then.
    pub fn spawn_process(
        &self,
        engine: i32,
        program: ProcessProgram,
        stdin: Option<OwnedFd>,
    ) -> Result<SandboxedProcess, SandboxError> {
        let tree = self.engine.as_ref().ok_or_else(|| SandboxError::new(Layer::PivotRoot, "no engine has a tree"))?;
        let ends = |namespace| Ok((namespace, Ends::make(program.terminal, stdin)?));
        let made = tree.namespace.try_clone().and_then(ends);
        let (namespace, ends) = made.map_err(failed(Layer::Descriptors, "cannot make the process's descriptors"))?;
        let Ends { starting, exit, output, inside } = ends;
        let mut plan = self.plan.clone();
        plan.mounts.extend(self.live.iter().map(LiveBind::planned));
        let supervisor = match fork().map_err(failed(Layer::PidNs, "cannot start the process"))? {
            Forked::Parent(pid) => pid,
            Forked::Child => {
                let Inside { report, exit, streams } = inside;
                let by = self.by_cgroup();
                supervise(exit, ProcessChild { plan: &plan, by, namespace, program, report, streams })
            }
        };
        drop((inside, namespace));
        let watched = pidfd::open(supervisor).map_err(failed(Layer::PidNs, "cannot watch the process"));
        let tree = ProcessTree { supervisor: supervisor.as_raw(), watched: watched? };
        // On a failure the dropped tree ends; init reaps it.
        let (pidfd, terminal) = self.admit_process(engine, &starting, output.is_none())?;
        let streams = match (output, terminal) {
            (Some((stdout, stderr)), _) => ProcessStreams::Pipes { stdout, stderr },
            (None, Some(terminal)) => ProcessStreams::Terminal(terminal),
            (None, None) => return Err(SandboxError::new(Layer::Descriptors, "the process sent no terminal")),
        };
        Ok(SandboxedProcess { tree, pidfd, starting, exit, streams })
    }

    /// Verifies the child and lets its program run. Returns its process and the terminal that it made.
    fn admit_process(
        &self,
        engine: i32,
        socket: &OwnedFd,
        has_terminal: bool,
    ) -> Result<(OwnedFd, Option<OwnedFd>), SandboxError> {
        let deadline = Instant::now() + limits::PROCESS_START;
        let pid = match hear(socket, deadline)? {
            Some((Word::Born(pid), _)) => Pid::from_raw(pid),
            other => return Err(unexpected(other)),
        };
        let pidfd = pidfd::open(pid).map_err(failed(Layer::PidNs, "cannot watch the process"))?;
        if let Some(cgroup) = &self.cgroup {
            cgroup.take(pid).map_err(failed(Layer::Memory, "cannot move the process into the kernel's cgroup"))?;
        }
        let terminal = match has_terminal {
            true => Some(hear_terminal(socket, deadline)?),
            false => None,
        };
        let in_force = match hear(socket, deadline)? {
            Some((Word::Ready(report), _)) => report,
            other => return Err(unexpected(other)),
        };
        self.same_processors(engine, pid)?;
        self.look_again(pid, &in_force)?;
        self.nothing_less(&in_force)?;
        send_with_fds(socket, b"!", &[]).map_err(failed(Layer::Descriptors, "cannot send `go`"))?;
        Ok((pidfd, terminal))
    }

    /// Where affinity is the limit, the kernel has one set of processors.
    fn same_processors(&self, engine: i32, pid: Pid) -> Result<(), SandboxError> {
        if self.by_cgroup().cpu || self.plan.may_lack(Layer::Cpu) {
            return Ok(());
        }
        let fail = |error: Errno| failed(Layer::Cpu, "cannot share the engine's processors")(error);
        let chosen = sched_getaffinity(Pid::from_raw(engine)).map_err(fail)?;
        sched_setaffinity(pid, &chosen).map_err(fail)?;
        match sched_getaffinity(pid) == Ok(chosen) {
            true => Ok(()),
            false => Err(SandboxError::new(Layer::Cpu, "the affinity was not applied")),
        }
    }

    /// No layer that the engine has is missing or degraded.
    fn nothing_less(&self, in_force: &SandboxReport) -> Result<(), SandboxError> {
        use super::layer::LayerStatus::Enforced;
        for layer in [Layer::Rlimits, Layer::Keyring, Layer::Capabilities, Layer::NoNewPrivs, Layer::Landlock]
            .into_iter()
            .chain([Layer::LandlockScope, Layer::Seccomp, Layer::Descriptors])
        {
            let engines = matches!(self.report.status(layer), Some(Enforced { .. }));
            let its = matches!(in_force.status(layer), Some(Enforced { .. }));
            if engines && !its {
                return Err(SandboxError::new(layer, "the engine has this layer, the process lacks it"));
            }
        }
        Ok(())
    }
}

fn hear_terminal(socket: &OwnedFd, deadline: Instant) -> Result<OwnedFd, SandboxError> {
    let terminal = match hear(socket, deadline)? {
        Some((Word::Terminal, mut fds)) if fds.len() == 1 => fds.remove(0),
        other => return Err(unexpected(other)),
    };
    // The child closes its copy of this open file before it runs its program.
    let set = fcntl(&terminal, FcntlArg::F_SETFL(OFlag::O_RDWR | OFlag::O_NONBLOCK));
    set.map_err(failed(Layer::Descriptors, "cannot use the terminal"))?;
    Ok(terminal)
}

impl SandboxedProcess {
    /// Reads whether the program runs, once `starting` is readable.
    ///
    /// # Errors
    /// `WouldBlock` if that is not known yet.
    pub fn read_start(starting: BorrowedFd<'_>) -> std::io::Result<Result<(), NotRun>> {
        let unknown = |why: String| Ok(Err(NotRun { code: limits::CODE_NOT_RUNNABLE, why }));
        let mut buffer = vec![0; WORD_BYTES];
        match receive_with_fds(starting, &mut buffer) {
            Ok((0, _)) => Ok(Ok(())),
            Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => Ok(Ok(())),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Err(error),
            Err(error) => unknown(error.to_string()),
            Ok((length, _)) => match serde_json::from_slice(&buffer[..length]) {
                Ok(Word::NotRun { code, why }) => Ok(Err(NotRun { code, why })),
                Ok(Word::Failed(error)) => unknown(error.to_string()),
                Ok(word) => unknown(format!("the process sent {word:?}")),
                Err(error) => unknown(error.to_string()),
            },
        }
    }

    /// Reads the exit once `exit` is readable; `None`: the supervisor was killed.
    ///
    /// # Errors
    /// `WouldBlock` if there is none yet.
    pub fn read_exit(exit: BorrowedFd<'_>) -> std::io::Result<Option<Exit>> {
        let mut word = [0; 5];
        match read(exit, &mut word) {
            Ok(5) => {
                let value = i32::from_le_bytes([word[1], word[2], word[3], word[4]]);
                Ok(Some(if word[0] == 0 { Exit::Status(value) } else { Exit::Signal(value) }))
            }
            Err(Errno::EAGAIN) => Err(std::io::ErrorKind::WouldBlock.into()),
            Ok(_) | Err(_) => Ok(None),
        }
    }
}

/// A supervisor with everything below it. Dropping it ends the supervisor; its tree becomes init's.
#[derive(Debug)]
pub struct ProcessTree {
    supervisor: i32,
    watched: OwnedFd,
}

impl Drop for ProcessTree {
    fn drop(&mut self) {
        let _ = pidfd::signal(self.watched.as_fd(), Signal::SIGKILL);
    }
}

impl ProcessTree {
    /// Kills every process of the tree but the supervisor. To be repeated until it returns `Gone`.
    pub fn end(&self) -> TreeEnd {
        // An ended supervisor's id may be another process's.
        let mut fds = [PollFd::new(self.watched.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::ZERO) {
            Ok(0) => end_below(self.supervisor),
            Ok(_) | Err(_) => TreeEnd::Gone,
        }
    }
}

/// What is left of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeEnd {
    /// Nothing.
    Gone,
    /// Processes that were killed just now.
    Killed,
    /// Only processes that wait for a device: they end after its answer.
    WaitsForDevice,
}

/// Processes below one, as `/proc` shows them: id and state.
fn below(root: i32) -> Vec<(i32, char)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut all: Vec<(i32, i32, char)> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| {
            let stat = proc_file(pid, "stat").ok()?;
            // The name before the third field may contain any character.
            let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
            let state = fields.next()?.chars().next()?;
            Some((pid, fields.next()?.parse().ok()?, state))
        })
        .collect();
    let mut parents = vec![root];
    let mut found = Vec::new();
    while let Some(parent) = parents.pop() {
        all.retain(|&(pid, of, state)| {
            if of == parent {
                parents.push(pid);
                if !matches!(state, 'Z' | 'X' | 'x') {
                    found.push((pid, state));
                }
            }
            of != parent
        });
    }
    found
}

/// They are stopped first: a stopped process does not fork, and holds its place in the kernel's limit
/// of processes. A tree that forks faster than it is killed therefore ends, too.
fn end_below(root: i32) -> TreeEnd {
    let stopped = |state: char| matches!(state, 'T' | 't');
    let mut tree = below(root);
    for _ in 0..STOP_ROUNDS {
        if tree.iter().all(|(_, state)| stopped(*state)) {
            break;
        }
        for (pid, _) in tree.iter().filter(|(_, state)| !stopped(*state)) {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGSTOP);
        }
        std::thread::sleep(Duration::from_micros(100));
        tree = below(root);
    }
    for (pid, _) in &tree {
        let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
    }
    match tree.as_slice() {
        [] => TreeEnd::Gone,
        tree if tree.iter().all(|(_, state)| *state == 'D') => TreeEnd::WaitsForDevice,
        _ => TreeEnd::Killed,
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufRead as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn tree_ends_with_its_orphans() {
        let mut root = Command::new("sh")
            .args(["-c", "(setsid sleep 60 & echo $!); sleep 60 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let mut lines = std::io::BufReader::new(root.stdout.take().expect("piped")).lines();
        let mut line = || lines.next().expect("a line").expect("read").parse::<i32>().expect("a number");
        let (orphan, child) = (line(), line());
        let own = i32::try_from(root.id()).expect("a process id");
        assert!(below(own).iter().any(|(pid, _)| *pid == child));
        assert!(!below(own).iter().any(|(pid, _)| *pid == orphan), "it left the tree: nothing adopts it here");
        while end_below(own) != TreeEnd::Gone {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(below(own).is_empty());
        root.wait().expect("it ends: its children are gone");
        let _ = kill(Pid::from_raw(orphan), Signal::SIGKILL);
    }
}
