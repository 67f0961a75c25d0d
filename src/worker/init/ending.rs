//! The end of a worker: on request, as an orphan, or after its engine's death. A running execution
//! is reported as lost, pending calls are answered, and the state is saved or left unchanged. Runs
//! in init.

use std::task::{Context, Poll};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::read;
use tokio::time::Instant;

use super::enclosure::Exit;
use super::requests::By;
use super::{Life, Worker};
use crate::core::error::{Error, Result};
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::guest::Answer;

/// Exit status of a worker that was asked to stop.
const STATUS_STOPPED: i32 = 0;
/// Exit status of a worker whose engine ended or was killed.
const STATUS_ENGINE_GONE: i32 = 1;

/// Time for the last answers to be written.
const LAST_ANSWERS: Duration = Duration::from_millis(20);

/// A stop in progress.
pub(super) struct Stopping {
    /// Deadline of the current phase.
    pub until: Instant,
    phase: Phase,
    grace: Duration,
    /// `None`: no call waits; the worker is an orphan.
    answer: Option<Answer<()>>,
}

enum Phase {
    /// An execution was interrupted.
    Halting,
    /// The engine is saving its whole state.
    Saving,
    /// The engine was asked to exit.
    Going,
}

/// The engine is gone.
pub(super) struct Leaving {
    /// Deadline for the daemon to receive the reports.
    pub until: Instant,
    /// All reports were received; the last answers are being written.
    shown: bool,
    status: i32,
}

/// A leaving worker without a daemon to report to.
fn leaving(now: Instant, status: i32) -> Life {
    Life::Leaving(Leaving { until: now + LAST_ANSWERS, shown: true, status })
}

impl Worker {
    /// Saves and ends.
    pub(super) fn stop(&mut self, grace: Duration, answer: Option<Answer<()>>) {
        self.thaw();
        self.resume();
        self.processes.end_all();
        self.stop_waking();
        let refused = match (&self.life, &self.loading) {
            (Life::Serving, None) => None,
            (Life::Serving, Some(_)) => Some(Error::busy("the engine's state is being loaded")),
            (Life::Starting(_) | Life::Unbound | Life::Stopping(_), _) => {
                Some(Error::unavailable("the worker is stopping"))
            }
            (Life::Leaving(_), _) => Some(Error::lost("the worker's engine has ended")),
        };
        if let Some(error) = refused {
            if let Some(answer) = answer {
                let _ = answer.send(Err(error));
            }
            return;
        }
        let until = Instant::now() + limits::INTERRUPT_GRACE * 2;
        self.life = Life::Stopping(Stopping { until, phase: Phase::Halting, grace, answer });
        match self.run {
            Some(_) => self.halt_for_stop(),
            None => self.go_on_stopping(),
        }
    }

