//! Start, adoption, stop and end of the worker.

use std::rc::Rc;

use tokio::sync::oneshot;

use super::{Adopted, Current, Listener, Report, Task};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::ExecId;
use crate::core::kernel::{CrashCause, Event, State, StopReason};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::supervisor::host::Host;
use crate::supervisor::workers::Workers;
use crate::supervisor::workers::admission::is_no_place;
use crate::supervisor::workers::start::{attach_mounts, check_mounts, start};
use crate::supervisor::workers::worker::Started;

impl Task {
    /// Starts a worker beside the task, after the recovery of an interrupted restore.
    pub(crate) fn start_worker(&mut self, attempt: u64) {
        if self.recover_before(attempt) {
            return;
        }
        let listener = Rc::new(Listener::new(attempt, &self.kernel, self.reporter.clone(), Rc::clone(&self.tools)));
        let (workers, reporter) = (Rc::clone(&self.workers), self.reporter.clone());
        let mounts = self.all_mounts();
        self.worker.started_with.clone_from(&mounts);
        self.kernel.worker_spec.replace(None);
        let request = self.kernel.start_request();
        // Dropped when the worker is no longer wanted.
        let (wanted, given_up) = oneshot::channel::<()>();
        self.worker.wanted = Some(wanted);
        tokio::task::spawn_local(async move {
            let outcome = match request {
                Ok(request) => start(&workers, &request, mounts, listener, given_up).await,
                Err(error) => Err(error),
            };
            let outcome = Box::new(outcome);
            if let Err(unsent) = reporter.send(Box::new(Report::Started { attempt, outcome })) {
                end_unneeded(&workers, *unsent.0).await;
            }
        });
    }

    /// Ends a worker whose start was reported after the last report that this task took.
    pub(super) async fn end_unattached_worker(&mut self) {
        self.reports.close();
        while let Ok(report) = self.reports.try_recv() {
            end_unneeded(&self.workers, *report).await;
        }
    }

    pub(crate) async fn worker_started(&mut self, attempt: u64, outcome: Result<Started>) {
        match outcome {
            Ok(started) if attempt == self.life.attempt && self.life.has_worker() => {
                let wanted = matches!(self.life.state, crate::core::kernel::State::Starting);
                let mounted = started.report.mounts.clone();
                self.workers.forget_error(self.kernel.id);
                self.attach_worker(attempt, started);
                if wanted {
                    if let Err(error) = self.catch_up_mounts(mounted).await {
                        self.end_after_failed_unmount(&error);
                        return;
                    }
                    self.send_tools();
                    self.step(Event::WorkerReady { attempt }).await;
                } else {
                    // It received a stop while it started.
                    self.stop_worker();
                }
            }
            Ok(started) => {
                self.workers.end(started.worker).await;
            }
            Err(error) => {
                tracing::warn!(kernel = %self.kernel.spec().name, %error, "a worker could not be started");
                self.workers.remember_error(self.kernel.id, &error);
                let cause = CrashCause::NotStarted(error.message.clone());
                // The back-off sets when an interrupted restore is tried again.
                let keeps_memory = self.kernel.interrupted().is_none() && self.keeps_memory();
                // Errors that no wait resolves are reported to the waiting clients now.
                if keeps_memory
                    || matches!(
                        error.code,
                        ErrorCode::Unsupported
                            | ErrorCode::Corrupt
                            | ErrorCode::Refused
                            | ErrorCode::Busy
                            | ErrorCode::NotFound
                            | ErrorCode::InvalidArgument
                    )
                {
                    self.fail_all_queued(&error).await;
                }
                let why = match is_no_place(&error) {
                    true => Some(StopReason::NoPlace),
                    false if Host::is_mount_refused(&error) => Some(StopReason::NotGiven),
                    false => keeps_memory.then_some(StopReason::MemoryKept),
                };
                self.step(match why {
                    Some(why) => Event::WorkerRefused { attempt, why },
                    None => Event::WorkerEnded { attempt, cause },
                })
                .await;
                self.answer_stopped(None);
            }
        }
    }

    /// Whether memory is kept in the kernel's folder for its next worker.
    fn keeps_memory(&self) -> bool {
        let home = self.host.home(self.kernel.id, self.kernel.thread_of);
        let driver = self.workers.driver(self.kernel.spec().isolation);
        driver.and_then(|driver| driver.keeps_memory(&home)).unwrap_or(false)
    }

