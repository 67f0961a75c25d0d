//! File systems that clone files: a changed file is held by an unnamed clone, which vanishes with a killed process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use super::{Driver, DriverChoice, HeldFile, cannot_clone, nameless};
use crate::core::limits;
use crate::sys::{fault, inode};
use crate::workspace::error::WorkspaceError;
use crate::workspace::paths::WorkspacePaths;
use crate::workspace::tree::entry::Name;

/// Size up to which reading from memory beats cloning (measured: 30 to 100 microseconds).
pub(super) const CLONE_ABOVE: u64 = 256 << 10;

#[derive(Debug)]
pub(super) struct Reflink {
    choice: DriverChoice,
    clones: Clones,
    clone_above: u64,
}

/// The clones held.
#[derive(Debug)]
pub(super) struct Clones {
    dir: OwnedFd,
    paths: WorkspacePaths,
    count: usize,
}

impl Clones {
    pub(super) fn open(paths: &WorkspacePaths) -> Result<Clones, WorkspaceError> {
        let dir = File::open(&paths.staging).map_err(WorkspaceError::of("open", &paths.staging))?.into();
        Ok(Clones { dir, paths: paths.clone(), count: 0 })
    }

    /// Number of clones.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn clear(&mut self) {
        self.count = 0;
    }

    /// Holds a file. `None` if it cannot be cloned, or too many are held.
    pub(super) fn hold(&mut self, file: &File) -> Result<Option<HeldFile>, WorkspaceError> {
        if self.count >= limits::WORKSPACE_CLONES {
            return Ok(None);
        }
        let cloned = fault::point("workspace.clone.make").and_then(|()| {
            let clone = nameless(self.dir.as_fd())?;
            inode::clone_blocks(file.as_fd(), clone.as_fd()).map(|()| clone)
        });
        match cloned {
            Ok(clone) => {
                self.count += 1;
                Ok(Some(HeldFile::Clone(clone)))
            }
            Err(error) if cannot_clone(&error) => Ok(None),
            Err(error) => Err(WorkspaceError::io("clone a file into", &self.paths.staging, error)),
        }
    }
}

impl Reflink {
    pub(super) fn open(paths: &WorkspacePaths, choice: DriverChoice) -> Result<Reflink, WorkspaceError> {
        Ok(Reflink { choice, clones: Clones::open(paths)?, clone_above: CLONE_ABOVE })
    }
}

impl Driver for Reflink {
    fn choice(&self) -> &DriverChoice {
        &self.choice
    }

    fn reads_up_to(&self) -> u64 {
        self.clone_above
    }

    /// Writes the file out: a clone waits until all of it is on the device.
    fn ahead(&mut self, file: &File) -> io::Result<()> {
        inode::write_out(file.as_fd())
    }

    fn hold(&mut self, file: &File, _: &dyn Fn() -> Vec<Name>) -> Result<Option<HeldFile>, WorkspaceError> {
        self.clones.hold(file)
    }

    fn open(&mut self, held: HeldFile) -> Result<File, WorkspaceError> {
        match held {
            HeldFile::Clone(file) => Ok(file),
            HeldFile::Within(names) => unreachable!("it holds files alone, not {names:?}"),
        }
    }

    fn release(&mut self) -> Result<(), WorkspaceError> {
        self.clones.clear();
        Ok(())
    }

    #[cfg(test)]
    fn hold_all(&mut self, _: usize) {
        self.clone_above = 0;
    }
}
