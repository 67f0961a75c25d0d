//! A folder is opened by its names, and may be another by now: what was told of the one is not true of the other, nor lost.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, BorrowedFd};

use super::beneath;
use super::changes::Closely;
use super::error::WorkspaceError;
use super::index::{FolderId, ROOT};
use super::scan::Scan;
use super::tree::entry::Name;

type Result<T> = std::result::Result<T, WorkspaceError>;

impl Scan<'_> {
    /// Whether an open folder is the one that is known by its names: what was told of that one is not true of another.
    pub(super) fn is_noted(&self, id: FolderId, dir: BorrowedFd<'_>) -> Result<bool> {
        if id == ROOT {
            return Ok(true);
        }
        let stat = beneath::look_at(dir).map_err(WorkspaceError::of("look at", &self.index.path(id, b"")))?;
        let folder = self.index.folder(id);
        Ok(self.index.known(folder.parent, &folder.name).is_some_and(|known| known.stamp.inode == stat.st_ino))
    }

    /// A folder is not where it was: the next pass lists what is there then.
    pub(super) fn list_later(&mut self, id: FolderId) {
        let folder = self.index.folder_mut(id);
        folder.watch = None;
        self.later.add((folder.parent, folder.name.clone()), Closely::Look);
    }

    /// Looks at what has the name of a folder that is another by now. Gives it if it is a folder that is to be listed.
    pub(super) fn find_again(&mut self, id: FolderId) -> Result<Option<FolderId>> {
        let Some(folder) = self.index.folders.get(&id) else { return Ok(None) };
        let (parent, name) = (folder.parent, folder.name.clone());
        // Its parent may be another, too: that is found by its own name.
        match self.open_if_there(parent)? {
            Some(dir) if self.is_noted(parent, dir.as_fd())? => self.examine(parent, dir.as_fd(), &name, Closely::Look),
            Some(_) | None => {
                self.later.add((parent, name), Closely::Look);
                Ok(None)
            }
        }
    }

    /// A folder is elsewhere, perhaps for an instant only: nothing of what was told of it is lost.
    pub(super) fn keep_told(&mut self, folder: FolderId, names: &HashMap<Name, Closely>) {
        if !self.frozen {
            names.iter().for_each(|(name, closely)| self.later.add((folder, name.clone()), *closely));
        }
    }
}
