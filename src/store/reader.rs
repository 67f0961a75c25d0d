//! Reading objects, and the memory of what was checked.
//!
//! A whole read is checked as it goes: the last bytes are given only if the digest is right, so whoever reads to the end has
//! the true content. A range needs the whole object checked first; that is remembered for a bounded number of objects,
//! together with what the file system said of the file then. A file that was touched since is checked again.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;

use super::{Result, Store, StoreError};
use crate::core::ids::Digest;
use crate::core::limits;

/// What was known of an object's file when its content was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    inode: (u64, u64),
    size: u64,
    changed: (i64, i64),
}

impl Mark {
    fn of(meta: &Metadata) -> Mark {
        // The change time moves with content, mode and name, and no program can set it back.
        Mark { inode: (meta.dev(), meta.ino()), size: meta.len(), changed: (meta.ctime(), meta.ctime_nsec()) }
    }
}

/// Objects whose content was checked, the oldest forgotten first.
#[derive(Debug, Default)]
pub(super) struct Checked {
    marks: HashMap<Digest, (Mark, bool)>,
    order: VecDeque<Digest>,
}

impl Checked {
    fn remember(&mut self, digest: Digest, mark: Mark, durable: bool) {
        if self.marks.insert(digest, (mark, durable)).is_none() {
            self.order.push_back(digest);
        }
        while self.order.len() > limits::OBJECTS_CHECKED {
            if let Some(oldest) = self.order.pop_front() {
                self.marks.remove(&oldest);
            }
        }
    }

    /// Notes an object that this process has written and synced.
    pub(super) fn set_written(&mut self, digest: Digest, meta: &Metadata) {
        self.remember(digest, Mark::of(meta), true);
    }

    pub(super) fn is_durable(&self, digest: Digest) -> bool {
        self.marks.get(&digest).is_some_and(|(_, durable)| *durable)
    }

    pub(super) fn set_durable(&mut self, digest: Digest) {
        if let Some((_, durable)) = self.marks.get_mut(&digest) {
            *durable = true;
        }
    }

    /// Forgets an object; its place in the order runs out by itself.
    pub(super) fn forget(&mut self, digest: Digest) {
        if self.marks.remove(&digest).is_some() {
            self.order.retain(|other| *other != digest);
        }
    }

    fn holds(&self, digest: Digest, mark: Mark) -> bool {
        self.marks.get(&digest).is_some_and(|(known, _)| *known == mark)
    }
}

/// Bytes that one read of a check asks for.
const PIECE: usize = 256 << 10;

impl Store {
    /// Opens an object for reading to its end.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn open_object(&self, digest: Digest) -> Result<Reader> {
        let file = self.shared.layout.open_object(digest)?;
        let path = self.shared.layout.object(digest);
        let meta = file.metadata().map_err(|e| StoreError::io("look at", &path, e))?;
        let reader = Reader {
            store: self.clone(),
            file,
            path,
            digest,
            mark: Mark::of(&meta),
            hasher: blake3::Hasher::new(),
            read: 0,
        };
        Ok(reader)
    }

    /// Reads a whole object of at most `limit` bytes.
    ///
    /// # Errors
    /// `NotFound`, `TooLarge`, `Damaged`, `Io`.
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

    /// Reads `length` bytes from `from`, fewer at the object's end. The whole object is checked first, once.
    ///
    /// # Errors
    /// `NotFound`, `Range` if `from` is beyond the end, `Damaged`, `Io`.
    pub fn get_range(&self, digest: Digest, from: u64, length: usize) -> Result<Vec<u8>> {
        let size = self.check(digest)?;
        let to = from.saturating_add(length as u64);
        if from > size {
            return Err(StoreError::Range { digest, from, to, size });
        }
        // No more memory than there are bytes.
        let length = usize::try_from(to.min(size) - from).unwrap_or(length);
        let mut bytes = vec![0; length];
        let file = self.shared.layout.open_object(digest)?;
        match file.read_exact_at(&mut bytes, from) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(StoreError::Damaged { digest, path: self.shared.layout.object(digest) })
            }
            Err(error) => Err(StoreError::io("read", &self.shared.layout.object(digest), error)),
        }
    }

    /// Checks an object's content unless that was done since its file last changed. Gives its length.
    ///
    /// # Errors
    /// `NotFound`, `Damaged`, `Io`.
    pub fn check(&self, digest: Digest) -> Result<u64> {
        let meta = self.shared.layout.stat(digest)?;
        if self.checked(|checked| checked.holds(digest, Mark::of(&meta))) {
            return Ok(meta.len());
        }
        let mut reader = self.open_object(digest)?;
        let mut piece = vec![0; PIECE];
        while reader.read_some(&mut piece)? > 0 {}
        Ok(reader.size())
    }
}

/// Reads one object from its beginning to its end, checking as it goes.
#[derive(Debug)]
pub struct Reader {
    store: Store,
    file: File,
    path: PathBuf,
    digest: Digest,
    mark: Mark,
    hasher: blake3::Hasher,
    read: u64,
}

impl Reader {
    /// The object's length in bytes.
    pub fn size(&self) -> u64 {
        self.mark.size
    }

    /// Reads some bytes; 0 only at the end (or into no room). The last bytes come only if all of them are the object's.
    ///
    /// # Errors
    /// `Damaged`, `Io`.
    pub fn read_some(&mut self, room: &mut [u8]) -> Result<usize> {
        let left = self.mark.size - self.read;
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(room.len());
        let count = match self.file.read(&mut room[..most]) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return self.read_some(room),
            Err(error) => return Err(StoreError::io("read", &self.path, error)),
        };
        self.hasher.update(&room[..count]);
        self.read += count as u64;
        let ended = self.read == self.mark.size;
        let short = count == 0 && most > 0;
        if short || (ended && self.hasher.finalize().as_bytes() != self.digest.as_bytes()) {
            self.store.checked(|checked| checked.forget(self.digest));
            return Err(StoreError::Damaged { digest: self.digest, path: self.path.clone() });
        }
        if ended {
            self.store.checked(|checked| {
                let durable = checked.is_durable(self.digest);
                checked.remember(self.digest, self.mark, durable);
            });
        }
        Ok(count)
    }
}

impl Read for Reader {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.read_some(room).map_err(|error| match error {
            StoreError::Damaged { .. } => io::Error::new(io::ErrorKind::InvalidData, error),
            error => io::Error::other(error),
        })
    }
}
