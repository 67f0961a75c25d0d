//! Unix sockets of any path length, and the buffers and limits of the link between daemon and worker.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use capnp_rpc::{rpc_twoparty_capnp::Side, twoparty::VatNetwork};
use futures::io::{BufReader, BufWriter};
use tokio::net::UnixStream;

use crate::core::limits;
use crate::link::connector::halves;
use crate::link::handshake::PROOF_BYTES;
use crate::link::message_limit::{Arrival, MostWords};

/// Longest path that `sockaddr_un` holds with its terminating zero.
const SUN_PATH_BYTES: usize = 107;
/// Output in flight between init and daemon, bytes: enough to keep both busy, little enough that back-pressure is felt.
const WINDOW_BYTES: usize = 1 << 20;
/// Small messages are gathered up to this, bytes.
const BUFFER_BYTES: usize = 16 << 10;

/// A path that fits `sockaddr_un`: the path itself, or one through its opened folder, which must stay open meanwhile.
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

/// Where a worker takes descriptors, beside its private socket.
pub fn descriptor_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".fd");
    path.into()
}

/// What goes with a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorNote {
    /// The name by which the next call speaks of it.
    pub token: u64,
    /// The daemon's proof over the token.
    pub proof: [u8; PROOF_BYTES],
}

impl DescriptorNote {
    /// Length of the note.
    pub const BYTES: usize = 8 + PROOF_BYTES;

    /// The note as it travels.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.token.to_le_bytes());
        bytes[8..].copy_from_slice(&self.proof);
        bytes
    }

    /// The note of those bytes.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (mut token, mut proof) = ([0; 8], [0; PROOF_BYTES]);
        token.copy_from_slice(&bytes[..8]);
        proof.copy_from_slice(&bytes[8..]);
        DescriptorNote { token: u64::from_le_bytes(token), proof }
    }
}

/// Connects to a Unix socket whose path may be longer than `sockaddr_un`.
///
/// # Errors
/// Those of `connect`.
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (short, _open) = short_path(path)?;
    UnixStream::connect(short).await
}

/// Listens on a Unix socket whose path may be longer than `sockaddr_un`.
///
/// # Errors
/// Those of `bind`.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let (short, _open) = short_path(path)?;
    UnixListener::bind(short)
}

/// The two-party network over a connected socket, buffered and bounded.
///
/// # Errors
/// If the socket cannot be watched.
pub fn network(stream: UnixStream, side: Side) -> io::Result<VatNetwork<impl futures::AsyncRead + Unpin + 'static>> {
    network_of(stream, side, MostWords::new(limits::MESSAGE_WORDS))
}

/// The same with messages of at most so many words, for as long as nobody changes that.
///
/// # Errors
/// If the socket cannot be watched.
pub fn network_of(
    stream: UnixStream,
    side: Side,
    most: MostWords,
) -> io::Result<VatNetwork<impl futures::AsyncRead + Unpin + 'static>> {
    let (read, write) = halves::halves(stream)?;
    let mut options = capnp::message::ReaderOptions::new();
    options.traversal_limit_in_words(Some(limits::MESSAGE_WORDS));
    let read = Arrival::new(BufReader::with_capacity(BUFFER_BYTES, read), most);
    let write = BufWriter::with_capacity(BUFFER_BYTES, write);
    let mut network = VatNetwork::new(read, write, side, options);
    network.set_window_size(WINDOW_BYTES);
    Ok(network)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn long_paths_work() -> io::Result<()> {
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
