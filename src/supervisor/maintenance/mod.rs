//! Upkeep of a host: removes expired and unreferenced objects, and finds damage.
//!
//! ```text
//! gc      retention ─▶ roots (rows that name objects) ─▶ marks (all objects they need) ─▶ the store drops the rest
//! verify  databases, audit log, packs ─▶ roots ─▶ roots that need damaged or missing objects
//! figures what kernels take on the disk ─▶ their information
//! memory  unused memory of the daemon ─▶ the system
//! ```
//!
//! All run beside writers. While roots are listed, the `names` lock keeps every row that names an object, so that a
//! name copied between rows meanwhile is found in one of them. The store itself keeps objects that are stored or used
//! again from then on.

mod audit;
mod figures;
mod gc;
mod marks;
mod memory;
mod roots;
mod usage;
mod verify;

use std::rc::Rc;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::checkpoint;
use super::host::Host;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::core::kernel::State;
use crate::core::limits;
use crate::supervisor::registry::Supervisor;

pub use figures::refresh_figures;
pub use gc::{GcAsked, collect};
pub use usage::disk_usage;
pub use verify::verify;

/// Guard of the only running collection or verification.
struct Running(Rc<Host>);

impl Running {
    fn begin(host: &Rc<Host>) -> Result<Running> {
        match host.upkeep.running.replace(true) {
            false => Ok(Running(Rc::clone(host))),
            true => Err(Error::busy("garbage is being collected, or everything verified, already")
                .reason("upkeep")
                .hint("wait for that to end")),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.upkeep.running.set(false);
    }
}

/// Forwards the items of `work` to `take` until `take` fails; then waits for `work` to end.
async fn relay<I, T>(
    mut items: mpsc::Receiver<I>,
    mut take: impl AsyncFnMut(I) -> Result<()>,
    work: JoinHandle<Result<T>>,
) -> Result<T> {
    let mut result = Ok(());
    while let Some(item) = items.recv().await {
        result = match tokio::time::timeout(limits::UPKEEP_ITEM_TIMEOUT, take(item)).await {
            Ok(result) => result,
            Err(_) => Err(Error::deadline("the client takes no more")),
        };
        if result.is_err() {
            break;
        }
    }
    drop(items);
    let done = work.await.map_err(|error| Error::internal(error.to_string()))?;
    result.and(done)
}

/// Begins background upkeep; it ends with the host.
pub fn run(supervisor: &Supervisor) {
    let host = supervisor.host();
    // Ends with the event loop.
    tokio::task::spawn_local(memory::run());
    let Some(interval) = host.config.upkeep.interval else { return };
    let kept = supervisor.downgrade();
    tokio::task::spawn_local(async move {
        loop {
            tokio::time::sleep(interval).await;
            let Some(supervisor) = kept.upgrade() else { return };
            if supervisor.host().is_stopping() {
                return;
            }
            prune_due(&supervisor).await;
            collect_in_background(&supervisor).await;
        }
    });
}

/// Whether a kernel was removed. Its files go after it has left the table of kernels.
fn is_gone(supervisor: &Supervisor, kernel: KernelId) -> bool {
    supervisor.get(kernel).is_none()
}

/// Removes expired checkpoints.
async fn prune_due(supervisor: &Supervisor) {
    let host = supervisor.host();
    let now_ms = host.now_ms();
    for kernel in supervisor.kernels().iter().filter(|kernel| kernel.prune_due_ms.get() <= now_ms) {
        if let Err(error) = checkpoint::prune(host, kernel).await {
            tracing::warn!(kernel = %kernel.spec().name, %error, "old checkpoints could not be removed");
        }
    }
}

/// One background collection, within its budget. Deferred a few times while code runs, and skipped when nothing
/// changed.
async fn collect_in_background(supervisor: &Supervisor) {
    let host = supervisor.host();
    let upkeep = &host.upkeep;
    let work = match host.store.run_beside(|store| Ok(store.use_count())).await {
        Ok(work) => (work, upkeep.gone.get()),
        Err(error) => return tracing::warn!(%error, "the store does not answer"),
    };
    if upkeep.at_rest.get() == Some(work) {
        return;
    }
    let is_busy = supervisor.kernels().iter().any(|kernel| matches!(kernel.view().state, State::Busy { .. }));
    if is_busy && upkeep.put_off.get() < limits::UPKEEP_DEFERRALS {
        return upkeep.put_off.set(upkeep.put_off.get() + 1);
    }
    upkeep.put_off.set(0);
    let asked = GcAsked { dry_run: false, copy_most: host.config.upkeep.copy_limit, in_background: true };
    match collect(supervisor, asked, &host.own_actor(), async |_| Ok(())).await {
        Ok(done) => {
            upkeep.failed.borrow_mut().clear();
            let is_done = done.objects_recent == 0 && done.objects_removed == 0 && done.packs_removed == 0;
            upkeep.at_rest.set(is_done.then_some(work));
        }
        Err(error) if error.reason == "upkeep" => {}
        // A repeated failure is reported once.
        Err(error) if *upkeep.failed.borrow() == error.message => {}
        Err(error) => {
            tracing::warn!(%error, "garbage could not be collected");
            host.events.publish("", "gc_failed", serde_json::json!({ "error": error.message }));
            *upkeep.failed.borrow_mut() = error.message;
        }
    }
}
