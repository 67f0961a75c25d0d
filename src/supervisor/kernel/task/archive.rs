//! Commits of archive, unarchive and handover transitions, and their consequences.

use tokio::sync::oneshot;

use super::Task;
use crate::catalog::state::{EntryKind, NewEntry};
use crate::core::error::Result;
use crate::core::ids::CheckpointId;
use crate::core::kernel::State;
use crate::core::kernel::transition::{Decision, Kind, Record, Step};
use crate::supervisor::kernel::archive_steps;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::journal::{StateRecord, version_after};
use crate::supervisor::kernel::transition::ExclusiveTransition;

impl Task {
    /// Commits an archiving, then removes the kernel's files.
    pub(crate) async fn archive(
        &mut self,
        actor: &Actor,
        id: CheckpointId,
        transition: &ExclusiveTransition,
    ) -> Result<u64> {
        if let Err(error) = self.may_be_archived(actor, id).await {
            transition.clear(&self.host).await?;
            return Err(error);
        }
        let named = ("kernel_archived", "kernel.archive");
        let version = self.commit(actor, transition, format!("archived in {}", id.short()), named, None).await?;
        self.timers.backoff_at = None;
        Ok(version)
    }

    async fn may_be_archived(&self, actor: &Actor, id: CheckpointId) -> Result<()> {
        self.admit(actor, 0)?;
        let busy = self.life.has_worker() || !self.work.queue.is_empty() || self.work.operating.is_some();
        let records = &self.kernel.records;
        if busy || records.head().await?.checkpoint != Some(id) || records.changed_since_head().await? {
            return Err(self.kernel.used_meanwhile());
        }
        Ok(())
    }

    /// Commits an unarchive transition: the kernel is stopped again.
    pub(crate) async fn unarchive(&mut self, actor: &Actor, transition: &ExclusiveTransition) -> Result<u64> {
        self.admit(actor, 0)?;
        transition.enter(Step::Commit)?;
        let named = ("kernel_unarchived", "kernel.unarchive");
        self.commit(actor, transition, "taken out of the archive".into(), named, None).await
    }

    /// Commits a handover: the kernel never acts here again. The caller holds the worker, whose processes are frozen.
    pub(crate) async fn depart(
        &mut self,
        actor: &Actor,
        text: String,
        transition: &ExclusiveTransition,
        decided: oneshot::Sender<()>,
    ) -> Result<u64> {
        transition.enter(Step::Commit)?;
        self.commit(actor, transition, text, ("kernel_departed", "kernel.depart"), Some(decided)).await
    }

    /// Commits a transition: the outcome holds from here on. Recovery performs steps that fail now. `decided` is notified
    /// once the outcome survives a loss of power.
    async fn commit(
        &mut self,
        actor: &Actor,
        transition: &ExclusiveTransition,
        text: String,
        named: (&'static str, &str),
        decided: Option<oneshot::Sender<()>>,
    ) -> Result<u64> {
        let (kind, at_ms) = (EntryKind::Mark, self.host.now_ms());
        let entry = NewEntry { kind, at_ms, actor: actor.to_string(), text, detail_json: String::new() };
        let version = version_after(transition.commit(entry).await?);
        if let Some(decided) = decided {
            // The target starts the kernel once it is notified: nothing of it is left here by then.
            if let Some(current) = &self.worker.current {
                current.worker.kill();
            }
            match self.host.sync_decision(Some(self.kernel.id)).await {
                Ok(()) => {
                    let _ = decided.send(());
                }
                Err(error) => tracing::error!(%error, "the departure of a kernel may not survive a loss of power"),
            }
        }
        let record = self.kernel.transitions.borrow().record().cloned();
        if let Some(record) = record
            && let Err(error) = self.carry_out(transition, &record, version, false).await
        {
            tracing::warn!(kernel = %self.kernel.spec().name, %error, "the rest of a transition is left to recovery");
            let detail = serde_json::json!({ "kind": record.transition.kind(), "error": error.message });
            self.host.events.publish(&self.kernel.event_name(), "transition_interrupted", detail);
        }
        let detail = serde_json::json!({ "state": self.life.state.name(), "reason": self.life.state.reason() });
        self.changed(actor, version, named, detail).await;
        Ok(version)
    }

    /// Finishes an interrupted archive, unarchive or handover transition.
    pub(crate) async fn settle(&mut self) -> Result<()> {
        match self.kernel.interrupted() {
            Some(Kind::Archive | Kind::Unarchive | Kind::HandoverOut) => {}
            Some(Kind::Restore | Kind::Remove | Kind::Freeze) | None => return Ok(()),
        }
        let Some((transition, record)) = ExclusiveTransition::recover(&self.kernel) else { return Ok(()) };
        let version = self.kernel.view.borrow().version;
        self.carry_out(&transition, &record, version, true).await
    }

    /// Performs the steps after the decision; `again`: an earlier attempt or daemon made it.
    async fn carry_out(
        &mut self,
        transition: &ExclusiveTransition,
        record: &Record,
        version: u64,
        again: bool,
    ) -> Result<()> {
        if record.transition.kind() == Kind::HandoverOut && record.decision == Decision::Committed {
            self.end_departed_worker().await;
        }
        self.life = archive_steps::life_after(&self.life, record, self.host.now_ms());
        self.show_state();
        if matches!(self.life.state, State::Archived { .. } | State::Departed { .. }) {
            self.kernel.forget_files();
        }
        let (executions, used) = {
            let view = self.kernel.view.borrow();
            (view.executions, view.last_used_at_ms)
        };
        let (life, records) = (self.life.clone(), &self.kernel.records);
        let state = StateRecord { life, version, executions, worker_spec: None, resumes: false };
        let save = async || records.save_life(&state, used).await;
        let enter = |step| transition.enter(step);
        archive_steps::carry_out(&self.host, records, record, enter, save, again).await?;
        transition.clear(&self.host).await
    }
}
