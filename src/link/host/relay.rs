//! The listener of a warm worker: discards reports until the kernel's listener replaces it.

use std::cell::RefCell;
use std::rc::Rc;

use crate::core::error::{Error, Result};
use crate::core::exec::{ExecEnd, OutputEvent, Stream};
use crate::core::ids::ExecId;
use crate::core::kernel::CrashCause;
use crate::core::missed::MissedEntry;
use crate::core::value::Value;
use crate::link::types::{Job, WorkerListener};

/// Forwards a worker's reports to its current listener.
pub struct Relay {
    to: RefCell<Option<Rc<dyn WorkerListener>>>,
    /// Called when the worker announces its end or the link closes before there is a listener.
    gone: Box<dyn Fn()>,
}

impl Relay {
    /// Creates a relay without a listener.
    pub fn new(gone: impl Fn() + 'static) -> Rc<Self> {
        Rc::new(Relay { to: RefCell::default(), gone: Box::new(gone) })
    }

    /// Sets the listener.
    pub fn set(&self, listener: Rc<dyn WorkerListener>) {
        *self.to.borrow_mut() = Some(listener);
    }

    fn now(&self) -> Option<Rc<dyn WorkerListener>> {
        self.to.borrow().clone()
    }
}

#[async_trait::async_trait(?Send)]
impl WorkerListener for Relay {
    async fn output(&self, exec: ExecId, offset: u64, stream: Stream, data: Vec<u8>) {
        if let Some(to) = self.now() {
            to.output(exec, offset, stream, data).await;
        }
    }

    async fn event(&self, exec: ExecId, event: OutputEvent) {
        if let Some(to) = self.now() {
            to.event(exec, event).await;
        }
    }

    fn ended(&self, exec: ExecId, end: ExecEnd, output_bytes: u64) {
        if let Some(to) = self.now() {
            to.ended(exec, end, output_bytes);
        }
    }

    fn last(&self) {
        if let Some(to) = self.now() {
            to.last();
        }
    }

    async fn tool_call(&self, exec: ExecId, name: String, args: Value) -> Result<(Value, String)> {
        match self.now() {
            Some(to) => to.tool_call(exec, name, args).await,
            None => Err(Error::refused("this worker has no kernel yet").reason("unbound")),
        }
    }

    fn jobs(&self, jobs: Vec<Job>) {
        if let Some(to) = self.now() {
            to.jobs(jobs);
        }
    }

    fn missed(&self, missed: Vec<MissedEntry>) {
        if let Some(to) = self.now() {
            to.missed(missed);
        }
    }

    fn background(&self, stream: Stream, data: Vec<u8>) {
        if let Some(to) = self.now() {
            to.background(stream, data);
        }
    }

    fn dying(&self, cause: CrashCause) {
        match self.now() {
            Some(to) => to.dying(cause),
            None => (self.gone)(),
        }
    }

    fn disconnected(&self) {
        match self.now() {
            Some(to) => to.disconnected(),
            None => (self.gone)(),
        }
    }
}
