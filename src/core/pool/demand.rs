//! Tracks the rate and the bursts of requests for slots, which determine the size of a pool.
//!
//! The counts are exact and their memory is bounded: the times of the last two seconds are kept,
//! and of the time before only those peaks that are larger than every later peak.

use std::collections::VecDeque;

use crate::core::limits;

const BURST_MS: u64 = limits::POOL_BURST.as_millis() as u64;

/// A moment and the number of requests within [`limits::POOL_BURST`] before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Peak {
    at_ms: u64,
    count: u32,
}

/// The recent requests for slots of one pool.
///
/// A burst of more than [`limits::POOL_SLOTS`] counts as that many.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Demand {
    /// Time of the last request or, before the first, when the pool began.
    last_ms: u64,
    /// Times of the requests within the last [`limits::POOL_BURST`], oldest first.
    recent: VecDeque<u64>,
    /// Peaks in falling order: the first that is recent enough is the largest.
    peaks: VecDeque<Peak>,
}

impl Demand {
    /// Creates the demand of a new pool, which has no requests but counts as recently used.
    pub fn new(now_ms: u64) -> Demand {
        Demand { last_ms: now_ms, recent: VecDeque::new(), peaks: VecDeque::new() }
    }

    /// Records a request for a slot.
    ///
    /// Called once for each request when it arrives, whether or not it must wait: demand counted at
    /// the time of service would be too low.
    pub fn came(&mut self, now_ms: u64) {
        self.last_ms = now_ms;
        while self.recent.front().is_some_and(|at_ms| now_ms.saturating_sub(*at_ms) >= BURST_MS) {
            self.recent.pop_front();
        }
        if self.recent.len() >= limits::POOL_SLOTS as usize {
            self.recent.pop_front();
        }
        self.recent.push_back(now_ms);
        let count = self.recent.len() as u32;
        while self.peaks.back().is_some_and(|peak| peak.count <= count) {
            self.peaks.pop_back();
        }
        self.peaks.push_back(Peak { at_ms: now_ms, count });
    }

    /// Time of the last request or, before the first, when the pool began, milliseconds.
    pub fn last_ms(&self) -> u64 {
        self.last_ms
    }

    /// Returns the size of the largest burst that ended less than `within_ms` ago.
    pub fn peak(&self, now_ms: u64, within_ms: u64) -> u32 {
        self.largest(now_ms, within_ms).map_or(0, |peak| peak.count)
    }

    /// Whether no request arrived for `within_ms`.
    pub fn is_quiet(&self, now_ms: u64, within_ms: u64) -> bool {
        now_ms.saturating_sub(self.last_ms) >= within_ms
    }

    /// Returns when [`Demand::peak`] or [`Demand::is_quiet`] changes without further requests;
    /// `None`: never.
    pub fn changes_at_ms(&self, now_ms: u64, within_ms: u64) -> Option<u64> {
        let from_ms = self.largest(now_ms, within_ms).map_or(self.last_ms, |peak| peak.at_ms);
        Some(from_ms.saturating_add(within_ms)).filter(|at_ms| *at_ms > now_ms)
    }

    fn largest(&self, now_ms: u64, within_ms: u64) -> Option<&Peak> {
        self.peaks.iter().find(|peak| now_ms.saturating_sub(peak.at_ms) < within_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_memory_is_bounded() {
        let most = limits::POOL_SLOTS as usize;
        let mut storm = Demand::new(0);
        (0..10_000).for_each(|_| storm.came(5));
        assert_eq!((storm.recent.len(), storm.peaks.len(), storm.peak(5, 1_000)), (most, 1, limits::POOL_SLOTS));
        // A slowly falling rate leaves the most peaks.
        let mut ebb = Demand::new(0);
        (0..14_000u64).for_each(|n| ebb.came(n * n / 40));
        assert!((most / 2..=most).contains(&ebb.peaks.len()), "{}", ebb.peaks.len());
        assert!(ebb.recent.len() <= most && ebb.peak(5_000_000, 6_000_000) == limits::POOL_SLOTS);
    }
}
