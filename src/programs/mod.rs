//! Programs of the host that the daemon runs for data sources of groups: without a shell, with a deadline and a bounded
//! output.
//!
//! They run as the daemon's own user, with a few variables of its environment, and never see a kernel. `git` shares the
//! log with its lock.

mod log;
mod run;

pub use log::{Place, ProgramLog, RunningGroup};
pub use run::{Output, Program, Programs, Session, Sink};
