//! The two pipes that carry a session's output, and how kaish's own output gets into them.
//!
//! kaish would collect output in lossy 10 MiB rings. Here every byte goes straight into the pipe of fd 1 or 2, and
//! whoever writes waits while the pipe is full: a slow reader slows the code. External commands get the very same
//! descriptor, so their output never passes through this process.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};

use nix::fcntl::OFlag;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

/// The write end of one output pipe.
pub struct Outlet {
    /// What external commands get: blocking, as every program expects it.
    inherited: OwnedFd,
    own: Own,
    /// Bytes that kaish handed over where nobody could wait; they go first.
    backlog: Mutex<VecDeque<u8>>,
    /// One writer at a time, so that two pipeline stages never mix within a chunk.
    turn: tokio::sync::Mutex<()>,
}

enum Own {
    /// A second, non-blocking opening of the same pipe.
    NonBlocking(AsyncFd<std::fs::File>),
    /// The same opening; a write of at most `PIPE_BUF` bytes to a pipe that polls as writable does not block.
    Polled(AsyncFd<std::fs::File>),
    /// Not a pipe: writes go through at once.
    Plain(std::fs::File),
}

const PIPE_BUF: usize = 4096;

impl Outlet {
    /// Takes the write end of an output pipe. Needs a tokio runtime around it.
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        // Opened again rather than switched to non-blocking: the flag belongs to the opening, and external commands
        // share the first one.
        let own = match OpenOptions::new().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path) {
            Ok(file) => match AsyncFd::try_with_interest(file, Interest::WRITABLE) {
                Ok(watched) => Own::NonBlocking(watched),
                Err(error) => Own::Plain(error.into_parts().0),
            },
            Err(_) => match AsyncFd::try_with_interest(fd.try_clone()?.into(), Interest::WRITABLE) {
                Ok(watched) => Own::Polled(watched),
                Err(error) => Own::Plain(error.into_parts().0),
            },
        };
        Ok(Outlet { inherited: fd, own, backlog: Mutex::default(), turn: tokio::sync::Mutex::default() })
    }

    /// A descriptor for an external command.
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated.
    pub fn stdio(&self) -> io::Result<Stdio> {
        Ok(Stdio::from(self.inherited.try_clone()?))
    }

    /// Writes without waiting what goes in now and keeps the rest for the next writer.
    pub fn offer(&self, mut bytes: &[u8]) {
        let mut backlog = self.backlog.lock().unwrap_or_else(PoisonError::into_inner);
        if backlog.is_empty() && self.turn.try_lock().is_ok() {
            while !bytes.is_empty() {
                match self.write_now(bytes) {
                    Ok(n) => bytes = &bytes[n..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // Nobody reads any more; neither will anybody read the rest.
                    Err(_) => return,
                }
            }
        }
        backlog.extend(bytes);
    }

    /// Writes everything, waiting as long as the reader makes it wait. Ends early if `cancel` fires or the reader is gone.
    ///
    /// Gives the number of bytes that were not written.
    pub async fn write(&self, bytes: &[u8], cancel: &CancellationToken) -> usize {
        let _turn = self.turn.lock().await;
        loop {
            let waiting: Vec<u8> = {
                let mut backlog = self.backlog.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::take(&mut *backlog).into()
            };
            if waiting.is_empty() {
                break;
            }
            if self.write_slice(&waiting, cancel).await > 0 {
                return bytes.len();
            }
        }
        self.write_slice(bytes, cancel).await
    }

    /// Writes what [`Outlet::offer`] left.
    pub async fn flush(&self, cancel: &CancellationToken) {
        if !self.backlog.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            self.write(&[], cancel).await;
        }
    }

    async fn write_slice(&self, mut bytes: &[u8], cancel: &CancellationToken) -> usize {
        while !bytes.is_empty() {
            let watched = match &self.own {
                Own::NonBlocking(fd) | Own::Polled(fd) => fd,
                Own::Plain(file) => {
                    let mut file = file;
                    return if file.write_all(bytes).is_ok() { 0 } else { bytes.len() };
                }
            };
            if matches!(self.own, Own::NonBlocking(_)) {
                match self.write_now(bytes) {
                    Ok(n) => {
                        bytes = &bytes[n..];
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return bytes.len(),
                }
            }
            tokio::select! {
                biased;
                ready = watched.writable() => match ready {
                    Ok(mut guard) => match guard.try_io(|_| self.write_now(bytes)) {
                        Ok(Ok(n)) => bytes = &bytes[n..],
                        Ok(Err(_)) => return bytes.len(),
                        Err(_would_block) => {}
                    },
                    Err(_) => return bytes.len(),
                },
                () = cancel.cancelled() => return bytes.len(),
            }
        }
        0
    }

    fn write_now(&self, bytes: &[u8]) -> io::Result<usize> {
        let (file, most) = match &self.own {
            Own::NonBlocking(fd) => (fd.get_ref(), bytes.len()),
            Own::Polled(fd) => {
                let mut poll = [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(fd.get_ref()), nix::poll::PollFlags::POLLOUT)];
                if nix::poll::poll(&mut poll, nix::poll::PollTimeout::ZERO)? == 0 {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                (fd.get_ref(), bytes.len().min(PIPE_BUF))
            }
            Own::Plain(file) => (file, bytes.len()),
        };
        let mut file = file;
        loop {
            match file.write(&bytes[..most]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }
}
