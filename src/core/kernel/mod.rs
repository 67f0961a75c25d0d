//! A kernel's lifecycle, and beside it at most one exclusive transition. Both are pure.

mod causes;
mod lifecycle;
pub mod transition;

pub use causes::{CrashCause, StopReason};
pub use lifecycle::{Action, Event, Life, Restart, State};
