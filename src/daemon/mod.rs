//! The host daemon: where its files are and how it is set up.

pub mod config;
pub mod paths;
