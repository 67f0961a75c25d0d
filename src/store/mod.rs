//! The content-addressed store: blobs, large output, parts of checkpoints. Equal content is stored once.
//!
//! ```text
//! bytes ─▶ cut (writer) ─▶ hash ─▶ known? ─▶ compress (encode) ─▶ append to a pack ─▶ sync ─▶ return the address
//!                                    │ yes                        (state, pack)     (durable)
//!                                    └─▶ record the use, so that garbage collection keeps the object (gc_guard)
//! ```
//!
//! An object's address is the BLAKE3 hash of its content, however it is stored. Objects never change; only garbage
//! collection removes them. Every read is verified: each chunk against its own address before any of its bytes is
//! returned, a whole object against its address before the last byte is returned. Everything here blocks: the daemon
//! uses [`StoreHandle`]. `docs/snapshot-format.md` describes the files.
//!
//! Lock order: `upkeep`, `syncing`, `state`; `opened` is taken last and alone.

mod compressor;
mod durable;
mod encode;
mod error;
mod format;
mod gc;
mod gc_guard;
mod handle;
mod image;
mod layout;
mod pack;
mod packed;
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
pub use format::{Encoding, List};
pub use gc::{Fate, GcItem, GcOptions, GcReport};
pub use gc_guard::GcGuard;
pub use handle::StoreHandle;
pub use image::{Image, Piece};
pub use packed::{Arriving, Packed};
pub use reader::Reader;
pub use verify::{Progress, Verified};
pub(crate) use writer::is_chunk;
pub use writer::{Batch, Writer};

use format::Slot;
use layout::Layout;
use pack::{Opened, Pack};
use state::{Sizes, State, Want};

/// Result of a store operation.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// An open store. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    layout: Layout,
    /// Held while index files are written and while garbage is collected.
    upkeep: Mutex<()>,
    /// Held while a thread waits for the device.
    syncing: Mutex<()>,
    state: Mutex<State>,
    opened: Mutex<Opened>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic can interrupt only changes in memory, which the next opening repeats; nothing on disk depends on them.
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

    /// Stores bytes from memory.
    ///
    /// # Errors
    /// `TooLarge`, `Full`, `Io`; the object does not exist then.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest> {
        let mut writer = self.writer(limits::BLOB_BYTES)?;
        writer.write(bytes)?;
        writer.finish().map(|(digest, _)| digest)
    }

    /// Begins an object that is written in pieces, at most `limit` bytes and [`limits::BLOB_BYTES`].
    ///
    /// # Errors
    /// None at present; a later version may need room at once.
    pub fn writer(&self, limit: u64) -> Result<Writer> {
        Ok(Writer::begin(Arc::new(GcGuard::begin(self)), None, limit.min(limits::BLOB_BYTES)))
    }

    /// Begins several objects that become durable with one wait for the device.
    pub fn batch(&self) -> Batch {
        Batch::begin(self)
    }

    /// Protects everything that is written or reused from now on from garbage collection, until the guard is dropped.
    pub fn guard(&self) -> GcGuard {
        GcGuard::begin(self)
    }

    /// As [`Self::guard`], and also protects everything used within `grace` or since the oldest active writer began.
    ///
    /// For a caller that lists references and later collects garbage by that list.
    pub fn guard_before_all(&self, grace: std::time::Duration) -> GcGuard {
        GcGuard::before_all(self, grace)
    }

    /// Whether the object exists. Does not read its content.
    pub fn contains(&self, digest: Digest) -> bool {
        self.slots(digest, Want::Object).is_ok_and(|slots| !slots.is_empty())
    }

    /// A counter of writes and reuses.
    pub fn use_count(&self) -> u64 {
        self.state().recent_use.count()
    }

    /// Whether the object exists; if so, records a reuse, for a caller that is about to reference it without storing it
    /// again.
    pub fn claim(&self, digest: Digest) -> bool {
        self.state().recent_use.touch(digest);
        self.contains(digest)
    }

    /// Length of an object, bytes.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn size(&self, digest: Digest) -> Result<u64> {
        self.slots(digest, Want::Object)?.first().map(|slot| slot.size).ok_or(StoreError::NotFound(digest))
    }

    /// Every object's address and length, unordered.
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

    /// The entries that hold an object, each with its place and its bytes on the disk: of a large
    /// object the list and its chunks.
    ///
    /// # Errors
    /// `NotFound`, `Incomplete`, `Io`.
    pub fn stored_parts(&self, digest: Digest) -> Result<Vec<((u32, u32), u64)>> {
        let part = |slot: &Slot| (slot.place(), slot.end() - u64::from(slot.offset));
        let slot = self.slots(digest, Want::Object)?.first().copied().ok_or(StoreError::NotFound(digest))?;
        let mut parts = vec![part(&slot)];
        if !slot.kind.is_data() {
            for (chunk, _) in self.chunks(digest)?.chunks {
                let found = self.slots(chunk, Want::Data)?.first().map(part);
                parts.push(found.ok_or(StoreError::Incomplete { digest, part: chunk })?);
            }
        }
        Ok(parts)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }

    /// The durable entries of a digest, the best one first.
    fn slots(&self, digest: Digest, want: Want) -> Result<Vec<Slot>> {
        self.state().find_durable(digest, want)
    }

    /// The valid entries of a pack that readers use; empty if the pack was removed.
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

    /// Every entry of a pack, valid or dropped.
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

    /// Reads with the best readable entry, and remembers the damaged ones.
    fn read_best<T>(&self, slots: &[Slot], read: impl Fn(&Pack, &Slot) -> Result<T>) -> Result<Option<T>> {
        let mut damaged = None;
        for slot in slots {
            match self.pack(slot.pack).and_then(|pack| read(&pack, slot)) {
                Ok(found) => return Ok(Some(found)),
                Err(error @ StoreError::Damaged { .. }) => {
                    self.state().damaged.insert(slot.place());
                    damaged = damaged.or(Some(error));
                }
                // Collected meanwhile: its entries were moved.
                Err(_) if !self.state().packs.contains_key(&slot.pack) => {}
                Err(error) => return Err(error),
            }
        }
        damaged.map_or(Ok(None), Err)
    }

    /// Reads an entry of a digest, also if garbage collection moves it.
    fn read_entry<T>(&self, digest: Digest, want: Want, read: impl Fn(&Pack, &Slot) -> Result<T>) -> Result<T> {
        // Garbage collection may move it between lookup and read, but not twice.
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
