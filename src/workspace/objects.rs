//! What trees need of a store.

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

/// Keeps nothing: for looking at a tree whose content nobody will ask for.
#[derive(Debug)]
pub(super) struct Addresses;

impl ObjectBatch for Addresses {
    fn put(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        Ok(Digest::from_bytes(*blake3::hash(bytes).as_bytes()))
    }

    fn commit(self: Box<Self>) -> Result<(), StoreError> {
        Ok(())
    }
}
