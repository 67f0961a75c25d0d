//! A kernel's files, wherever they are: captured, changed and followed through one trait.

use std::os::fd::BorrowedFd;

use super::{
    Captured, Collected, Donor, DriverChoice, Durability, Objects, Restored, Snapshot, Tracker, TreeId, Unwatched,
    WorkspaceError,
};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// Access to the files of one kernel. [`Tracker`] is that to a directory of this host.
pub trait Workspace: Send {
    /// Reads what changed while the kernel may still write.
    ///
    /// # Errors
    /// Those of reading and storing.
    fn prepare(&mut self, objects: &dyn Objects) -> Result<()>;

    /// Collects what changed since. Nothing may write meanwhile.
    ///
    /// # Errors
    /// Those of reading and storing.
    fn collect(&mut self, objects: &dyn Objects) -> Result<Collected>;

    /// Makes a tree of what was collected; the kernel may write again.
    ///
    /// # Errors
    /// Those of storing.
    fn finish(&mut self, collected: Collected) -> Result<Captured>;

    /// Makes the files what a tree says.
    ///
    /// # Errors
    /// Those of reading the tree and of writing the files; may be repeated.
    fn restore(&mut self, target: TreeId, objects: &dyn Objects, durability: Durability) -> Result<Restored>;

    /// Drops what is known of the files: the last capture did not become durable.
    fn invalidate(&mut self);

    /// Keeps what is known of the files for the next one that opens them.
    ///
    /// # Errors
    /// Those of writing.
    fn save(&mut self) -> Result<()>;

    /// Becomes readable when files changed; `None` where changes are not reported.
    fn changes_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Takes in the changes that were reported.
    fn drain(&mut self);

    /// The tree of the last capture.
    fn base(&self) -> Option<TreeId>;

    /// The files as they can be given to another kernel; `None` if it is not sure what is known of them.
    ///
    /// # Errors
    /// Those of opening them.
    fn donor(&self) -> Result<Option<Donor>>;

    /// Adds to a snapshot what changed since the donor was made.
    fn report_changes(&mut self, donor: &Donor, snapshot: &mut Snapshot);

    /// How changed files are kept during a capture.
    fn driver(&self) -> &DriverChoice;

    /// Why all files are looked at each time; `None` if only changed ones are.
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
