//! Executions of a throw-away kernel: told first, then journalled. Nothing of it outlives this daemon, what is written of it included.
//!
//! ```text
//!  handed to the worker ── over within 2 ms ──▶ told ── 2 ms, the fifth, or anything else that is asked ──▶ journalled
//!                       └─ not over ──▶ its beginning is journalled ── over ──▶ told ──▶ journalled
//! ```

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Item, Report, Task};
use crate::catalog::state::Begun;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecEnd, ExecRequest, ExecStatus};
use crate::core::ids::ExecId;
use crate::core::kernel::{Event, StopReason};
use crate::core::limits;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::execution::Execution;
use crate::supervisor::kernel::journal::version_after;

/// What is said of a throw-away kernel whose journal refused what was done in it.
const NOTHING_RUNS: &str = "nothing runs in that kernel any more: make another one";

/// An execution whose beginning the journal does not have yet.
pub(crate) struct Unbegun {
    exec: ExecId,
    request: ExecRequest,
    actor: Actor,
    at_ms: i64,
    /// The kernel's, with its entry: that is the next, whenever it is written.
    version: u64,
}

/// An execution whose end was told, and which the journal is to have.
pub(crate) struct Told {
    /// Its beginning, if the journal does not have that either.
    unbegun: Option<Unbegun>,
    execution: Rc<Execution>,
    end: ExecEnd,
}

/// How far a throw-away kernel is ahead of its journal. Of any other kernel it is empty.
#[derive(Default)]
pub(crate) struct Early {
    /// What is to be told, once whoever asked for the execution knows its number.
    told_first: Option<(ExecId, ExecEnd)>,
    /// The execution whose beginning the journal does not have yet, and whose end was not told.
    unbegun: Option<Unbegun>,
    /// What was told and is to be journalled, oldest first.
    told: VecDeque<Told>,
    /// When that is due.
    pub due: Option<Instant>,
    /// Why nothing runs any more: the journal refused what had begun.
    pub no_more: Option<Error>,
}

impl Early {
    /// How many executions were told and are not journalled.
    pub(crate) fn count(&self) -> usize {
        self.told.len()
    }

    /// Whether these are to be journalled before there is one more.
    pub(crate) fn is_full(&self) -> bool {
        self.told.len() >= limits::EPHEMERAL_TOLD
    }
}

impl Task {
    /// Begins an execution before the journal has it.
    pub(crate) async fn begin_at_once(
        &mut self,
        request: ExecRequest,
        actor: &Actor,
        keep: u64,
    ) -> Result<Rc<Execution>> {
        let (number, version) = {
            let view = self.kernel.view.borrow();
            (view.executions + 1, view.version + 1)
        };
        let exec = ExecId(number);
        let execution = Execution::queued(exec, request.clone(), keep);
        self.kernel.view.borrow_mut().executions = number;
        self.kernel.executions.borrow_mut().insert(exec, Rc::clone(&execution));
        self.queue.push_back(Item::Execution(Rc::clone(&execution)));
        self.used();
        self.early.unbegun = Some(Unbegun { exec, request, actor: actor.clone(), at_ms: self.host.now_ms(), version });
        self.step(Event::Used).await;
        if let Some(end) = self.end_within(exec, limits::EPHEMERAL_JOURNALLED).await {
            self.early.told_first = Some((exec, end));
            self.kernel.advance(version);
            return Ok(execution);
        }
        let Some(unbegun) = self.early.unbegun.take() else {
            // Its worker has ended, and so it was told.
            return Ok(execution);
        };
        self.journal_told().await;
        let begun = match &self.early.no_more {
            Some(error) => Err(error.clone()),
            None => self.journal_beginning(unbegun).await,
        };
        match begun {
            Ok(()) => Ok(execution),
            Err(error) => Err(self.take_back(&execution, error).await),
        }
    }

