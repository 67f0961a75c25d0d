//! Executions: start, timeout, interrupt, end. Runs in init.
//!
//! ```text
//!  Running ── interrupt or timeout ──▶ Halting ── INTERRUPT_GRACE ──▶ engine killed
//!     └────────── end ◀──────────────────┘
//! ```

use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::time::Instant;

use super::engine_frames::EngineEnd;
use super::stdin::Stdin;
use super::{Life, Worker};
use crate::core::error::{Error, Result};
use crate::core::exec::{CODE_INTERRUPTED, CODE_LOST, CODE_TIMEOUT, ExecEnd, ExecStatus, Stream};
use crate::core::ids::ExecId;
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::frames::{EndStatus, InterruptWay};
use crate::link::guest::{Answer, ExecChannelService, Finish, Start, Started};
use crate::link::types::StateBefore;

/// Longest reason in a note about a name, characters.
const REASON_CHARS: usize = 200;
/// Errors of engines for a name that is not bound.
const MISSING_NAME: [&str; 2] = ["NameError", "ReferenceError"];
/// The end of an execution that filled the workspace.
const NO_ROOM: &str = "interrupted: the workspace is beyond its size limit; code can run to delete files";
/// Consequence of killing an engine that did not stop.
const FROM_SAVED: &str = "the kernel continues from its last saved state: this execution's changes to variables are lost, those to files are not";

/// The running execution.
pub(super) struct Run {
    /// Its number.
    pub exec: ExecId,
    request: u64,
    /// Whether `engine.db` has the state before it.
    pub before: StateBefore,
    started: Instant,
    timeout: Option<Instant>,
    timeout_ms: u64,
    halt: Halt,
    stdin: Option<Stdin>,
    /// The daemon's start call, while it may still be answered with the end.
    unanswered: Option<Unanswered>,
}

/// A start whose answer waits briefly for the end: a short execution then costs one message instead
/// of three.
struct Unanswered {
    answer: StartAnswer,
    until: Instant,
}

/// Where the answer to a start is sent.
pub(super) enum StartAnswer {
    /// The start was an ordinary call.
    Call(Answer<Started>),
    /// The start arrived on the execution channel.
    ExecChannel,
}

/// State of interrupting it.
enum Halt {
    No,
    Halting { why: Why, again: Option<Instant>, kill: Instant },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Asked,
    Timeout,
    /// The workspace exceeds its size limit.
    NoRoom,
}

impl Run {
    /// Its next deadline.
    pub(super) fn nearest_deadline(&self) -> Option<Instant> {
        let due = match &self.halt {
            Halt::No => self.timeout,
            Halt::Halting { again, kill, .. } => Some(again.unwrap_or(*kill)),
        };
        let answer = self.unanswered.as_ref().map(|start| start.until);
        [due, answer].into_iter().flatten().min()
    }
}

impl Worker {
    pub(super) fn start(&mut self, start: Start, answer: StartAnswer) {
        self.forget_acknowledged(&start);
        let exec = start.exec;
        let known = self.ledger.knows(exec);
        let begun = if known { Ok(()) } else { self.begin(start) };
        match (begun, &mut self.run) {
            (Ok(()), Some(run)) if !known => {
                run.unanswered = Some(Unanswered { answer, until: run.started + limits::OUTPUT_BATCH_TIME });
            }
            (begun, _) => self.answer_start(exec, answer, begun.map(|()| Started::Runs)),
        }
    }

    /// Forgets executions whose ends are journalled.
    pub(super) fn forget_acknowledged(&mut self, start: &Start) {
        for exec in &start.acknowledged {
            self.ledger.acknowledge(*exec);
        }
    }

    /// Reports that the execution runs, unless the start was answered already.
    fn answer_runs(&mut self) {
        if let Some(run) = &mut self.run
            && let Some(Unanswered { answer, .. }) = run.unanswered.take()
        {
            let exec = run.exec;
            self.answer_start(exec, answer, Ok(Started::Runs));
        }
    }

