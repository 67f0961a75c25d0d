//! Reading objects. A chunk is held against its own address before any byte of it is given; whoever reads a whole object to
//! the end has bytes that are its address's besides, and gets the last of them only then.

use std::io::{self, Read};
use std::sync::Arc;

use super::format::{List, Slot};
use super::loose::Loose;
use super::pack::Pack;
use super::state::Want;
use super::{Result, Store, StoreError, limits};
use crate::core::ids::Digest;

/// What an object is made of.
#[derive(Debug)]
enum Made {
    Packed(Packed),
    Loose(Loose),
}

#[derive(Debug)]
struct Packed {
    chunks: Vec<(Digest, u32)>,
    next: usize,
    /// Where the chunks of this object were when it was opened, with their packs: those stay readable if they are removed.
    pinned: Vec<(Slot, Arc<Pack>)>,
    /// The chunk that is being given, and how much of it was.
    plain: Vec<u8>,
    given: usize,
}

impl Store {
    /// Opens an object for reading to its end.
    ///
    /// # Errors
    /// `NotFound`, `Damaged` or `Incomplete` if its list of chunks is, `Io`.
    pub fn open_object(&self, digest: Digest) -> Result<Reader> {
        let (size, made) = match self.chunks(digest) {
            Ok(list) => (list.size, Made::Packed(self.pin(digest, list.chunks)?)),
            Err(StoreError::NotFound(_)) => {
                let loose = self.open_loose(digest)?;
                (loose.size, Made::Loose(loose))
            }
            Err(error) => return Err(error),
        };
        Ok(Reader { store: self.clone(), digest, size, made, hasher: blake3::Hasher::new(), read: 0 })
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

    /// Reads `length` bytes from `from`, fewer at the object's end. The chunks that they are in are checked.
    ///
    /// # Errors
    /// `NotFound`, `Range` if `from` is beyond the end, `Damaged`, `Incomplete`, `Io`.
    pub fn get_range(&self, digest: Digest, from: u64, length: usize) -> Result<Vec<u8>> {
        let list = match self.chunks(digest) {
            Err(StoreError::NotFound(_)) => {
                self.adopt(digest)?;
                self.chunks(digest)?
            }
            list => list?,
        };
        let to = from.saturating_add(length as u64);
        if from > list.size {
            return Err(StoreError::Range { digest, from, to, size: list.size });
        }
        let to = to.min(list.size);
        // No more memory than there are bytes.
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

    /// An object's chunks; a small one is its own only chunk. `NotFound` for an object of format 1, too.
    pub(super) fn chunks(&self, digest: Digest) -> Result<List> {
        self.read_entry(digest, Want::Object, |pack, slot| {
            if slot.kind.is_data() {
                let chunks = vec![(digest, slot.size as u32)];
                return Ok(List { size: slot.size, chunks });
            }
            pack.read_list(slot)
        })
    }

    /// A chunk of an object, checked. Errors name the object.
    fn chunk(&self, object: Digest, chunk: Digest, length: u32) -> Result<Vec<u8>> {
        match self.read_entry(chunk, Want::Data, Pack::read) {
            Ok(plain) if plain.len() == length as usize => Ok(plain),
            Ok(_) | Err(StoreError::NotFound(_)) => Err(StoreError::Incomplete { digest: object, part: chunk }),
            Err(StoreError::Damaged { path, offset, .. }) => Err(StoreError::Damaged { digest: object, path, offset }),
            Err(error) => Err(error),
        }
    }

    /// Holds the packs of an object's chunks open, as far as there is room.
    fn pin(&self, object: Digest, chunks: Vec<(Digest, u32)>) -> Result<Packed> {
        let mut pinned: Vec<(Slot, Arc<Pack>)> = Vec::new();
        let mut packs: Vec<Arc<Pack>> = Vec::new();
        for (chunk, _) in &chunks {
            let slots = self.slots(*chunk, Want::Data)?;
            let Some(slot) = slots.first().filter(|slot| slot.kind.is_data()) else {
                return Err(StoreError::Incomplete { digest: object, part: *chunk });
            };
            let pack = match packs.iter().find(|pack| pack.number == slot.pack) {
                Some(pack) => Arc::clone(pack),
                None if packs.len() == limits::STORE_READER_PACKS => break,
                // Collected in this very moment: it is looked for again when it is read.
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
        Ok(Packed { chunks, next: 0, pinned, plain: Vec::new(), given: 0 })
    }

    /// Takes an object of format 1 into packs: parts of it can be read then without reading all of it each time.
    pub(super) fn adopt(&self, digest: Digest) -> Result<()> {
        let mut reader = self.open_object(digest)?;
        let mut writer = self.writer(limits::BLOB_BYTES)?;
        let mut piece = vec![0; 256 << 10];
        loop {
            match reader.read_some(&mut piece)? {
                0 => break,
                count => writer.write(&piece[..count])?,
            }
        }
        writer.adopt()
    }
}

/// Reads one object from its beginning to its end, checking as it goes.
#[derive(Debug)]
pub struct Reader {
    store: Store,
    digest: Digest,
    size: u64,
    made: Made,
    hasher: blake3::Hasher,
    read: u64,
}

impl Reader {
    /// The object's length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads some bytes; 0 only at the end (or into no room). The last bytes come only if all of them are the object's.
    ///
    /// # Errors
    /// `Damaged`, `Incomplete`, `Io`.
    pub fn read_some(&mut self, room: &mut [u8]) -> Result<usize> {
        match self.made {
            Made::Packed(_) => self.read_packed(room),
            Made::Loose(_) => self.read_loose(room),
        }
    }

    fn read_packed(&mut self, room: &mut [u8]) -> Result<usize> {
        let Made::Packed(packed) = &mut self.made else { return Ok(0) };
        if packed.given == packed.plain.len() && packed.next < packed.chunks.len() {
            let (chunk, length) = packed.chunks[packed.next];
            let pinned = packed.pinned.get(packed.next).and_then(|(slot, pack)| pack.read(slot).ok());
            let pinned = pinned.filter(|plain| plain.len() == length as usize);
            packed.plain = match pinned {
                Some(plain) => plain,
                None => self.store.chunk(self.digest, chunk, length)?,
            };
            packed.given = 0;
            packed.next += 1;
            if packed.chunks.len() > 1 {
                self.hasher.update(&packed.plain);
            }
            let ended = packed.next == packed.chunks.len();
            let whole = packed.chunks.len() == 1 && chunk == self.digest;
            if ended && !whole && self.hash_of_all(&chunk) != self.digest {
                return Err(self.damaged());
            }
        }
        let Made::Packed(packed) = &mut self.made else { return Ok(0) };
        let left = &packed.plain[packed.given..];
        let count = left.len().min(room.len());
        room[..count].copy_from_slice(&left[..count]);
        packed.given += count;
        Ok(count)
    }

    /// The digest of the whole object; that of its only chunk is known already.
    fn hash_of_all(&self, chunk: &Digest) -> Digest {
        match &self.made {
            Made::Packed(packed) if packed.chunks.len() == 1 => *chunk,
            Made::Packed(_) | Made::Loose(_) => Digest::from_bytes(*self.hasher.finalize().as_bytes()),
        }
    }

    fn read_loose(&mut self, room: &mut [u8]) -> Result<usize> {
        let Made::Loose(loose) = &mut self.made else { return Ok(0) };
        let left = self.size - self.read;
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(room.len());
        let count = loose.read(&mut room[..most])?;
        self.hasher.update(&room[..count]);
        self.read += count as u64;
        let short = count == 0 && most > 0;
        let ended = self.read == self.size;
        if short || (ended && self.hasher.finalize().as_bytes() != self.digest.as_bytes()) {
            return Err(self.damaged());
        }
        Ok(count)
    }

    fn damaged(&self) -> StoreError {
        let digest = self.digest;
        let (path, offset) = match &self.made {
            Made::Loose(loose) => (loose.path().to_owned(), 0),
            Made::Packed(packed) => packed.pinned.first().map_or_else(
                || (self.store.shared.layout.packs.clone(), 0),
                |(slot, pack)| (pack.path().to_owned(), u64::from(slot.offset)),
            ),
        };
        StoreError::Damaged { digest, path, offset }
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
