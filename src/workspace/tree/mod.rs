//! Trees: content-addressed file trees, and operations on them without a file system.
//!
//! `entry` an entry, `format` the encoding, `read` folder by folder, `lookup` one entry, `diff` two trees, `needs` and
//! `reach` objects.

pub mod diff;
pub mod entry;
pub mod format;
pub mod lookup;
pub mod needs;
pub mod reach;
pub mod read;
pub mod repositories;
pub mod size;

use crate::core::ids::Digest;

/// The address of a tree: of its root object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct TreeId(pub Digest);

impl std::fmt::Display for TreeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
