//! An execution's standard input: a fresh pipe whose read end goes to the engine, filled by a task of its own, so that code
//! that does not read blocks nobody else.

use std::io;
use std::os::fd::OwnedFd;

use nix::fcntl::OFlag;
use nix::unistd::{pipe2, write};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::core::error::Error;
use crate::link::guest::Answer;
use crate::sys::watched::{Watched, watch};

/// Pieces that wait for the pipe; one more makes its sender wait.
const PIECES_QUEUED: usize = 4;

/// A piece of standard input.
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
        // Answers of pieces that were not written are dropped with the task: "the worker is ending" is not said, see `take`.
        self.writer.abort();
    }
}

impl Stdin {
    /// Makes the pipe. Gives the writer and the read end for the engine. With `end`, `data` is all there is.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub fn open(data: Vec<u8>, end: bool) -> io::Result<(Stdin, OwnedFd)> {
        let (read_end, write_end) = pipe2(OFlag::O_CLOEXEC)?;
        nix::fcntl::fcntl(&write_end, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let write_end = watch(write_end, Interest::WRITABLE)?;
        let (pieces, queue) = mpsc::channel(PIECES_QUEUED);
        // There is room: the queue is new.
        let _ = pieces.try_send(Piece { data, end, answer: None });
        let writer = tokio::task::spawn_local(write_all(write_end, queue));
        Ok((Stdin { pieces, writer }, read_end))
    }

    /// Gives more to the code; answered when the pipe took it.
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
        if let Ok(written) = guard.try_io(|fd| write(fd.get_ref(), rest).map_err(io::Error::from)) {
            rest = &rest[written?..];
        }
    }
    Ok(())
}
