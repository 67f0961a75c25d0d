//! Syncs of the data directory, on which another host acts, or which precede a deletion.
//!
//! Linux reports a failed write once and takes the data for written then: a repeated sync succeeds without them, also in the
//! next daemon, which still reads them from memory. A WAL with such a hole ends there after a loss of power. So once a sync
//! has failed, a decision about a move is written anew: a transaction, and a checkpoint of the WAL, which writes every page
//! since the last successful checkpoint again, and reports if that fails. The same precedes the first decision that may
//! follow writes of an earlier daemon.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::Host;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::sys::fs::sync_file_system_of;

/// The data directory, and how often it could not be synced.
#[derive(Debug)]
pub(crate) struct DataSync {
    path: PathBuf,
    /// Open from the start, so that no other program's sync takes a failure's report. The lock lets no sync begin before
    /// the failure of an earlier one is counted.
    dir: Mutex<Option<File>>,
    failures: AtomicU64,
}

impl DataSync {
    pub(crate) fn new(path: &Path) -> Arc<DataSync> {
        let dir = Mutex::new(File::open(path).ok());
        Arc::new(DataSync { path: path.to_owned(), dir, failures: AtomicU64::new(0) })
    }

    /// Syncs; returns the number of failures until now. Blocks.
    fn sync(&self) -> io::Result<u64> {
        let mut dir = self.dir.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = dir.take().map_or_else(|| File::open(&self.path), Ok);
        let synced = opened.and_then(|opened| sync_file_system_of(dir.insert(opened), "handover.data.sync"));
        if synced.is_err() {
            self.failures.fetch_add(1, Ordering::AcqRel);
        }
        synced.map(|()| self.failures.load(Ordering::Acquire))
    }
}

impl Host {
    /// Number of syncs that failed.
    pub(crate) fn failed_syncs(&self) -> u64 {
        self.data_sync.failures.load(Ordering::Acquire)
    }

    /// Makes everything written since `failed` was [`Self::failed_syncs`] survive a loss of power.
    ///
    /// # Errors
    /// `unavailable` if this sync fails, or another one has failed since: what was written may be lost.
    pub(crate) async fn sync_since(&self, failed: u64) -> Result<()> {
        let data = Arc::clone(&self.data_sync);
        // A caller that does not wait for the end leaves the count of failures complete.
        let synced = tokio::task::spawn_blocking(move || data.sync()).await;
        let synced = synced.map_err(|error| Error::internal(error.to_string()))?;
        let lost = |why: &str| Error::unavailable(format!("the data could not be synced: {why}"));
        match synced {
            Ok(count) if count == failed => Ok(()),
            Ok(_) => Err(lost("what was written may be lost")),
            Err(error) => Err(lost(&error.to_string())),
        }
    }

    /// Makes the decisions about moves survive a loss of power: those in the catalog, and that in the record of `kernel`.
    ///
    /// # Errors
    /// As [`Self::sync_since`], and the catalog's: nothing may rely on the decision.
    pub(crate) async fn sync_decision(&self, kernel: Option<KernelId>) -> Result<()> {
        match self.failed_syncs() {
            0 => self.sync_since(0).await,
            _ => self.sync_decision_again(kernel).await,
        }
    }

    /// As [`Self::sync_decision`], for a decision of an earlier attempt or of an earlier daemon, whose sync may have failed.
    ///
    /// # Errors
    /// As [`Self::sync_decision`].
    pub(crate) async fn sync_decision_again(&self, kernel: Option<KernelId>) -> Result<()> {
        let failed = self.failed_syncs();
        self.making_room(async || Ok(self.catalog.rewrite_handovers().await?)).await?;
        if let Some(kernel) = kernel {
            self.making_room(async || Ok(self.catalog.state(kernel).rewrite_transition().await?)).await?;
        }
        self.sync_since(failed).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fault::tests::with_fault;

    #[test]
    fn failed_syncs_are_counted() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let data = DataSync::new(dir.path());
        assert_eq!(data.sync().expect("synced"), 0);
        with_fault("handover.data.sync=eio", || data.sync().expect_err("armed"));
        assert_eq!(data.sync().expect("synced"), 1);
    }
}