    /// After an execution's end: continues a waiting stop by saving the state.
    pub(super) fn go_on_stopping(&mut self) {
        if let Life::Stopping(stopping @ Stopping { phase: Phase::Halting, .. }) = &mut self.life {
            stopping.phase = Phase::Saving;
            stopping.until = Instant::now() + limits::ENGINE_ANSWER;
            let _ = self.ask(br#"{"op":"save"}"#, By::Stop);
        }
    }

    /// Handles the result of saving. After a failure a worker with an attached daemon keeps
    /// running.
    pub(super) fn on_saved(&mut self, stored: Result<()>) {
        let Life::Stopping(stopping) = &mut self.life else { return };
        let failed = stored.is_err();
        let asked = stopping.answer.take().map(|answer| answer.send(stored)).is_some();
        if failed && asked {
            self.life = Life::Serving;
            if self.outbox.connection().is_none() {
                self.orphan_at = Some(Instant::now() + self.settings.orphan_grace);
            }
            return;
        }
        stopping.phase = Phase::Going;
        stopping.until = Instant::now() + stopping.grace;
        if let Err(why) = self.control.send(br#"{"op":"shutdown"}"#, &[], None) {
            self.kill(CrashCause::Protocol(why));
        }
    }

    /// Handles the expired time without a daemon.
    pub(super) fn on_orphaned(&mut self) {
        if matches!(self.life, Life::Unbound) {
            return self.leave_unsaved();
        }
        if self.suspended && self.is_copied {
            // Maybe its kernel lives elsewhere: nothing may run here again, and the state was saved before.
            tracing::info!("no daemon returned: exiting as it was stopped");
            return self.leave_unsaved();
        }
        tracing::info!("no daemon returned: saving and exiting");
        match self.loading {
            Some(_) => self.break_load("the daemon disconnected during a load"),
            None => self.stop(limits::WORKER_STOP, None),
        }
    }

    pub(super) fn on_life_deadline(&mut self, now: Instant) {
        match &self.life {
            Life::Starting(startup) if startup.until <= now => {
                let why = Error::deadline("the engine was not ready in time").hint(self.words());
                self.fail_start(why);
            }
            Life::Stopping(Stopping { until, phase, .. }) if *until <= now => match phase {
                // The engine would not exit by itself. Its state is safe, and init's end ends every
                // process.
                Phase::Going => self.life = leaving(now, STATUS_STOPPED),
                Phase::Halting | Phase::Saving => {
                    let next = *until + limits::WORKER_STOP;
                    self.kill(CrashCause::Unresponsive);
                    self.prolong(next);
                }
            },
            Life::Leaving(Leaving { until, status, .. }) if *until <= now => self.status = Some(*status),
            Life::Starting(_) | Life::Unbound | Life::Serving | Life::Stopping(_) | Life::Leaving(_) => {}
        }
        if self.gone_by.is_some_and(|at| at <= now) {
            // Killed but not gone: init's own end removes it.
            self.gone_by = None;
            self.on_engine_exit(Exit::Signal(Signal::SIGKILL as i32));
        }
    }

    fn prolong(&mut self, next: Instant) {
        if let Life::Stopping(stopping) = &mut self.life {
            stopping.until = next;
        }
    }

    /// Kills every process in the sandbox; the engine's exit is handled when it arrives.
    pub(super) fn kill(&mut self, cause: CrashCause) {
        if self.killed_for.is_none() && !matches!(self.life, Life::Leaving(_)) {
            tracing::info!(%cause, "the engine is killed");
            self.killed_for = Some(cause);
            self.gone_by = Some(Instant::now() + limits::WORKER_LINGER);
            self.enclosure.kill_all();
            // Deadlines of open requests no longer matter.
            let lost = Error::lost("the engine was killed");
            self.fail_requests(&lost);
        }
    }

    /// Reaps ended processes; returns whether there were any.
    pub(super) fn poll_exits(&mut self, cx: &mut Context<'_>) -> bool {
        let mut ended = false;
        if let Some(children) = &self.children {
            while let Poll::Ready(Ok(mut guard)) = children.poll_read_ready(cx) {
                let mut infos = [0; 1024];
                if !matches!(read(guard.get_inner(), &mut infos), Ok(n) if n == infos.len()) {
                    guard.clear_ready();
                }
                ended = true;
            }
        }
        let gone = matches!(self.life, Life::Leaving(_));
        ended |= !gone && self.exit.poll_read_ready(cx).is_ready();
        if ended && let Some(exit) = self.enclosure.reap() {
            self.on_engine_exit(exit);
        }
        ended
    }

    pub(super) fn on_engine_exit(&mut self, exit: Exit) {
        self.enclosure.kill_all();
        self.take_last_frames();
        let going = matches!(self.life, Life::Stopping(Stopping { phase: Phase::Going, .. }));
        let cause = match self.killed_for.take() {
            Some(cause) => cause,
            None => self.enclosure.cause_of(exit),
        };
        if let Life::Starting(_) = self.life {
            let why = Error::lost(format!("the engine did not start: {cause}")).hint(self.words());
            return self.fail_start(why);
        }
        let lost = Error::lost(cause.to_string());
        self.lose_run(&cause);
        self.state.discard();
        self.loading = None;
        self.fail_requests(&lost);
        let (status, linger) = match going {
            true => (STATUS_STOPPED, LAST_ANSWERS),
            false => (STATUS_ENGINE_GONE, limits::WORKER_LINGER),
        };
        let leaving = Life::Leaving(Leaving { until: Instant::now() + linger, shown: going, status });
        if let Life::Stopping(Stopping { answer: Some(answer), .. }) = std::mem::replace(&mut self.life, leaving) {
            let _ = answer.send(Err(lost));
        }
        if !going {
            self.outbox.dying(cause);
        }
        (self.orphan_at, self.watch_at, self.gone_by) = (None, None, None);
    }

    /// The engine's last frames, possibly an execution's end.
    fn take_last_frames(&mut self) {
        if self.killed_for.is_some() {
            return;
        }
        self.control.read_rest();
        while let Ok(Some(frame)) = self.control.next() {
            self.on_frame(frame);
        }
    }

    /// Handles a failed start.
    pub(super) fn fail_start(&mut self, why: Error) {
        self.enclosure.kill_all();
        if let Some(bound) = self.bound.take() {
            let _ = bound.send(Err(why));
            self.life = leaving(Instant::now(), STATUS_ENGINE_GONE);
            return;
        }
        if let Some(tell) = self.on_ready.take() {
            tell(Err(why));
        }
        self.life = Life::Leaving(Leaving { until: Instant::now(), shown: true, status: STATUS_ENGINE_GONE });
        self.status = Some(STATUS_ENGINE_GONE);
    }

    /// The engine's output during its start.
    fn words(&mut self) -> String {
        let words = &mut self.first_words;
        self.pipes.drain(|_, data| super::remember_end(words, data));
        let bytes: Vec<u8> = words.iter().copied().collect();
        match String::from_utf8_lossy(&bytes).trim() {
            "" => String::new(),
            said => format!("its output: {said}"),
        }
    }

    /// Exits soon after the daemon has received and confirmed every report.
    pub(super) fn leave_if_told(&mut self) {
        if let Life::Leaving(leaving @ Leaving { shown: false, .. }) = &mut self.life
            && self.outbox.connection().is_some()
            && self.outbox.is_done(&self.ledger)
            && self.ledger.is_empty()
        {
            leaving.shown = true;
            leaving.until = Instant::now() + LAST_ANSWERS;
        }
    }
}
