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

pub mod layer;
pub mod plan;
mod seccomp;
