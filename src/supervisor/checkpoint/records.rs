//! What a kernel keeps of its checkpoints.

use crate::catalog::state::{
    Added, Beginning, EntryKind, Finished, Head, NewCheckpoint, NewEntry, Restored, Selection,
};
use crate::core::checkpoint::Checkpoint;
use crate::core::error::Result;
use crate::core::ids::{CheckpointId, Digest};
use crate::core::info::{GivenMount, McpTransport};
use crate::core::kernel::transition::Record;
use crate::core::limits;
use crate::core::retention::Standing;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::journal::{Records, version_after};

/// Mounts, and MCP servers by name.
pub(crate) type Grants = (Vec<GivenMount>, Vec<(String, McpTransport)>);

impl Records {
    /// Makes a checkpoint visible, with its entry in the journal.
    ///
    /// # Errors
    /// The database's.
    pub(super) async fn add_checkpoint(&self, new: NewCheckpoint, actor: &Actor) -> Result<Added> {
        let named = if new.name.is_empty() { String::new() } else { format!(" {:?}", new.name) };
        let entry = NewEntry {
            kind: EntryKind::Mark,
            at_ms: new.at_ms,
            actor: actor.to_string(),
            text: format!("checkpoint {}{named} ({})", new.id, new.kind.name()),
            // The summary stays here when the checkpoint goes.
            detail_json: serde_json::json!({
                "checkpoint": new.id, "manifest": new.manifest, "summary": new.summary,
            })
            .to_string(),
        };
        Ok(self.state.add_checkpoint(new, entry).await?)
    }

    /// A checkpoint.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn checkpoint(&self, id: CheckpointId) -> Result<Option<Checkpoint>> {
        Ok(self.state.checkpoint(id).await?)
    }

    /// A page of checkpoints before a number, newest first.
    ///
    /// # Errors
    /// The database's.
    pub async fn checkpoints(&self, before: u64, most: usize) -> Result<Vec<Checkpoint>> {
        Ok(self.state.checkpoints(before, most).await?)
    }

    /// Every checkpoint, newest first.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn all_checkpoints(&self) -> Result<Vec<Checkpoint>> {
        let (mut all, mut before) = (Vec::new(), u64::MAX);
        loop {
            let page = self.checkpoints(before, limits::PAGE_ROWS).await?;
            let Some(last) = page.last() else { return Ok(all) };
            before = last.number;
            all.extend(page);
        }
    }

    /// Where the kernel is among its checkpoints.
    ///
    /// # Errors
    /// The database's.
    pub async fn head(&self) -> Result<Head> {
        Ok(self.state.head().await?)
    }

    /// Keeps a checkpoint from retention, or no longer.
    ///
    /// # Errors
    /// The database's.
    pub async fn pin_checkpoint(&self, id: CheckpointId, pinned: bool) -> Result<bool> {
        Ok(self.state.pin_checkpoint(id, pinned).await?)
    }

    /// All checkpoints, and which of them the kernel needs.
    ///
    /// # Errors
    /// The database's.
    pub(super) async fn standing(&self) -> Result<Standing> {
        Ok(self.state.standing().await?)
    }

    /// Removes the checkpoints that `choose` names; gives them.
    ///
    /// # Errors
    /// The database's.
    pub(super) async fn thin_checkpoints(&self, choose: Selection) -> Result<Vec<Checkpoint>> {
        Ok(self.state.prune_checkpoints(choose).await?)
    }

    /// Removes a checkpoint; gives the version with that.
    ///
    /// # Errors
    /// `notFound`; `conflict` if the kernel needs it.
    pub(crate) async fn remove_checkpoint(&self, actor: &Actor, checkpoint: &Checkpoint, at_ms: i64) -> Result<u64> {
        let named = if checkpoint.name.is_empty() { String::new() } else { format!(" {:?}", checkpoint.name) };
        let entry = NewEntry {
            kind: EntryKind::Mark,
            at_ms,
            actor: actor.to_string(),
            text: format!("removed checkpoint {}{named}", checkpoint.id),
            detail_json: serde_json::json!({ "checkpoint": checkpoint.id }).to_string(),
        };
        Ok(version_after(self.state.remove_checkpoint(checkpoint.id, entry).await?))
    }

    /// Whether anything but messages happened since the kernel came to where it is among its checkpoints.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn changed_since_head(&self) -> Result<bool> {
        Ok(self.state.changed_since_head().await?)
    }

    /// The mounts added since creation, and the MCP servers.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn grants(&self) -> Result<Grants> {
        let (mounts, mcp) = (self.state.mounts(), self.state.mcp_servers());
        Ok((mounts.await?, mcp.await?))
    }

    /// Records a transition's intent.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn begin_transition(&self, record: Record) -> Result<()> {
        Ok(self.state.begin_transition(record).await?)
    }

    /// Records that a transition's outcome holds; gives the number of the journal's entry.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn commit_transition(&self, entry: NewEntry) -> Result<u64> {
        Ok(self.state.commit_transition(entry).await?)
    }

    /// Records that a transition is reverted.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn abort_transition(&self) -> Result<()> {
        Ok(self.state.abort_transition().await?)
    }

    /// Deletes the record of a transition that has ended.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn clear_transition(&self) -> Result<()> {
        Ok(self.state.clear_transition().await?)
    }

    /// Ends a restore.
    ///
    /// # Errors
    /// `conflict` if the checkpoint is gone.
    pub(crate) async fn finish_restore(&self, done: Restored) -> Result<Finished> {
        Ok(self.state.finish_restore(done).await?)
    }

    /// Writes a new kernel's first records.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn begin_kernel(&self, beginning: Beginning) -> Result<()> {
        Ok(self.state.begin(beginning).await?)
    }

    /// The blobs that the kernel could read at a time, milliseconds since 1970.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn blobs_granted_until(&self, at_ms: i64) -> Result<Vec<Digest>> {
        Ok(self.state.blobs_granted_until(at_ms).await?)
    }
}
