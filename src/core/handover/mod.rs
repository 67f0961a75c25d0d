//! Handover: the protocol by which a kernel moves to another host, as two pure state machines.
//!
//! ```text
//!  source                                        target
//!  offering ── offer ──────────────────────────▶ receiving
//!           ◀─ accept | refuse ──
//!  copying  ── objects, while the kernel runs ─▶
//!  sealing  ── last objects, seal ─────────────▶ verifies, records "prepared"
//!           ◀─ prepared ──                        prepared: waits, and never decides
//!  records "departed": the commit point
//!  departed ── commit ─────────────────────────▶ records "live"
//!           ◀─ live ──                            live
//!  moved
//!
//!  any failure before the commit point:
//!  aborting ── abort ──────────────────────────▶ deletes what it received
//!           ◀─ aborted ──                         gone
//!  stayed
//! ```
//!
//! The source decides alone. Before its departure is durable, the kernel lives there; from then on it never acts there
//! again. A prepared target waits. The source repeats its decision after every restart and reconnection until the target
//! acknowledges it, so there is at most one live copy, and while both disks survive there is one.
//!
//! A driver performs the actions in order, each completely before the next. If an action cannot be performed, the driver
//! continues with the machine that [`Source::restarted`] or [`Target::restarted`] gives for what is recorded.
//!
//! Owns the decisions; never knows connections, files or databases.

mod excerpt;
mod group;
mod missing;
mod rounds;
mod source;
mod target;

#[cfg(test)]
mod exhaustive;

use crate::core::snapshot::KindRequest;
use crate::core::spec::{Isolation, KernelSpec};

pub use excerpt::{Excerpt, ExcerptError, Link};
pub use group::{Convoy, MoveEvent, Next, Stage};
pub use missing::{Allowed, Left, Missing};
pub use rounds::Rounds;
pub use source::{Source, SourceAction, SourceEvent};
pub use target::{Prepared, Target, TargetAction, TargetEvent};

/// What a client asks of a move.
#[derive(Debug, Clone, Default)]
pub struct MoveOptions {
    /// What of this host it may move without.
    pub allow_missing: Allowed,
    /// The kind of snapshot.
    pub kind: KindRequest,
    /// Bytes a second while the kernel runs; 0: no limit.
    pub limit_rate: u64,
    /// The isolation on the other host; `None`: as here.
    pub isolation: Option<Isolation>,
    /// The oldest checkpoint that moves, beside pinned ones; `None`: all move.
    pub since: Option<String>,
    /// Idempotency key; empty: none.
    pub key: String,
    /// The kernel's version; 0: any.
    pub expected_version: u64,
}

impl MoveOptions {
    /// The specification on the other host.
    pub fn spec_there(&self, spec: KernelSpec) -> KernelSpec {
        match self.isolation {
            Some(isolation) if isolation != spec.isolation => {
                KernelSpec { isolation, image: String::new(), venv: None, ..spec }
            }
            Some(_) | None => spec,
        }
    }
}

/// The side of a handover that a host's record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The kernel leaves this host.
    Out,
    /// The kernel comes to this host.
    In,
}
