//! What git's trees do not say of the files of a repository.

use serde::{Deserialize, Serialize};

/// Paths of files within a repository.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FileMarks {
    /// Marked with `git update-index --assume-unchanged`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub assume_unchanged: Vec<String>,
    /// Marked with `git update-index --skip-worktree`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skip_worktree: Vec<String>,
    /// Not readable by other users, among those that differ from the commit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub private: Vec<String>,
}

impl FileMarks {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        *self == FileMarks::default()
    }
}
