//! One kernel and some of its checkpoints, or a freeze of a group, as one file, written from a store and read into
//! another. `docs/snapshot-format.md` describes the bytes.
//!
//! ```text
//! write   head, its signature, then every object that a checkpoint needs ─▶ zstd ─▶ pieces ─▶ digest of everything
//! read    the reverse, for foreign bytes: checks each bound before allocating; references must stay within the file
//! group   a freeze: its manifest and parts, and the head of each kernel
//! frame   pieces and digest
//! ```
//! Streams: neither side holds more than a piece of an object. Blocks.

mod frame;
mod group;
mod read;
mod write;

#[cfg(test)]
mod group_tests;
#[cfg(test)]
mod machine_tests;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::core::checkpoint::CheckpointType;
use crate::core::freeze::Freeze;
use crate::core::ids::{CheckpointId, Digest, Epoch, HostId, KernelId};
use crate::core::workflow::Decision;
use crate::store::StoreError;
use crate::workspace::WorkspaceError;

pub use group::{GroupContents, verify_group, write_group};
pub use read::{Bundle, Contents, read, verify, verify_state, verify_tree};
pub use write::{reach, write};

/// First bytes of a file.
pub const MAGIC: &[u8; 8] = b"RYOKANBN";
/// The format version that is written for a kernel.
pub const VERSION: u32 = 2;
/// The format version that is written for a freeze of a group.
pub const GROUP_VERSION: u32 = 3;
/// The oldest format version that is read: its files have no signature.
pub const OLDEST: u32 = 1;

/// The first record of a kernel's file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// The release that wrote it.
    pub ryokan: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The host that wrote it.
    pub host: HostId,
    /// The kernel.
    pub kernel: KernelId,
    /// Its name.
    pub name: String,
    /// Its generation: how often its state was restored or forked.
    pub generation: u32,
    /// The checkpoint at which an import starts.
    pub begin: CheckpointId,
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<Packed>,
    /// Blobs that the kernel could read.
    pub blobs: Vec<Digest>,
    /// Its decisions with their texts, which checkpoints do not repeat.
    pub decisions: Vec<Decision>,
    /// Its epoch; absent in files of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// Its journal, in the file of a whole kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal: Option<Journal>,
    /// The excerpt of the host's audit log about it, one of the blobs, in the file of a whole kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<Digest>,
}

/// The journal of a kernel: entries, executions and their output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    /// The format of the pages: only a release with the same reads them.
    pub format: i64,
    /// The pages, in order.
    pub pages: Vec<Digest>,
    /// Output that the pages name.
    pub outputs: Vec<Digest>,
}

/// The first record of a group's file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupHead {
    /// The release that wrote it.
    pub ryokan: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The host that wrote it.
    pub host: HostId,
    /// The freeze, with its seal.
    pub freeze: Freeze,
    /// The head of each kernel in the freeze, with the checkpoint that the freeze holds.
    pub kernels: Vec<Head>,
    /// The history of each repository in the freeze, and of each initialised submodule.
    pub histories: Vec<History>,
}

/// The history of a repository: a pack with everything that its commit leads to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    /// The member.
    pub member: String,
    /// The submodule, by its directory within the member's; empty: the member itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub submodule: String,
    /// The pack.
    pub pack: Digest,
}

/// One checkpoint of a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Packed {
    /// Its identity.
    pub id: CheckpointId,
    /// Its name.
    pub name: String,
    /// Its description.
    pub description: String,
    /// The summary that replaces messages.
    pub summary: String,
    /// Its type.
    #[serde(rename = "type")]
    pub kind: CheckpointType,
    /// Its creator.
    pub creator: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Its parent; it need not be in the file.
    pub parent: Option<CheckpointId>,
    /// Whether it is pinned.
    pub pinned: bool,
    /// Its manifest.
    pub manifest: Digest,
}

/// Why a file cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// Not such a file.
    #[error("this is no file of a kernel or of a group")]
    Foreign,
    /// Another format version.
    #[error("the file has version {0}; this release knows {OLDEST} to {GROUP_VERSION}")]
    Version(u32),
    /// Truncated.
    #[error("the file is not whole: it ends within {0}")]
    Truncated(&'static str),
    /// Damaged.
    #[error("the file is damaged: {0}")]
    Damaged(String),
    /// The signature is not over this head.
    #[error("the file's signature does not fit: it was changed after it was signed")]
    Signature,
    /// A limit is exceeded.
    #[error("the file has more than {most} {what}")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        most: u64,
    },
    /// A file would belong to another user of the importing host.
    #[error("checkpoint {0} has files of other users than the kernel's")]
    Owners(CheckpointId),
    /// The importer does not admit the group.
    #[error("{0}")]
    NotAdmitted(crate::core::error::Error),
    /// A store error.
    #[error("the store cannot do its part: {0}")]
    Store(#[from] StoreError),
    /// An invalid file tree.
    #[error("a file tree: {0}")]
    Tree(#[from] WorkspaceError),
    /// An I/O error.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// Length of a signature's record.
const SIGNATURE_BYTES: u64 = 32 + 64;

/// Kind of a record in the compressed stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Record {
    /// The [`Head`], JSON.
    Head = 1,
    /// An address, and its object.
    Object = 2,
    /// The number of objects.
    End = 3,
    /// A public key, and its signature over the digest of the head's bytes.
    Signature = 4,
    /// The [`GroupHead`], JSON.
    Group = 5,
}

impl Record {
    fn of(byte: u8) -> Option<Record> {
        [Record::Head, Record::Object, Record::End, Record::Signature, Record::Group]
            .into_iter()
            .find(|record| *record as u8 == byte)
    }
}
