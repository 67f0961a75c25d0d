//! Detects replaced folders: a name may by now lead to another folder, for which the recorded changes do not hold.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use nix::errno::Errno;

use super::beneath;
use super::changes::CheckLevel;
use super::error::WorkspaceError;
use super::index::{FolderId, ROOT};
use super::scan::Scan;
use super::tree::entry::Name;

type Result<T> = std::result::Result<T, WorkspaceError>;

impl Scan<'_> {
    /// Whether an open folder is the one that the index knows by this id.
    pub(super) fn is_same_dir(&self, id: FolderId, dir: BorrowedFd<'_>) -> Result<bool> {
        if id == ROOT {
            return Ok(true);
        }
        let stat = beneath::look_at(dir).map_err(|e| WorkspaceError::of("look at", &self.index.path(id, b""))(e))?;
        let folder = self.index.folder(id);
        Ok(self.index.known(folder.parent, &folder.name).is_some_and(|known| known.stamp.inode == stat.st_ino))
    }

    /// Opens a folder by its names, if it is unmoved and accessible.
    pub(super) fn open_same_dir(&self, id: FolderId) -> Result<Option<OwnedFd>> {
        match beneath::folder(self.root, &self.index.names(id)) {
            Ok(dir) => Ok(if self.is_same_dir(id, dir.as_fd())? { Some(dir) } else { None }),
            Err(error) if beneath::is_gone(error) || beneath::is_refused(error) || error == Errno::EXDEV => Ok(None),
            Err(error) => Err(WorkspaceError::of("open", &self.index.path(id, b""))(error)),
        }
    }

    /// A folder as opened through its parent, or by its names; `None` if it is another one.
    pub(super) fn reuse_or_open(&self, id: FolderId, dir: Option<OwnedFd>) -> Result<Option<OwnedFd>> {
        match dir {
            Some(dir) => Ok(if self.is_same_dir(id, dir.as_fd())? { Some(dir) } else { None }),
            None => self.open_same_dir(id),
        }
    }

    /// A folder has moved. Events report that, or will; while frozen they must have done so already: else it is an
    /// error, and the next pass scans everything.
    pub(super) fn fail_if_frozen(&self, id: FolderId) -> Result<()> {
        if !self.frozen {
            return Ok(());
        }
        if id == ROOT {
            // The error says why the root cannot be opened.
            self.open(ROOT)?;
        }
        Err(WorkspaceError::Changing { path: self.index.path(id, b"") })
    }

    /// A folder has moved: the next pass lists its name. Until then changes in it are unreported.
    pub(super) fn defer_listing(&mut self, id: FolderId) {
        let folder = self.index.folder_mut(id);
        folder.watch = None;
        self.later.add((folder.parent, folder.name.clone()), CheckLevel::Metadata);
        self.later.has_unreported = true;
    }

    /// Checks the entry under the name of a moved folder, and its content.
    pub(super) fn reexamine_dir(&mut self, id: FolderId) -> Result<()> {
        let Some(folder) = self.index.folders.get(&id) else { return Ok(()) };
        if id == ROOT {
            return self.fail_if_frozen(ROOT);
        }
        let (parent, name) = (folder.parent, folder.name.clone());
        let found = match self.open_same_dir(parent)? {
            Some(dir) => self.examine(parent, dir.as_fd(), &name, CheckLevel::Metadata)?,
            None => {
                // Its parent may have moved too: that one is found by its own name.
                self.later.add((parent, name), CheckLevel::Metadata);
                None
            }
        };
        match found {
            Some(found) => self.scan_from(vec![(found, None)]),
            None if self.index.folders.contains_key(&id) => self.fail_if_frozen(id),
            None => Ok(()),
        }
    }

    /// Keeps the changes of a folder that is elsewhere, perhaps only for an instant.
    pub(super) fn requeue_changes(&mut self, folder: FolderId, names: &HashMap<Name, CheckLevel>) {
        if !self.frozen {
            self.later.add_folder(folder);
            names.iter().for_each(|(name, level)| self.later.add((folder, name.clone()), *level));
        }
    }
}
