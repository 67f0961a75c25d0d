//! One kernel and some of its checkpoints as one file: written from the store, read into another one. What the bytes mean is in
//! `docs/snapshot-format.md`.
//!
//! ```text
//! write   head, then every object that a checkpoint needs ─▶ zstd ─▶ pieces ─▶ digest of it all
//! read    the same backwards; foreign bytes: each bound is checked before memory is taken, and nothing refers to anything
//!         that the file itself does not hold
//! frame   pieces and digest
//! ```
//! Streams: neither side holds more than a piece of an object. Blocks.

mod frame;
mod read;
mod write;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::core::checkpoint::CheckpointType;
use crate::core::ids::{CheckpointId, Digest, HostId, KernelId};
use crate::core::workflow::Decision;
use crate::store::StoreError;
use crate::workspace::WorkspaceError;

pub use read::{Contents, read};
pub use write::write;

/// What a file begins with.
pub const MAGIC: &[u8; 8] = b"RYOKANBN";
/// The version that this release writes, and the only one that it reads.
pub const VERSION: u32 = 1;

/// What is in a file, said first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// The release that wrote it.
    pub ryokan: String,
    /// When, milliseconds since 1970.
    pub at_ms: i64,
    /// On which host.
    pub host: HostId,
    /// The kernel.
    pub kernel: KernelId,
    /// What it was called.
    pub name: String,
    /// How often its state had been restored or forked.
    pub generation: u32,
    /// The checkpoint that an import begins at.
    pub begin: CheckpointId,
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<Packed>,
    /// Blobs that it could read.
    pub blobs: Vec<Digest>,
    /// The decisions of its work, whose texts no checkpoint repeats.
    pub decisions: Vec<Decision>,
}

/// One checkpoint of a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Packed {
    /// Its identity.
    pub id: CheckpointId,
    /// What it was called.
    pub name: String,
    /// More words about it.
    pub description: String,
    /// What it says in the place of messages.
    pub summary: String,
    /// Why it was taken.
    #[serde(rename = "type")]
    pub kind: CheckpointType,
    /// Who took it.
    pub creator: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The checkpoint before; it need not be in the file.
    pub parent: Option<CheckpointId>,
    /// Whether retention leaves it.
    pub pinned: bool,
    /// Its manifest.
    pub manifest: Digest,
}

/// Why a file cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// It is something else.
    #[error("this is no file of a kernel")]
    Foreign,
    /// It is of another release.
    #[error("the file has version {0}; this release knows version {VERSION}")]
    Version(u32),
    /// It ends too soon.
    #[error("the file is not whole: it ends within {0}")]
    Truncated(&'static str),
    /// It is not what was written.
    #[error("the file is damaged: {0}")]
    Damaged(String),
    /// More than may be.
    #[error("the file has more than {most} {what}")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// How many may be.
        most: u64,
    },
    /// The store's part.
    #[error("the store cannot do its part: {0}")]
    Store(#[from] StoreError),
    /// A checkpoint's file tree.
    #[error("a file tree: {0}")]
    Tree(#[from] WorkspaceError),
    /// Reading or writing the bytes.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// What comes next within the compressed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Record {
    /// The [`Head`], JSON.
    Head = 1,
    /// An address, and the object of it.
    Object = 2,
    /// How many objects there were.
    End = 3,
}

impl Record {
    fn of(byte: u8) -> Option<Record> {
        [Record::Head, Record::Object, Record::End].into_iter().find(|record| *record as u8 == byte)
    }
}
