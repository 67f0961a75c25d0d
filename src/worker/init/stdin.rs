//! An execution's standard input: a new pipe whose read end goes to the engine. A task fills it, so
//! that code that does not read blocks nothing else. Runs in init.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{pipe2, write};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::core::error::Error;
use crate::link::guest::Answer;
use crate::sys::watched::{Watched, watch};

/// Chunks waiting for the pipe; a further one makes its sender wait.
const PIECES_QUEUED: usize = 4;

/// Between two attempts on a full terminal that was closed once and is open again.
const REOPENED_RETRY: Duration = Duration::from_millis(10);

/// A chunk of standard input.
struct Piece {
    data: Vec<u8>,
    end: bool,
    answer: Option<Answer<()>>,
}

/// The writing end.
pub struct Stdin {
    pieces: mpsc::Sender<Piece>,
    writer: JoinHandle<()>,
}

impl Drop for Stdin {
    fn drop(&mut self) {
        // Dropping the task drops the answers of unwritten chunks; see `take`.
        self.writer.abort();
    }
}

impl Stdin {
    /// Creates the pipe. Returns the writer and the engine's read end. With `end`, `data` is the
    /// whole input.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub fn open(data: Vec<u8>, end: bool) -> io::Result<(Stdin, OwnedFd)> {
        let (read_end, write_end) = pipe2(OFlag::O_CLOEXEC)?;
        Ok((Stdin::to(write_end, data, end)?, read_end))
    }

    /// Writes into a pipe, or to a terminal's controlling end.
    ///
    /// # Errors
    /// If it cannot be watched.
    pub fn to(write_end: OwnedFd, data: Vec<u8>, end: bool) -> io::Result<Stdin> {
        nix::fcntl::fcntl(&write_end, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let write_end = watch(write_end, Interest::WRITABLE)?;
        let (pieces, queue) = mpsc::channel(PIECES_QUEUED);
        // There is room: the queue is new.
        let _ = pieces.try_send(Piece { data, end, answer: None });
        let writer = tokio::task::spawn_local(write_all(write_end, queue));
        Ok(Stdin { pieces, writer })
    }

    /// Passes more input; answered once the pipe has taken it.
    pub fn take(&self, data: Vec<u8>, end: bool, answer: Answer<()>) {
        let refused = match self.pieces.try_send(Piece { data, end, answer: Some(answer) }) {
            Ok(()) => return,
            Err(mpsc::error::TrySendError::Full(piece)) => {
                (piece, Error::busy("earlier standard input has not been read yet").hint("wait for the answers"))
            }
            Err(mpsc::error::TrySendError::Closed(piece)) => (piece, Error::not_found("standard input has ended")),
        };
        if let (Piece { answer: Some(answer), .. }, error) = refused {
            let _ = answer.send(Err(error));
        }
    }
}

async fn write_all(pipe: AsyncFd<Watched>, mut queue: mpsc::Receiver<Piece>) {
    while let Some(Piece { data, end, answer }) = queue.recv().await {
        let written = write_piece(&pipe, &data).await;
        let closed = written.is_err();
        if let Some(answer) = answer {
            let _ = answer.send(written.map_err(|_| Error::not_found("the code closed its standard input")));
        }
        if end || closed {
            return;
        }
    }
}

async fn write_piece(pipe: &AsyncFd<Watched>, data: &[u8]) -> io::Result<()> {
    let mut rest = data;
    while !rest.is_empty() {
        let mut guard = pipe.writable().await?;
        // Before the attempt, which takes it from the guard.
        let is_closed = guard.ready().is_write_closed();
        match guard.try_io(|fd| write(fd.get_ref(), rest).map_err(io::Error::from)) {
            Ok(written) => rest = &rest[written?..],
            // "Closed" never clears: `writable` would return at once for ever, and no other task would run.
            Err(_) if is_closed => {
                if is_hung_up(pipe)? {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                tokio::time::sleep(REOPENED_RETRY).await;
            }
            Err(_) => {}
        }
    }
    Ok(())
}

/// Whether no program has the other end of a terminal open at this moment.
fn is_hung_up(terminal: &AsyncFd<Watched>) -> io::Result<bool> {
    let mut polled = [PollFd::new(terminal.as_fd(), PollFlags::POLLOUT)];
    poll(&mut polled, PollTimeout::ZERO)?;
    Ok(polled[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP)))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn ended_terminal_blocks_no_task() {
        let pair = nix::pty::openpty(None, None).expect("a terminal");
        // Otherwise a full terminal drops input rather than refuse it.
        let mut raw = nix::sys::termios::tcgetattr(&pair.slave).expect("a terminal");
        nix::sys::termios::cfmakeraw(&mut raw);
        nix::sys::termios::tcsetattr(&pair.slave, nix::sys::termios::SetArg::TCSANOW, &raw).expect("a terminal");
        let (ended, waiting) = mpsc::channel();
        // A thread of its own: the runtime of a writer that never yields cannot be left.
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let tasks = tokio::task::LocalSet::new();
            let refused = tasks.block_on(&runtime, async {
                let stdin = Stdin::to(pair.master, vec![b'x'; 1 << 20], false).expect("watched");
                // The terminal is full before it closes.
                tokio::task::yield_now().await;
                drop(pair.slave);
                let (answer, refusal) = tokio::sync::oneshot::channel();
                stdin.take(b"more".to_vec(), false, answer);
                tokio::time::sleep(Duration::from_millis(50)).await;
                refusal.await
            });
            ended.send(matches!(refused, Err(_) | Ok(Err(_))))
        });
        let refused = waiting.recv_timeout(Duration::from_secs(20)).expect("the writer blocks other tasks");
        assert!(refused, "input was accepted by a closed terminal");
    }
}
