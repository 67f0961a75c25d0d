//! Writing objects: one at a time, or several that become durable together.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;

use super::layout::Layout;
use super::{Result, Store, StoreError};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::sys::fault;

/// An object whose bytes are coming. Dropping it leaves nothing behind.
#[derive(Debug)]
pub struct Writer {
    store: Store,
    temp: Temp,
    file: File,
    hasher: blake3::Hasher,
    written: u64,
    limit: u64,
}

/// A temporary file's name; the file goes with it unless it became an object.
#[derive(Debug)]
struct Temp(Option<PathBuf>);

impl Drop for Temp {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            // What cannot be removed now, the next opening of the store removes.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Writer {
    pub(super) fn begin(store: Store, limit: u64) -> Result<Writer> {
        let (path, file) = store.shared.temps.create()?;
        Ok(Writer { store, temp: Temp(Some(path)), file, hasher: blake3::Hasher::new(), written: 0, limit })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// `TooLarge` beyond the limit; `Full`, `Io`. The object cannot be finished then.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.written = self.written.saturating_add(bytes.len() as u64);
        if self.written > self.limit {
            return Err(StoreError::TooLarge { limit: self.limit });
        }
        self.hasher.update(bytes);
        let write = fault::point("store.object.write").and_then(|()| self.file.write_all(bytes));
        write.map_err(|e| {
            // A part of it may be in the file: it is no longer what was hashed.
            self.limit = 0;
            self.written = u64::MAX;
            StoreError::io("write", &self.path(), e)
        })
    }

    /// Makes the object durable and gives its address and length.
    ///
    /// # Errors
    /// `Full`, `Io`, or `TooLarge` if a write failed before; nothing is left then.
    pub fn finish(self) -> Result<(Digest, u64)> {
        let store = self.store.clone();
        let object = self.seal()?;
        let (digest, size) = (object.digest, object.size);
        store.publish(vec![object])?;
        Ok((digest, size))
    }

    fn path(&self) -> PathBuf {
        self.temp.0.clone().unwrap_or_default()
    }

    /// No more bytes come.
    fn seal(self) -> Result<Sealed> {
        if self.written > self.limit {
            return Err(StoreError::TooLarge { limit: self.limit });
        }
        let digest = Digest::from_bytes(*self.hasher.finalize().as_bytes());
        Ok(Sealed { temp: self.temp, file: self.file, digest, size: self.written })
    }
}

/// An object whose bytes are all there, not yet durable.
#[derive(Debug)]
struct Sealed {
    temp: Temp,
    file: File,
    digest: Digest,
    size: u64,
}

/// Several objects that become durable together. Dropping it leaves nothing behind.
#[derive(Debug)]
pub struct Batch {
    store: Store,
    sealed: Vec<Sealed>,
}

/// Open files of a batch; beyond, those that are there become durable at once.
const BATCH_OPEN: usize = 256;

impl Batch {
    pub(super) fn new(store: Store) -> Batch {
        Batch { store, sealed: Vec::new() }
    }

    /// Adds an object. It may be read only after [`Self::commit`].
    ///
    /// # Errors
    /// `TooLarge`, `Full`, `Io`.
    pub fn put(&mut self, bytes: &[u8]) -> Result<Digest> {
        let digest = Digest::from_bytes(*blake3::hash(bytes).as_bytes());
        if self.sealed.iter().any(|object| object.digest == digest) {
            return Ok(digest);
        }
        if self.store.is_kept(digest, bytes.len() as u64)? {
            return Ok(digest);
        }
        let mut writer = self.store.writer(limits::BLOB_BYTES)?;
        writer.write(bytes)?;
        self.add(writer).map(|(digest, _)| digest)
    }

    /// Adds an object that came piece by piece.
    ///
    /// # Errors
    /// As [`Writer::finish`].
    pub fn add(&mut self, writer: Writer) -> Result<(Digest, u64)> {
        let object = writer.seal()?;
        let named = (object.digest, object.size);
        self.sealed.push(object);
        if self.sealed.len() >= BATCH_OPEN {
            self.store.publish(std::mem::take(&mut self.sealed))?;
        }
        Ok(named)
    }

    /// Makes all of them durable.
    ///
    /// # Errors
    /// `Full`, `Io`; some may be there then, whole, and unreferenced.
    pub fn commit(self) -> Result<()> {
        self.store.publish(self.sealed)
    }
}

impl Store {
    /// Every file is synced before the first gets its name, every name before anyone is told.
    fn publish(&self, objects: Vec<Sealed>) -> Result<()> {
        let mut new = Vec::with_capacity(objects.len());
        for object in objects {
            if !self.is_kept(object.digest, object.size)? {
                new.push(object);
            }
        }
        for object in &new {
            let sync = fault::point("store.object.sync").and_then(|()| object.file.sync_all());
            sync.map_err(|e| StoreError::io("sync", object.temp.0.as_deref().unwrap_or(self.shared.layout.tmp()), e))?;
        }
        let mut shards: Vec<Digest> = Vec::new();
        for object in &mut new {
            if let Some(temp) = &object.temp.0 {
                self.shared.layout.publish(temp, object.digest)?;
            }
            object.temp.0 = None;
            if !shards.iter().any(|other| Layout::shard(*other) == Layout::shard(object.digest)) {
                shards.push(object.digest);
            }
        }
        shards.into_iter().try_for_each(|digest| self.shared.layout.sync_shard(digest))?;
        for object in &new {
            if let Ok(meta) = self.shared.layout.stat(object.digest) {
                self.checked(|checked| checked.set_written(object.digest, &meta));
            }
        }
        Ok(())
    }
}
