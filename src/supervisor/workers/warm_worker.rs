//! A slot: a worker with its sandbox and its engine ready, and no kernel. Bound once; then it is that kernel's worker, and ends
//! with it.
//!
//! It stands on a folder like a kernel's, new and empty: its home. A kernel that is made while the slot is ready takes the home for its
//! own folder, and the slot for its worker (see [`crate::supervisor::workers::reserved`]): then little is left to do when it is used. A kernel that has a folder
//! brings that, and the home goes.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use super::admission::Place;
use super::pool::Active;
use super::worker::{self, Folders, Shape, Started, WorkerProcess};
use crate::catalog::WorkerRow;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;
use crate::link::binding::{BoundFolder, BoundMount, BoundSource, KernelBinding};
use crate::link::host::{Relay, WorkerIdentity, WorkerLink};
use crate::sandbox::plan::{PlannedMount, RunAs};
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::task::Listener;

/// What a slot is called where a kernel has its name.
const NAME: &str = "slot";

/// A worker without a kernel. Dropped, it ends.
pub(crate) struct Slot {
    link: WorkerLink,
    relay: Rc<Relay>,
    process: WorkerProcess,
    /// When its process began, as /proc counts.
    start_ticks: u64,
    identity: WorkerIdentity,
    there: Rc<Cell<bool>>,
    /// Its folder, by the id of the kernel that may take it over; none once one has.
    home: Option<KernelId>,
    /// The workspace in that.
    workspace: PathBuf,
}

impl Slot {
    /// Starts one. `gone` is called if it ends before it is bound.
    ///
    /// # Errors
    /// Those of a worker's start.
    pub(crate) async fn start(
        host: &Rc<Host>,
        place: Place,
        shape: &Shape,
        gone: impl Fn(WorkerId) + 'static,
    ) -> Result<Slot> {
        let home = KernelId::from_bytes(host.random());
        let started = async {
            let workspace = host.catalog.create_kernel_files(home).await?.workspace;
            // What is loaded ahead leaves nothing in it.
            allow(&workspace, CLOSED)?;
            let slot = Slot::start_on(host, place, shape, (home, workspace), gone).await?;
            if let Err(error) = host.catalog.state(home).open_ahead().await {
                tracing::debug!(%error, "the database of a slot's kernel opens later");
            }
            Ok(slot)
        };
        let started = started.await;
        if started.is_err() {
            remove(host, home).await;
        }
        started
    }

    async fn start_on(
        host: &Rc<Host>,
        place: Place,
        shape: &Shape,
        (home, workspace): (KernelId, PathBuf),
        gone: impl Fn(WorkerId) + 'static,
    ) -> Result<Slot> {
        let Folders { dir, own_workspace, .. } = worker::folders_of(host, home);
        let (identity, socket) = worker::identity(host, KernelId::from_bytes([0; 16]), Epoch(0));
        let mut plan = worker::plan(host, shape, identity.worker, &dir);
        (plan.own_workspace, plan.unbound) = (own_workspace, true);
        // The home goes when a kernel brings its own folder.
        plan.staged_on = dir.parent().map(Path::to_owned);
        let name: KernelName = NAME.parse().map_err(|_| Error::internal("a slot has no name"))?;
        let document = worker::document(host, shape, &identity, name, plan, &socket).await?;
        let there = Rc::new(Cell::new(true));
        let (flag, worker) = (Rc::clone(&there), identity.worker);
        let relay = Relay::new(move || {
            flag.set(false);
            gone(worker);
        });
        // In no catalog: whose daemon is gone, that slot ends by itself.
        let recorded = async |_| Ok(());
        let (link, report, process) =
            worker::launch(host, place, &document, &identity, relay.clone(), recorded).await?;
        for missed in &report.not_restored {
            tracing::warn!(module = missed.key, reason = missed.reason, "a module cannot be loaded ahead");
        }
        let lane = tokio::time::timeout(limits::POOL_CREATION, link.open_lane()).await;
        let lane = lane.unwrap_or_else(|_| Err(Error::deadline("a slot opens no lane")));
        let start_ticks = process.start_ticks();
        let slot = Slot { link, relay, process, start_ticks, identity, there, home: Some(home), workspace };
        match lane {
            Ok(()) => Ok(slot),
            Err(error) => {
                slot.end(host).await;
                Err(error)
            }
        }
    }

    /// Whether it has not ended, as far as is known.
    pub(crate) fn is_there(&self) -> bool {
        self.there.get()
    }

