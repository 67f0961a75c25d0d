//! Frames: one byte of kind, `u32` length (little-endian), that many bytes.
//!
//! | kind | bytes |
//! |---|---|
//! | 1 | the greeting, JSON |
//! | 2 | addresses of objects, 32 bytes each: which of these are missing? |
//! | 3 | the answer: one bit per address, 1 is missing |
//! | 4 | an object follows: address, `u64` length, then its chunks in order |
//! | 5 | a chunk of it: address, `u32` length, `u32` stored length, `u8` form: 0 raw, 1 one zstd frame, 2 not sent |
//! | 6 | the next bytes of the chunk as it is stored, at most [`limits::HANDOVER_PIECE_BYTES`] |
//! | 7 | addresses of chunks, 32 bytes each: which of these are missing? Answered by 3 |
//! | 8 | a message: the first 8 bytes of the SHA-256 digest of its JSON, then the JSON |
//!
//! A message that is changed on the way is recognised, so that no end prepares, commits or aborts what the other did not
//! name. Objects and chunks have their digests as addresses.

use std::borrow::Cow;
use std::time::Duration;

use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader, BufWriter};
use tokio::time::Instant;

use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, Epoch, HandoverId, HostId, KernelId, PublicKey};
use crate::core::limits;
use crate::core::snapshot::{PortableKind, Snapshot, Teleport};
use crate::core::spec::KernelSpec;
use crate::store::Encoding;

/// The protocol's version; both ends must have the same.
pub const VERSION: u32 = 3;
/// What both ends call the protocol.
const PROTOCOL: &str = "ryokan-handover";
/// Length of a frame of a chunk.
const CHUNK: usize = 41;
/// Length of the check of a message.
const CHECK: usize = 8;

/// A kernel that is offered.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Offer {
    /// The handover.
    pub handover: HandoverId,
    /// The kernel.
    pub kernel: KernelId,
    /// Its epoch at the target.
    pub epoch: Epoch,
    /// Its specification.
    pub spec: KernelSpec,
    /// Mounts and MCP servers added since its creation, for people.
    pub resources: Vec<String>,
    /// Whether it may move without what belongs to the source host.
    pub allow_missing: bool,
    /// The kinds of what may be missing, if only some may.
    #[serde(default)]
    pub allowed: Vec<String>,
    /// Format of its history.
    pub format: i64,
    /// Bytes of its files and its engine state, about; 0: not known.
    pub bytes: u64,
    /// Kind of the snapshot in which it moves.
    #[serde(default = "checkpoint")]
    pub kind: PortableKind,
    /// The machine that is to continue, with what it needs at most; only in kind teleport.
    #[serde(default)]
    pub machine: Option<Snapshot<Teleport>>,
    /// Whether it moves in kind checkpoint where its machine cannot continue.
    #[serde(default)]
    pub or_checkpoint: bool,
    /// Milliseconds between reports of a target that works on a step; 0: the source expects none.
    #[serde(default)]
    pub report_ms: u64,
    /// Whether the source expects such reports before the answer to this offer, too.
    #[serde(default)]
    pub awaits_admission: bool,
    /// Not a kernel, but the rest of a group whose kernels come by handovers of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<OfferedGroup>,
}

/// A group that is offered.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OfferedGroup {
    /// Its name.
    pub name: String,
    /// The members outside of its kernels, with their kinds.
    pub members: Vec<(String, String)>,
    /// Where they come to be.
    pub places: Vec<(String, String)>,
    /// How many kernels it has.
    pub kernels: usize,
    /// The key with which the source seals.
    pub key: Option<PublicKey>,
}

fn checkpoint() -> PortableKind {
    PortableKind::Checkpoint
}

/// The answer to an accepted offer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Accept {
    /// What the kernel moves without.
    pub missing: Vec<String>,
    /// The kind in which the kernel is to come.
    #[serde(default = "checkpoint")]
    pub kind: PortableKind,
    /// Why it is not the offered kind, for people.
    #[serde(default)]
    pub why: String,
}

/// The description of a kernel whose objects are all sent: an object of the store.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Seal {
    /// Checkpoints and blobs; it begins at the one that was taken last.
    pub head: crate::bundle::Head,
    /// Its specification.
    pub spec: KernelSpec,
    /// Pages of its history.
    pub history: Vec<Digest>,
    /// Milliseconds since 1970.
    pub created_at_ms: i64,
    /// The excerpt of the source's audit log about it.
    #[serde(default)]
    pub audit: Option<Digest>,
    /// Checkpoints in the history that do not move.
    #[serde(default)]
    pub left_behind: u64,
}

