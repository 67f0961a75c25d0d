//! Executions: accepted, queued, handed to the worker, ended in the journal.

use std::borrow::Cow;
use std::rc::Rc;
use std::task::Poll;

use futures::future::Either;

use super::{Item, Permit, PermitRequest, PreparedStart, Report, Task};
use crate::catalog::state::Begun;
use crate::core::error::{DISK_FULL, Error, ErrorCode, Result};
use crate::core::exec::{ExecEnd, ExecRequest, ExecStatus, OutputEvent};
use crate::core::ids::ExecId;
use crate::core::kernel::{CrashCause, Event, Restart, State, StopReason};
use crate::core::limits;
use crate::core::origin::Origin;
use crate::link::host::WorkerExec;
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::kernel::command::{Actor, Command, Operation, Trace, Turn, Waiting};
use crate::supervisor::kernel::execution::Execution;
use crate::supervisor::kernel::execution::never_ran;
use crate::supervisor::kernel::journal::version_after;
use crate::supervisor::workers::admission::ExecPermit;

impl Task {
    /// Journals and queues an execution.
    pub(crate) async fn accept(&mut self, mut request: ExecRequest, actor: Actor) -> Result<Rc<Execution>> {
        if !request.key.is_empty()
            && let Some(id) = self.kernel.records.by_key(&request.key, self.host.now_ms()).await?
        {
            if !self.kernel.records.is_of(id, &request).await? {
                return Err(Error::conflict(format!(
                    "this key was given with another request: it is execution {id}'s"
                ))
                .reason("key_used")
                .hint("take a new key for a new request"));
            }
            let live = self.kernel.executions.borrow().get(&id).cloned();
            return match live {
                Some(live) => Ok(live),
                None => self.kernel.execution(id).await,
            };
        }
        self.admit(&actor, request.expected_version)?;
        self.kernel.refuse_unfinished_group()?;
        self.settle().await?;
        self.check_room()?;
        self.room_on_disk().await?;
        if request.output_limit_bytes == 0 {
            request.output_limit_bytes = self.host.config.defaults.output_kept;
        }
        let keep = request.output_limit_bytes.min(limits::OUTPUT_KEPT_MAX_BYTES);
        let ahead = self.prepare_start(&request, keep);
        let begin = async || self.kernel.records.begin(&request, &actor, self.host.now_ms()).await;
        let begun = self.host.making_room(begin).await;
        let begun = begun.map_err(|error| if error.reason == DISK_FULL { Host::full() } else { error });
        let (exec, journal) = match begun? {
            Begun::New { exec, journal } => (exec, journal),
            Begun::Before(exec) => return self.kernel.execution(exec).await,
        };
        self.work.prepared = ahead.filter(|ahead| ahead.exec == exec);
        self.kernel.advance(version_after(journal));
        self.kernel.view.borrow_mut().executions = exec.0;
        self.used();
        let execution = Execution::queued(exec, request, keep);
        self.kernel.executions.borrow_mut().insert(exec, Rc::clone(&execution));
        self.work.queue.push_back(Item::Execution(Rc::clone(&execution)));
        self.step(Event::Used).await;
        // Other work precedes it: the execution takes the ordinary path later.
        self.work.prepared = None;
        Ok(execution)
    }

    /// Sends an execution to the worker that would run it next; there it waits until its start is journalled.
    ///
    /// Sending and journalling take about the same time. The execution has the next number.
    fn prepare_start(&self, request: &ExecRequest, output_kept: u64) -> Option<PreparedStart> {
        let leaving = self.worker.current.as_ref().is_none_or(|current| current.leaving);
        let engaged = self.work.operating.is_some() || self.work.running.is_some() || !self.work.queue.is_empty();
        let waits = self.kernel.is_changing() || self.kernel.is_held() || self.kernel.awaits_group();
        if !matches!(self.life.state, State::Ready) || engaged || leaving || waits {
            return None;
        }
        let (link, exec) = (self.link()?, ExecId(self.kernel.view.borrow().executions + 1));
        let mut request = Cow::Borrowed(request);
        if let Some(origin) = self.unknown_origin() {
            request.to_mut().env.extend(origin);
        }
        link.prepare(exec, &request, output_kept).then(|| PreparedStart { exec, link: Some(link) })
    }

