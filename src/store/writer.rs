//! Writing objects: one at a time, or in batches that become durable together.
//!
//! An object of up to [`limits::STORE_UNCHUNKED_BYTES`] is one entry. A larger one is cut at content-defined points
//! (FastCDC), so that shared content is found at any offset; its list of chunks is written last. Equal content is
//! always cut equally, however it is split into writes.

use std::sync::Arc;

use fastcdc::v2020::FastCDC;

use super::compressor::{Compressor, Item, ItemKind};
use super::encode::encode;
use super::format::{Entry, Kind, List, digest_of};
use super::gc_guard::GcGuard;
use super::state::Want;
use super::{Result, Store, StoreError};
use crate::core::ids::Digest;
use crate::core::limits;

const LEAST: usize = limits::STORE_CHUNK_MIN_BYTES;
const MEAN: usize = limits::STORE_CHUNK_MEAN_BYTES;
const MOST: usize = limits::STORE_CHUNK_MAX_BYTES;

/// Buffer of uncut bytes, large enough that little is moved to the front.
const WINDOW: usize = 4 * MOST;

/// Whether the next chunk of an object of `size` bytes may have this length, if `left` of them follow the earlier chunks.
/// Others than a [`Writer`] may cut elsewhere: that costs room only.
pub(crate) fn is_chunk(size: u64, left: u64, length: u32) -> bool {
    let length = u64::from(length);
    if size <= limits::STORE_UNCHUNKED_BYTES as u64 {
        return length == size;
    }
    length <= left.min(MOST as u64) && (length == left || length >= LEAST as u64)
}

/// An object being written. Dropping it leaves no object, only chunks for garbage collection.
#[derive(Debug)]
pub struct Writer {
    guard: Arc<GcGuard>,
    /// Of the batch.
    compressor: Option<Arc<Compressor>>,
    lost: u64,
    /// Bytes not yet cut.
    rest: Vec<u8>,
    list: List,
    /// Over the whole object; updated as chunks are cut.
    hasher: blake3::Hasher,
    written: u64,
    limit: u64,
}

impl Writer {
    pub(super) fn begin(guard: Arc<GcGuard>, compressor: Option<Arc<Compressor>>, limit: u64) -> Writer {
        let lost = guard.store().state().lost;
        let (rest, list, hasher) = (Vec::new(), List::default(), blake3::Hasher::new());
        Writer { guard, compressor, lost, rest, list, hasher, written: 0, limit }
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// `TooLarge` beyond the limit; `Full`, `Io`. The object cannot be finished then.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.written = self.written.saturating_add(bytes.len() as u64);
        if self.written > self.limit {
            return Err(StoreError::TooLarge { limit: self.limit });
        }
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(WINDOW - self.rest.len()));
            self.rest.extend_from_slice(now);
            bytes = later;
            if self.rest.len() == WINDOW {
                self.cut(false).inspect_err(|_| {
                    // The missing bytes cannot be supplied again.
                    self.limit = 0;
                    self.written = u64::MAX;
                })?;
            }
        }
        Ok(())
    }

    /// Makes the object durable and returns its address and length.
    ///
    /// # Errors
    /// `Full`, `Io`, or `TooLarge` if a write failed before; the object does not exist then.
    pub fn finish(self) -> Result<(Digest, u64)> {
        let (guard, lost) = (Arc::clone(&self.guard), self.lost);
        let named = self.end()?;
        guard.store().sync(lost)?;
        Ok(named)
    }

    /// Writes the rest, not yet durable.
    fn end(mut self) -> Result<(Digest, u64)> {
        if self.written > self.limit {
            return Err(StoreError::TooLarge { limit: self.limit });
        }
        if self.list.chunks.is_empty() && self.rest.len() <= limits::STORE_UNCHUNKED_BYTES {
            return self.end_whole();
        }
        self.cut(true)?;
        self.list.size = self.written;
        let digest = Digest::from_bytes(*self.hasher.finalize().as_bytes());
        match self.compressor.clone() {
            None => self.store().add(Kind::List, digest, self.written, &self.list.write())?,
            Some(_) if self.store().keep(digest, Want::Object)? => {}
            Some(compressor) => compressor.add_list(digest, std::mem::take(&mut self.list))?,
        }
        Ok((digest, self.written))
    }

    fn end_whole(mut self) -> Result<(Digest, u64)> {
        let (digest, size) = (digest_of(&self.rest), self.written);
        let store = self.store();
        if store.keep(digest, Want::Object)? && store.keep(digest, Want::Data)? {
            return Ok((digest, size));
        }
        let plain = std::mem::take(&mut self.rest);
        self.write_item(Item { digest, plain, kind: ItemKind::Whole })?;
        Ok((digest, size))
    }

    /// Writes now, or queues the item in the batch.
    fn write_item(&self, item: Item) -> Result<()> {
        match &self.compressor {
            Some(compressor) => compressor.add(item),
            None => self.store().write(&item),
        }
    }

    fn store(&self) -> &Store {
        self.guard.store()
    }

    /// Writes the final chunks: all of them at the `end`, before it those that further bytes cannot change.
    fn cut(&mut self, end: bool) -> Result<()> {
        let cutter = FastCDC::new(&self.rest, LEAST, MEAN, MOST);
        let mut at = 0;
        while self.rest.len() - at >= if end { 1 } else { MOST } {
            let (_, to) = cutter.cut(at, self.rest.len() - at);
            let chunk = &self.rest[at..to];
            let digest = digest_of(chunk);
            self.hasher.update(chunk);
            if !self.store().keep(digest, Want::Data)? {
                self.write_item(Item { digest, plain: chunk.to_vec(), kind: ItemKind::Part })?;
            }
            self.list.chunks.push((digest, chunk.len() as u32));
            at = to;
        }
        self.rest.drain(..at);
        Ok(())
    }
}

