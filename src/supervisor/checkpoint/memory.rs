//! The engine's memory: a Python engine keeps a copy of itself for a checkpoint, and a restore goes back to it where it is still there.
//!
//! Nothing here is durable: the saved state is always in the checkpoint, and is what counts when the copy is gone.

use std::rc::Rc;

use super::state;
use crate::core::checkpoint::{Checkpoint, CheckpointType, Manifest, RestoredFrom, StateParts};
use crate::core::engine::EngineName;
use crate::core::error::Result;
use crate::core::ids::CheckpointId;
use crate::core::missed::MissedEntry;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;

/// What a manifest calls a copy that there never was.
const KEY: &str = "memory";
/// Reason of the worker's error that says that there is no copy.
const NO_COPY: &str = "no_copy";

/// A copy that is to be kept.
#[derive(Debug, Clone)]
pub(super) struct Keep {
    /// Of what type the checkpoint is.
    pub kind: CheckpointType,
    /// The checkpoint whose copy stays, however many there are.
    pub spare: Option<CheckpointId>,
}

/// What became of a copy that was to be made.
pub(super) struct Copy {
    /// What the checkpoint does not hold, by name, if there is none.
    pub why_not: Option<MissedEntry>,
    /// How long the engine took, microseconds; `None`: none was wanted.
    pub took_us: Option<u64>,
}

/// Has the engine keep a copy of itself for a checkpoint that is being taken, where that makes sense.
///
/// # Errors
/// The worker's.
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
    let why_not = link.keep(id, keep.spare).await?;
    let took_us = u64::try_from(begun.elapsed().as_micros()).ok();
    let missed = |reason| MissedEntry { key: KEY.into(), type_name: "interpreter".into(), reason };
    Ok(Copy { why_not: (!why_not.is_empty()).then(|| missed(why_not)), took_us })
}

/// Why nothing is to be kept of such a checkpoint.
fn unwanted(host: &Host, engine: EngineName, kind: CheckpointType) -> Option<&'static str> {
    match (engine, kind) {
        (EngineName::Kaish | EngineName::Bash | EngineName::Node, _) => Some(""),
        (EngineName::Python, _) if host.config.engines.python.rollback_memory == 0 => {
            Some("this host's configuration wants no copies")
        }
        // They come often, and would take the place of those that somebody wanted.
        (EngineName::Python, CheckpointType::Auto) => Some("automatic checkpoints keep no copy"),
        (EngineName::Python, CheckpointType::Manual | CheckpointType::System | CheckpointType::Conflict) => None,
    }
}

/// Brings the engine to a checkpoint: its memory if there is a copy, else its saved state. Gives what is not as it was. `is_there`: what the engine
/// has is that very state already. May be done twice.
///
/// # Errors
/// The worker's, the store's.
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
                // A crash comes back to what is in `engine.db`: it has to be the same.
                state::revise(link, host.store.clone(), parts.clone()).await?;
                let outside = manifest.missed.iter().filter(|missed| !is_engines(&missed.key));
                return Ok((RestoredFrom::Memory, missed.into_iter().chain(outside.cloned()).collect()));
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

/// Whether something that a manifest names as not held is in the engine's memory.
fn is_engines(key: &str) -> bool {
    !key.starts_with("file/") && !key.starts_with("job/")
}
