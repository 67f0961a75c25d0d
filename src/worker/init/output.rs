//! The engine's two output pipes, read only on demand: not reading slows the code down. Runs in
//! init.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::task::{Context, Poll};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::read;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::core::exec::Stream;
use crate::sys::watched::{Watched, watch};

/// One chunk, bytes.
const CHUNK_BYTES: usize = 256 << 10;
/// Assumed pipe size if it cannot be queried.
const PIPE_BYTES: usize = 64 << 10;
/// What a terminal may hold: the buffer between its ends, and its line's.
const TERMINAL_BYTES: usize = 128 << 10;

struct Pipe {
    stream: Stream,
    /// `None`: no process can write to it any more.
    fd: Option<AsyncFd<Watched>>,
    capacity: usize,
    /// Whether a short read means that nothing is left.
    is_pipe: bool,
}

/// Both pipes, or one terminal.
pub struct Pipes {
    pipes: Vec<Pipe>,
    chunk: Box<[u8]>,
}

impl Pipes {
    /// Wraps the read ends of the engine's stdout and stderr.
    ///
    /// # Errors
    /// If they cannot be watched.
    pub fn new(stdout: OwnedFd, stderr: OwnedFd) -> io::Result<Self> {
        Ok(Pipes {
            pipes: vec![Pipe::new(Stream::Stdout, stdout)?, Pipe::new(Stream::Stderr, stderr)?],
            chunk: vec![0; CHUNK_BYTES].into_boxed_slice(),
        })
    }

    /// Wraps the end that controls a terminal: all of its output is stdout.
    ///
    /// # Errors
    /// If it cannot be watched.
    pub fn of_terminal(terminal: OwnedFd) -> io::Result<Self> {
        let mut pipe = Pipe::new(Stream::Stdout, terminal)?;
        (pipe.capacity, pipe.is_pipe) = (TERMINAL_BYTES, false);
        Ok(Pipes { pipes: vec![pipe], chunk: vec![0; CHUNK_BYTES].into_boxed_slice() })
    }

    /// Reads one chunk of either stream, stdout first.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<(Stream, &[u8])> {
        for pipe in &mut self.pipes {
            if let Poll::Ready(n) = pipe.poll_read(cx, &mut self.chunk) {
                return Poll::Ready((pipe.stream, &self.chunk[..n]));
            }
        }
        Poll::Pending
    }

    /// Reads the pipes' current content without blocking, bounded by their size: output written
    /// meanwhile may be left.
    pub fn drain(&mut self, mut take: impl FnMut(Stream, &[u8])) {
        for pipe in &mut self.pipes {
            let mut left = pipe.capacity;
            while left > 0 {
                let n = pipe.read_now(&mut self.chunk);
                take(pipe.stream, &self.chunk[..n]);
                left = left.saturating_sub(n);
                if n == 0 || (pipe.is_pipe && n < self.chunk.len()) {
                    break;
                }
            }
        }
    }
}

impl Pipe {
    fn new(stream: Stream, fd: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_truncate(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let size = fcntl(&fd, FcntlArg::F_GETPIPE_SZ).ok();
        let capacity = size.and_then(|size| usize::try_from(size).ok()).unwrap_or(PIPE_BYTES);
        Ok(Pipe { stream, fd: Some(watch(fd, Interest::READABLE)?), capacity, is_pipe: true })
    }

    fn poll_read(&mut self, cx: &mut Context<'_>, chunk: &mut [u8]) -> Poll<usize> {
        while let Some(fd) = &self.fd {
            let mut guard = match fd.poll_read_ready(cx) {
                Poll::Ready(Ok(guard)) => guard,
                Poll::Ready(Err(_)) => break,
                Poll::Pending => return Poll::Pending,
            };
            match read(guard.get_inner(), chunk) {
                Ok(0) => break,
                Ok(n) => {
                    if self.is_pipe && n < chunk.len() {
                        guard.clear_ready();
                    }
                    return Poll::Ready(n);
                }
                Err(Errno::EAGAIN) => guard.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(_) => break,
            }
        }
        self.fd = None;
        Poll::Pending
    }

    fn read_now(&mut self, chunk: &mut [u8]) -> usize {
        loop {
            let Some(fd) = &self.fd else { return 0 };
            match read(fd, chunk) {
                Ok(n) => return n,
                Err(Errno::EINTR) => {}
                Err(_) => return 0,
            }
        }
    }
}

impl std::fmt::Debug for Pipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let number = self.fd.as_ref().map(AsRawFd::as_raw_fd);
        f.debug_struct("Pipe").field("stream", &self.stream).field("fd", &number).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[tokio::test]
    async fn drain_reads_available_only() {
        let (out, mut out_end) = std::io::pipe().expect("a pipe");
        let (err, mut err_end) = std::io::pipe().expect("a pipe");
        let mut pipes = Pipes::new(out.into(), err.into()).expect("pipes");
        out_end.write_all(&[b'o'; 1000]).expect("written");
        err_end.write_all(&[b'e'; 10]).expect("written");
        let mut seen = [0; 2];
        pipes.drain(|stream, data| seen[stream as usize] += data.len());
        assert_eq!(seen, [1000, 10]);
        out_end.write_all(b"later").expect("written");
        let (stream, data) = std::future::poll_fn(|cx| pipes.poll_read(cx).map(|(s, d)| (s, d.to_vec()))).await;
        assert_eq!((stream, &data[..]), (Stream::Stdout, &b"later"[..]));
    }
}
