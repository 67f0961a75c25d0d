//! Promises: slots on whose folder a new kernel was made, and which wait for its first use.
//!
//! ```text
//!  create ─▶ a slot is ready ─▶ its folder is the kernel's ─▶ bound to it, beside the answer ─▶ first use: heard from then on
//!                                                                   └─ nobody uses the kernel, or others need the room: it ends
//! ```
//!
//! It is bound before it is needed, so that the client's next words find a worker that knows its kernel: nothing of the client's runs in
//! it before. What the kernel has from the beginning (`--path`) is given by the binding itself: then that waits for the first use.
//!
//! Nothing depends on one: a kernel without its promised slot gets a worker as any other does. A slot serves what its folder was when it
//! started: so it is claimed by the first use of its kernel only, which everything that changes the kernel's state or files goes through.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::admission::Taken;
use super::host::Host;
use super::kernel::Kernel;
use super::pool::Active;
use super::slot::Slot;
use super::start::mount_now;
use super::task::Listener;
use super::worker::{Shape, Started};
use crate::catalog::WorkerRow;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::rpc::worker_link::Relay;
use crate::sandbox::plan::PlannedMount;
use crate::worker::launch;

/// A slot that is a kernel's as soon as that is used.
pub(super) struct Promise {
    kernel: KernelId,
    shape: Shape,
    id: WorkerId,
    worker: Promised,
    /// If the catalog does not know yet whose it is: told when it does.
    recorded: RefCell<Option<oneshot::Receiver<()>>>,
}

/// How far it is.
enum Promised {
    /// It knows nothing of its kernel.
    Slot(Box<Slot>, Active),
    /// It is being made its kernel's worker, or is that already; nothing runs in it.
    Bound(Bound),
}

/// A worker that nobody listens to yet.
struct Bound {
    outcome: oneshot::Receiver<Result<Started>>,
    relay: Rc<Relay>,
    process: Rc<launch::WorkerProcess>,
    there: Rc<Cell<bool>>,
}

/// Whether the catalog knows what it is to know, once that is told.
async fn is_recorded(recorded: Option<oneshot::Receiver<()>>) -> bool {
    match recorded {
        Some(recorded) => recorded.await.is_ok(),
        None => true,
    }
}

/// The promises of a host.
#[derive(Default)]
pub(super) struct Promises {
    /// The oldest first.
    kept: RefCell<VecDeque<Promise>>,
    /// Those on their way out: whose they were, and what they take.
    leaving: Rc<RefCell<Vec<(WorkerId, KernelId, Taken)>>>,
}

