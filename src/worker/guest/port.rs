//! A virtio-serial port in the guest. Never blocks in a read or write, which would cost most of its speed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::link::machine;

/// Pause between two looks at a port that no process of the host has open.
const UNUSED_PAUSE: Duration = Duration::from_millis(20);

/// A port.
pub(super) struct Port(File);

impl Port {
    /// Opens the port of that name.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn find(name: &str) -> io::Result<Port> {
        for entry in std::fs::read_dir("/sys/class/virtio-ports")? {
            let entry = entry?;
            let found = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if found.trim() == name {
                let path = Path::new("/dev").join(entry.file_name());
                let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
                return Ok(Port(file));
            }
        }
        Err(io::Error::new(io::ErrorKind::NotFound, format!("the machine has no port {name}")))
    }

    pub(super) fn file(&self) -> &File {
        &self.0
    }

    /// Waits until the host has the port open and says hello; returns its nonce. What an earlier connection left is
    /// discarded. `received`: the last bytes that were read, with which the hello may have begun.
    pub(super) fn await_hello(&self, mut received: Vec<u8>) -> [u8; 16] {
        loop {
            let mut bytes = [0; 4096];
            match (&*self).read(&mut bytes) {
                Ok(0) | Err(_) => {
                    received.clear();
                    std::thread::sleep(UNUSED_PAUSE);
                }
                Ok(count) => {
                    received.extend_from_slice(&bytes[..count]);
                    if let Some(nonce) = machine::nonce_of(&received) {
                        return nonce;
                    }
                    let surplus = received.len().saturating_sub(machine::HELLO_BYTES);
                    received.drain(..surplus);
                }
            }
        }
    }

    fn wait(&self, events: PollFlags) -> io::Result<()> {
        loop {
            let mut fds = [PollFd::new(self.0.as_fd(), events)];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) => {}
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let found = fds[0].revents().unwrap_or(PollFlags::POLLHUP);
            if found.intersects(events) {
                return Ok(());
            }
            if found.intersects(PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
    }
}

/// Reads a port, and keeps the last bytes: the host may close and open it before the guest notices, and what then reads
/// like a message is a hello.
pub(super) struct Tail<'p> {
    pub port: &'p Port,
    pub last: Vec<u8>,
}

impl Read for Tail<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.port.read(into)?;
        self.last.extend_from_slice(&into[..count]);
        let surplus = self.last.len().saturating_sub(machine::HELLO_BYTES - 1);
        self.last.drain(..surplus);
        Ok(count)
    }
}

impl Read for &Port {
    /// Waits for bytes; 0 means that the host closed the port.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.0).read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::POLLIN)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }
}

impl Write for &Port {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match (&self.0).write(&bytes[..bytes.len().min(32 << 10)]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::POLLOUT)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A port, and the host's end of it.
    pub(in crate::worker::guest) fn port() -> io::Result<(Port, std::os::unix::net::UnixStream)> {
        let (guest, host) = std::os::unix::net::UnixStream::pair()?;
        guest.set_nonblocking(true)?;
        Ok((Port(std::os::fd::OwnedFd::from(guest).into()), host))
    }
}
