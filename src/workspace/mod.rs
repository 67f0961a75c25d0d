//! Workspaces: captures a kernel's file tree into the store and brings a tree back.
//!
//! A tree is content-addressed like git's (`tree`): what two trees share they share as objects, and they are compared by
//! walking only where digests differ. A [`Tracker`] follows one live workspace, so that a capture costs what changed since
//! the last one, not what is there. What is weaker than that (a walk over everything) is visible in the result ([`How`]).
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

mod beneath;
mod branch;
mod changes;
mod checkout;
mod driver;
mod encode;
mod error;
mod how;
mod index;
mod keep;
mod noted;
mod objects;
mod one;
mod read;
mod restore;
mod saved;
mod scan;
mod spare;
mod stage;
mod sweep;
mod take;
mod tracker;
pub mod tree;

pub use branch::{Branched, Donor, Snapshot, branch};
pub use checkout::checkout;
pub use driver::{Choice, DriverKind, FsAbilities, abilities, doctor};
pub use error::WorkspaceError;
pub use how::{How, Unwatched, Walk};
pub use objects::{Counted, ObjectBatch, Objects, Together};
pub use one::read_file;
pub use restore::Restored;
pub use spare::Spare;
pub use tracker::{Captured, Collected, NotCaptured, Places, Tracker};
pub use tree::TreeId;
pub use tree::diff::{Change, Changed, Deed, Diff, diff};
pub use tree::entry::Reason;
pub use tree::look::{Text, find, text};
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