/// Objects that become durable together. Several threads may add to it. Dropping it may leave unreferenced objects for
/// garbage collection.
#[derive(Debug)]
pub struct Batch {
    guard: Arc<GcGuard>,
    compressor: Arc<Compressor>,
    lost: u64,
}

impl Batch {
    pub(super) fn begin(store: &Store) -> Batch {
        let guard = Arc::new(GcGuard::begin(store));
        let (compressor, lost) = (Arc::new(Compressor::new(store)), store.state().lost);
        Batch { guard, compressor, lost }
    }

    /// Adds an object. It is readable only after [`Self::commit`].
    ///
    /// # Errors
    /// `TooLarge`, `Full`, `Io`.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest> {
        let mut writer = self.writer(limits::BLOB_BYTES);
        writer.write(bytes)?;
        self.add(writer).map(|(digest, _)| digest)
    }

    /// Begins an object of this batch that is written in pieces; [`Self::add`] ends it.
    pub fn writer(&self, limit: u64) -> Writer {
        Writer::begin(Arc::clone(&self.guard), Some(Arc::clone(&self.compressor)), limit.min(limits::BLOB_BYTES))
    }

    /// Adds an object that was written in pieces.
    ///
    /// # Errors
    /// As [`Writer::finish`].
    pub fn add(&self, writer: Writer) -> Result<(Digest, u64)> {
        if writer.lost != self.lost {
            return Err(StoreError::Unsynced);
        }
        writer.end()
    }

    /// Makes all of them durable.
    ///
    /// # Errors
    /// `Full`, `Io`; some may exist then, whole and unreferenced.
    pub fn commit(self) -> Result<()> {
        self.sync()
    }

    pub(super) fn store(&self) -> &Store {
        self.guard.store()
    }

    /// Makes those durable that were added so far; more may follow. All are protected from garbage collection until it
    /// is dropped.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn sync(&self) -> Result<()> {
        self.compressor.drain()?;
        self.guard.store().sync(self.lost)
    }

    /// Reads an object of the store or of this batch.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>> {
        let store = self.guard.store();
        match store.get(digest, limit) {
            Err(StoreError::NotFound(_)) => {}
            found => return found,
        }
        self.compressor.drain()?;
        if let Some(bytes) = store.get_written(digest, limit)? {
            return Ok(bytes);
        }
        // Several chunks: readable once durable.
        self.sync()?;
        store.get(digest, limit)
    }
}

fn wanted(kind: Kind) -> Want {
    if kind.is_data() { Want::Data } else { Want::Object }
}

impl Store {
    /// Records a use of an entry; returns whether an entry exists that is not known to be damaged.
    pub(super) fn keep(&self, digest: Digest, want: Want) -> Result<bool> {
        let mut state = self.state();
        state.recent_use.touch(digest);
        state.has(digest, want)
    }

    /// Writes a chunk, or an object of one chunk.
    pub(super) fn write(&self, Item { digest, plain, kind }: &Item) -> Result<()> {
        let (digest, size) = (*digest, plain.len() as u64);
        if *kind == ItemKind::Part {
            return self.add(Kind::Part, digest, size, plain);
        }
        self.add(Kind::Whole, digest, size, plain)?;
        self.name_whole(digest, size)
    }

    /// Makes an object of bytes that exist as one entry.
    pub(super) fn name_whole(&self, digest: Digest, size: u64) -> Result<()> {
        if self.keep(digest, Want::Object)? {
            return Ok(());
        }
        // The bytes exist as a chunk of another object: this one is a list of that chunk.
        let list = List { size, chunks: vec![(digest, size as u32)] };
        self.add(Kind::List, digest, size, &list.write())
    }

    /// Writes an entry unless it exists.
    pub(super) fn add(&self, kind: Kind, digest: Digest, size: u64, plain: &[u8]) -> Result<()> {
        if self.keep(digest, wanted(kind))? {
            return Ok(());
        }
        let (entry, packed) = encode(kind, digest, size, plain);
        self.append(&entry, packed.as_deref().unwrap_or(plain))
    }

    /// Writes an encoded entry unless it exists.
    pub(super) fn append(&self, entry: &Entry, stored: &[u8]) -> Result<()> {
        let mut state = self.state();
        // Another writer of the same may have been faster.
        if state.has(entry.digest, wanted(entry.kind))? {
            return Ok(());
        }
        let (_, rolled) = state.append(entry, stored)?;
        let lost = state.lost;
        drop(state);
        if rolled { self.sync_early(lost) } else { Ok(()) }
    }
}
