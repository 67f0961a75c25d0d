//! The move of a group: the handovers of its kernels, its other members, and one decision about all of them.
//!
//! ```text
//! copying ── every kernel is copied ─▶ holding ── every kernel is prepared ─▶ capturing
//!    │                                    │                  the target has the rest ─▶ deciding ─ durable ─▶ decided
//!    └──────── any failure ───────────────┴──────────────────────────┴──────────────────────┴─▶ failed
//! ```
//! A kernel that is prepared waits, held, until the group is decided. It departs by that decision, and by nothing else.

use serde::{Deserialize, Serialize};

/// How far the record of a group's move is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stage {
    /// Nothing is decided; at the target: prepared.
    Open,
    /// Everything lives at the target.
    Decided,
    /// The target has brought everything into its place.
    Done,
}

/// What the driver of a group's move does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Next {
    /// Wait for the kernels.
    Wait,
    /// Hold every kernel.
    Hold,
    /// Capture the other members, and send them.
    Capture,
    /// Record the decision durably.
    Decide,
    /// The kernels depart.
    Depart,
    /// Everything stays.
    Stay,
}

/// An event of a group's move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MoveEvent {
    /// A kernel is copied while it runs.
    Copied,
    /// A kernel is held, and prepared at the target.
    Prepared,
    /// The target has prepared the group.
    Sent,
    /// The decision is durable.
    Recorded,
    /// A part of it failed, or a client cancels.
    Failed,
}

/// The kernels of a group that moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Convoy {
    kernels: usize,
    copied: usize,
    prepared: usize,
    state: Next,
}

impl Convoy {
    /// A move of this number of kernels.
    pub const fn new(kernels: usize) -> Convoy {
        Convoy { kernels, copied: 0, prepared: 0, state: Next::Wait }
    }

    /// Takes an event; returns what is to be done. Total: an event without meaning changes nothing.
    pub fn step(&mut self, event: MoveEvent) -> Next {
        match (self.state, event) {
            (Next::Wait, MoveEvent::Copied) => {
                self.copied += 1;
                if self.copied == self.kernels {
                    self.state = Next::Hold;
                }
            }
            (Next::Hold, MoveEvent::Prepared) => {
                self.prepared += 1;
                if self.prepared == self.kernels {
                    self.state = Next::Capture;
                }
            }
            (Next::Capture, MoveEvent::Sent) => self.state = Next::Decide,
            (Next::Decide, MoveEvent::Recorded) => self.state = Next::Depart,
            // Also while it is being recorded: the driver reads what holds.
            (Next::Wait | Next::Hold | Next::Capture | Next::Decide, MoveEvent::Failed) => self.state = Next::Stay,
            (_, _) => {}
        }
        self.state
    }

    /// What is to be done.
    pub const fn next(&self) -> Next {
        self.state
    }

    /// Whether the kernels may act at the source.
    pub const fn may_act(&self) -> bool {
        matches!(self.state, Next::Wait | Next::Stay)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const ALL: [MoveEvent; 5] =
        [MoveEvent::Copied, MoveEvent::Prepared, MoveEvent::Sent, MoveEvent::Recorded, MoveEvent::Failed];

    /// Every sequence of events: kernels depart only after a durable decision about all of them, and then for good.
    #[test]
    fn kernels_depart_by_decision() {
        let mut open = vec![(Convoy::new(2), [0; 5])];
        let mut seen = HashSet::new();
        while let Some((convoy, counts)) = open.pop() {
            if !seen.insert((convoy, counts.map(|count: usize| count.min(3)))) {
                continue;
            }
            for (at, event) in ALL.into_iter().enumerate() {
                let (mut next, mut now) = (convoy, counts);
                next.step(event);
                now[at] += 1;
                if next.next() == Next::Depart {
                    let [copied, prepared, sent, recorded, _] = now;
                    assert!(copied >= 2 && prepared >= 2 && sent >= 1 && recorded >= 1, "{now:?}");
                }
                if matches!(convoy.next(), Next::Depart | Next::Stay) {
                    assert_eq!(next.next(), convoy.next(), "an end is final: {event:?}");
                }
                if now.iter().sum::<usize>() < 9 {
                    open.push((next, now));
                }
            }
        }
        assert!(seen.iter().any(|(convoy, _)| convoy.next() == Next::Depart));
    }

    #[test]
    fn failure_keeps_everything() {
        for events in 0..4 {
            let mut convoy = Convoy::new(1);
            for event in [MoveEvent::Copied, MoveEvent::Prepared, MoveEvent::Sent].into_iter().take(events) {
                convoy.step(event);
            }
            assert_eq!(convoy.step(MoveEvent::Failed), Next::Stay);
            assert!(convoy.may_act());
            assert_eq!(convoy.step(MoveEvent::Recorded), Next::Stay);
        }
    }
}