    /// The end of the execution that runs, if it comes within that time; whatever else is reported meanwhile is taken as ever.
    async fn end_within(&mut self, exec: ExecId, time: Duration) -> Option<ExecEnd> {
        let until = Instant::now() + time;
        while self.running.as_ref().is_some_and(|(running, _)| running.id == exec)
            && let Ok(Some(report)) = tokio::time::timeout_at(until, self.reports.recv()).await
        {
            match *report {
                Report::Ended { exec: ended, end } if ended == exec => return Some(end),
                report => self.take_report(report).await,
            }
        }
        None
    }

    /// Tells of an execution whose end came at once: whoever asked for it knows its number by now.
    pub(crate) async fn tell_first(&mut self) {
        if let Some((exec, end)) = self.early.told_first.take() {
            self.execution_ended(exec, end).await;
        }
    }

    /// Makes an end known, and keeps it for the journal.
    pub(crate) fn tell_end(&mut self, execution: &Rc<Execution>, end: ExecEnd) {
        let unbegun = self.early.unbegun.take_if(|unbegun| unbegun.exec == execution.id);
        if let Some(unbegun) = &unbegun {
            self.kernel.advance(unbegun.version);
        }
        self.kernel.has_told.set(true);
        execution.finish(Ok(end.clone()));
        self.early.told.push_back(Told { unbegun, execution: Rc::clone(execution), end });
        self.early.due.get_or_insert(Instant::now() + limits::EPHEMERAL_JOURNALLED);
    }

    /// Journals what was told before. Where that is refused nothing more runs in the kernel.
    pub(crate) async fn journal_told(&mut self) {
        self.early.due = None;
        while let Some(Told { unbegun, execution, end }) = self.early.told.pop_front() {
            let exec = execution.id;
            if let Some(unbegun) = unbegun
                && let Err(error) = self.journal_beginning(unbegun).await
            {
                tracing::error!(%exec, %error, "what was told of an execution is not in the journal");
                self.journal_failed(exec, &error);
                self.early.told.clear();
                self.end_all(error).await;
                break;
            }
            let lost = end.status == ExecStatus::Lost;
            if self.journal_end(&execution, end).await {
                self.acknowledge(exec, lost);
            }
        }
        self.kernel.has_told.set(!self.early.told.is_empty());
    }

    async fn journal_beginning(&mut self, unbegun: Unbegun) -> Result<()> {
        let Unbegun { exec, request, actor, at_ms, .. } = unbegun;
        let error = match self.kernel.records.begin(&request, &actor, at_ms).await {
            Ok(Begun::New { exec: told, journal }) if told == exec => {
                self.kernel.advance(version_after(journal));
                return Ok(());
            }
            Ok(begun) => Error::internal(format!("the journal begins {begun:?}, not execution {exec}")),
            Err(error) => error,
        };
        let message = format!("the journal of throw-away kernel {} refused execution {exec}", self.kernel.spec.name);
        Err(Error { message: format!("{message}: {}", error.message), ..error })
    }

    /// An execution that the journal refused does not run, or not on. Gives what is to be said of it.
    async fn take_back(&mut self, execution: &Execution, error: Error) -> Error {
        if self.running.take_if(|(running, _)| running.id == execution.id).is_none() {
            // Nobody has seen it: its number is free.
            self.queue.retain(|item| !matches!(item, Item::Execution(queued) if queued.id == execution.id));
            self.kernel.executions.borrow_mut().remove(&execution.id);
            self.kernel.view.borrow_mut().executions = execution.id.0 - 1;
            return error;
        }
        let error = error.hint(NOTHING_RUNS);
        execution.finish(Err(error.clone()));
        self.end_all(error.clone()).await;
        error
    }

    /// Ends a throw-away kernel's worker for good: its journal is not what was done in it.
    async fn end_all(&mut self, error: Error) {
        self.early.no_more = Some(error.hint(NOTHING_RUNS));
        self.step(Event::StopAsked { reason: StopReason::Asked, force: true }).await;
        if let Some(current) = &self.current {
            current.process.kill();
        }
    }
}
