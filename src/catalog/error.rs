//! Database errors, and what clients see of them.

use std::io;
use std::path::{Path, PathBuf};

use rusqlite::ErrorCode as Sqlite;

use crate::core::error::{DISK_FULL, Error, ErrorCode};
use crate::sys::fs::{self, FsError};

/// A failed database operation.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// No such record.
    #[error("there is no {0}")]
    NotFound(String),
    /// The name or key is taken.
    #[error("{0} is there already")]
    Exists(String),
    /// The record is not in the expected state.
    #[error("{0}")]
    Conflict(String),
    /// A rule of `core` refused the change.
    #[error("{0}")]
    Refused(Box<Error>),
    /// A bound of `core::limits` is reached.
    #[error("{what} would exceed {most}")]
    Limit {
        /// Which bound.
        what: &'static str,
        /// Its value.
        most: u64,
    },
    /// The queue to the database's thread is full.
    #[error("the queue of the database thread is full")]
    Busy,
    /// The database's thread has ended.
    #[error("the database thread has ended")]
    Stopped,
    /// The file is damaged, or a database of another kind.
    #[error("{} is damaged: {why}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The damage.
        why: String,
    },
    /// A later release wrote the file.
    #[error("{} has format {found}, made by a newer ryokan; this one knows formats up to {known}", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: i64,
        /// The latest known format.
        known: i64,
    },
    /// The file does not exist.
    #[error("{} is not there", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// Another process has the database open.
    #[error("{} is in use by another process", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// No room on the device, in the quota or under the process's file size limit.
    #[error("no room to write {}", path.display())]
    Full {
        /// The file.
        path: PathBuf,
    },
    /// The file or its directory cannot be written.
    #[error("{} cannot be written: file or directory is read-only", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
    },
    /// A file operation failed.
    #[error(transparent)]
    File(FsError),
    /// Any other SQLite error.
    #[error("cannot {op} in {}", path.display())]
    Sqlite {
        /// The operation.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// SQLite's message.
        #[source]
        source: rusqlite::Error,
    },
}

impl CatalogError {
    /// Classifies an SQLite error.
    pub(super) fn of_sqlite(op: &'static str, path: &Path, source: rusqlite::Error) -> CatalogError {
        let path = path.to_owned();
        match source.sqlite_error_code() {
            Some(Sqlite::DatabaseCorrupt | Sqlite::NotADatabase) => {
                CatalogError::Corrupt { path, why: format!("{source} (while trying to {op})") }
            }
            Some(Sqlite::DatabaseBusy | Sqlite::DatabaseLocked) => CatalogError::InUse { path },
            Some(Sqlite::DiskFull) => CatalogError::Full { path },
            Some(Sqlite::ReadOnly) => CatalogError::ReadOnly { path },
            // Its other causes (no free descriptor, for one) keep SQLite's message.
            Some(Sqlite::CannotOpen) if !is_writable(&path) => CatalogError::ReadOnly { path },
            Some(Sqlite::SystemIoFailure) if source.sqlite_error().is_some_and(|e| e.extended_code == SHORT_READ) => {
                CatalogError::Corrupt { path, why: String::from("the file is shorter than its content says") }
            }
            _ => match source {
                // A column holds a value of a wrong type.
                rusqlite::Error::FromSqlConversionFailure(..) | rusqlite::Error::InvalidColumnType(..) => {
                    CatalogError::Corrupt { path, why: format!("{source} (while trying to {op})") }
                }
                source => CatalogError::Sqlite { op, path, source },
            },
        }
    }

