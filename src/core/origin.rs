//! The origin of a kernel's present state: created, restored or forked, and from which kernel.

use serde::{Deserialize, Serialize};

use super::ids::{CheckpointId, Epoch, KernelId};

/// Environment variable that holds the [`OriginKind`] for the kernel's code.
pub const ORIGIN_VARIABLE: &str = "RYOKAN_ORIGIN";
/// Environment variable that holds the generation for the kernel's code.
pub const GENERATION_VARIABLE: &str = "RYOKAN_GENERATION";
/// Environment variable that holds the ownership epoch for the kernel's code: it grows with each move to another host.
pub const EPOCH_VARIABLE: &str = "RYOKAN_EPOCH";

/// The kind of a kernel's origin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OriginKind {
    /// The kernel's own beginning.
    #[default]
    Original,
    /// One of the kernel's checkpoints, or an import.
    Restored,
    /// A checkpoint of another kernel.
    Forked,
}

impl OriginKind {
    /// Every kind, in the order of its number in the database.
    pub const ALL: [OriginKind; 3] = [OriginKind::Original, OriginKind::Restored, OriginKind::Forked];

    /// The kind in one word.
    pub const fn name(self) -> &'static str {
        match self {
            OriginKind::Original => "original",
            OriginKind::Restored => "restored",
            OriginKind::Forked => "forked",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<OriginKind> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// The checkpoint of another kernel from which a kernel was forked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkPoint {
    /// The other kernel.
    pub kernel: KernelId,
    /// That kernel's name at the time of the fork.
    pub name: String,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
}

/// The origin of a kernel's present state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The kind of origin.
    pub kind: OriginKind,
    /// Number of restores and forks, including those of its ancestors.
    pub generation: u32,
    /// The fork or import that created the kernel; unchanged by restores.
    pub from: Option<ForkPoint>,
    /// The checkpoint restored last.
    pub restored: Option<CheckpointId>,
}

impl Origin {
    /// Returns the environment variables that describe origin and moves to the kernel's code.
    pub fn environment(kind: OriginKind, generation: u32, epoch: Epoch) -> [(String, String); 3] {
        [
            (ORIGIN_VARIABLE.into(), kind.name().into()),
            (GENERATION_VARIABLE.into(), generation.to_string()),
            (EPOCH_VARIABLE.into(), epoch.0.to_string()),
        ]
    }

    /// Returns this origin after a restore of a checkpoint.
    #[must_use]
    pub fn after_restore(&self, target: CheckpointId) -> Origin {
        Origin {
            kind: OriginKind::Restored,
            generation: self.generation.saturating_add(1),
            from: self.from.clone(),
            restored: Some(target),
        }
    }

    /// Returns the origin of a fork of a kernel with this generation.
    pub fn of_fork(generation: u32, from: ForkPoint) -> Origin {
        Origin { kind: OriginKind::Forked, generation: generation.saturating_add(1), from: Some(from), restored: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origin_counts_generations() {
        let id = |n| CheckpointId::from_bytes([n; 16]);
        let from = ForkPoint { kernel: KernelId::from_bytes([1; 16]), name: "p".into(), checkpoint: id(2) };
        let child = Origin::of_fork(4, from.clone());
        assert_eq!((child.kind, child.generation), (OriginKind::Forked, 5));
        let restored = child.after_restore(id(3)).after_restore(id(4));
        assert_eq!((restored.kind, restored.generation), (OriginKind::Restored, 7));
        assert_eq!((restored.from, restored.restored), (Some(from), Some(id(4))));
        assert_eq!(OriginKind::from_name("forked"), Some(OriginKind::Forked));
    }
}
