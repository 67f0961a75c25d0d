//! Workspaces: captures a kernel's file tree into the store and brings a tree back.
//!
//! A tree is content-addressed like git's (`tree`): what two trees share they share as objects, and they are compared by
//! walking only where digests differ. A [`Tracker`] follows one live workspace, so that a capture costs what changed since
//! the last one, not what is there. What is weaker than that (a walk over everything) is visible in the result ([`CaptureStats`]).
//!
//! ```text
//!  tracker   one live workspace: prepare, collect (frozen), finish; restore
//!   ├ scan       brings the index up to what is there: by what was told (changes), or by a walk
//!   │  ├ beneath     opening and looking, never through a link, never out of the workspace
//!   │  ├ take        one file: known, kept, or read
//!   │  └ read        its bytes into the store: inline, whole, or pieces and holes
//!   ├ driver     how bytes are held while nobody writes, and copied: what the file system can      keep: until they are stored
//!   ├ index      what is known of every entry     saved: between processes
//!   ├ encode     a tree of the index: only what changed
//!   └ restore    what differs from a tree, put in place        stage: files prepared where nobody else is
//!  branch      a new workspace from a live one: a snapshot, or a checkout that takes files from there
//!  checkout  a tree into a new folder, by several threads
//!  tree      entries, format, diff, needs, reach: no file system
//! ```
//! Untrusted code owns the workspace. Nothing here follows a symbolic link in it, runs anything, or makes set-uid files or
//! devices. All of it blocks.

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

pub use access::Workspace;
pub use branch::{Branched, Donor, Snapshot, branch};
pub use capture_stats::{CaptureStats, FullScanReason, Unwatched};
pub use checkout::checkout;
pub use driver::{DriverChoice, DriverKind, FsAbilities, abilities, doctor};
pub use error::WorkspaceError;
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
pub use tree::size::{Size, Sizes};

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
