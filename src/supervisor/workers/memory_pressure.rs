//! Frees memory when the host is short of it: warm workers end first, then workers of unused kernels, the least
//! recently used first. Running code is never stopped.
//!
//! ```text
//!  fires ──▶ pressure for a while: the pool keeps nothing ready
//!    │
//!    └─ no warm worker was left ──▶ some kernels are checkpointed and stopped: their next use starts them
//! ```

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::core::limits;
use crate::supervisor::workers::Workers;
use crate::sys::pressure::{available, is_host_wide, trigger};
use crate::sys::watched::{Watched, watch};

/// Priority data: memory is short; an error: the file is gone.
const INTEREST: Interest = Interest::PRIORITY.add(Interest::ERROR);

/// Whether enough memory is available that a stall has another cause: a control group at its own limit.
fn has_ample(available: std::io::Result<f64>) -> bool {
    available.is_ok_and(|available| available >= limits::PRESSURE_AMPLE)
}

/// Whether memory is short.
#[derive(Default)]
pub struct MemoryPressure {
    until: Cell<Option<Instant>>,
    /// Stops some unused kernels; set by the module that owns the kernels.
    stop_idle: RefCell<Option<Box<dyn Fn()>>>,
}

impl MemoryPressure {
    /// Sets the action that stops some unused kernels when no warm worker is left.
    pub(crate) fn on_relief(&self, stop_idle: impl Fn() + 'static) {
        *self.stop_idle.borrow_mut() = Some(Box::new(stop_idle));
    }

    /// The remaining time for which memory counts as short, unless the source fires again.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.until.get()?.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    /// Whether memory counts as short now.
    pub fn is_on(&self) -> bool {
        self.left().is_some()
    }
}

/// The source of memory pressure reports.
enum Source {
    /// The host kernel's trigger.
    Trigger(AsyncFd<Watched>),
    /// Periodic polling.
    Look,
}

impl Source {
    fn of(file: &Path) -> Source {
        let fd = trigger(file, limits::PRESSURE_STALL, limits::PRESSURE_WINDOW);
        match fd.and_then(|fd| watch(fd, INTEREST)) {
            Ok(watched) => Source::Trigger(watched),
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "the host does not say when memory is short: what is free is looked at now and then");
                Source::Look
            }
        }
    }

    /// Waits until memory is short; an error means that this source has failed.
    async fn fires(&self) -> std::io::Result<()> {
        match self {
            Source::Trigger(watched) => {
                let mut ready = watched.ready(INTEREST).await?;
                let gone = ready.ready().is_error() || ready.ready().is_read_closed();
                ready.clear_ready();
                if gone { Err(std::io::Error::other("the file is gone")) } else { Ok(()) }
            }
            Source::Look => loop {
                tokio::time::sleep(limits::PRESSURE_POLL).await;
                if available()? < limits::PRESSURE_MIN_FREE {
                    return Ok(());
                }
            },
        }
    }
}

/// Watches memory pressure while the host exists.
pub(crate) fn run(workers: &Rc<Workers>) {
    let Some(file) = workers.host.config.daemon.pressure_file.clone() else { return };
    let mut source = Source::of(&file);
    let is_host_wide = is_host_wide(&file);
    let kept = Rc::downgrade(workers);
    tokio::task::spawn_local(async move {
        loop {
            match (source.fires().await, &source) {
                (Ok(()), _) => {}
                (Err(error), Source::Trigger(_)) => {
                    tracing::warn!(%error, "the host no longer says when memory is short: what is free is looked at now and then");
                    source = Source::Look;
                    continue;
                }
                (Err(error), Source::Look) => {
                    tracing::warn!(%error, "memory pressure cannot be watched");
                    return;
                }
            }
            let Some(workers) = kept.upgrade().filter(|workers| !workers.host.is_stopping()) else { return };
            if is_host_wide && has_ample(available()) {
                tracing::debug!("tasks stall for memory below a limit of their own: the host has enough");
                continue;
            }
            relieve(&workers);
        }
    });
}

fn relieve(workers: &Rc<Workers>) {
    let began = !workers.pressure.is_on();
    let slots = workers.pool.own() + workers.reserved.count();
    workers.pressure.until.set(Some(Instant::now() + limits::PRESSURE_HOLD));
    if began {
        tracing::warn!(slots, "memory is short: warm workers and idle kernels are stopped");
        workers.host.events.publish("", "memory_pressure_started", serde_json::json!({ "warm_workers": slots }));
        report_when_over(workers);
    }
    workers.pool.look_soon();
    while workers.reserved.end_oldest(workers) {}
    if slots > 0 {
        return;
    }
    if let Some(stop_idle) = &*workers.pressure.stop_idle.borrow() {
        stop_idle();
    }
}

/// Reports the end of a memory shortage, and lets the pool fill again.
fn report_when_over(workers: &Rc<Workers>) {
    let kept: Weak<Workers> = Rc::downgrade(workers);
    tokio::task::spawn_local(async move {
        while let Some(left) = kept.upgrade().and_then(|workers| workers.pressure.left()) {
            tokio::time::sleep(left).await;
        }
        if let Some(workers) = kept.upgrade() {
            tracing::info!("memory is no longer short");
            workers.host.events.publish("", "memory_pressure_ended", serde_json::json!({}));
            workers.pool.look_soon();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ample_memory_explains_stalls() {
        assert!(has_ample(Ok(limits::PRESSURE_AMPLE)));
        assert!(!has_ample(Ok(limits::PRESSURE_AMPLE - 0.01)));
        // Unknown is not ample.
        assert!(!has_ample(Err(std::io::Error::other("no figures"))));
    }
}
