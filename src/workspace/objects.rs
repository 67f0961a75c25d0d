//! The store as trees need it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::ids::Digest;
use crate::store::{Batch, Image, Store, StoreError};

/// A content-addressed store.
pub trait Objects: Send + Sync {
    /// Returns a whole object of at most `limit` bytes.
    ///
    /// # Errors
    /// The object is missing, damaged or larger.
    fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>, StoreError>;
    /// Whether the object exists; if so, records a reuse.
    fn contains(&self, digest: Digest) -> bool;
    /// Begins objects that become durable together.
    fn batch(&self) -> Box<dyn ObjectBatch>;
}

/// Objects that become durable together. Dropping it before the commit discards them.
pub trait ObjectBatch: Send {
    /// Adds one.
    ///
    /// # Errors
    /// There is no room, or the device fails.
    fn put(&mut self, bytes: &[u8]) -> Result<Digest, StoreError>;
    /// Makes all of them durable.
    ///
    /// # Errors
    /// There is no room, or the device fails.
    fn commit(self: Box<Self>) -> Result<(), StoreError>;
}

impl Objects for Store {
    fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>, StoreError> {
        Store::get(self, digest, limit)
    }

    fn contains(&self, digest: Digest) -> bool {
        Store::claim(self, digest)
    }

    fn batch(&self) -> Box<dyn ObjectBatch> {
        Box::new(Store::batch(self))
    }
}

impl ObjectBatch for Batch {
    fn put(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        Batch::put(self, bytes)
    }

    fn commit(self: Box<Self>) -> Result<(), StoreError> {
        Batch::commit(*self)
    }
}

/// A batch for several steps: a step's commit is deferred to [`Self::sync`]. Until then, only this type can read the
/// objects.
pub struct SharedBatch {
    store: Store,
    batch: Arc<Batch>,
}

impl SharedBatch {
    /// An empty batch.
    pub fn begin(store: &Store) -> SharedBatch {
        SharedBatch { store: store.clone(), batch: Arc::new(store.batch()) }
    }

    /// Adds one.
    ///
    /// # Errors
    /// There is no room, or the device fails.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest, StoreError> {
        self.batch.put(bytes)
    }

    /// Adds the image of a file: its pieces, and their list. Returns the list.
    ///
    /// # Errors
    /// Those of reading the file; there is no room, or the device fails.
    pub fn put_image(&self, file: &std::fs::File) -> Result<(Digest, Image), StoreError> {
        Image::put(&self.batch, file)
    }

    /// Makes all of them durable. Garbage collection keeps them until this is dropped.
    ///
    /// # Errors
    /// There is no room, or the device fails: the caller must invalidate everything that counts on them.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.batch.sync()
    }
}

impl Objects for SharedBatch {
    fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>, StoreError> {
        self.batch.get(digest, limit)
    }

    fn contains(&self, digest: Digest) -> bool {
        self.store.claim(digest)
    }

    fn batch(&self) -> Box<dyn ObjectBatch> {
        Box::new(SharedBatchHandle(Arc::clone(&self.batch)))
    }
}

/// The batch of one step.
struct SharedBatchHandle(Arc<Batch>);

impl ObjectBatch for SharedBatchHandle {
    fn put(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        self.0.put(bytes)
    }

    fn commit(self: Box<Self>) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Counts the objects read from a store.
pub struct CountingObjects<'a> {
    objects: &'a dyn Objects,
    read: AtomicU64,
}

impl<'a> CountingObjects<'a> {
    /// Starts at 0.
    pub fn new(objects: &'a dyn Objects) -> CountingObjects<'a> {
        CountingObjects { objects, read: AtomicU64::new(0) }
    }

    /// Number of objects read.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }
}

impl Objects for CountingObjects<'_> {
    fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>, StoreError> {
        self.read.fetch_add(1, Ordering::Relaxed);
        self.objects.get(digest, limit)
    }

    fn contains(&self, digest: Digest) -> bool {
        self.objects.contains(digest)
    }

    fn batch(&self) -> Box<dyn ObjectBatch> {
        self.objects.batch()
    }
}

/// Computes addresses and stores nothing: for trees that are only compared.
#[derive(Debug)]
pub(super) struct HashOnly;

impl ObjectBatch for HashOnly {
    fn put(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        Ok(Digest::from_bytes(*blake3::hash(bytes).as_bytes()))
    }

    fn commit(self: Box<Self>) -> Result<(), StoreError> {
        Ok(())
    }
}
