//! The two pipes that carry a session's output, and how kaish's own output gets into them.
//!
//! kaish would collect output in lossy 10 MiB rings. Here every byte goes straight into the pipe of fd 1 or 2, and
//! whoever writes waits while the pipe is full: a slow reader slows the code. External commands get the very same
//! descriptor, so their output never passes through this process.

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
    Pipe(Sender),
    /// Not a pipe: writes go through at once.
    Plain(File),
}

impl Outlet {
    /// Takes the write end of an output pipe. Needs a tokio runtime around it.
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        // Opened again rather than switched to non-blocking: the flag belongs to the opening, and external commands
        // share the first one.
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

    /// Writes without waiting what goes in now and keeps the rest for the next writer.
    pub fn offer(&self, mut bytes: &[u8]) {
        let mut backlog = self.backlog.lock().unwrap_or_else(PoisonError::into_inner);
        if backlog.is_empty() && self.turn.try_lock().is_ok() {
            while !bytes.is_empty() {
                match self.write_now(bytes) {
                    Ok(n) => bytes = &bytes[n..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
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
                // Nobody reads any more.
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
