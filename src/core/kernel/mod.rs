//! A kernel's lifecycle, and beside it at most one exclusive transition. Both are pure.

mod lifecycle;
pub mod transition;

pub use lifecycle::{Action, CrashCause, Event, Life, Restart, State, StopReason};