    /// Whether the queue has room for one more item.
    pub(crate) fn check_room(&self) -> Result<()> {
        let name = &self.kernel.spec().name;
        if self.work.queue.len() >= self.host.config.limits.executions_queued {
            return Err(Error::busy(format!("kernel {name} has {} pieces of work waiting", self.work.queue.len()))
                .reason("executions_queued")
                .hint("wait for some of them to end, or interrupt them"));
        }
        if self.life.breaker_is_open(self.host.now_ms()) {
            return Err(self.breaker_error());
        }
        self.room_for_worker()
    }

    /// Whether a worker may be started, if there is none.
    pub(crate) fn room_for_worker(&self) -> Result<()> {
        if self.host.is_stopping() {
            return Err(Error::unavailable("the daemon is stopping").hint("try again when it is back"));
        }
        self.kernel.check_available()?;
        if self.life.has_worker() { Ok(()) } else { self.workers.admit(&self.kernel.spec(), self.kernel.uid) }
    }

    fn breaker_error(&self) -> Error {
        let name = &self.kernel.spec().name;
        Error::refused(format!("kernel {name} is held back: {}", self.life.state.reason()))
            .reason("circuit_breaker")
            .hint(format!("look at `ryokan journal {name}`, then `ryokan start {name}` tries again"))
    }

    /// Queues an operation, after its change was journalled.
    pub(crate) async fn operate(&mut self, trace: Trace, operation: Operation, waiting: Option<Waiting>) -> Result<()> {
        self.drop_given_up();
        match &trace {
            Trace::InitialState(change) | Trace::Journalled(change, _) | Trace::Transition(change) => {
                self.admit(&change.actor, change.expected_version)?;
            }
            Trace::None | Trace::Recovery => {}
        }
        match &trace {
            // What a group itself does with its kernels goes on.
            Trace::Transition(_) | Trace::Recovery => {}
            Trace::None | Trace::InitialState(_) | Trace::Journalled(..) => self.kernel.refuse_paused_group()?,
        }
        self.settle().await?;
        match &trace {
            Trace::Recovery => self.room_for_worker()?,
            Trace::None | Trace::InitialState(_) | Trace::Journalled(..) | Trace::Transition(_) => self.check_room()?,
        }
        if let Trace::Journalled(change, text) = &trace {
            self.mark(&change.actor, text).await?;
        }
        self.used();
        match trace {
            Trace::Recovery => self.work.queue.push_front(Item::Operation(operation, waiting)),
            Trace::Transition(_) => self.work.queue.push_back(Item::Transition(operation, waiting)),
            Trace::None | Trace::InitialState(_) | Trace::Journalled(..) => {
                self.work.queue.push_back(Item::Operation(operation, waiting));
            }
        }
        self.step(Event::Used).await;
        Ok(())
    }

    /// Appends a mark to the journal; the version grows, because this is a change by a client.
    pub(crate) async fn mark(&mut self, actor: &Actor, text: &str) -> Result<()> {
        let version = self.kernel.records.mark(actor, text, self.host.now_ms()).await?;
        self.kernel.advance(version);
        Ok(())
    }

    /// Hands the next piece of work to a ready worker, or starts one for it.
    pub(crate) async fn next_work(&mut self) -> Option<Event> {
        match self.life.state {
            State::Ready => self.hand_over().await,
            // Executions wait until the group is resumed.
            State::Suspended
                if self.kernel.is_group_paused()
                    && self.work.queue.iter().all(|item| matches!(item, Item::Execution(_))) =>
            {
                None
            }
            State::Stopped { .. } | State::Created | State::Suspended if !self.work.queue.is_empty() => {
                Some(Event::Used)
            }
            _ => None,
        }
    }

    pub(crate) async fn dispatch(&mut self) {
        if let Some(event) = self.next_work().await {
            self.step(event).await;
        }
    }

