//! How a capture was done: what a result says of its cost, and of what made it dearer than it had to be.

use std::fmt;
use std::io;
use std::time::Duration;

/// Why everything was walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FullScanReason {
    /// Nothing was known of the workspace.
    First,
    /// What was known is from a former process: each thing was looked at, what had not changed was not read.
    Reopened,
    /// What was saved of it was damaged, of another format, or of another folder.
    Unusable,
    /// More changed than the host's queue of notifications holds.
    Overflow,
    /// More changed than is kept in memory.
    TooManyChanges,
    /// The capture or restore before did not come to its end.
    Unfinished,
    /// Nobody tells of changes: see [`CaptureStats::unwatched`].
    Unwatched,
}

impl fmt::Display for FullScanReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FullScanReason::First => "nothing was known of the workspace",
            FullScanReason::Reopened => "the daemon was started since",
            FullScanReason::Unusable => "the saved index could not be used",
            FullScanReason::Overflow => "more changed than the host's queue holds",
            FullScanReason::TooManyChanges => "more changed than is kept in memory",
            FullScanReason::Unfinished => "the operation before did not end",
            FullScanReason::Unwatched => "changes are not told",
        })
    }
}

/// Why changes are not told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwatched {
    /// The user has as many watches as `fs.inotify.max_user_watches` allows.
    Watches,
    /// The user has as many queues as `fs.inotify.max_user_instances` allows.
    Queues,
    /// The file system or the kernel cannot.
    Unsupported,
}

impl Unwatched {
    pub(super) fn of(error: &io::Error) -> Unwatched {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::ENOMEM) => Unwatched::Watches,
            Some(libc::EMFILE | libc::ENFILE) => Unwatched::Queues,
            Some(_) | None => Unwatched::Unsupported,
        }
    }
}

impl fmt::Display for Unwatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unwatched::Watches => "fs.inotify.max_user_watches is used up",
            Unwatched::Queues => "fs.inotify.max_user_instances is used up",
            Unwatched::Unsupported => "the host cannot tell of changes here",
        })
    }
}

/// How a capture was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CaptureStats {
    /// Why everything was walked; nothing: only what changed was looked at.
    pub full_scan: Option<FullScanReason>,
    /// Why changes are not told.
    pub unwatched: Option<Unwatched>,
    /// Entries that were looked at.
    pub examined: u64,
    /// Files that were read.
    pub read: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Files of which a clone was made while nobody wrote, and read later.
    pub cloned: u64,
    /// How long nobody was to write.
    pub pause: Duration,
}
