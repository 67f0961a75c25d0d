//! Process isolation: a worker is a sandboxed process tree of this host.

pub(crate) mod cgroups;
pub mod launch;
pub mod program;
mod spawning;