/// A control message.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "camelCase")]
pub(super) enum Message {
    Hello {
        protocol: String,
        version: u32,
        host: HostId,
        /// Of the host's id: other releases must be able to read a greeting.
        #[serde(default)]
        check: u32,
    },
    Offer(Box<Offer>),
    Accept(Accept),
    /// All objects of this round are sent, and their number.
    Flush {
        objects: u64,
    },
    Flushed,
    /// The files as they were while the kernel ran; all of the tree is sent.
    Preview {
        tree: Digest,
    },
    /// The engine state as it was while the kernel ran: a list, of which everything is sent.
    PreviewState {
        list: Digest,
    },
    Previewed,
    Seal {
        description: Digest,
    },
    /// The target works on the step of the last message.
    Working,
    Prepared,
    Commit {
        handover: HandoverId,
        kernel: KernelId,
        epoch: Epoch,
    },
    Live,
    Abort {
        handover: HandoverId,
    },
    Aborted,
    /// A refusal or a failure of the other end.
    Refused {
        error: Error,
    },
}

/// A frame.
#[derive(Debug)]
pub(super) enum Frame {
    Message(Message),
    Question(Vec<Digest>),
    ChunkQuestion(Vec<Digest>),
    Answer(Vec<u8>),
    Object { digest: Digest, size: u64 },
    Chunk(Chunk),
    Piece(Vec<u8>),
}

/// A chunk of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    pub digest: Digest,
    /// Its length.
    pub length: u32,
    /// Its encoding and the number of bytes that follow; `None` if the receiver has it.
    pub sent: Option<(Encoding, u32)>,
}

/// A connection to the other end.
pub struct Wire {
    read: BufReader<Box<dyn AsyncRead + Unpin>>,
    write: BufWriter<Box<dyn AsyncWrite + Unpin>>,
    /// Bytes written.
    pub(super) sent: u64,
    held: Option<Held>,
}

/// The deadlines while the kernel is held.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    /// Longest time without progress.
    pub stall: Duration,
    /// Longest time of a step.
    pub step: Duration,
}

fn lost(what: &str) -> Error {
    Error::unavailable(format!("the connection to the other host is lost: {what}")).reason("connection")
}

fn malformed(what: impl std::fmt::Display) -> Error {
    bounded(Error::corrupt(format!("the other host sent a malformed frame: {what}")).reason("protocol"))
}

/// The error for a message that is no answer to the last one.
pub(super) fn unexpected(message: &Message) -> Error {
    bounded(Error::corrupt(format!("the other host answered {message:?}")).reason("protocol"))
}

impl Wire {
    /// A wire on both directions of a stream.
    pub fn new(read: impl AsyncRead + Unpin + 'static, write: impl AsyncWrite + Unpin + 'static) -> Wire {
        Wire { read: BufReader::new(Box::new(read)), write: BufWriter::new(Box::new(write)), sent: 0, held: None }
    }

    /// Shortens the deadlines, or restores them.
    pub(super) fn hold(&mut self, held: Option<Held>) {
        self.held = held;
    }

    fn most(&self, within: Duration) -> Duration {
        self.held.map_or(within, |held| held.stall.min(within))
    }

    /// Exchanges the protocol's version; returns the other host.
    ///
    /// # Errors
    /// `unsupported` for another version.
    pub(super) async fn greet(&mut self, own: HostId) -> Result<HostId> {
        let hello =
            Message::Hello { protocol: PROTOCOL.into(), version: VERSION, host: own, check: check_of_host(own) };
        self.send(hello).await?;
        match self.message(limits::HANDOVER_HELLO).await? {
            Message::Hello { protocol, version: VERSION, host, check } if protocol == PROTOCOL => {
                match check == check_of_host(host) {
                    true => Ok(host),
                    false => Err(malformed("a greeting with another check")),
                }
            }
            Message::Hello { version, .. } => Err(Error::unsupported(format!(
                "the other host speaks version {version} of the handover protocol, this one {VERSION}"
            ))
            .hint("update the older one")),
            other => Err(malformed(format!("{other:?} in place of a greeting"))),
        }
    }

    /// Sends a message and flushes.
    pub(super) async fn send(&mut self, message: Message) -> Result<()> {
        self.write_frame(&Frame::Message(message)).await?;
        self.flush().await
    }

    /// Receives a message; a refusal of the other end is an error.
    pub(super) async fn message(&mut self, within: Duration) -> Result<Message> {
        match self.frame(within).await? {
            Some(Frame::Message(Message::Refused { error })) => Err(bounded(error)),
            Some(Frame::Message(message)) => Ok(message),
            Some(other) => Err(malformed(format!("{} in place of a message", other.name()))),
            None => Err(lost("it was closed")),
        }
    }

