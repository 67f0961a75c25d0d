//! Forwards standard input from init's descriptor to the pipe that bash reads.
//!
//! bash cannot receive descriptors. Its pipe stays the same; end of input is the absence of a
//! writer.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use nix::poll::{PollFd, PollFlags};

/// Read-ahead of standard input, bytes.
const STDIN_BYTES: usize = 64 << 10;

/// Standard input in transit.
pub struct Feeding {
    from: File,
    to: File,
    waiting: Vec<u8>,
    ended: bool,
}

impl Feeding {
    /// Connects the source and bash's pipe.
    pub fn new(from: OwnedFd, to: File) -> Self {
        Feeding { from: from.into(), to, waiting: Vec::new(), ended: false }
    }

    /// The descriptor to wait for: more input, or room.
    pub fn waits_for(&self) -> PollFd<'_> {
        let (fd, events): (BorrowedFd<'_>, _) = if self.waiting.is_empty() {
            (self.from.as_fd(), PollFlags::POLLIN)
        } else {
            (self.to.as_fd(), PollFlags::POLLOUT)
        };
        PollFd::new(fd, events)
    }

    /// Forwards some input; returns whether that was all.
    pub fn turn(&mut self) -> bool {
        if self.waiting.is_empty() && !self.ended {
            let mut buffer = vec![0; STDIN_BYTES];
            match self.from.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(count) => self.waiting.extend_from_slice(&buffer[..count]),
                Err(error)
                    if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => {}
                Err(_) => self.ended = true,
            }
        }
        match self.to.write(&self.waiting) {
            Ok(count) => drop(self.waiting.drain(..count)),
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => {}
            Err(_) => return true,
        }
        self.ended && self.waiting.is_empty()
    }
}
