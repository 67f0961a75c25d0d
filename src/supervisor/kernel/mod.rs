//! One kernel: its handle, the task that owns it, its journal and its live output.

pub(crate) mod archive_steps;
pub mod command;
pub(crate) mod disk;
pub mod engine_state;
pub mod execution;
pub(crate) mod file_room;
pub mod handle;
pub mod journal;
pub mod lease;
pub mod output;
pub mod ports;
pub(crate) mod processes;
mod requests;
pub mod services;
pub(crate) mod sharing;
pub(crate) mod task;
pub mod tools;
pub(crate) mod transition;

mod work;

pub use handle::{Kernel, View};
pub(crate) use work::work_detail;
