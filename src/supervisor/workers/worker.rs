//! A live worker: launched or adopted, attached, counted, ended, and recorded in the catalog so that none is lost.

use std::cell::RefCell;
use std::rc::Rc;

use super::Workers;
use super::admission::{UserQuota, WorkerPermit};
use super::pool::Active;
use crate::catalog::WorkerRow;
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::origin::OriginKind;
use crate::core::spec::KernelSpec;
use crate::isolation::{Deferral, LaunchNote, Launched, NewWorker, Recorder, Reporter, WorkerHandle, WorkerRecord};
use crate::link::handshake::WorkerIdentity;
use crate::link::host::{WorkerLink, WorkerListener, WorkerReport};

/// A kernel that needs a worker.
#[derive(Debug, Clone)]
pub struct KernelStart {
    /// Its id.
    pub id: KernelId,
    /// The ownership under which it starts.
    pub epoch: Epoch,
    /// Its owner.
    pub uid: u32,
    /// Its specification.
    pub spec: Rc<KernelSpec>,
    /// The origin of its state, and its generation.
    pub origin: (OriginKind, u32),
    /// The kernel whose workspace it shares, if any.
    pub workspace_of: Option<KernelId>,
}

/// A worker that is up and attached.
pub struct Started {
    /// The link to it.
    pub link: WorkerLink,
    /// The worker's report at attachment.
    pub report: WorkerReport,
    /// The worker.
    pub worker: LiveWorker,
    /// The origin of the kernel's state that the worker holds, if known.
    pub known_origin: Option<(OriginKind, u32)>,
    /// What became of memory that was kept in the kernel's folder.
    pub memory: KeptMemory,
}

/// What became of memory that was kept in a kernel's folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum KeptMemory {
    /// There was none.
    #[default]
    None,
    /// The worker continues it.
    Continued,
    /// It could not continue; why.
    Lost(String),
}

/// A worker, counted while it lives.
pub struct LiveWorker {
    handle: Rc<dyn WorkerHandle>,
    /// Held until the worker has ended.
    place: RefCell<Option<WorkerPermit>>,
    /// Set for a formerly warm worker.
    pub(crate) active: Option<Active>,
}

impl LiveWorker {
    pub(crate) fn new(handle: Rc<dyn WorkerHandle>, place: WorkerPermit) -> LiveWorker {
        LiveWorker { handle, place: RefCell::new(Some(place)), active: None }
    }

    /// The worker's id.
    pub fn id(&self) -> WorkerId {
        self.handle.id()
    }

    /// The worker's handle.
    pub fn handle(&self) -> &Rc<dyn WorkerHandle> {
        &self.handle
    }

    /// Assigns the worker to a user's kernel.
    pub(crate) fn belongs(&self, share: UserQuota) {
        if let Some(place) = &mut *self.place.borrow_mut() {
            place.belongs(share);
        }
    }

    /// Marks the worker as ended; its place is free.
    pub(crate) fn leave_place(&self) {
        self.place.take();
    }

    /// Waits for its end.
    pub async fn exited(&self) {
        self.handle.exited().await;
    }

    /// Ends it with everything inside.
    pub fn kill(&self) {
        self.handle.kill();
    }
}

impl Workers {
    /// Creates a worker's identity.
    pub(crate) fn identity(&self, kernel: KernelId, epoch: Epoch) -> WorkerIdentity {
        let host = &self.host;
        let build = crate::link::bootstrap::BUILD.to_owned();
        WorkerIdentity { worker: WorkerId::from_bytes(host.random()), kernel, epoch, build, secret: host.random() }
    }

    /// Launches a worker and attaches to it. On failure the launched worker is ended and forgotten.
    ///
    /// # Errors
    /// Those of the driver, of `record` and of the handshake.
    pub(crate) async fn launch(
        &self,
        place: WorkerPermit,
        new: NewWorker<'_>,
        record: &Recorder<'_>,
        listener: Rc<dyn WorkerListener>,
    ) -> Result<(WorkerLink, WorkerReport, LiveWorker)> {
        let (identity, driver) = (new.identity, self.host.drivers.of(new.shape.isolation)?);
        let proven = new.copy.map_or_else(|| identity.clone(), |copy| copy.worker().clone());
        let (kernel, engine) = (new.name.to_string(), new.shape.engine);
        let Launched { connector, handle, notes } = match driver.launch(new, record).await {
            Ok(launched) => launched,
            Err(error) => {
                self.forget_row(identity.worker).await;
                return Err(error);
            }
        };
        for LaunchNote { kind, detail } in notes {
            self.host.metrics.noted(Some(engine), kind);
            let detail = serde_json::json!({ "kernel": kernel, "engine": engine.name(), "reason": detail });
            self.host.events.publish("", kind, detail);
        }
        let worker = LiveWorker::new(handle, place);
        match WorkerLink::attach(connector, &proven, listener).await {
            Ok((link, report)) => Ok((link, report, worker)),
            Err(error) => {
                self.end(worker).await;
                Err(error)
            }
        }
    }

