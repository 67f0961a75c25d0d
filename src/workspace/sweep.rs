//! Looks at every known file, and at nothing else: for what was done to one by a name that nobody knew and that is gone.
//!
//! A program can give a file a second name, write by that, and remove it, all between two passes. It is told of that name alone, or, in a
//! folder that is new, of none. The file's own stamp shows it.

use std::os::fd::AsFd as _;

use super::beneath;
use super::changes::{Changes, Closely};
use super::error::WorkspaceError;
use super::index::{FolderId, Known, What};
use super::scan::Scan;

impl Scan<'_> {
    /// Has those files read that are not as they were noted, or of which that cannot be said.
    pub(super) fn sweep(&mut self, changes: &mut Changes) -> Result<(), WorkspaceError> {
        let folders: Vec<FolderId> = self.index.folders.keys().copied().collect();
        for id in folders {
            let is_file = |known: &Known| matches!(known.what, What::File { .. });
            if !self.index.folder(id).entries.values().any(is_file) {
                continue;
            }
            // One that is another by now is found by its name.
            let Some(dir) = self.open_if_there(id)? else { continue };
            if !self.is_noted(id, dir.as_fd())? {
                continue;
            }
            let files = self.index.folder(id).entries.iter().filter(|(_, known)| is_file(known));
            for (name, known) in files {
                self.how.examined += 1;
                let is_same = beneath::look(dir.as_fd(), name).is_ok_and(|stat| beneath::stamp(&stat) == known.stamp);
                if !is_same || !known.settled {
                    changes.add((id, name.clone()), Closely::Read);
                }
            }
        }
        Ok(())
    }
}
