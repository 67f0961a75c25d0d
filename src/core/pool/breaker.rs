//! Circuit breaker that stops a failing image from being started in a loop.
//!
//! ```text
//!  closed ──failed──▶ failing ──3 in a row──▶ open: none ──pause over──▶ open: one at a time
//!    ▲                   │                      ▲                           │        │
//!    │                   │                      └─── failed: twice as long ─┘        │
//!    └──── succeeded ────┴───────────────────────────── succeeded ───────────────────┘
//! ```
//!
//! A slot that dies idle is a failure too. Each creation of such an image succeeds, so a death soon
//! after a failure continues the count of that failure, regardless of successes in between.

use crate::core::limits;

/// Consecutive creation failures of one pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Breaker {
    state: State,
    /// Consecutive failures, as of the last one.
    failures: u32,
    /// Until then a death continues the count.
    doubt_until_ms: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
enum State {
    /// The last creation succeeded, or there was none.
    #[default]
    Closed,
    /// The last creations failed, but too few to open the breaker.
    Failing { reason: String },
    /// Too many creations failed: no creations until `until_ms`, one at a time afterwards.
    Open { until_ms: u64, reason: String },
}

/// How many creations the breaker permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Any number.
    Free,
    /// One at a time.
    Trial,
    /// None.
    Shut {
        /// When trials begin.
        until_ms: u64,
    },
}

impl Breaker {
    /// Returns how many creations are permitted now.
    pub fn gate(&self, now_ms: u64) -> Gate {
        match self.state {
            State::Closed | State::Failing { .. } => Gate::Free,
            State::Open { until_ms, .. } if now_ms < until_ms => Gate::Shut { until_ms },
            State::Open { .. } => Gate::Trial,
        }
    }

    /// Why the last creation failed, at most [`limits::POOL_REASON_BYTES`]; `None` after a success.
    pub fn reason(&self) -> Option<&str> {
        match &self.state {
            State::Closed => None,
            State::Failing { reason } | State::Open { reason, .. } => Some(reason),
        }
    }

    /// If the breaker is open, when the next creation is or was first permitted.
    pub fn tries_again_at_ms(&self) -> Option<u64> {
        match self.state {
            State::Closed | State::Failing { .. } => None,
            State::Open { until_ms, .. } => Some(until_ms),
        }
    }

    /// Records a successful creation.
    pub fn succeeded(&mut self) {
        self.state = State::Closed;
    }

    /// Records a failed or stuck creation.
    ///
    /// A creation refused for lack of room on the host is not reported: it says nothing about the
    /// image.
    pub fn failed(&mut self, reason: &str, now_ms: u64) {
        let before = match self.state {
            State::Closed => 0,
            State::Failing { .. } | State::Open { .. } => self.failures,
        };
        self.count(before, reason, now_ms);
    }

    /// Records the death of an idle slot.
    pub fn died(&mut self, reason: &str, now_ms: u64) {
        let before = match self.state {
            State::Closed if now_ms >= self.doubt_until_ms => 0,
            State::Closed | State::Failing { .. } | State::Open { .. } => self.failures,
        };
        self.count(before, reason, now_ms);
    }

    fn count(&mut self, before: u32, reason: &str, now_ms: u64) {
        let reason = reason[..reason.floor_char_boundary(limits::POOL_REASON_BYTES)].to_owned();
        let doubt_ms = limits::POOL_FAILURE_WINDOW.as_millis() as u64;
        match &mut self.state {
            // The creation began before the breaker opened, together with those that opened it.
            State::Open { until_ms, reason: last } if now_ms < *until_ms => *last = reason,
            State::Closed | State::Failing { .. } | State::Open { .. } => {
                self.failures = before.saturating_add(1);
                let mut until_ms = now_ms;
                self.state = match self.failures.checked_sub(limits::POOL_FAILURES) {
                    None => State::Failing { reason },
                    Some(doublings) => {
                        until_ms = now_ms.saturating_add(backoff_ms(doublings));
                        State::Open { until_ms, reason }
                    }
                };
                self.doubt_until_ms = until_ms.saturating_add(doubt_ms);
            }
        }
    }
}

/// The pause that follows a failure of an open breaker.
fn backoff_ms(doublings: u32) -> u64 {
    let first = limits::POOL_BACKOFF_FIRST.as_millis() as u64;
    let most = limits::POOL_BACKOFF_MAX.as_millis() as u64;
    first.saturating_mul(1 << doublings.min(20)).min(most)
}
