//! The store for asynchronous callers, on tokio's blocking threads with bounded concurrency.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Reader, Result, Store, StoreError, Writer};
use crate::core::ids::Digest;
use crate::core::limits;

/// A non-blocking handle. Cheap to clone.
#[derive(Debug, Clone)]
pub struct StoreHandle {
    store: Store,
    places: Arc<Semaphore>,
    /// Addresses that arriving kernels may have in memory.
    addresses: Arc<Semaphore>,
}

impl StoreHandle {
    /// A handle for a store.
    pub fn new(store: Store) -> StoreHandle {
        let [places, addresses] =
            [limits::STORE_OPERATIONS, limits::HANDOVER_OBJECTS_ALL].map(|most| Arc::new(Semaphore::new(most)));
        StoreHandle { store, places, addresses }
    }

    /// Runs a closure on the store.
    ///
    /// # Errors
    /// Those of `work`; `Stopped` if the run time ends.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce(&Store) -> Result<T> + Send + 'static) -> Result<T> {
        let _place = self.places.clone().acquire_owned().await.map_err(|_| StoreError::Stopped)?;
        let store = self.store.clone();
        tokio::task::spawn_blocking(move || work(&store)).await.unwrap_or(Err(StoreError::Stopped))
    }

    /// As [`Self::run`], without a concurrency permit: for work that waits for other work, or must not wait for it.
    ///
    /// # Errors
    /// As there.
    pub async fn run_beside<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let store = self.store.clone();
        tokio::task::spawn_blocking(move || work(&store)).await.unwrap_or(Err(StoreError::Stopped))
    }

    /// Takes room in memory for so many addresses of objects that arrive; `None` if others have it.
    pub fn reserve_addresses(&self, count: usize) -> Option<OwnedSemaphorePermit> {
        self.addresses.clone().try_acquire_many_owned(u32::try_from(count).ok()?).ok()
    }

    /// See [`Store::put`].
    ///
    /// # Errors
    /// As there.
    pub async fn put(&self, bytes: Vec<u8>) -> Result<Digest> {
        self.run(move |store| store.put(&bytes)).await
    }

    /// See [`Store::get`].
    ///
    /// # Errors
    /// As there.
    pub async fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>> {
        self.run(move |store| store.get(digest, limit)).await
    }

    /// See [`Store::get_range`].
    ///
    /// # Errors
    /// As there.
    pub async fn get_range(&self, digest: Digest, from: u64, length: usize) -> Result<Vec<u8>> {
        self.run(move |store| store.get_range(digest, from, length)).await
    }

    /// See [`Store::writer`].
    ///
    /// # Errors
    /// As there.
    pub async fn writer(&self, limit: u64) -> Result<Writer> {
        self.run(move |store| store.writer(limit)).await
    }

    /// Appends a piece and returns the writer.
    ///
    /// # Errors
    /// As [`Writer::write`]; the writer is lost then.
    pub async fn write(&self, mut writer: Writer, bytes: Vec<u8>) -> Result<Writer> {
        self.run(move |_| writer.write(&bytes).map(|()| writer)).await
    }

    /// See [`Writer::finish`].
    ///
    /// # Errors
    /// As there.
    pub async fn finish(&self, writer: Writer) -> Result<(Digest, u64)> {
        self.run(move |_| writer.finish()).await
    }

    /// See [`Store::open_object`].
    ///
    /// # Errors
    /// As there.
    pub async fn open_object(&self, digest: Digest) -> Result<Reader> {
        self.run(move |store| store.open_object(digest)).await
    }
}