    /// Discards memory that is kept in the kernel's folder, at a client's request.
    ///
    /// # Errors
    /// `conflict` if the kernel has a worker; `unavailable` if the memory cannot be removed.
    pub(super) fn discard_memory(&self) -> Result<()> {
        let name = &self.kernel.spec().name;
        if self.life.has_worker() {
            return Err(Error::conflict(format!("kernel {name} has a worker, which keeps its memory"))
                .reason("worker")
                .hint(format!("end it first: ryokan stop {name}")));
        }
        let home = self.host.home(self.kernel.id, self.kernel.thread_of);
        let driver = self.workers.driver(self.kernel.spec().isolation)?;
        // Damaged memory is discarded, too.
        if !driver.keeps_memory(&home).unwrap_or(true) {
            return Ok(());
        }
        driver.forget_saved(&home);
        if driver.keeps_memory(&home).unwrap_or(true) {
            return Err(Error::unavailable(format!("the memory of {name} cannot be removed")).hint("the log says why"));
        }
        self.host.events.publish(&self.kernel.event_name(), "memory_discarded", serde_json::json!({}));
        Ok(())
    }

    fn attach_worker(&mut self, attempt: u64, started: Started) {
        let Started { link, report, worker, known_origin, memory } = started;
        self.kernel.kept_memory.set(memory);
        {
            let mut view = self.kernel.view.borrow_mut();
            view.sandbox = report.sandbox;
            let is_shown = |c: &char| !c.is_control();
            view.engine_version =
                report.engine_version.chars().filter(is_shown).take(limits::ENGINE_VERSION_CHARS).collect();
            view.missed = report.missed;
            view.jobs = report.jobs;
            view.worker_pid = worker.handle().process_id();
            view.known_origin = known_origin;
        }
        if !report.not_restored.is_empty() {
            let names: Vec<_> = report.not_restored.iter().map(|m| format!("{} ({})", m.key, m.reason)).collect();
            self.host.events.publish(
                &self.kernel.event_name(),
                "state_not_restored",
                serde_json::json!({ "entries": names }),
            );
        }
        *self.kernel.link.borrow_mut() = Some(Rc::new(link));
        let worker = Rc::new(worker);
        *self.kernel.worker.borrow_mut() = Rc::downgrade(&worker);
        let (watched, reporter) = (Rc::clone(&worker), self.reporter.clone());
        tokio::task::spawn_local(async move {
            watched.exited().await;
            let _ = reporter.send(Box::new(Report::Gone { attempt }));
        });
        self.worker.current = Some(Current { attempt, worker, cause: None, not_saved: None, leaving: false });
    }

    /// Adopts a worker of a former daemon.
    pub(crate) async fn adopt(&mut self, adopted: Adopted) {
        let mut running = None;
        for (execution, runs) in &adopted.executions {
            self.kernel.executions.borrow_mut().insert(execution.id, Rc::clone(execution));
            if *runs {
                running = Some(Rc::clone(execution));
            }
        }
        let named: Vec<(u64, bool)> =
            adopted.executions.iter().map(|(execution, runs)| (execution.id.0, *runs)).collect();
        tracing::debug!(kernel = %self.kernel.spec().name, executions = ?named, "a worker is adopted");
        let exec: Option<ExecId> = running.as_ref().map(|execution| execution.id);
        let is_suspended = adopted.started.report.is_suspended;
        self.step(if is_suspended { Event::SuspendedAdopted } else { Event::WorkerAdopted { running: exec } }).await;
        let attempt = self.life.attempt;
        if let Some(execution) = running {
            // The execution already runs and needs no permit: if the limit was lowered meanwhile, it exceeds the limit.
            self.work.running = Some((execution, self.workers.admission.try_acquire_exec(self.kernel.uid)));
        }
        let mounted = adopted.started.report.mounts.clone();
        self.attach_worker(attempt, adopted.started);
        self.unmount_unrecorded(&mounted).await;
        self.mount_missing(&mounted).await;
        self.send_tools();
        if is_suspended && let Err(error) = self.kernel.park_worker().await {
            tracing::warn!(kernel = %self.kernel.spec().name, %error, "a suspended kernel's machine runs");
        }
        self.dispatch().await;
    }

