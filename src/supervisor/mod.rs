//! One task per kernel, recovery at start-up, and what they share.
//!
//! ```text
//! rpc ─▶ Supervisor: create, find, list, remove          host.rs     what all kernels share
//!          │                                             recovery.rs what a former daemon left
//!          └─ Kernel (door) ─ Command ─▶ task/ ─ Life ─▶ worker.rs, output.rs, records.rs, tools.rs
//! ```

pub mod admission;
pub mod audit;
mod begin;
mod cgroups;
pub mod checkpoint;
pub mod command;
pub mod environment;
pub mod events;
pub mod execution;
pub mod fork;
mod from_dir;
pub mod host;
pub mod kernel;
mod keys;
pub mod lease;
mod metrics;
pub mod output;
pub mod pool;
pub mod portable;
mod pressure;
mod promise;
pub mod records;
pub mod recovery;
mod reserve;
mod sessions;
mod slot;
pub mod snapshot;
mod spares;
mod start;
#[expect(clippy::module_inception, reason = "the module is named for the layer, the file for its type")]
pub mod supervisor;
mod task;
pub mod thread;
pub mod tools;
mod turns;
pub mod upkeep;
pub mod worker;
pub mod workflow;
