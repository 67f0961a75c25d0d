//! When memory is short on the host: first the slots of the pool go, then the workers of kernels that nobody uses, the one that was used
//! longest ago first. What runs is never touched.
//!
//! ```text
//!  fires ──▶ pressure for a while: the pool keeps nothing ready
//!    │
//!    └─ no slot was left ──▶ some kernels are checkpointed and stopped: their next use starts them
//! ```

use std::cell::Cell;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::core::kernel::State;
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::sys::pressure::{available, trigger};
use crate::sys::watched::{Watched, watch};

/// Priority data: memory is short; an error: the file is gone.
const INTEREST: Interest = Interest::PRIORITY.add(Interest::ERROR);

/// Whether memory is short.
#[derive(Debug, Default)]
pub struct Pressure {
    until: Cell<Option<Instant>>,
}

impl Pressure {
    /// For how long memory counts as short, if nothing more is heard of it.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.until.get()?.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    /// Whether it counts as short now.
    pub fn is_on(&self) -> bool {
        self.left().is_some()
    }
}

/// Who says that memory is short.
enum Source {
    /// The host kernel, when it is.
    Trigger(AsyncFd<Watched>),
    /// Whoever looks now and then.
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

    /// Waits until memory is short; an error: this source says nothing any more.
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

/// Listens while the host is there.
pub(crate) fn run(host: &Rc<Host>) {
    let Some(file) = host.config.daemon.pressure_file.clone() else { return };
    let mut source = Source::of(&file);
    let kept = Rc::downgrade(host);
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
                    tracing::warn!(%error, "nobody knows when memory is short");
                    return;
                }
            }
            let Some(host) = kept.upgrade().filter(|host| !host.is_stopping()) else { return };
            relieve(&host);
        }
    });
}

fn relieve(host: &Rc<Host>) {
    let began = !host.pressure.is_on();
    let slots = host.pool.own() + host.promises.count();
    host.pressure.until.set(Some(Instant::now() + limits::PRESSURE_HOLD));
    if began {
        tracing::warn!(slots, "memory is short: nothing is kept ready, and kernels that nobody uses are stopped");
        host.events.publish("", "memory_pressure_started", serde_json::json!({ "warm_workers": slots }));
        told_when_over(host);
    }
    host.pool.look_soon();
    while host.promises.end_oldest(host) {}
    if slots > 0 {
        return;
    }
    tokio::task::spawn_local(rest_some(longest_unused(host)));
}

/// Has an eighth of these kernels rest, at least one: each stop takes some memory itself, and the next firing asks again. Those that
/// cannot, because a job runs or somebody came, stand in nobody's way.
async fn rest_some(unused: Vec<Rc<Kernel>>) {
    let mut left = unused.len().div_ceil(8).min(limits::PRESSURE_STOPS);
    for kernel in unused {
        if left == 0 {
            return;
        }
        match kernel.rest_now().await {
            Ok(true) => left -= 1,
            Ok(false) => {}
            Err(error) => tracing::debug!(kernel = %kernel.spec.name, %error, "a kernel does not rest"),
        }
    }
}

/// The kernels that nobody uses, the longest unused first.
fn longest_unused(host: &Host) -> Vec<Rc<Kernel>> {
    let now_ms = host.now_ms();
    let rests = |kernel: &Rc<Kernel>| {
        let view = kernel.view();
        let unused_ms = now_ms.saturating_sub(view.last_used_at_ms);
        matches!(view.state, State::Ready) && unused_ms >= limits::PRESSURE_IDLE.as_millis() as i64
    };
    let mut unused: Vec<Rc<Kernel>> = host.kernels().into_iter().filter(rests).collect();
    unused.sort_by_key(|kernel| kernel.view().last_used_at_ms);
    unused
}

/// Says so when memory is no longer short, and has the pool fill again.
fn told_when_over(host: &Rc<Host>) {
    let kept: Weak<Host> = Rc::downgrade(host);
    tokio::task::spawn_local(async move {
        while let Some(left) = kept.upgrade().and_then(|host| host.pressure.left()) {
            tokio::time::sleep(left).await;
        }
        if let Some(host) = kept.upgrade() {
            tracing::info!("memory is no longer short");
            host.events.publish("", "memory_pressure_ended", serde_json::json!({}));
            host.pool.look_soon();
        }
    });
}
