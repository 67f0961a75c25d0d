//! Errors of workspaces, and what clients see of them.

use std::io;
use std::path::{Path, PathBuf};

use super::tree::format::FormatError;
use crate::core::error::{Error, ErrorCode};
use crate::core::ids::Digest;
use crate::store::StoreError;
use crate::sys::fs::{self, FsError};

/// A failed operation on a workspace.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// A file changed during every attempt to read it.
    #[error("{} changes while it is read", path.display())]
    Changing {
        /// Its path in the workspace.
        path: PathBuf,
    },
    /// A limit of trees is exceeded.
    #[error("the workspace has more than {limit} {what}")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// An object is not a valid tree object.
    #[error("object {digest} cannot be read as part of a tree")]
    Tree {
        /// The object.
        digest: Digest,
        /// Why.
        #[source]
        source: FormatError,
    },
    /// The store failed.
    #[error("the store cannot do its part")]
    Store(#[from] StoreError),
    /// No room on the workspace's device.
    #[error("no room to write {}", path.display())]
    Full {
        /// The file.
        path: PathBuf,
    },
    /// After a restore the workspace differs from the tree: something else writes to it.
    #[error("{} is not what it was restored to", path.display())]
    NotRestored {
        /// Its path in the workspace.
        path: PathBuf,
    },
    /// The staging folder is on another file system.
    #[error("{} is on another file system than the workspace", path.display())]
    Staging {
        /// The folder.
        path: PathBuf,
    },
    /// A checkout needs an empty folder.
    #[error("{} is not empty", path.display())]
    NotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// The path is no readable regular file.
    #[error("{} cannot be read from the workspace", path.display())]
    NoFile {
        /// The path as given.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The files are not on this host, and could not be brought here or back.
    #[error(transparent)]
    Elsewhere(Error),
    /// A file operation failed.
    #[error(transparent)]
    Io(FsError),
}

impl WorkspaceError {
    /// Classifies an I/O error.
    pub(super) fn io(op: &'static str, path: &Path, source: io::Error) -> WorkspaceError {
        if fs::is_full(&source) {
            return WorkspaceError::Full { path: path.to_owned() };
        }
        WorkspaceError::Io(FsError { op, path: path.to_owned(), source })
    }

    /// A closure that classifies errors of `op` on `path`.
    pub(super) fn of<E: Into<io::Error>>(op: &'static str, path: &Path) -> impl FnOnce(E) -> WorkspaceError {
        move |source| WorkspaceError::io(op, path, source.into())
    }
}

impl From<FsError> for WorkspaceError {
    fn from(error: FsError) -> Self {
        WorkspaceError::io(error.op, &error.path, error.source)
    }
}

impl From<WorkspaceError> for Error {
    fn from(error: WorkspaceError) -> Error {
        let (code, hint) = match error {
            WorkspaceError::Store(error) => return error.into(),
            WorkspaceError::Elsewhere(error) => return error,
            WorkspaceError::Changing { .. } | WorkspaceError::NotRestored { .. } => {
                (ErrorCode::Busy, "something outside the kernel writes to its workspace")
            }
            WorkspaceError::TooMany { .. } => (ErrorCode::InvalidArgument, "remove files: it is a fixed limit"),
            WorkspaceError::Tree { .. } => (ErrorCode::Corrupt, "ryokan verify names everything that is damaged"),
            WorkspaceError::Full { .. } => {
                (ErrorCode::Busy, "free space on the device or raise the quota, then try again")
            }
            WorkspaceError::Staging { .. } => (ErrorCode::Unsupported, "keep a kernel's folder on one file system"),
            WorkspaceError::NoFile { ref source, .. } if source.kind() == io::ErrorKind::NotFound => {
                (ErrorCode::NotFound, "name a file by its path in the workspace")
            }
            WorkspaceError::NoFile { .. } => (ErrorCode::InvalidArgument, "name a regular file of the workspace"),
            WorkspaceError::NotEmpty { .. } => (ErrorCode::InvalidArgument, ""),
            WorkspaceError::Io(_) => (ErrorCode::Internal, ""),
        };
        let message = match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        Error::new(code, message).hint(hint)
    }
}
