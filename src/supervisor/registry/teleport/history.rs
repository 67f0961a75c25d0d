//! The history that a kernel leaves and arrives with.

use std::collections::{HashMap, HashSet};

use super::incoming::TargetSide;
use super::outgoing::Move;
use crate::catalog::StateHandle;
use crate::catalog::state::{Position, Root, RootKind};
use crate::core::error::{Error, Result};
use crate::core::ids::{CheckpointId, Digest};
use crate::core::limits;
use crate::supervisor::registry::journal_io;
use crate::teleport::Received;

/// Checks that the imported rows reference only what was received, and read back as records.
pub(super) async fn check_history(
    state: &StateHandle,
    expected: &HashMap<CheckpointId, Digest>,
    left_behind: u64,
    received: &Received,
) -> Result<()> {
    let wrong = |what: &str| Error::corrupt(format!("the history of the received kernel: {what}")).reason("handover");
    // Rows of those that the source leaves behind are removed with the arrival.
    let rows: HashMap<CheckpointId, Digest> = state.checkpoint_manifests().await?.into_iter().collect();
    let is_whole = rows.len() as u64 == (expected.len() as u64).saturating_add(left_behind);
    if !is_whole || expected.iter().any(|(id, manifest)| rows.get(id) != Some(manifest)) {
        return Err(wrong("its checkpoints are not those that were described"));
    }
    let head = state.head().await?;
    if [head.checkpoint, head.undo].iter().flatten().any(|id| !expected.contains_key(id)) {
        return Err(wrong("it lacks the checkpoint of its position"));
    }
    let moved: HashSet<&Digest> = expected.values().collect();
    let is_left = |root: &Root| matches!(root.kind, RootKind::Checkpoint { .. }) && !moved.contains(&root.digest);
    if state.roots().await?.iter().any(|root| !is_left(root) && !received.held.contains(&root.digest)) {
        return Err(wrong("it references what was not sent"));
    }
    journal_io::is_readable(state).await?;
    state.checkpoints(u64::MAX, limits::PAGE_ROWS).await?;
    Ok(())
}

impl Move {
    /// Stores the pages of the history.
    pub(super) async fn history(&self) -> Result<Vec<Digest>> {
        let (mut at, mut history) = (Position::default(), Vec::new());
        while let Some((page, next)) = self.kernel.records.state.history_page(at).await? {
            history.push(self.host.store.put(page).await?);
            at = next;
            if history.len() > limits::HANDOVER_PAGES {
                return Err(Error::refused("the kernel's history is too large to move").reason("handover_size"));
            }
        }
        Ok(history)
    }
}

impl TargetSide {
    /// Bytes of all pages of a history, which the source may have named without sending them.
    pub(super) async fn page_bytes(&self, pages: &[Digest], most: u64) -> Result<u64> {
        let mut distinct = HashSet::new();
        if let Some(page) = pages.iter().find(|page| !distinct.insert(**page)) {
            return Err(Error::corrupt(format!("the received kernel: page {page} of its history is repeated"))
                .reason("handover"));
        }
        let pages = pages.to_vec();
        let sizes = self.host().store.run_beside(move |store| pages.iter().map(|page| store.size(*page)).collect());
        let sizes: Vec<u64> = sizes.await?;
        let total = sizes.iter().try_fold(0u64, |total, size| total.checked_add(*size));
        match total {
            Some(total) if total <= most && sizes.iter().all(|size| *size <= limits::HANDOVER_PAGE_BYTES) => Ok(total),
            _ => Err(Error::refused("the kernel's history is too large").reason("handover_size")),
        }
    }
}
