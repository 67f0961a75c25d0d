//! An execution in the daemon: queued, running or ended, with its output and, at the end, its result.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use tokio::sync::watch;

use super::output::{Kept, Output};
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecEnd, ExecRequest, ExecResult, ExecStatus, streams_of};
use crate::core::ids::ExecId;
use crate::supervisor::kernel::Kernel;

/// End of an execution whose worker ended while no daemon ran.
pub(crate) const NO_DAEMON: &str = "the worker ended while no daemon was there";

/// One execution. Shared by the kernel's task and its readers.
#[derive(Debug)]
pub struct Execution {
    /// Number of the execution.
    pub id: ExecId,
    /// Output of the execution.
    pub output: Rc<Output>,
    /// The request; taken when the execution is handed to the worker.
    request: RefCell<Option<ExecRequest>>,
    /// The end, while the journal has no room for it.
    unjournalled: RefCell<Option<ExecEnd>>,
    /// Time at which it was queued.
    pub queued_at: Instant,
    started: watch::Sender<bool>,
    finished: watch::Sender<Option<Result<ExecEnd>>>,
}

impl Execution {
    /// Creates a queued execution.
    pub fn queued(id: ExecId, request: ExecRequest, keep_bytes: u64) -> Rc<Self> {
        Rc::new(Execution {
            id,
            output: Output::new(keep_bytes),
            request: RefCell::new(Some(request)),
            unjournalled: RefCell::new(None),
            queued_at: Instant::now(),
            started: watch::Sender::new(false),
            finished: watch::Sender::new(None),
        })
    }

    /// Creates an execution that a former daemon's worker still runs, or whose end is not in the journal.
    pub fn adopted(id: ExecId, keep_bytes: u64) -> Rc<Self> {
        Rc::new(Execution {
            id,
            output: Output::new(keep_bytes),
            request: RefCell::new(None),
            unjournalled: RefCell::new(None),
            queued_at: Instant::now(),
            started: watch::Sender::new(true),
            finished: watch::Sender::new(None),
        })
    }

    /// Creates an ended execution from the journal.
    pub fn ended(id: ExecId, kept: Kept, end: ExecEnd) -> Rc<Self> {
        Rc::new(Execution {
            id,
            output: Output::ended(kept, end.clone()),
            request: RefCell::new(None),
            unjournalled: RefCell::new(None),
            queued_at: Instant::now(),
            started: watch::Sender::new(true),
            finished: watch::Sender::new(Some(Ok(end))),
        })
    }

    /// Takes the request, once: the execution is being handed to the worker.
    pub fn take_request(&self) -> Option<ExecRequest> {
        self.started.send_replace(true);
        self.request.borrow_mut().take()
    }

    /// Whether it waits for earlier work or for its worker.
    pub fn is_queued(&self) -> bool {
        !*self.started.borrow() && !self.is_finished()
    }

    /// Waits until the execution was handed to the worker, or ended before that.
    pub async fn started(&self) {
        // This execution owns the sender: the channel cannot be closed.
        let _ = self.started.subscribe().wait_for(|started| *started).await;
    }

    /// Publishes the end. The end must be in the journal.
    pub fn finish(&self, end: Result<ExecEnd>) {
        match &end {
            Ok(end) => self.output.close(end.clone()),
            Err(error) => self.output.close(ExecEnd::lost(error.message.clone())),
        }
        self.started.send_replace(true);
        self.finished.send_if_modified(|slot| {
            let first = slot.is_none();
            if first {
                *slot = Some(end);
            }
            first
        });
    }

    /// Keeps an end that the journal refused, and reports the error to the waiting clients.
    pub fn finish_unjournalled(&self, end: ExecEnd, error: Error) {
        *self.unjournalled.borrow_mut() = Some(end);
        self.finish(Err(error));
    }

    /// The end, if the journal has no room for it yet.
    pub fn unjournalled(&self) -> Option<ExecEnd> {
        self.unjournalled.borrow().clone()
    }

    /// Whether the end is published.
    pub fn is_finished(&self) -> bool {
        self.finished.borrow().is_some()
    }

    /// How it ended, if it has.
    pub fn ended_as(&self) -> Option<ExecStatus> {
        let published = self.finished.borrow().as_ref().and_then(|end| Some(end.as_ref().ok()?.status));
        published.or_else(|| self.unjournalled.borrow().as_ref().map(|end| end.status))
    }

    /// Waits for the end; returns it with the kept output.
    ///
    /// # Errors
    /// If the end could not be journalled.
    pub async fn result(&self) -> Result<ExecResult> {
        let mut finished = self.finished.subscribe();
        let end = match finished.wait_for(Option::is_some).await {
            Ok(slot) => slot.clone(),
            Err(_) => None,
        };
        let end = end.unwrap_or_else(|| Err(Error::internal(format!("execution {} was forgotten", self.id))))?;
        let kept = self.output.kept();
        let (stdout, stderr) = streams_of(kept.chunks);
        let (stdout_tail, stderr_tail) = streams_of(kept.tail);
        Ok(ExecResult {
            exec: self.id,
            end,
            stdout,
            stderr,
            truncated_bytes: kept.truncated_bytes,
            stdout_tail,
            stderr_tail,
            displays: kept.displays,
        })
    }
}

impl Kernel {
    /// The running execution.
    pub(crate) fn running(&self) -> Option<ExecId> {
        self.view.borrow().state.running()
    }

    /// Executions that wait for earlier work or for the worker, in the order of their numbers.
    pub(crate) fn queued(&self) -> Vec<ExecId> {
        let executions = self.executions.borrow();
        let mut queued: Vec<ExecId> =
            executions.values().filter(|execution| execution.is_queued()).map(|execution| execution.id).collect();
        queued.sort_unstable();
        queued
    }

    /// Whether an execution has not ended.
    pub(crate) fn is_unfinished(&self, exec: ExecId) -> bool {
        self.executions.borrow().get(&exec).is_some_and(|execution| !execution.is_finished())
    }
}

/// The end of an execution that was removed from the queue.
pub(crate) fn never_ran(why: &str) -> ExecEnd {
    ExecEnd {
        status: ExecStatus::Interrupted,
        code: crate::core::exec::CODE_INTERRUPTED,
        err: why.to_owned(),
        value: None,
        output: None,
        duration_us: 0,
    }
}
