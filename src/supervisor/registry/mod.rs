//! The set of kernels: created, found, forked, shared, imported, recovered, removed.

pub mod bundle_io;
pub(crate) mod create_from;
pub mod fork;
pub(crate) mod idempotency;
mod idle;
mod images;
mod journal_io;
mod kernels;
pub mod recovery;
mod removal;
mod rename;
mod resume;
pub mod share;
mod supervisor;
pub mod teleport;
mod update;

pub use kernels::{Registry, SocketPublisher};
pub(crate) use supervisor::ReservedName;
pub use supervisor::Supervisor;
