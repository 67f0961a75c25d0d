//! The safe point: a kernel's own turn between two executions, waited for with a bound and given up without a trace.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use crate::core::error::{Error, Result};
use crate::link::host::WorkerLink;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Trace, Turn, Waiting};

/// Who waits. Dropping it before its turn came takes it out of the queue.
pub(super) struct Ticket {
    turn: Waiting,
    kernel: Rc<Kernel>,
}

/// For whom something waits in a task of its own. Dropped before its turn came, it takes that out of the queue.
pub(super) struct TicketGuard(Rc<Ticket>);

impl Drop for TicketGuard {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

impl Ticket {
    /// That of somebody who has not asked yet.
    pub(super) fn new(kernel: &Rc<Kernel>) -> Rc<Ticket> {
        Rc::new(Ticket { turn: Rc::new(Cell::new(Turn::Waits)), kernel: Rc::clone(kernel) })
    }

    /// The same, to be given to a task; and for how long it is wished.
    pub(super) fn with_guard(kernel: &Rc<Kernel>) -> (Rc<Ticket>, TicketGuard) {
        let patience = Ticket::new(kernel);
        let wish = TicketGuard(Rc::clone(&patience));
        (patience, wish)
    }

    /// Whether its turn had not come.
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

/// Does `work` when nothing runs, what was asked before included. Once begun it goes on to its end, whoever still waits for it.
///
/// # Errors
/// `deadline` if its turn did not come in time: then nothing was done. And those of `work`.
pub(super) async fn take<T, F>(
    patience: Rc<Ticket>,
    trace: Trace,
    wait: Duration,
    work: impl FnOnce(Rc<WorkerLink>) -> F + 'static,
) -> Result<T>
where
    T: 'static,
    F: Future<Output = Result<T>> + 'static,
{
    let (kernel, turn) = (Rc::clone(&patience.kernel), Rc::clone(&patience.turn));
    let begins = Rc::clone(&turn);
    let done = kernel.change_with_worker(trace, turn, move |link| async move {
        match begins.replace(Turn::Begun) {
            Turn::GivenUp => Err(Error::deadline("nobody waits for this any more")),
            Turn::Waits | Turn::Begun => work(link).await,
        }
    });
    let mut done = std::pin::pin!(done);
    tokio::select! {
        biased;
        done = &mut done => return done,
        () = tokio::time::sleep(wait) => {}
    }
    if patience.give_up() {
        let name = &kernel.spec.name;
        return Err(Error::deadline(format!("kernel {name} was not at rest within {} s", wait.as_secs_f32()))
            .hint("interrupt what runs, or ask for that with --interrupt"));
    }
    done.await
}
