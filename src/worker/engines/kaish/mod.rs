//! The kaish engine: a kaish session in this process.
//!
//! ```text
//!  serve (contract over fds) ──▶ KaishEngine ──▶ kaish Kernel ──▶ Wrapped builtins, External ──▶ Outlet ──▶ fds 1, 2
//!                                 │  program: what is in a program before it runs
//!                                 │  state:   entries that changed since the last look
//!                                 └  backend: files, dynamic tools
//! ```
//!
//! The session is a kaish fork "for a background job": only there does kaish record which command's
//! output is the session's own (see `tools::SESSION`). Everything runs on one thread with a large
//! stack.

mod backend;
mod calls;
mod command;
mod complete;
mod engine;
mod external;
mod link;
mod outlet;
mod program;
mod serve;
mod state;
mod tools;
mod values;

pub use backend::{Backend, ToolAnswer, ToolCall};
pub use engine::{Execution, KaishEngine, Outcome, Setup, SetupError, Stdin};
pub use outlet::Outlet;
pub use serve::{main_forked, serve};
pub use state::{Change, Entry};
pub use tools::prepare;

/// Name of the engine, as in `ready` and in snapshots.
pub const ENGINE: &str = "kaish";
/// kaish's version: pinned, so known here.
pub const VERSION: &str = "0.18.1";
