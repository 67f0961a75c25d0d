//! The content-addressed store: blobs, large output and what checkpoints hold, each content once, whoever needs it.
//!
//! ```text
//! bytes ─▶ cut (writer) ─▶ hash ─▶ there already? ─▶ compress (encode) ─▶ append to a pack ─▶ sync ─▶ the address is told
//!                                        │ yes                            (state, pack)     (durable)
//!                                        └─▶ touched, so that garbage collection (gc) leaves it
//! ```
//!
//! An object's address is the BLAKE3 hash of its content, however it is stored. Nothing is changed once it is written; only
//! garbage collection removes. Whatever is read is checked: each chunk against its own address before a byte of it is given, a
//! whole object against its address before its last byte is. Everything here blocks: the daemon calls it by way of
//! [`StoreHandle`]. The files are described in `docs/snapshot-format.md`.
//!
//! Locks are taken in the order `upkeep`, `syncing`, `state`; `opened` is taken last and alone.

mod compressor;
mod durable;
mod encode;
mod error;
mod format;
mod gc;
mod gc_guard;
mod handle;
mod layout;
mod pack;
mod parallel;
mod reader;
mod recover;
mod segment;
mod state;
mod verify;
mod writer;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::core::ids::Digest;
use crate::core::limits;

pub use error::StoreError;
pub use gc::{Fate, GcItem, GcOptions, GcReport};
pub use gc_guard::GcGuard;
pub use handle::StoreHandle;
pub use reader::Reader;
pub use verify::{Progress, Verified};
pub use writer::{Batch, Writer};

use format::Slot;
use layout::Layout;
use pack::{Opened, Pack};
use state::{Sizes, State, Want};