    /// Detaches mounts that a former daemon attached, or was about to detach, when it was killed: the records hold.
    /// Mounts of the configuration stay until the next start, even if the configuration changed.
    async fn unmount_unrecorded(&self, mounted: &[String]) {
        let Some(link) = self.link() else { return };
        let known: Vec<String> = self.all_mounts().into_iter().map(|given| given.mount.path).collect();
        for path in mounted.iter().filter(|path| !known.contains(path)) {
            if let Err(error) = link.unbind(std::path::Path::new(path)).await {
                tracing::warn!(path, %error, "a mount that is not recorded stays until the worker ends");
            }
        }
    }

    /// Applies the mounts and unmounts that were recorded while the worker started.
    async fn catch_up_mounts(&mut self, mut mounted: Vec<String>) -> Result<()> {
        let started_with = std::mem::take(&mut self.worker.started_with);
        let present = self.all_mounts();
        let gone: Vec<_> = started_with.into_iter().filter(|mount| !present.contains(mount)).collect();
        self.exchange(&gone, &[]).await?;
        mounted.retain(|path| !gone.iter().any(|mount| mount.mount.path == *path));
        self.mount_missing(&mounted).await;
        Ok(())
    }

    /// Ends a worker that keeps a revoked mount, before any code of the kernel runs in it.
    fn end_after_failed_unmount(&mut self, error: &Error) {
        tracing::error!(%error, "a worker could not detach a removed mount; it is ended");
        if let Some(current) = &mut self.worker.current {
            current.cause = Some(CrashCause::NotStarted(format!("a removed mount stayed: {}", error.message)));
            current.worker.kill();
        }
    }

    /// Attaches the recorded mounts that the worker lacks.
    async fn mount_missing(&self, mounted: &[String]) {
        let (Some(link), Some(current)) = (self.link(), &self.worker.current) else { return };
        let mut missing = self.all_mounts();
        missing.retain(|given| !mounted.contains(&given.mount.path));
        missing.sort_by_key(|given| std::path::Path::new(&given.mount.path).components().count());
        for mount in missing {
            let path = mount.mount.path.clone();
            let attaching = async {
                let checked = check_mounts(&self.host, &self.kernel.start_request()?, vec![mount])?;
                attach_mounts(&**current.worker.handle(), &link, checked).await
            };
            if let Err(error) = attaching.await {
                tracing::warn!(path, %error, "a mount that is recorded is missing until the worker ends");
                let detail = serde_json::json!({ "path": path, "error": error.message });
                self.host.events.publish(&self.kernel.event_name(), "mount_missing", detail);
            }
        }
    }

    /// Sends the list of MCP tools to the engine.
    fn send_tools(&self) {
        if let Some(link) = self.link() {
            self.tools.attach(&link);
        }
    }

    /// Asks the worker to save and exit; kills it if it does not.
    pub(crate) fn stop_worker(&mut self) -> Option<Event> {
        let Some(current) = &self.worker.current else {
            // A queued start request is withdrawn.
            self.worker.wanted = None;
            return None;
        };
        let (attempt, worker, link) = (current.attempt, Rc::clone(&current.worker), self.link());
        let (reporter, host, checkpoints) =
            (self.reporter.clone(), Rc::clone(&self.host), Rc::clone(&self.checkpoints));
        let reason = match self.life.state {
            State::Stopping { reason, .. } => Some(reason),
            _ => None,
        };
        let (kernel, wait) = (Rc::clone(&self.kernel), self.checkpoints.wait(reason, self.worker.is_stop_forced));
        let rested = link.as_ref().zip(reason).and_then(|(link, reason)| self.rest(link, reason));
        tokio::task::spawn_local(async move {
            if let Some(rested) = rested
                && tokio::time::timeout(wait, rested).await.is_err()
            {
                checkpoints.timed_out(&kernel);
            }
            // A worker that could not save continues, and can be asked again.
            let stop = async || match &link {
                Some(link) => link.stop(limits::WORKER_STOP).await,
                None => Ok(()),
            };
            if let Err(error) = host.making_room(stop).await
                && error.code != ErrorCode::Lost
            {
                let message = format!("the kernel was stopped, and what was not saved is lost: {error}");
                let hint = format!(
                    "its files are kept, and it continues from its last saved state: free space, then run again what is \
                     lost (ryokan journal {})",
                    kernel.spec().name
                );
                let _ = reporter.send(Box::new(Report::NotSaved { attempt, error: Error { message, hint, ..error } }));
                worker.kill();
            }
            if tokio::time::timeout(limits::WORKER_STOP, worker.exited()).await.is_err() {
                worker.kill();
            }
        });
        None
    }

