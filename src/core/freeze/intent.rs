//! What the catalog records of an operation of a group before anything changes.

use serde::{Deserialize, Serialize};

use crate::core::ids::{CheckpointId, FreezeId, KernelId};

/// What a daemon that finds an unfinished operation of a group must know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Intent {
    /// A freeze that is about to become visible. Without its row, these checkpoints are withdrawn.
    Freeze {
        /// The freeze.
        id: FreezeId,
        /// Its checkpoints.
        checkpoints: Vec<(KernelId, CheckpointId)>,
        /// Without its row, the kernels of the group stay paused.
        #[serde(default)]
        pauses: bool,
    },
    /// A restore that changes members. It is reverted to the freeze before it.
    Restore {
        /// The freeze that is restored.
        target: FreezeId,
        /// The freeze of the state before.
        safety: FreezeId,
        /// The names of the members concerned.
        members: Vec<String>,
        /// Number of members that may have been changed, in the order of a restore.
        reached: usize,
    },
    /// An import that creates a group. Without the freeze's row, all of it is withdrawn.
    Import {
        /// The kernels that are created.
        kernels: Vec<KernelId>,
        /// The repositories that are created.
        repositories: Vec<NewRepository>,
        /// The directories of repositories that get a reference to the group's history.
        completed: Vec<String>,
    },
    /// An imported group that is visible. Its repositories come into their places, and are never removed again.
    Place {
        /// The repositories that were created.
        repositories: Vec<NewRepository>,
    },
}

/// A repository that an import creates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewRepository {
    /// The directory in which it is made, beside its place.
    pub beside: String,
    /// The directory where it belongs.
    pub place: String,
}
