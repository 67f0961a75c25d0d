//! A kernel's files while they are in a machine: the tracker follows the mirror, which is brought up to date first.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::DISK;
use super::machine::{Machine, Machines};
use crate::core::error::Error;
use crate::isolation::Reach;
use crate::workspace::{
    Captured, Collected, Donor, DriverChoice, Durability, Objects, Restored, Snapshot, Tracker, TreeId, Unwatched,
    Workspace, WorkspaceError,
};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// The files of a kernel with this isolation.
pub(super) struct MirroredWorkspace {
    pub tracker: Tracker,
    pub machines: Machines,
    pub dir: PathBuf,
}

impl MirroredWorkspace {
    fn machine(&self) -> Option<Arc<Machine>> {
        self.machines.find(&self.dir)
    }

    fn pull(&self) -> Result<()> {
        match self.machine() {
            Some(machine) => machine.pull().map_err(WorkspaceError::Elsewhere),
            None if self.dir.join(DISK).exists() => Err(WorkspaceError::Elsewhere(
                Error::unavailable("the kernel's files are on the disk of a virtual machine that has ended")
                    .hint("start the kernel, for example with ryokan exec"),
            )),
            None => Ok(()),
        }
    }

    /// As [`Self::pull`]; the mirror is captured as it is where nothing reaches the disk. Only a restore captures a
    /// kernel without a worker, and puts the disk aside.
    fn pull_for_capture(&self) -> Result<()> {
        match self.machines.reach(&self.dir) {
            Reach::Nothing => Ok(()),
            Reach::Host | Reach::Worker => self.pull(),
        }
    }
}

impl Workspace for MirroredWorkspace {
    fn refresh(&mut self) -> Result<()> {
        self.pull()
    }

    fn prepare(&mut self, objects: &dyn Objects) -> Result<()> {
        self.pull_for_capture()?;
        self.tracker.prepare(objects).map(drop)
    }

    fn collect(&mut self, objects: &dyn Objects) -> Result<Collected> {
        self.pull_for_capture()?;
        self.tracker.collect(objects)
    }

    fn finish(&mut self, collected: Collected) -> Result<Captured> {
        self.tracker.finish(collected)
    }

    fn restore(&mut self, target: TreeId, objects: &dyn Objects, durability: Durability) -> Result<Restored> {
        let machine = self.machine();
        let Some(machine) = machine else {
            super::saved::remove(&self.dir).map_err(WorkspaceError::Elsewhere)?;
            super::installed::remove(&self.dir).map_err(WorkspaceError::Elsewhere)?;
            // Files and state are replaced as a whole; until both are, the transition is repeated.
            let dropped = std::fs::remove_file(self.dir.join(DISK));
            if let Err(error) = dropped
                && error.kind() != std::io::ErrorKind::NotFound
            {
                return Err(WorkspaceError::Elsewhere(Error::internal(format!("remove the disk: {error}"))));
            }
            return self.tracker.restore(target, objects, durability);
        };
        // The restore changes what differs from the guest's present files.
        machine.pull().map_err(WorkspaceError::Elsewhere)?;
        let restored = self.tracker.restore(target, objects, durability)?;
        machine.push().map_err(WorkspaceError::Elsewhere)?;
        Ok(restored)
    }

    fn invalidate(&mut self) {
        self.tracker.invalidate();
    }

    fn save(&mut self) -> Result<()> {
        self.tracker.save()
    }

    fn changes_fd(&self) -> Option<BorrowedFd<'_>> {
        self.tracker.changes_fd()
    }

    fn drain(&mut self) {
        self.tracker.drain();
    }

    fn base(&self) -> Option<TreeId> {
        self.tracker.base()
    }

    fn donor(&self) -> Result<Option<Donor>> {
        self.tracker.donor()
    }

    fn report_changes(&mut self, donor: &Donor, snapshot: &mut Snapshot) {
        self.tracker.record_changes(donor, snapshot);
    }

    fn driver(&self) -> &DriverChoice {
        self.tracker.driver()
    }

    fn unwatched(&self) -> Option<Unwatched> {
        self.tracker.unwatched()
    }
}
