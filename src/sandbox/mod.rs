//! The sandbox of process isolation: what contains a kernel's code on a host without virtual machines.
//!
//! ```text
//!  daemon ──starts──▶ outer (maybe root)      [enter]   idmapped mounts, uid, namespaces
//!    ▲                   └─sibling─▶ init, PID 1   N1    the host's tree, trusted, not traceable
//!    └── is the parent of ──────────┘  │   [spawn, bind, usage]
//!                                      └─fork─▶ engine   N2: the minimal tree, no capabilities, Landlock, seccomp
//! ```
//!
//! `plan`, `layer`, `seccomp` and `verify::judge` are pure: they say what shall be. The rest acts. Nothing untrusted runs before
//! `verify` has seen every layer in force from inside.

pub mod abilities;
mod activity;
mod bind;
pub mod cgroup;
mod child;
mod confine;
mod daemon_side;
mod enter;
mod forked_snapshots;
mod freeze;
mod host_path;
mod init;
pub mod layer;
pub mod mountpoint;
pub mod plan;
mod protect;
mod seccomp;
mod slot;
mod spawn;
mod staging;
mod tree;
mod tree_etc;
mod usage;
mod verify;
mod watch_memory;
mod watch_workspace;

pub use activity::ActivityProbe;
pub use daemon_side::{Unfound, delegated_cgroup, divides_processors, find_program};
pub use enter::enter;
pub use freeze::Frozen;
pub use host_path::open_host_path;
pub use init::{EngineProcess, EngineProgram, Exit, Init, MountSource};
pub use layer::{Layer, LayerReport, LayerStatus, SandboxError, SandboxReport};
pub use plan::{PlannedMount, RunAs, SandboxPlan};
pub use seccomp::prepare;
pub use slot::{KernelEntry, KernelFolder};
pub use staging::Owners;
pub use usage::Usage;
pub use watch_memory::MemoryWatch;
pub use watch_workspace::WorkspaceWatch;

/// What a watch found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Within its limit; look again after so many milliseconds.
    Within {
        /// When to tick again, milliseconds from now.
        next_ms: u64,
    },
    /// Beyond its limit: the engine has to go.
    Beyond {
        /// What was found.
        used: u64,
        /// What is allowed.
        limit: u64,
        /// In which unit: `bytes`, `files` or `levels`.
        unit: &'static str,
    },
}
