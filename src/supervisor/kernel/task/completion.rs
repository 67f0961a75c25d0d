//! Ends of executions: journalled, then made known; kept and tried again while the journal has no room for them.

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

/// How often the end of an execution is offered to a journal that refuses it, before whoever waits is told.
const JOURNAL_TRIES: u32 = 3;

impl Task {
    /// Takes over executions of a former daemon that nobody runs and that it was not possible to close.
    pub(crate) fn begin_with(&mut self, unclosed: Vec<ExecId>) {
        for exec in unclosed {
            let execution = Execution::adopted(exec, 0);
            self.kernel.executions.borrow_mut().insert(exec, Rc::clone(&execution));
            let error = Error::busy("the journal has no room for its end").reason(DISK_FULL);
            self.keep_end(&execution, ExecEnd::lost(NO_DAEMON), error);
        }
    }

    /// Journals an end, then makes it known. Says whether the journal has it.
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
                self.host.events.publish(&self.kernel.event_name, "journal_failed", detail);
                match error.code {
                    // What may be otherwise later.
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
            // A former daemon journalled it and was ended before it could acknowledge: the journal has it.
            Err(error) if error.code == ErrorCode::Conflict => Ok(()),
            written => written,
        }
    }

    /// Tells whoever waits, and keeps the end. The worker, if it lives, keeps it too: it is not acknowledged.
    fn keep_end(&mut self, execution: &Rc<Execution>, end: ExecEnd, error: Error) {
        let error = refused_end(execution, &end, error);
        execution.finish_unjournalled(end, error);
        self.ends.unjournalled.push_back(Rc::clone(execution));
        self.timers.retry_at.get_or_insert(Instant::now() + limits::JOURNAL_RETRY);
    }

    /// Offers the journal again what it refused.
    ///
    /// # Errors
    /// Why it refuses the oldest still; it will be offered again.
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
            // From here on the journal answers for it.
            self.kernel.executions.borrow_mut().remove(&execution.id);
            self.acknowledge(execution.id, false);
        }
        Ok(())
    }

    /// Whether new work may be written down: not before what has happened, nor with what is kept back for that.
    pub(crate) async fn room_on_disk(&mut self) -> Result<()> {
        self.journal_ends().await?;
        if !self.host.disk_is_full() {
            return Ok(());
        }
        Err(Host::full())
    }

    /// Keeps the newest ended executions at hand; older ones come from the journal.
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

/// What is told to whoever waits for an execution whose end the journal refused.
fn refused_end(execution: &Execution, end: &ExecEnd, error: Error) -> Error {
    let status = end.status.name();
    let message = format!("execution {} ended ({status}), but its journal refused that: {error}", execution.id);
    Error { message, ..error }
}