/// Result of whatever concerns the store.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// An open store. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    layout: Layout,
    /// Held by who writes index files or collects garbage.
    upkeep: Mutex<()>,
    /// Held by who waits for the device.
    syncing: Mutex<()>,
    state: Mutex<State>,
    opened: Mutex<Opened>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic may have cut short here is a step of memory that the next opening repeats; nothing on disk depends on it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// Opens the store in a directory, or creates one. Removes what dead writers left.
    ///
    /// # Errors
    /// [`StoreError::UnknownFormat`] for a store of another format; `InUse` if it is open already; `Full`, `Io`.
    pub fn open(dir: &std::path::Path) -> Result<Store> {
        Store::open_sized(dir, Sizes::default())
    }

    fn open_sized(dir: &std::path::Path, sizes: Sizes) -> Result<Store> {
        let layout = Layout::open(dir)?;
        let state = Mutex::new(recover::recover(&layout, sizes)?);
        let (upkeep, syncing, opened) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Store { shared: Arc::new(Shared { layout, upkeep, syncing, state, opened }) })
    }

    /// Stores bytes that are in memory.
    ///
    /// # Errors
    /// `TooLarge`, `Full`, `Io`; no object is there then.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest> {
        let mut writer = self.writer(limits::BLOB_BYTES)?;
        writer.write(bytes)?;
        writer.finish().map(|(digest, _)| digest)
    }

    /// Begins an object whose bytes come piece by piece, at most `limit` of them (and never more than
    /// [`limits::BLOB_BYTES`]).
    ///
    /// # Errors
    /// None at present; a later one may need room at once.
    pub fn writer(&self, limit: u64) -> Result<Writer> {
        Ok(Writer::begin(Arc::new(GcGuard::begin(self)), None, limit.min(limits::BLOB_BYTES)))
    }

    /// Begins several objects that become durable together: one wait for the device, however many they are.
    pub fn batch(&self) -> Batch {
        Batch::begin(self)
    }

    /// Keeps whatever is written or used again from now on, until it is dropped.
    pub fn guard(&self) -> GcGuard {
        GcGuard::begin(self)
    }

    /// As [`Self::guard`], and keeps besides what was written or used again within `grace`, or since the oldest writer began that is
    /// at work now: for whoever lists what is named, and collects garbage by that list later.
    pub fn guard_before_all(&self, grace: std::time::Duration) -> GcGuard {
        GcGuard::before_all(self, grace)
    }

    /// Whether there is an object of that address. Says nothing of its content.
    pub fn contains(&self, digest: Digest) -> bool {
        self.slots(digest, Want::Object).is_ok_and(|slots| !slots.is_empty())
    }

    /// A number that grows whenever something is stored or used again.
    pub fn use_count(&self) -> u64 {
        self.state().recent_use.count()
    }

    /// Whether there is an object of that address; if so, it counts as used again now: for whoever is about to name it without
    /// storing it again.
    pub fn claim(&self, digest: Digest) -> bool {
        self.state().recent_use.touch(digest);
        self.contains(digest)
    }

    /// Length of an object in bytes.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn size(&self, digest: Digest) -> Result<u64> {
        self.slots(digest, Want::Object)?.first().map(|slot| slot.size).ok_or(StoreError::NotFound(digest))
    }

    /// Every object's address and length, in no order.
    ///
    /// # Errors
    /// A pack or directory that cannot be read.
    pub fn objects(&self) -> impl Iterator<Item = Result<(Digest, u64)>> + '_ {
        let packs: Vec<u32> = self.state().packs.keys().copied().collect();
        let slots = packs.into_iter().flat_map(move |number| match self.canonical(number) {
            Ok(slots) => slots.into_iter().map(Ok).collect::<Vec<_>>(),
            Err(error) => vec![Err(error)],
        });
        let is_object = |slot: &Result<Slot>| slot.as_ref().map_or(true, |slot| slot.kind.is_object());
        slots.filter(is_object).map(|slot| slot.map(|slot| (slot.digest, slot.size)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }

    /// Where a digest's durable entries are, the best one first.
    fn slots(&self, digest: Digest, want: Want) -> Result<Vec<Slot>> {
        self.state().find_durable(digest, want)
    }

    /// The entries of a pack that count and are the first that anybody would read. None if the pack is gone.
    fn canonical(&self, number: u32) -> Result<Vec<Slot>> {
        let slots = match self.entries(number) {
            Ok(slots) => slots,
            Err(_) if !self.state().packs.contains_key(&number) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut state = self.state();
        let mut first = Vec::with_capacity(slots.len());
        for slot in slots {
            if state.is_first(&slot)? {
                first.push(slot);
            }
        }
        Ok(first)
    }

    /// Every entry of a pack, whether it counts or not.
    fn entries(&self, number: u32) -> Result<Vec<Slot>> {
        let open = |state: &State| {
            let heads = state.full.iter().chain(&state.head);
            heads.into_iter().find(|head| head.pack.number == number).map(|head| head.slots.clone())
        };
        let unfinished = open(&self.state());
        match unfinished {
            Some(slots) => Ok(slots),
            None => self.pack(number)?.slots(),
        }
    }

    fn pack(&self, number: u32) -> Result<Arc<Pack>> {
        lock(&self.shared.opened).get(&self.shared.layout.packs, number)
    }

    /// Reads with the best of several entries that can be read, and remembers the damaged ones.
    fn read_best<T>(&self, slots: &[Slot], read: impl Fn(&Pack, &Slot) -> Result<T>) -> Result<Option<T>> {
        let mut damaged = None;
        for slot in slots {
            match self.pack(slot.pack).and_then(|pack| read(&pack, slot)) {
                Ok(found) => return Ok(Some(found)),
                Err(error @ StoreError::Damaged { .. }) => {
                    self.state().damaged.insert(slot.place());
                    damaged = damaged.or(Some(error));
                }
                // Collected since: its entries are elsewhere now.
                Err(_) if !self.state().packs.contains_key(&slot.pack) => {}
                Err(error) => return Err(error),
            }
        }
        damaged.map_or(Ok(None), Err)
    }

    /// Reads an entry of a digest, wherever it is now.
    fn read_entry<T>(&self, digest: Digest, want: Want, read: impl Fn(&Pack, &Slot) -> Result<T>) -> Result<T> {
        // Garbage collection may move it between the look and the reading, but not twice.
        for _ in 0..3 {
            let slots = self.slots(digest, want)?;
            if slots.is_empty() {
                break;
            }
            if let Some(found) = self.read_best(&slots, &read)? {
                return Ok(found);
            }
        }
        Err(StoreError::NotFound(digest))
    }
}

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod gc_tests;
#[cfg(test)]
mod store_tests;
