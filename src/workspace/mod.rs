//! Workspaces: captures a kernel's file tree into the store, and restores a tree.
//!
//! A tree is content-addressed like git's (`tree`): trees share equal objects, and a comparison descends only where
//! digests differ. A [`Tracker`] follows one live workspace, so that the cost of a capture follows the changes since
//! the last one, not the size. Where that is impossible, everything is scanned; the result says so ([`CaptureStats`]).
//!
//! ```text
//!  tracker   one live workspace: prepare, collect (frozen), finish; restore
//!   ├ scan           updates the index: by reported changes (changes), or by a full scan
//!   │  ├ beneath        opens and stats, never through a link, never outside the workspace
//!   │  ├ capture_file   one file: known, deferred, or read
//!   │  ├ dir_identity   detects replaced folders
//!   │  ├ rescan         checks all known files
//!   │  └ read           stores a file: inline, whole, or as pieces and holes
//!   ├ driver         holds bytes while frozen, and copies them, as the file system can
//!   ├ deferred_reads what is stored after writers run again
//!   ├ index          the known entries       saved: between processes
//!   ├ encode         builds a tree from the index: only what changed
//!   └ restore        applies the differences from a tree       stage: files prepared in private
//!  branch    a new workspace from a live one: a snapshot, or a checkout that takes files from there
//!  files     what clients read of it and change in it, by path       watch: events of its directories
//!  prepared  a copy made ahead for the next branch
//!  checkout  a tree into a new folder, by several threads
//!  tree      entries, format, diff, needs, reach: no file system
//! ```
//! Untrusted code owns the workspace. This module never follows a symbolic link in it, runs anything, or creates
//! set-uid files or devices. All of it blocks.

mod access;
mod beneath;
mod branch;
mod capture_file;
mod capture_stats;
mod changes;
mod checkout;
mod deferred_reads;
mod dir_identity;
mod driver;
mod encode;
mod error;
mod files;
mod files_change;
mod index;
mod objects;
mod paths;
mod prepared;
mod read;
mod read_file;
mod rescan;
mod restore;
mod saved;
mod scan;
mod stage;
mod tracker;
pub mod tree;
mod watch;

pub use access::Workspace;
pub use beneath::has_file;
pub use branch::{Branched, Donor, Snapshot, branch};
pub use capture_stats::{CaptureStats, FullScanReason, Unwatched};
pub use checkout::checkout;
pub use driver::{DriverChoice, DriverKind, FsAbilities, abilities, doctor, file_system_name};
pub use error::WorkspaceError;
pub use files::{LinkedFiles, Listing, LocalFiles, disk_bytes, disk_bytes_beyond};
pub use files_change::NewFile;
pub use objects::{CountingObjects, ObjectBatch, Objects, SharedBatch};
pub use paths::WorkspacePaths;
pub use prepared::PreparedWorkspace;
pub use read_file::read_file;
pub use restore::Restored;
pub use tracker::{Captured, Collected, NotCaptured, Tracker};
pub use tree::TreeId;
pub use tree::diff::{Change, ChangeKind, Changed, Diff, diff};
pub use tree::entry::Reason;
pub use tree::lookup::{Text, find, text};
pub use tree::needs::needs;
pub use tree::reach::{Seen, reach};
pub use tree::repositories::{Barren, revisions};
pub use tree::size::{Size, Sizes};
pub use watch::Watch;

pub use crate::core::durability::Durability;

#[cfg(test)]
mod driver_tests;
#[cfg(test)]
mod meanwhile_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod refused_tests;
#[cfg(test)]
mod restore_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tracker_tests;
