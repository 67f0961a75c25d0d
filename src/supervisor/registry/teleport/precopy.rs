//! What is copied while the kernel runs, in rounds: each one sends what was written during the one before it.

use std::collections::HashSet;
use std::time::Instant;

use super::evidence::store_excerpt;
use super::outgoing::Move;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, Manifest};
use crate::core::error::{Error, Result};
use crate::core::handover::Rounds;
use crate::core::ids::CheckpointId;
use crate::core::limits;
use crate::core::snapshot::KindRequest;
use crate::supervisor::checkpoint;
use crate::teleport::Accept;
use crate::teleport::source::Session;

/// The phase.
pub(super) const COPYING: &str = "copying";
/// The same if the target cannot continue the machine.
const COPYING_STATE: &str = "copying without memory";

impl Move {
    /// Copies until little is left, or the rest does not shrink; returns the number of rounds.
    ///
    /// # Errors
    /// Those of a checkpoint, of the connection and of the target.
    pub(super) async fn copy_rounds(&self, session: &mut Session, accept: &Accept) -> Result<u32> {
        let phase = if accept.why.is_empty() { COPYING } else { COPYING_STATE };
        let (mut rounds, mut previewed) = (Rounds::begin(accept.kind), None);
        loop {
            let (begun, before) = (Instant::now(), session.sent.sent_bytes);
            let snapshot = KindRequest::Only(accept.kind);
            let taking = CheckpointRequest { snapshot, ..CheckpointRequest::new(CheckpointType::Auto, "teleport") };
            let taken = checkpoint::take(&self.host, &self.kernel, taking, self.actor.clone()).await?;
            self.copy(session, phase).await.map(drop)?;
            let manifest = self.host.store.get(taken.manifest, limits::MANIFEST_BYTES as u64).await?;
            let manifest = Manifest::decode(&manifest).map_err(|error| Error::corrupt(error.to_string()))?;
            // Later rounds change few of the files.
            if rounds.count == 0 {
                session.preview(manifest.workspace.tree).await?;
            }
            if previewed != Some(manifest.state) {
                session.preview_state(manifest.state).await?;
                previewed = Some(manifest.state);
            }
            if !rounds.ended(session.sent.sent_bytes - before, begun.elapsed()) {
                break;
            }
        }
        let excerpt = store_excerpt(&self.host, &self.kernel).await?;
        self.send(session, &[excerpt], phase).await?;
        self.excerpt.set(Some(excerpt));
        // The target may be prepared from the seal on: the record that ends that must survive a loss of power. It also
        // leaves less to sync in the pause.
        self.host.sync_decision_again(Some(self.kernel.id)).await?;
        Ok(rounds.count)
    }

    /// The checkpoints that move, and the number of others: all move, or those since one of them with older ones that
    /// something needs.
    pub(super) async fn moving_checkpoints(&self) -> Result<(Vec<Checkpoint>, u64)> {
        let records = &self.kernel.records;
        let mut found = records.all_checkpoints().await?;
        let (head, before) = (records.head().await?, found.len());
        let frozen = self.host.catalog.freezes_of_kernel(self.kernel.id).await?;
        let needed: HashSet<CheckpointId> =
            head.checkpoint.into_iter().chain(head.undo).chain(frozen.into_iter().map(|(id, ..)| id)).collect();
        // A summary stands for messages of the journal.
        let is_needed = |one: &Checkpoint| one.pinned || one.compacted > 0 || needed.contains(&one.id);
        found.retain(|one| one.number >= self.since || is_needed(one));
        let left_behind = before - found.len();
        Ok((found, left_behind as u64))
    }

    /// Bytes of the kernel's files and of the engine state in its newest checkpoint; 0: not known.
    pub(super) async fn known_bytes(&self) -> u64 {
        let counted = async {
            let files = checkpoint::used_bytes(&self.host, &self.kernel).await?;
            let newest = self.kernel.records.checkpoints(u64::MAX, 1).await?;
            Ok::<_, Error>(files.saturating_add(newest.first().map_or(0, |newest| newest.state_bytes)))
        };
        match counted.await {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::info!(kernel = %self.kernel.spec().name, %error, "a kernel is offered without its size");
                0
            }
        }
    }
}
