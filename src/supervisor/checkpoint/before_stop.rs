//! The checkpoint before a worker is ended at leisure: automatic, only if something changed, and never in the way of the end.

use std::rc::Rc;
use std::time::Duration;

use super::capture;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType};
use crate::core::error::{Error, Result};
use crate::core::kernel::StopReason;
use crate::core::limits;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;

/// Takes a checkpoint of type `auto` if something changed since the kernel came to its head. The caller holds the worker, and
/// nothing is handed to it meanwhile. A failure is told by an event.
pub(crate) async fn before_stop(host: &Rc<Host>, kernel: &Rc<Kernel>, link: &Rc<WorkerLink>, reason: StopReason) {
    match rest(host, kernel, link, reason).await {
        Ok(_) => {}
        Err(error) => {
            tracing::warn!(kernel = %kernel.spec.name, %error, "no checkpoint was taken before the stop");
            told(host, kernel, &error.message);
        }
    }
}

/// The same where an operation is under way that the stop does not wait for: nothing can be captured beside it.
pub(crate) async fn left_out(host: &Host, kernel: &Kernel) {
    if !kernel.spec.ephemeral && kernel.records.changed_since_head().await.unwrap_or(true) {
        told(host, kernel, "something else was being done with the kernel");
    }
}

/// Says that a kernel stops without the checkpoint that was due.
pub(crate) fn told(host: &Host, kernel: &Kernel, why: &str) {
    let detail = serde_json::json!({ "error": why });
    host.events.publish(&kernel.event_name, "stop_checkpoint_failed", detail);
}

/// How long a stop waits for it.
pub(crate) fn wait(host: &Host, reason: Option<StopReason>, is_forced: bool) -> Duration {
    match (reason, is_forced) {
        (Some(StopReason::Daemon), _) => limits::STOP_CHECKPOINT_SHUTDOWN.min(host.config.daemon.drain / 2),
        (_, true) => limits::STOP_CHECKPOINT_FORCED,
        (_, false) => limits::STOP_CHECKPOINT,
    }
}

async fn rest(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    reason: StopReason,
) -> Result<Option<Checkpoint>> {
    // One that goes with its client has nothing to come back to.
    if kernel.spec.ephemeral {
        return Ok(None);
    }
    let has_jobs = !kernel.view().jobs.is_empty();
    if !has_jobs && !kernel.records.changed_since_head().await? {
        return Ok(None);
    }
    if kernel.between.get() {
        return Err(Error::conflict("it is between two states: a restore has not ended").reason("restoring"));
    }
    if host.disk_is_full() {
        return Err(Host::full());
    }
    let _place = host.upkeep.rests.acquire().await.map_err(|_| Error::unavailable("the daemon is stopping"))?;
    let name = match reason {
        StopReason::Idle => "before idle stop",
        StopReason::Daemon => "before the daemon's stop",
        StopReason::Memory => "before a stop for want of memory",
        StopReason::Asked | StopReason::NoPlace | StopReason::NotGiven => "before stop",
    };
    let taking = CheckpointRequest::new(CheckpointType::Auto, name);
    let (taken, _) = capture(host, kernel, link, &taking, &host.own_actor(), None).await?;
    Ok(Some(taken))
}
