//! Recognises a file without reading it: a write or an exchange changes its stamp.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A file at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    inode: u64,
    pub bytes: u64,
    changed_s: i64,
    changed_ns: i64,
}

impl Stamp {
    /// The stamp of the file with that name; no link is followed.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn of(path: &Path) -> std::io::Result<Stamp> {
        path.symlink_metadata().map(|found| Stamp::from(&found))
    }

    /// The stamp of an open file.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn of_file(file: &File) -> std::io::Result<Stamp> {
        file.metadata().map(|found| Stamp::from(&found))
    }
}

impl From<&Metadata> for Stamp {
    fn from(found: &Metadata) -> Stamp {
        // Not the time of its attributes: another name of the file changes that.
        let (changed_s, changed_ns) = (found.mtime(), found.mtime_nsec());
        Stamp { inode: found.ino(), bytes: found.len(), changed_s, changed_ns }
    }
}
