//! The worker: a trusted init and the engine that it contains.

pub mod engines;
pub mod init;
pub mod wire;
