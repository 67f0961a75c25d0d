//! Returns the daemon's unused memory to the system: after load the allocator keeps it.

use crate::core::limits;
use crate::sys::heap;

/// Compares the daemon's memory with its use, forever.
pub(super) async fn run() {
    let mut ticks = tokio::time::interval(limits::MEMORY_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut floor = Floor::default();
    loop {
        ticks.tick().await;
        let Some(unused) = unused_bytes() else { return };
        if floor.is_exceeded(unused) {
            // The allocator's locks are held meanwhile, each briefly.
            let _ = tokio::task::spawn_blocking(heap::trim).await;
            let remains = unused_bytes().unwrap_or(unused);
            tracing::debug!(unused, remains, "returned unused memory");
            floor.set(remains);
        }
    }
}

/// Resident memory that the program does not use; `None` without figures.
fn unused_bytes() -> Option<u64> {
    Some(heap::resident_bytes().ok()?.saturating_sub(heap::used_bytes()?))
}

/// Unused memory that could not be returned, so that it is not tried at each tick.
#[derive(Debug, Default)]
struct Floor(u64);

impl Floor {
    fn is_exceeded(&mut self, unused: u64) -> bool {
        self.0 = self.0.min(unused);
        unused > self.0 + limits::UNUSED_MEMORY_BYTES
    }

    fn set(&mut self, remains: u64) {
        self.0 = remains;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreturnable_memory_is_tried_once() {
        let mib = |n: u64| n << 20;
        let mut floor = Floor(mib(10));
        assert!(!floor.is_exceeded(mib(13)));
        assert!(floor.is_exceeded(mib(900)));
        floor.set(mib(400));
        assert!(!floor.is_exceeded(mib(403)));
        assert!(!floor.is_exceeded(mib(30)));
        assert!(floor.is_exceeded(mib(60)));
    }
}
