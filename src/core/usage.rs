//! What takes room on the disk.

use serde::{Deserialize, Serialize};

use super::ids::{CheckpointId, KernelId};

/// What a kernel takes on the disk, as last measured. Its removal releases the sum, but its share of memory that copies of
/// its virtual machine have in common only with the last of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFigures {
    /// Files of the kernel's code, bytes; of a virtual machine its disk; 0 for a thread.
    pub workspace_bytes: u64,
    /// The journal, and with all rights what only this kernel needs of the store, bytes.
    pub history_bytes: u64,
    /// Saved memory of a virtual machine, and its share of the memory beneath copies, which run or do not; bytes.
    pub saved_memory_bytes: u64,
    /// Engine state, index of the files, staging; bytes.
    pub other_bytes: u64,
    /// Milliseconds since 1970.
    pub measured_at_ms: i64,
}

impl DiskFigures {
    /// The sum of two kernels.
    pub fn plus(&self, other: &DiskFigures) -> DiskFigures {
        DiskFigures {
            workspace_bytes: self.workspace_bytes.saturating_add(other.workspace_bytes),
            history_bytes: self.history_bytes.saturating_add(other.history_bytes),
            saved_memory_bytes: self.saved_memory_bytes.saturating_add(other.saved_memory_bytes),
            other_bytes: self.other_bytes.saturating_add(other.other_bytes),
            measured_at_ms: self.measured_at_ms.max(other.measured_at_ms),
        }
    }

    /// All of it, bytes.
    pub fn total_bytes(&self) -> u64 {
        let Self { workspace_bytes, history_bytes, saved_memory_bytes, other_bytes, .. } = *self;
        [history_bytes, saved_memory_bytes, other_bytes].into_iter().fold(workspace_bytes, u64::saturating_add)
    }
}

/// What takes room on the disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DiskUsage {
    /// The kernels, by name.
    pub kernels: Vec<KernelDisk>,
    /// The parts of the data folder, which add up to it; none for a single kernel.
    pub host: Vec<DiskPart>,
    /// What the store's objects are kept for; adds up to them. None for a single kernel.
    pub store: Vec<DiskPart>,
}

/// A part of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskPart {
    /// The part.
    pub what: String,
    /// Its size on the disk, bytes.
    pub bytes: u64,
    /// What it is for, and how to free it.
    pub why: String,
}

/// What a kernel takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelDisk {
    /// The kernel.
    pub id: KernelId,
    /// Its name.
    pub name: String,
    /// The parts of its folder, which add up to it.
    pub parts: Vec<DiskPart>,
    /// Number of checkpoints.
    pub checkpoints: u32,
    /// Size in the store of all objects that it needs, bytes.
    pub stored_bytes: u64,
    /// Of these, what no other kernel needs.
    pub freed_bytes: u64,
    /// What it needs them for; adds up to [`Self::stored_bytes`].
    pub kept: Vec<DiskPart>,
    /// Its checkpoints, newest first, if asked for.
    pub each: Vec<CheckpointDisk>,
    /// Why files or objects are missing in the figures; empty: none is.
    pub incomplete: String,
}

/// What a checkpoint takes in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckpointDisk {
    /// The checkpoint.
    pub id: CheckpointId,
    /// Its name.
    pub name: String,
    /// Size in the store of all objects that it needs, bytes.
    pub stored_bytes: u64,
    /// Of these, what nothing else needs.
    pub freed_bytes: u64,
    /// Size of its virtual machine, bytes; 0: it is of kind checkpoint.
    pub machine_bytes: u64,
    /// Why it is kept.
    pub why: String,
}

impl KernelDisk {
    /// The size of its folder, bytes.
    pub fn folder_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}
