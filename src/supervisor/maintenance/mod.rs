//! Upkeep of a host: what is old or named by nobody goes, what is damaged is found.
//!
//! ```text
//! gc      retention of every kernel ─▶ roots (all rows that name objects) ─▶ marks (all that those need) ─▶ the store drops the rest
//! verify  databases, audit log, packs ─▶ roots ─▶ which of them need what is damaged or missing
//! ```
//!
//! Both run beside writers. While roots are listed, no row that names something goes away (`names`): so whatever is copied from one
//! row to another meanwhile is found in one of them. What is stored or used again from then on is kept by the store itself.

mod gc;
mod marks;
mod roots;
mod verify;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio::sync::{RwLock, Semaphore, mpsc};
use tokio::task::JoinHandle;

use super::checkpoint;
use super::host::Host;
use crate::core::error::{Error, Result};
use crate::core::kernel::State;
use crate::core::limits;

pub use gc::{GcAsked, collect};
pub use verify::verify;

/// What upkeep needs of the host.
#[derive(Debug)]
pub struct Upkeep {
    /// Taken to read by whoever makes a row go that names an object, or copies what one names into another; to write by whoever
    /// lists them all.
    pub names: RwLock<()>,
    /// Places for checkpoints before a stop.
    pub(super) rests: Semaphore,
    running: Cell<bool>,
    /// Turns that were left out because code ran.
    put_off: Cell<u32>,
    /// What the store had done when a turn found nothing left to do.
    at_rest: Cell<Option<(u64, u64)>>,
    /// Rows that named something and went.
    pub(super) gone: Cell<u64>,
    failed: RefCell<String>,
}

impl Default for Upkeep {
    fn default() -> Self {
        Upkeep {
            names: RwLock::default(),
            rests: Semaphore::new(limits::STOP_CHECKPOINTS),
            running: Cell::default(),
            put_off: Cell::default(),
            at_rest: Cell::default(),
            gone: Cell::default(),
            failed: RefCell::default(),
        }
    }
}

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
pub(super) fn run(host: &Rc<Host>) {
    let Some(interval) = host.config.upkeep.interval else { return };
    let kept = Rc::downgrade(host);
    tokio::task::spawn_local(async move {
        loop {
            tokio::time::sleep(interval).await;
            let Some(host) = kept.upgrade() else { return };
            if host.is_stopping() {
                return;
            }
            thin_due(&host).await;
            collect_in_turn(&host).await;
        }
    });
}

/// Removes what became too old.
async fn thin_due(host: &Rc<Host>) {
    let now_ms = host.now_ms();
    for kernel in host.kernels().iter().filter(|kernel| kernel.thin_due_ms.get() <= now_ms) {
        if let Err(error) = checkpoint::thin(host, kernel).await {
            tracing::warn!(kernel = %kernel.spec.name, %error, "old checkpoints could not be removed");
        }
    }
}

/// One turn of collection, within its budget; left out a few times while code runs, and when there is nothing new.
async fn collect_in_turn(host: &Rc<Host>) {
    let upkeep = &host.upkeep;
    let work = match host.store.run_beside(|store| Ok(store.use_count())).await {
        Ok(work) => (work, upkeep.gone.get()),
        Err(error) => return tracing::warn!(%error, "the store does not answer"),
    };
    if upkeep.at_rest.get() == Some(work) {
        return;
    }
    let is_busy = host.kernels().iter().any(|kernel| matches!(kernel.view().state, State::Busy { .. }));
    if is_busy && upkeep.put_off.get() < limits::UPKEEP_DEFERRALS {
        return upkeep.put_off.set(upkeep.put_off.get() + 1);
    }
    upkeep.put_off.set(0);
    let asked = GcAsked { dry_run: false, copy_most: host.config.upkeep.copy_limit, in_background: true };
    match collect(host, asked, &host.own_actor(), async |_| Ok(())).await {
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
