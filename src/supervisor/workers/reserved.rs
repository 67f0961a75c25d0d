//! ReservedWorkers: slots on whose folder a new kernel was made, and which wait for its first use.
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

use super::admission::ResourceUse;
use super::pool::Active;
use super::warm_worker::WarmWorker;
use super::worker::{KernelStart, Started};
use crate::catalog::WorkerRow;
use crate::core::error::Result;
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::isolation::{HostMount, Shape};
use crate::link::host::WorkerListener;
use crate::supervisor::workers::Workers;

/// A slot that is a kernel's as soon as that is used.
pub(crate) struct ReservedWorker {
    kernel: KernelId,
    shape: Shape,
    warm: WarmWorker,
    active: Active,
}

/// The promises of a host.
#[derive(Default)]
pub(crate) struct ReservedWorkers {
    /// The oldest first.
    kept: RefCell<VecDeque<ReservedWorker>>,
    /// Those on their way out: whose they were, and what they take.
    leaving: Rc<RefCell<Vec<(WorkerId, KernelId, ResourceUse)>>>,
}

impl ReservedWorker {
    /// One for a kernel that is being made, if a slot of its shape is ready.
    pub(crate) fn make(workers: &Rc<Workers>, shape: Shape, epoch: Epoch) -> Option<ReservedWorker> {
        let (mut warm, active) = workers.pool.take_ahead(&shape)?;
        match warm.adopt_folder(epoch) {
            Ok(kernel) => Some(ReservedWorker { kernel, shape, warm, active }),
            Err(error) => {
                tracing::warn!(%error, "a slot cannot become a new kernel's");
                let workers = Rc::clone(workers);
                tokio::task::spawn_local(async move {
                    warm.end(&workers).await;
                    drop(active);
                });
                None
            }
        }
    }

    /// What the catalog is to know of the kernel's worker.
    pub(crate) fn row(&self) -> WorkerRow {
        self.warm.row()
    }

    /// The kernel whose folder the slot stands on.
    pub(crate) fn kernel(&self) -> KernelId {
        self.kernel
    }

    /// Makes it the worker of its kernel, which is used now.
    ///
    /// # Errors
    /// As [`WarmWorker::bind`]; it has ended then.
    pub(crate) async fn bind(
        self,
        workers: &Rc<Workers>,
        kernel: &KernelStart<'_>,
        mounts: &[HostMount],
        listener: Rc<dyn WorkerListener>,
    ) -> Result<Started> {
        self.warm.bind(workers, kernel, mounts, listener, self.active).await
    }

    fn is_there(&self) -> bool {
        self.warm.is_alive()
    }

    /// Ends the slot, whether anybody waits for that or not. The folder stays: it is the kernel's, or goes with what would have been one.
    pub(crate) fn end(self, workers: &Rc<Workers>) -> JoinHandle<()> {
        let (workers, worker) = (Rc::clone(workers), self.worker());
        let leaving = Rc::clone(&workers.reserved.leaving);
        leaving.borrow_mut().push((worker, self.kernel, self.takes()));
        // Asked for before the kernel's next worker is recorded: a daemon that is killed meanwhile leaves no two.
        let forgotten = workers.host.catalog.remove_worker(worker);
        tokio::task::spawn_local(async move {
            // Its end says so again if that did not go well.
            let _ = forgotten.await;
            let ReservedWorker { warm, active, .. } = self;
            warm.end(&workers).await;
            drop(active);
            leaving.borrow_mut().retain(|(left, ..)| *left != worker);
            workers.pool.look_soon();
        })
    }

    fn takes(&self) -> ResourceUse {
        ResourceUse::one(self.shape.limits.memory_bytes)
    }

    /// Which worker it is.
    pub(crate) fn worker(&self) -> WorkerId {
        self.warm.id()
    }
}

impl ReservedWorkers {
    /// Keeps one until its kernel is used, but not for long, and not many of one kind.
    pub(crate) fn keep(&self, workers: &Rc<Workers>, promise: ReservedWorker) {
        if !promise.is_there() || workers.host.is_stopping() {
            drop(promise.end(workers));
            return;
        }
        let (worker, shape) = (promise.worker(), promise.shape.clone());
        let most = workers.host.pool_rules(shape.engine).max_pool_size as usize;
        self.kept.borrow_mut().push_back(promise);
        while self.kept.borrow().iter().filter(|kept| kept.shape == shape).count() > most.max(1) {
            self.end_first(workers, |kept| kept.shape == shape);
        }
        let workers = Rc::downgrade(workers);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(limits::POOL_RESERVATION).await;
            if let Some(workers) = workers.upgrade() {
                workers.reserved.end_first(&workers, |kept| kept.worker() == worker);
            }
        });
    }

    /// That of a kernel whose first worker is to be started, if it is still good for that. One that is not has ended before another worker
    /// opens what it had open.
    pub(crate) async fn claim(&self, workers: &Rc<Workers>, kernel: KernelId, shape: &Shape) -> Option<ReservedWorker> {
        let promise = self.take(|kept| kept.kernel == kernel);
        if let Some(promise) = promise {
            if promise.shape == *shape && promise.is_there() {
                return Some(promise);
            }
            drop(promise.end(workers));
        }
        self.release(workers, kernel).await;
        None
    }

    /// Ends a kernel's, and waits for the end of the slot, as long as for any worker's.
    pub(crate) async fn release(&self, workers: &Rc<Workers>, kernel: KernelId) {
        self.end_first(workers, |kept| kept.kernel == kernel);
        let until = Instant::now() + limits::WORKER_STOP;
        while self.leaving.borrow().iter().any(|(_, of, _)| *of == kernel) && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// A slot has ended by itself.
    pub(crate) fn died(&self, workers: &Rc<Workers>, worker: WorkerId) {
        self.end_first(workers, |kept| kept.worker() == worker);
    }

    /// Ends the oldest; whether there was one.
    pub(crate) fn end_oldest(&self, workers: &Rc<Workers>) -> bool {
        self.end_first(workers, |_| true)
    }

    /// How many there are, those on their way out included.
    pub(crate) fn count(&self) -> usize {
        self.kept.borrow().len() + self.leaving.borrow().len()
    }

    /// What those take that are on their way out.
    pub(crate) fn leaving(&self) -> ResourceUse {
        self.leaving.borrow().iter().map(|(.., one)| *one).fold(ResourceUse::default(), ResourceUse::and)
    }

    /// What all of them take.
    pub(crate) fn taken(&self) -> ResourceUse {
        self.kept.borrow().iter().map(ReservedWorker::takes).fold(self.leaving(), ResourceUse::and)
    }

    fn take(&self, is_it: impl Fn(&ReservedWorker) -> bool) -> Option<ReservedWorker> {
        let mut kept = self.kept.borrow_mut();
        let at = kept.iter().position(is_it)?;
        kept.remove(at)
    }

    fn end_first(&self, workers: &Rc<Workers>, is_it: impl Fn(&ReservedWorker) -> bool) -> bool {
        let found = self.take(is_it);
        let any = found.is_some();
        found.into_iter().for_each(|promise| drop(promise.end(workers)));
        any
    }
}
