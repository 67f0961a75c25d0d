//! What a tree says of one file, folder, link or pipe.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use crate::core::ids::Digest;
use crate::core::missed::UNREADABLE;

/// A name as the file system has it: any bytes but `/` and zero.
pub type Name = Box<[u8]>;

/// Bits of a mode that a tree keeps: set-uid and set-gid are never captured and never made.
pub const MODE_BITS: u32 = 0o1777;

/// A moment as the file system has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Moment {
    /// Seconds since 1970.
    pub secs: i64,
    /// Nanoseconds of the second, below 1,000,000,000.
    pub nanos: u32,
}

/// Extended attributes, sorted by name. Most files have none, so none is one word.
pub type Attributes = Option<Box<Vec<(Name, Box<[u8]>)>>>;

/// What entries of every kind have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Of [`MODE_BITS`].
    pub mode: u32,
    /// When its content last changed.
    pub modified: Moment,
    /// User and group, if they are not those of the workspace itself.
    pub owner: Option<(u32, u32)>,
    /// `user.*` and access lists.
    pub attributes: Attributes,
}

/// Where a file's bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Content {
    /// Here: it is small.
    Inline(Box<[u8]>),
    /// In one object, which is the file.
    Whole(Digest),
    /// In the pieces that a map object lists; what is in none is a hole.
    Map(Digest),
}

/// Files with the same group are one file with several names.
pub type Group = [u8; 16];

/// Why something is in a tree by name only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// A socket: it belongs to a process.
    Socket,
    /// A device.
    Device,
    /// It may not be read.
    Unreadable,
    /// Something is mounted there: another file system, or a part of this one.
    Mount,
    /// Reported only, never in a tree: the file is there, without its set-uid or set-gid bit.
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

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A regular file.
    File {
        /// Its length in bytes.
        size: u64,
        /// Its bytes.
        content: Content,
        /// Its other names.
        group: Option<Group>,
    },
    /// A folder.
    Folder {
        /// The object that lists it.
        digest: Digest,
    },
    /// A symbolic link.
    Symlink {
        /// What it says.
        target: Box<[u8]>,
    },
    /// A named pipe.
    Fifo,
    /// Something that was there and is not in the tree.
    Missing {
        /// Why.
        reason: Reason,
    },
}

impl Node {
    /// Whether both are of one kind.
    pub fn same_kind(&self, other: &Node) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

/// One line of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name; empty for the workspace itself.
    pub name: Name,
    /// Mode, times, owner, attributes. Empty for what is missing.
    pub meta: Meta,
    /// What it is.
    pub node: Node,
}

/// A path of names, for people and for results.
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
