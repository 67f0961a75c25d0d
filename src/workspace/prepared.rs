//! A copy of a workspace made ahead for its next branch, which then only has to apply later changes.
//!
//! ```text
//!  prepared ── used ─────▶ renamed to the new workspace's path ─▶ what differs from the tree is restored
//!     └─────── dropped ──▶ deleted
//! ```
//! Only the daemon writes to it, but an administrator may free disk space. Therefore, when it is used, each folder and
//! each file worth emptying is checked; the folders show removals and replacements. If one differs from the index, all
//! files are checked. An in-place write to a small file is not noticed, as anywhere in the daemon's own folders.

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

/// A complete workspace without a kernel.
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
    /// Creates one in a new folder, from a tree and a donor's files, if there is a donor. After a failure nothing is left.
    ///
    /// # Errors
    /// As [`branch`](super::branch()); the donor was cancelled.
    pub fn make(home: &Path, donor: Option<&Donor>, tree: TreeId, objects: &dyn Objects) -> Result<PreparedWorkspace> {
        let mut spare =
            PreparedWorkspace { home: home.to_owned(), index: Index::new(), bytes: donor.map_or(0, Donor::bytes) };
        let paths = paths(home);
        fault::point("workspace.spare.make")
            .and_then(|()| DirBuilder::new().mode(0o700).create(home))
            .and_then(|()| DirBuilder::new().mode(0o700).create(&paths.workspace))
            .map_err(|error| WorkspaceError::io("make", home, error))?;
        let mut tracker = Tracker::open(paths)?;
        // It is not watched: watches per user are few.
        tracker.notify = None;
        let (tracker, ..) = checkout_with(tracker, donor, tree, objects, Durability::Process)?;
        // Moving a folder needs write permission, whatever its final mode.
        std::fs::set_permissions(proc_path(tracker.root.as_fd()), Permissions::from_mode(0o700))
            .map_err(|error| WorkspaceError::io("change the mode of", home, error))?;
        // Otherwise the next sync, most likely of a fork, waits for all of this; and an error of the device shows now.
        nix::unistd::syncfs(&tracker.root).map_err(WorkspaceError::of("sync", home))?;
        spare.index = tracker.index.unwatched();
        Ok(spare)
    }

    /// Upper bound of its size, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Moves it to the path of a new, empty workspace and makes that equal to a tree.
    ///
    /// The new workspace must be private. After a failure the caller removes what was created.
    ///
    /// # Errors
    /// The folder is not empty; the copy is gone; as [`Tracker::restore`].
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
            // Fails unless it is empty.
            std::fs::remove_dir(path)?;
            std::fs::rename(self.home.join(WORKSPACE), path)
        };
        swap().map_err(|error| WorkspaceError::io("put a spare workspace in the place of", path, error))?;
        let index = std::mem::replace(&mut self.index, Index::new());
        let changes = matches_index(path, &index)?.then(|| {
            let mut changes = Changes::default();
            changes.add_folder(ROOT);
            changes
        });
        let mut tracker = Tracker::seeded(paths, index, changes)?;
        tracker.settle_all();
        let restored = tracker.restore(tree, objects, durability)?;
        tracker.is_private = false;
        Ok((tracker, restored))
    }
}

/// Whether its folders and large files match the index.
fn matches_index(path: &Path, index: &Index) -> Result<bool> {
    let root: OwnedFd = File::open(path).map_err(WorkspaceError::of("open", path))?.into();
    for (id, folder) in &index.folders {
        let Ok(dir) = beneath::folder(root.as_fd(), &index.names(*id)) else { return Ok(false) };
        let stamp = beneath::look_at(&dir).map(|stat| beneath::stamp(&stat));
        let is_same = match index.known(folder.parent, &folder.name) {
            // Mode and path of the root changed, not its content.
            _ if *id == ROOT => stamp.is_ok_and(|now| moved(now) == moved(index.root_stamp)),
            Some(known) => stamp == Ok(known.stamp),
            None => false,
        };
        let is_large = |known: &Known| {
            matches!(known.what, NodeState::File { .. }) && known.stamp.size >= limits::PREPARED_VERIFY_BYTES
        };
        let mut large = folder.entries.iter().filter(|(_, known)| is_large(known));
        let is_unchanged = |name: &[u8], known: &Known| {
            beneath::look(dir.as_fd(), name).is_ok_and(|stat| beneath::stamp(&stat) == known.stamp)
        };
        if !is_same || !large.all(|(name, known)| is_unchanged(name, known)) {
            return Ok(false);
        }
    }
    Ok(true)
}

const WORKSPACE: &str = "workspace";

fn paths(home: &Path) -> WorkspacePaths {
    // Its index is never saved.
    WorkspacePaths { workspace: home.join(WORKSPACE), staging: home.join("staging"), index: home.join("index") }
}
