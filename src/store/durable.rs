//! Makes appended entries durable and maintains the index files.

use std::collections::BTreeSet;
use std::sync::{Arc, TryLockError};

use super::format::Slot;
use super::pack;
use super::segment::{self, Merge, Segment};
use super::state::UnsealedPack;
use super::{Result, Store, StoreError, lock};

impl Store {
    /// Blocks until every appended entry is durable. `lost` is [`State::lost`] as of the caller's first write: if it
    /// has grown, the caller's entries may be gone.
    ///
    /// [`State::lost`]: super::state::State::lost
    pub(super) fn sync(&self, lost: u64) -> Result<()> {
        let syncing = lock(&self.shared.syncing);
        // Another thread may have done it meanwhile.
        let full = self.sync_held(lost)?;
        drop(syncing);
        self.seal(full);
        self.keep_index()
    }

    /// Syncs full packs while their writers go on, unless another thread does so already.
    pub(super) fn sync_early(&self, lost: u64) -> Result<()> {
        let syncing = match self.shared.syncing.try_lock() {
            Ok(syncing) => syncing,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let full = self.sync_held(lost)?;
        drop(syncing);
        self.seal(full);
        Ok(())
    }

    fn sync_held(&self, lost: u64) -> Result<Vec<UnsealedPack>> {
        let (unsynced, named, newest) = {
            let state = self.state();
            if state.lost != lost {
                return Err(StoreError::Unsynced);
            }
            (state.unsynced(), state.named, state.next - 1)
        };
        let sync = || {
            unsynced.iter().try_for_each(|(pack, _)| pack.sync())?;
            if named < newest { pack::sync_names(&self.shared.layout.packs) } else { Ok(()) }
        };
        let synced = sync();
        let mut state = self.state();
        match synced {
            Ok(()) => {
                state.named = newest;
                Ok(state.set_synced(&unsynced))
            }
            Err(error) => {
                state.lose_unsynced();
                Err(error)
            }
        }
    }

    /// Writes the tables of full packs. The next opening scans a pack without a table: nothing is lost.
    fn seal(&self, full: Vec<UnsealedPack>) {
        for head in full {
            let sealed = head.pack.seal(head.at, &head.slots);
            let mut state = self.state();
            match sealed {
                Ok(()) => state.set_sealed(head.pack.number),
                Err(error) => {
                    tracing::warn!(%error, "the table of a pack could not be written; it is tried again");
                    if state.packs.contains_key(&head.pack.number) {
                        state.full.push(head);
                    }
                }
            }
        }
    }

    /// Moves entries from memory into an index file once there are many. Merges index files of similar size: there are
    /// few of them, and each entry is rewritten only when the store doubles.
    fn keep_index(&self) -> Result<()> {
        let is_little = {
            let state = self.state();
            state.unindexed.len() < state.sizes.unindexed
        };
        if is_little {
            return Ok(());
        }
        // The holder of the lock does the same, or another call follows.
        let _upkeep = match self.shared.upkeep.try_lock() {
            Ok(upkeep) => upkeep,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let is_little = {
            let state = self.state();
            state.settled().count() < state.sizes.unindexed
        };
        if is_little {
            return Ok(());
        }
        match self.write_index(false) {
            Err(error) => {
                // The objects are stored; memory has what the file would hold.
                tracing::warn!(%error, "the index could not be written; it is tried again");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Writes an index file from memory and the smaller index files (or `all` of them). The caller holds `upkeep`.
    pub(super) fn write_index(&self, all: bool) -> Result<()> {
        let (settled, merged, packs) = {
            let state = self.state();
            let settled: Vec<Slot> = state.settled().copied().collect();
            let mut segments = state.segments.clone();
            segments.sort_by_key(|segment| segment.count());
            let mut count = settled.len() as u64;
            let mut merged: Vec<Arc<Segment>> = Vec::new();
            for segment in segments {
                if all || segment.count() <= 2 * count {
                    count += segment.count();
                    merged.push(segment);
                }
            }
            let mut packs: BTreeSet<u32> = merged.iter().flat_map(|segment| segment.packs().iter().copied()).collect();
            packs.extend(settled.iter().map(|slot| slot.pack));
            packs.retain(|number| state.packs.contains_key(number));
            (settled, merged, packs)
        };
        let built = self.build(&settled, &merged, packs.into_iter().collect());
        let built = match built {
            Err(StoreError::Index { path }) => {
                // The packs have the same entries; the next call writes them again.
                let damaged = merged.iter().find(|segment| segment.path() == path);
                return damaged.map_or(Ok(()), |segment| self.state().reindex(segment));
            }
            built => built?,
        };
        {
            let mut state = self.state();
            let merged: Vec<_> = merged.iter().map(|segment| segment.path()).collect();
            state.segments.retain(|segment| !merged.contains(&segment.path()));
            state.segments.push(Arc::new(built));
            for slot in &settled {
                state.unindexed.remove(slot);
            }
        }
        merged.iter().try_for_each(|segment| segment::remove(segment.path()))
    }

    fn build(&self, settled: &[Slot], merged: &[Arc<Segment>], packs: Vec<u32>) -> Result<Segment> {
        let most = settled.len() as u64 + merged.iter().map(|segment| segment.count()).sum::<u64>();
        let number = u64::from_le_bytes(crate::sys::random::bytes());
        let path = self.shared.layout.index.join(format!("{number:016x}.index"));
        type Source<'a> = Box<dyn Iterator<Item = Result<Slot>> + 'a>;
        let mut sources: Vec<Source<'_>> = vec![Box::new(settled.iter().copied().map(Ok))];
        sources.extend(merged.iter().map(|segment| Box::new(segment.iter()) as Source<'_>));
        let mut last = None;
        let slots = Merge::new(sources).filter(|slot| match slot {
            Ok(slot) => last.replace(*slot) != Some(*slot) && self.state().counts(slot),
            Err(_) => true,
        });
        segment::build(&path, &packs, most, slots)
    }
}
