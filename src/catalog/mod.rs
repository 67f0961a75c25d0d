//! Everything that ryokan stores in SQLite, and the only SQL.
//!
//! | database | kept by | what |
//! |---|---|---|
//! | `catalog.db` | daemon, one thread | host, kernels, workers, idempotency keys, events, audit log, handovers |
//! | `kernels/<id>/state.db` | daemon, [`STATE_THREADS`](crate::core::limits::STATE_THREADS) threads | journal, executions, mounts, grants, lease, consents |
//! | `kernels/<id>/engine.db` | the worker's init; the daemon while no worker lives | engine state |
//!
//! [`Catalog`] owns the threads, [`CatalogHandle`] and [`StateHandle`] send them requests, [`EngineDb`] is synchronous
//! and belongs to its opener. Never decides anything about kernels, and never touches the store.

mod audit;
mod engine_db;
mod error;
mod events;
mod files;
mod freeze_pins;
mod freeze_removal;
mod group_imports;
mod group_moves;
mod group_pauses;
mod groups;
mod handle;
mod handovers;
pub mod host_database;
mod kernels;
mod keys;
mod open_databases;
pub mod pinned_database;
mod row;
mod signing;
mod sqlite;
pub mod state;
mod sums;
mod thread;
mod workers;

pub use audit::AuditFilter;
pub use engine_db::{Applied, Changes, EngineDb, EngineInfo, Entry, EntryHead, Inspected, JobRecord};
pub use error::CatalogError;
pub use events::{EventPage, NewEvent};
pub use files::{KernelFiles, sweep_kernels};
pub use group_moves::GroupMoveRow;
pub use groups::NewFreeze;
pub use handle::{Catalog, CatalogConfig, CatalogHandle, Notes, Written};
pub use handovers::HandoverRow;
pub use kernels::{Created, KernelChange, KernelRow};
pub use keys::IdempotencyKey;
pub use sqlite::{Db, Kind};
pub use state::StateHandle;
pub use thread::Pending;
pub use workers::WorkerRow;

pub use crate::core::audit::{AuditBreak, AuditHead, AuditLine, NewAudit};
pub use crate::core::durability::Durability;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod migration_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod record_tests;
