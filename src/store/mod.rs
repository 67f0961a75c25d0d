//! The content-addressed store: blobs and large output, each object once, whoever needs it.
//!
//! An object is written to a temporary file while it is hashed, synced, renamed to its address, and its directory synced;
//! only then is the address given out. It is never changed, only removed by garbage collection. Whatever is read is checked
//! against its address before the last byte of it is given ([`Reader`]), or before the first (ranges). Everything here
//! blocks: the daemon calls it by way of [`StoreHandle`]. Where objects are is known to `layout` alone.

mod error;
mod handle;
mod layout;
mod reader;
mod sweep;
mod writer;

use std::sync::{Arc, Mutex, PoisonError};

use crate::core::ids::Digest;
use crate::core::limits;
use crate::sys::fault;

pub use error::StoreError;
pub use handle::StoreHandle;
pub use reader::Reader;
pub use writer::{Batch, Writer};

use layout::Layout;
use reader::Checked;

/// Result of whatever concerns the store.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// An open store. Cheap to clone; all clones share what was checked.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    layout: Layout,
    checked: Mutex<Checked>,
    temps: sweep::Temps,
}

/// What [`Store::verify`] found.
#[derive(Debug, Default)]
pub struct Verified {
    /// Objects whose content is what their address says.
    pub good: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Those that are damaged or cannot be read.
    pub damaged: Vec<StoreError>,
}

impl Store {
    /// Opens the store in a directory, or makes one. Removes what dead writers left.
    ///
    /// # Errors
    /// [`StoreError::Newer`] for a store of a later release; `Full`, `Io`.
    pub fn open(dir: &std::path::Path) -> Result<Store> {
        let layout = Layout::open(dir)?;
        let temps = sweep::Temps::open(&layout)?;
        Ok(Store { shared: Arc::new(Shared { layout, checked: Mutex::new(Checked::default()), temps }) })
    }

    /// Stores bytes that are in memory.
    ///
    /// # Errors
    /// `TooLarge`, `Full`, `Io`; nothing is left then.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest> {
        let digest = Digest::from_bytes(*blake3::hash(bytes).as_bytes());
        if self.is_kept(digest, bytes.len() as u64)? {
            return Ok(digest);
        }
        let mut writer = self.writer(bytes.len() as u64)?;
        writer.write(bytes)?;
        writer.finish().map(|(digest, _)| digest)
    }

    /// Begins an object whose bytes come piece by piece, at most `limit` of them (and never more than
    /// [`limits::BLOB_BYTES`]).
    ///
    /// # Errors
    /// `Full`, `Io`.
    pub fn writer(&self, limit: u64) -> Result<Writer> {
        Writer::begin(self.clone(), limit.min(limits::BLOB_BYTES))
    }

    /// Begins several objects that become durable together: fewer waits for the device.
    pub fn batch(&self) -> Batch {
        Batch::new(self.clone())
    }

    /// Whether there is an object of that address. Says nothing of its content.
    pub fn contains(&self, digest: Digest) -> bool {
        self.shared.layout.object(digest).is_file()
    }

    /// Length of an object in bytes.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn size(&self, digest: Digest) -> Result<u64> {
        Ok(self.shared.layout.stat(digest)?.len())
    }

    /// Every object's address and length, in no order.
    ///
    /// # Errors
    /// A directory that cannot be read.
    pub fn objects(&self) -> impl Iterator<Item = Result<(Digest, u64)>> + '_ {
        self.shared.layout.objects()
    }

    /// Removes an object: garbage collection only. Says whether there was one.
    ///
    /// # Errors
    /// `Io`.
    pub fn remove(&self, digest: Digest) -> Result<bool> {
        self.checked(|checked| checked.forget(digest));
        let path = self.shared.layout.object(digest);
        // After a loss of power it may be there again: it is collected again then.
        match fault::point("store.object.remove").and_then(|()| std::fs::remove_file(&path)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(StoreError::io("remove", &path, error)),
        }
    }

    /// Reads every object and names the damaged ones.
    ///
    /// # Errors
    /// A directory that cannot be read.
    pub fn verify(&self) -> Result<Verified> {
        let mut verified = Verified::default();
        for object in self.objects() {
            let (digest, _) = object?;
            self.checked(|checked| checked.forget(digest));
            match self.check(digest) {
                Ok(bytes) => {
                    verified.good += 1;
                    verified.bytes += bytes;
                }
                // Removed since it was listed: no damage.
                Err(StoreError::NotFound(_)) => {}
                Err(error) => verified.damaged.push(error),
            }
        }
        Ok(verified)
    }

    fn checked<T>(&self, with: impl FnOnce(&mut Checked) -> T) -> T {
        // The cache holds no invariant that a panic could have broken.
        with(&mut self.shared.checked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether an object is there, whole and durable, so that it need not be written again. One that is damaged is not: it
    /// will be replaced.
    fn is_kept(&self, digest: Digest, size: u64) -> Result<bool> {
        let good = self.contains(digest) && self.check(digest).is_ok_and(|found| found == size);
        if good && !self.checked(|checked| checked.is_durable(digest)) {
            // Perhaps another writer has just renamed it and not yet synced.
            self.shared.layout.sync_shard(digest)?;
            self.checked(|checked| checked.set_durable(digest));
        }
        Ok(good)
    }
}

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod store_tests;
