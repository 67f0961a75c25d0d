//! Promises: slots on whose folder a new kernel was made, and which wait for its first use.
//!
//! ```text
//!  create ─▶ a slot is ready ─▶ its folder is the kernel's ─▶ recorded, answered ─▶ first use: bound, as any slot
//!                                                                              └─ nobody uses the kernel, or others need the room: it ends
//! ```
//!
//! Until its kernel is used it is a slot: nothing of the client's runs in it, and it ends with its daemon.
//!
//! Nothing depends on one: a kernel without its promised slot gets a worker as any other does. A slot serves what its folder was when it
//! started: so it is claimed by the first use of its kernel only, which everything that changes the kernel's state or files goes through.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::admission::Taken;
use super::pool::Active;
use super::worker::{Shape, Started};
use crate::catalog::WorkerRow;
use crate::core::error::Result;
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::sandbox::plan::PlannedMount;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::task::Listener;
use crate::supervisor::workers::warm_worker::Slot;

/// A slot that is a kernel's as soon as that is used.
pub(crate) struct Promise {
    kernel: KernelId,
    shape: Shape,
    slot: Slot,
    active: Active,
}

/// The promises of a host.
#[derive(Default)]
pub(crate) struct Promises {
    /// The oldest first.
    kept: RefCell<VecDeque<Promise>>,
    /// Those on their way out: whose they were, and what they take.
    leaving: Rc<RefCell<Vec<(WorkerId, KernelId, Taken)>>>,
}

impl Promise {
    /// One for a kernel that is being made, if a slot of its shape is ready.
    pub(crate) fn make(host: &Rc<Host>, shape: Shape, epoch: Epoch) -> Option<Promise> {
        let (mut slot, active) = host.pool.take_ahead(&shape)?;
        match slot.give_home(epoch) {
            Ok(kernel) => Some(Promise { kernel, shape, slot, active }),
            Err(error) => {
                tracing::warn!(%error, "a slot cannot become a new kernel's");
                let host = Rc::clone(host);
                tokio::task::spawn_local(async move {
                    slot.end(&host).await;
                    drop(active);
                });
                None
            }
        }
    }

    /// What the catalog is to know of the kernel's worker.
    pub(crate) fn row(&self) -> WorkerRow {
        self.slot.row()
    }

    /// The kernel whose folder the slot stands on.
    pub(crate) fn kernel(&self) -> KernelId {
        self.kernel
    }

    /// Makes it the worker of its kernel, which is used now.
    ///
    /// # Errors
    /// As [`Slot::bind`]; it has ended then.
    pub(crate) async fn serve(
        self,
        host: &Rc<Host>,
        kernel: &Rc<Kernel>,
        mounts: &[PlannedMount],
        listener: &Rc<Listener>,
    ) -> Result<Started> {
        self.slot.bind(host, kernel, mounts, Rc::clone(listener), self.active).await
    }

    fn is_there(&self) -> bool {
        self.slot.is_there()
    }

    /// Ends the slot, whether anybody waits for that or not. The folder stays: it is the kernel's, or goes with what would have been one.
    pub(crate) fn end(self, host: &Rc<Host>) -> JoinHandle<()> {
        let (host, worker) = (Rc::clone(host), self.worker());
        let leaving = Rc::clone(&host.promises.leaving);
        leaving.borrow_mut().push((worker, self.kernel, self.takes()));
        // Asked for before the kernel's next worker is recorded: a daemon that is killed meanwhile leaves no two.
        let forgotten = host.catalog.remove_worker(worker);
        tokio::task::spawn_local(async move {
            // Its end says so again if that did not go well.
            let _ = forgotten.await;
            let Promise { slot, active, .. } = self;
            slot.end(&host).await;
            drop(active);
            leaving.borrow_mut().retain(|(left, ..)| *left != worker);
            host.pool.look_soon();
        })
    }

    fn takes(&self) -> Taken {
        Taken::one(self.shape.limits.memory_bytes)
    }

    /// Which worker it is.
    pub(crate) fn worker(&self) -> WorkerId {
        self.slot.id()
    }
}

impl Promises {
    /// Keeps one until its kernel is used, but not for long, and not many of one kind.
    pub(crate) fn keep(&self, host: &Rc<Host>, promise: Promise) {
        if !promise.is_there() || host.is_stopping() {
            drop(promise.end(host));
            return;
        }
        let (worker, shape) = (promise.worker(), promise.shape.clone());
        let most = host.pool_rules(shape.engine).max_pool_size as usize;
        self.kept.borrow_mut().push_back(promise);
        while self.kept.borrow().iter().filter(|kept| kept.shape == shape).count() > most.max(1) {
            self.end_first(host, |kept| kept.shape == shape);
        }
        let host = Rc::downgrade(host);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(limits::POOL_RESERVATION).await;
            if let Some(host) = host.upgrade() {
                host.promises.end_first(&host, |kept| kept.worker() == worker);
            }
        });
    }

    /// That of a kernel whose first worker is to be started, if it is still good for that. One that is not has ended before another worker
    /// opens what it had open.
    pub(crate) async fn claim(&self, host: &Rc<Host>, kernel: KernelId, shape: &Shape) -> Option<Promise> {
        let promise = self.take(|kept| kept.kernel == kernel);
        if let Some(promise) = promise {
            if promise.shape == *shape && promise.is_there() {
                return Some(promise);
            }
            drop(promise.end(host));
        }
        self.release(host, kernel).await;
        None
    }

    /// Ends a kernel's, and waits for the end of the slot, as long as for any worker's.
    pub(crate) async fn release(&self, host: &Rc<Host>, kernel: KernelId) {
        self.end_first(host, |kept| kept.kernel == kernel);
        let until = Instant::now() + limits::WORKER_STOP;
        while self.leaving.borrow().iter().any(|(_, of, _)| *of == kernel) && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// A slot has ended by itself.
    pub(crate) fn died(&self, host: &Rc<Host>, worker: WorkerId) {
        self.end_first(host, |kept| kept.worker() == worker);
    }

    /// Ends the oldest; whether there was one.
    pub(crate) fn end_oldest(&self, host: &Rc<Host>) -> bool {
        self.end_first(host, |_| true)
    }

    /// How many there are, those on their way out included.
    pub(crate) fn count(&self) -> usize {
        self.kept.borrow().len() + self.leaving.borrow().len()
    }

    /// What those take that are on their way out.
    pub(crate) fn leaving(&self) -> Taken {
        self.leaving.borrow().iter().map(|(.., one)| *one).fold(Taken::default(), Taken::and)
    }

    /// What all of them take.
    pub(crate) fn taken(&self) -> Taken {
        self.kept.borrow().iter().map(Promise::takes).fold(self.leaving(), Taken::and)
    }

    fn take(&self, is_it: impl Fn(&Promise) -> bool) -> Option<Promise> {
        let mut kept = self.kept.borrow_mut();
        let at = kept.iter().position(is_it)?;
        kept.remove(at)
    }

    fn end_first(&self, host: &Rc<Host>, is_it: impl Fn(&Promise) -> bool) -> bool {
        let found = self.take(is_it);
        let any = found.is_some();
        found.into_iter().for_each(|promise| drop(promise.end(host)));
        any
    }
}
