//! The sandbox of process isolation: contains a kernel's code on a host without virtual machines.
//!
//! ```text
//!  daemon ──starts──▶ outer (maybe root)      [enter]   idmapped mounts, uid, namespaces
//!    ▲                   └─sibling─▶ init, PID 1   N1    the host's tree, trusted, not traceable
//!    └── is the parent of ──────────┘  │   [spawn, bind, usage]
//!                                      └─fork─▶ engine   N2: the minimal tree, no capabilities, Landlock, seccomp
//! ```
//!
//! `plan`, `layer`, `seccomp` and `verify::judge` are pure and describe the intended state; the
//! other modules act. Nothing untrusted runs before `verify` has confirmed every layer from inside.

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
pub mod kvm;
pub mod layer;
mod monitor;
pub mod mountpoint;
pub mod plan;
mod process;
mod process_child;
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
pub use monitor::{MonitorBounds, MonitorFiles, MonitorGroup, monitor_layers};
pub use plan::{PlannedMount, RunAs, SandboxPlan};
pub use process::{NotRun, ProcessProgram, ProcessStreams, ProcessTree, SandboxedProcess, TreeEnd};
pub use seccomp::prepare;
pub use slot::{KernelEntry, KernelFolder};
pub use staging::Owners;
pub use usage::Usage;
pub use watch_memory::MemoryWatch;
pub use watch_workspace::WorkspaceWatch;

/// The result of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Within the limit.
    Within {
        /// Time until the next tick, milliseconds.
        next_ms: u64,
    },
    /// Beyond the limit: the engine must end.
    Beyond {
        /// The measured value.
        used: u64,
        /// The limit.
        limit: u64,
        /// The unit: `bytes`, `files` or `levels`.
        unit: &'static str,
    },
}
