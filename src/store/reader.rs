//! Reading objects. A chunk is verified against its own address before any of its bytes is returned, a whole object
//! against its address before the last byte is returned.

use std::io::{self, Read};
use std::sync::Arc;

use super::format::{List, Slot};
use super::pack::Pack;
use super::state::Want;
use super::{Result, Store, StoreError, limits};
use crate::core::ids::Digest;

impl Store {
    /// Opens an object for reading to its end.
    ///
    /// # Errors
    /// `NotFound`, `Damaged` or `Incomplete` if its list of chunks is, `Io`.
    pub fn open_object(&self, digest: Digest) -> Result<Reader> {
        let List { size, chunks } = self.chunks(digest)?;
        let pinned = self.pin(digest, &chunks)?;
        let (store, hasher) = (self.clone(), blake3::Hasher::new());
        Ok(Reader { store, digest, size, chunks, next: 0, pinned, plain: Vec::new(), given: 0, hasher })
    }

    /// Reads a whole object of at most `limit` bytes.
    ///
    /// # Errors
    /// `NotFound`, `TooLarge`, `Damaged`, `Incomplete`, `Io`.
    pub fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>> {
        let mut reader = self.open_object(digest)?;
        if reader.size() > limit {
            return Err(StoreError::TooLarge { limit });
        }
        let room = usize::try_from(reader.size()).map_err(|_| StoreError::TooLarge { limit })?;
        let mut bytes = vec![0; room];
        let mut filled = 0;
        loop {
            match reader.read_some(&mut bytes[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        Ok(bytes)
    }

    /// Reads a whole object of one chunk, durable or not.
    pub(super) fn get_written(&self, digest: Digest, limit: u64) -> Result<Option<Vec<u8>>> {
        let mut slots = self.state().find(digest, Want::Object)?;
        slots.retain(|slot| slot.kind.is_data());
        if slots.iter().any(|slot| slot.size > limit) {
            return Err(StoreError::TooLarge { limit });
        }
        self.read_best(&slots, Pack::read)
    }

    /// Reads up to `length` bytes at `from`, fewer at the object's end. The chunks concerned are verified.
    ///
    /// # Errors
    /// `NotFound`, `Range` if `from` is beyond the end, `Damaged`, `Incomplete`, `Io`.
    pub fn get_range(&self, digest: Digest, from: u64, length: usize) -> Result<Vec<u8>> {
        let list = self.chunks(digest)?;
        let to = from.saturating_add(length as u64);
        if from > list.size {
            return Err(StoreError::Range { digest, from, to, size: list.size });
        }
        let to = to.min(list.size);
        // Allocates no more than there is to read.
        let mut bytes = Vec::with_capacity((to - from) as usize);
        let mut at = 0;
        for (chunk, length) in list.chunks {
            let end = at + u64::from(length);
            if end > from && at < to {
                let plain = self.chunk(digest, chunk, length)?;
                let within = |place: u64| (place.clamp(at, end) - at) as usize;
                bytes.extend_from_slice(&plain[within(from)..within(to)]);
            }
            at = end;
        }
        Ok(bytes)
    }

    /// An object's chunks; a small object is its own only chunk.
    ///
    /// # Errors
    /// `NotFound`, `Damaged`, `Io`.
    pub fn chunks(&self, digest: Digest) -> Result<List> {
        self.read_entry(digest, Want::Object, |pack, slot| {
            if slot.kind.is_data() {
                let chunks = vec![(digest, slot.size as u32)];
                return Ok(List { size: slot.size, chunks });
            }
            pack.read_list(slot)
        })
    }

    /// A verified chunk of an object.
    fn chunk(&self, object: Digest, chunk: Digest, length: u32) -> Result<Vec<u8>> {
        self.read_chunk(object, (chunk, length), Pack::read)
    }

    /// Reads a chunk of an object. Errors name the object.
    pub(super) fn read_chunk<T>(
        &self,
        object: Digest,
        (chunk, length): (Digest, u32),
        read: impl Fn(&Pack, &Slot) -> Result<T>,
    ) -> Result<T> {
        let sized = |pack: &Pack, slot: &Slot| match slot.size == u64::from(length) {
            true => read(pack, slot).map(Some),
            false => Ok(None),
        };
        match self.read_entry(chunk, Want::Data, sized) {
            Ok(Some(found)) => Ok(found),
            Ok(None) | Err(StoreError::NotFound(_)) => Err(StoreError::Incomplete { digest: object, part: chunk }),
            Err(StoreError::Damaged { path, offset, .. }) => Err(StoreError::Damaged { digest: object, path, offset }),
            Err(error) => Err(error),
        }
    }

    /// Keeps the packs of an object's chunks open, up to a limit.
    fn pin(&self, object: Digest, chunks: &[(Digest, u32)]) -> Result<Vec<(Slot, Arc<Pack>)>> {
        let mut pinned: Vec<(Slot, Arc<Pack>)> = Vec::new();
        let mut packs: Vec<Arc<Pack>> = Vec::new();
        for (chunk, _) in chunks {
            let slots = self.slots(*chunk, Want::Data)?;
            let Some(slot) = slots.first().filter(|slot| slot.kind.is_data()) else {
                return Err(StoreError::Incomplete { digest: object, part: *chunk });
            };
            let pack = match packs.iter().find(|pack| pack.number == slot.pack) {
                Some(pack) => Arc::clone(pack),
                None if packs.len() == limits::STORE_READER_PACKS => break,
                // Collected just now: the read looks it up again.
                None => match self.pack(slot.pack) {
                    Ok(pack) => pack,
                    Err(_) => break,
                },
            };
            if packs.last().is_none_or(|last| last.number != pack.number) {
                packs.push(Arc::clone(&pack));
            }
            pinned.push((*slot, pack));
        }
        Ok(pinned)
    }
}

/// Reads one object from start to end, verifying as it goes.
#[derive(Debug)]
pub struct Reader {
    store: Store,
    digest: Digest,
    size: u64,
    chunks: Vec<(Digest, u32)>,
    /// Index of the next chunk.
    next: usize,
    /// Slots of the chunks as of the opening, with their packs: those stay readable if they are removed.
    pinned: Vec<(Slot, Arc<Pack>)>,
    /// The current chunk, and how much of it was returned.
    plain: Vec<u8>,
    given: usize,
    hasher: blake3::Hasher,
}

impl Reader {
    /// The object's length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads some bytes; 0 only at the end or with an empty buffer. Verifies the whole object before the last bytes.
    ///
    /// # Errors
    /// `Damaged`, `Incomplete`, `Io`.
    pub fn read_some(&mut self, room: &mut [u8]) -> Result<usize> {
        if self.given == self.plain.len() && self.next < self.chunks.len() {
            self.next_chunk()?;
        }
        let left = &self.plain[self.given..];
        let count = left.len().min(room.len());
        room[..count].copy_from_slice(&left[..count]);
        self.given += count;
        Ok(count)
    }

    fn next_chunk(&mut self) -> Result<()> {
        let (chunk, length) = self.chunks[self.next];
        let pinned = self.pinned.get(self.next).and_then(|(slot, pack)| pack.read(slot).ok());
        self.plain = match pinned.filter(|plain| plain.len() == length as usize) {
            Some(plain) => plain,
            None => self.store.chunk(self.digest, chunk, length)?,
        };
        self.given = 0;
        self.next += 1;
        // The digest of an only chunk is the object's.
        let is_only = self.chunks.len() == 1;
        if !is_only {
            self.hasher.update(&self.plain);
        }
        if self.next < self.chunks.len() {
            return Ok(());
        }
        let of_all = if is_only { chunk } else { Digest::from_bytes(*self.hasher.finalize().as_bytes()) };
        if of_all == self.digest { Ok(()) } else { Err(self.damaged()) }
    }

    fn damaged(&self) -> StoreError {
        let (path, offset) = match self.pinned.first() {
            Some((slot, pack)) => (pack.path().to_owned(), u64::from(slot.offset)),
            None => (self.store.shared.layout.packs.clone(), 0),
        };
        StoreError::Damaged { digest: self.digest, path, offset }
    }
}

impl Read for Reader {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.read_some(room).map_err(|error| match error {
            StoreError::Damaged { .. } | StoreError::Incomplete { .. } => {
                io::Error::new(io::ErrorKind::InvalidData, error)
            }
            error => io::Error::other(error),
        })
    }
}
