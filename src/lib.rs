//! ryokan: durable, sandboxed kernels that can be checkpointed, compared, rolled back, forked and moved while they live.
//!
//! `docs/ARCHITECTURE.md` is the map.

pub mod bundle;
pub mod catalog;
pub mod cli;
pub mod config;
pub mod core;
pub mod daemon;
pub mod git;
pub mod isolation;
pub mod link;
pub mod mcp;
pub mod programs;
pub mod rpc;
pub mod sandbox;
pub mod session;
pub mod store;
pub mod supervisor;
pub mod sys;
pub mod teleport;
pub mod worker;
pub mod workspace;
