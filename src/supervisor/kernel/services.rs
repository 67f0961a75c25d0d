//! What every kernel's task uses of the rooms below and above it.

use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;

use crate::core::kernel::StopReason;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::workers::Workers;

/// The services of a kernel's task.
pub struct KernelServices {
    /// The host.
    pub(crate) host: Rc<Host>,
    /// The workers.
    pub(crate) workers: Rc<Workers>,
    /// What happens before a worker stops.
    pub(crate) before_stop: Rc<dyn BeforeStop>,
}

/// What is kept of a kernel before its worker stops. The checkpoint room implements it; the kernel room knows no checkpoints.
pub trait BeforeStop {
    /// Keeps what changed. The caller holds the worker, and hands nothing to it meanwhile. A failure is published as an event.
    fn keep(&self, kernel: &Rc<Kernel>, link: &Rc<WorkerLink>, reason: StopReason) -> LocalBoxFuture<'static, ()>;

    /// The stop does not wait for an operation that is under way: nothing can be kept beside it.
    fn skip(&self, kernel: &Rc<Kernel>) -> LocalBoxFuture<'static, ()>;

    /// The stop goes on although [`Self::keep`] is not over.
    fn timed_out(&self, kernel: &Kernel);

    /// How long a stop waits for [`Self::keep`].
    fn wait(&self, reason: Option<StopReason>, is_forced: bool) -> Duration;
}
