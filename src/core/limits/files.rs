//! Limits of access to a kernel's files from outside.

use std::time::Duration;

/// Open readers and writers of one kernel's files; further ones fail as `busy`.
pub const FILES_OPEN: usize = 128;
/// Path of a file, bytes: the host's own limit without its terminating zero.
pub const FILE_PATH_BYTES: usize = 4095;
/// One name in a path, bytes.
pub const FILE_NAME_BYTES: usize = 255;
/// Target of a symbolic link, bytes.
pub const LINK_TARGET_BYTES: usize = 4095;
/// Attempts to resolve a path whose directories are being renamed.
pub const FILE_RESOLVE_ATTEMPTS: usize = 64;
/// Entries of a directory that are read ahead for a listing.
pub const FILE_LIST_PAGE: usize = 256;
/// Directories that one call watches.
pub const WATCHED_DIRECTORIES: usize = 4096;
/// Entries that are read to find them at once: when a watch begins, and for one batch of its events.
pub const WATCHED_ENTRIES: usize = 1_000_000;
/// Watches of one kernel's files. Each takes one of the host's inotify instances, of which a user has 128 as a rule.
pub const FILE_WATCHES: usize = 4;
/// Watches of all kernels' files; captures of workspaces need the other instances.
pub const FILE_WATCHES_IN_ALL: usize = 48;
/// Events that are reported together. A directory that appears with more than four times as many entries is reported as
/// an overflow.
pub const FILE_EVENT_BATCH: usize = 1024;
/// Pause after reported events, in which equal ones are merged.
pub const FILE_EVENT_PAUSE: Duration = Duration::from_millis(20);
/// How often a watched directory is compared with what its path leads to.
pub const FILE_WATCH_CHECK: Duration = Duration::from_secs(1);
/// Pause between two requests for the events of a watch in a virtual machine.
pub const GUEST_WATCH_PAUSE: Duration = Duration::from_millis(100);
/// Nesting of directories in a copy.
pub const COPY_DEPTH: usize = 1024;
/// Bytes of a file that `ryokan edit` opens.
pub const EDITED_BYTES: u64 = 64 << 20;
/// Age at which a count of a workspace's bytes is repeated before a client writes.
pub const FILES_COUNT_AGE: Duration = Duration::from_secs(10);
/// Files and directories that a count visits; clients cannot write to a larger workspace.
pub const FILES_COUNTED: usize = 4_000_000;
