//! Errors of the store, and what clients see of them.

use std::io;
use std::path::{Path, PathBuf};

use crate::core::error::{DISK_FULL, Error, ErrorCode};
use crate::core::ids::Digest;
use crate::sys::fs::{self, FsError};

/// A failed operation on the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No object has this address.
    #[error("there is no object {0}")]
    NotFound(Digest),
    /// An object's content does not match its address.
    #[error("object {digest} is damaged: {} at byte {offset}", path.display())]
    Damaged {
        /// Its address.
        digest: Digest,
        /// The file that holds it, or its damaged part.
        path: PathBuf,
        /// Where the damaged entry begins.
        offset: u64,
    },
    /// A part of an object is missing.
    #[error("object {digest} is damaged: its part {part} is lost")]
    Incomplete {
        /// Its address.
        digest: Digest,
        /// The address of the part.
        part: Digest,
    },
    /// An index file is damaged. Nothing is lost: the packs hold the same entries.
    #[error("index {} is damaged", path.display())]
    Index {
        /// Its file.
        path: PathBuf,
    },
    /// The header of a pack is damaged. Its entries are still readable.
    #[error("the beginning of {} is damaged", path.display())]
    Pack {
        /// Its file.
        path: PathBuf,
    },
    /// The store is open already, in this process or another.
    #[error("the store is in use: {} is locked", path.display())]
    InUse {
        /// The lock's file.
        path: PathBuf,
    },
    /// Entries were lost because the device failed for another writer: write them again.
    #[error("the device failed while this was written")]
    Unsynced,
    /// More bytes than allowed.
    #[error("object would be larger than {limit} bytes")]
    TooLarge {
        /// How many are allowed.
        limit: u64,
    },
    /// A range beyond the object.
    #[error("bytes {from} to {to} are not within object {digest} of {size} bytes")]
    Range {
        /// The object.
        digest: Digest,
        /// First byte requested.
        from: u64,
        /// First byte after the range.
        to: u64,
        /// The object's length.
        size: u64,
    },
    /// No room on the device or in the quota, or the process's file size limit.
    #[error("no room to write {}", path.display())]
    Full {
        /// The file.
        path: PathBuf,
    },
    /// The store, or one of its files, has a format that this release does not know.
    #[error("{} says format {found:?}; this ryokan reads format {known} only", path.display())]
    UnknownFormat {
        /// The file that names the format.
        path: PathBuf,
        /// The format found.
        found: String,
        /// The format that this release reads.
        known: u32,
    },
    /// A file operation failed.
    #[error(transparent)]
    Io(FsError),
    /// The worker thread ended.
    #[error("the store is stopping")]
    Stopped,
}

impl StoreError {
    /// The object concerned, if any.
    pub fn digest(&self) -> Option<Digest> {
        match self {
            StoreError::NotFound(digest)
            | StoreError::Damaged { digest, .. }
            | StoreError::Incomplete { digest, .. }
            | StoreError::Range { digest, .. } => Some(*digest),
            StoreError::Index { .. }
            | StoreError::Pack { .. }
            | StoreError::InUse { .. }
            | StoreError::Unsynced
            | StoreError::TooLarge { .. }
            | StoreError::Full { .. }
            | StoreError::UnknownFormat { .. }
            | StoreError::Io(_)
            | StoreError::Stopped => None,
        }
    }

    /// Classifies an I/O error.
    pub(super) fn io(op: &'static str, path: &Path, source: io::Error) -> StoreError {
        if fs::is_full(&source) {
            return StoreError::Full { path: path.to_owned() };
        }
        StoreError::Io(FsError { op, path: path.to_owned(), source })
    }
}

impl From<FsError> for StoreError {
    fn from(error: FsError) -> Self {
        StoreError::io(error.op, &error.path, error.source)
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Error {
        let (code, hint) = match &error {
            StoreError::NotFound(_) => (ErrorCode::NotFound, ""),
            StoreError::Damaged { .. }
            | StoreError::Incomplete { .. }
            | StoreError::Index { .. }
            | StoreError::Pack { .. } => (ErrorCode::Corrupt, "ryokan verify names everything that is damaged"),
            StoreError::InUse { .. } => (ErrorCode::Unavailable, "another ryokand runs with this data"),
            StoreError::Unsynced => (ErrorCode::Busy, "try again; look at the device if it comes again"),
            StoreError::TooLarge { .. } | StoreError::Range { .. } => (ErrorCode::InvalidArgument, ""),
            StoreError::Full { .. } => (ErrorCode::Busy, "free space on the device or raise the quota, then try again"),
            StoreError::UnknownFormat { .. } => {
                (ErrorCode::Unsupported, "run the ryokan that wrote this store; formats are not converted")
            }
            StoreError::Io(_) => (ErrorCode::Internal, ""),
            StoreError::Stopped => (ErrorCode::Unavailable, "the daemon is stopping"),
        };
        let message = match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        let reason = if matches!(error, StoreError::Full { .. }) { DISK_FULL } else { "" };
        Error::new(code, message).hint(hint).reason(reason)
    }
}