    fn begin(&mut self, start: Start) -> Result<()> {
        self.check_idle()?;
        if self.ledger.is_full() {
            return Err(Error::busy("earlier executions have not been acknowledged"));
        }
        let Start { exec, request_json, stdin, stdin_open, has_stdin, timeout_ms, output_kept_bytes, acknowledged } =
            start;
        let (stdin, read_end) = match has_stdin {
            true => {
                let (stdin, read_end) = Stdin::open(stdin, !stdin_open)
                    .map_err(|e| Error::internal(format!("no pipe for standard input: {e}")))?;
                (Some(stdin), Some(read_end))
            }
            false => (None, None),
        };
        // Earlier output of jobs is not part of this execution.
        if !self.state.jobs().is_empty() {
            let outbox = &mut self.outbox;
            self.pipes.drain(|stream, data| outbox.background(stream, data));
        }
        let request = self.next_id();
        let before = self.state_before();
        // Recorded before the engine receives it: the execution may end before init runs again.
        let now = Instant::now();
        if let Err(why) = self.control.request(request, &request_json, read_end) {
            self.kill(CrashCause::Protocol(why));
            return Err(Error::lost("the engine does not take requests"));
        }
        self.ledger.begin(exec, usize::try_from(output_kept_bytes).unwrap_or(usize::MAX));
        let timeout = (timeout_ms > 0).then(|| now.checked_add(Duration::from_millis(timeout_ms))).flatten();
        self.run = Some(Run {
            exec,
            request,
            before,
            started: now,
            timeout,
            timeout_ms,
            halt: Halt::No,
            stdin,
            unanswered: None,
        });
        self.start_watch();
        if !acknowledged.is_empty() {
            // While the engine works anyway.
            self.state.tidy();
        }
        Ok(())
    }

    /// Whether `engine.db` has the engine's state, before an execution changes it.
    fn state_before(&self) -> StateBefore {
        match (self.state.has_entries_to_store(), self.state.has_worked()) {
            (true, _) => StateBefore::Unsaved,
            (false, true) => StateBefore::Background,
            (false, false) => StateBefore::Saved,
        }
    }

