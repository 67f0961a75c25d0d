//! How workers run.

pub mod process;
