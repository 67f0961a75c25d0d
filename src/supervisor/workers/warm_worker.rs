//! A warm worker: its isolation and engine are ready, and it has no kernel. It is bound once, and then is that kernel's
//! worker until both end.
//!
//! Its folder is like a kernel's, new and empty. A kernel created while the worker is ready adopts the folder and its
//! id (see [`super::reserved`]), which leaves little to do at its first use. A kernel that has a folder already brings
//! its own, and the worker's is removed.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;

use super::Workers;
use super::admission::WorkerPermit;
use super::pool::Active;
use super::worker::{self, KeptMemory, KernelStart, LiveWorker, Started};
use crate::catalog::WorkerRow;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::origin::{Origin, OriginKind};
use crate::core::pool::Costs;
use crate::isolation::{BoundSources, HostMount, NewWorker, Shape};
use crate::link::binding::KernelBinding;
use crate::link::handshake::WorkerIdentity;
use crate::link::host::{Relay, WorkerLink, WorkerListener};
use crate::supervisor::host::metrics::Stage;

/// The placeholder for a kernel's name in a warm worker.
const NAME: &str = "slot";

/// A worker without a kernel. Dropping ends the worker.
pub(crate) struct WarmWorker {
    link: WorkerLink,
    relay: Rc<Relay>,
    worker: LiveWorker,
    shape: Shape,
    identity: WorkerIdentity,
    is_alive: Rc<Cell<bool>>,
    /// Its folder, by the id of the adopting kernel; `None` once adopted.
    own_kernel: Option<KernelId>,
    /// The workspace in that folder.
    workspace: PathBuf,
}

impl WarmWorker {
    /// Starts one. `on_exit` is called if it ends before it is bound.
    ///
    /// # Errors
    /// Those of a worker's start.
    pub(crate) async fn start(
        workers: &Rc<Workers>,
        place: WorkerPermit,
        shape: &Shape,
        on_exit: impl Fn(WorkerId) + 'static,
    ) -> Result<WarmWorker> {
        let catalog = &workers.host.catalog;
        let own_kernel = KernelId::from_bytes(workers.host.random());
        let started = async {
            let workspace = catalog.create_kernel_files(own_kernel).await?.workspace;
            // Modules loaded in advance leave nothing in the workspace.
            set_mode(&workspace, CLOSED)?;
            let warm = WarmWorker::start_in(workers, place, shape, (own_kernel, workspace), on_exit).await?;
            if let Err(error) = catalog.state(own_kernel).open_ahead().await {
                tracing::debug!(%error, "the database of a warm worker's kernel opens later");
            }
            Ok(warm)
        };
        let started = started.await;
        if started.is_err() {
            remove_files(workers, own_kernel).await;
        }
        started
    }

    async fn start_in(
        workers: &Rc<Workers>,
        place: WorkerPermit,
        shape: &Shape,
        (own_kernel, workspace): (KernelId, PathBuf),
        on_exit: impl Fn(WorkerId) + 'static,
    ) -> Result<WarmWorker> {
        let identity = workers.identity(KernelId::from_bytes([0; 16]), Epoch(0));
        let name: KernelName = NAME.parse().map_err(|_| Error::internal("a warm worker has no name"))?;
        let is_alive = Rc::new(Cell::new(true));
        let (flag, id) = (Rc::clone(&is_alive), identity.worker);
        let relay = Relay::new(move || {
            flag.set(false);
            on_exit(id);
        });
        let origin = Origin::default();
        let new = NewWorker {
            shape,
            identity: &identity,
            name,
            home: &workers.host.home(own_kernel, None),
            mounts: Vec::new(),
            origin: (origin.kind, origin.generation),
            orphan_grace: workers.host.config.daemon.orphan_grace,
            is_warm: true,
            copy: None,
        };
        // Not in a catalog: a warm worker ends with its daemon.
        let record = |_| async { Ok(()) }.boxed_local();
        let (link, report, worker) = workers.launch(place, new, &record, relay.clone()).await?;
        for missed in &report.not_restored {
            tracing::warn!(module = missed.key, reason = missed.reason, "a module cannot be loaded in advance");
        }
        let creation = Costs::of(shape.isolation).creation;
        let channel = tokio::time::timeout(creation, link.open_exec_channel()).await;
        let channel = channel.unwrap_or_else(|_| Err(Error::deadline("a warm worker opens no execution channel")));
        let own_kernel = Some(own_kernel);
        let warm = WarmWorker { link, relay, worker, shape: shape.clone(), identity, is_alive, own_kernel, workspace };
        let ready = match channel {
            Ok(()) => warm.worker.handle().park().await,
            failed => failed,
        };
        match ready {
            Ok(()) => Ok(warm),
            Err(error) => {
                warm.end(workers).await;
                Err(error)
            }
        }
    }

    /// Whether the worker is still running, as far as known.
    pub(crate) fn is_alive(&self) -> bool {
        self.is_alive.get()
    }

