//! Frames over the control socket, with accompanying descriptors. Blocks only to send: the server
//! waits for several sources.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, send};

use crate::link::frames::{Decoder, Event, FrameError, Request, encode};
use crate::sys::socket::receive_with_fds;

/// Why serving ends, other than by request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The peer is gone.
    HungUp,
    /// The peer broke the contract.
    Protocol,
    /// No shell can be started.
    NoShell,
}

impl From<FrameError> for Stop {
    fn from(_: FrameError) -> Self {
        Stop::Protocol
    }
}

impl From<io::Error> for Stop {
    fn from(_: io::Error) -> Self {
        Stop::HungUp
    }
}

/// The control socket's frames.
pub struct Link {
    socket: OwnedFd,
    decoder: Decoder,
    buffer: Vec<u8>,
    /// Received descriptors, in order.
    pub fds: VecDeque<OwnedFd>,
    /// Requests that cannot be served yet.
    pub waiting: VecDeque<(Request, Vec<u8>)>,
    out: Vec<u8>,
}

const READ_BYTES: usize = 64 << 10;
/// Limit of requests waiting for an execution's end.
pub const WAITING: usize = 1024;
/// Limit of descriptors waiting for their executions.
const FDS_WAITING: usize = 64;

impl Link {
    /// Wraps the control socket.
    ///
    /// # Errors
    /// If it is no socket.
    pub fn new(control: OwnedFd) -> io::Result<Self> {
        nix::fcntl::fcntl(&control, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
        let socket = std::os::unix::net::UnixStream::from(control);
        socket.set_nonblocking(true)?;
        Ok(Link {
            socket: socket.into(),
            decoder: Decoder::default(),
            buffer: vec![0; READ_BYTES],
            fds: VecDeque::new(),
            waiting: VecDeque::new(),
            out: Vec::new(),
        })
    }

    /// The descriptor to wait for.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next whole request that has arrived.
    ///
    /// # Errors
    /// If the peer is gone or breaks the contract.
    pub fn try_next(&mut self) -> Result<Option<(Request, Vec<u8>)>, Stop> {
        loop {
            if let Some(frame) = self.decoder.frame()? {
                return Ok(Some(frame));
            }
            match receive_with_fds(&self.socket, &mut self.buffer) {
                Ok((0, _)) => return Err(Stop::HungUp),
                Ok((count, fds)) => {
                    if self.fds.len() + fds.len() > FDS_WAITING {
                        return Err(Stop::Protocol);
                    }
                    self.fds.extend(fds);
                    self.decoder.feed(&self.buffer[..count]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Queues a frame for the next [`Link::send`].
    ///
    /// # Errors
    /// If it is larger than a frame may be.
    pub fn put(&mut self, event: &Event, tail: &[u8]) -> Result<(), FrameError> {
        encode(event, tail, &mut self.out)
    }

    /// Bytes waiting to be sent.
    pub fn unsent(&self) -> usize {
        self.out.len()
    }

    /// Sends the queued frames, however long the peer takes.
    ///
    /// # Errors
    /// If the peer is gone.
    pub fn send(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.out.len() {
            match send(self.socket.as_raw_fd(), &self.out[sent..], MsgFlags::MSG_NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    let mut room = [PollFd::new(self.socket.as_fd(), PollFlags::POLLOUT)];
                    match poll(&mut room, PollTimeout::NONE) {
                        Ok(_) | Err(Errno::EINTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.out.clear();
        self.out.shrink_to(READ_BYTES * 4);
        Ok(())
    }
}
