//! The safe point: a moment between two executions, awaited with a time limit and abandoned without effect.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use crate::core::error::{Error, Result};
use crate::link::host::WorkerLink;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Trace, Turn, Waiting};

/// A queued request. Dropping the ticket before its start removes the request from the queue.
pub(super) struct Ticket {
    turn: Waiting,
    kernel: Rc<Kernel>,
}

/// Guards a request that waits in its own task. Dropping the guard before the start removes the request from the queue.
pub(super) struct TicketGuard(Rc<Ticket>);

impl Drop for TicketGuard {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

impl Ticket {
    /// A ticket for a request that is not queued yet.
    pub(super) fn new(kernel: &Rc<Kernel>) -> Rc<Ticket> {
        Rc::new(Ticket { turn: Rc::new(Cell::new(Turn::Waits)), kernel: Rc::clone(kernel) })
    }

    /// A ticket for a separate task, and the guard that keeps it queued.
    pub(super) fn with_guard(kernel: &Rc<Kernel>) -> (Rc<Ticket>, TicketGuard) {
        let ticket = Ticket::new(kernel);
        let guard = TicketGuard(Rc::clone(&ticket));
        (ticket, guard)
    }

    /// Gives up the request; returns whether it had not started.
    fn give_up(&self) -> bool {
        let waits = self.turn.get() == Turn::Waits;
        if waits {
            self.turn.set(Turn::GivenUp);
            self.kernel.leave_queue();
        }
        waits
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Runs `work` once all earlier requests have ended and nothing runs. Once started, `work` completes even if the caller
/// is gone.
///
/// # Errors
/// `deadline` if `work` did not start in time; it never runs then. Also errors of `work`.
pub(super) async fn take<T, F>(
    ticket: Rc<Ticket>,
    trace: Trace,
    wait: Duration,
    work: impl FnOnce(Rc<WorkerLink>) -> F + 'static,
) -> Result<T>
where
    T: 'static,
    F: Future<Output = Result<T>> + 'static,
{
    let (kernel, turn) = (Rc::clone(&ticket.kernel), Rc::clone(&ticket.turn));
    let begins = Rc::clone(&turn);
    let done = kernel.change_with_worker(trace, turn, move |link| async move {
        match begins.replace(Turn::Begun) {
            Turn::GivenUp => Err(Error::deadline("the request was given up")),
            Turn::Waits | Turn::Begun => work(link).await,
        }
    });
    let mut done = std::pin::pin!(done);
    tokio::select! {
        biased;
        done = &mut done => return done,
        () = tokio::time::sleep(wait) => {}
    }
    if ticket.give_up() {
        let name = &kernel.spec().name;
        return Err(Error::deadline(format!("kernel {name} was not at rest within {} s", wait.as_secs_f32()))
            .hint("interrupt what runs, or ask for that with --interrupt"));
    }
    done.await
}
