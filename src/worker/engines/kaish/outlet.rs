//! The session's two output pipes, and how kaish's output reaches them.
//!
//! kaish would collect output in lossy 10 MiB rings. Here every byte goes straight into the pipe of
//! fd 1 or 2, and writers wait while the pipe is full: a slow reader slows the code. External
//! commands get the same descriptor, so their output bypasses this process.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};

use nix::fcntl::OFlag;
use tokio::net::unix::pipe::Sender;
use tokio_util::sync::CancellationToken;

/// The write end of one output pipe.
pub struct Outlet {
    /// The descriptor for external commands: blocking, as programs expect.
    inherited: OwnedFd,
    own: Own,
    /// Bytes from kaish that could not be written at once; they go first.
    backlog: Mutex<VecDeque<u8>>,
    /// One writer at a time, so that pipeline stages do not mix within a chunk.
    turn: tokio::sync::Mutex<()>,
}

enum Own {
    /// A second, non-blocking opening of the same pipe.
    Pipe(Sender),
    /// Not a pipe: writes succeed at once.
    Plain(File),
}

impl Outlet {
    /// Wraps the write end of an output pipe. Needs a tokio runtime.
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        // Reopened, not set to non-blocking: the flag belongs to the open file description, which
        // external commands share.
        let again = OpenOptions::new().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
        let own = match again {
            Ok(file) if file.metadata()?.file_type().is_fifo() => Own::Pipe(Sender::from_file(file)?),
            Ok(file) => Own::Plain(file),
            Err(_) => Own::Plain(fd.try_clone()?.into()),
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

    /// Writes as much as possible without blocking and keeps the rest for the next writer.
    pub fn offer(&self, mut bytes: &[u8]) {
        let mut backlog = self.backlog.lock().unwrap_or_else(PoisonError::into_inner);
        if backlog.is_empty() && self.turn.try_lock().is_ok() {
            while !bytes.is_empty() {
                match self.write_now(bytes) {
                    Ok(n) => bytes = &bytes[n..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    // No reader is left, for the rest neither.
                    Err(_) => return,
                }
            }
        }
        backlog.extend(bytes);
    }

    /// Writes everything, waiting for the reader. Ends early if `cancel` fires or the reader is
    /// gone.
    ///
    /// Returns the number of unwritten bytes.
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

    /// Writes the rest of [`Outlet::offer`].
    pub async fn flush(&self, cancel: &CancellationToken) {
        if !self.backlog.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            self.write(&[], cancel).await;
        }
    }

    async fn write_slice(&self, mut bytes: &[u8], cancel: &CancellationToken) -> usize {
        while !bytes.is_empty() {
            match self.write_now(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let Own::Pipe(pipe) = &self.own else {
                        return bytes.len();
                    };
                    tokio::select! {
                        biased;
                        ready = pipe.writable() => {
                            if ready.is_err() {
                                return bytes.len();
                            }
                        }
                        () = cancel.cancelled() => return bytes.len(),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // No reader is left.
                Err(_) => return bytes.len(),
            }
        }
        0
    }

    fn write_now(&self, bytes: &[u8]) -> io::Result<usize> {
        match &self.own {
            Own::Pipe(pipe) => pipe.try_write(bytes),
            Own::Plain(file) => {
                let mut file = file;
                file.write_all(bytes)?;
                Ok(bytes.len())
            }
        }
    }
}