    /// Handles a broken link. The worker's process should exit; if it does not, it is killed.
    pub(crate) fn link_lost(&mut self, attempt: u64) {
        let Some(current) = self.worker.current.as_ref().filter(|current| current.attempt == attempt) else {
            return;
        };
        let worker = Rc::clone(&current.worker);
        tokio::task::spawn_local(async move {
            if tokio::time::timeout(limits::WORKER_STOP, worker.exited()).await.is_err() {
                worker.kill();
            }
        });
    }

    /// The worker's process has ended.
    pub(crate) async fn worker_gone(&mut self, attempt: u64) {
        if self.worker.current.as_ref().is_none_or(|current| current.attempt != attempt) {
            return;
        }
        let Some(mut current) = self.worker.current.take() else { return };
        self.kernel.link.borrow_mut().take();
        self.kernel.worker_spec.replace(None);
        self.kernel.leave_files();
        // Reports that the link delivered before it closed come first: ends, and the cause.
        while let Ok(report) = self.reports.try_recv() {
            match *report {
                Report::Ended { exec, end } => self.execution_ended(exec, end).await,
                Report::Dying { attempt: of, cause } if of == attempt => drop(current.cause.get_or_insert(cause)),
                Report::NotSaved { attempt: of, error } if of == attempt => current.not_saved = Some(error),
                Report::Last { attempt: of } | Report::Disconnected { attempt: of } if of == attempt => {}
                other => {
                    let _ = self.reporter.send(Box::new(other));
                    break;
                }
            }
        }
        let processes = self.kernel.background_work().split_off(self.kernel.view.borrow().jobs.len());
        self.workers.forget(&current.worker).await;
        // Queued work may start the next worker at once: the worker permit must be free by then.
        current.worker.leave_place();
        self.tools.detach();
        let (jobs, missed) = {
            let mut view = self.kernel.view.borrow_mut();
            view.sandbox.clear();
            view.worker_pid = None;
            let ended = view.missed.iter().cloned().map(MissedEntry::into_ended).collect();
            let mut missed = std::mem::replace(&mut view.missed, ended);
            missed.retain(|entry| !entry.has_ended());
            let jobs: Vec<_> = std::mem::take(&mut view.jobs).into_iter().chain(processes).collect();
            (jobs, missed)
        };
        if !missed.is_empty() {
            let names: Vec<_> = missed.iter().map(|entry| format!("{} ({})", entry.key, entry.reason)).collect();
            let detail = serde_json::json!({ "entries": names });
            self.host.events.publish(&self.kernel.event_name(), "state_not_captured", detail);
        }
        if !jobs.is_empty() {
            let names: Vec<_> = jobs.iter().map(|job| format!("{}: {}", job.id, job.command)).collect();
            let detail = serde_json::json!({ "jobs": names });
            self.host.events.publish(&self.kernel.event_name(), "jobs_killed", detail);
        }
        let unsaid = match current.worker.handle().was_silent() {
            true => CrashCause::Unresponsive,
            false => CrashCause::Killed,
        };
        let cause = current.cause.unwrap_or(unsaid);
        self.end_lost_processes(&cause).await;
        if let Some(error) = &current.not_saved {
            let detail = serde_json::json!({ "error": error.message });
            self.host.events.publish(&self.kernel.event_name(), "state_not_saved", detail);
        }
        self.step(Event::WorkerEnded { attempt, cause }).await;
        if matches!(self.life.state, State::Stopped { .. }) {
            // No writes follow for a while: closing releases the log's space, which may make room in the journal.
            self.kernel.records.close().await;
            let _ = self.journal_ends().await;
        }
        self.answer_stopped(current.not_saved);
    }
}

/// Ends the worker that a report brings to a task that has ended. The next daemon adopts it if this one is stopping.
async fn end_unneeded(workers: &Workers, report: Report) {
    if let Report::Started { outcome, .. } = report
        && let Ok(started) = *outcome
        && !workers.host.is_stopping()
    {
        workers.end(started.worker).await;
    }
}
