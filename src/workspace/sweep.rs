//! Looks at every known file, and at nothing else: for what was done to one by a name that nobody knew and that is gone.
//!
//! A program can give a file a second name, write by that, and remove it, all between two passes. It is told of that name alone, or, in a
//! folder that is new, of none. The file's own stamp shows it.

use std::os::fd::AsFd as _;

use super::beneath;
use super::changes::Closely;
use super::error::WorkspaceError;
use super::index::{FolderId, Known, What};
use super::scan::Scan;
use super::tree::entry::Name;

impl Scan<'_> {
    /// Reads those files that are not as they were noted, or of which that cannot be said.
    pub(super) fn sweep(&mut self) -> Result<(), WorkspaceError> {
        let folders: Vec<FolderId> = self.index.folders.keys().copied().collect();
        for id in folders {
            let is_file = |known: &Known| matches!(known.what, What::File { .. });
            // It may have gone with a file that was looked at.
            if !self.index.folders.get(&id).is_some_and(|folder| folder.entries.values().any(is_file)) {
                continue;
            }
            let dir = self.open_if_there(id)?;
            let Some(dir) = dir.filter(|dir| self.is_noted(id, dir.as_fd()).unwrap_or(false)) else {
                // Whatever is there is found by its name; the files in it are looked at by the next pass.
                self.later.hidden = true;
                continue;
            };
            let files = self.index.folder(id).entries.iter().filter(|(_, known)| is_file(known));
            let is_other = |(name, known): &(&Name, &Known)| {
                let now = beneath::look(dir.as_fd(), name).map(|stat| beneath::stamp(&stat));
                now != Ok(known.stamp) || !known.settled
            };
            let others: Vec<Name> = files.filter(is_other).map(|(name, _)| name.clone()).collect();
            self.how.examined += self.index.folder(id).entries.len() as u64;
            for name in others {
                self.examine(id, dir.as_fd(), &name, Closely::Read)?;
            }
        }
        Ok(())
    }
}
