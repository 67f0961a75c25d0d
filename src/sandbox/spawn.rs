//! Starting an engine: init's side of the exchange with the child (`child.rs` has the other). Runs
//! in init.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, pipe2};

use super::bind::LiveBind;
use super::child::{Child, WORD_BYTES, Wanted, Word};
use super::confine::ByCgroup;
use super::init::{EngineProcess, EngineProgram, EngineTree, Init, proc_file};
use super::layer::{Layer, SandboxError, SandboxReport, failed};
use super::plan::WORKSPACE;
use super::tree::Source;
use super::{confine, staging, verify};
use crate::core::limits;
use crate::sys::namespace::{Forked, fork};
use crate::sys::pidfd;
use crate::sys::process::enlarge_pipe;
use crate::sys::socket::{receive_with_fds, send_with_fds};

/// Requested size of output pipes, granted if the user's quota allows.
const PIPE_BYTES: usize = 1 << 20;

impl Init {
    /// Starts an engine in the sandbox. It runs only after every layer has been shown to be in
    /// force.
    ///
    /// # Errors
    /// The layer that failed, or why the program could not run. Nothing untrusted has run then.
    pub fn spawn_engine(&mut self, program: EngineProgram) -> Result<EngineProcess, SandboxError> {
        let fail = || failed(Layer::Descriptors, "cannot make the engine's descriptors");
        let pair = |kind| socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC);
        let (ours, theirs) = pair(SockType::SeqPacket).map_err(fail())?;
        let (control, control_inside) = pair(SockType::Stream).map_err(fail())?;
        let (stdout, stdout_inside) = pipe2(OFlag::O_CLOEXEC).map_err(fail())?;
        let (stderr, stderr_inside) = pipe2(OFlag::O_CLOEXEC).map_err(fail())?;
        for ours in [&stdout, &stderr, &control] {
            fcntl(ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(fail())?;
        }
        enlarge_pipe(&stdout, PIPE_BYTES);
        enlarge_pipe(&stderr, PIPE_BYTES);
        let mounts = self.wanted();
        // Later mounts are part of the plan that the child verifies.
        let mut plan = self.plan.clone();
        plan.mounts.extend(self.live.iter().map(LiveBind::planned));
        let pid = match fork().map_err(failed(Layer::PidNs, "cannot start the engine's process"))? {
            Forked::Parent(pid) => pid,
            Forked::Child => Child {
                plan: &plan,
                by: self.by_cgroup(),
                mounts,
                protected: &self.protected,
                program,
                report: theirs,
                stdout: stdout_inside,
                stderr: stderr_inside,
                control: control_inside,
            }
            .run(),
        };
        drop((theirs, stdout_inside, stderr_inside, control_inside, program));
        let started = pidfd::open(pid).map_err(failed(Layer::PidNs, "cannot watch the engine's process"));
        // While the child builds its tree. It runs no program before `go`.
        let limited = self.cgroup.as_ref().map_or(Ok(()), |cgroup| cgroup.take(pid));
        let limited = limited.map_err(failed(Layer::Memory, "cannot move the engine into its cgroup"));
        match started.and_then(|pidfd| limited.map(|()| pidfd)).and_then(|pidfd| self.talk(pid, &ours).map(|()| pidfd))
        {
            Ok(pidfd) => Ok(EngineProcess { pid: pid.as_raw(), pidfd, control, stdout, stderr }),
            Err(error) => {
                let _ = nix::sys::signal::kill(pid, Signal::SIGKILL);
                let _ = waitpid(pid, None);
                Err(error)
            }
        }
    }

