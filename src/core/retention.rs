//! Decides which checkpoints of a kernel are kept, and why: a pure function of a view.
//!
//! Checkpoints are kept or removed by these rules:
//!
//! - Manual and pinned checkpoints are kept until a client deletes them.
//! - The kernel's current checkpoint, those that undo needs, and those being restored or read are
//!   kept for that long.
//! - Others are kept while they are among the newest N and young enough, and removed afterwards.
//! - A checkpoint from which two kept ones branch off is kept too.
//!
//! A checkpoint holds its complete content, so none needs its parent to be restored. The children
//! of a removed checkpoint become children of its parent: the tree stays a tree.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::checkpoint::{Checkpoint, CheckpointType};
use super::ids::CheckpointId;
use super::limits;
use super::quantity::format_duration;

/// How long automatic checkpoints are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// Number of newest checkpoints to keep; `None`: all.
    pub newest: Option<u32>,
    /// Maximum age in milliseconds; `None`: unlimited.
    pub keep_for_ms: Option<u64>,
}

impl Default for Retention {
    fn default() -> Self {
        Retention {
            newest: Some(limits::DEFAULT_CHECKPOINTS_KEPT),
            keep_for_ms: Some(limits::DEFAULT_CHECKPOINTS_KEPT_FOR.as_millis() as u64),
        }
    }
}

/// An invalid [`Retention`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RetentionError {
    /// The number is zero.
    #[error("at least one checkpoint is kept")]
    None,
    /// The age is below a second, for which the wall clock is too imprecise.
    #[error("checkpoints are kept for a second at least")]
    Short,
}

impl Retention {
    /// Checks the policy.
    ///
    /// # Errors
    /// The violated rule.
    pub fn check(&self) -> Result<(), RetentionError> {
        if self.newest == Some(0) {
            return Err(RetentionError::None);
        }
        match self.keep_for_ms {
            Some(ms) if ms < 1000 => Err(RetentionError::Short),
            Some(_) | None => Ok(()),
        }
    }

    /// Whether something automatic is kept: `newer` others were made after it.
    pub fn keeps(&self, newer: usize, at_ms: i64, now_ms: i64) -> bool {
        self.newest.is_none_or(|most| newer < most as usize) && self.is_young(at_ms, now_ms)
    }

    fn is_young(&self, at_ms: i64, now_ms: i64) -> bool {
        // A clock that went backwards makes every checkpoint young.
        let age_ms = u64::try_from(now_ms.saturating_sub(at_ms)).unwrap_or(0);
        self.keep_for_ms.is_none_or(|most| age_ms <= most)
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.newest {
            Some(newest) => write!(f, "newest {newest}")?,
            None => write!(f, "all")?,
        }
        match self.keep_for_ms {
            Some(ms) => write!(f, ", for {}", format_duration(ms)),
            None => write!(f, ", for ever"),
        }
    }
}

/// A current use of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// The kernel's current state is based on it.
    Head,
    /// Undo returns to it.
    Undo,
    /// An unfinished restore leads to it, or back to it.
    Restore,
    /// An operation reads it.
    Reading,
}

/// A kernel's checkpoints and their current uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// All checkpoints, newest first.
    pub checkpoints: Vec<Checkpoint>,
    /// The checkpoints in use.
    pub needed: Vec<(CheckpointId, Use)>,
}

/// Why a checkpoint is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stays {
    /// A client took it.
    Manual,
    /// A client pinned it.
    Pinned,
    /// It is in use.
    Needed(Use),
    /// It is among the newest and young enough.
    Newest {
        /// Its position from the newest, from 1.
        place: u32,
    },
    /// Kept checkpoints branch off from it.
    Parting,
}

/// Why a checkpoint is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goes {
    /// There are enough newer ones.
    TooMany {
        /// Number of newest checkpoints that are kept.
        newest: u32,
    },
    /// It exceeds the maximum age.
    TooOld {
        /// The maximum age, milliseconds.
        keep_for_ms: u64,
    },
}

