//! Garbage collection, concurrent with writers.
//!
//! ```text
//! mark    live objects, and their chunks                                   changes nothing
//! drop    the rest becomes invalid: `dropped` is written, in one step      reuse before that keeps an entry
//! sweep   packs without valid entries are removed; from packs with few,
//!         those are copied and synced, then the pack is removed            a crash leaves copies, never gaps
//! ```
//!
//! Everything used within `grace`, or since the oldest active writer began, stays.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::format::{self, Kind, Slot};
use super::{Result, Store, StoreError, limits, lock, pack};
use crate::core::ids::Digest;
use crate::sys::fs;

/// Packs below this fraction of a full one are small.
const SMALL_PART: u64 = 4;
/// Number of small packs from which they are merged.
const SMALL_PACKS: usize = 8;

/// Options of a run.
#[derive(Debug, Clone, Copy)]
pub struct GcOptions {
    /// Only report what would be removed.
    pub dry_run: bool,
    /// Objects used within this time stay; at most [`limits::STORE_GRACE_MAX`]. It must exceed the time between
    /// storing an object and `live` knowing of it.
    pub grace: Duration,
    /// A pack with a smaller live percentage is copied and removed.
    pub live_percent: u8,
    /// Most bytes to copy; further packs wait for the next run. Packs without live entries cost nothing.
    pub copy_most: u64,
}

impl Default for GcOptions {
    fn default() -> Self {
        GcOptions { dry_run: false, grace: limits::STORE_GRACE, live_percent: 70, copy_most: u64::MAX }
    }
}

/// Why an object stays or is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Stays: referenced.
    Live,
    /// Stays: used recently, or by an active writer.
    Recent,
    /// Stays although unreferenced: it is also a chunk of an object that stays.
    Shared,
    /// Removed: unreferenced.
    Unreferenced,
}

impl Fate {
    /// Whether the object stays.
    pub fn is_kept(self) -> bool {
        match self {
            Fate::Live | Fate::Recent | Fate::Shared => true,
            Fate::Unreferenced => false,
        }
    }
}

/// The result for one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GcItem {
    /// Its address.
    pub digest: Digest,
    /// Its length in bytes.
    pub bytes: u64,
    /// What happens to it.
    pub fate: Fate,
}

/// The result of a run, or of a dry run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Objects kept.
    pub kept: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// Objects removed.
    pub dropped: u64,
    /// Their bytes.
    pub dropped_bytes: u64,
    /// Packs removed.
    pub packs_removed: u64,
    /// Their bytes.
    pub removed_bytes: u64,
    /// Bytes copied from them.
    pub copied_bytes: u64,
}

/// Live digests, by their first half: a collision keeps an object too long, nothing else.
#[derive(Debug, Default)]
struct Marks {
    live: HashSet<u128>,
    recent: HashSet<u128>,
    /// Chunks of lists that stay.
    chunks: HashSet<u128>,
}

/// The contents of one pack.
#[derive(Debug, Default)]
struct PackUsage {
    number: u32,
    length: u64,
    /// Bytes of all entries.
    entry_bytes: u64,
    /// Bytes of the entries that stay.
    kept: u64,
    kept_entries: u64,
    is_full: bool,
}

fn half_digest(digest: Digest) -> u128 {
    let mut half = [0; 16];
    half.copy_from_slice(&digest.as_bytes()[..16]);
    u128::from_le_bytes(half)
}

/// One run.
struct Gc<'a, L, E> {
    store: &'a Store,
    options: GcOptions,
    cutoff: Instant,
    live: L,
    each: E,
    report: GcReport,
}

impl Store {
    /// Removes the objects that `live` rejects and no writer used recently, and frees their space.
    ///
    /// `live` is called once for each object, after the recording of uses has begun: let it consult the *current*
    /// references. `each` receives the result for each object.
    ///
    /// # Errors
    /// `Full`, `Io`: nothing that was to stay is lost, some of the rest may remain. The next run continues.
    pub fn gc(
        &self,
        options: GcOptions,
        live: impl FnMut(Digest) -> bool,
        each: impl FnMut(GcItem),
    ) -> Result<GcReport> {
        let _upkeep = lock(&self.shared.upkeep);
        let cutoff = self.state().recent_use.cutoff(Instant::now(), options.grace);
        let mut gc = Gc { store: self, options, cutoff, live, each, report: GcReport::default() };
        gc.run()?;
        Ok(gc.report)
    }
}