impl Promise {
    /// One for a kernel that is being made, if a slot of its shape is ready.
    pub(super) fn make(host: &Rc<Host>, shape: Shape, epoch: Epoch) -> Option<Promise> {
        let (mut slot, active) = host.pool.take_ahead(&shape)?;
        match slot.give_home(host, epoch) {
            Ok(kernel) => {
                let (id, worker) = (slot.id(), Promised::Slot(Box::new(slot), active));
                Some(Promise { kernel, shape, id, worker, recorded: RefCell::default() })
            }
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

    /// What the catalog is to know of the kernel's worker; nothing, once it is bound.
    pub(super) fn row(&self) -> Option<WorkerRow> {
        match &self.worker {
            Promised::Slot(slot, _) => Some(slot.row()),
            Promised::Bound(_) => None,
        }
    }

    /// Whoever binds the slot waits for this: that the catalog knows it.
    pub(super) fn set_recorded(&self, recorded: oneshot::Receiver<()>) {
        self.recorded.replace(Some(recorded));
    }

    /// The kernel whose folder the slot stands on.
    pub(super) fn kernel(&self) -> KernelId {
        self.kernel
    }

    /// Has the slot become the kernel's worker before that is used: beside whatever its client does meanwhile. What the kernel is given later
    /// comes when it is used.
    fn bind_ahead(self, host: &Rc<Host>, kernel: &Rc<Kernel>) -> Promise {
        let Promise { kernel: id_of, shape, id, worker, recorded } = self;
        let worker = match worker {
            Promised::Slot(slot, active) if kernel.spec.paths.is_empty() => {
                let recorded = recorded.take();
                let (relay, process, there) = (slot.relay(), slot.handle(), slot.presence());
                let (sender, outcome) = oneshot::channel();
                let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
                tokio::task::spawn_local(async move {
                    let bound = if is_recorded(recorded).await {
                        slot.bind(&host, &kernel, &[], None, active).await
                    } else {
                        slot.end(&host).await;
                        Err(Error::lost("the kernel could not be recorded"))
                    };
                    drop(kernel);
                    // Whoever ended the promise waits for this.
                    if let Err(Ok(started)) = sender.send(bound) {
                        host.workers.end(started.process).await;
                    }
                });
                Promised::Bound(Bound { outcome, relay, process, there })
            }
            worker => worker,
        };
        Promise { kernel: id_of, shape, id, worker, recorded }
    }

    /// Makes it the worker of its kernel, which is used now.
    ///
    /// # Errors
    /// As [`Slot::bind`]; it has ended then.
    pub(super) async fn serve(
        self,
        host: &Rc<Host>,
        kernel: &Rc<Kernel>,
        mounts: &[PlannedMount],
        listener: &Rc<Listener>,
    ) -> Result<Started> {
        let Bound { outcome, relay, process, there } = match self.worker {
            Promised::Slot(slot, active) => {
                if !is_recorded(self.recorded.take()).await {
                    slot.end(host).await;
                    return Err(Error::lost("the kernel could not be recorded"));
                }
                return slot.bind(host, kernel, mounts, Some(Rc::clone(listener)), active).await;
            }
            Promised::Bound(bound) => bound,
        };
        let started = outcome.await.map_err(|_| Error::lost("a worker that was promised is not bound any more"))??;
        relay.set(Rc::<Listener>::clone(listener));
        let ready = async {
            // Its link may not have noticed yet.
            if !there.get() || process.has_ended() {
                return Err(Error::lost("the worker that was promised has ended"));
            }
            mount_now(host, kernel.uid, &started.link, mounts.to_vec()).await
        };
        match ready.await {
            Ok(()) => Ok(started),
            Err(error) => {
                host.workers.end(started.process).await;
                Err(error)
            }
        }
    }

    fn is_there(&self) -> bool {
        match &self.worker {
            Promised::Slot(slot, _) => slot.is_there(),
            Promised::Bound(bound) => bound.there.get(),
        }
    }

    /// Ends the slot, whether anybody waits for that or not. The folder stays: it is the kernel's, or goes with what would have been one.
    pub(super) fn end(self, host: &Rc<Host>) -> JoinHandle<()> {
        let (host, worker) = (Rc::clone(host), self.worker());
        let leaving = Rc::clone(&host.promises.leaving);
        leaving.borrow_mut().push((worker, self.kernel, self.takes()));
        if let Promised::Bound(bound) = &self.worker {
            // It would outlive a daemon that is killed now, and no row would lead to it.
            bound.process.kill();
        }
        // Asked for before the kernel's next worker is recorded: a daemon that is killed meanwhile leaves no two.
        let forgotten = host.catalog.remove_worker(worker);
        tokio::task::spawn_local(async move {
            // Its end says so again if that did not go well.
            let _ = forgotten.await;
            match self.worker {
                Promised::Slot(slot, active) => {
                    slot.end(&host).await;
                    drop(active);
                }
                Promised::Bound(Bound { outcome, .. }) => {
                    // One that could not be bound has ended by itself.
                    if let Ok(Ok(started)) = outcome.await {
                        host.workers.end(started.process).await;
                    }
                }
            }
            leaving.borrow_mut().retain(|(left, ..)| *left != worker);
            host.pool.look_soon();
        })
    }

    fn takes(&self) -> Taken {
        Taken::one(self.shape.limits.memory_bytes)
    }

    /// Which worker it is.
    pub(super) fn worker(&self) -> WorkerId {
        self.id
    }
}

impl Promises {
    /// Keeps one until its kernel is used, but not for long, and not many of one kind.
    pub(super) fn keep(&self, host: &Rc<Host>, promise: Promise, kernel: &Rc<Kernel>) {
        if !promise.is_there() || host.is_stopping() {
            drop(promise.end(host));
            return;
        }
        let promise = promise.bind_ahead(host, kernel);
        let (worker, shape) = (promise.worker(), promise.shape.clone());
        let most = host.config.pool_rules(shape.engine).max_pool_size as usize;
        self.kept.borrow_mut().push_back(promise);
        while self.kept.borrow().iter().filter(|kept| kept.shape == shape).count() > most.max(1) {
            self.end_first(host, |kept| kept.shape == shape);
        }
        let host = Rc::downgrade(host);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(limits::POOL_PROMISE_KEPT).await;
            if let Some(host) = host.upgrade() {
                host.promises.end_first(&host, |kept| kept.worker() == worker);
            }
        });
    }

    /// That of a kernel whose first worker is to be started, if it is still good for that. One that is not has ended before another worker
    /// opens what it had open.
    pub(super) async fn claim(&self, host: &Rc<Host>, kernel: KernelId, shape: &Shape) -> Option<Promise> {
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
    pub(super) async fn release(&self, host: &Rc<Host>, kernel: KernelId) {
        self.end_first(host, |kept| kept.kernel == kernel);
        let until = Instant::now() + limits::WORKER_STOP;
        while self.leaving.borrow().iter().any(|(_, of, _)| *of == kernel) && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// A slot has ended by itself.
    pub(super) fn died(&self, host: &Rc<Host>, worker: WorkerId) {
        self.end_first(host, |kept| kept.worker() == worker);
    }

    /// Ends the oldest; whether there was one.
    pub(super) fn end_oldest(&self, host: &Rc<Host>) -> bool {
        self.end_first(host, |_| true)
    }

    /// How many there are, those on their way out included.
    pub(super) fn count(&self) -> usize {
        self.kept.borrow().len() + self.leaving.borrow().len()
    }

    /// What those take that are on their way out.
    pub(super) fn leaving(&self) -> Taken {
        self.leaving.borrow().iter().map(|(.., one)| *one).fold(Taken::default(), Taken::and)
    }

    /// What all of them take.
    pub(super) fn taken(&self) -> Taken {
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
