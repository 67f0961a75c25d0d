//! Reserved workers: warm workers whose folder a new kernel adopted, and which await its first use.
//!
//! ```text
//!  create ─▶ a warm worker is ready ─▶ its folder is the kernel's ─▶ recorded, answered ─▶ first use: bound
//!                                                                                   └─ unused for long, or evicted
//! ```
//!
//! Until its kernel is used, a reserved worker is a warm worker: it runs no client code and ends with its daemon.
//!
//! Nothing depends on a reservation: a kernel without its reserved worker gets a worker as any other does. The worker
//! serves its folder as it was when the worker started. So only the kernel's first use claims it, and every change of
//! the kernel's state or files counts as a use.

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
use crate::core::pool::Costs;
use crate::isolation::{HostMount, Shape};
use crate::link::host::WorkerListener;
use crate::supervisor::workers::Workers;

/// A warm worker that is bound at its kernel's first use.
pub(crate) struct ReservedWorker {
    kernel: KernelId,
    shape: Shape,
    warm: WarmWorker,
    active: Active,
}

/// The reserved workers of a host.
#[derive(Default)]
pub(crate) struct ReservedWorkers {
    /// The oldest first.
    kept: RefCell<VecDeque<ReservedWorker>>,
    /// Ending workers: the worker, its kernel, and its resources.
    leaving: Rc<RefCell<Vec<(WorkerId, KernelId, ResourceUse)>>>,
}

impl ReservedWorker {
    /// Reserves a warm worker for a kernel in creation, if one of its shape is ready.
    pub(crate) fn make(workers: &Rc<Workers>, shape: Shape, epoch: Epoch) -> Option<ReservedWorker> {
        workers.driver(shape.isolation).ok().filter(|driver| driver.is_pooled())?;
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

    /// The worker's row for the catalog.
    pub(crate) fn row(&self) -> WorkerRow {
        self.warm.row()
    }

    /// The kernel that adopted the worker's folder.
    pub(crate) fn kernel(&self) -> KernelId {
        self.kernel
    }

    /// Binds the worker to its kernel at the kernel's first use.
    ///
    /// # Errors
    /// As [`WarmWorker::bind`]; the worker has ended then.
    pub(crate) async fn bind(
        self,
        workers: &Rc<Workers>,
        kernel: &KernelStart,
        mounts: &[HostMount],
        listener: Rc<dyn WorkerListener>,
    ) -> Result<Started> {
        self.warm.bind(workers, kernel, mounts, listener, self.active).await
    }

    fn is_there(&self) -> bool {
        self.warm.is_alive()
    }

    /// Ends the worker; the returned handle need not be awaited. The folder stays: it belongs to the kernel, or to its
    /// failed creation.
    pub(crate) fn end(self, workers: &Rc<Workers>) -> JoinHandle<()> {
        let (workers, worker) = (Rc::clone(workers), self.worker());
        let leaving = Rc::clone(&workers.reserved.leaving);
        leaving.borrow_mut().push((worker, self.kernel, self.takes()));
        // Queued before the kernel's next worker is recorded: a daemon that is killed meanwhile leaves no two records.
        let forgotten = workers.host.catalog.remove_worker(worker);
        tokio::task::spawn_local(async move {
            // If the removal fails, the worker's end tries and reports it again.
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

    /// The worker's id.
    pub(crate) fn worker(&self) -> WorkerId {
        self.warm.id()
    }
}

impl ReservedWorkers {
    /// Keeps a worker until its kernel is used, for a bounded time and up to a bounded number per shape.
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
        let (workers, reservation) = (Rc::downgrade(workers), Costs::of(shape.isolation).reservation);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(reservation).await;
            if let Some(workers) = workers.upgrade() {
                workers.reserved.end_first(&workers, |kept| kept.worker() == worker);
            }
        });
    }

    /// Claims the worker of a kernel at its first start, if it is still usable. An unusable one ends before another
    /// worker opens the same files.
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

    /// Ends a kernel's reserved worker, and waits for its end as long as for any worker's.
    pub(crate) async fn release(&self, workers: &Rc<Workers>, kernel: KernelId) {
        self.end_first(workers, |kept| kept.kernel == kernel);
        let until = Instant::now() + limits::WORKER_STOP;
        while self.leaving.borrow().iter().any(|(_, of, _)| *of == kernel) && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Removes a worker that ended by itself.
    pub(crate) fn died(&self, workers: &Rc<Workers>, worker: WorkerId) {
        self.end_first(workers, |kept| kept.worker() == worker);
    }

    /// Ends the oldest; returns whether there was one.
    pub(crate) fn end_oldest(&self, workers: &Rc<Workers>) -> bool {
        self.end_first(workers, |_| true)
    }

    /// The number of reserved workers, ending ones included.
    pub(crate) fn count(&self) -> usize {
        self.kept.borrow().len() + self.leaving.borrow().len()
    }

    /// The resources of ending workers.
    pub(crate) fn leaving(&self) -> ResourceUse {
        self.leaving.borrow().iter().map(|(.., one)| *one).fold(ResourceUse::default(), ResourceUse::and)
    }

    /// The resources of all reserved workers, ending ones included.
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
