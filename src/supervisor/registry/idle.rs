//! Stops idle kernels when memory is short, the least recently used first.

use std::rc::Rc;

use super::Supervisor;
use crate::core::kernel::State;
use crate::core::limits;
use crate::supervisor::kernel::Kernel;

/// Stops an eighth of these kernels, at least one: each stop takes some memory itself, and pressure that lasts fires
/// again. A kernel that cannot stop, because of a job or new use, is skipped.
async fn stop_some(unused: Vec<Rc<Kernel>>) {
    let mut left = unused.len().div_ceil(8).min(limits::PRESSURE_STOPS);
    for kernel in unused {
        if left == 0 {
            return;
        }
        match kernel.stop_if_idle().await {
            Ok(true) => left -= 1,
            Ok(false) => {}
            Err(error) => tracing::debug!(kernel = %kernel.spec().name, %error, "a kernel is not stopped"),
        }
    }
}

/// The kernels that are unused for long enough, the longest unused first.
fn longest_unused(supervisor: &Supervisor) -> Vec<Rc<Kernel>> {
    let now_ms = supervisor.host().now_ms();
    let rests = |kernel: &Rc<Kernel>| {
        let view = kernel.view();
        let unused_ms = now_ms.saturating_sub(view.last_used_at_ms);
        matches!(view.state, State::Ready) && unused_ms >= limits::PRESSURE_IDLE.as_millis() as i64
    };
    let mut unused: Vec<Rc<Kernel>> = supervisor.kernels().into_iter().filter(rests).collect();
    unused.sort_by_key(|kernel| kernel.view().last_used_at_ms);
    unused
}

impl Supervisor {
    /// Stops some idle kernels in the background.
    pub(super) fn stop_idle_kernels(&self) {
        tokio::task::spawn_local(stop_some(longest_unused(self)));
    }
}
