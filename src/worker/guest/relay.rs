//! Relays the link's bytes between the daemon's port and the worker's private socket. Knows nothing of their meaning.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::SOCKET;
use super::port::Port;
use crate::link::machine;

/// Bytes on their way in one direction.
const PIECE_BYTES: usize = 64 << 10;

/// Serves one connection after the other, until the port is over.
pub(super) fn run(port: &Port) {
    while let Some(nonce) = port.await_hello(Vec::new()) {
        // Without a worker there is no answer: the daemon tries again.
        let Ok(worker) = UnixStream::connect(SOCKET) else { continue };
        if (&*port).write_all(&machine::ready(nonce)).is_ok() {
            // Either end has closed; the next hello begins anew.
            let _ = relay(port, &worker);
            if port.is_connection() {
                return;
            }
        }
    }
}

#[derive(Default)]
struct Way {
    bytes: Vec<u8>,
    sent: usize,
}

impl Way {
    /// Moves what it can; `false` at the end of the source.
    fn go(&mut self, from: &mut impl Read, to: &mut impl Write) -> io::Result<bool> {
        if self.sent == self.bytes.len() {
            self.bytes.resize(PIECE_BYTES, 0);
            self.sent = 0;
            let read = ready(from.read(&mut self.bytes));
            let count = read.as_ref().map_or(0, |count| count.unwrap_or(0));
            self.bytes.truncate(count);
            if read? == Some(0) {
                return Ok(false);
            }
        }
        while self.sent < self.bytes.len() {
            match ready(to.write(&self.bytes[self.sent..(self.sent + (32 << 10)).min(self.bytes.len())]))? {
                Some(count) => self.sent += count,
                None => break,
            }
        }
        Ok(true)
    }

    fn is_full(&self) -> bool {
        self.sent < self.bytes.len()
    }
}

fn ready(done: io::Result<usize>) -> io::Result<Option<usize>> {
    match done {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        done => done.map(Some),
    }
}

fn relay(port: &Port, worker: &UnixStream) -> io::Result<()> {
    worker.set_nonblocking(true)?;
    let (mut inwards, mut outwards) = (Way::default(), Way::default());
    loop {
        let events = |reads: bool, writes: bool| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::POLLIN, reads);
            events.set(PollFlags::POLLOUT, writes);
            events
        };
        let mut fds = [
            PollFd::new(port.file().as_fd(), events(!inwards.is_full(), outwards.is_full())),
            PollFd::new(worker.as_fd(), events(!outwards.is_full(), inwards.is_full())),
        ];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let closed = fds[0].revents().is_none_or(|found| {
            found.intersects(PollFlags::POLLHUP | PollFlags::POLLERR) && !found.contains(PollFlags::POLLIN)
        });
        if closed || !inwards.go(&mut port.file(), &mut &*worker)? || !outwards.go(&mut &*worker, &mut port.file())? {
            return Ok(());
        }
    }
}
