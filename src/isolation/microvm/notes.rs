//! What happens to templates and machines beside launches, for the daemon's events and counters.

use std::cell::RefCell;

use crate::core::engine::EngineName;
use crate::isolation::{LaunchNote, Reporter};

/// Reports that the daemon has not taken yet.
const MOST: usize = 64;

/// Passes reports on to the daemon. Those before it takes any are kept.
#[derive(Default)]
pub(super) struct Notes {
    reporter: RefCell<Option<Reporter>>,
    kept: RefCell<Vec<(Option<EngineName>, LaunchNote)>>,
}

impl Notes {
    /// Reports something of an engine's machines; `None`: of all.
    pub(super) fn add(&self, engine: Option<EngineName>, kind: &'static str, detail: String) {
        tracing::info!(kind, detail, "virtual machines");
        let note = LaunchNote { kind, detail };
        match self.reporter.borrow().as_ref() {
            Some(report) => report(engine, note),
            None if self.kept.borrow().len() < MOST => self.kept.borrow_mut().push((engine, note)),
            None => {}
        }
    }

    /// Sets what takes the reports.
    pub(super) fn report_to(&self, reporter: Reporter) {
        for (engine, note) in self.kept.take() {
            reporter(engine, note);
        }
        *self.reporter.borrow_mut() = Some(reporter);
    }

    /// The reports that nothing has taken.
    #[cfg(test)]
    pub(super) fn kept(&self) -> Vec<LaunchNote> {
        self.kept.borrow().iter().map(|(_, note)| note.clone()).collect()
    }
}
