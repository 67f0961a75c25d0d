//! Stop, release to the next daemon, and removal of a kernel.

use super::{Item, Task};
use crate::core::error::{Error, ErrorCode};
use crate::core::kernel::{CrashCause, Event, StopReason};
use crate::core::limits;
use crate::supervisor::kernel::command::{Actor, Change, Reply, StopMode};

impl Task {
    pub(crate) async fn stop(&mut self, actor: Actor, mode: StopMode, reply: Reply<()>) {
        if mode == StopMode::Release {
            self.release(reply).await;
            return;
        }
        let reason = match mode {
            StopMode::Daemon { .. } => StopReason::Daemon,
            StopMode::WhenIdle | StopMode::Force | StopMode::Release => StopReason::Asked,
        };
        if let Err(error) = if reason == StopReason::Daemon { Ok(()) } else { self.admit(&actor, 0) } {
            let _ = reply.send(Err(error));
            return;
        }
        match mode {
            StopMode::Daemon { resumes: true } => {
                self.kernel.resumes.set(true);
                // The stop may take longer than the daemon waits for it.
                self.save_life().await;
            }
            StopMode::Daemon { resumes: false } => {}
            StopMode::WhenIdle | StopMode::Force | StopMode::Release => self.forget_resumption().await,
        }
        if mode == StopMode::WhenIdle && (!self.work.queue.is_empty() || self.work.operating.is_some()) {
            self.work.queue.push_back(Item::Stop(reply));
            return;
        }
        if mode != StopMode::WhenIdle {
            self.end_queued("the kernel was stopped before it ran").await;
        }
        self.worker.stop_replies.push(reply);
        self.timers.backoff_at = None;
        self.worker.is_stop_forced = mode != StopMode::WhenIdle;
        self.step(Event::StopAsked { reason, force: mode != StopMode::WhenIdle }).await;
        if !self.life.has_worker() {
            if reason == StopReason::Daemon && self.kernel.resumes.get() {
                // No step has saved it: the machine ended when its memory was saved.
                self.save_life().await;
            }
            self.answer_stopped(None);
        }
    }

    /// Withdraws the mark that lets a daemon start the kernel by itself, before anything else happens: it counts once.
    pub(super) async fn forget_resumption(&mut self) {
        if self.kernel.resumes.take() {
            self.save_life().await;
        }
    }

    /// Replies to the clients that wait for the worker's end. Work queued meanwhile may have started the next worker
    /// already.
    pub(crate) fn answer_stopped(&mut self, not_saved: Option<Error>) {
        for reply in self.worker.stop_replies.drain(..) {
            let _ = reply.send(not_saved.clone().map_or(Ok(()), Err));
        }
    }

    /// Releases a live worker: a new daemon adopts it.
    pub(crate) async fn release(&mut self, reply: Reply<()>) {
        // The worker keeps ends that are still refused for the next daemon.
        let _ = self.journal_ends().await;
        self.save_life().await;
        self.kernel.link.borrow_mut().take();
        self.leaving = true;
        let _ = reply.send(Ok(()));
    }

    /// Kills the worker of a kernel whose departure is committed, and refuses all queued work.
    pub(super) async fn end_departed_worker(&mut self) {
        // Work that needs no worker any more is refused as `departed` by the next state.
        let moved =
            Error::new(ErrorCode::Departed, format!("kernel {} moved to another host", self.kernel.spec().name));
        self.fail_all_queued(&moved).await;
        if let Some(current) = self.worker.current.take() {
            current.worker.kill();
            let _ = tokio::time::timeout(limits::WORKER_STOP, current.worker.exited()).await;
            self.workers.forget(&current.worker).await;
            current.worker.leave_place();
        }
        self.worker.wanted = None;
        self.kernel.link.borrow_mut().take();
        self.end_lost_processes(&CrashCause::Killed).await;
        self.tools.detach();
        {
            let mut view = self.kernel.view.borrow_mut();
            view.sandbox.clear();
            view.worker_pid = None;
            view.jobs.clear();
            view.missed.clear();
        }
        (self.timers.idle_at, self.timers.backoff_at) = (None, None);
        self.life = self.life.clone().without_worker();
        self.answer_stopped(None);
    }

    pub(crate) async fn remove(&mut self, change: Change, reply: Reply<()>) {
        if let Err(error) = self.admit_removal(&change.actor, change.expected_version) {
            let _ = reply.send(Err(error));
            return;
        }
        // No journal keeps these ends; the error says that the kernel is gone.
        let removed = Error::not_found(format!("kernel {} was removed", self.kernel.spec().name));
        for item in std::mem::take(&mut self.work.queue) {
            match item {
                Item::Execution(execution) => execution.finish(Err(removed.clone())),
                other => self.work.queue.push_back(other),
            }
        }
        self.fail_all_queued(&removed).await;
        if let Some(current) = &self.worker.current {
            current.worker.kill();
            let _ = tokio::time::timeout(limits::WORKER_STOP, current.worker.exited()).await;
            self.workers.forget(&current.worker).await;
        }
        self.kernel.link.borrow_mut().take();
        for exec in std::mem::take(&mut *self.kernel.processes.borrow_mut()).into_keys() {
            let execution = self.kernel.executions.borrow().get(&exec).cloned();
            if let Some(execution) = execution {
                execution.finish(Err(removed.clone()));
            }
        }
        if let Some((execution, _)) = self.work.running.take() {
            let message = format!("{} while execution {} ran", removed.message, execution.id);
            execution.finish(Err(Error { message, ..removed }));
        }
        self.tools.detach();
        (self.leaving, self.timers.save_at) = (true, None);
        let _ = reply.send(Ok(()));
    }
}