/// What the policy decides about a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is kept.
    Stays(Stays),
    /// It is removed.
    Goes(Goes),
}

impl Fate {
    /// Whether the checkpoint is kept.
    pub fn stays(self) -> bool {
        matches!(self, Fate::Stays(_))
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fate::Stays(Stays::Manual) => write!(f, "manual"),
            Fate::Stays(Stays::Pinned) => write!(f, "pinned"),
            Fate::Stays(Stays::Needed(Use::Head)) => write!(f, "the kernel is at it"),
            Fate::Stays(Stays::Needed(Use::Undo)) => write!(f, "safety checkpoint: undo goes back to it"),
            Fate::Stays(Stays::Needed(Use::Restore)) => write!(f, "a restore that has begun needs it"),
            Fate::Stays(Stays::Needed(Use::Reading)) => write!(f, "an operation reads it"),
            Fate::Stays(Stays::Newest { place }) => write!(f, "among the newest (number {place}) and young enough"),
            Fate::Stays(Stays::Parting) => write!(f, "parent of checkpoints that went different ways"),
            Fate::Goes(Goes::TooMany { newest }) => write!(f, "not among the newest {newest}"),
            Fate::Goes(Goes::TooOld { keep_for_ms }) => write!(f, "older than {}", format_duration(*keep_for_ms)),
        }
    }
}

/// Whether ryokan took the checkpoint by itself and no client pinned it.
pub fn is_automatic(checkpoint: &Checkpoint) -> bool {
    checkpoint.kind != CheckpointType::Manual && !checkpoint.pinned
}

/// Decides about each checkpoint, in the order of the view.
pub fn plan(policy: &Retention, standing: &Standing, now_ms: i64) -> Vec<(CheckpointId, Fate)> {
    let needed: HashMap<CheckpointId, Use> = standing.needed.iter().copied().rev().collect();
    let mut place = 0;
    let mut fates: Vec<(CheckpointId, Fate)> = Vec::with_capacity(standing.checkpoints.len());
    // Number of children that lead to a kept checkpoint. Children are newer than their parent, so
    // they are visited first.
    let mut ways: HashMap<CheckpointId, u32> = HashMap::new();
    for checkpoint in &standing.checkpoints {
        place += u32::from(is_automatic(checkpoint));
        let mut fate = alone(policy, checkpoint, place, needed.get(&checkpoint.id).copied(), now_ms);
        let leads = ways.get(&checkpoint.id).copied().unwrap_or(0);
        if !fate.stays() && leads > 1 {
            fate = Fate::Stays(Stays::Parting);
        }
        if let Some(parent) = checkpoint.parent
            && (fate.stays() || leads > 0)
        {
            *ways.entry(parent).or_default() += 1;
        }
        fates.push((checkpoint.id, fate));
    }
    fates
}

/// Decides about a checkpoint without regard to its descendants.
fn alone(policy: &Retention, checkpoint: &Checkpoint, place: u32, needed: Option<Use>, now_ms: i64) -> Fate {
    if checkpoint.pinned {
        return Fate::Stays(Stays::Pinned);
    }
    if checkpoint.kind == CheckpointType::Manual {
        return Fate::Stays(Stays::Manual);
    }
    if let Some(needed) = needed {
        return Fate::Stays(Stays::Needed(needed));
    }
    if let Some(newest) = policy.newest.filter(|newest| place > *newest) {
        return Fate::Goes(Goes::TooMany { newest });
    }
    match policy.keep_for_ms {
        Some(keep_for_ms) if !policy.is_young(checkpoint.at_ms, now_ms) => Fate::Goes(Goes::TooOld { keep_for_ms }),
        Some(_) | None => Fate::Stays(Stays::Newest { place }),
    }
}

#[cfg(test)]
#[path = "retention_tests.rs"]
mod tests;
