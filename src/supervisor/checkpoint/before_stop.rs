//! The checkpoint before an unforced stop: automatic, only after a change, and never an obstacle to the stop.

use std::rc::Rc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;

use super::take::capture;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType};
use crate::core::error::{Error, Result};
use crate::core::kernel::StopReason;
use crate::core::kernel::transition::Record;
use crate::core::limits;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::services::CheckpointService;
use crate::supervisor::kernel::transition::ExclusiveTransition;

/// Checkpoint service of a host, for the kernels' tasks.
pub(crate) struct Checkpoints {
    host: Rc<Host>,
}

impl Checkpoints {
    /// Creates the service for the kernels of this host.
    pub(crate) fn new(host: &Rc<Host>) -> Checkpoints {
        Checkpoints { host: Rc::clone(host) }
    }
}

impl CheckpointService for Checkpoints {
    fn before_stop(
        &self,
        kernel: &Rc<Kernel>,
        link: &Rc<WorkerLink>,
        reason: StopReason,
    ) -> LocalBoxFuture<'static, ()> {
        let (host, kernel, link) = (Rc::clone(&self.host), Rc::clone(kernel), Rc::clone(link));
        async move { take_or_report(&host, &kernel, &link, reason).await }.boxed_local()
    }

    fn skipped(&self, kernel: &Rc<Kernel>) -> LocalBoxFuture<'static, ()> {
        let (host, kernel) = (Rc::clone(&self.host), Rc::clone(kernel));
        async move {
            if !kernel.spec().ephemeral && kernel.records.changed_since_head().await.unwrap_or(true) {
                publish_failure(&host, &kernel, "something else was being done with the kernel");
            }
        }
        .boxed_local()
    }

    fn timed_out(&self, kernel: &Kernel) {
        publish_failure(&self.host, kernel, "it took too long");
    }

    fn recover_restore(
        &self,
        kernel: &Rc<Kernel>,
        link: Option<&Rc<WorkerLink>>,
        transition: ExclusiveTransition,
        record: Record,
    ) -> LocalBoxFuture<'static, Result<()>> {
        let (host, kernel, link) = (Rc::clone(&self.host), Rc::clone(kernel), link.cloned());
        async move { super::restore_steps::recover(&host, &kernel, link.as_ref(), transition, record).await }
            .boxed_local()
    }

    fn wait(&self, reason: Option<StopReason>, is_forced: bool) -> Duration {
        match (reason, is_forced) {
            (Some(StopReason::Daemon), _) => limits::STOP_CHECKPOINT_SHUTDOWN.min(self.host.config.daemon.drain / 2),
            (_, true) => limits::STOP_CHECKPOINT_FORCED,
            (_, false) => limits::STOP_CHECKPOINT,
        }
    }
}

/// Publishes that a kernel stops without the due checkpoint.
fn publish_failure(host: &Host, kernel: &Kernel, why: &str) {
    let detail = serde_json::json!({ "error": why });
    host.events.publish(&kernel.event_name(), "stop_checkpoint_failed", detail);
}

/// Takes the checkpoint before a stop or a pause, if something changed. A failure is published as an event.
pub(super) async fn take_or_report(host: &Rc<Host>, kernel: &Rc<Kernel>, link: &Rc<WorkerLink>, reason: StopReason) {
    if let Err(error) = take(host, kernel, link, reason).await {
        tracing::warn!(kernel = %kernel.spec().name, %error, "no checkpoint was taken before the stop");
        publish_failure(host, kernel, &error.message);
    }
}

async fn take(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    reason: StopReason,
) -> Result<Option<Checkpoint>> {
    // An ephemeral kernel is never resumed.
    if kernel.spec().ephemeral {
        return Ok(None);
    }
    let has_jobs = kernel.has_background_work();
    if !has_jobs && !kernel.records.changed_since_head().await? {
        return Ok(None);
    }
    if kernel.is_changing() {
        kernel.not_in_transition()?;
    }
    if host.disk_is_full() {
        return Err(Host::full());
    }
    let _place = host.upkeep.rests.acquire().await.map_err(|_| Error::unavailable("the daemon is stopping"))?;
    let name = match reason {
        StopReason::Idle => "before idle stop",
        StopReason::Daemon => "before the daemon's stop",
        StopReason::Memory => "before a stop for want of memory",
        StopReason::Suspended => "before suspend",
        StopReason::Asked | StopReason::NoPlace | StopReason::NotGiven | StopReason::MemoryKept => "before stop",
    };
    let taking = CheckpointRequest::new(CheckpointType::Auto, name);
    let (taken, _) = capture(host, kernel, link, &taking, &host.own_actor(), None).await?;
    Ok(Some(taken))
}
