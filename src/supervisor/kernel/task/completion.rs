//! Ends of executions: journalled, then published; kept and retried while the journal has no room for them.

use std::rc::Rc;

use tokio::time::Instant;

use super::Task;
use crate::core::error::{DISK_FULL, Error, ErrorCode, Result};
use crate::core::exec::ExecEnd;
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::execution::Execution;
use crate::supervisor::kernel::execution::NO_DAEMON;

/// Attempts to journal an end before the error is reported to the waiting clients.
const JOURNAL_TRIES: u32 = 3;

impl Task {
    /// Takes over a former daemon's executions that have no worker and could not be closed.
    pub(crate) fn resume_unjournalled(&mut self, unclosed: Vec<ExecId>) {
        for exec in unclosed {
            let execution = Execution::adopted(exec, 0);
            self.kernel.executions.borrow_mut().insert(exec, Rc::clone(&execution));
            let error = Error::busy("the journal has no room for its end").reason(DISK_FULL);
            self.keep_end(&execution, ExecEnd::lost(NO_DAEMON), error);
        }
    }

    /// Journals an end, then publishes it. Returns whether it was journalled.
    pub(crate) async fn end(&mut self, execution: &Rc<Execution>, end: ExecEnd) -> bool {
        let mut outcome = Ok(());
        for attempt in 0..JOURNAL_TRIES {
            outcome = self.write_end(execution, &end).await;
            match &outcome {
                Ok(()) => break,
                Err(error) => tracing::error!(exec = %execution.id, %error, attempt, "an end could not be journalled"),
            }
            tokio::time::sleep(limits::RESTART_BACKOFF_FIRST * attempt).await;
        }
        self.remember(execution.id, outcome.is_ok());
        match outcome {
            Ok(()) => {
                execution.finish(Ok(end));
                true
            }
            Err(error) => {
                let detail = serde_json::json!({ "exec": execution.id.0, "error": error.message });
                self.host.events.publish(&self.kernel.event_name(), "journal_failed", detail);
                match error.code {
                    // Errors that may be transient.
                    ErrorCode::Busy | ErrorCode::Unavailable | ErrorCode::Internal => {
                        self.keep_end(execution, end, error)
                    }
                    _ => execution.finish(Err(refused_end(execution, &end, error))),
                }
                false
            }
        }
    }

    async fn write_end(&self, execution: &Execution, end: &ExecEnd) -> Result<()> {
        let (kept, at_ms) = (execution.output.kept(), self.host.now_ms());
        let write = async || self.kernel.records.end(execution.id, end, &kept, at_ms).await;
        match self.host.making_room(write).await {
            // A former daemon journalled the end and exited before its acknowledgement.
            Err(error) if error.code == ErrorCode::Conflict => Ok(()),
            written => written,
        }
    }

    /// Reports the error to the waiting clients and keeps the end. A live worker keeps it too, because it is not
    /// acknowledged.
    fn keep_end(&mut self, execution: &Rc<Execution>, end: ExecEnd, error: Error) {
        let error = refused_end(execution, &end, error);
        execution.finish_unjournalled(end, error);
        self.ends.unjournalled.push_back(Rc::clone(execution));
        self.timers.retry_at.get_or_insert(Instant::now() + limits::JOURNAL_RETRY);
    }

    /// Retries the ends that the journal refused.
    ///
    /// # Errors
    /// The journal's refusal of the oldest end; the end will be retried.
    pub(crate) async fn journal_ends(&mut self) -> Result<()> {
        self.timers.retry_at = None;
        while let Some(execution) = self.ends.unjournalled.front().map(Rc::clone) {
            if let Some(end) = execution.unjournalled()
                && let Err(error) = self.write_end(&execution, &end).await
            {
                tracing::debug!(exec = %execution.id, %error, "an end still has no room in the journal");
                self.timers.retry_at = Some(Instant::now() + limits::JOURNAL_RETRY);
                return Err(error);
            }
            self.ends.unjournalled.pop_front();
            // From here on, lookups use the journal.
            self.kernel.executions.borrow_mut().remove(&execution.id);
            self.acknowledge(execution.id, false);
        }
        Ok(())
    }

    /// Whether an execution may be journalled. On a full disk an idle kernel may still run one, because code can delete
    /// files: its start is written from the reserve, its end is kept in memory if there is no room.
    pub(crate) async fn room_on_disk(&mut self) -> Result<()> {
        let past = self.journal_ends().await;
        let is_engaged = self.work.running.is_some() || self.work.operating.is_some() || !self.work.queue.is_empty();
        match past {
            Err(error) if error.reason != DISK_FULL => Err(error),
            Ok(()) if !self.host.disk_is_full() => Ok(()),
            Ok(()) | Err(_) if is_engaged || self.ends.unjournalled.len() >= limits::UNJOURNALLED_ENDS => {
                Err(Host::full())
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Keeps the newest ended executions in memory; older ones are read from the journal.
    fn remember(&mut self, exec: ExecId, journalled: bool) {
        let large = |execution: &Rc<Execution>| execution.output.written() > limits::OUTPUT_REMEMBERED_BYTES;
        let mut executions = self.kernel.executions.borrow_mut();
        if journalled && executions.get(&exec).is_some_and(large) {
            executions.remove(&exec);
            return;
        }
        drop(executions);
        self.ends.reported.push(exec);
        if self.ends.reported.len() > limits::EXECUTIONS_REMEMBERED {
            let oldest = self.ends.reported.remove(0);
            self.kernel.executions.borrow_mut().remove(&oldest);
        }
    }
}

/// The error for clients that wait for an execution whose end the journal refused.
fn refused_end(execution: &Execution, end: &ExecEnd, error: Error) -> Error {
    let status = end.status.name();
    let unsaved = end.unsaved().map(|unsaved| format!("; {unsaved}")).unwrap_or_default();
    let message =
        format!("execution {} ended ({status}), but its journal refused that: {error}{unsaved}", execution.id);
    Error { message, ..error }
}
