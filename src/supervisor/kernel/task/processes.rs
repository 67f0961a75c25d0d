//! Processes beside the engine: accepted, started without waiting for a running execution, ended in the journal.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use tokio::time::Instant;

use super::{Item, Report, Task};
use crate::catalog::state::Begun;
use crate::core::error::{DISK_FULL, Error, ErrorCode, Result};
use crate::core::exec::{ExecEnd, ExecRequest, ExecStatus, Work};
use crate::core::ids::ExecId;
use crate::core::kernel::{CrashCause, Event, State};
use crate::core::limits;
use crate::core::origin::Origin;
use crate::link::host::{WorkerLink, WorkerProcess};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::execution::{Execution, never_ran};
use crate::supervisor::kernel::journal::version_after;
use crate::supervisor::kernel::processes::RunningProcess;

/// Pause before a start is tried again while the kernel is frozen.
const FROZEN_RETRY: Duration = Duration::from_millis(20);

impl Task {
    /// Journals a process and starts it: at once if the worker is executing, else as the next work.
    pub(crate) async fn accept_process(&mut self, mut request: ExecRequest, actor: Actor) -> Result<Rc<Execution>> {
        let Work::Process(program) = request.what.clone() else {
            return Err(Error::internal("a process without a program"));
        };
        self.admit(&actor, request.expected_version)?;
        self.settle().await?;
        self.check_room()?;
        if self.kernel.processes.borrow().len() >= limits::PROCESSES {
            let name = &self.kernel.spec().name;
            return Err(Error::busy(format!("kernel {name} runs {} processes already", limits::PROCESSES))
                .reason("processes")
                .hint("end some of them, or let one program start the others"));
        }
        self.room_on_disk().await?;
        if request.output_limit_bytes == 0 {
            request.output_limit_bytes = self.host.config.defaults.output_kept;
        }
        let keep = request.output_limit_bytes.min(limits::OUTPUT_KEPT_MAX_BYTES);
        let begin = async || self.kernel.records.begin(&request, &actor, self.host.now_ms()).await;
        let begun = self.host.making_room(begin).await;
        let begun = begun.map_err(|error| if error.reason == DISK_FULL { Host::full() } else { error });
        let (exec, journal) = match begun? {
            Begun::New { exec, journal } => (exec, journal),
            Begun::Before(exec) => return self.kernel.execution(exec).await,
        };
        self.kernel.advance(version_after(journal));
        self.kernel.view.borrow_mut().executions = exec.0;
        self.used();
        let execution = Execution::queued(exec, ExecRequest::default(), keep);
        self.kernel.executions.borrow_mut().insert(exec, Rc::clone(&execution));
        let is_cancelled = Rc::new(Cell::new(false));
        let running = RunningProcess {
            program: program.clone(),
            started_at_ms: self.host.now_ms(),
            is_cancelled: Rc::clone(&is_cancelled),
        };
        self.kernel.processes.borrow_mut().insert(exec, running);
        let (kind, generation) = self.kernel.origin_now();
        let own = [("RYOKAN_KERNEL".to_owned(), self.kernel.spec().name.to_string())];
        let env = own
            .into_iter()
            .chain(Origin::environment(kind, generation, self.kernel.epoch))
            .chain(request.env)
            .collect();
        let (has_stdin, timeout_ms) = (request.stdin_open, request.timeout_ms);
        let process = WorkerProcess { exec, program, env, has_stdin, timeout_ms };
        self.begin_process(process, Rc::clone(&execution), is_cancelled).await;
        Ok(execution)
    }

    async fn begin_process(&mut self, process: WorkerProcess, execution: Rc<Execution>, is_cancelled: Rc<Cell<bool>>) {
        let (exec, reporter) = (process.exec, self.reporter.clone());
        let start = move |link: Result<Rc<WorkerLink>>| -> LocalBoxFuture<'static, ()> {
            Box::pin(async move {
                let started = match link {
                    Ok(link) => start(&link, process, &execution, &is_cancelled).await,
                    Err(error) => Err(error),
                };
                let end = match started {
                    Ok(true) => return,
                    Ok(false) => never_ran("ended before it ran"),
                    // The worker's end follows, and ends the process.
                    Err(error) if error.code == ErrorCode::Lost => return,
                    Err(error) => ExecEnd { status: ExecStatus::Refused, ..ExecEnd::lost(error.to_string()) },
                };
                let _ = reporter.send(Box::new(Report::Ended { exec, end }));
            })
        };
        let leaving = self.worker.current.as_ref().is_none_or(|current| current.leaving);
        let waits = leaving || self.kernel.is_changing() || self.kernel.is_held();
        match (self.link(), &self.life.state) {
            (Some(link), State::Busy { .. }) if !waits => drop(tokio::task::spawn_local(start(Ok(link)))),
            _ => {
                self.work.queue.push_back(Item::Operation(Box::new(start), None));
                self.step(Event::Used).await;
            }
        }
    }

    /// Handles the end of a process.
    pub(crate) async fn process_ended(&mut self, exec: ExecId, end: ExecEnd) {
        let execution = self.kernel.executions.borrow().get(&exec).cloned();
        if let Some(execution) = execution.filter(|execution| !execution.is_finished()) {
            self.end(&execution, end).await;
        }
        self.used();
        self.kernel.follow_files();
        self.rearm_idle();
    }

    /// Ends the processes of a worker that is gone.
    pub(crate) async fn end_lost_processes(&mut self, cause: &CrashCause) {
        let gone = std::mem::take(&mut *self.kernel.processes.borrow_mut());
        for (exec, _) in gone {
            let end = match &self.life.state {
                State::Stopping { reason, .. } => {
                    never_ran(&format!("it was ended with its tree: the kernel was stopped ({})", reason.name()))
                }
                _ => ExecEnd::lost(cause.to_string()),
            };
            self.process_ended(exec, end).await;
        }
    }
}

/// Starts a process; returns whether it runs. Waits while the kernel is frozen for a checkpoint.
async fn start(
    link: &Rc<WorkerLink>,
    process: WorkerProcess,
    execution: &Execution,
    is_cancelled: &Cell<bool>,
) -> Result<bool> {
    let (exec, until) = (process.exec, Instant::now() + limits::CHECKPOINT_WAIT);
    loop {
        if is_cancelled.get() {
            return Ok(false);
        }
        match link.spawn(&process).await {
            Err(error) if error.reason == "frozen" && Instant::now() < until => tokio::time::sleep(FROZEN_RETRY).await,
            Err(error) => return Err(error),
            Ok(()) => break,
        }
    }
    // Input may follow now.
    execution.take_request();
    if is_cancelled.get() {
        // Unless it has ended meanwhile.
        let _ = link.interrupt(exec).await;
    }
    Ok(true)
}
