//! A live worker: launched or adopted, attached, counted, ended, and remembered in the catalog so that none is lost.

use std::cell::RefCell;
use std::rc::Rc;

use super::Workers;
use super::admission::{UserQuota, WorkerPermit};
use super::pool::Active;
use crate::catalog::WorkerRow;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::origin::OriginKind;
use crate::core::spec::KernelSpec;
use crate::isolation::{Launched, NewWorker, Recorder, WorkerHandle, WorkerRecord};
use crate::link::handshake::WorkerIdentity;
use crate::link::host::{WorkerLink, WorkerListener, WorkerReport};

/// A kernel that needs a worker.
#[derive(Debug, Clone, Copy)]
pub struct KernelStart<'a> {
    /// Its id.
    pub id: KernelId,
    /// The ownership under which it starts.
    pub epoch: Epoch,
    /// Whose it is.
    pub uid: u32,
    /// Its specification.
    pub spec: &'a KernelSpec,
    /// How its state came to be, and its generation.
    pub origin: (OriginKind, u32),
    /// The kernel in whose workspace it works, if that is not its own.
    pub workspace_of: Option<KernelId>,
}

/// A worker that is up and attached.
pub struct Started {
    /// The link to it.
    pub link: WorkerLink,
    /// What it reported when it was attached.
    pub report: WorkerReport,
    /// The worker.
    pub worker: LiveWorker,
    /// The origin of the kernel's state that the worker knows, if that is known.
    pub told_origin: Option<(OriginKind, u32)>,
}

/// A worker, counted while it lives.
pub struct LiveWorker {
    handle: Rc<dyn WorkerHandle>,
    /// Until it has ended.
    place: RefCell<Option<WorkerPermit>>,
    /// Of a worker that was warm.
    pub(crate) active: Option<Active>,
}

impl LiveWorker {
    pub(crate) fn new(handle: Rc<dyn WorkerHandle>, place: WorkerPermit) -> LiveWorker {
        LiveWorker { handle, place: RefCell::new(Some(place)), active: None }
    }

    /// Which worker.
    pub fn id(&self) -> WorkerId {
        self.handle.id()
    }

    /// How it runs.
    pub fn handle(&self) -> &Rc<dyn WorkerHandle> {
        &self.handle
    }

    /// It serves a kernel of that user from now on.
    pub(crate) fn belongs(&self, share: UserQuota) {
        if let Some(place) = &mut *self.place.borrow_mut() {
            place.belongs(share);
        }
    }

    /// It has ended: its place is free.
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
    /// A new worker's identity.
    pub(crate) fn identity(&self, kernel: KernelId, epoch: Epoch) -> WorkerIdentity {
        let host = &self.host;
        let build = crate::link::bootstrap::BUILD.to_owned();
        WorkerIdentity { worker: WorkerId::from_bytes(host.random()), kernel, epoch, build, secret: host.random() }
    }

    /// Launches a worker and attaches to it. What was launched is ended and forgotten if that fails.
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
        let Launched { connector, handle } = match driver.launch(new, record).await {
            Ok(launched) => launched,
            Err(error) => {
                self.forget_row(identity.worker).await;
                return Err(error);
            }
        };
        let worker = LiveWorker::new(handle, place);
        match WorkerLink::attach(connector, identity, listener).await {
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
        let secret =
            <[u8; 32]>::try_from(row.secret.as_slice()).map_err(|_| Error::corrupt("a worker's secret is damaged"))?;
        let build = row.build.clone();
        let identity = WorkerIdentity { worker: row.id, kernel: row.kernel, epoch: row.epoch, build, secret };
        let Launched { connector, handle } = self.host.drivers.of(row.isolation)?.adopt(row.id, &row.record)?;
        let (link, report) = WorkerLink::attach(connector, &identity, listener).await?;
        Ok(Started { link, report, worker: LiveWorker::new(handle, place), told_origin: None })
    }

    /// Ends a recorded worker that could not be adopted.
    pub(crate) async fn end_orphan(&self, row: &WorkerRow) {
        if let Ok(driver) = self.host.drivers.of(row.isolation) {
            driver.end_orphan(row.id, &row.record).await;
        }
        self.forget_row(row.id).await;
    }

    /// Whether a recorded worker came to exist.
    pub(crate) fn existed(&self, row: &WorkerRow) -> bool {
        self.host.drivers.of(row.isolation).is_ok_and(|driver| driver.existed(&row.record))
    }

    /// Removes what workers of a former daemon left that the catalog does not know.
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

    /// Ends a worker that is in no catalog.
    pub(crate) async fn end_unrecorded(&self, worker: &LiveWorker) {
        worker.kill();
        worker.exited().await;
        worker.handle.clean_up().await;
    }
}

/// What the catalog keeps of a worker.
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
