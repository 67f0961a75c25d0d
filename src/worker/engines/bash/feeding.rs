//! An execution's standard input on its way: from the descriptor that init gave to the pipe that bash reads.
//!
//! bash cannot be handed a descriptor. Its pipe is always the same; that nobody holds the other end is its end.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use nix::poll::{PollFd, PollFlags};

/// Standard input that is read ahead, bytes.
const STDIN_BYTES: usize = 64 << 10;

/// Standard input on its way.
pub struct Feeding {
    from: File,
    to: File,
    waiting: Vec<u8>,
    ended: bool,
}

impl Feeding {
    /// From where it comes to where bash reads it.
    pub fn new(from: OwnedFd, to: File) -> Self {
        Feeding { from: from.into(), to, waiting: Vec::new(), ended: false }
    }

    /// What to wait for: more of it, or room.
    pub fn waits_for(&self) -> PollFd<'_> {
        let (fd, events): (BorrowedFd<'_>, _) = if self.waiting.is_empty() {
            (self.from.as_fd(), PollFlags::POLLIN)
        } else {
            (self.to.as_fd(), PollFlags::POLLOUT)
        };
        PollFd::new(fd, events)
    }

    /// Passes some on; gives whether that was all.
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
