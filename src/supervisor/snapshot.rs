//! Engine state as one opaque message: taken from `engine.db` after the engine saved, put back through the worker.

use std::rc::Rc;

use super::command::Change;
use super::kernel::Kernel;
use crate::catalog::{Durability, EngineDb};
use crate::core::error::{Error, Result};
use crate::core::info::MissedEntry;
use crate::core::limits;
use crate::core::state::{EngineState, StateEntry, StateError};
use crate::rpc::worker_link::StateChunk;
use crate::session::StateSnapshot;

/// Takes the engine's state between two executions.
///
/// # Errors
/// `refused` if it is larger than one message holds, `corrupt` if `engine.db` is damaged.
pub async fn take(kernel: &Rc<Kernel>) -> Result<StateSnapshot> {
    let path = kernel.records.engine_db();
    let engine = kernel.spec.engine;
    let (data, missed) = kernel
        .with_worker(None, move |link| async move {
            link.save().await?;
            // Read while this operation holds the worker: nothing else changes the state meanwhile.
            let read = tokio::task::spawn_blocking(move || read(&path, engine.name()));
            read.await.map_err(|error| Error::internal(error.to_string()))?
        })
        .await?;
    Ok(StateSnapshot { data, missed })
}

fn read(path: &std::path::Path, engine: &str) -> Result<(Vec<u8>, Vec<MissedEntry>)> {
    let db = EngineDb::open(path, Durability::Process)?;
    let mut state = EngineState { engine: engine.to_owned(), ..EngineState::default() };
    let mut bytes = 0;
    db.entries::<Error>(|head, piece, _more| {
        bytes += piece.len() + head.key.len() + head.meta_json.len();
        if bytes > limits::STATE_INLINE_BYTES {
            return Err(Error::refused(format!("the state is larger than {} bytes", limits::STATE_INLINE_BYTES))
                .reason("state_size")
                .hint("take a checkpoint, which has no such limit"));
        }
        let entry = state.entries.entry(head.key.clone()).or_insert_with(|| StateEntry {
            meta: serde_json::from_str(&head.meta_json).unwrap_or_default(),
            body: Vec::new(),
        });
        entry.body.extend_from_slice(piece);
        Ok(())
    })?;
    state.missed = db.missed()?;
    state.version = db.info()?.map(|info| info.version).unwrap_or_default();
    db.close()?;
    let data = state.pack().map_err(|error| Error::refused(error.to_string()).reason("state_size"))?;
    Ok((data, state.missed))
}

/// Puts an engine's state back; gives what could not be built again.
///
/// # Errors
/// `invalidArgument` if the bytes are no state, `refused` if they are another engine's; the kernel is untouched then.
pub async fn put_back(kernel: &Rc<Kernel>, change: Change, data: &[u8]) -> Result<Vec<MissedEntry>> {
    let state = EngineState::unpack_of(data, kernel.spec.engine.name()).map_err(|error| match error {
        StateError::OtherEngine { .. } => Error::refused(error.to_string()).reason("engine"),
        error => Error::invalid(error.to_string()).hint("give what `snapshot` gave, whole"),
    })?;
    let chunks: Vec<Result<StateChunk>> =
        state.entries.into_iter().flat_map(|(key, entry)| chunks(key, entry)).collect();
    kernel
        .with_worker(Some((change, "restored engine state".into())), move |link| async move { link.load(chunks).await })
        .await
}

/// An entry in pieces that fit a frame.
fn chunks(key: String, entry: StateEntry) -> impl Iterator<Item = Result<StateChunk>> {
    let last = entry.body.len().div_ceil(limits::FRAME_TAIL_BYTES).max(1) - 1;
    let meta_json = serde_json::Value::Object(entry.meta).to_string().into_bytes();
    (0..=last).map(move |i| {
        let rest = &entry.body[i * limits::FRAME_TAIL_BYTES..];
        let data = rest[..rest.len().min(limits::FRAME_TAIL_BYTES)].to_vec();
        Ok(StateChunk { key: key.clone(), meta_json: meta_json.clone(), data, more: i < last })
    })
}