    async fn hand_over(&mut self) -> Option<Event> {
        let leaving = self.worker.current.as_ref().is_some_and(|current| current.leaving);
        if self.work.operating.is_some() || self.work.running.is_some() || leaving {
            return None;
        }
        let link = self.link()?;
        if let Err(error) = self.settle().await {
            self.fail_all_queued(&error).await;
            return None;
        }
        if self.kernel.is_changing() && (self.recover_with(&link) || !self.transition_first()) {
            return None;
        }
        if self.kernel.is_held() {
            // The holder of the files wakes this task on release.
            self.see_to_owner().await;
            return None;
        }
        if self.kernel.awaits_group() && !self.operation_first() {
            return None;
        }
        match self.work.queue.front()? {
            Item::Stop(_) => {
                let Some(Item::Stop(reply)) = self.work.queue.pop_front() else { return None };
                if reply.is_closed() {
                    // The caller has given up; the next one may want the kernel unchanged.
                    return self.work.queue.front().map(|_| Event::Used);
                }
                self.worker.stop_replies.push(reply);
                Some(Event::StopAsked { reason: StopReason::Asked, force: false })
            }
            Item::Operation(..) | Item::Transition(..) => {
                let Some(Item::Operation(operation, _) | Item::Transition(operation, _)) = self.work.queue.pop_front()
                else {
                    return None;
                };
                self.begin_operation(operation(Ok(link)));
                None
            }
            // Executions wait for room in the journal, which is retried.
            Item::Execution(_) if self.ends.unjournalled.len() >= limits::UNJOURNALLED_ENDS => None,
            Item::Execution(_) => {
                let permit = self.permit_to_run()?;
                let Some(Item::Execution(execution)) = self.work.queue.pop_front() else { return None };
                let exec = execution.id;
                let mut request = execution.take_request()?;
                self.host.metrics.since(Stage::ExecutionQueued, self.kernel.spec().engine, execution.queued_at);
                request.env.extend(self.unknown_origin().into_iter().flatten());
                let output_kept = request.output_limit_bytes.min(limits::OUTPUT_KEPT_MAX_BYTES);
                let starting = match self
                    .work
                    .prepared
                    .take()
                    .filter(|ahead| ahead.exec == exec)
                    .and_then(PreparedStart::disarm)
                {
                    Some(link) => Either::Left(link.commit(exec)),
                    None => Either::Right(link.start(WorkerExec { exec, request, output_kept })),
                };
                self.work.running = Some((execution, Some(permit)));
                let reporter = self.reporter.clone();
                tokio::task::spawn_local(async move {
                    // A lost worker is reported by its own end; any other refusal ends the execution here.
                    if let Err(error) = starting.await
                        && error.code != ErrorCode::Lost
                    {
                        let end = ExecEnd { status: ExecStatus::Refused, ..ExecEnd::lost(error.message) };
                        let _ = reporter.send(Box::new(Report::Ended { exec, end }));
                    }
                });
                Some(Event::ExecutionStarted { exec })
            }
        }
    }

    /// Runs an operation beside the task; no other work starts until the operation ends.
    pub(crate) fn begin_operation(&mut self, operation: impl Future<Output = ()> + 'static) {
        self.work.operations += 1;
        let number = self.work.operations;
        // Held until the end, even if the worker ends first: the operation may still use the kernel's files.
        self.work.operating = Some(number);
        self.timers.idle_at = None;
        let reporter = self.reporter.clone();
        tokio::task::spawn_local(async move {
            operation.await;
            // The task may have ended meanwhile.
            let _ = reporter.send(Box::new(Report::OperationDone { number }));
        });
    }

    /// Removes abandoned requests from the queue.
    pub(crate) fn drop_given_up(&mut self) {
        self.work.queue.retain(|item| match item {
            Item::Operation(_, Some(waiting)) | Item::Transition(_, Some(waiting)) => waiting.get() != Turn::GivenUp,
            Item::Operation(_, None) | Item::Transition(_, None) | Item::Execution(_) | Item::Stop(_) => true,
        });
    }

    /// Moves a queued transition to the front while a transition record exists; returns whether one is queued.
    fn transition_first(&mut self) -> bool {
        let at = self.work.queue.iter().position(|item| matches!(item, Item::Transition(..)));
        let Some(item) = at.and_then(|at| self.work.queue.remove(at)) else { return false };
        self.work.queue.push_front(item);
        true
    }

