//! Trees: file trees by content, and what can be asked of them without a file system.
//!
//! `entry` what a tree says, `format` the bytes, `read` folder after folder, `look` one entry, `diff` two of them, `reach` the objects of one.

pub mod diff;
pub mod entry;
pub mod format;
pub mod lookup;
pub mod needs;
pub mod reach;
pub mod read;
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
