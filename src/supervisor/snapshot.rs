//! Engine state as one opaque message: taken from `engine.db` after the engine saved, put back through the worker.

use std::rc::Rc;

use super::command::Change;
use super::kernel::Kernel;
use crate::catalog::{CatalogError, Durability, EngineDb};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::info::MissedEntry;
use crate::core::state::{StateEntry, StateImage};
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
    let mut entries: Vec<StateEntry> = Vec::new();
    let mut bytes = 0;
    db.entries::<Error>(|head, piece, _more| {
        bytes += piece.len() + head.key.len() + head.meta_json.len();
        if bytes > limits::STATE_INLINE_BYTES {
            return Err(Error::refused(format!("the state is larger than {} bytes", limits::STATE_INLINE_BYTES))
                .reason("state_size")
                .hint("take a checkpoint, which has no such limit"));
        }
        match entries.last_mut() {
            Some(last) if last.key == head.key => last.body.extend_from_slice(piece),
            _ => entries.push(StateEntry { key: head.key.clone(), meta_json: head.meta_json.clone(), body: piece.to_vec() }),
        }
        Ok(())
    })?;
    let missed = db.missed()?;
    let version = db.info()?.map(|info| info.version).unwrap_or_default();
    db.close().map_err(|error: CatalogError| Error::from(error))?;
    let image = StateImage { engine: engine.to_owned(), engine_version: version, entries, missed: missed.clone() };
    let data = image.pack().map_err(|error| Error::refused(error.to_string()).reason("state_size"))?;
    Ok((data, missed))
}

/// Puts an engine's state back; gives what could not be built again.
///
/// # Errors
/// `invalidArgument` if the bytes are no state, `refused` if they are another engine's; the kernel is untouched then.
pub async fn put_back(kernel: &Rc<Kernel>, change: Change, data: &[u8]) -> Result<Vec<MissedEntry>> {
    let image = StateImage::unpack(data).map_err(|error| {
        Error::invalid(format!("this is no engine state: {error}")).hint("give what `snapshot` gave, whole")
    })?;
    let engine = kernel.spec.engine.name();
    if image.engine != engine {
        return Err(Error::refused(format!("the state is of engine {}, the kernel's engine is {engine}", image.engine))
            .reason("engine"));
    }
    let mut chunks = Vec::new();
    for entry in image.entries {
        let last = entry.body.len().div_ceil(limits::FRAME_TAIL_BYTES).max(1) - 1;
        for i in 0..=last {
            let piece = &entry.body[(i * limits::FRAME_TAIL_BYTES).min(entry.body.len())..];
            chunks.push(Ok(StateChunk {
                key: entry.key.clone(),
                meta_json: entry.meta_json.clone().into_bytes(),
                data: piece[..piece.len().min(limits::FRAME_TAIL_BYTES)].to_vec(),
                more: i < last,
            }));
        }
    }
    kernel
        .with_worker(Some((change, "restored engine state".into())), move |link| async move { link.load(chunks).await })
        .await
}