    /// Moves the first work that is not an execution to the front; returns whether there is one.
    fn operation_first(&mut self) -> bool {
        let at = self.work.queue.iter().position(|item| !matches!(item, Item::Execution(_)));
        let Some(item) = at.and_then(|at| self.work.queue.remove(at)) else { return false };
        self.work.queue.push_front(item);
        true
    }

    /// Asks the kernel that owns the files to recover its interrupted restore. If that recovery is held back, queued
    /// work is refused.
    async fn see_to_owner(&mut self) {
        let owner = self.kernel.files_owner();
        let (Some(kind), false) = (owner.interrupted(), owner.id == self.kernel.id) else { return };
        let state = owner.view.borrow().state.clone();
        if matches!(state, State::Crashed { restart: Restart::Breaker { .. }, .. }) {
            let error = owner.unfinished(kind);
            self.fail_all_queued(&error).await;
        }
        // An owner with a full queue retries anyway.
        let _ = owner.commands.try_send(Box::new(Command::Wake));
    }

    /// A restored origin, or one of a move, that the worker did not receive at its start.
    fn unknown_origin(&self) -> Option<[(String, String); 3]> {
        let view = self.kernel.view.borrow();
        let now = (view.origin.kind, view.origin.generation);
        (view.known_origin != Some(now)).then(|| Origin::environment(now.0, now.1, self.kernel.epoch))
    }

    /// Acquires the host-wide permit to run; if none is free, requests one, and work resumes when it is granted.
    fn permit_to_run(&mut self) -> Option<ExecPermit> {
        match std::mem::replace(&mut self.work.permit, Permit::None) {
            Permit::Granted(permit) => return Some(permit),
            Permit::Requested(request) => {
                self.work.permit = Permit::Requested(request);
                return None;
            }
            Permit::None => {}
        }
        let (admission, uid) = (&self.workers.admission, self.kernel.uid);
        if let Some(permit) = admission.try_acquire_exec(uid) {
            return Some(permit);
        }
        let leave = admission.acquire_exec(uid);
        let reporter = self.reporter.clone();
        let asking = tokio::task::spawn_local(async move {
            if let Some(permit) = leave.await {
                let _ = reporter.send(Box::new(Report::PermitGranted(permit)));
            }
        });
        self.work.permit = Permit::Requested(PermitRequest(asking.abort_handle()));
        None
    }

    /// Withdraws the permit request if nothing is queued.
    pub(crate) fn drop_unneeded_permit_request(&mut self) {
        if matches!(self.work.permit, Permit::Requested(_))
            && !self.work.queue.iter().any(|item| matches!(item, Item::Execution(_)))
        {
            self.work.permit = Permit::None;
        }
    }

    /// Interrupts the running execution, or removes a queued one; returns how it ended if it had ended before.
    pub(crate) async fn interrupt(&mut self, exec: ExecId, actor: &Actor) -> Result<Option<ExecStatus>> {
        self.admit(actor, 0)?;
        if self.kernel.end_process(exec) {
            return Ok(None);
        }
        let queued = self.work.queue.iter().position(|item| matches!(item, Item::Execution(e) if e.id == exec));
        if let Some(at) = queued {
            if let Some(Item::Execution(execution)) = self.work.queue.remove(at) {
                self.end(&execution, never_ran("interrupted before it ran")).await;
            }
            return Ok(None);
        }
        // A stop waits for the running execution, which can still be interrupted.
        if let State::Busy { exec: running } | State::Stopping { exec: Some(running), .. } = self.life.state
            && running == exec
        {
            self.interrupt_worker(exec);
            return Ok(None);
        }
        Ok(self.kernel.execution(exec).await?.ended_as())
    }

    pub(crate) fn interrupt_worker(&self, exec: ExecId) {
        let Some(link) = self.link() else { return };
        tokio::task::spawn_local(async move {
            if let Err(error) = link.interrupt(exec).await {
                tracing::debug!(%exec, %error, "interrupt");
            }
        });
    }

