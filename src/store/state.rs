//! The state of an open store: its packs, the slots of all entries, the pack being written. One lock of [`Store`]
//! guards it; it is held for memory and single reads and writes, never while waiting for the device.
//!
//! [`Store`]: super::Store

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::error::StoreError;
use super::format::{ENTRY_HEADER, Entry, Kind, PACK_HEADER, Slot};
use super::gc_guard::RecentUse;
use super::pack::Pack;
use super::segment::Segment;
use super::{Result, limits};
use crate::core::ids::Digest;

/// Marks a pack as durable to its end.
const ALL: u64 = u64::MAX;

/// Thresholds for full packs and index files. Tests have smaller ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub pack_bytes: u64,
    pub pack_entries: usize,
    pub unindexed: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Sizes {
            pack_bytes: limits::STORE_PACK_BYTES,
            pack_entries: limits::STORE_PACK_ENTRIES,
            unindexed: limits::STORE_UNINDEXED_ENTRIES,
        }
    }
}

#[derive(Debug)]
pub(super) struct State {
    /// Directory of the packs.
    pub dir: PathBuf,
    pub sizes: Sizes,
    /// Every valid pack, and up to which byte it is durable.
    pub packs: BTreeMap<u32, u64>,
    /// The pack being written.
    pub head: Option<UnsealedPack>,
    /// Full packs without a table.
    pub full: Vec<UnsealedPack>,
    /// Entries in no index file.
    pub unindexed: BTreeSet<Slot>,
    pub segments: Vec<Arc<Segment>>,
    /// Invalid entries of packs that still exist.
    pub dropped: HashSet<(u32, u32)>,
    /// Entries found damaged.
    pub damaged: HashSet<(u32, u32)>,
    pub recent_use: RecentUse,
    /// How often written entries were lost because a sync failed.
    pub lost: u64,
    /// Number of the newest pack whose name is durable.
    pub named: u32,
    /// Number of the next pack; no file refers to it.
    pub next: u32,
}

/// A pack without a table.
#[derive(Debug)]
pub(super) struct UnsealedPack {
    pub pack: Arc<Pack>,
    /// Position of the next entry.
    pub at: u64,
    pub slots: Vec<Slot>,
}

/// Which entries of a digest to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// Those with its bytes.
    Data,
    /// Those that make it an object.
    Object,
}

impl Want {
    fn takes(self, kind: Kind) -> bool {
        match self {
            Want::Data => kind.is_data(),
            Want::Object => kind.is_object(),
        }
    }
}

impl State {
    pub(super) fn new(dir: PathBuf, sizes: Sizes) -> State {
        State {
            dir,
            sizes,
            packs: BTreeMap::new(),
            head: None,
            full: Vec::new(),
            unindexed: BTreeSet::new(),
            segments: Vec::new(),
            dropped: HashSet::new(),
            damaged: HashSet::new(),
            recent_use: RecentUse::default(),
            lost: 0,
            named: 0,
            next: 1,
        }
    }

    /// Every entry of a digest: undamaged ones first, then the newest.
    pub(super) fn find(&mut self, digest: Digest, want: Want) -> Result<Vec<Slot>> {
        let least = Slot { digest, pack: 0, offset: 0, kind: Kind::Whole, stored: 0, size: 0 };
        let mut found: Vec<Slot> =
            self.unindexed.range(least..).take_while(|slot| slot.digest == digest).copied().collect();
        for segment in self.segments.clone() {
            match segment.find(digest, &mut found) {
                Err(StoreError::Index { .. }) => {
                    self.reindex(&segment)?;
                    return self.find(digest, want);
                }
                done => done?,
            }
        }
        found.retain(|slot| want.takes(slot.kind) && self.counts(slot));
        found.sort_by_key(|slot| (self.damaged.contains(&slot.place()), std::cmp::Reverse(slot.place())));
        found.dedup();
        Ok(found)
    }

    /// As [`State::find`], durable entries only.
    pub(super) fn find_durable(&mut self, digest: Digest, want: Want) -> Result<Vec<Slot>> {
        let mut found = self.find(digest, want)?;
        found.retain(|slot| self.is_durable(slot));
        Ok(found)
    }

    /// Whether readers of the digest use this entry.
    pub(super) fn is_first(&mut self, slot: &Slot) -> Result<bool> {
        let want = if slot.kind.is_object() { Want::Object } else { Want::Data };
        Ok(self.find_durable(slot.digest, want)?.first() == Some(slot))
    }

    /// Whether the pack exists and the entry was not dropped.
    pub(super) fn counts(&self, slot: &Slot) -> bool {
        self.packs.contains_key(&slot.pack) && !self.dropped.contains(&slot.place())
    }