    /// Whether the worker answers in time; of a stopped one, what it runs in.
    pub(crate) fn answers(&self) -> impl Future<Output = bool> + 'static {
        let handle = Rc::clone(self.worker.handle());
        let asked = (!handle.is_parked()).then(|| self.link.answers_within(limits::POOL_HEALTH_CHECK));
        async move {
            match asked {
                Some(answers) => answers.await,
                None => handle.answers_parked(limits::POOL_HEALTH_CHECK).await,
            }
        }
    }

    /// The worker's id.
    pub(crate) fn id(&self) -> WorkerId {
        self.identity.worker
    }

    /// Lets a kernel in creation adopt the folder; returns the kernel's id. Callable once.
    ///
    /// # Errors
    /// The workspace cannot be opened to its kernel.
    pub(crate) fn adopt_folder(&mut self, epoch: Epoch) -> Result<KernelId> {
        let own = self.own_kernel.ok_or_else(|| Error::internal("a warm worker's folder was adopted already"))?;
        set_mode(&self.workspace, OPEN)?;
        self.own_kernel = None;
        (self.identity.kernel, self.identity.epoch) = (own, epoch);
        Ok(own)
    }

    /// The worker's row for the catalog.
    pub(crate) fn row(&self) -> WorkerRow {
        worker::row(&self.identity, self.shape.isolation, self.worker.handle().record())
    }

    /// Binds the worker to a kernel. Recorded before the worker is notified, so that a killed daemon leaves no unknown
    /// worker.
    ///
    /// # Errors
    /// Problems with the kernel's folder, mounts or state. The worker has ended then.
    pub(crate) async fn bind(
        mut self,
        workers: &Rc<Workers>,
        kernel: &KernelStart,
        mounts: &[HostMount],
        listener: Rc<dyn WorkerListener>,
        active: Active,
    ) -> Result<Started> {
        let is_adopted = self.identity.kernel == kernel.id;
        (self.identity.kernel, self.identity.epoch) = (kernel.id, kernel.epoch);
        let (unused, engine, metrics) = (self.own_kernel.take(), kernel.spec.engine, &workers.host.metrics);
        let bound = async {
            let begun = Instant::now();
            let home = (!is_adopted).then(|| workers.host.home(kernel.id, kernel.workspace_of));
            let record = async {
                if let Some(home) = &home {
                    let record = self.worker.handle().record_for(home);
                    let row = worker::row(&self.identity, self.shape.isolation, record);
                    workers.host.catalog.put_worker(row).await?;
                }
                metrics.since(Stage::BindRecord, engine, begun);
                Ok(())
            };
            let sources = async {
                let sources = self.worker.handle().bind_sources(&self.link, home.as_ref(), mounts).await?;
                metrics.since(Stage::BindSources, engine, begun);
                Ok::<_, Error>(sources)
            };
            let ((), sources) = futures::try_join!(record, sources)?;
            // The engine's reports on its state precede the answer.
            self.relay.set(listener);
            let begun = Instant::now();
            let report = self.link.bind_kernel(&binding(kernel, sources)).await?;
            metrics.since(Stage::BindWorker, engine, begun);
            Ok(report)
        };
        let bound = bound.await;
        if let Some(unused) = unused {
            let workers = Rc::clone(workers);
            tokio::task::spawn_local(async move { remove_files(&workers, unused).await });
        }
        match bound {
            Ok(report) => {
                let WarmWorker { link, mut worker, .. } = self;
                worker.active = Some(active);
                let (known_origin, memory) = (Some(kernel.origin), KeptMemory::None);
                Ok(Started { link, report, worker, known_origin, memory })
            }
            Err(error) => {
                workers.end(self.worker).await;
                Err(error)
            }
        }
    }

    /// Ends the worker, and removes its folder unless a kernel adopted it.
    pub(crate) async fn end(self, workers: &Workers) {
        let WarmWorker { link, worker, own_kernel, .. } = self;
        drop(link);
        match own_kernel {
            Some(own) => {
                workers.end_unrecorded(&worker).await;
                remove_files(workers, own).await;
                // Its permit is released when the pool forgets the worker, not earlier: otherwise it would count twice
                // as reclaimable.
                drop(worker);
            }
            None => workers.end(worker).await,
        }
    }
}

/// What makes a worker that kernel's.
pub(super) fn binding(kernel: &KernelStart, sources: BoundSources) -> KernelBinding {
    let origin: (OriginKind, u32) = kernel.origin;
    KernelBinding {
        kernel: kernel.id,
        epoch: kernel.epoch,
        name: kernel.spec.name.clone(),
        folder: sources.folder,
        brings_state: sources.brings_state,
        protected: sources.protected,
        mounts: sources.mounts,
        origin,
        ephemeral: kernel.spec.ephemeral,
        copy: None,
    }
}

/// Protects the workspace of a warm worker from writes until a kernel owns it.
const CLOSED: u32 = 0o500;
const OPEN: u32 = 0o700;

fn set_mode(workspace: &Path, mode: u32) -> Result<()> {
    let changed = std::fs::set_permissions(workspace, std::os::unix::fs::PermissionsExt::from_mode(mode));
    changed.map_err(|error| Error::unavailable(format!("cannot change the mode of {}: {error}", workspace.display())))
}

/// Removes a folder that no kernel adopted.
async fn remove_files(workers: &Workers, own: KernelId) {
    if let Err(error) = workers.host.catalog.remove_unlisted_files(own).await {
        tracing::warn!(%error, "the folder of a warm worker could not be removed: the next start does it");
    }
}

/// The lifetime of an ephemeral kernel's worker without its daemon, which never reattaches: long enough to be attached
/// once.
pub(crate) fn orphan_grace(workers: &Workers, kernel: &KernelStart) -> Duration {
    let grace = workers.host.config.daemon.orphan_grace;
    if kernel.spec.ephemeral { grace.min(limits::WORKER_ADOPT) } else { grace }
}
