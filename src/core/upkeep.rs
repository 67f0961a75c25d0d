//! What upkeep tells: of garbage that is collected, and of damage that is found.

use serde::Serialize;

use super::checkpoint::Checkpoint;
use super::ids::Digest;

/// What a collection of garbage says of one thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcItem {
    /// The thing.
    pub thing: GcThing,
    /// Whether it stays.
    pub stays: bool,
    /// Why.
    pub why: String,
}

/// What stays or goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GcThing {
    /// A checkpoint.
    Checkpoint {
        /// What people call its kernel.
        kernel: String,
        /// It.
        checkpoint: Box<Checkpoint>,
    },
    /// An object of the store.
    Object {
        /// Its address.
        digest: Digest,
        /// Its length in bytes.
        bytes: u64,
    },
}

/// What a collection did, or would do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct GcReport {
    /// Nothing was changed.
    pub dry_run: bool,
    /// Checkpoints that stay.
    pub checkpoints_kept: u64,
    /// Checkpoints that went.
    pub checkpoints_removed: u64,
    /// Objects that stay.
    pub objects_kept: u64,
    /// Bytes of those, before compression.
    pub bytes_kept: u64,
    /// Objects that went.
    pub objects_removed: u64,
    /// Bytes of those.
    pub bytes_removed: u64,
    /// Of the objects that stay, those that are only young, or in use by what goes on.
    pub objects_recent: u64,
    /// Packs that went.
    pub packs_removed: u64,
    /// Bytes of those.
    pub pack_bytes_removed: u64,
    /// Bytes that were copied out of them, because they are still needed.
    pub bytes_copied: u64,
}

/// What is damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// What kind of thing: `object`, `pack`, `database`, `audit log`.
    pub what: String,
    /// Its name: an address, a path, a line.
    pub name: String,
    /// What is wrong with it.
    pub why: String,
    /// What cannot be had because of it.
    pub affects: Vec<Affected>,
}

/// Something that cannot be had whole.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Affected {
    /// What people call the kernel; empty: all of them.
    pub kernel: String,
    /// What of it: `checkpoint`, `blob`, `output`, `files`, `all`.
    pub what: String,
    /// Which one: a checkpoint's or an execution's number, a blob's address.
    pub name: String,
}

/// How far a verification is with the packs of the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Packs that were gone through.
    pub packs: u64,
    /// Packs there are.
    pub of_packs: u64,
    /// Bytes that were read.
    pub bytes: u64,
}

/// What a verification looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// Kernels whose databases were checked.
    pub kernels: u64,
    /// Checkpoints of which everything was found.
    pub checkpoints: u64,
    /// Objects whose content is what their address says.
    pub objects: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Things that are damaged.
    pub damaged: u64,
}

/// What a verification says meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VerifyTold {
    /// How far it is.
    Progress(VerifyProgress),
    /// Something is damaged.
    Damage(Damage),
}
