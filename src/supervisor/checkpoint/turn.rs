//! The safe point: a kernel's own turn between two executions, waited for with a bound and given up without a trace.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use crate::core::error::{Error, Result};
use crate::rpc::worker_link::WorkerLink;
use crate::supervisor::command::{Trace, Turn, Waiting};
use crate::supervisor::kernel::Kernel;

/// Who waits. Dropping it before its turn came takes it out of the queue.
struct Patience {
    turn: Waiting,
    kernel: Rc<Kernel>,
}

impl Patience {
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

impl Drop for Patience {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Does `work` when nothing runs, what was asked before included. Once begun it goes on to its end, whoever still waits for it.
///
/// # Errors
/// `deadline` if its turn did not come in time: then nothing was done. And those of `work`.
pub(super) async fn take<T, F>(
    kernel: &Rc<Kernel>,
    trace: Trace,
    wait: Duration,
    work: impl FnOnce(Rc<WorkerLink>) -> F + 'static,
) -> Result<T>
where
    T: 'static,
    F: Future<Output = Result<T>> + 'static,
{
    let turn: Waiting = Rc::new(Cell::new(Turn::Waits));
    let patience = Patience { turn: Rc::clone(&turn), kernel: Rc::clone(kernel) };
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
