//! What every kernel's task uses of the rooms below and above it.

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

/// What a kernel's task needs of checkpoints. The checkpoint room implements it; the kernel room knows no checkpoints.
pub trait CheckpointService {
    /// Takes the checkpoint before a stop, if something changed. The caller holds the worker, and hands nothing to it meanwhile. A failure is published as an event.
    fn before_stop(
        &self,
        kernel: &Rc<Kernel>,
        link: &Rc<WorkerLink>,
        reason: StopReason,
    ) -> LocalBoxFuture<'static, ()>;

    /// The stop does not wait for an operation that is under way: nothing can be kept beside it.
    fn skipped(&self, kernel: &Rc<Kernel>) -> LocalBoxFuture<'static, ()>;

    /// The stop goes on although [`Self::before_stop`] is not over.
    fn timed_out(&self, kernel: &Kernel);

    /// Ends a restore that was interrupted: with the worker that is there, or without one.
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
