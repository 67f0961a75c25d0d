//! The connection from a daemon to a worker's init: a byte stream, with descriptors where possible.

pub mod halves;
pub mod unix;

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use capnp_rpc::rpc_twoparty_capnp::Side;
use capnp_rpc::twoparty::VatNetwork;
use futures::io::{BufReader, BufWriter};
use futures::{AsyncRead, AsyncWrite};

use super::handshake::PROOF_BYTES;
use super::message_limit::{Arrival, MaxWords};
use crate::core::limits;

/// Limit of output in flight between init and daemon, bytes: keeps both busy and still applies
/// back-pressure.
const WINDOW_BYTES: usize = 1 << 20;
/// Small messages are batched up to this size, bytes.
const BUFFER_BYTES: usize = 16 << 10;

/// A connected byte stream in two halves.
pub struct Channel {
    /// Bytes from the peer.
    pub read: Box<dyn AsyncRead + Unpin>,
    /// Bytes to the peer.
    pub write: Box<dyn AsyncWrite + Unpin>,
}

/// A connector to one worker's init. Each isolation driver provides its own.
#[async_trait::async_trait(?Send)]
pub trait Connector {
    /// Opens a connection. Each connection is a new attachment and replaces the previous one.
    ///
    /// # Errors
    /// The channel's errors.
    async fn connect(&self) -> io::Result<Channel>;

    /// Passes a descriptor beside the channel. Init holds it when this returns.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] for a channel that carries bytes only.
    async fn pass_descriptor(&self, note: DescriptorNote, descriptor: OwnedFd) -> io::Result<()>;

    /// Whether [`Self::pass_descriptor`] is supported.
    fn passes_descriptors(&self) -> bool;

    /// Deadline for an attachment.
    fn attach_deadline(&self) -> Duration {
        limits::WORKER_ADOPT
    }
}

/// The note that accompanies a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorNote {
    /// The token by which a later call refers to the descriptor.
    pub token: u64,
    /// The daemon's proof over the token.
    pub proof: [u8; PROOF_BYTES],
}

impl DescriptorNote {
    /// Length of the encoded note.
    pub const BYTES: usize = 8 + PROOF_BYTES;

    /// Encodes the note.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.token.to_le_bytes());
        bytes[8..].copy_from_slice(&self.proof);
        bytes
    }

    /// Decodes a note.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (mut token, mut proof) = ([0; 8], [0; PROOF_BYTES]);
        token.copy_from_slice(&bytes[..8]);
        proof.copy_from_slice(&bytes[8..]);
        DescriptorNote { token: u64::from_le_bytes(token), proof }
    }
}

/// A buffered two-party network over a channel, with messages of at most `most` words.
pub fn network(channel: Channel, side: Side, most: MaxWords) -> VatNetwork<impl AsyncRead + Unpin + 'static> {
    let mut options = capnp::message::ReaderOptions::new();
    options.traversal_limit_in_words(Some(limits::MESSAGE_WORDS));
    // A level of a value is a list, its element and the element's own value.
    options.nesting_limit(limits::VALUE_DEPTH as i32 * 4);
    let read = Arrival::new(BufReader::with_capacity(BUFFER_BYTES, channel.read), most);
    let write = BufWriter::with_capacity(BUFFER_BYTES, channel.write);
    let mut network = VatNetwork::new(read, write, side, options);
    network.set_window_size(WINDOW_BYTES);
    network
}
