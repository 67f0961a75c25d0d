//! ryokan: durable, sandboxed kernels that can be checkpointed, compared, rolled back, forked and moved while they live.
//!
//! `docs/ARCHITECTURE.md` is the map.

pub mod cli;
pub mod core;
pub mod rpc;
pub mod session;
pub mod worker;