    pub(super) fn is_durable(&self, slot: &Slot) -> bool {
        self.packs.get(&slot.pack).is_some_and(|durable| slot.end() <= *durable)
    }

    /// Whether a writer can skip this: there is an entry not known to be damaged.
    pub(super) fn has(&mut self, digest: Digest, want: Want) -> Result<bool> {
        let found = self.find(digest, want)?;
        Ok(found.first().is_some_and(|slot| !self.damaged.contains(&slot.place())))
    }

    /// Drops a damaged index file and loads its entries from the packs.
    pub(super) fn reindex(&mut self, segment: &Arc<Segment>) -> Result<()> {
        tracing::warn!(path = %segment.path().display(), "an index file is damaged; it is made again");
        for number in segment.packs().iter().filter(|number| self.packs.contains_key(number)) {
            self.unindexed.extend(Pack::open(&self.dir, *number)?.slots()?);
        }
        self.segments.retain(|other| other.path() != segment.path());
        Ok(())
    }

    /// Appends an entry. Returns its slot, and whether a pack became full.
    pub(super) fn append(&mut self, entry: &Entry, stored: &[u8]) -> Result<(Slot, bool)> {
        let length = (ENTRY_HEADER + stored.len()) as u64;
        let fits = |head: &UnsealedPack| {
            head.slots.is_empty()
                || (head.at + length <= self.sizes.pack_bytes && head.slots.len() < self.sizes.pack_entries)
        };
        let rolled = self.head.as_ref().is_some_and(|head| !fits(head));
        if rolled {
            self.close_head();
        }
        if self.head.is_none() {
            let pack = Arc::new(Pack::create(&self.dir, self.next)?);
            self.next += 1;
            self.packs.insert(pack.number, 0);
            self.head = Some(UnsealedPack { pack, at: PACK_HEADER as u64, slots: Vec::new() });
        }
        let head = self.head.as_mut().expect("it was just made");
        let slot = entry.slot(head.pack.number, head.at as u32);
        // A failed write leaves bytes after `at`; they are overwritten, or truncated at the end.
        head.at = head.pack.append(head.at, entry, stored)?;
        head.slots.push(slot);
        self.unindexed.insert(slot);
        Ok((slot, rolled))
    }

    /// Closes the pack being written.
    pub(super) fn close_head(&mut self) {
        self.full.extend(self.head.take());
    }

    /// The packs to sync, and up to where.
    pub(super) fn unsynced(&self) -> Vec<(Arc<Pack>, u64)> {
        let open = self.full.iter().chain(&self.head);
        let is_open =
            |head: &&UnsealedPack| self.packs.get(&head.pack.number).is_some_and(|durable| *durable < head.at);
        open.filter(is_open).map(|head| (Arc::clone(&head.pack), head.at)).collect()
    }

    /// Records a sync. Returns the packs that are ready for their table.
    pub(super) fn set_synced(&mut self, synced: &[(Arc<Pack>, u64)]) -> Vec<UnsealedPack> {
        for (pack, at) in synced {
            // A pack that was removed meanwhile stays removed.
            if let Some(durable) = self.packs.get_mut(&pack.number) {
                *durable = *at;
            }
        }
        let packs = &self.packs;
        let durable = |head: &mut UnsealedPack| packs.get(&head.pack.number).is_some_and(|durable| *durable >= head.at);
        self.full.extract_if(.., durable).collect()
    }

    /// Records that a pack has its table.
    pub(super) fn set_sealed(&mut self, number: u32) {
        if let Some(durable) = self.packs.get_mut(&number) {
            *durable = ALL;
        }
    }

    /// Adds a full pack with a table.
    pub(super) fn add_sealed(&mut self, number: u32) {
        self.packs.insert(number, ALL);
    }

    /// Forgets all entries that are not durable after a failed sync, so that they are written again. Their writers see
    /// that `lost` has grown.
    pub(super) fn lose_unsynced(&mut self) {
        self.lost += 1;
        for head in self.full.iter_mut().chain(&mut self.head) {
            let durable = self.packs.get(&head.pack.number).copied().unwrap_or(0);
            for slot in head.slots.extract_if(.., |slot| slot.end() > durable) {
                self.unindexed.remove(&slot);
            }
            head.at = head.slots.iter().map(Slot::end).max().unwrap_or(PACK_HEADER as u64);
        }
    }

    /// Entries in memory that belong to packs with a table: an index file may hold them.
    pub(super) fn settled(&self) -> impl Iterator<Item = &Slot> {
        self.unindexed.iter().filter(|slot| self.packs.get(&slot.pack) == Some(&ALL))
    }
}
