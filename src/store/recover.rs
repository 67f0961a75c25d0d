//! Opening a store: builds [`State`] from the files. Scans unfinished packs, truncates the tail of a dead writer, keeps
//! every whole entry. Index files only save reading tables.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Result;
use super::error::StoreError;
use super::format::{self, Kind};
use super::layout::Layout;
use super::pack::{self, Pack};
use super::segment::{self, Segment};
use super::state::{Sizes, State, UnsealedPack, Want};

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let listed = dir.read_dir().and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>());
    listed.map_err(|e| StoreError::io("list", dir, e))
}

/// Reads the state of a store.
pub(super) fn recover(layout: &Layout, sizes: Sizes) -> Result<State> {
    let mut state = State::new(layout.packs.clone(), sizes);
    let numbers: BTreeSet<u32> = files(&layout.packs)?.iter().filter_map(|path| pack::number(path)).collect();
    state.segments = segments(&layout.index)?;
    let dropped = read_dropped(&layout.dropped)?;
    let covered: BTreeSet<u32> = state.segments.iter().flat_map(|segment| segment.packs().iter().copied()).collect();
    let spoken_of = numbers.iter().chain(&covered).copied().chain(dropped.iter().map(|(pack, _)| *pack));
    state.next = spoken_of.max().unwrap_or(0).checked_add(1).ok_or_else(|| exhausted(layout))?;
    state.dropped = dropped.into_iter().filter(|(pack, _)| numbers.contains(pack)).collect();
    numbers.intersection(&covered).for_each(|number| state.add_sealed(*number));
    let mut unfinished = Vec::new();
    for number in numbers.difference(&covered) {
        let pack = Pack::open(&layout.packs, *number)?;
        match pack.table()? {
            Some(slots) => {
                state.add_sealed(*number);
                state.unindexed.extend(slots);
            }
            None => unfinished.extend(read_through(&mut state, pack)?),
        }
    }
    drop_torn_lists(&mut state)?;
    finish(&mut state, unfinished)?;
    Ok(state)
}

fn exhausted(layout: &Layout) -> StoreError {
    StoreError::io("number a pack in", &layout.packs, io::ErrorKind::QuotaExceeded.into())
}

/// The index files, without those whose packs another one covers too: leftovers of an interrupted merge.
fn segments(dir: &Path) -> Result<Vec<Arc<Segment>>> {
    let mut found: Vec<Arc<Segment>> = Vec::new();
    for path in files(dir)?.into_iter().filter(|path| path.extension().is_some_and(|e| e == "index")) {
        match Segment::open(&path) {
            Ok(segment) => found.push(Arc::new(segment)),
            Err(StoreError::Index { .. }) => {
                tracing::warn!(path = %path.display(), "an index file is damaged; it is made again");
                segment::remove(&path)?;
            }
            Err(error) => return Err(error),
        }
    }
    found.sort_by_key(|segment| std::cmp::Reverse(segment.packs().len()));
    let mut kept: Vec<Arc<Segment>> = Vec::new();
    for segment in found {
        let packs: BTreeSet<_> = segment.packs().iter().collect();
        if kept.iter().any(|other| packs.is_subset(&other.packs().iter().collect())) {
            segment::remove(segment.path())?;
        } else {
            kept.push(segment);
        }
    }
    Ok(kept)
}

fn read_dropped(path: &Path) -> Result<Vec<(u32, u32)>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(format::read_dropped(&bytes).unwrap_or_else(|| {
            // Unreferenced entries may return: they are collected again.
            tracing::warn!(path = %path.display(), "the list of dropped entries is damaged and passed over");
            Vec::new()
        })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(StoreError::io("read", path, error)),
    }
}

/// Reads a pack without a table. Removes it if it has no entries.
fn read_through(state: &mut State, pack: Pack) -> Result<Option<UnsealedPack>> {
    let scan = pack.scan()?;
    if scan.slots.is_empty() {
        pack::remove(&state.dir, pack.number)?;
        return Ok(None);
    }
    pack.trim(scan.end)?;
    // Later writers reuse these entries without writing them: so they must be durable.
    pack.sync()?;
    state.packs.insert(pack.number, scan.end);
    state.unindexed.extend(&scan.slots);
    state.damaged.extend(scan.damaged.iter().map(|slot| slot.place()));
    Ok(Some(UnsealedPack { pack: Arc::new(pack), at: scan.end, slots: scan.slots }))
}

/// Drops lists without their chunks: after a loss of power one may exist that was never acknowledged.
fn drop_torn_lists(state: &mut State) -> Result<()> {
    let unfinished = |state: &State, pack| state.packs.get(&pack).is_some_and(|durable| *durable != u64::MAX);
    let is_list = |slot: &&format::Slot| slot.kind == Kind::List && unfinished(state, slot.pack);
    let lists: Vec<_> = state.unindexed.iter().filter(is_list).copied().collect();
    for slot in lists {
        let Ok(list) = Pack::open(&state.dir, slot.pack)?.read_list(&slot) else { continue };
        for (chunk, _) in list.chunks {
            if state.find(chunk, Want::Data)?.is_empty() {
                state.dropped.insert(slot.place());
                break;
            }
        }
    }
    Ok(())
}

/// The newest unfinished pack stays open for writing; the others are full.
fn finish(state: &mut State, mut unfinished: Vec<UnsealedPack>) -> Result<()> {
    if !unfinished.is_empty() {
        pack::sync_names(&state.dir)?;
    }
    state.named = state.next - 1;
    if unfinished.last().is_some_and(|head| head.pack.is_headed() && head.at < state.sizes.pack_bytes) {
        state.head = unfinished.pop();
    }
    state.full = unfinished;
    Ok(())
}