    /// Classifies an error of a file operation.
    pub(super) fn of_io(op: &'static str, path: &Path, source: io::Error) -> CatalogError {
        if fs::is_full(&source) {
            return CatalogError::Full { path: path.to_owned() };
        }
        match source.kind() {
            io::ErrorKind::NotFound => CatalogError::Missing { path: path.to_owned() },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                CatalogError::ReadOnly { path: path.to_owned() }
            }
            _ => CatalogError::File(FsError { op, path: path.to_owned(), source }),
        }
    }

    /// The file of the failure.
    fn path(&self) -> Option<&Path> {
        use CatalogError as E;
        match self {
            E::Corrupt { path, .. }
            | E::Full { path }
            | E::ReadOnly { path }
            | E::InUse { path }
            | E::Missing { path }
            | E::Newer { path, .. }
            | E::Sqlite { path, .. } => Some(path),
            E::File(error) => Some(&error.path),
            E::Busy | E::Stopped | E::NotFound(_) | E::Exists(_) | E::Conflict(_) | E::Refused(_) | E::Limit { .. } => {
                None
            }
        }
    }

    /// A stored field with an impossible value.
    pub(super) fn field(path: &Path, what: &str) -> CatalogError {
        CatalogError::Corrupt { path: path.to_owned(), why: format!("{what} cannot be read") }
    }

    /// A copy of the failure, for another request of the same transaction.
    pub(super) fn again(&self) -> CatalogError {
        use CatalogError as E;
        match self {
            E::Corrupt { path, why } => E::Corrupt { path: path.clone(), why: why.clone() },
            E::Full { path } => E::Full { path: path.clone() },
            E::ReadOnly { path } => E::ReadOnly { path: path.clone() },
            E::InUse { path } => E::InUse { path: path.clone() },
            E::Missing { path } => E::Missing { path: path.clone() },
            E::Newer { path, found, known } => E::Newer { path: path.clone(), found: *found, known: *known },
            E::Busy => E::Busy,
            E::Stopped => E::Stopped,
            E::NotFound(what) => E::NotFound(what.clone()),
            E::Exists(what) => E::Exists(what.clone()),
            E::Conflict(what) => E::Conflict(what.clone()),
            E::Refused(error) => E::Refused(error.clone()),
            E::Limit { what, most } => E::Limit { what, most: *most },
            E::File(error) => {
                let source = io::Error::new(error.source.kind(), error.source.to_string());
                E::File(FsError { op: error.op, path: error.path.clone(), source })
            }
            E::Sqlite { op, path, source } => {
                let code = source.sqlite_error().map_or(rusqlite::ffi::SQLITE_ERROR, |e| e.extended_code);
                let source = rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), Some(source.to_string()));
                E::Sqlite { op, path: path.clone(), source }
            }
        }
    }
}

/// Whether the path means nothing to a user: a worker's to the database of its engine, through a descriptor or inside a
/// virtual machine.
fn is_internal(path: &Path) -> bool {
    path.starts_with("/proc/self/fd") || path.starts_with("/data/kernel")
}

/// Whether file and directory are both writable: SQLite needs both.
fn is_writable(path: &Path) -> bool {
    let may = |path: &Path| nix::unistd::access(path, nix::unistd::AccessFlags::W_OK).is_ok();
    may(path) && path.parent().is_none_or(may)
}

const SHORT_READ: i32 = rusqlite::ffi::SQLITE_IOERR_SHORT_READ;

impl From<FsError> for CatalogError {
    fn from(error: FsError) -> Self {
        CatalogError::of_io(error.op, &error.path, error.source)
    }
}

impl From<CatalogError> for Error {
    fn from(error: CatalogError) -> Error {
        use CatalogError as E;
        let (code, hint) = match &error {
            E::NotFound(_) => (ErrorCode::NotFound, ""),
            E::Exists(_) => (ErrorCode::AlreadyExists, ""),
            E::Refused(error) => return Error::clone(error),
            E::Conflict(_) => (ErrorCode::Conflict, "look at the present state and decide again"),
            E::Limit { .. } => (ErrorCode::InvalidArgument, ""),
            E::Busy => (ErrorCode::Busy, "try again in a moment"),
            E::Stopped => (ErrorCode::Unavailable, "the daemon is stopping"),
            E::Corrupt { .. } | E::Missing { .. } => {
                (ErrorCode::Corrupt, "ryokan verify names everything that is damaged; nothing else was touched")
            }
            E::Newer { .. } => (ErrorCode::Unsupported, "use that newer ryokan; data is never converted backwards"),
            E::InUse { .. } => (ErrorCode::Unavailable, "another ryokand runs on the same data; stop one of them"),
            E::Full { .. } => (ErrorCode::Busy, "free space on the device or raise the quota, then try again"),
            E::ReadOnly { .. } => (ErrorCode::Refused, "give the daemon's user the right to write there"),
            E::File(_) | E::Sqlite { .. } => (ErrorCode::Internal, ""),
        };
        let mut message = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(inner) = cause {
            message = format!("{message}: {inner}");
            cause = inner.source();
        }
        if let Some(path) = error.path().filter(|path| is_internal(path)) {
            message = message.replace(&*path.to_string_lossy(), "the engine's state");
        }
        let reason = if matches!(error, E::Full { .. }) { DISK_FULL } else { "" };
        Error::new(code, message).hint(hint).reason(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_paths_are_not_shown() {
        let path = || PathBuf::from("/proc/self/fd/28/engine.db");
        let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_IOERR);
        let source = rusqlite::Error::SqliteFailure(code, Some(format!("disk I/O error: {}", path().display())));
        let spooled = FsError { op: "read", path: "/proc/self/fd/28".into(), source: io::Error::other("odd") };
        for error in [
            CatalogError::Full { path: path() },
            CatalogError::Sqlite { op: "write", path: path(), source },
            CatalogError::File(spooled),
        ] {
            let message = Error::from(error).message;
            assert!(message.contains("the engine's state") && !message.contains("/proc"), "{message}");
        }
        let message = Error::from(CatalogError::Full { path: "/data/kernels/k/state.db".into() }).message;
        assert_eq!(message, "no room to write /data/kernels/k/state.db");
    }
}
