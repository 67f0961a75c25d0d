//! Checkpoint requests that the task handles itself: removal, retention, and the checkpoint before a stop.

use std::rc::Rc;

use tokio::sync::oneshot;

use super::Task;
use crate::catalog::{KernelChange, Notes};
use crate::core::audit::NewAudit;
use crate::core::checkpoint::Checkpoint;
use crate::core::error::{Error, Result};
use crate::core::kernel::StopReason;
use crate::core::retention::Retention;
use crate::core::spec::KernelSpec;
use crate::link::host::WorkerLink;
use crate::supervisor::kernel::command::Change;

impl Task {
    /// Removes an unreferenced checkpoint; returns the new version.
    pub(crate) async fn forget_checkpoint(&mut self, change: Change, checkpoint: &Checkpoint) -> Result<u64> {
        self.admit(&change.actor, change.expected_version)?;
        let _names = self.host.upkeep.names.read().await;
        if self.kernel.holds(checkpoint.id) {
            return Err(Error::conflict(format!("checkpoint {} is being read", checkpoint.short_id()))
                .reason("in_use")
                .hint("try again when that is done"));
        }
        let removed = self.kernel.records.remove_checkpoint(&change.actor, checkpoint, self.host.now_ms()).await;
        let version = removed.map_err(|error| match error.reason.as_str() {
            "" => error.reason("in_use"),
            _ => error,
        })?;
        self.kernel.advance(version);
        let mut view = self.kernel.view.borrow_mut();
        view.checkpoints = view.checkpoints.saturating_sub(1);
        Ok(version)
    }

    /// Sets the retention of automatic checkpoints.
    pub(crate) async fn retain(&mut self, change: Change, retention: Retention) -> Result<()> {
        self.admit(&change.actor, change.expected_version)?;
        self.settle().await?;
        self.kernel.not_leaving()?;
        let spec = KernelSpec { retention, ..(*self.kernel.spec()).clone() };
        let update = KernelChange { spec: Some(spec), ..KernelChange::default() };
        self.host.catalog.update_kernel(self.kernel.id, update, Notes::default()).await?;
        let before = self.kernel.retention.replace(retention);
        self.kernel.prune_due_ms.set(0);
        let line = self.host.line(&change.actor, "kernel.retention", Some(&self.kernel));
        let version = Some(self.kernel.view().version);
        let detail = format!("from {before} to {retention}");
        self.host.write_audit(NewAudit { version_before: version, version_after: version, detail, ..line }).await;
        let detail = serde_json::json!({ "retention": retention });
        self.host.events.publish(&self.kernel.event_name(), "retention_changed", detail);
        Ok(())
    }

    /// Takes the checkpoint before a stop, as an operation of its own: the next worker cannot start before its end.
    ///
    /// The stop waits for the returned channel, within its time limit.
    pub(crate) fn rest(&mut self, link: &Rc<WorkerLink>, reason: StopReason) -> Option<oneshot::Receiver<()>> {
        if self.work.operating.is_some() {
            tokio::task::spawn_local(self.checkpoints.skipped(&self.kernel));
            return None;
        }
        let (done, on_done) = oneshot::channel();
        let keeping = self.checkpoints.before_stop(&self.kernel, link, reason);
        self.begin_operation(async move {
            keeping.await;
            // The stop may have proceeded without the checkpoint.
            let _ = done.send(());
        });
        Some(on_done)
    }
}
