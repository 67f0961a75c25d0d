//! Recent uses of objects: garbage collection keeps them although nothing references them yet.
//!
//! In memory only: a writer that has not referenced its objects when the daemon dies never will.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use super::Store;
use crate::core::ids::Digest;
use crate::core::limits;

#[derive(Debug, Default)]
pub(super) struct RecentUse {
    times: HashMap<Digest, Instant>,
    /// The record overflowed at this time: everything counts as used until then.
    all_until: Option<Instant>,
    guards: BTreeMap<u64, Instant>,
    next_guard: u64,
    /// Number of uses recorded.
    touches: u64,
}

impl RecentUse {
    pub(super) fn touch(&mut self, digest: Digest) {
        let now = Instant::now();
        self.touches += 1;
        self.times.insert(digest, now);
        if self.times.len() > limits::STORE_RECENT_OBJECTS {
            let cutoff = self.cutoff(now, limits::STORE_GRACE_MAX);
            self.times.retain(|_, time| *time >= cutoff);
            if self.times.len() > limits::STORE_RECENT_OBJECTS / 2 {
                self.times.clear();
                self.all_until = Some(now);
            }
        }
    }

    /// Number of uses recorded.
    pub(super) fn count(&self) -> u64 {
        self.touches
    }

    /// The time since which uses protect: `grace` ago, or the start of the oldest guard.
    pub(super) fn cutoff(&self, now: Instant, grace: Duration) -> Instant {
        let graced = now.checked_sub(grace.min(limits::STORE_GRACE_MAX)).unwrap_or(now);
        self.guards.values().min().map_or(graced, |oldest| graced.min(*oldest))
    }

    pub(super) fn is_since(&self, digest: Digest, cutoff: Instant) -> bool {
        self.all_until.is_some_and(|until| until >= cutoff)
            || self.times.get(&digest).is_some_and(|time| *time >= cutoff)
    }
}

/// Protects everything written or reused since it began from garbage collection, until it is dropped.
///
/// Every [`Writer`] and [`Batch`] has one; a caller that needs longer to reference its objects takes another one around
/// it.
///
/// [`Writer`]: super::Writer
/// [`Batch`]: super::Batch
#[derive(Debug)]
pub struct GcGuard {
    store: Store,
    id: u64,
}

impl GcGuard {
    pub(super) fn begin(store: &Store) -> GcGuard {
        let since = Instant::now();
        GcGuard::since(store, |_| since)
    }

    /// A guard that begins with the oldest existing one, and at least `grace` ago.
    ///
    /// A caller that lists *current* references must also keep objects that others stored before and reference later;
    /// their own guards may be gone when the list is used.
    pub(super) fn before_all(store: &Store, grace: Duration) -> GcGuard {
        GcGuard::since(store, |touched| touched.cutoff(Instant::now(), grace))
    }

    fn since(store: &Store, since: impl FnOnce(&RecentUse) -> Instant) -> GcGuard {
        let mut state = store.state();
        let (id, since) = (state.recent_use.next_guard, since(&state.recent_use));
        state.recent_use.next_guard += 1;
        state.recent_use.guards.insert(id, since);
        drop(state);
        GcGuard { store: store.clone(), id }
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }
}

impl Drop for GcGuard {
    fn drop(&mut self) {
        self.store.state().recent_use.guards.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u32) -> Digest {
        super::super::format::digest_of(&n.to_le_bytes())
    }

    #[test]
    fn touched_set_is_bounded() {
        let mut touched = RecentUse::default();
        touched.touch(digest(0));
        let between = Instant::now();
        touched.touch(digest(1));
        assert!(!touched.is_since(digest(0), between) && touched.is_since(digest(1), between));
        assert!(!touched.is_since(digest(2), between));
        for n in 0..=limits::STORE_RECENT_OBJECTS as u32 {
            touched.touch(digest(n));
            assert!(touched.times.len() <= limits::STORE_RECENT_OBJECTS);
        }
        assert!(touched.is_since(digest(0), between), "what is no longer remembered one by one counts as touched");
        assert!(!touched.is_since(digest(u32::MAX), Instant::now()));
    }

    #[test]
    fn oldest_hold_sets_cutoff() {
        let mut touched = RecentUse::default();
        let early = Instant::now();
        touched.guards.insert(0, early);
        touched.guards.insert(1, early + Duration::from_secs(5));
        let now = early + Duration::from_secs(100);
        assert_eq!(touched.cutoff(now, Duration::from_secs(10)), early);
        touched.guards.clear();
        assert_eq!(touched.cutoff(now, Duration::from_secs(10)), now - Duration::from_secs(10));
    }
}
