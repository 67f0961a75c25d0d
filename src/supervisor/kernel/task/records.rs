//! Records in a kernel that need no worker: messages, steps, decisions, artifacts, and the lifecycle state.

use super::Task;
use crate::core::error::Result;
use crate::core::spec::KernelSpec;
use crate::core::workflow::{self, Outcome, Request};
use crate::supervisor::kernel::command::{Change, Message};
use crate::supervisor::kernel::journal::{StateRecord, version_after};
use crate::supervisor::kernel::work_detail;

impl Task {
    /// Appends a message of an agent or a person.
    pub(crate) async fn message(&mut self, change: Change, message: Message) -> Result<u64> {
        let now = self.host.now_ms();
        if let Some(before) = self.kernel.records.message_by_key(&message.key, now).await? {
            return Ok(before);
        }
        self.admit(&change.actor, change.expected_version)?;
        self.settle().await?;
        self.kernel.not_leaving()?;
        let sequence = self.kernel.records.message(&change.actor, &message, now).await?;
        self.kernel.advance(version_after(sequence));
        Ok(sequence)
    }

    /// Records a step, a decision or an artifact.
    pub(crate) async fn record_work(&mut self, change: Change, what: workflow::Change, key: String) -> Result<Outcome> {
        let names = what.names();
        let request = Request { change: what, actor: change.actor.to_string(), at_ms: self.host.now_ms(), key };
        if let Some(before) = self.kernel.records.changed_by_key(&request).await? {
            return Ok(before);
        }
        self.admit(&change.actor, change.expected_version)?;
        self.not_in_transition().await?;
        let done = self.kernel.records.change_workflow(request).await?;
        if let Some(sequence) = done.sequence {
            self.changed(&change.actor, version_after(sequence), names, work_detail(&done.outcome)).await;
        }
        Ok(done.outcome)
    }

    /// The present state for the catalog.
    pub(super) fn state_record(&self, worker_spec: Option<&KernelSpec>) -> StateRecord {
        let view = self.kernel.view.borrow();
        let worker_spec = worker_spec.filter(|_| self.life.has_worker()).cloned().map(Box::new);
        StateRecord {
            life: self.life.clone(),
            version: view.version,
            executions: view.executions,
            worker_spec,
            resumes: self.kernel.resumes.get(),
        }
    }

    /// Writes the lifecycle state. A failure is reported, and the task continues: a new daemon finds workers and
    /// running executions in their own rows; this record only says what happened last.
    pub(super) async fn save_life(&mut self) {
        self.timers.save_at = None;
        if self.damage.is_some() {
            return;
        }
        let last_used = self.kernel.view.borrow().last_used_at_ms;
        let worker_spec = self.kernel.worker_spec.borrow().clone();
        let state = self.state_record(worker_spec.as_deref());
        let save = async || self.kernel.records.save_life(&state, last_used).await;
        if let Err(error) = self.host.making_room(save).await {
            tracing::error!(kernel = %self.kernel.spec().name, %error, "the kernel's state could not be saved");
        }
    }
}
