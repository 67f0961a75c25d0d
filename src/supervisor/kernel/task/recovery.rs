//! Recovery of an interrupted restore, before any code runs in the kernel.
//!
//! ```text
//! a worker is there ─▶ recovered with it ─ fails ─▶ the worker is ended ─┐
//! no worker ─▶ the next start ───────────────────────────────────────────┴─▶ recovered without one ─▶ a worker starts
//! ```
//!
//! A failed recovery counts as a failed start: the lifecycle's back-off and breaker set the time of the next attempt. An
//! open breaker only delays it.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Report, Task};
use crate::core::error::{Error, Result};
use crate::core::kernel::transition::Kind;
use crate::core::kernel::{Event, Restart, State};
use crate::core::limits;
use crate::link::host::WorkerLink;
use crate::supervisor::kernel::transition::ExclusiveTransition;

impl Task {
    /// Recovers an interrupted transition, if it needs a start of the worker.
    pub(crate) async fn begin_recovery(&mut self) {
        if !self.is_restore_interrupted() || self.life.has_worker() || self.host.is_stopping() {
            return;
        }
        if self.life.breaker_is_open(self.host.now_ms()) {
            self.arm_recovery();
        } else {
            self.step(Event::Used).await;
        }
    }

    /// Schedules the next attempt for the end of the open breaker.
    fn arm_recovery(&mut self) {
        if let State::Crashed { restart: Restart::Breaker { until_ms }, .. } = self.life.state
            && self.is_restore_interrupted()
        {
            let wait_ms = u64::try_from(until_ms.saturating_sub(self.host.now_ms())).unwrap_or(0);
            let wait = Duration::from_millis(wait_ms).clamp(limits::RESTART_BACKOFF_FIRST, limits::BREAKER_WINDOW);
            self.timers.backoff_at = Some(Instant::now() + wait);
        }
    }

    fn is_restore_interrupted(&self) -> bool {
        self.kernel.interrupted() == Some(Kind::Restore)
    }

    /// Recovers an interrupted restore with the live worker; returns whether the recovery began.
    pub(super) fn recover_with(&mut self, link: &Rc<WorkerLink>) -> bool {
        let Some(current) = self.worker.current.as_ref().filter(|_| self.is_restore_interrupted()) else {
            return false;
        };
        let Some((transition, record)) = ExclusiveTransition::recover(&self.kernel) else { return false };
        let (attempt, worker, reporter) = (current.attempt, Rc::clone(&current.worker), self.reporter.clone());
        let recovering = self.checkpoints.recover_restore(&self.kernel, Some(link), transition, record);
        self.begin_operation(async move {
            if recovering.await.is_err() {
                // The next attempt runs without this worker.
                let _ = reporter.send(Box::new(Report::Last { attempt }));
                worker.kill();
            }
        });
        true
    }

    /// Recovers an interrupted restore before a worker is started; returns whether the recovery began.
    pub(super) fn recover_before(&mut self, attempt: u64) -> bool {
        if !self.is_restore_interrupted() {
            return false;
        }
        let reporter = self.reporter.clone();
        let Some((transition, record)) = ExclusiveTransition::recover(&self.kernel) else {
            // The kernel is being removed: no code may run in a half-restored kernel meanwhile.
            let outcome = Err(self.kernel.unfinished(Kind::Restore));
            // The task itself receives the report.
            let _ = reporter.send(Box::new(Report::Recovered { attempt, outcome }));
            return true;
        };
        let recovering = self.checkpoints.recover_restore(&self.kernel, None, transition, record);
        self.begin_operation(async move {
            let outcome = recovering.await;
            // The task may have ended meanwhile.
            let _ = reporter.send(Box::new(Report::Recovered { attempt, outcome }));
        });
        true
    }

    /// Handles the end of the recovery before a start.
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
                self.arm_recovery();
            }
        }
    }
}
