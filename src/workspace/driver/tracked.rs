//! Any file system: changed files are read while frozen, and stored later as far as memory allows.

use std::fs::File;
use std::io;

use super::{Driver, DriverChoice, HeldFile};
use crate::workspace::error::WorkspaceError;
use crate::workspace::tree::entry::Name;

#[derive(Debug)]
pub(super) struct Tracked {
    pub choice: DriverChoice,
}

impl Driver for Tracked {
    fn choice(&self) -> &DriverChoice {
        &self.choice
    }

    fn reads_up_to(&self) -> u64 {
        u64::MAX
    }

    fn ahead(&mut self, _: &File) -> io::Result<()> {
        Ok(())
    }

    fn hold(&mut self, _: &File, _: &dyn Fn() -> Vec<Name>) -> Result<Option<HeldFile>, WorkspaceError> {
        Ok(None)
    }

    fn open(&mut self, held: HeldFile) -> Result<File, WorkspaceError> {
        unreachable!("it holds nothing: {held:?}")
    }

    fn release(&mut self) -> Result<(), WorkspaceError> {
        Ok(())
    }

    #[cfg(test)]
    fn hold_all(&mut self, _: usize) {}
}
