//! Which checkpoints of a kernel stay, and why: a pure function of a view of them.
//!
//! ```text
//! manual, pinned ─────────────────────────────▶ stay until somebody deletes them
//! where the kernel is, what undo needs,
//! what is being restored or read ─────────────▶ stay as long as that is so
//! the others: among the newest N and young ───▶ stay; else they go,
//! but one from which two that stay went different ways stays too: it is where they parted
//! ```
//!
//! A checkpoint holds all of its content itself, so none needs its parent to be restored. What goes hands its children to its own
//! parent: the tree stays a tree.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::checkpoint::{Checkpoint, CheckpointType};
use super::ids::CheckpointId;
use super::limits;
use super::quantity::format_duration;

/// How long checkpoints that ryokan took by itself are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// So many of the newest; `None`: all.
    pub newest: Option<u32>,
    /// Milliseconds; `None`: for ever.
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

/// A retention that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RetentionError {
    /// Not even one.
    #[error("at least one checkpoint is kept")]
    None,
    /// Shorter than any clock can be trusted.
    #[error("checkpoints are kept for a second at least")]
    Short,
}

impl Retention {
    /// Checks it.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn check(&self) -> Result<(), RetentionError> {
        if self.newest == Some(0) {
            return Err(RetentionError::None);
        }
        match self.keep_for_ms {
            Some(ms) if ms < 1000 => Err(RetentionError::Short),
            Some(_) | None => Ok(()),
        }
    }

    fn is_young(&self, at_ms: i64, now_ms: i64) -> bool {
        // Of a clock that went backwards everything is young.
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

/// What needs a checkpoint now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// The kernel is at it.
    Head,
    /// Undo goes back to it.
    Undo,
    /// A restore that has begun leads to it, or back to it.
    Restore,
    /// An operation reads it.
    Reading,
}

/// A kernel's checkpoints and what needs them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// All of them, the newest first.
    pub checkpoints: Vec<Checkpoint>,
    /// Those that something needs now.
    pub needed: Vec<(CheckpointId, Use)>,
}

/// Why a checkpoint stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stays {
    /// Somebody took it.
    Manual,
    /// Somebody pinned it.
    Pinned,
    /// Something needs it now.
    Needed(Use),
    /// It is among the newest, by place from 1, and young.
    Newest {
        /// Its place.
        place: u32,
    },
    /// Checkpoints that stay went different ways from here.
    Parting,
}

/// Why a checkpoint goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goes {
    /// There are newer ones.
    TooMany {
        /// So many of the newest stay.
        newest: u32,
    },
    /// It is old.
    TooOld {
        /// So long they stay, milliseconds.
        keep_for_ms: u64,
    },
}

/// What becomes of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It stays.
    Stays(Stays),
    /// It goes.
    Goes(Goes),
}

impl Fate {
    /// Whether it stays.
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

/// Whether ryokan took it by itself and nobody asked for it to be kept.
pub fn is_automatic(checkpoint: &Checkpoint) -> bool {
    checkpoint.kind != CheckpointType::Manual && !checkpoint.pinned
}

/// Says of each checkpoint, in the order of the view, what becomes of it.
pub fn plan(policy: &Retention, standing: &Standing, now_ms: i64) -> Vec<(CheckpointId, Fate)> {
    let needed: HashMap<CheckpointId, Use> = standing.needed.iter().copied().rev().collect();
    let mut place = 0;
    let mut fates: Vec<(CheckpointId, Fate)> = Vec::with_capacity(standing.checkpoints.len());
    // How many children lead to something that stays. Children are newer than their parent, so they come first.
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

/// What becomes of one whatever came of it.
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
