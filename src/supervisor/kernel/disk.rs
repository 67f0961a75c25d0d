//! What a kernel takes on the disk, as last measured, and whether that may have changed.
//!
//! `maintenance::figures` measures; this module never reads the disk.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::Kernel;
use crate::core::error::Result;
use crate::core::ids::Digest;
use crate::core::usage::DiskFigures;

/// The last measurement of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MeasuredDisk {
    /// The kernel's folder.
    pub folder: DiskFigures,
    /// What only this kernel needs of the store, bytes.
    pub freed: u64,
    /// [`Kernel::disk_mark`] and the names of a file beneath saved memory, before it began.
    pub mark: Option<u64>,
}

impl MeasuredDisk {
    /// Folder and store together.
    pub(crate) fn figures(&self) -> DiskFigures {
        DiskFigures { history_bytes: self.folder.history_bytes.saturating_add(self.freed), ..self.folder }
    }
}

impl Kernel {
    /// A number that is another one after each change of the kernel's folder and its blobs; `None` while code can change it.
    pub(crate) fn disk_mark(&self) -> Option<u64> {
        let mut mark = DefaultHasher::new();
        let threads = self.threads();
        for session in threads.iter().map(|thread| &**thread).chain([self]) {
            if session.link.borrow().is_some() {
                return None;
            }
            let view = session.view.borrow();
            (session.id, view.version, view.executions, view.checkpoints, view.state.name()).hash(&mut mark);
        }
        self.file_room().changes().hash(&mut mark);
        Some(mark.finish())
    }

    /// Grants the kernel a blob, which counts with its history.
    ///
    /// # Errors
    /// `conflict` and `departed` while the kernel moves and afterwards, and database errors.
    pub(crate) async fn grant(&self, digest: Digest, at_ms: i64) -> Result<()> {
        self.not_leaving()?;
        self.records.grant(digest, at_ms).await?;
        self.file_room().changed();
        Ok(())
    }
}
