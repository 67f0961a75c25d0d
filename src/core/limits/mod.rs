//! The bounds of ryokan, each named once, by domain.
//!
//! Every queue, message, file and wait has a constant here; one without is a defect.

mod bundle;
mod catalog;
mod checkpoint;
mod client;
mod daemon;
mod execution;
mod files;
mod freeze;
mod handover;
mod kernel;
mod pool;
mod store;
mod worker;
mod workspace;

pub use bundle::*;
pub use catalog::*;
pub use checkpoint::*;
pub use client::*;
pub use daemon::*;
pub use execution::*;
pub use files::*;
pub use freeze::*;
pub use handover::*;
pub use kernel::*;
pub use pool::*;
pub use store::*;
pub use worker::*;
pub use workspace::*;
