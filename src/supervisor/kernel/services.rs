//! Services that every kernel's task uses.

use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;

use crate::core::error::Result;
use crate::core::kernel::StopReason;
use crate::core::kernel::transition::Record;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::transition::ExclusiveTransition;
use crate::supervisor::workers::Workers;

/// The services of a kernel's task.
pub struct KernelServices {
    /// The host.
    pub(crate) host: Rc<Host>,
    /// The workers.
    pub(crate) workers: Rc<Workers>,
    /// Checkpoints.
    pub(crate) checkpoints: Rc<dyn CheckpointService>,
}

/// Checkpoint operations that a kernel's task needs. The checkpoint module implements the trait; the kernel module does
/// not depend on checkpoints.
pub trait CheckpointService {
    /// Takes the checkpoint before a stop, if something changed.
    ///
    /// The caller holds the worker and hands no work to it meanwhile. A failure is published as an event.
    fn before_stop(
        &self,
        kernel: &Rc<Kernel>,
        link: &Rc<WorkerLink>,
        reason: StopReason,
    ) -> LocalBoxFuture<'static, ()>;

    /// Reports that the stop skips its checkpoint, because an operation is under way.
    fn skipped(&self, kernel: &Rc<Kernel>) -> LocalBoxFuture<'static, ()>;

    /// Reports that the stop proceeds before [`Self::before_stop`] has completed.
    fn timed_out(&self, kernel: &Kernel);

    /// Ends an interrupted restore: with the live worker, or without one.
    fn recover_restore(
        &self,
        kernel: &Rc<Kernel>,
        link: Option<&Rc<WorkerLink>>,
        transition: ExclusiveTransition,
        record: Record,
    ) -> LocalBoxFuture<'static, Result<()>>;

    /// How long a stop waits for [`Self::before_stop`].
    fn wait(&self, reason: Option<StopReason>, is_forced: bool) -> Duration;
}
