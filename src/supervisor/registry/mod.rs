//! The set of kernels: created, found, forked, shared, imported, recovered, removed.

pub mod bundle_io;
pub(crate) mod create_from;
pub mod fork;
mod from_dir;
pub(crate) mod idempotency;
pub mod recovery;
pub mod share;
mod supervisor;

pub use supervisor::Supervisor;
