//! A copy of a workspace that is made ahead, for a new one that is to come: then only what changed meanwhile is left to do.
//!
//! ```text
//!  spare ── becomes ──▶ renamed into the new workspace's place ─▶ what differs from the tree is restored
//!     └──── discard ──▶ nothing is left
//! ```
//! Nobody but the daemon reaches it, and nobody writes to it. So what was noted when it was made holds, however old it is.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use super::branch::Donor;
use super::changes::Changes;
use super::checkout::checkout_with;
use super::error::WorkspaceError;
use super::index::Index;
use super::objects::Objects;
use super::restore::{Durable, Restored};
use super::tracker::{Places, Tracker};
use super::tree::TreeId;
use crate::sys::{fault, fs};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// A whole workspace that is nobody's yet.
#[derive(Debug)]
pub struct Spare {
    home: PathBuf,
    index: Index,
    bytes: u64,
}

impl Spare {
    /// Makes one in a folder that is not there yet, from a tree and the files that a live workspace has. After a failure nothing
    /// is left.
    ///
    /// # Errors
    /// As [`branch`](super::branch()).
    pub fn make(home: &Path, donor: &Donor, tree: TreeId, objects: &dyn Objects) -> Result<Spare> {
        let made = Spare::fill(home, donor, tree, objects);
        if made.is_err() {
            // The next start of the daemon removes what cannot be removed now.
            let _ = fs::remove_tree(home);
        }
        made
    }

    fn fill(home: &Path, donor: &Donor, tree: TreeId, objects: &dyn Objects) -> Result<Spare> {
        let places = places(home);
        fault::point("workspace.spare.make")
            .and_then(|()| DirBuilder::new().mode(0o700).create(home))
            .and_then(|()| DirBuilder::new().mode(0o700).create(&places.workspace))
            .map_err(|error| WorkspaceError::io("make", home, error))?;
        let (tracker, restored, _) = checkout_with(Some(donor), tree, places, objects, Durable::Process)?;
        let bytes = donor.bytes();
        // What only root may make, or nobody, is made as well as it can be when the spare becomes a workspace.
        tracing::trace!(left = restored.left.len(), "a spare workspace was made");
        Ok(Spare { home: home.to_owned(), index: tracker.index.unwatched(), bytes })
    }

    /// Bytes of the files that it was made from.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Puts it in the place of a new, empty workspace and makes that equal to a tree. Nobody else may be in the new one; what is
    /// made and not ended is the caller's to remove.
    ///
    /// # Errors
    /// The folder is not empty; as [`Tracker::restore`].
    pub fn become_workspace(
        self,
        tree: TreeId,
        places: Places,
        objects: &dyn Objects,
        durable: Durable,
    ) -> Result<(Tracker, Restored)> {
        let path = &places.workspace;
        let swap = || -> io::Result<()> {
            fault::point("workspace.spare.place")?;
            // Goes only if it is empty.
            std::fs::remove_dir(path)?;
            std::fs::rename(self.home.join(WORKSPACE), path)
        };
        let swapped = swap();
        // What a making left in it is not needed.
        let _ = fs::remove_tree(&self.home);
        swapped.map_err(|error| WorkspaceError::io("put a spare workspace in the place of", path, error))?;
        let mut tracker = Tracker::seeded(places, self.index, Some(Changes::default()))?;
        tracker.settle_all();
        let restored = tracker.restore(tree, objects, durable)?;
        tracker.is_private = false;
        Ok((tracker, restored))
    }

    /// Removes it.
    ///
    /// # Errors
    /// What could not be removed; the next start of the daemon tries again.
    pub fn discard(self) -> io::Result<()> {
        fs::remove_tree(&self.home)
    }
}

const WORKSPACE: &str = "workspace";

fn places(home: &Path) -> Places {
    // The index of a spare is never saved.
    Places { workspace: home.join(WORKSPACE), staging: home.join("staging"), index: home.join("index") }
}
