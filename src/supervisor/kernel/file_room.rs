//! Room for the files that clients write, within the workspace's limit.
//!
//! ```text
//! limit ─ bytes of the last count ─ placed since that count ─ pending in unfinished files = room
//! ```

use std::cell::Cell;
use std::rc::Rc;

use tokio::time::Instant;

use crate::core::error::Result;
use crate::core::files::FileError;
use crate::core::limits;
use crate::supervisor::kernel::Kernel;

/// The bytes of a workspace, as far as they are known.
#[derive(Debug, Default)]
pub struct FileRoom {
    counted: Cell<Option<(Instant, u64)>>,
    placed: Cell<u64>,
    pending: Cell<u64>,
    changes: Cell<u64>,
}

impl FileRoom {
    /// Notes that a client changes the files.
    pub(crate) fn changed(&self) {
        self.changes.set(self.changes.get().wrapping_add(1));
    }

    /// Number of changes by clients.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// Whether the last count is too old.
    pub(crate) fn is_count_due(&self) -> bool {
        self.counted.get().is_none_or(|(at, _)| at.elapsed() >= limits::FILES_COUNT_AGE)
    }

    /// Takes a count that began at `begun`.
    pub(crate) fn count(&self, begun: Instant, bytes: u64) {
        self.counted.set(Some((begun, bytes)));
        self.placed.set(0);
    }

    /// The bytes that fit.
    pub(crate) fn left(&self, limit: u64) -> u64 {
        let counted = self.counted.get().map_or(0, |(_, bytes)| bytes);
        limit.saturating_sub(counted).saturating_sub(self.placed.get()).saturating_sub(self.pending.get())
    }
}

/// The bytes of one unfinished file; released when dropped.
pub(crate) struct PendingBytes {
    owner: Rc<Kernel>,
    bytes: u64,
}

impl PendingBytes {
    /// For a new file in the workspace of `owner`.
    pub(crate) fn new(owner: Rc<Kernel>) -> PendingBytes {
        PendingBytes { owner, bytes: 0 }
    }

    /// Takes room for more bytes.
    ///
    /// # Errors
    /// `too_large` beyond the workspace's limit.
    pub(crate) fn add(&mut self, bytes: u64, shown: &str) -> Result<()> {
        let room = self.owner.file_room();
        if bytes > room.left(self.owner.spec().limits.workspace_bytes) {
            return Err(FileError::TooLarge.on(shown));
        }
        self.bytes += bytes;
        room.pending.set(room.pending.get() + bytes);
        Ok(())
    }

    /// The file is in the workspace now.
    pub(crate) fn place(self) {
        let room = self.owner.file_room();
        room.placed.set(room.placed.get() + self.bytes);
    }
}

impl Drop for PendingBytes {
    fn drop(&mut self) {
        let room = self.owner.file_room();
        room.pending.set(room.pending.get() - self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_expire_and_absorb_writes() {
        let room = FileRoom::default();
        assert!(room.is_count_due());
        room.placed.set(30);
        room.pending.set(5);
        let now = Instant::now();
        room.count(now.checked_sub(limits::FILES_COUNT_AGE).expect("the host runs longer"), 60);
        assert_eq!((room.is_count_due(), room.left(100), room.left(10)), (true, 35, 0));
        room.placed.set(30);
        assert_eq!(room.left(100), 5);
        room.count(now, 90);
        assert_eq!((room.is_count_due(), room.left(100)), (false, 5));
    }
}
