//! What a freeze cost: how each member was captured, and for how long.

use serde::{Deserialize, Serialize};

use super::drain::Executions;

/// How the content of a member is held from the pause until it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// A copy of the file that shares its blocks.
    Clone,
    /// A read transaction of a database with a write-ahead log.
    Transaction,
    /// A read transaction of a database without such a log: its writers wait for the copy, which is made first of all.
    SharedLock,
    /// An exported snapshot of a database server.
    Snapshot,
    /// A snapshot of the Btrfs subvolume that a database server works in.
    Subvolume,
    /// A tree of which everything older was stored before the pause, in a Btrfs subvolume.
    Btrfs,
    /// As before; changed files are cloned.
    Reflink,
    /// As before; changed files are read.
    Tracked,
    /// Objects of git.
    Git,
    /// The output of a program of the user.
    Program,
}

/// What the content of a member was held by.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Storage {
    /// The program or the kernel that the driver uses, with its version; empty: not known.
    pub version: String,
    /// The file system that has the content, with its id; empty: not known, or none of this host.
    pub file_system: String,
    /// What the content depends on there, for people; empty: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub parameters: String,
}

impl Storage {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        *self == Storage::default()
    }
}

/// What the pause grows with, as the programs see it that use the member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// With nothing.
    Constant,
    /// With what has changed.
    Changes,
    /// With the size.
    Size,
}

impl Driver {
    /// Its name in every interface.
    pub const fn name(self) -> &'static str {
        match self {
            Driver::Clone => "clone",
            Driver::Transaction => "transaction",
            Driver::SharedLock => "shared-lock",
            Driver::Snapshot => "snapshot",
            Driver::Subvolume => "subvolume",
            Driver::Btrfs => "btrfs",
            Driver::Reflink => "reflink",
            Driver::Tracked => "tracked",
            Driver::Git => "git",
            Driver::Program => "program",
        }
    }

    /// What the pause grows with.
    pub const fn growth(self) -> Growth {
        match self {
            Driver::Clone | Driver::Transaction | Driver::Snapshot | Driver::Subvolume => Growth::Constant,
            Driver::Btrfs | Driver::Reflink | Driver::Tracked | Driver::Git => Growth::Changes,
            Driver::SharedLock | Driver::Program => Growth::Size,
        }
    }
}

impl Growth {
    /// Its name in every interface.
    pub const fn name(self) -> &'static str {
        match self {
            Growth::Constant => "constant",
            Growth::Changes => "changes",
            Growth::Size => "size",
        }
    }
}

/// What one member cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemberCost {
    /// Its name.
    pub name: String,
    /// How its content was held: [`Driver::name`].
    pub driver: String,
    /// What its part of the pause grows with: [`Growth::name`].
    pub growth: String,
    /// Time of its steps within the pause, microseconds.
    pub pause_us: u64,
    /// Time for storing it after the pause, microseconds.
    pub store_us: u64,
    /// The executions of a kernel.
    #[serde(flatten)]
    pub executions: Executions,
}

/// What a freeze cost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct FreezeCost {
    /// From the first suspension until everything runs again, microseconds.
    pub pause_us: u64,
    /// From the first suspension until every kernel starts executions again, microseconds.
    pub admission_us: u64,
    /// Time of the whole freeze, with what is read ahead of the pause, microseconds.
    pub total_us: u64,
    /// The members.
    pub members: Vec<MemberCost>,
}