    /// Receives the answer to a step of the other end, which may report meanwhile that it works on it.
    pub(super) async fn answer(&mut self) -> Result<Message> {
        let end = Instant::now() + self.held.map_or(limits::HANDOVER_STEP, |held| held.step);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(lost("a step takes too long"));
            }
            match self.message(left).await? {
                Message::Working => {}
                answer => return Ok(answer),
            }
        }
    }

    /// Why the other end has ended the connection, if it said so before: a write fails before that is read.
    pub(super) async fn refusal(&mut self) -> Option<Error> {
        let reading = async {
            loop {
                match self.frame(limits::HANDOVER_REFUSAL).await {
                    Ok(Some(Frame::Message(Message::Refused { error }))) => return Some(bounded(error)),
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => return None,
                }
            }
        };
        tokio::time::timeout(limits::HANDOVER_REFUSAL, reading).await.ok().flatten()
    }

    pub(super) async fn flush(&mut self) -> Result<()> {
        let most = self.most(limits::HANDOVER_FRAME);
        match tokio::time::timeout(most, self.write.flush()).await {
            Ok(done) => done.map_err(|error| lost(&error.to_string())),
            Err(_) => Err(lost("it accepts no more")),
        }
    }

    /// Writes a frame without a flush.
    pub(super) async fn write_frame(&mut self, frame: &Frame) -> Result<()> {
        let (kind, bytes) = frame.encode()?;
        let length = u32::try_from(bytes.len()).map_err(|_| Error::internal("a frame is too long"))?;
        let most = self.most(limits::HANDOVER_FRAME);
        let writing = async {
            self.write.write_u8(kind).await?;
            self.write.write_u32_le(length).await?;
            self.write.write_all(&bytes).await
        };
        match tokio::time::timeout(most, writing).await {
            Ok(Ok(())) => {
                self.sent += 5 + u64::from(length);
                Ok(())
            }
            Ok(Err(error)) => Err(lost(&error.to_string())),
            Err(_) => Err(lost("it accepts no more")),
        }
    }

    /// Reads a frame; `None` at the end of the stream.
    pub(super) async fn frame(&mut self, within: Duration) -> Result<Option<Frame>> {
        let (within, most_time) = (self.most(within), self.most(limits::HANDOVER_FRAME));
        let kind = match tokio::time::timeout(within, self.read.read_u8()).await {
            Ok(Ok(kind)) => kind,
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
            Ok(Err(error)) => return Err(lost(&error.to_string())),
            Err(_) => return Err(lost("no answer in time")),
        };
        let most = match kind {
            1 => limits::HANDOVER_MESSAGE_BYTES,
            8 => CHECK + limits::HANDOVER_MESSAGE_BYTES,
            2 | 7 => limits::HANDOVER_DIGESTS * 32,
            3 => limits::HANDOVER_DIGESTS / 8,
            4 => 40,
            5 => CHUNK,
            6 => limits::HANDOVER_PIECE_BYTES,
            _ => return Err(malformed(format!("kind {kind}"))),
        };
        let reading = async {
            let length = self.read.read_u32_le().await? as usize;
            if length > most {
                return Ok(Err(malformed(format!("{length} bytes of kind {kind}"))));
            }
            let mut bytes = vec![0; length];
            self.read.read_exact(&mut bytes).await?;
            Ok::<_, std::io::Error>(Ok(bytes))
        };
        match tokio::time::timeout(most_time, reading).await {
            Ok(Ok(bytes)) => Frame::decode(kind, bytes?).map(Some),
            Ok(Err(error)) => Err(lost(&error.to_string())),
            Err(_) => Err(lost("a frame is incomplete")),
        }
    }
}

/// Reads all frames of a stream and writes them again, for fuzzing; returns them up to the first malformed one.
pub async fn reframe(bytes: Vec<u8>) -> Vec<u8> {
    let mut wire = Wire::new(std::io::Cursor::new(bytes), tokio::io::sink());
    let mut written = Vec::new();
    while let Ok(Some(frame)) = wire.frame(limits::HANDOVER_FRAME).await {
        let Ok((kind, bytes)) = frame.encode() else { break };
        written.push(kind);
        written.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        written.extend_from_slice(&bytes);
    }
    written
}

/// The check of a message: the first bytes of its digest.
fn check_of(json: &[u8]) -> [u8; CHECK] {
    array(digest(&SHA256, json).as_ref(), 0)
}

fn check_of_host(host: HostId) -> u32 {
    u32::from_le_bytes(array(digest(&SHA256, host.as_bytes()).as_ref(), 0))
}

