//! Checkpoints: taken, found, restored, undone.
//!
//! ```text
//! take:     wait for the safe point ─▶ engine saves ─▶ freeze ─▶ files ─▶ thaw ─▶ manifest ─▶ row and journal entry: visible
//! restore:  gather what is now ─▶ read what differs and will be needed ─▶ safety checkpoint of what was gathered
//!           ─▶ the transition is recorded ─▶ files, state ─▶ mounts, row, journal entry: done
//! ```
//!
//! Everything that a row names is in the store before the row is. A restore that was interrupted is ended before code runs:
//! finished if that is possible, else reverted to the safety checkpoint.

mod archive;
mod before_stop;
mod compare;
mod files;
mod gather;
mod lookup;
mod memory;
mod pruning;
mod queue_ticket;
mod quiesce;
mod records;
mod restore;
mod state;
mod take;
mod text;
mod verify;
pub mod workflow;

pub use archive::{archive, unarchive};
pub(crate) use before_stop::Checkpoints;
pub use compare::diff;
pub(crate) use files::{FileDonor, donor, fill};
pub use lookup::find;
pub(crate) use lookup::{contents, manifest_of};
pub(super) use pruning::{ReadPin, hold, prune};
pub use pruning::{pin, remove, set_retention};
pub use restore::{restore, undo};
pub(crate) use state::load_engine;
pub use take::take;
pub(crate) use take::{encode, take_with};
pub use text::diff_text;
