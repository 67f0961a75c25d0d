//! Frames over the control socket, with accompanying descriptors.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::fcntl::OFlag;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::link::frames::{Decoder, Event, FrameError, Request, encode};
use crate::sys::watched::{Watched, watch};

/// Why serving ends, other than by request.
#[derive(Debug)]
pub enum Stop {
    /// The peer is gone.
    HungUp,
    /// The peer broke the contract.
    Protocol,
    /// kaish panicked.
    Poisoned,
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

/// The control socket's frames with accompanying descriptors.
pub struct Link {
    /// Registered for reading only: readiness for writing would wake the engine whenever init
    /// reads.
    socket: AsyncFd<Watched>,
    decoder: Decoder,
    /// Received descriptors, in order.
    pub fds: VecDeque<File>,
    buffer: Vec<u8>,
    /// Requests that cannot be served yet.
    pub waiting: VecDeque<(Request, Vec<u8>)>,
    /// Queued frames.
    pub out: Vec<u8>,
}

const READ_BYTES: usize = 64 << 10;
/// Limit of requests waiting for an execution's end.
pub const WAITING: usize = 1024;

impl Link {
    /// Wraps the control socket.
    ///
    /// # Errors
    /// If it is no socket.
    pub fn new(control: OwnedFd) -> io::Result<Self> {
        // External commands must never hold the control socket.
        nix::fcntl::fcntl(&control, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
        let socket = std::os::unix::net::UnixStream::from(control);
        socket.set_nonblocking(true)?;
        Ok(Link {
            socket: watch(socket, Interest::READABLE)?,
            decoder: Decoder::default(),
            fds: VecDeque::new(),
            buffer: vec![0; READ_BYTES],
            waiting: VecDeque::new(),
            out: Vec::new(),
        })
    }

    /// The next request; `None` at the end. Cancel safe.
    ///
    /// # Errors
    /// If the peer breaks the contract or the socket fails.
    pub async fn next(&mut self) -> Result<Option<(Request, Vec<u8>)>, Stop> {
        loop {
            if let Some(frame) = self.decoder.frame()? {
                return Ok(Some(frame));
            }
            let mut guard = self.socket.readable().await?;
            let (n, fds) = match receive(guard.get_inner().as_raw_fd(), &mut self.buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    guard.clear_ready();
                    continue;
                }
                received => received?,
            };
            if n == 0 {
                return Ok(None);
            }
            // A short read has emptied the socket; further data wakes it again. Except after
            // descriptors: such a read ends where they were sent.
            if n < self.buffer.len() && fds.is_empty() {
                guard.clear_ready();
            }
            self.fds.extend(fds);
            self.decoder.feed(&self.buffer[..n]);
        }
    }

    /// Queues a frame for the next [`Link::send`].
    ///
    /// # Errors
    /// If it is larger than a frame may be.
    pub fn put(&mut self, event: &Event, tail: &[u8]) -> Result<(), FrameError> {
        encode(event, tail, &mut self.out)
    }

    /// Sends the queued frames.
    ///
    /// # Errors
    /// If the peer is gone.
    pub async fn send(&mut self) -> io::Result<()> {
        let mut sent = 0;
        let mut room = None;
        while sent < self.out.len() {
            match send_now(self.socket.as_raw_fd(), &self.out[sent..]) {
                Ok(n) => sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let watched = match &room {
                        Some(watched) => watched,
                        None => {
                            let again = self.socket.get_ref().as_fd().try_clone_to_owned()?;
                            room.insert(watch(again, Interest::WRITABLE)?)
                        }
                    };
                    watched.writable().await?.clear_ready();
                }
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.out.shrink_to(READ_BYTES * 4);
        Ok(())
    }
}

fn send_now(fd: RawFd, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match sendmsg::<()>(fd, &[IoSlice::new(bytes)], &[], MsgFlags::MSG_NOSIGNAL, None) {
            Err(nix::errno::Errno::EINTR) => {}
            done => return Ok(done?),
        }
    }
}

/// Reads bytes and descriptors.
///
/// A received descriptor is a bare number that safe code cannot own, so it is reopened by number
/// and then closed. That suits pipes and files, which standard input is; init passes no sockets.
fn receive(fd: RawFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
    let mut space = nix::cmsg_space!([RawFd; 4]);
    loop {
        let mut slices = [IoSliceMut::new(buffer)];
        let message = match recvmsg::<()>(fd, &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Err(nix::errno::Errno::EINTR) => continue,
            done => done?,
        };
        let mut files = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(numbers) = control {
                for number in numbers {
                    let path = format!("/proc/self/fd/{number}");
                    let opened = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
                    // No other owner of the number exists.
                    let _ = nix::unistd::close(number);
                    files.push(opened?);
                }
            }
        }
        return Ok((message.bytes, files));
    }
}
