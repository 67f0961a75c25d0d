//! Messages of a worker, forwarded to the kernel's task and to the outputs.

use std::rc::{Rc, Weak};

use tokio::sync::{mpsc, watch};

use super::Report;
use super::background::Background;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecEnd, OutputEvent, Stream};
use crate::core::ids::ExecId;
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::value::Value;
use crate::link::host::{Job, WorkerListener};
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::execution::Execution;
use crate::supervisor::kernel::tools::Tools;

/// Listens to the worker of one attempt.
///
/// An adopted worker sends messages before its kernel's task exists: they are queued until [`Listener::bind`].
pub(crate) struct Listener {
    attempt: u64,
    kernel: watch::Sender<Weak<Kernel>>,
    reporter: mpsc::UnboundedSender<Box<Report>>,
    tools: Rc<Tools>,
    background: Background,
}

impl Listener {
    pub(crate) fn new(
        attempt: u64,
        kernel: &Rc<Kernel>,
        reporter: mpsc::UnboundedSender<Box<Report>>,
        tools: Rc<Tools>,
    ) -> Self {
        let listener = Self::before_kernel(attempt, reporter, tools);
        listener.bind(kernel);
        listener
    }

    pub(crate) fn before_kernel(attempt: u64, reporter: mpsc::UnboundedSender<Box<Report>>, tools: Rc<Tools>) -> Self {
        let events = Rc::clone(tools.events());
        let (kernel, bound) = watch::channel(Weak::<Kernel>::new());
        let background = Background::new(move |detail| {
            let kernel = bound.borrow().upgrade();
            if let Some(kernel) = &kernel {
                events.publish(&kernel.event_name(), "background_output", detail);
            }
            kernel.is_some()
        });
        Listener { attempt, kernel, reporter, tools, background }
    }

    pub(crate) fn bind(&self, kernel: &Rc<Kernel>) {
        self.kernel.send_replace(Rc::downgrade(kernel));
    }

    fn kernel(&self) -> Option<Rc<Kernel>> {
        self.kernel.borrow().upgrade()
    }

    async fn execution(&self, exec: ExecId) -> Option<Rc<Execution>> {
        let mut bound = self.kernel.subscribe();
        let kernel = bound.wait_for(|kernel| kernel.strong_count() > 0).await.ok()?.upgrade()?;
        kernel.executions.borrow().get(&exec).cloned()
    }

    fn report(&self, report: Report) {
        // The task may have ended; the message is obsolete then.
        let _ = self.reporter.send(Box::new(report));
    }
}

#[async_trait::async_trait(?Send)]
impl WorkerListener for Listener {
    async fn output(&self, exec: ExecId, offset: u64, stream: Stream, data: Vec<u8>) {
        if let Some(execution) = self.execution(exec).await {
            execution.output.push(offset, stream, data).await;
        }
    }

    async fn event(&self, exec: ExecId, event: OutputEvent) {
        if let Some(execution) = self.execution(exec).await {
            execution.output.push_event(event).await;
        }
    }

    fn last(&self) {
        self.report(Report::Last { attempt: self.attempt });
    }

    fn ended(&self, exec: ExecId, end: ExecEnd, _output_bytes: u64) {
        self.report(Report::Ended { exec, end });
    }

    async fn tool_call(&self, _exec: ExecId, name: String, args: Value) -> Result<(Value, String)> {
        let called = tokio::time::timeout(limits::MCP_CALL, self.tools.call(&name, args)).await;
        called.unwrap_or_else(|_| Err(Error::deadline(format!("tool {name} did not answer in time"))))
    }

    fn jobs(&self, jobs: Vec<Job>) {
        if let Some(kernel) = self.kernel() {
            kernel.view.borrow_mut().jobs = jobs;
        }
    }

    fn missed(&self, missed: Vec<MissedEntry>) {
        if let Some(kernel) = self.kernel() {
            kernel.view.borrow_mut().missed = missed;
        }
    }

    fn background(&self, stream: Stream, data: Vec<u8>) {
        self.background.wrote(stream, &data);
    }

    fn dying(&self, cause: CrashCause) {
        self.report(Report::Dying { attempt: self.attempt, cause });
    }

    fn disconnected(&self) {
        self.report(Report::Disconnected { attempt: self.attempt });
    }
}
