//! The time of each step of a pause, for the log.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::time::Instant;

/// A clock that is read after each step.
pub(super) struct Steps(RefCell<(Instant, String)>);

impl Steps {
    /// A clock that runs since then.
    pub(super) fn since(begun: Instant) -> Steps {
        Steps(RefCell::new((begun, String::new())))
    }

    /// Starts the clock at that moment.
    pub(super) fn begin(&self, begun: Instant) {
        self.0.replace((begun, String::new()));
    }

    /// Notes the end of a step at that moment.
    pub(super) fn ended_at(&self, step: &str, now: Instant) {
        let (last, text) = &mut *self.0.borrow_mut();
        let took = now.saturating_duration_since(*last);
        let separator = if text.is_empty() { "" } else { ", " };
        // Writing to a string does not fail.
        let _ = write!(text, "{separator}{step} {:.1}", took.as_secs_f64() * 1000.0);
        *last = now;
    }

    /// Notes the end of a step.
    pub(super) fn ended(&self, step: &str) {
        self.ended_at(step, Instant::now());
    }

    /// The steps with their milliseconds.
    pub(super) fn text(&self) -> String {
        self.0.borrow().1.clone()
    }
}
