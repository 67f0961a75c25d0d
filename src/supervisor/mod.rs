//! One task per kernel, recovery at start-up, and what kernels share.
//!
//! ```text
//! rpc ─▶ registry: create, find, fork, share, remove, recover
//!           │            maintenance: garbage collection, verification
//!           │            freeze: groups, captured and restored as one
//!           ▼
//!        checkpoint: take, restore, compare, prune
//!           ▼
//!        kernel: handle ─ Command ─▶ task ─ Life ─▶ actions
//!           ▼
//!        workers: warm pool, reserved workers, start queue, admission
//!           ▼
//!        host: settings, databases, events, audit, metrics
//! ```
//!
//! Imports follow these arrows and no others: `tests/tidy` checks it.

pub mod checkpoint;
pub mod freeze;
pub mod host;
pub mod kernel;
pub mod maintenance;
pub mod registry;
pub mod workers;
