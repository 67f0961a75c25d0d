//! A copy of a workspace that is made ahead, for a new one that is to come: then only what changed meanwhile is left to do.
//!
//! ```text
//!  spare ── becomes ──▶ renamed into the new workspace's place ─▶ what differs from the tree is restored
//!     └──── dropped ──▶ nothing is left
//! ```
//! Nobody but the daemon writes to it. But somebody may make room on the disk: so when it is taken, each folder is looked at, which tells of
//! what was removed from it or replaced, and each file that is worth emptying. If one of them is not as it was noted, all are looked at.
//! A small file that somebody writes to in its place is not noticed, here as anywhere in the daemon's own folders.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::beneath::{self, proc_path};
use super::branch::Donor;
use super::changes::Changes;
use super::checkout::checkout_with;
use super::error::WorkspaceError;
use super::index::{Index, Known, NodeState, ROOT};
use super::objects::Objects;
use super::paths::WorkspacePaths;
use super::restore::Restored;
use super::scan::moved;
use super::tracker::Tracker;
use super::tree::TreeId;
use crate::core::durability::Durability;
use crate::core::limits;
use crate::sys::{fault, fs};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// A whole workspace that is nobody's yet.
#[derive(Debug)]
pub struct PreparedWorkspace {
    home: PathBuf,
    index: Index,
    bytes: u64,
}

impl Drop for PreparedWorkspace {
    fn drop(&mut self) {
        // The next start of the daemon removes what cannot be removed now.
        if let Err(error) = fs::remove_tree(&self.home)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.home.display(), %error, "a spare workspace could not be removed");
        }
    }
}

impl PreparedWorkspace {
    /// Makes one in a folder that is not there yet, from a tree and the files that a live workspace has. After a failure nothing
    /// is left.
    ///
    /// # Errors
    /// As [`branch`](super::branch()); `donor` was given up.
    pub fn make(home: &Path, donor: &Donor, tree: TreeId, objects: &dyn Objects) -> Result<PreparedWorkspace> {
        let mut spare = PreparedWorkspace { home: home.to_owned(), index: Index::new(), bytes: donor.bytes() };
        let paths = paths(home);
        fault::point("workspace.spare.make")
            .and_then(|()| DirBuilder::new().mode(0o700).create(home))
            .and_then(|()| DirBuilder::new().mode(0o700).create(&paths.workspace))
            .map_err(|error| WorkspaceError::io("make", home, error))?;
        let mut tracker = Tracker::open(paths)?;
        // Nobody is told of a spare: the watches of a user are few.
        tracker.notify = None;
        let (tracker, ..) = checkout_with(tracker, Some(donor), tree, objects, Durability::Process)?;
        // To move a folder is to write to it, whatever mode it is to have.
        std::fs::set_permissions(proc_path(tracker.root.as_fd()), Permissions::from_mode(0o700))
            .map_err(|error| WorkspaceError::io("change the mode of", home, error))?;
        // Else whoever waits for the device next, a fork most likely, waits for all of this; and what the device refuses is known now.
        nix::unistd::syncfs(&tracker.root).map_err(WorkspaceError::of("sync", home))?;
        spare.index = tracker.index.unwatched();
        Ok(spare)
    }

    /// Bytes that it takes at most.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Puts it in the place of a new, empty workspace and makes that equal to a tree. Nobody else may be in the new one; what is
    /// made and not ended is the caller's to remove.
    ///
    /// # Errors
    /// The folder is not empty; the spare is gone; as [`Tracker::restore`].
    pub fn become_workspace(
        mut self,
        tree: TreeId,
        paths: WorkspacePaths,
        objects: &dyn Objects,
        durability: Durability,
    ) -> Result<(Tracker, Restored)> {
        let path = &paths.workspace;
        let swap = || -> io::Result<()> {
            fault::point("workspace.spare.place")?;
            // Goes only if it is empty.
            std::fs::remove_dir(path)?;
            std::fs::rename(self.home.join(WORKSPACE), path)
        };
        swap().map_err(|error| WorkspaceError::io("put a spare workspace in the place of", path, error))?;
        let index = std::mem::replace(&mut self.index, Index::new());
        let told = is_as_noted(path, &index)?.then(|| {
            let mut changes = Changes::default();
            changes.add_folder(ROOT);
            changes
        });
        let mut tracker = Tracker::seeded(paths, index, told)?;
        tracker.settle_all();
        let restored = tracker.restore(tree, objects, durability)?;
        tracker.is_private = false;
        Ok((tracker, restored))
    }
}

/// Whether the folders of a spare, and its large files, are as they were noted.
fn is_as_noted(path: &Path, index: &Index) -> Result<bool> {
    let root: OwnedFd = File::open(path).map_err(WorkspaceError::of("open", path))?.into();
    for (id, folder) in &index.folders {
        let Ok(dir) = beneath::folder(root.as_fd(), &index.names(*id)) else { return Ok(false) };
        let stamp = beneath::look_at(&dir).map(|stat| beneath::stamp(&stat));
        let is_same = match index.known(folder.parent, &folder.name) {
            // To give it a mode and another place changed the root, not what is in it.
            _ if *id == ROOT => stamp.is_ok_and(|now| moved(now) == moved(index.root_stamp)),
            Some(known) => stamp == Ok(known.stamp),
            None => false,
        };
        let is_large = |known: &Known| {
            matches!(known.what, NodeState::File { .. }) && known.stamp.size >= limits::PREPARED_VERIFY_BYTES
        };
        let mut large = folder.entries.iter().filter(|(_, known)| is_large(known));
        let as_noted = |name: &[u8], known: &Known| {
            beneath::look(dir.as_fd(), name).is_ok_and(|stat| beneath::stamp(&stat) == known.stamp)
        };
        if !is_same || !large.all(|(name, known)| as_noted(name, known)) {
            return Ok(false);
        }
    }
    Ok(true)
}

const WORKSPACE: &str = "workspace";

fn paths(home: &Path) -> WorkspacePaths {
    // The index of a spare is never saved.
    WorkspacePaths { workspace: home.join(WORKSPACE), staging: home.join("staging"), index: home.join("index") }
}
