//! The bash engine: the host's bash as one long-lived process, driven by this one.
//!
//! ```text
//!  serve (contract over fds) ─▶ Session ─▶ Shell ─▶ bash: fds 1, 2 are the engine's, the code writes there itself
//!    │ execute: one execution     │ snapshot: bash's report of its state      boot, leave, end, renew: the texts that
//!    │ call: by name              │ entries:  the same as state             bash reads; all else goes through
//!    └ complete, syntax           └ restore:  entries as commands           `steps`, as lines and payloads
//! ```
//!
//! bash runs each execution at its top level, one line each, so `break`, `return`, `$?`, `set -e`
//! and aliases behave as in a script. Afterwards its own builtins write its state into a pipe,
//! without a further process. On exit its exit trap reports the state and replaces the process by a
//! new bash, so its jobs remain its children.

mod call;
mod complete;
mod entries;
mod execute;
mod feeding;
mod jobs;
mod link;
mod printed;
mod program;
mod quote;
mod restore;
mod serve;
mod session;
mod shell;
mod snapshot;
mod steps;
mod syntax;
#[cfg(test)]
mod tests;
mod toolcalls;
mod unnamed;
mod values;

pub use program::program;
pub use serve::{EXIT_OK, EXIT_PROTOCOL, EXIT_SETUP, serve};
pub use session::Setup;

/// Name of the engine, as in `ready` and in snapshots.
pub const ENGINE: &str = "bash";
