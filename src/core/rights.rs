//! What a capability of a kernel allows. A set can only shrink.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One right of the holder of a kernel's capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// Read state: info, variables, files, journal, events, mounts, tools, blobs.
    Read,
    /// Run code and tools, interrupt.
    Execute,
    /// Change state from outside: variables, files, mounts, MCP servers, blobs, messages, restored
    /// snapshots, and workflow records with their automatic checkpoints.
    Write,
    /// Take checkpoints, and pin them.
    Checkpoint,
    /// Restore and undo.
    Restore,
    /// Fork and thread.
    Fork,
    /// Move to another host.
    Teleport,
    /// Start, stop, remove (also checkpoints), archive, publish and attenuate.
    Admin,
}

impl Right {
    /// Every right, in wire order.
    pub const ALL: [Right; 8] = [
        Right::Read,
        Right::Execute,
        Right::Write,
        Right::Checkpoint,
        Right::Restore,
        Right::Fork,
        Right::Teleport,
        Right::Admin,
    ];

    /// The right in one word.
    pub const fn name(self) -> &'static str {
        match self {
            Right::Read => "read",
            Right::Execute => "execute",
            Right::Write => "write",
            Right::Checkpoint => "checkpoint",
            Right::Restore => "restore",
            Right::Fork => "fork",
            Right::Teleport => "teleport",
            Right::Admin => "admin",
        }
    }

    /// The right with this name.
    pub fn from_name(name: &str) -> Option<Right> {
        Self::ALL.into_iter().find(|right| right.name() == name)
    }
}

/// A set of rights.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rights(u8);

impl Rights {
    /// Every right.
    pub const ALL: Rights = Rights(0xff);
    /// No right.
    pub const NONE: Rights = Rights(0);

    /// Intersects both sets: attenuation.
    #[must_use]
    pub const fn and(self, other: Rights) -> Rights {
        Rights(self.0 & other.0)
    }

    /// Whether the set holds `right`.
    pub const fn has(self, right: Right) -> bool {
        self.0 & (1 << right as u8) != 0
    }

    /// Whether every right of the set is also in `other`.
    pub const fn within(self, other: Rights) -> bool {
        self.0 & !other.0 == 0
    }

    /// The rights in wire order.
    pub fn iter(self) -> impl Iterator<Item = Right> {
        Right::ALL.into_iter().filter(move |right| self.has(*right))
    }
}

impl FromIterator<Right> for Rights {
    fn from_iter<I: IntoIterator<Item = Right>>(rights: I) -> Self {
        Rights(rights.into_iter().fold(0, |bits, right| bits | 1 << right as u8))
    }
}

impl fmt::Debug for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(Right::name)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attenuation_only_shrinks() {
        for a in 0..=255u8 {
            for b in 0..=255u8 {
                let both = Rights(a).and(Rights(b));
                assert!(both.within(Rights(a)) && both.within(Rights(b)));
            }
        }
    }

    #[test]
    fn rights_set_holds_its_members() {
        let set: Rights = [Right::Read, Right::Admin].into_iter().collect();
        assert!(set.has(Right::Read) && set.has(Right::Admin) && !set.has(Right::Execute));
        assert_eq!(set.iter().collect::<Rights>(), set);
        assert_eq!(Right::ALL.into_iter().collect::<Rights>(), Rights::ALL);
    }
}
