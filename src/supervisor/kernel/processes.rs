//! Processes beside the engine: the running ones, and requests to them.

use std::cell::Cell;
use std::rc::Rc;

use super::command::{Actor, Command};
use super::execution::Execution;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, Program, TerminalSize};
use crate::core::ids::ExecId;
use crate::core::info::ProcessInfo;
use crate::link::host::Job;
use crate::supervisor::kernel::Kernel;

/// Characters of a command in a list of jobs.
const JOB_CHARS: usize = 200;

/// A process that runs or is about to.
#[derive(Debug)]
pub(crate) struct RunningProcess {
    /// Its program.
    pub program: Program,
    /// Milliseconds since 1970.
    pub started_at_ms: i64,
    /// Whether it is to end: one that is about to start does not.
    pub is_cancelled: Rc<Cell<bool>>,
}

impl Kernel {
    /// Journals a process and starts it, beside a running execution.
    ///
    /// # Errors
    /// `busy` beyond the limit, `conflict`, `unavailable` (breaker), and journal errors.
    pub async fn spawn(&self, request: ExecRequest, actor: Actor) -> Result<Rc<Execution>> {
        request.check().map_err(|error| Error::invalid(error.to_string()))?;
        self.ask(|reply| Command::Spawn(Box::new(request), actor, reply)).await
    }

    /// The running processes, oldest first.
    pub fn running_processes(&self) -> Vec<ProcessInfo> {
        let info = |(exec, process): (&ExecId, &RunningProcess)| ProcessInfo {
            exec: *exec,
            argv: process.program.argv.clone(),
            started_at_ms: process.started_at_ms,
            detached: process.program.detached,
            terminal: process.program.terminal.is_some(),
        };
        self.processes.borrow().iter().map(info).collect()
    }

    /// Background jobs of the engine, and processes beside it.
    pub(crate) fn background_work(&self) -> Vec<Job> {
        let job = |(exec, process): (&ExecId, &RunningProcess)| Job {
            id: format!("process {exec}"),
            command: process.program.command_line().chars().take(JOB_CHARS).collect(),
        };
        let jobs = self.view.borrow().jobs.clone();
        jobs.into_iter().chain(self.processes.borrow().iter().map(job)).collect()
    }

    /// Whether jobs or processes run in the background.
    pub(crate) fn has_background_work(&self) -> bool {
        !self.view.borrow().jobs.is_empty() || !self.processes.borrow().is_empty()
    }

    /// Ends a process with its tree; returns whether it runs.
    pub(crate) fn end_process(&self, exec: ExecId) -> bool {
        let processes = self.processes.borrow();
        let Some(process) = processes.get(&exec) else { return false };
        process.is_cancelled.set(true);
        self.release_output(exec);
        let link = self.link.borrow().clone();
        if let Some(link) = link {
            tokio::task::spawn_local(async move {
                // One that is about to start sees that it is cancelled.
                if let Err(error) = link.interrupt(exec).await {
                    tracing::debug!(%exec, %error, "end process");
                }
            });
        }
        true
    }

    /// Ends every process, before its files are replaced.
    ///
    /// # Errors
    /// Those of the worker.
    pub(crate) async fn end_processes(&self) -> Result<()> {
        for (exec, process) in self.processes.borrow().iter() {
            process.is_cancelled.set(true);
            self.release_output(*exec);
        }
        let link = self.link.borrow().clone();
        match link {
            Some(link) if !self.processes.borrow().is_empty() => link.end_processes().await,
            Some(_) | None => Ok(()),
        }
    }

    /// The end of a killed process does not wait for the readers of its output.
    fn release_output(&self, exec: ExecId) {
        if let Some(execution) = self.executions.borrow().get(&exec) {
            execution.output.release();
        }
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// `notFound` if it does not run or has none, `busy` if the kernel is suspended.
    pub async fn resize_terminal(&self, exec: ExecId, size: TerminalSize) -> Result<()> {
        match self.reachable_link()? {
            Some(link) if self.processes.borrow().contains_key(&exec) => link.resize(exec, size).await,
            Some(_) | None => Err(self.no_process(exec)),
        }
    }

    fn no_process(&self, exec: ExecId) -> Error {
        Error::not_found(format!("kernel {} runs no process {exec}", self.spec().name)).hint("list them: ryokan ps")
    }

    /// Sends a signal to a process's program.
    ///
    /// # Errors
    /// `notFound` if it does not run, `busy` if the kernel is suspended.
    pub async fn signal_process(&self, exec: ExecId, signal: i32) -> Result<()> {
        match self.reachable_link()? {
            Some(link) if self.processes.borrow().contains_key(&exec) => link.signal(exec, signal).await,
            Some(_) | None => Err(self.no_process(exec)),
        }
    }
}
