//! The end of a restore that was interrupted, before any code runs in the kernel.
//!
//! ```text
//! a worker is there ─▶ recovered with it ─ fails ─▶ the worker is ended ─┐
//! no worker ─▶ the next start ───────────────────────────────────────────┴─▶ recovered without one ─▶ a worker starts
//! ```
//!
//! A recovery that fails is a start that failed: the lifecycle's back-off and its breaker say when the next is tried.

use std::rc::Rc;

use super::{Report, Task};
use crate::core::error::{Error, Result};
use crate::core::kernel::transition::Kind;
use crate::core::kernel::{Event, State};
use crate::link::host::WorkerLink;
use crate::supervisor::kernel::transition::ExclusiveTransition;

impl Task {
    /// Sees to an interrupted transition, if there is one that needs a start of the worker.
    pub(crate) async fn begin_recovery(&mut self) {
        if self.is_restore_interrupted() && !self.life.has_worker() && !self.host.is_stopping() {
            self.step(Event::Used).await;
        }
    }

    fn is_restore_interrupted(&self) -> bool {
        self.kernel.interrupted() == Some(Kind::Restore)
    }

    /// Recovers an interrupted restore with the worker that is there; whether that began.
    pub(super) fn recover_with(&mut self, link: &Rc<WorkerLink>) -> bool {
        let Some(current) = self.worker.current.as_ref().filter(|_| self.is_restore_interrupted()) else {
            return false;
        };
        let Some((transition, record)) = ExclusiveTransition::recover(&self.kernel) else { return false };
        let (attempt, worker, reporter) = (current.attempt, Rc::clone(&current.worker), self.reporter.clone());
        let recovering = self.checkpoints.recover_restore(&self.kernel, Some(link), transition, record);
        self.begin_operation(async move {
            if recovering.await.is_err() {
                // The next attempt does without it.
                let _ = reporter.send(Box::new(Report::Last { attempt }));
                worker.kill();
            }
        });
        true
    }

    /// Recovers an interrupted restore before a worker is started; whether that began.
    pub(super) fn recover_before(&mut self, attempt: u64) -> bool {
        if !self.is_restore_interrupted() {
            return false;
        }
        let Some((transition, record)) = ExclusiveTransition::recover(&self.kernel) else { return false };
        let recovering = self.checkpoints.recover_restore(&self.kernel, None, transition, record);
        let reporter = self.reporter.clone();
        self.begin_operation(async move {
            let outcome = recovering.await;
            // The task may have ended meanwhile.
            let _ = reporter.send(Box::new(Report::Recovered { attempt, outcome }));
        });
        true
    }

    /// The recovery before a start is over.
    pub(super) async fn recovered(&mut self, attempt: u64, outcome: Result<()>) {
        let is_wanted = attempt == self.life.attempt && matches!(self.life.state, State::Starting);
        match outcome {
            Ok(()) if is_wanted => self.start_worker(attempt),
            Ok(()) => {
                let error = Error::unavailable("the worker is not wanted any more");
                self.worker_started(attempt, Err(error)).await;
            }
            Err(error) => {
                let unfinished = self.kernel.unfinished(Kind::Restore);
                let message = format!("{}: {}", unfinished.message, error.message);
                self.worker_started(attempt, Err(Error { message, code: error.code, ..unfinished })).await;
            }
        }
    }
}
