//! The guest's end of a port: a virtio-serial port, or a connection to a vsock listener. Never blocks in a read or
//! write, which would cost most of a serial port's speed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, SockaddrLike, SockaddrStorage, VsockAddr};

use crate::link::machine;

/// Pause between two looks at a port that no process of the host has open.
const UNUSED_PAUSE: Duration = Duration::from_millis(20);
/// Connections that wait while one is served.
const BACKLOG: i32 = 8;

/// Where a port's connections come from.
pub(super) enum Channel {
    /// A virtio-serial port: one file for all connections.
    Serial(Port),
    /// A vsock listener, which survives a restore of the machine; connections do not.
    Vsock(OwnedFd),
}

impl Channel {
    /// Opens the serial port of that name, or listens on the vsock port in a machine without serial ports.
    ///
    /// # Errors
    /// `NotFound`; those of the sockets.
    pub(super) fn open(name: &str, vsock: u32) -> io::Result<Channel> {
        match Port::find(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let listener = listen(&VsockAddr::new(libc::VMADDR_CID_ANY, vsock));
                listener.map(Channel::Vsock).map_err(|other| {
                    io::Error::new(error.kind(), format!("{error}, and cannot listen on vsock port {vsock}: {other}"))
                })
            }
            found => found.map(Channel::Serial),
        }
    }

    /// Whether the machine has vsock.
    pub(super) fn is_vsock(&self) -> bool {
        matches!(self, Channel::Vsock(_))
    }

    /// Serves the host for ever: one connection after the other.
    pub(super) fn serve(&self, mut act: impl FnMut(&Port)) {
        loop {
            match self {
                Channel::Serial(port) => act(port),
                Channel::Vsock(listener) => match accept(listener) {
                    Ok(Some(port)) => act(&port),
                    Ok(None) => {}
                    Err(_) => std::thread::sleep(UNUSED_PAUSE),
                },
            }
        }
    }
}

fn listen(address: &dyn SockaddrLike) -> io::Result<OwnedFd> {
    let family = address.family().unwrap_or(AddressFamily::Vsock);
    let listener = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    socket::bind(listener.as_raw_fd(), address)?;
    socket::listen(&listener, Backlog::new(BACKLOG)?)?;
    Ok(listener)
}

/// The next connection of the host; `None` for another peer's.
fn accept(listener: &OwnedFd) -> io::Result<Option<Port>> {
    let accepted = socket::accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK)?;
    let connection = crate::sys::process::adopt(accepted)?;
    let peer = socket::getpeername::<SockaddrStorage>(accepted)?;
    let is_host = peer.as_vsock_addr().is_none_or(|peer| peer.cid() == libc::VMADDR_CID_HOST);
    Ok(is_host.then(|| Port { file: connection.into(), is_connection: true }))
}

/// A port with which a connection begins.
pub(super) struct Port {
    file: File,
    /// Whether it is over when the host closes it.
    is_connection: bool,
}

impl Port {
    /// Opens the serial port of that name.
    ///
    /// # Errors
    /// `NotFound`.
    fn find(name: &str) -> io::Result<Port> {
        for entry in std::fs::read_dir("/sys/class/virtio-ports")? {
            let entry = entry?;
            let found = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if found.trim() == name {
                let path = Path::new("/dev").join(entry.file_name());
                let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
                return Ok(Port { file, is_connection: false });
            }
        }
        Err(io::Error::new(io::ErrorKind::NotFound, format!("the machine has no port {name}")))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Whether the port is over when the host closes it.
    pub(super) fn is_connection(&self) -> bool {
        self.is_connection
    }

    /// Waits until the host has the port open and says hello; returns its nonce, or `None` if a connection is over. What
    /// an earlier connection left is discarded. `received`: the last bytes that were read, with which the hello may have
    /// begun.
    pub(super) fn await_hello(&self, mut received: Vec<u8>) -> Option<[u8; 16]> {
        loop {
            let mut bytes = [0; 4096];
            match (&*self).read(&mut bytes) {
                Ok(0) | Err(_) if self.is_connection => return None,
                Ok(0) | Err(_) => {
                    received.clear();
                    std::thread::sleep(UNUSED_PAUSE);
                }
                Ok(count) => {
                    received.extend_from_slice(&bytes[..count]);
                    if let Some(nonce) = machine::nonce_of(&received) {
                        return Some(nonce);
                    }
                    let surplus = received.len().saturating_sub(machine::HELLO_BYTES);
                    received.drain(..surplus);
                }
            }
        }
    }

    fn wait(&self, events: PollFlags) -> io::Result<()> {
        loop {
            let mut fds = [PollFd::new(self.file.as_fd(), events)];
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
            match (&self.file).read(into) {
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
            match (&self.file).write(&bytes[..bytes.len().min(32 << 10)]) {
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

    /// A serial port, and the host's end of it.
    pub(in crate::worker::guest) fn port() -> io::Result<(Port, std::os::unix::net::UnixStream)> {
        let (guest, host) = std::os::unix::net::UnixStream::pair()?;
        guest.set_nonblocking(true)?;
        Ok((Port { file: OwnedFd::from(guest).into(), is_connection: false }, host))
    }

    /// A listener like that of vsock, and its address.
    pub(in crate::worker::guest) fn listener(folder: &Path) -> io::Result<(Channel, std::path::PathBuf)> {
        let path = folder.join("vsock");
        Ok((Channel::Vsock(listen(&nix::sys::socket::UnixAddr::new(&path)?)?), path))
    }

    #[test]
    fn foreign_vsock_peers_are_refused() -> io::Result<()> {
        const PORT: u32 = 0x7a11_0001;
        let local = VsockAddr::new(libc::VMADDR_CID_LOCAL, PORT);
        let Ok(Channel::Vsock(listener)) = Channel::open("ryokan.none", PORT) else {
            eprintln!("not tested: this system has no vsock");
            return Ok(());
        };
        let peer = socket::socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        if let Err(error) = socket::connect(peer.as_raw_fd(), &local) {
            eprintln!("not tested: this system has no local vsock: {error}");
            return Ok(());
        }
        assert!(accept(&listener)?.is_none(), "only the host is served");
        Ok(())
    }
}