    /// Asks whether it is well.
    pub(crate) fn is_well(&self) -> impl Future<Output = bool> + 'static {
        self.link.answers_within(limits::POOL_HEALTH_CHECK)
    }

    /// Which worker it is.
    pub(crate) fn id(&self) -> WorkerId {
        self.identity.worker
    }

    /// Its folder is from now on that of a kernel that is being made, whose id it gives. Once.
    ///
    /// # Errors
    /// Its workspace cannot be opened to its kernel.
    pub(crate) fn give_home(&mut self, epoch: Epoch) -> Result<KernelId> {
        let home = self.home.ok_or_else(|| Error::internal("a slot's folder is a kernel's already"))?;
        allow(&self.workspace, OPEN)?;
        self.home = None;
        (self.identity.kernel, self.identity.epoch) = (home, epoch);
        Ok(home)
    }

    /// What the catalog is to know of it.
    pub(crate) fn row(&self) -> WorkerRow {
        worker::row(&self.identity, self.process.socket(), Some((self.process.pid(), self.start_ticks)))
    }

    /// Makes it the kernel's worker. In the catalog before it knows: a daemon that is killed meanwhile leaves none behind.
    ///
    /// # Errors
    /// What the kernel's folder, mounts or state are in the way of. It is ended then.
    pub(crate) async fn bind(
        mut self,
        host: &Rc<Host>,
        kernel: &Rc<Kernel>,
        mounts: &[PlannedMount],
        listener: Rc<Listener>,
        active: Active,
    ) -> Result<Started> {
        let is_home = self.identity.kernel == kernel.id;
        (self.identity.kernel, self.identity.epoch) = (kernel.id, kernel.epoch);
        let (origin, left) = (kernel.origin_now(), self.home.take());
        let engine = kernel.spec.engine;
        let bound = async {
            let begun = Instant::now();
            let record = async {
                if !is_home {
                    host.catalog.put_worker(self.row()).await?;
                }
                host.metrics.since(Stage::BindRecord, engine, begun);
                Ok(())
            };
            let binding = async {
                let binding = self.binding(host, kernel, is_home, mounts, origin).await?;
                host.metrics.since(Stage::BindSources, engine, begun);
                Ok::<_, Error>(binding)
            };
            let ((), binding) = futures::try_join!(record, binding)?;
            // What the engine says of its state comes before the answer.
            self.relay.set(listener);
            let begun = Instant::now();
            let report = self.link.bind_kernel(&binding).await?;
            host.metrics.since(Stage::BindWorker, engine, begun);
            Ok(report)
        };
        let bound = bound.await;
        if let Some(left) = left {
            let host = Rc::clone(host);
            tokio::task::spawn_local(async move { remove(&host, left).await });
        }
        match bound {
            Ok(report) => {
                let Slot { link, mut process, .. } = self;
                process.active = Some(active);
                Ok(Started { link, report, process, told_origin: Some(origin) })
            }
            Err(error) => {
                host.workers.end(self.process).await;
                Err(error)
            }
        }
    }

    /// Ends it; its folder goes, if that is still its own.
    pub(crate) async fn end(self, host: &Host) {
        let Slot { link, process, home, .. } = self;
        drop(link);
        match home {
            Some(home) => {
                host.workers.end_unrecorded(&process).await;
                remove(host, home).await;
                // What it took is given back as the pool forgets it, not before: what is given back and still to give way would be counted twice.
                drop(process);
            }
            None => host.workers.end(process).await,
        }
    }

    async fn binding(
        &self,
        host: &Host,
        kernel: &Kernel,
        is_home: bool,
        mounts: &[PlannedMount],
        origin: (OriginKind, u32),
    ) -> Result<KernelBinding> {
        let run_as = worker::run_as(host, kernel.uid)?;
        let (mut folder, mut protected) = (None, Vec::new());
        if !is_home {
            let Folders { dir, own_workspace, workspace } = worker::folders(host, kernel)?;
            let own: Vec<&Path> = [Some(dir.as_path()), workspace.as_deref()].into_iter().flatten().collect();
            protected = own.iter().filter_map(|folder| folder.canonicalize().ok()).collect();
            let workspace = match &workspace {
                Some(shared) => Some(self.source(host, shared, run_as).await?),
                None => None,
            };
            let dir = self.source(host, &dir, run_as).await?;
            folder = Some(BoundFolder { dir, own_workspace, workspace });
        }
        let mut given = Vec::with_capacity(mounts.len());
        for mount in mounts {
            // Without this the worker opens it itself, with its user's rights.
            let mapped = run_as.filter(|run_as| run_as.map_root);
            let source = self.source(host, &mount.source, mapped).await?;
            given.push(BoundMount { inside: mount.inside.clone(), source, writable: mount.writable });
        }
        Ok(KernelBinding {
            kernel: kernel.id,
            epoch: kernel.epoch,
            name: kernel.spec.name.clone(),
            folder,
            protected,
            mounts: given,
            origin,
            ephemeral: kernel.spec.ephemeral,
        })
    }

    /// A folder or file as the worker can have it: in a daemon that is root a mount on which the worker's user owns what its owner
    /// owns.
    async fn source(&self, host: &Host, path: &Path, run_as: Option<RunAs>) -> Result<BoundSource> {
        let token = match run_as {
            Some(run_as) => self.link.hand_over(host.workers.mapped(path, run_as)?).await?,
            None => 0,
        };
        Ok(BoundSource { path: path.to_owned(), token })
    }
}

/// Nobody writes into the workspace of a slot until it is a kernel's; then it is as any kernel's is.
const CLOSED: u32 = 0o500;
const OPEN: u32 = 0o700;

fn allow(workspace: &Path, mode: u32) -> Result<()> {
    let changed = std::fs::set_permissions(workspace, std::os::unix::fs::PermissionsExt::from_mode(mode));
    changed.map_err(|error| Error::unavailable(format!("cannot change the mode of {}: {error}", workspace.display())))
}

/// Removes a folder that became no kernel's.
async fn remove(host: &Host, home: KernelId) {
    if let Err(error) = host.catalog.remove_unlisted_files(home).await {
        tracing::warn!(%error, "the folder of a slot could not be removed: the next start does it");
    }
}
