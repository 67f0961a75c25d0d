//! Looks at every known file, and at nothing else: for what was done to one by a name that nobody knew and that is gone.
//!
//! A program can give a file a second name, write by that, and remove it, all between two passes. It is told of that name alone, or, in a
//! folder that is new, of none. The file's own stamp shows it.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::beneath;
use super::changes::CheckLevel;
use super::error::WorkspaceError;
use super::index::{FolderId, Known, NodeState, ROOT};
use super::scan::Scan;
use super::tree::entry::Name;
use crate::core::limits;

impl Scan<'_> {
    /// Reads those files that are not as they were noted, or of which that cannot be said.
    pub(super) fn rescan(&mut self) -> Result<(), WorkspaceError> {
        let mut folders: Vec<(FolderId, Option<OwnedFd>)> = vec![(ROOT, None)];
        while let Some((id, dir)) = folders.pop() {
            // It may have gone with a file that was looked at.
            if !self.index.folders.contains_key(&id) {
                continue;
            }
            let Some(dir) = self.reuse_or_open(id, dir)? else {
                // The files in it are looked at by the next pass, wherever they are by then.
                self.later.has_unreported = true;
                self.reexamine_dir(id)?;
                continue;
            };
            self.rescan_folder(id, dir.as_fd())?;
            // From within: by its names, each would be opened through all that it is in.
            for (name, known) in &self.index.folder(id).entries {
                if let NodeState::Folder(inner) = known.what {
                    let is_room = folders.len() < limits::WORKSPACE_OPEN_DIRS;
                    let dir = if is_room { beneath::child(dir.as_fd(), name).ok() } else { None };
                    folders.push((inner, dir));
                }
            }
        }
        Ok(())
    }

    fn rescan_folder(&mut self, id: FolderId, dir: BorrowedFd<'_>) -> Result<(), WorkspaceError> {
        let entries = &self.index.folder(id).entries;
        let is_file = |known: &Known| matches!(known.what, NodeState::File { .. });
        let is_other = |(name, known): &(&Name, &Known)| {
            let now = beneath::look(dir, name).map(|stat| beneath::stamp(&stat));
            is_file(known) && (now != Ok(known.stamp) || !known.settled)
        };
        let others: Vec<Name> = entries.iter().filter(is_other).map(|(name, _)| name.clone()).collect();
        self.stats.examined += entries.values().filter(|known| is_file(known)).count() as u64;
        for name in others {
            self.examine(id, dir, &name, CheckLevel::Content)?;
        }
        Ok(())
    }
}
