//! Statistics of a capture: its cost, and the reasons for avoidable cost.

use std::fmt;
use std::io;
use std::time::Duration;

/// Why a pass scanned everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FullScanReason {
    /// The workspace was unknown.
    First,
    /// The index is of an earlier process: every entry was checked, unchanged files were not read.
    Reopened,
    /// The saved index was damaged, of another format, or of another folder.
    Unusable,
    /// The host's event queue overflowed.
    Overflow,
    /// Too many changes for the memory limit.
    TooManyChanges,
    /// The previous capture or restore did not finish.
    Unfinished,
    /// Changes are not watched: see [`CaptureStats::unwatched`].
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
            FullScanReason::Unwatched => "changes are not watched",
        })
    }
}

/// Why changes are not watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwatched {
    /// `fs.inotify.max_user_watches` is used up.
    Watches,
    /// `fs.inotify.max_user_instances` is used up.
    Queues,
    /// The file system or the host kernel does not support it.
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
            Unwatched::Unsupported => "the host has no change notifications here",
        })
    }
}

/// Statistics of a capture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CaptureStats {
    /// Why everything was scanned; `None`: only changed entries were checked.
    pub full_scan: Option<FullScanReason>,
    /// Why changes are not watched.
    pub unwatched: Option<Unwatched>,
    /// Entries checked.
    pub examined: u64,
    /// Files read.
    pub read: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Files cloned while frozen, and read later.
    pub cloned: u64,
    /// Time for which writers had to be stopped.
    pub pause: Duration,
}
