//! An entry of a tree: a file, folder, link or pipe.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use crate::core::ids::Digest;
use crate::core::missed::UNREADABLE;

/// A file name: any bytes but `/` and zero.
pub type Name = Box<[u8]>;

/// Mode bits that a tree keeps: set-uid and set-gid are never captured and never created.
pub const MODE_BITS: u32 = 0o1777;

/// A time stamp of the file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Moment {
    /// Seconds since 1970.
    pub secs: i64,
    /// Nanoseconds of the second, below 1,000,000,000.
    pub nanos: u32,
}

/// Extended attributes, sorted by name. Most files have none, so none takes one word.
pub type Attributes = Option<Box<Vec<(Name, Box<[u8]>)>>>;

/// Metadata of all types.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Of [`MODE_BITS`].
    pub mode: u32,
    /// Modification time of the content.
    pub modified: Moment,
    /// User and group, unless they are those of the workspace.
    pub owner: Option<(u32, u32)>,
    /// `user.*` and access lists.
    pub attributes: Attributes,
}

/// Location of a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Content {
    /// Inline: it is small.
    Inline(Box<[u8]>),
    /// One object.
    Whole(Digest),
    /// The pieces that a map object lists; the rest are holes.
    Map(Digest),
}

/// Entries with the same group are hard links of one file.
pub type Group = [u8; 16];

/// Why a tree holds an entry by name only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// A socket: it belongs to a process.
    Socket,
    /// A device.
    Device,
    /// Unreadable.
    Unreadable,
    /// A mount point.
    Mount,
    /// Only reported, never in a tree: the file is captured without its set-uid or set-gid bit.
    SetId,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Socket => "a socket",
            Reason::Device => "a device",
            Reason::Unreadable => UNREADABLE,
            Reason::Mount => "a mount",
            Reason::SetId => "captured without its set-uid or set-gid bit",
        })
    }
}

/// Type of an entry, with its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A regular file.
    File {
        /// Its length in bytes.
        size: u64,
        /// Its content.
        content: Content,
        /// Its hard links.
        group: Option<Group>,
    },
    /// A folder.
    Folder {
        /// The object that lists it.
        digest: Digest,
    },
    /// A symbolic link.
    Symlink {
        /// Its target.
        target: Box<[u8]>,
    },
    /// A named pipe.
    Fifo,
    /// An entry that was not captured.
    Missing {
        /// The reason.
        reason: Reason,
    },
}

impl Node {
    /// Whether both have the same type.
    pub fn same_kind(&self, other: &Node) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name; empty for the workspace itself.
    pub name: Name,
    /// Mode, times, owner, attributes. Empty for missing entries.
    pub meta: Meta,
    /// Its type.
    pub node: Node,
}

/// The path of these names, for messages and results.
pub fn path_of<'a>(names: impl IntoIterator<Item = &'a [u8]>) -> PathBuf {
    let mut path = Vec::new();
    for name in names {
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
    }
    PathBuf::from(OsStr::from_bytes(&path))
}
