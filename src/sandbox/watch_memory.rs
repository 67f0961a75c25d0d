//! The memory limit by polling while an execution runs, more often closer to the limit. Without a
//! cgroup it measures every process; with one, the cgroup and init, which is outside the cgroup.
//! Costs nothing without ticks. Runs in init.

use super::Verdict;
use super::cgroup::Cgroup;
use super::init::Init;
use super::usage::{own_bytes, own_rough_bytes, processes, proportional_bytes};

/// Shortest interval, close to the limit.
const FASTEST_MS: u64 = 20;
/// Longest interval.
const SLOWEST_MS: u64 = 500;

/// Watches the total memory of all processes.
#[derive(Debug, Clone, Copy)]
pub struct MemoryWatch {
    limit_bytes: u64,
}

impl MemoryWatch {
    /// Creates a watch.
    pub fn new(init: &Init) -> MemoryWatch {
        MemoryWatch { limit_bytes: init.plan.limits.memory_bytes }
    }

    /// Measures once. The cheap figure counts shared pages once per process; the exact one is read
    /// only if that exceeds the limit.
    pub fn tick(&self, init: &Init) -> Verdict {
        // Without files: the host kernel drops their pages at the limit.
        if let Some(bytes) = init.cgroup.as_ref().filter(|cgroup| cgroup.memory).and_then(Cgroup::held_bytes) {
            return self.judge(bytes + own_bytes());
        }
        let processes = processes();
        let scratch = init.scratch_used();
        let rough: u64 =
            processes.iter().map(|process| process.resident_bytes).sum::<u64>() + scratch + own_rough_bytes();
        if rough <= self.limit_bytes {
            return self.judge(rough);
        }
        self.judge(processes.iter().map(proportional_bytes).sum::<u64>() + scratch + own_bytes())
    }

    fn judge(&self, used: u64) -> Verdict {
        if used > self.limit_bytes {
            return Verdict::Beyond { used, limit: self.limit_bytes, unit: "bytes" };
        }
        let free_share = (self.limit_bytes - used) as f64 / self.limit_bytes as f64;
        let next_ms = FASTEST_MS + ((SLOWEST_MS - FASTEST_MS) as f64 * free_share * free_share) as u64;
        Verdict::Within { next_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_poll_speeds_up() {
        let watch = MemoryWatch { limit_bytes: 1000 };
        assert_eq!(watch.judge(0), Verdict::Within { next_ms: SLOWEST_MS });
        assert_eq!(watch.judge(1000), Verdict::Within { next_ms: FASTEST_MS });
        assert_eq!(watch.judge(1001), Verdict::Beyond { used: 1001, limit: 1000, unit: "bytes" });
        let pauses: Vec<u64> = (0..=10)
            .filter_map(|tenth| match watch.judge(tenth * 100) {
                Verdict::Within { next_ms } => Some(next_ms),
                Verdict::Beyond { .. } => None,
            })
            .collect();
        assert!(pauses.is_sorted_by(|a, b| a >= b) && pauses.len() == 11);
    }
}
