//! How a kernel's present state came to be: made, restored or forked, and from whom.

use serde::{Deserialize, Serialize};

use super::ids::{CheckpointId, KernelId};

/// The variable in which the code inside finds the [`OriginKind`].
pub const ORIGIN_VARIABLE: &str = "RYOKAN_ORIGIN";
/// The variable in which the code inside finds the generation.
pub const GENERATION_VARIABLE: &str = "RYOKAN_GENERATION";

/// What the present state goes back to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OriginKind {
    /// The kernel's own beginning.
    #[default]
    Original,
    /// One of its checkpoints, or what was imported.
    Restored,
    /// Another kernel, at one of that one's checkpoints.
    Forked,
}

impl OriginKind {
    /// Every kind, in the order in which the database numbers them.
    pub const ALL: [OriginKind; 3] = [OriginKind::Original, OriginKind::Restored, OriginKind::Forked];

    /// The kind in one word.
    pub const fn name(self) -> &'static str {
        match self {
            OriginKind::Original => "original",
            OriginKind::Restored => "restored",
            OriginKind::Forked => "forked",
        }
    }

    /// The kind of that word.
    pub fn from_name(name: &str) -> Option<OriginKind> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A checkpoint of a kernel from which another one began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkPoint {
    /// Whose checkpoint.
    pub kernel: KernelId,
    /// What that kernel was called then.
    pub name: String,
    /// Which.
    pub checkpoint: CheckpointId,
}

/// How a kernel's present state came to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// What the present state goes back to.
    pub kind: OriginKind,
    /// How often it was restored or forked, its ancestors' times included.
    pub generation: u32,
    /// From what it was forked or imported; stays when it is restored.
    pub from: Option<ForkPoint>,
    /// The checkpoint that was restored last.
    pub restored: Option<CheckpointId>,
}

impl Origin {
    /// What a kernel of this origin tells the code inside, as environment.
    pub fn environment(kind: OriginKind, generation: u32) -> [(String, String); 2] {
        [(ORIGIN_VARIABLE.into(), kind.name().into()), (GENERATION_VARIABLE.into(), generation.to_string())]
    }

    /// The same once a checkpoint was restored.
    #[must_use]
    pub fn after_restore(&self, target: CheckpointId) -> Origin {
        Origin {
            kind: OriginKind::Restored,
            generation: self.generation.saturating_add(1),
            from: self.from.clone(),
            restored: Some(target),
        }
    }

    /// That of a fork of a kernel that was of this generation.
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
