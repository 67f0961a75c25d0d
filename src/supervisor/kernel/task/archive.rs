//! Putting a kernel away and taking it out again, as far as it is the task's: what is recorded of it.

use super::Task;
use crate::core::error::Result;
use crate::core::ids::CheckpointId;
use crate::core::kernel::Event;
use crate::supervisor::kernel::command::Actor;

impl Task {
    /// Records that the kernel is put away, then removes its files.
    pub(crate) async fn archive(&mut self, actor: &Actor, id: CheckpointId) -> Result<u64> {
        self.admit(actor, 0)?;
        let busy = self.life.has_worker() || !self.queue.is_empty() || self.operating.is_some();
        let records = &self.kernel.records;
        if busy || records.head().await?.checkpoint != Some(id) || records.changed_since_head().await? {
            return Err(self.kernel.used_meanwhile());
        }
        let short = id.short();
        let named = ("kernel_archived", "kernel.archive");
        let version =
            self.turn(actor, Event::ArchiveAsked { checkpoint: id }, format!("archived in {short}"), named).await?;
        // It is archived: what is left of its files now, the next start removes.
        self.kernel.forget_files();
        self.backoff_at = None;
        if let Err(error) = self.host.catalog.clear_kernel_files(self.kernel.id).await {
            tracing::warn!(kernel = %self.kernel.spec.name, %error, "files of an archived kernel are left");
        }
        Ok(version)
    }

    /// Records that it is an ordinary kernel without a worker again.
    pub(crate) async fn unarchive(&mut self, actor: &Actor) -> Result<u64> {
        self.admit(actor, 0)?;
        let named = ("kernel_unarchived", "kernel.unarchive");
        self.turn(actor, Event::Unarchived, "taken out of the archive".into(), named).await
    }

    /// A step of life that counts only once it is written down.
    async fn turn(&mut self, actor: &Actor, event: Event, text: String, named: (&'static str, &str)) -> Result<u64> {
        let mut life = self.life.clone();
        // There is nothing to do for it but to tell.
        let _ = life.step(event, self.host.now_ms());
        let before = self.kernel.view().version;
        let version = self.kernel.records.mark(actor, &text, self.host.now_ms()).await?;
        let (executions, used) = {
            let view = self.kernel.view.borrow();
            (view.executions, view.last_used_at_ms)
        };
        if let Err(error) = self.kernel.records.save_life(&life, version, executions, used).await {
            self.kernel.advance(version);
            return Err(error);
        }
        self.life = life;
        self.show_state();
        tracing::debug!(kernel = %self.kernel.spec.name, before, version, "{text}");
        self.changed(
            actor,
            version,
            named,
            serde_json::json!({ "state": self.life.state.name(), "reason": self.life.state.reason() }),
        )
        .await;
        Ok(version)
    }
}