/// An error of the other end, with bounded texts.
pub(super) fn bounded(error: Error) -> Error {
    let cut = |text: String| -> String { text.chars().filter(|c| !c.is_control()).take(2000).collect() };
    let (message, hint, reason) = (cut(error.message), cut(error.hint), cut(error.reason));
    // What a program wrote stays on this host.
    Error { code: error.code, message, hint, reason, said: String::new() }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

impl Frame {
    /// What it is, for people.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Frame::Message(_) => "a message",
            Frame::Question(_) | Frame::ChunkQuestion(_) => "a question",
            Frame::Answer(_) => "an answer",
            Frame::Object { .. } => "an object",
            Frame::Chunk(_) => "a chunk",
            Frame::Piece(_) => "a piece",
        }
    }

    /// Whether it brings a part of a kernel, or what makes one of the parts.
    pub(super) fn is_content(&self) -> bool {
        match self {
            Frame::Object { .. } | Frame::Chunk(_) | Frame::Piece(_) => true,
            Frame::Message(message) => matches!(message, Message::Preview { .. } | Message::Seal { .. }),
            Frame::Question(_) | Frame::ChunkQuestion(_) | Frame::Answer(_) => false,
        }
    }

    fn encode(&self) -> Result<(u8, Cow<'_, [u8]>)> {
        let addresses = |digests: &[Digest]| digests.iter().flat_map(|digest| *digest.as_bytes()).collect();
        Ok(match self {
            Frame::Message(message) => {
                let bytes = serde_json::to_vec(message).map_err(|error| Error::internal(error.to_string()))?;
                if bytes.len() > limits::HANDOVER_MESSAGE_BYTES {
                    return Err(Error::refused("the kernel's description is too large").reason("handover_size"));
                }
                match message {
                    Message::Hello { .. } => (1, bytes.into()),
                    _ => (8, [&check_of(&bytes)[..], &bytes].concat().into()),
                }
            }
            Frame::Question(digests) => (2, addresses(digests)),
            Frame::ChunkQuestion(digests) => (7, addresses(digests)),
            Frame::Answer(bits) => (3, bits.into()),
            Frame::Object { digest, size } => (4, [&digest.as_bytes()[..], &size.to_le_bytes()].concat().into()),
            Frame::Chunk(Chunk { digest, length, sent }) => {
                let (form, stored) = match sent {
                    Some((Encoding::Raw, stored)) => (0, *stored),
                    Some((Encoding::Zstd, stored)) => (1, *stored),
                    None => (2, 0),
                };
                let (length, stored) = (length.to_le_bytes(), stored.to_le_bytes());
                (5, [&digest.as_bytes()[..], &length, &stored, &[form]].concat().into())
            }
            Frame::Piece(piece) => (6, piece.into()),
        })
    }

    fn decode(kind: u8, bytes: Vec<u8>) -> Result<Frame> {
        let addresses = || bytes.as_chunks::<32>().0.iter().map(|digest| Digest::from_bytes(*digest)).collect();
        Ok(match kind {
            1 => match serde_json::from_slice(&bytes).map_err(malformed)? {
                hello @ Message::Hello { .. } => Frame::Message(hello),
                _ => return Err(malformed("a message without a check")),
            },
            8 => match bytes.split_at_checked(CHECK) {
                Some((check, json)) if check == check_of(json) => {
                    Frame::Message(serde_json::from_slice(json).map_err(malformed)?)
                }
                _ => return Err(malformed("a message that was changed on the way")),
            },
            2 if bytes.len().is_multiple_of(32) => Frame::Question(addresses()),
            7 if bytes.len().is_multiple_of(32) => Frame::ChunkQuestion(addresses()),
            3 => Frame::Answer(bytes),
            4 if bytes.len() == 40 => Frame::Object {
                digest: Digest::from_bytes(array(&bytes, 0)),
                size: u64::from_le_bytes(array(&bytes, 32)),
            },
            5 if bytes.len() == CHUNK => {
                let stored = u32::from_le_bytes(array(&bytes, 36));
                let sent = match (bytes[40], stored) {
                    (0, _) => Some((Encoding::Raw, stored)),
                    (1, _) => Some((Encoding::Zstd, stored)),
                    (2, 0) => None,
                    (form, _) => return Err(malformed(format!("a chunk of form {form} and {stored} bytes"))),
                };
                let length = u32::from_le_bytes(array(&bytes, 32));
                Frame::Chunk(Chunk { digest: Digest::from_bytes(array(&bytes, 0)), length, sent })
            }
            6 => Frame::Piece(bytes),
            _ => return Err(malformed(format!("{} bytes of kind {kind}", bytes.len()))),
        })
    }
}
