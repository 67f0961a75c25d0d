//! Engine state as one opaque message: read from `engine.db` after the engine saved, and written back through the
//! worker.

use std::rc::Rc;

use super::command::Change;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::state::{EngineState, StateEntry};
use crate::link::types::StateChunk;
use crate::session::StateSnapshot;
use crate::supervisor::kernel::Kernel;

/// Captures the engine's state between two executions.
///
/// The engine saves; the worker, which owns `engine.db`, reads the state from it.
///
/// # Errors
/// `refused` if it is larger than one message holds, `corrupt` if `engine.db` is damaged.
pub async fn take(kernel: &Rc<Kernel>) -> Result<StateSnapshot> {
    let engine = kernel.spec().engine.name();
    let mut state = kernel
        .with_worker(None, move |link| async move {
            link.save().await?;
            let heads = link.state_heads().await?;
            let bytes: u64 = heads.iter().map(|head| head.size + (head.key.len() + head.meta_json.len()) as u64).sum();
            if bytes > limits::STATE_INLINE_BYTES as u64 {
                return Err(Error::refused(format!(
                    "the state of {bytes} bytes is larger than {}",
                    limits::STATE_INLINE_BYTES
                ))
                .reason("state_size")
                .hint("take a checkpoint, which has no such limit"));
            }
            let mut state = EngineState { engine: engine.to_owned(), ..EngineState::default() };
            // The state cannot change meanwhile: this operation holds the worker.
            for head in heads {
                let entry = link.state_entry(&head.key).await?;
                if blake3::hash(&entry.body).as_bytes() != head.digest.as_bytes() {
                    return Err(Error::corrupt(format!("the body of {:?} is not what was stored", head.key)));
                }
                let meta = serde_json::from_str(&entry.meta_json).unwrap_or_default();
                state.entries.insert(entry.key, StateEntry { meta, body: entry.body });
            }
            Ok(state)
        })
        .await?;
    let missed = kernel.view().missed;
    state.missed.clone_from(&missed);
    let data = state.pack().map_err(|error| Error::refused(error.to_string()).reason("state_size"))?;
    Ok(StateSnapshot { data, missed })
}

/// Writes an engine's state back; returns the entries that could not be rebuilt.
///
/// # Errors
/// `invalidArgument` if the bytes are no engine state, `refused` if they come from another engine; the kernel is
/// unchanged then.
pub async fn put_back(kernel: &Rc<Kernel>, change: Change, data: &[u8]) -> Result<Vec<MissedEntry>> {
    let state = EngineState::unpack_of(data, kernel.spec().engine.name())?;
    let chunks: Vec<Result<StateChunk>> =
        state.entries.into_iter().flat_map(|(key, entry)| entry_chunks(key, entry)).collect();
    kernel
        .with_worker(Some((change, "restored engine state".into())), move |link| async move {
            link.load(futures::stream::iter(chunks)).await
        })
        .await
}

fn entry_chunks(key: String, entry: StateEntry) -> impl Iterator<Item = Result<StateChunk>> {
    chunks(key, serde_json::Value::Object(entry.meta).to_string().into_bytes(), entry.body)
}

/// Splits an entry into chunks that fit a frame.
pub(crate) fn chunks(key: String, meta_json: Vec<u8>, body: Vec<u8>) -> impl Iterator<Item = Result<StateChunk>> {
    let last = body.len().div_ceil(limits::FRAME_TAIL_BYTES).max(1) - 1;
    (0..=last).map(move |i| {
        let rest = &body[i * limits::FRAME_TAIL_BYTES..];
        let data = rest[..rest.len().min(limits::FRAME_TAIL_BYTES)].to_vec();
        Ok(StateChunk { key: key.clone(), meta_json: meta_json.clone(), data, more: i < last })
    })
}
