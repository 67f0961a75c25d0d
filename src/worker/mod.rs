//! The worker: a trusted init and the engine that it contains.

#[cfg(feature = "kaish")]
pub mod embedded;
pub mod engines;
pub mod wire;