impl<L: FnMut(Digest) -> bool, E: FnMut(GcItem)> Gc<'_, L, E> {
    fn run(&mut self) -> Result<()> {
        let packs: Vec<u32> = self.store.state().packs.keys().copied().collect();
        let marks = self.mark(&packs)?;
        let (mut dead, mut shares) = (Vec::new(), Vec::new());
        let damaged = self.store.state().damaged.len();
        for number in packs {
            shares.extend(self.classify(number, &marks, &mut dead)?);
        }
        self.drop_dead(dead, damaged)?;
        let victims = self.choose_packs(&shares);
        if self.options.dry_run {
            for share in &victims {
                self.report.packs_removed += 1;
                self.report.removed_bytes += share.length;
                self.report.copied_bytes += share.kept;
            }
            return Ok(());
        }
        // First those that free room without needing any.
        let (empty, mixed): (Vec<&PackUsage>, Vec<&PackUsage>) =
            victims.into_iter().partition(|share| share.kept_entries == 0);
        let empty = self.still_empty(empty)?;
        self.remove(&empty)?;
        self.copy(&mixed)?;
        self.tidy(!empty.is_empty() || !mixed.is_empty())
    }

    fn mark(&mut self, packs: &[u32]) -> Result<Marks> {
        let mut marks = Marks::default();
        for number in packs {
            for slot in self.store.canonical(*number)?.into_iter().filter(|slot| slot.kind.is_object()) {
                if (self.live)(slot.digest) {
                    marks.live.insert(half_digest(slot.digest));
                } else if self.is_recent(slot.digest) {
                    marks.recent.insert(half_digest(slot.digest));
                } else {
                    continue;
                }
                if slot.kind == Kind::List {
                    match self.store.chunks(slot.digest) {
                        Ok(list) => marks.chunks.extend(list.chunks.iter().map(|(chunk, _)| half_digest(*chunk))),
                        // Its chunks are unknown; without the list they are worthless.
                        Err(StoreError::Damaged { .. } | StoreError::NotFound(_)) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(marks)
    }

    fn is_recent(&self, digest: Digest) -> bool {
        self.store.state().recent_use.is_since(digest, self.cutoff)
    }

    fn fate(&self, marks: &Marks, digest: Digest, is_whole: bool) -> Fate {
        let half = half_digest(digest);
        if marks.live.contains(&half) {
            Fate::Live
        } else if marks.recent.contains(&half) || self.is_recent(digest) {
            Fate::Recent
        } else if is_whole && marks.chunks.contains(&half) {
            Fate::Shared
        } else {
            Fate::Unreferenced
        }
    }

    fn report_object(&mut self, digest: Digest, bytes: u64, fate: Fate) {
        if fate.is_kept() {
            self.report.kept += 1;
            self.report.kept_bytes += bytes;
        } else {
            self.report.dropped += 1;
            self.report.dropped_bytes += bytes;
        }
        (self.each)(GcItem { digest, bytes, fate });
    }

    /// Splits a pack's entries into those that stay and the `dead`. `None` if the pack was removed.
    fn classify(&mut self, number: u32, marks: &Marks, dead: &mut Vec<(Slot, bool)>) -> Result<Option<PackUsage>> {
        let pack = self.store.pack(number)?;
        let is_full = self.store.state().packs.get(&number) == Some(&u64::MAX);
        let mut share = PackUsage { number, length: pack.length()?, is_full, ..PackUsage::default() };
        for slot in self.store.entries(number)? {
            // Under one lock: an entry that becomes durable in between would look like a redundant copy.
            let (counts, durable, is_first) = {
                let mut state = self.store.state();
                (state.counts(&slot), state.is_durable(&slot), state.is_first(&slot)?)
            };
            let bytes = slot.end() - u64::from(slot.offset);
            share.entry_bytes += bytes;
            if !counts {
                continue;
            }
            let fate = match slot.kind {
                Kind::Whole => self.fate(marks, slot.digest, true),
                Kind::Part if marks.chunks.contains(&half_digest(slot.digest)) => Fate::Shared,
                Kind::Part => self.fate(&Marks::default(), slot.digest, false),
                Kind::List => self.fate(marks, slot.digest, false),
            };
            let is_kept = !durable || (is_first && fate.is_kept());
            if is_kept {
                share.kept += bytes;
                share.kept_entries += 1;
                if is_first && slot.kind.is_object() {
                    self.report_object(slot.digest, slot.size, fate);
                }
            } else {
                dead.push((slot, is_first));
            }
        }
        Ok(Some(share))
    }

    /// Invalidates the dead entries, except those that were reused since. `damaged`: the number of entries known to be
    /// damaged when the dead were selected.
    fn drop_dead(&mut self, dead: Vec<(Slot, bool)>, damaged: usize) -> Result<()> {
        let (saved, gone, places) = {
            let mut state = self.store.state();
            let (mut saved, mut gone) = (Vec::new(), Vec::new());
            for (slot, was_first) in dead {
                // A copy becomes the best one if the better one turned out to be damaged.
                let is_used = match was_first {
                    true => state.recent_use.is_since(slot.digest, self.cutoff),
                    false => state.damaged.len() != damaged && state.is_first(&slot)?,
                };
                if is_used { &mut saved } else { &mut gone }.push((slot, was_first));
            }
            if !self.options.dry_run {
                state.dropped.extend(gone.iter().map(|(slot, _)| slot.place()));
            }
            let mut places: Vec<_> = state.dropped.iter().copied().collect();
            places.sort_unstable();
            (saved, gone, places)
        };
        if !self.options.dry_run && !gone.is_empty() {
            let bytes = format::dropped(&places);
            let written = fs::replace(&self.store.shared.layout.dropped, &bytes, 0o600, "store.dropped.write");
            if let Err(error) = written {
                let mut state = self.store.state();
                for (slot, _) in gone {
                    state.dropped.remove(&slot.place());
                }
                return Err(error.into());
            }
        }
        for (dead, fate) in [(saved, Fate::Recent), (gone, Fate::Unreferenced)] {
            for (slot, _) in dead.into_iter().filter(|(slot, is_first)| *is_first && slot.kind.is_object()) {
                self.report_object(slot.digest, slot.size, fate);
            }
        }
        Ok(())
    }

    /// The packs to remove: those with few live entries, and small ones if there are many.
    fn choose_packs<'s>(&self, shares: &'s [PackUsage]) -> Vec<&'s PackUsage> {
        let full_bytes = self.store.state().sizes.pack_bytes;
        let is_small = |share: &&PackUsage| share.is_full && share.length < full_bytes / SMALL_PART;
        let many_small = shares.iter().filter(is_small).count() >= SMALL_PACKS;
        let goes = |share: &&PackUsage| {
            let is_worthless = share.kept_entries == 0 && share.entry_bytes > 0;
            let lives_little = share.kept * 100 < share.entry_bytes * u64::from(self.options.live_percent.min(100));
            is_worthless || lives_little || (many_small && is_small(share))
        };
        let mut left = self.options.copy_most;
        let mut affordable = |share: &&PackUsage| match left.checked_sub(share.kept) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        };
        shares.iter().filter(goes).filter(|share| affordable(share)).collect()
    }

    /// Those of `shares` that still have no valid entry: invalid entries stay so, but some were reused before they were
    /// dropped.
    fn still_empty<'s>(&self, shares: Vec<&'s PackUsage>) -> Result<Vec<&'s PackUsage>> {
        let mut empty = Vec::new();
        for share in shares {
            let slots = self.store.entries(share.number)?;
            let state = self.store.state();
            if !slots.iter().any(|slot| state.counts(slot)) {
                empty.push(share);
            }
        }
        Ok(empty)
    }

    fn remove(&mut self, shares: &[&PackUsage]) -> Result<()> {
        for share in shares {
            {
                let mut state = self.store.state();
                // An entry may have been appended to the open pack meanwhile.
                let open = state.full.iter().chain(&state.head);
                let open = open.into_iter().find(|head| head.pack.number == share.number);
                if open.is_some_and(|head| head.slots.iter().any(|slot| !state.dropped.contains(&slot.place()))) {
                    continue;
                }
                if state.head.as_ref().is_some_and(|head| head.pack.number == share.number) {
                    state.head = None;
                }
                state.full.retain(|head| head.pack.number != share.number);
                state.packs.remove(&share.number);
            }
            lock(&self.store.shared.opened).forget(share.number);
            pack::remove(&self.store.shared.layout.packs, share.number)?;
            self.report.packs_removed += 1;
            self.report.removed_bytes += share.length;
        }
        Ok(())
    }

    /// Copies the valid entries of these packs, syncs, and removes the packs. A pack with an unreadable entry stays.
    fn copy(&mut self, shares: &[&PackUsage]) -> Result<()> {
        let lost = self.store.state().lost;
        let open: Vec<u32> = shares.iter().filter(|share| !share.is_full).map(|share| share.number).collect();
        {
            let mut state = self.store.state();
            if state.head.as_ref().is_some_and(|head| open.contains(&head.pack.number)) {
                state.close_head();
            }
        }
        let mut copied = Vec::new();
        for share in shares {
            if self.copy_one(share)? {
                copied.push(*share);
            }
        }
        self.store.sync(lost)?;
        self.remove(&copied)
    }

    fn copy_one(&mut self, share: &PackUsage) -> Result<bool> {
        if !share.is_full {
            // It is closed; make all of it durable before it is scanned.
            let lost = self.store.state().lost;
            self.store.sync(lost)?;
        }
        let pack = self.store.pack(share.number)?;
        let slots = self.store.canonical(share.number)?;
        for slot in slots {
            let stored = match pack.read_stored(&slot) {
                Ok(stored) => stored,
                Err(StoreError::Damaged { .. }) => return Ok(false),
                Err(error) => return Err(error),
            };
            let mut state = self.store.state();
            let (_, rolled) = state.append(&stored.entry, &stored.bytes)?;
            let lost = state.lost;
            drop(state);
            self.report.copied_bytes += slot.end() - u64::from(slot.offset);
            if rolled {
                self.store.sync_early(lost)?;
            }
        }
        Ok(true)
    }

    /// Drops records of removed packs.
    fn tidy(&mut self, removed: bool) -> Result<()> {
        if !removed {
            return Ok(());
        }
        let has_segments = {
            let mut state = self.store.state();
            let packs = std::mem::take(&mut state.packs);
            state.unindexed.retain(|slot| packs.contains_key(&slot.pack));
            state.damaged.retain(|(pack, _)| packs.contains_key(pack));
            state.dropped.retain(|(pack, _)| packs.contains_key(pack));
            state.packs = packs;
            !state.segments.is_empty()
        };
        if has_segments { self.store.write_index(true) } else { Ok(()) }
    }
}