    /// Handles the worker's report that an execution ended.
    pub(crate) async fn execution_ended(&mut self, exec: ExecId, mut end: ExecEnd) {
        let process = self.kernel.processes.borrow_mut().remove(&exec);
        if process.is_some() {
            return self.process_ended(exec, end).await;
        }
        if let State::Stopping { reason, .. } = &self.life.state
            && end.status == ExecStatus::Interrupted
            && self.worker.is_stop_forced
        {
            let why = format!("its kernel was stopped ({})", reason.name());
            end.err = if end.err.is_empty() { why } else { format!("{}; {why}", end.err) };
        }
        let execution = match self.work.running.take() {
            Some((execution, permit)) if execution.id == exec => {
                drop(permit);
                execution
            }
            other => {
                self.work.running = other;
                let known = self.kernel.executions.borrow().get(&exec).cloned();
                match known {
                    Some(execution) if !execution.is_finished() => execution,
                    _ => return self.acknowledge(exec, false),
                }
            }
        };
        let lost = end.status == ExecStatus::Lost;
        self.host.metrics.executed(self.kernel.spec().engine, &end);
        if let Some(output) = &end.output {
            execution.output.push_event(OutputEvent::Structured(output.clone())).await;
        }
        if let Some(active) = self.worker.current.as_ref().and_then(|current| current.worker.active.as_ref()) {
            active.executed();
        }
        if self.end(&execution, end).await {
            self.acknowledge(exec, lost);
        }
        yield_to_others().await;
        self.used();
        self.kernel.follow_files();
        if lost {
            // The worker is ending and receives no more work. Its end is the next report.
            self.link_lost(self.life.attempt);
            return;
        }
        self.step(Event::ExecutionEnded { exec }).await;
        self.rearm_idle();
    }

    /// Acknowledges a journalled end to the worker: batched, unless the worker waits for it before it exits.
    pub(crate) fn acknowledge(&self, exec: ExecId, now: bool) {
        let Some(link) = self.link() else { return };
        if !now {
            link.acknowledge_later(exec);
        } else {
            tokio::task::spawn_local(async move {
                if let Err(error) = link.acknowledge(exec).await {
                    tracing::debug!(%exec, %error, "acknowledge");
                }
            });
        }
    }

    /// Ends the running execution as lost: its worker died.
    pub(crate) async fn end_as_lost(&mut self, exec: ExecId, cause: &CrashCause) {
        if let Some((execution, permit)) = self.work.running.take() {
            drop(permit);
            if execution.id == exec {
                self.end(&execution, ExecEnd::lost(cause.to_string())).await;
                self.host.events.publish(
                    &self.kernel.event_name(),
                    "execution_lost",
                    serde_json::json!({ "exec": exec.0, "cause": cause.to_string() }),
                );
            }
        }
    }

    pub(crate) async fn fail_queued(&mut self, cause: &CrashCause) {
        let error = match cause {
            CrashCause::NotStarted(_) => {
                self.workers.last_error(self.kernel.id).unwrap_or_else(|| self.breaker_error())
            }
            _ => self.breaker_error(),
        };
        self.fail_all_queued(&error).await;
    }

    pub(crate) async fn fail_all_queued(&mut self, error: &Error) {
        while let Some(item) = self.work.queue.pop_front() {
            match item {
                Item::Execution(execution) => {
                    let hint = if error.hint.is_empty() { String::new() } else { format!(" ({})", error.hint) };
                    let end = ExecEnd::lost(format!("{}{hint}", error.message));
                    self.end(&execution, ExecEnd { status: ExecStatus::Refused, ..end }).await;
                }
                Item::Operation(operation, _) | Item::Transition(operation, _) => operation(Err(error.clone())).await,
                Item::Stop(reply) => self.worker.stop_replies.push(reply),
            }
        }
        if !self.life.has_worker() {
            self.answer_stopped(None);
        }
    }

    /// Ends all queued work.
    pub(crate) async fn end_queued(&mut self, why: &str) {
        while let Some(item) = self.work.queue.pop_front() {
            match item {
                Item::Execution(execution) => {
                    self.end(&execution, never_ran(why)).await;
                }
                Item::Operation(operation, _) | Item::Transition(operation, _) => {
                    operation(Err(Error::unavailable(why))).await
                }
                Item::Stop(reply) => self.worker.stop_replies.push(reply),
            }
        }
    }
}

/// Yields to the other ready tasks of the event loop: waiting clients receive their replies first.
pub(crate) async fn yield_to_others() {
    let mut gave = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut gave, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
