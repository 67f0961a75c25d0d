//! Reports of upkeep: garbage collection and verification.

use serde::Serialize;

use super::checkpoint::Checkpoint;
use super::ids::Digest;

/// The decision of a garbage collection about one item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcItem {
    /// The item.
    pub thing: GcThing,
    /// Whether the item is kept.
    pub stays: bool,
    /// The reason.
    pub why: String,
}

/// An item of a garbage collection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GcThing {
    /// A checkpoint.
    Checkpoint {
        /// Name of its kernel.
        kernel: String,
        /// The checkpoint.
        checkpoint: Box<Checkpoint>,
    },
    /// An object of the store.
    Object {
        /// Its content address.
        digest: Digest,
        /// Its length in bytes.
        bytes: u64,
    },
}

/// Result of a garbage collection or of its dry run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct GcReport {
    /// Whether the collection was a dry run.
    pub dry_run: bool,
    /// Checkpoints kept.
    pub checkpoints_kept: u64,
    /// Checkpoints removed.
    pub checkpoints_removed: u64,
    /// Objects kept.
    pub objects_kept: u64,
    /// Bytes of the kept objects, before compression.
    pub bytes_kept: u64,
    /// Objects removed.
    pub objects_removed: u64,
    /// Bytes of the removed objects.
    pub bytes_removed: u64,
    /// Kept objects that are only young, or used by a running operation.
    pub objects_recent: u64,
    /// Packs removed.
    pub packs_removed: u64,
    /// Bytes of the removed packs.
    pub pack_bytes_removed: u64,
    /// Bytes copied from removed packs because they are still needed.
    pub bytes_copied: u64,
}

/// [`Damage::what`] of audit lines that could not be written, as on a full disk. It is reported, but is no damage.
pub const AUDIT_GAP: &str = "audit gap";

/// A damaged item.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Kind of the item: `object`, `pack`, `database`, `audit log`, [`AUDIT_GAP`].
    pub what: String,
    /// Name of the item: an address, a path, a line.
    pub name: String,
    /// What is wrong.
    pub why: String,
    /// What cannot be read because of the damage.
    pub affects: Vec<Affected>,
}

/// Something that cannot be read completely.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Affected {
    /// Name of the kernel; empty: all kernels.
    pub kernel: String,
    /// The affected part: `checkpoint`, `blob`, `output`, `files`, `all`.
    pub what: String,
    /// Name of the part: number of a checkpoint or an execution, address of a blob.
    pub name: String,
}

/// Progress of a verification over the packs of the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Packs verified.
    pub packs: u64,
    /// Packs in total.
    pub of_packs: u64,
    /// Bytes read.
    pub bytes: u64,
}

/// Result of a verification.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// Kernels whose databases were checked.
    pub kernels: u64,
    /// Checkpoints with all their objects present.
    pub checkpoints: u64,
    /// Objects whose content matches their address.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Damaged items.
    pub damaged: u64,
}

/// Event of a running verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VerifyEvent {
    /// Progress.
    Progress(VerifyProgress),
    /// A damaged item.
    Damage(Damage),
}
