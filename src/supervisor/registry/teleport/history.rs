//! The history that a kernel arrives with.

use std::collections::{HashMap, HashSet};

use crate::catalog::StateHandle;
use crate::catalog::state::{Root, RootKind};
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
