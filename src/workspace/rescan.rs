//! Checks all known files, for changes through a name that was never known and is gone.
//!
//! A program can add a hard link, write through it and remove it, all between two passes. Events report only that name,
//! or, in a new folder, nothing. The file's own stamp shows the write.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::beneath;
use super::changes::CheckLevel;
use super::error::WorkspaceError;
use super::index::{FolderId, Known, NodeState, ROOT};
use super::scan::Scan;
use super::tree::entry::Name;
use crate::core::limits;

impl Scan<'_> {
    /// Reads the files whose stamp changed or is not settled.
    pub(super) fn rescan(&mut self) -> Result<(), WorkspaceError> {
        let mut folders: Vec<(FolderId, Option<OwnedFd>)> = vec![(ROOT, None)];
        while let Some((id, dir)) = folders.pop() {
            // It may have been removed with a checked file.
            if !self.index.folders.contains_key(&id) {
                continue;
            }
            let Some(dir) = self.reuse_or_open(id, dir)? else {
                // The next pass checks its files, wherever they are then.
                self.later.has_unreported = true;
                self.reexamine_dir(id)?;
                continue;
            };
            self.rescan_folder(id, dir.as_fd())?;
            // Opened from here: by its names, each would be opened through all folders above.
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
