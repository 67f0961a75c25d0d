//! Checkpoints: taken, found, restored, undone.
//!
//! ```text
//! take:     safe point ─▶ engine saves ─▶ freeze ─▶ files ─▶ thaw ─▶ manifest ─▶ row and journal entry: visible
//! restore:  capture the present state ─▶ verify the objects that differ ─▶ safety checkpoint of the present state
//!           ─▶ the transition is recorded ─▶ files, state ─▶ mounts, row, journal entry: done
//! ```
//!
//! Every object that a row refers to is stored before the row. An interrupted restore is ended before code runs:
//! finished if possible, else reverted to the safety checkpoint.

mod archive;
mod before_stop;
mod client_files;
mod compare;
mod files;
mod gather;
mod handover;
pub(crate) mod held_kernel;
mod lookup;
pub(crate) mod machine;
mod machine_copy;
mod memory;
mod pruning;
mod queue_ticket;
mod quiesce;
mod records;
mod restore;
mod restore_steps;
mod restore_stopped;
mod staged_state;
mod state;
mod suspend;
mod take;
mod text;
mod verify;
pub mod workflow;

pub use archive::{archive, unarchive};
pub(crate) use before_stop::Checkpoints;
pub use client_files::{ClientFile, ClientFiles, ClientWrite};
pub use compare::diff;
pub(crate) use compare::{diff_trees, environment_now, revisions_now};
pub(crate) use files::{FileDonor, donor, fill, fill_from, used_bytes};
pub(crate) use handover::while_frozen;
pub use lookup::find;
pub(crate) use lookup::{contents, manifest_of};
pub(super) use machine_copy::copy_machine;
pub(super) use pruning::{ReadPin, pin_for_read, prune};
pub use pruning::{pin, remove, set_retention};
pub use restore::{Asked, restore, undo, undo_target};
pub(crate) use staged_state::{StagedState, load_engine_from};
pub(crate) use state::load_engine;
pub use suspend::{Suspension, suspend};
pub use take::take;
pub(crate) use take::{encode, take_with};
pub use text::diff_text;
