//! The engine's memory: a Python engine keeps a copy of itself for a checkpoint; a restore returns to the copy if it
//! still exists.
//!
//! Nothing here is durable: the checkpoint always holds the saved state, and is used when the copy is gone.

use std::rc::Rc;

use super::state;
use crate::core::checkpoint::{Checkpoint, CheckpointType, Manifest, RestoredFrom, StateParts};
use crate::core::engine::EngineName;
use crate::core::error::Result;
use crate::core::ids::CheckpointId;
use crate::core::missed::MissedEntry;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;

/// Manifest key for a missing copy.
const KEY: &str = "memory";
/// Reason of the worker's error for a missing copy.
const NO_COPY: &str = "no_copy";

/// A request to keep a copy.
#[derive(Debug, Clone)]
pub(super) struct Keep {
    /// Type of the checkpoint.
    pub kind: CheckpointType,
    /// Checkpoint whose copy is exempt from eviction.
    pub spare: Option<CheckpointId>,
}

/// Result of a request to keep a copy.
pub(super) struct Copy {
    /// Reason why there is no copy, as a missed entry of the checkpoint.
    pub why_not: Option<MissedEntry>,
    /// Time the engine took, microseconds; `None`: no copy was requested.
    pub took_us: Option<u64>,
}

/// No copy, because the engine runs an execution.
pub(super) fn none_at_work(host: &Host, engine: EngineName, kind: CheckpointType) -> Copy {
    let reason = "an execution was under way: an engine copies itself between two".to_owned();
    let missed = MissedEntry { key: KEY.into(), type_name: "interpreter".into(), reason };
    Copy { why_not: unwanted(host, engine, kind).is_none().then_some(missed), took_us: None }
}

/// Asks the engine to keep a copy of itself for a checkpoint, where a copy is useful.
///
/// # Errors
/// Worker errors.
pub(super) async fn keep(
    host: &Host,
    link: &WorkerLink,
    engine: EngineName,
    id: CheckpointId,
    keep: Option<Keep>,
) -> Result<Copy> {
    let Some(keep) = keep.filter(|keep| unwanted(host, engine, keep.kind).is_none()) else {
        return Ok(Copy { why_not: None, took_us: None });
    };
    let begun = tokio::time::Instant::now();
    let is_transient = keep.kind == CheckpointType::System;
    let why_not = link.keep(id, keep.spare, is_transient).await?;
    let took_us = u64::try_from(begun.elapsed().as_micros()).ok();
    let missed = |reason| MissedEntry { key: KEY.into(), type_name: "interpreter".into(), reason };
    Ok(Copy { why_not: (!why_not.is_empty()).then(|| missed(why_not)), took_us })
}

/// Reason not to keep a copy for such a checkpoint.
fn unwanted(host: &Host, engine: EngineName, kind: CheckpointType) -> Option<&'static str> {
    match (engine, kind) {
        (EngineName::Kaish | EngineName::Bash | EngineName::Node, _) => Some(""),
        (EngineName::Python, _) if host.config.engines.python.rollback_memory == 0 => {
            Some("this host's configuration wants no copies")
        }
        // Automatic checkpoints are frequent: their copies would evict requested ones.
        (EngineName::Python, CheckpointType::Auto) => Some("automatic checkpoints keep no copy"),
        (EngineName::Python, CheckpointType::Manual | CheckpointType::System | CheckpointType::Conflict) => None,
    }
}

/// Restores the engine to a checkpoint: from its memory copy if there is one, else from its saved state.
///
/// Returns the entries that could not be restored. `is_there`: the engine already has that state. Idempotent.
///
/// # Errors
/// Worker errors and store errors.
pub(super) async fn recall(
    host: &Rc<Host>,
    link: &Rc<WorkerLink>,
    checkpoint: &Checkpoint,
    (manifest, parts): (&Manifest, &StateParts),
    is_there: bool,
) -> Result<(RestoredFrom, Vec<MissedEntry>)> {
    let never = manifest.missed.iter().find(|missed| missed.key == KEY).map(|missed| missed.reason.clone());
    let why_not = match (unwanted(host, manifest.engine, checkpoint.kind), never) {
        (Some(why), _) => why.to_owned(),
        (None, Some(why)) => why,
        (None, None) => match link.wake(checkpoint.id).await {
            Ok(missed) => {
                // A crash resumes from `engine.db`, so it must hold the same state.
                state::revise(link, host.store.clone(), parts.clone()).await?;
                return Ok((RestoredFrom::Memory, missed.into_iter().chain(outside(manifest).cloned()).collect()));
            }
            Err(error) if error.reason == NO_COPY => error.message,
            Err(error) => return Err(error),
        },
    };
    let mut missed = match is_there {
        true => Vec::new(),
        false => link.load(state::chunks(host.store.clone(), parts.clone())).await?,
    };
    missed.extend(manifest.missed.iter().filter(|missed| missed.key != KEY).cloned());
    Ok((RestoredFrom::Saved { why_not_memory: why_not }, missed))
}

/// The missed entries of a manifest that are not in the engine's memory.
pub(super) fn outside(manifest: &Manifest) -> impl Iterator<Item = &MissedEntry> {
    manifest.missed.iter().filter(|missed| !is_engines(&missed.key))
}

/// Whether a missed entry of a manifest is in the engine's memory.
fn is_engines(key: &str) -> bool {
    !key.starts_with("file/") && !key.starts_with("job/")
}
