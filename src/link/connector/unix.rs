//! Unix sockets with paths of any length, and descriptor passing.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use capnp_rpc::rpc_twoparty_capnp::Side;
use capnp_rpc::twoparty::VatNetwork;
use futures::AsyncRead;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::{AsyncReadExt as _, Interest};
use tokio::net::UnixStream;

use super::halves::halves;
use super::{Channel, Connector, DescriptorNote};
use crate::core::limits;
use crate::link::message_limit::MaxWords;

/// Longest path that `sockaddr_un` holds with its terminating zero.
const SUN_PATH_BYTES: usize = 107;

/// Connects to a worker's Unix socket; a second socket beside it takes descriptors.
#[derive(Debug, Clone)]
pub struct UnixConnector {
    socket: PathBuf,
}

impl UnixConnector {
    /// Connects to the worker that listens on `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        UnixConnector { socket: socket.into() }
    }
}

#[async_trait::async_trait(?Send)]
impl Connector for UnixConnector {
    async fn connect(&self) -> io::Result<Channel> {
        let named = |error| io::Error::new(io::Error::kind(&error), format!("{}: {error}", self.socket.display()));
        channel(connect(&self.socket).await.map_err(named)?)
    }

    async fn pass_descriptor(&self, note: DescriptorNote, descriptor: OwnedFd) -> io::Result<()> {
        let mut stream = connect(&descriptor_path(&self.socket)).await?;
        let bytes = note.to_bytes();
        let sent = stream
            .async_io(Interest::WRITABLE, || {
                let fds = [descriptor.as_raw_fd()];
                let rights = [ControlMessage::ScmRights(&fds)];
                sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&bytes)], &rights, MsgFlags::MSG_NOSIGNAL, None)
                    .map_err(io::Error::from)
            })
            .await?;
        if sent != bytes.len() {
            return Err(io::Error::new(io::ErrorKind::WriteZero, "the note did not go out whole"));
        }
        stream.read_u8().await.map(drop)
    }

    fn passes_descriptors(&self) -> bool {
        true
    }
}

/// Wraps a connected socket as a channel.
///
/// # Errors
/// If the socket cannot be watched.
pub fn channel(stream: UnixStream) -> io::Result<Channel> {
    let (read, write) = halves(stream)?;
    Ok(Channel { read: Box::new(read), write: Box::new(write) })
}

/// The two-party network over a connected socket, with messages of the protocol's largest size.
///
/// # Errors
/// If the socket cannot be watched.
pub fn network(stream: UnixStream, side: Side) -> io::Result<VatNetwork<impl AsyncRead + Unpin + 'static>> {
    network_of(stream, side, MaxWords::new(limits::MESSAGE_WORDS))
}

/// As [`network_of`] with messages of at most `most` words; the limit may change later.
///
/// # Errors
/// If the socket cannot be watched.
pub fn network_of(
    stream: UnixStream,
    side: Side,
    most: MaxWords,
) -> io::Result<VatNetwork<impl AsyncRead + Unpin + 'static>> {
    Ok(super::network(channel(stream)?, side, most))
}

/// A path that fits `sockaddr_un`: the path itself, or one through its opened folder, which must
/// stay open.
fn short_path(path: &Path) -> io::Result<(PathBuf, Option<File>)> {
    if path.as_os_str().len() <= SUN_PATH_BYTES {
        return Ok((path.to_owned(), None));
    }
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, format!("{} names no socket", path.display()));
    let (folder, name) = (path.parent().ok_or_else(wrong)?, path.file_name().ok_or_else(wrong)?);
    let folder = File::open(folder)?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    Ok((short, Some(folder)))
}

/// Path of the socket for descriptors, beside the private socket.
pub fn descriptor_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".fd");
    path.into()
}

/// Connects to a Unix socket whose path may be longer than `sockaddr_un`.
///
/// # Errors
/// Those of `connect`.
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (short, _open) = short_path(path)?;
    UnixStream::connect(short).await
}

/// As [`connect`], blocking.
///
/// # Errors
/// Those of `connect`.
pub fn connect_blocking(path: &Path) -> io::Result<std::os::unix::net::UnixStream> {
    let (short, _open) = short_path(path)?;
    std::os::unix::net::UnixStream::connect(short)
}

/// Listens on a Unix socket whose path may be longer than `sockaddr_un`.
///
/// # Errors
/// Those of `bind`.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let (short, _open) = short_path(path)?;
    UnixListener::bind(short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn long_paths_are_reachable() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let deep = folder.path().join("d".repeat(120));
        std::fs::create_dir(&deep)?;
        for path in [folder.path().join("s"), deep.join("s")] {
            let listener = listen(&path)?;
            let connected = connect(&path).await?;
            listener.accept()?;
            drop(connected);
        }
        Ok(())
    }
}
