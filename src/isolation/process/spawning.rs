//! The daemon's side of the spawner, which forks workers (the other side is `spawner.rs`).
//!
//! A daemon has one spawner, which serves one request at a time. A spawner that ended is replaced at the next request;
//! its workers keep running.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::Stdio;

use nix::fcntl::OFlag;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::pipe2;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::process::Child;

use super::launch::WorkerProcess;
use super::program::WorkerProgram;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::sys::socket::{receive_with_fds, send_with_fds};
use crate::sys::watched::{Watched, watch};
use crate::worker::spawner::{COMMAND, ONE};

/// A worker's outer process, before it gets its document.
pub(crate) struct Spawned {
    pub process: WorkerProcess,
    pub stdin: pipe::Sender,
    pub stdout: pipe::Receiver,
    /// The spawner's process id: parent of the outer process, and later of init.
    pub spawner: u32,
}

/// A running spawner. Dropping ends the spawner.
#[derive(Debug)]
pub(crate) struct Spawner {
    socket: AsyncFd<Watched>,
    child: Child,
}

impl WorkerProgram {
    /// Spawns a worker that writes its messages to `stderr`.
    ///
    /// # Errors
    /// `Unavailable` if the program cannot be run.
    pub(crate) async fn spawn(&self, stderr: BorrowedFd<'_>) -> Result<Spawned> {
        let mut held = self.spawner().lock().await;
        let no_pipes = |error| Error::unavailable(format!("a worker cannot have pipes: {error}"));
        // Taken out during the request: after a cancelled request, its late answer must not reach the next one.
        if let Some(spawner) = held.take() {
            match spawner.spawn(Streams::new().map_err(no_pipes)?, stderr).await {
                Err(error) => tracing::warn!(%error, "the spawner is gone: another one is started"),
                Ok(answer) => {
                    *held = Some(spawner);
                    return answer.map_err(no_fork);
                }
            }
        }
        let cannot = |error: std::io::Error| {
            Error::unavailable(format!("cannot run {}: {error}", self.path().display()))
                .hint("ryokan-worker is installed beside ryokand")
        };
        let streams = Streams::new().map_err(no_pipes)?;
        let spawner = self.start().map_err(cannot)?;
        let answer = spawner.spawn(streams, stderr).await.map_err(cannot)?;
        *held = Some(spawner);
        answer.map_err(no_fork)
    }

    fn start(&self) -> std::io::Result<Spawner> {
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        )?;
        // The spawner's end blocks; the daemon's does not.
        nix::fcntl::fcntl(&theirs, nix::fcntl::FcntlArg::F_SETFL(OFlag::empty()))?;
        // No `pre_exec`: without one this is a vfork, whose cost does not grow with the daemon's memory.
        let child = self
            .command()
            .arg(COMMAND)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()?;
        Ok(Spawner { socket: watch(ours, Interest::READABLE)?, child })
    }
}

fn no_fork(error: std::io::Error) -> Error {
    Error::unavailable(format!("a worker's process could not be made: {error}"))
        .hint("free memory or processes on this host")
}

/// A worker's standard input and output: the daemon's ends and the worker's.
struct Streams {
    stdin: pipe::Sender,
    stdout: pipe::Receiver,
    inside: [OwnedFd; 2],
}

impl Streams {
    fn new() -> std::io::Result<Streams> {
        let (stdin_inside, stdin) = pipe2(OFlag::O_CLOEXEC)?;
        let (stdout, stdout_inside) = pipe2(OFlag::O_CLOEXEC)?;
        Ok(Streams {
            stdin: pipe::Sender::from_owned_fd(stdin)?,
            stdout: pipe::Receiver::from_owned_fd(stdout)?,
            inside: [stdin_inside, stdout_inside],
        })
    }
}

impl Spawner {
    /// Requests a worker. An outer error means that the spawner is unusable; an inner one that this request failed.
    async fn spawn(&self, streams: Streams, stderr: BorrowedFd<'_>) -> std::io::Result<std::io::Result<Spawned>> {
        let Streams { stdin, stdout, inside } = streams;
        let [stdin_inside, stdout_inside] = &inside;
        let given = [stdin_inside.as_fd(), stdout_inside.as_fd(), stderr].map(|fd| fd.as_raw_fd());
        send_with_fds(&self.socket, ONE, &given)?;
        drop(inside);
        let answered = tokio::time::timeout(limits::WORKER_SPAWN, self.answer()).await;
        let answer = answered.map_err(|_| std::io::Error::other("it does not answer"))??;
        let spawner = self.child.id().unwrap_or(0);
        Ok(answer.map(|(pid, process)| Spawned { process: WorkerProcess::of(pid, process), stdin, stdout, spawner }))
    }

    async fn answer(&self) -> std::io::Result<std::io::Result<(u32, OwnedFd)>> {
        let mut pid = [0; 4];
        let (length, fds) = loop {
            let mut ready = self.socket.readable().await?;
            match ready.try_io(|socket| receive_with_fds(socket, &mut pid)) {
                Ok(received) => break received?,
                Err(_would_block) => {}
            }
        };
        let number = i32::from_le_bytes(pid);
        match (length, fds.into_iter().next(), u32::try_from(number)) {
            (4, Some(process), Ok(pid)) => Ok(Ok((pid, process))),
            (4, None, Ok(_)) => Ok(Err(std::io::Error::other("it ended at once"))),
            (4, None, Err(_)) => Ok(Err(std::io::Error::from_raw_os_error(number.saturating_neg()))),
            _ => Err(std::io::Error::other("it has ended")),
        }
    }
}
