//! Suspends and resumes the kernel's worker.
//!
//! The worker itself knows whether it is paused: the state in the catalog follows, and a new daemon adopts what it finds.

use super::{Report, Task};
use crate::core::error::{Error, Result};
use crate::core::kernel::{CrashCause, Event, State};
use crate::core::limits;
use crate::supervisor::kernel::command::Reply;
use crate::sys::fault;

impl Task {
    /// Records that the operation under way has paused the worker. `release`: ends it, and replies after its end;
    /// `until_start`: marks the kernel for the next daemon.
    pub(super) async fn suspended(&mut self, release: bool, until_start: bool, reply: Reply<()>) {
        self.step(Event::Suspended).await;
        if until_start && self.life.state == State::Suspended {
            self.kernel.resumes.set(true);
            self.save_life().await;
        }
        let outcome = match (&self.life.state, &self.worker.current) {
            (State::Suspended, Some(current)) if release => {
                current.worker.kill();
                self.worker.stop_replies.push(reply);
                return;
            }
            (State::Suspended, _) => Ok(()),
            _ => {
                let name = &self.kernel.spec().name;
                Err(Error::conflict(format!("kernel {name} was stopped while it was to be suspended")))
            }
        };
        let _ = reply.send(outcome);
    }

    /// Ends the pause of the worker, beside the task.
    pub(super) fn resume_worker(&mut self, attempt: u64) {
        let Some(link) = self.link() else {
            // The worker is ending: its end is the next report.
            return;
        };
        let (reporter, worker) = (self.reporter.clone(), self.kernel.worker.borrow().upgrade());
        tokio::task::spawn_local(async move {
            let resuming = async {
                fault::point("kernel.worker.resume").map_err(|error| Error::unavailable(error.to_string()))?;
                if let Some(worker) = worker {
                    worker.handle().unpark().await?;
                }
                link.resume().await
            };
            let late = |_| Err(Error::deadline("the worker did not resume in time"));
            let outcome = tokio::time::timeout(limits::WORKER_STOP, resuming).await.unwrap_or_else(late);
            let _ = reporter.send(Box::new(Report::Resumed { attempt, outcome }));
        });
    }

    pub(super) async fn resumed(&mut self, attempt: u64, outcome: Result<()>) {
        match outcome {
            // Without effect if a stop has begun meanwhile.
            Ok(()) => {
                self.step(Event::WorkerReady { attempt }).await;
                if matches!(self.life.state, State::Ready | State::Busy { .. }) {
                    // It is not resumed for a stop.
                    self.forget_resumption().await;
                }
            }
            Err(error) => {
                tracing::warn!(kernel = %self.kernel.spec().name, %error, "a worker did not resume; it is ended");
                if let Some(current) = self.worker.current.as_mut().filter(|current| current.attempt == attempt) {
                    current.cause.get_or_insert(CrashCause::NotStarted(error.message));
                    current.worker.kill();
                }
            }
        }
    }
}
