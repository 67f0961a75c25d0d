//! Upkeep of a host: what is old or named by nobody goes, what is damaged is found.
//!
//! ```text
//! gc      retention of every kernel ─▶ roots (all rows that name objects) ─▶ marks (all that those need) ─▶ the store drops the rest
//! verify  databases, audit log, packs ─▶ roots ─▶ which of them need what is damaged or missing
//! ```
//!
//! Both run beside writers. While roots are listed, no row that names something goes away (`names`): so whatever is copied from one
//! row to another meanwhile is found in one of them. What is stored or used again from then on is kept by the store itself.

mod audit;
mod gc;
mod marks;
mod roots;
mod verify;

use std::rc::Rc;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::checkpoint;
use super::host::Host;
use crate::core::error::{Error, Result};
use crate::core::kernel::State;
use crate::core::limits;
use crate::supervisor::registry::Supervisor;

pub use gc::{GcAsked, collect};
pub use verify::verify;

/// Counts as the one that runs.
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

/// Gives `take` what `work` tells, until that wants no more; then waits for its end.
async fn relay<I, T>(
    mut told: mpsc::Receiver<I>,
    mut take: impl AsyncFnMut(I) -> Result<()>,
    work: JoinHandle<Result<T>>,
) -> Result<T> {
    let mut heard = Ok(());
    while let Some(item) = told.recv().await {
        heard = match tokio::time::timeout(limits::UPKEEP_ITEM_TIMEOUT, take(item)).await {
            Ok(heard) => heard,
            Err(_) => Err(Error::deadline("the client takes no more")),
        };
        if heard.is_err() {
            break;
        }
    }
    drop(told);
    let done = work.await.map_err(|error| Error::internal(error.to_string()))?;
    heard.and(done)
}

/// Begins background upkeep; it ends with the host.
pub fn run(supervisor: &Supervisor) {
    let host = supervisor.host();
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
            collect_in_turn(&supervisor).await;
        }
    });
}

/// Removes what became too old.
async fn prune_due(supervisor: &Supervisor) {
    let host = supervisor.host();
    let now_ms = host.now_ms();
    for kernel in supervisor.kernels().iter().filter(|kernel| kernel.prune_due_ms.get() <= now_ms) {
        if let Err(error) = checkpoint::prune(host, kernel).await {
            tracing::warn!(kernel = %kernel.spec.name, %error, "old checkpoints could not be removed");
        }
    }
}

/// One turn of collection, within its budget; left out a few times while code runs, and when there is nothing new.
async fn collect_in_turn(supervisor: &Supervisor) {
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
    let asked = GcAsked { dry_run: false, copy_most: host.config.upkeep.copied, in_background: true };
    match collect(supervisor, asked, &host.own_actor(), async |_| Ok(())).await {
        Ok(done) => {
            upkeep.failed.borrow_mut().clear();
            let is_done = done.objects_recent == 0 && done.objects_removed == 0 && done.packs_removed == 0;
            upkeep.at_rest.set(is_done.then_some(work));
        }
        Err(error) if error.reason == "upkeep" => {}
        // Told once: the next turn fails as this one did.
        Err(error) if *upkeep.failed.borrow() == error.message => {}
        Err(error) => {
            tracing::warn!(%error, "garbage could not be collected");
            host.events.publish("", "gc_failed", serde_json::json!({ "error": error.message }));
            *upkeep.failed.borrow_mut() = error.message;
        }
    }
}