    /// Adopts a worker of a former daemon.
    ///
    /// # Errors
    /// Why it was not adopted: the caller ends it.
    pub(crate) async fn adopt(
        &self,
        place: WorkerPermit,
        row: &WorkerRow,
        listener: Rc<dyn WorkerListener>,
    ) -> Result<Started> {
        let identity = identity_of(row)?;
        let driver = self.host.drivers.of(row.isolation)?;
        let Launched { connector, handle, .. } = driver.adopt(row.id, &row.record)?;
        handle.unpark().await?;
        let (link, report) = WorkerLink::attach(connector, &identity, listener).await?;
        // A former daemon may have been killed before it forgot from what the worker's machine was started.
        driver.forget_saved(&self.host.home(identity.kernel, None));
        if !report.is_suspended {
            // A former daemon may have been killed while it copied the worker's machine.
            link.resume().await?;
        }
        let (worker, memory) = (LiveWorker::new(handle, place), KeptMemory::None);
        Ok(Started { link, report, worker, known_origin: None, memory })
    }

    /// Ends a recorded worker that could not be adopted. If its end is uncertain, its row stays.
    pub(crate) async fn end_orphan(&self, row: &WorkerRow) {
        let ended = match self.host.drivers.of(row.isolation) {
            Ok(driver) => driver.end_orphan(row.id, &row.record).await,
            Err(error) => Err(error),
        };
        match ended {
            Ok(()) => self.forget_row(row.id).await,
            Err(error) => {
                tracing::error!(worker = %row.id, %error, "a worker may be running; the next start tries again");
            }
        }
    }

    /// Whether a recorded worker's process is running, or may be.
    pub(crate) fn may_run(&self, row: &WorkerRow) -> bool {
        self.host.drivers.of(row.isolation).is_ok_and(|driver| driver.may_run(&row.record))
    }

    /// Publishes and counts what the drivers report beside launches, and defers their own work while memory is short.
    pub(crate) fn take_reports(self: &Rc<Self>) {
        let workers = Rc::downgrade(self);
        let deferral: Deferral = Rc::new(move || workers.upgrade().and_then(|workers| workers.pressure.left()));
        self.host.drivers.all().for_each(|driver| driver.defer_by(Rc::clone(&deferral)));
        let host = Rc::downgrade(&self.host);
        let reporter: Reporter = Rc::new(move |engine, LaunchNote { kind, detail }| {
            let Some(host) = host.upgrade() else { return };
            host.metrics.noted(engine, kind);
            let engine = engine.map(EngineName::name);
            host.events.publish("", kind, serde_json::json!({ "engine": engine, "reason": detail }));
        });
        self.host.drivers.all().for_each(|driver| driver.report_to(Rc::clone(&reporter)));
    }

    /// Removes leftovers of a former daemon's workers that the catalog does not know.
    pub(crate) fn sweep(&self, known: &[WorkerId]) {
        self.host.drivers.all().for_each(|driver| driver.sweep(known));
    }

    async fn forget_row(&self, worker: WorkerId) {
        if let Err(error) = self.host.catalog.remove_worker(worker).await {
            tracing::warn!(%worker, %error, "a worker that ended is still in the catalog; the next start removes it");
        }
    }

    /// Forgets a worker that has ended.
    pub(crate) async fn forget(&self, worker: &LiveWorker) {
        worker.handle.clean_up().await;
        self.forget_row(worker.id()).await;
    }

    /// Ends a worker and forgets it.
    pub(crate) async fn end(&self, worker: LiveWorker) {
        worker.kill();
        worker.exited().await;
        self.forget(&worker).await;
    }

    /// Ends a worker that has no catalog record.
    pub(crate) async fn end_unrecorded(&self, worker: &LiveWorker) {
        worker.kill();
        worker.exited().await;
        worker.handle.clean_up().await;
    }
}

/// The identity in a worker's row.
///
/// # Errors
/// `corrupt`.
pub(crate) fn identity_of(row: &WorkerRow) -> Result<WorkerIdentity> {
    let secret = <[u8; 32]>::try_from(row.secret.as_slice());
    let secret = secret.map_err(|_| Error::corrupt("a worker's secret is damaged"))?;
    Ok(WorkerIdentity { worker: row.id, kernel: row.kernel, epoch: row.epoch, build: row.build.clone(), secret })
}

/// The worker's row for the catalog.
pub(crate) fn row(
    identity: &WorkerIdentity,
    isolation: crate::core::spec::Isolation,
    record: WorkerRecord,
) -> WorkerRow {
    WorkerRow {
        id: identity.worker,
        kernel: identity.kernel,
        epoch: identity.epoch,
        build: identity.build.clone(),
        secret: identity.secret.to_vec(),
        isolation,
        record,
    }
}
