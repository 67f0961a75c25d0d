//! Process isolation: a worker is a sandboxed process tree of this host.

mod driver;
mod engine_state;
mod files;
mod from_dir;
pub(in crate::isolation) mod handle;
mod interpreters;
pub mod launch;
pub mod program;
mod spawning;
mod venv;

pub use driver::{ProcessDriver, ProcessSettings};
