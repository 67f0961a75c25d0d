//! Access to a kernel's files through one trait.

use std::os::fd::BorrowedFd;

use super::{
    Captured, Collected, Donor, DriverChoice, Durability, Objects, Restored, Snapshot, Tracker, TreeId, Unwatched,
    WorkspaceError,
};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// Access to the files of one kernel.
///
/// [`Tracker`] implements it for a directory of this host.
pub trait Workspace: Send {
    /// Brings the files up to date where they are read, if they live elsewhere.
    ///
    /// # Errors
    /// Those of reading and writing.
    fn refresh(&mut self) -> Result<()> {
        Ok(())
    }

    /// Reads changed files while the kernel may still write.
    ///
    /// # Errors
    /// Those of reading and storing.
    fn prepare(&mut self, objects: &dyn Objects) -> Result<()>;

    /// Collects the remaining changes. There must be no writers.
    ///
    /// # Errors
    /// Those of reading and storing.
    fn collect(&mut self, objects: &dyn Objects) -> Result<Collected>;

    /// Builds a tree from the collected changes; the kernel may write again.
    ///
    /// # Errors
    /// Those of storing.
    fn finish(&mut self, collected: Collected) -> Result<Captured>;

    /// Makes the files equal to a tree.
    ///
    /// # Errors
    /// Those of reading the tree and of writing the files; the restore may be repeated.
    fn restore(&mut self, target: TreeId, objects: &dyn Objects, durability: Durability) -> Result<Restored>;

    /// Discards the knowledge about the files after a capture that did not become durable.
    fn invalidate(&mut self);

    /// Saves the knowledge about the files for the next process.
    ///
    /// # Errors
    /// Those of writing.
    fn save(&mut self) -> Result<()>;

    /// Becomes readable when files changed; `None` where changes are not reported.
    fn changes_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Receives the reported changes.
    fn drain(&mut self);

    /// The tree of the last capture.
    fn base(&self) -> Option<TreeId>;

    /// Returns the files as a source for another kernel; `None` while their state is uncertain.
    ///
    /// # Errors
    /// Those of opening them.
    fn donor(&self) -> Result<Option<Donor>>;

    /// Records in a snapshot the changes since the donor was created.
    fn report_changes(&mut self, donor: &Donor, snapshot: &mut Snapshot);

    /// The driver that holds changed files during a capture.
    fn driver(&self) -> &DriverChoice;

    /// Why every pass is a full scan; `None` if changes are reported.
    fn unwatched(&self) -> Option<Unwatched>;
}

impl Workspace for Tracker {
    fn prepare(&mut self, objects: &dyn Objects) -> Result<()> {
        Tracker::prepare(self, objects).map(drop)
    }

    fn collect(&mut self, objects: &dyn Objects) -> Result<Collected> {
        Tracker::collect(self, objects)
    }

    fn finish(&mut self, collected: Collected) -> Result<Captured> {
        Tracker::finish(self, collected)
    }

    fn restore(&mut self, target: TreeId, objects: &dyn Objects, durability: Durability) -> Result<Restored> {
        Tracker::restore(self, target, objects, durability)
    }

    fn invalidate(&mut self) {
        Tracker::invalidate(self);
    }

    fn save(&mut self) -> Result<()> {
        Tracker::save(self)
    }

    fn changes_fd(&self) -> Option<BorrowedFd<'_>> {
        Tracker::changes_fd(self)
    }

    fn drain(&mut self) {
        Tracker::drain(self);
    }

    fn base(&self) -> Option<TreeId> {
        Tracker::base(self)
    }

    fn donor(&self) -> Result<Option<Donor>> {
        Tracker::donor(self)
    }

    fn report_changes(&mut self, donor: &Donor, snapshot: &mut Snapshot) {
        Tracker::record_changes(self, donor, snapshot);
    }

    fn driver(&self) -> &DriverChoice {
        Tracker::driver(self)
    }

    fn unwatched(&self) -> Option<Unwatched> {
        Tracker::unwatched(self)
    }
}