    /// Whether output is held back for the answer to a start.
    pub(super) fn gathers(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.unanswered.is_some())
    }

    /// Answers a start whose output exceeds one message; the output follows separately.
    pub(super) fn settle_start(&mut self) {
        if let Some(run) = &self.run
            && run.unanswered.is_some()
            && !self.ledger.is_small(run.exec)
        {
            self.answer_runs();
        }
    }

    /// The daemon that requested the start is gone.
    pub(super) fn forget_start(&mut self) {
        if let Some(run) = &mut self.run {
            run.unanswered = None;
        }
    }

    /// Whether the engine is idle.
    pub(super) fn check_idle(&self) -> Result<()> {
        match (&self.life, &self.run, &self.loading) {
            (Life::Serving, None, None) if self.snapshots.is_waking() => {
                Err(Error::busy("the engine is being restored"))
            }
            (Life::Serving, None, None) if self.suspended => Err(Error::busy("the kernel is suspended")),
            (Life::Serving, None, None) if self.frozen => Err(Error::busy("the kernel is frozen for a checkpoint")),
            (Life::Serving, None, None) => Ok(()),
            (Life::Serving, Some(run), _) => Err(Error::busy(format!("execution {} runs", run.exec))),
            (Life::Serving, None, Some(_)) => Err(Error::busy("the engine's state is being loaded")),
            (Life::Starting(_) | Life::Unbound, ..) => Err(Error::busy("the worker is starting")),
            (Life::Stopping(_), ..) => Err(Error::unavailable("the worker is stopping")),
            (Life::Leaving(_), ..) => Err(Error::lost("the worker's engine has ended")),
        }
    }

    pub(super) fn stdin(&self, exec: ExecId) -> Result<&Stdin> {
        match self.run.as_ref().filter(|run| run.exec == exec).map(|run| &run.stdin) {
            Some(Some(stdin)) => Ok(stdin),
            Some(None) => Err(Error::not_found("this execution has no standard input")),
            None => Err(Error::not_found(format!("execution {exec} does not run"))),
        }
    }

    pub(super) fn interrupt(&mut self, exec: ExecId) -> Result<()> {
        match &self.run {
            Some(run) if run.exec == exec => {
                self.halt(Why::Asked);
                Ok(())
            }
            Some(_) | None => Err(Error::not_found(format!("execution {exec} does not run"))),
        }
    }

    /// Interrupts the running execution; again on a second call.
    fn halt(&mut self, why: Why) {
        let now = Instant::now();
        let Some(run) = &mut self.run else { return };
        if let Halt::No = run.halt {
            let kill = now + limits::INTERRUPT_GRACE;
            run.halt = Halt::Halting { why, again: Some(now + limits::INTERRUPT_GRACE / 2), kill };
        }
        self.send_interrupt();
    }

    /// Interrupts the running execution for a stop.
    pub(super) fn halt_for_stop(&mut self) {
        self.halt(Why::Asked);
    }

    /// Whether an execution may be interrupted for a workspace beyond its limit, in place of the engine's end.
    ///
    /// Not without a running execution, and not again and again: code could grow the workspace each time.
    pub(super) fn may_interrupt_for_room(&mut self, now: Instant) -> bool {
        self.full.retain(|at| now.duration_since(*at) < limits::BREAKER_WINDOW);
        self.run.is_some() && self.full.len() < limits::BREAKER_CRASHES
    }

    /// Interrupts the running execution, whose workspace is beyond its limit.
    pub(super) fn halt_for_room(&mut self) {
        self.full.push_back(Instant::now());
        self.halt(Why::NoRoom);
    }

    fn send_interrupt(&mut self) {
        let (Some(run), Some(engine)) = (&self.run, &self.engine) else { return };
        let exec = run.exec.0;
        self.outbox.cancel_tools(exec);
        match engine.interrupt {
            InterruptWay::Signal => self.enclosure.signal(Signal::SIGINT),
            InterruptWay::Frame => {
                let frame = format!("{{\"op\":\"interrupt\",\"exec\":{exec}}}");
                if let Err(why) = self.control.send(frame.as_bytes(), &[], None) {
                    self.kill(CrashCause::Protocol(why));
                }
            }
        }
    }

    pub(super) fn on_run_deadline(&mut self, now: Instant) {
        let answer = self.run.as_ref().and_then(|run| run.unanswered.as_ref());
        if answer.is_some_and(|start| start.until <= now) {
            self.answer_runs();
        }
        let Some(run) = &mut self.run else { return };
        match &mut run.halt {
            Halt::No => {
                if run.timeout.is_some_and(|at| at <= now) {
                    self.halt(Why::Timeout);
                }
            }
            Halt::Halting { kill, .. } if *kill <= now => self.kill(CrashCause::Unresponsive),
            Halt::Halting { again, .. } => {
                if again.is_some_and(|at| at <= now) {
                    *again = None;
                    self.send_interrupt();
                }
            }
        }
    }

    /// Handles an execution's end, after its last output and state.
    pub(super) fn on_end(&mut self, end: EngineEnd, json: Vec<u8>) -> Result<(), String> {
        let Some(run) = self.run.take_if(|run| run.exec.0 == end.exec && run.request == end.id) else {
            return Err(format!("end of execution {}, which does not run", end.exec));
        };
        let (status, code, err) = judge(&run, end);
        let err = self.explain_missing(&run, status, err);
        self.finish(run, Finish { status, code, err, frame_json: json, duration_us: 0, output_bytes: 0, last: false });
        self.go_on_stopping();
        Ok(())
    }

    /// Says on stderr and in the error that a name that the code misses ended with a former worker.
    fn explain_missing(&mut self, run: &Run, status: ExecStatus, err: String) -> String {
        if status != ExecStatus::Failed || !MISSING_NAME.iter().any(|kind| err.contains(kind)) {
            return err;
        }
        let Some(ended) = self.state.ended_named(&err) else { return err };
        let name = ended.key.trim_start_matches("var/");
        let why: String = ended.reason.chars().take(REASON_CHARS).collect();
        let note = format!("{name:?} was not saved and {why}; it must be made again");
        let (ledger, exec) = (&mut self.ledger, run.exec);
        self.pipes.drain(|stream, data| ledger.output(exec, stream, data));
        ledger.output(exec, Stream::Stderr, format!("note: {note}\n").as_bytes());
        format!("{err}; {note}")
    }

    /// Ends the execution of a dead engine.
    pub(super) fn lose_run(&mut self, cause: &CrashCause) {
        let Some(run) = self.run.take() else { return };
        let (status, code, mut err) = match run.halt {
            Halt::Halting { why: Why::Timeout, .. } => (
                ExecStatus::Timeout,
                CODE_TIMEOUT,
                format!("timed out after {} ms; {cause}; {FROM_SAVED}", run.timeout_ms),
            ),
            Halt::Halting { why: Why::Asked, .. } => {
                (ExecStatus::Interrupted, CODE_INTERRUPTED, format!("interrupted; {cause}; {FROM_SAVED}"))
            }
            Halt::Halting { why: Why::NoRoom, .. } => {
                (ExecStatus::Interrupted, CODE_INTERRUPTED, format!("{NO_ROOM}; {cause}; {FROM_SAVED}"))
            }
            Halt::No => (ExecStatus::Lost, CODE_LOST, cause.to_string()),
        };
        if let Some(since) = self.state.unsaved_since() {
            err.push_str(&format!(
                "; what execution {since} and those after it changed was not saved and is lost, too"
            ));
        }
        self.state.discard();
        self.finish(
            run,
            Finish { status, code, err, frame_json: Vec::new(), duration_us: 0, output_bytes: 0, last: true },
        );
    }

    fn finish(&mut self, mut run: Run, mut finish: Finish) {
        let (ledger, exec) = (&mut self.ledger, run.exec);
        self.pipes.drain(|stream, data| ledger.output(exec, stream, data));
        if self.settings.sync_files
            && let Err(error) = self.enclosure.sync_files()
        {
            tracing::error!(%exec, %error, "the files after an execution could not be written");
            if finish.err.is_empty() {
                finish.err = format!("the files of this execution could not be written to the disk: {error}");
            }
        }
        if let Err(error) = self.state.commit(Some(exec)) {
            let error = Error::from(error);
            tracing::error!(%exec, %error, "the state after an execution could not be stored");
            let since = self.state.unsaved_since().unwrap_or(exec);
            ExecEnd::add_unsaved(&mut finish.err, since, &error);
        }
        finish.duration_us = u64::try_from(run.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let fits = ExecChannelService::fits(&finish.err, &finish.frame_json);
        self.ledger.end(exec, finish);
        if let Some(Unanswered { answer, .. }) = run.unanswered.take() {
            // The channel must not overtake reports that the daemon needs before the end.
            let whole = match answer {
                StartAnswer::Call(_) => true,
                StartAnswer::ExecChannel => fits && !self.outbox.has_news(),
            };
            let started = match whole.then(|| self.ledger.take_whole(exec)).flatten() {
                Some((finish, output)) => Started::Ended(finish, output),
                None => Started::Runs,
            };
            self.answer_start(exec, answer, Ok(started));
        }
        self.outbox.cancel_tools(exec.0);
    }
}

/// Combines the engine's end with init's own interrupts.
fn judge(run: &Run, end: EngineEnd) -> (ExecStatus, i32, String) {
    match (&run.halt, end.status) {
        (Halt::Halting { why: Why::Timeout, .. }, _) => {
            (ExecStatus::Timeout, CODE_TIMEOUT, format!("timed out after {} ms", run.timeout_ms))
        }
        (halt @ (Halt::No | Halt::Halting { why: Why::Asked | Why::NoRoom, .. }), status) => {
            let err = match (halt, status) {
                (Halt::Halting { why: Why::NoRoom, .. }, EndStatus::Interrupted | EndStatus::Failed) => NO_ROOM.into(),
                _ => end.err,
            };
            let status = match status {
                EndStatus::Done => ExecStatus::Done,
                EndStatus::Failed => ExecStatus::Failed,
                EndStatus::Interrupted => ExecStatus::Interrupted,
                EndStatus::Refused => ExecStatus::Refused,
            };
            (status, end.code, err)
        }
    }
}
