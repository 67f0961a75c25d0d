//! Work in flight in a group that is captured.

use std::time::Duration;

use crate::core::limits;

/// What happens to work in flight before a kernel of a group is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drain {
    /// The running execution is interrupted; otherwise its end is awaited.
    pub interrupt: bool,
    /// How long to wait for its end.
    pub wait: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        Drain { interrupt: false, wait: limits::CHECKPOINT_WAIT }
    }
}
