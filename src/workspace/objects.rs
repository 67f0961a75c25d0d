//! What trees need of a store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::ids::Digest;
use crate::store::{Batch, Store, StoreError};

/// A content-addressed store.
pub trait Objects: Send + Sync {
    /// A whole object of at most `limit` bytes.
    ///
    /// # Errors
    /// It is missing, damaged or larger.
    fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>, StoreError>;
    /// Whether there is such an object; if so, it is going to be used again.
    fn contains(&self, digest: Digest) -> bool;
    /// Begins objects that become durable together.
    fn batch(&self) -> Box<dyn ObjectBatch>;
}

/// Objects that become durable together. Dropped before that, they are not there.
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

/// Objects of several steps that become durable together, in the end: what a step commits waits for [`Self::sync`]. Until then
/// they can be read by way of this alone.
pub struct SharedBatch {
    store: Store,
    batch: Arc<Batch>,
}

impl SharedBatch {
    /// Nothing was added yet.
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

    /// Makes all of them durable. They are kept from garbage collection until this is dropped.
    ///
    /// # Errors
    /// There is no room, or the device fails: whoever believes that they are there must be told.
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

/// What one step adds.
struct SharedBatchHandle(Arc<Batch>);

impl ObjectBatch for SharedBatchHandle {
    fn put(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        self.0.put(bytes)
    }

    fn commit(self: Box<Self>) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Counts what is read of a store.
pub struct CountingObjects<'a> {
    objects: &'a dyn Objects,
    read: AtomicU64,
}

impl<'a> CountingObjects<'a> {
    /// Nothing was read yet.
    pub fn new(objects: &'a dyn Objects) -> CountingObjects<'a> {
        CountingObjects { objects, read: AtomicU64::new(0) }
    }

    /// Objects that were read so far.
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

/// Keeps nothing: for looking at a tree whose content nobody will ask for.
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