    /// Receives the child's messages until the program runs.
    fn talk(&mut self, pid: Pid, socket: &OwnedFd) -> Result<(), SandboxError> {
        let deadline = Instant::now() + limits::WORKER_START;
        let tree = match hear(socket, deadline)? {
            Some((Word::Tree, fds)) => fds,
            other => return Err(unexpected(other)),
        };
        let in_force = match hear(socket, deadline)? {
            Some((Word::Ready(report), _)) => report,
            other => return Err(unexpected(other)),
        };
        let mut in_force = in_force;
        confine::limit_processors(&self.plan, self.by_cgroup(), pid, &mut in_force)?;
        if let Some(why) = &self.no_cgroup {
            let words =
                format!("{} MiB, by rlimit and watchdog; no cgroup: {why}", self.plan.limits.memory_bytes >> 20);
            in_force.enforced(Layer::Memory, words);
        }
        self.look_again(pid, &in_force)?;
        let mut tree = tree.into_iter();
        match (tree.next(), tree.next()) {
            (Some(namespace), Some(scratch)) => self.engine = Some(EngineTree { namespace, scratch }),
            _ => return Err(SandboxError::new(Layer::PivotRoot, "the engine's tree came without its descriptors")),
        }
        for each in in_force.layers {
            self.report.note(each.layer, each.status);
        }
        send_with_fds(socket, b"!", &[]).map_err(failed(Layer::Descriptors, "cannot send `go`"))?;
        // The socket closes when the program starts; an error arrives if it cannot.
        match hear(socket, deadline)? {
            None => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Verifies the child from outside.
    pub(super) fn look_again(&self, pid: Pid, in_force: &SandboxReport) -> Result<(), SandboxError> {
        let status =
            proc_file(pid.as_raw(), "status").map_err(failed(Layer::PidNs, "cannot look at the engine's process"))?;
        verify::judge_status(in_force, &status)?;
        for layer in Layer::ALL {
            let root_only = matches!(layer, Layer::RunAs | Layer::IdMap);
            let known = in_force.status(*layer).or_else(|| self.report.status(*layer)).is_some();
            if !known && !root_only {
                return Err(SandboxError::new(*layer, "the layer was never set up"));
            }
        }
        Ok(())
    }

    pub(super) fn by_cgroup(&self) -> ByCgroup {
        self.cgroup.as_ref().map_or_else(ByCgroup::default, |cgroup| ByCgroup {
            memory: cgroup.memory,
            pids: cgroup.pids,
            cpu: cgroup.cpu,
        })
    }

    /// Every mount of the engine's tree: the workspace, the planned ones, the later ones.
    fn wanted(&self) -> Vec<Wanted> {
        let mut wanted = vec![Wanted {
            inside: PathBuf::from(WORKSPACE),
            source: Source::Own(self.workspace_path()),
            writable: true,
        }];
        for (i, mount) in self.plan.mounts.iter().enumerate() {
            let source = match &self.staging {
                Some(staging) if mount.is_mapped => {
                    let at = staging::through(staging, &i.to_string());
                    Source::Staged { at, shows: mount.source.clone() }
                }
                Some(_) | None => Source::Given(mount.source.clone()),
            };
            wanted.push(Wanted { inside: mount.inside.clone(), source, writable: mount.writable });
        }
        wanted.extend(self.live.iter().map(|live| live.wanted(self.staging.as_ref())));
        // A mount hides earlier mounts below its place.
        wanted.sort_by_key(|mount| mount.inside.components().count());
        wanted
    }
}

/// The child's next message with its descriptors; `None` when the socket has closed.
pub(super) fn hear(socket: &OwnedFd, deadline: Instant) -> Result<Option<(Word, Vec<OwnedFd>)>, SandboxError> {
    let fail = || failed(Layer::Descriptors, "cannot read from the engine's process");
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left.max(Duration::from_millis(1))).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(fail()(std::io::Error::from(error))),
            Ok(0) if left.is_zero() => {
                let seconds = limits::WORKER_START.as_secs();
                return Err(SandboxError::new(
                    Layer::PivotRoot,
                    format!("the engine did not start within {seconds} s"),
                ));
            }
            Ok(0) => continue,
            Ok(_) => break,
        }
    }
    let mut buffer = vec![0; WORD_BYTES];
    match receive_with_fds(socket, &mut buffer) {
        Ok((0, _)) => Ok(None),
        // The error of a socket whose dead peer had not read its last message.
        Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => Ok(None),
        Err(error) => Err(fail()(error)),
        Ok((length, fds)) => {
            let word = serde_json::from_slice(&buffer[..length])
                .map_err(failed(Layer::Descriptors, "the engine's process sent an invalid message"))?;
            Ok(Some((word, fds)))
        }
    }
}

pub(super) fn unexpected(word: Option<(Word, Vec<OwnedFd>)>) -> SandboxError {
    match word {
        Some((Word::Failed(error), _)) => error,
        Some((word, fds)) => {
            let what = format!("the engine's process sent {word:?} with {} descriptors unexpectedly", fds.len());
            SandboxError::new(Layer::Descriptors, what)
        }
        None => SandboxError::new(Layer::PivotRoot, "the engine's process ended while its sandbox was being built"),
    }
}

impl EngineProcess {
    /// Sends a signal to the engine's first process.
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&self, signal: Signal) -> std::io::Result<()> {
        pidfd::signal(self.pidfd.as_fd(), signal)
    }
}
