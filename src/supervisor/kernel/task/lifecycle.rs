//! Steps the kernel's `Life`, persists its state, and performs its actions.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::Task;
use crate::core::kernel::{Action, Event, State};
use crate::core::limits;

impl Task {
    /// Steps the life, persists it where the step matters after a restart, performs the actions.
    pub(super) async fn step(&mut self, event: Event) {
        let mut pending = VecDeque::from([event]);
        while let Some(event) = pending.pop_front() {
            let before = std::mem::discriminant(&self.life.state);
            let ran = self.life.state.running();
            let actions = self.life.step(event, self.host.now_ms());
            let changed = before != std::mem::discriminant(&self.life.state);
            // An adopted worker may run another execution than the one that the catalog knows of.
            if changed || ran != self.life.state.running() {
                self.show_state();
            }
            if changed {
                // Executions begin and end in the journal; a new daemon only needs to know that the kernel has a
                // worker.
                let work = matches!(self.life.state, State::Busy { .. })
                    || ran.is_some() && matches!(self.life.state, State::Ready);
                match self.life.state {
                    // For a starting worker, the worker catalog and the journal hold all relevant state.
                    State::Starting | State::Ready if !work => {
                        self.timers.save_at.get_or_insert(Instant::now() + limits::STATE_SAVE_DELAY);
                    }
                    _ if !work => self.save_life().await,
                    _ => {}
                }
            }
            for action in actions {
                if let Some(next) = self.perform(action).await {
                    pending.push_back(next);
                }
            }
        }
    }

    async fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::StartWorker { attempt } => self.start_worker(attempt),
            Action::ResumeWorker { attempt } => self.resume_worker(attempt),
            Action::StopWorker => return self.stop_worker(),
            Action::Interrupt { exec } => self.interrupt_worker(exec),
            Action::EndAsLost { exec, cause } => self.end_as_lost(exec, &cause).await,
            Action::FailQueued { cause } => self.fail_queued(&cause).await,
            Action::Dispatch => return self.next_work().await,
            Action::ArmIdle => self.arm_idle(),
            Action::DisarmIdle => self.timers.idle_at = None,
            Action::ArmBackoff { delay_ms } => {
                self.timers.backoff_at = Some(Instant::now() + Duration::from_millis(delay_ms))
            }
            Action::Publish(kind) => self.publish(kind),
        }
        None
    }

    pub(super) fn show_state(&self) {
        self.kernel.view.borrow_mut().state = self.life.state.clone();
    }

    pub(super) fn publish(&self, kind: &'static str) {
        let view = self.kernel.view.borrow();
        let detail = serde_json::json!({ "state": view.state.name(), "reason": view.state.reason(), "worker_pid": view.worker_pid });
        self.host.events.publish(&self.kernel.event_name(), kind, detail);
    }
}
