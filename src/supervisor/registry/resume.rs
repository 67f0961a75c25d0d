//! Kernels that ran when a daemon was stopped are started by the next one.
//!
//! The mark is in a kernel's state record. It is written by the stop, and withdrawn before the start, so each stop
//! starts a kernel once. A restart of the daemon leaves workers and marks nothing; a crash marks nothing either.

use std::collections::HashSet;
use std::rc::Rc;

use futures::StreamExt as _;

use super::Supervisor;
use crate::core::ids::KernelId;
use crate::core::kernel::State;
use crate::core::limits;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, StartMode};

impl Supervisor {
    /// The kernels that run now, to be started by the next daemon. Suspended kernels are not, unless they were suspended
    /// until then and have their mark: their clients want them at rest.
    pub(super) fn resumed_at_next_start(&self) -> HashSet<KernelId> {
        if !self.host.config.daemon.resume_kernels {
            return HashSet::new();
        }
        let runs = |kernel: &Rc<Kernel>| {
            let state = &kernel.view().state;
            let runs = matches!(state, State::Starting | State::Ready | State::Busy { .. });
            runs && !kernel.spec().ephemeral
        };
        self.kernels().into_iter().filter(runs).map(|kernel| kernel.id).collect()
    }

    /// Starts the kernels that ran when the former daemon was stopped, in the background.
    pub fn resume_kernels(&self) {
        let mut marked = self.kernels();
        // A kernel whose worker did not end in time, so that this daemon adopted it, runs already.
        marked.retain(|kernel| kernel.resumes.get() && matches!(kernel.view().state, State::Stopped { .. }));
        if marked.is_empty() || !self.host.config.daemon.resume_kernels {
            return;
        }
        // The latest used first.
        marked.sort_by_key(|kernel| std::cmp::Reverse(kernel.view().last_used_at_ms));
        tracing::info!(kernels = marked.len(), "starting the kernels that ran when the daemon was stopped");
        let this = self.clone();
        tokio::task::spawn_local(async move {
            let starts = marked.into_iter().map(|kernel| this.resume_kernel(kernel));
            futures::stream::iter(starts).buffer_unordered(limits::KERNELS_RESUMED_AT_ONCE).collect::<()>().await;
        });
    }

    async fn resume_kernel(&self, kernel: Rc<Kernel>) {
        if self.host.is_stopping() {
            // The mark stays for the next daemon.
            return;
        }
        let actor = Actor { uid: kernel.uid, client: "ryokand".into(), lease: Vec::new() };
        if let Err(error) = kernel.start(actor, StartMode::WithMemory).await {
            let name = kernel.event_name();
            tracing::warn!(kernel = %name, %error, "a kernel that ran when the daemon was stopped is not started");
            let detail = serde_json::json!({ "error": error.message });
            self.host.events.publish(&name, "kernel_not_resumed", detail);
        }
    }
}
