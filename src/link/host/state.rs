//! The engine's state over the link: loading it whole, reading entries of `engine.db`.

use std::collections::VecDeque;

use capnp::struct_list;
use futures::{Stream, StreamExt as _};

use super::calls::answered;
use super::{StateEntry, WorkerLink};
use crate::core::error::{Error, Result};
use crate::core::ids::{CheckpointId, Digest, ExecId};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::link::frames::count_parts;
use crate::link::host::callbacks::decode_missed;
use crate::link::schema::worker_capnp::{self as wire, state_head};
use crate::link::types::from_capnp;
use crate::link::types::{StateBefore, StateChunk, StateHead, StateHeads};

/// State chunks in flight; Cap'n Proto's window bounds their bytes.
const CHUNKS_IN_FLIGHT: usize = 64;

impl WorkerLink {
    /// Replaces the engine's whole state and returns the entries that it could not build. If a load
    /// fails midway the worker ends, and `engine.db` keeps the previous state.
    ///
    /// # Errors
    /// `Busy` while an execution runs; the first error of `chunks`.
    pub async fn load(&self, chunks: impl Stream<Item = Result<StateChunk>>) -> Result<Vec<MissedEntry>> {
        answered(self.client.load_begin_request().send().promise).await?;
        let loaded = self.load_begun(chunks).await;
        if loaded.is_err() {
            // A worker whose daemon disconnects during a load ends; otherwise it would wait for the
            // remaining chunks.
            self.disconnect();
        }
        loaded
    }

    async fn load_begun(&self, chunks: impl Stream<Item = Result<StateChunk>>) -> Result<Vec<MissedEntry>> {
        let mut sent = VecDeque::with_capacity(CHUNKS_IN_FLIGHT);
        let mut chunks = std::pin::pin!(chunks);
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            let mut request = self.client.load_entry_request();
            let mut entry = request.get();
            entry.set_key(&chunk.key);
            entry.set_meta_json(&chunk.meta_json);
            entry.set_data(&chunk.data);
            entry.set_more(chunk.more);
            sent.push_back(request.send());
            if sent.len() >= CHUNKS_IN_FLIGHT
                && let Some(oldest) = sent.pop_front()
            {
                answered(oldest).await?;
            }
        }
        for promise in sent {
            answered(promise).await?;
        }
        let answer = answered(self.client.load_end_request().send().promise).await?;
        let missed = answer.get().and_then(|r| r.get_missed_json()).map_err(|e| from_capnp(&e))?;
        Ok(decode_missed(missed))
    }

    /// Makes a checkpoint's snapshot the engine; every other process inside ends. Returns the
    /// differences. `engine.db` is unchanged until [`Self::revise`].
    ///
    /// # Errors
    /// `NotFound` with reason `no_copy` and why; nothing has changed then. `Lost` if there is no
    /// certain engine any more.
    pub async fn wake(&self, checkpoint: CheckpointId) -> Result<Vec<MissedEntry>> {
        let mut request = self.client.wake_request();
        request.get().set_checkpoint(checkpoint.to_string());
        let answer = answered(request.send().promise).await?;
        let missed = answer.get().and_then(|r| r.get_missed_json()).map_err(|e| from_capnp(&e))?;
        Ok(decode_missed(missed))
    }

    /// Brings `engine.db` to the engine's state, in one transaction: deleted entries, and chunks of
    /// new or changed ones.
    ///
    /// # Errors
    /// The first error of `chunks`, and the database's; nothing has changed then.
    pub async fn revise(&self, gone: Vec<String>, chunks: impl Stream<Item = Result<StateChunk>>) -> Result<()> {
        for key in &gone {
            let mut request = self.client.revise_request();
            request.get().set_key(key);
            request.get().set_gone(true);
            answered(request.send().promise).await?;
        }
        let mut chunks = std::pin::pin!(chunks);
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            let mut request = self.client.revise_request();
            let mut entry = request.get();
            entry.set_key(&chunk.key);
            entry.set_meta_json(&chunk.meta_json);
            entry.set_data(&chunk.data);
            entry.set_more(chunk.more);
            answered(request.send().promise).await?;
        }
        let mut request = self.client.revise_request();
        request.get().set_last(true);
        answered(request.send().promise).await.map(drop)
    }

    /// Lists the entries of `engine.db` by key, without bodies, as of the last execution's end.
    ///
    /// # Errors
    /// `Corrupt` for a damaged database, `Refused` with reason `state_size` for too much metadata.
    pub async fn state_heads(&self) -> Result<Vec<StateHead>> {
        Ok(self.state_at_boundary().await?.heads)
    }

    /// As [`Self::state_heads`], with what they are of a running execution.
    ///
    /// # Errors
    /// As there.
    pub async fn state_at_boundary(&self) -> Result<StateHeads> {
        let answer = answered(self.client.state_heads_request().send().promise).await?;
        let answer = answer.get().map_err(|e| from_capnp(&e))?;
        let before = match answer.get_before() {
            Ok(wire::StateBefore::Saved) => StateBefore::Saved,
            Ok(wire::StateBefore::Unsaved) => StateBefore::Unsaved,
            Ok(wire::StateBefore::Background) => StateBefore::Background,
            Ok(wire::StateBefore::Unknown) | Err(_) => StateBefore::Unknown,
        };
        let under_way = Some(answer.get_under_way()).filter(|exec| *exec != 0).map(ExecId);
        Ok(StateHeads { heads: decode_heads(answer.get_heads().map_err(|e| from_capnp(&e))?)?, under_way, before })
    }

    /// Reads one entry of `engine.db`.
    ///
    /// # Errors
    /// `NotFound`; `Conflict` if the entry changed during the read.
    pub async fn state_entry(&self, key: &str) -> Result<StateEntry> {
        let mut entry = StateEntry { key: key.to_owned(), meta_json: String::new(), body: Vec::new() };
        loop {
            let mut request = self.client.state_entry_request();
            request.get().set_key(key);
            request.get().set_offset(entry.body.len() as u64);
            let answer = answered(request.send().promise).await?;
            let piece = answer.get().map_err(|e| from_capnp(&e))?;
            let meta_json = String::from_utf8_lossy(piece.get_meta_json().map_err(|e| from_capnp(&e))?).into_owned();
            check_meta(count_parts(meta_json.as_bytes()), limits::FRAME_PARTS)?;
            let data = piece.get_data().map_err(|e| from_capnp(&e))?;
            let (size, first) = (piece.get_size(), entry.body.is_empty());
            if size > limits::STATE_BYTES || (!first && meta_json != entry.meta_json) {
                return Err(Error::conflict(format!("state entry {key:?} changed during the read")));
            }
            entry.meta_json = meta_json;
            entry.body.extend_from_slice(data);
            match (entry.body.len() as u64).cmp(&size) {
                std::cmp::Ordering::Equal => return Ok(entry),
                std::cmp::Ordering::Less if !data.is_empty() => {}
                std::cmp::Ordering::Less | std::cmp::Ordering::Greater => {
                    return Err(Error::conflict(format!("state entry {key:?} changed during the read")));
                }
            }
        }
    }
}

fn decode_heads(heads: struct_list::Reader<'_, state_head::Owned>) -> Result<Vec<StateHead>> {
    let mut meta_parts = 0;
    let decode = |head| {
        let head = decode_head(head).map_err(|e| from_capnp(&e))?;
        meta_parts += count_parts(head.meta_json.as_bytes());
        check_meta(meta_parts, limits::STATE_META_PARTS)?;
        Ok(head)
    };
    heads.iter().map(decode).collect()
}

fn decode_head(head: state_head::Reader<'_>) -> capnp::Result<StateHead> {
    let digest = <[u8; 32]>::try_from(head.get_digest()?);
    Ok(StateHead {
        key: head.get_key()?.to_string()?,
        meta_json: String::from_utf8_lossy(head.get_meta_json()?).into_owned(),
        digest: Digest::from_bytes(digest.map_err(|_| capnp::Error::failed("a digest has 32 bytes".into()))?),
        size: head.get_size(),
        exec: Some(head.get_exec_id()).filter(|exec| *exec != 0).map(ExecId),
    })
}

/// Bounds metadata before the supervisor decodes it.
fn check_meta(parts: usize, most: usize) -> Result<()> {
    match parts <= most {
        true => Ok(()),
        false => Err(Error::refused(format!("the metadata of the engine's state has more than {most} parts"))
            .reason("state_size")),
    }
}

#[cfg(test)]
mod tests {
    use capnp::message::{Builder, HeapAllocator, ReaderOptions};

    use super::*;
    use crate::link::schema::worker_capnp::worker::state_heads_results;

    fn heads(metas: &[String]) -> Result<Vec<StateHead>> {
        let mut message = Builder::<HeapAllocator>::new_default();
        let mut list = message.init_root::<state_heads_results::Builder<'_>>().init_heads(metas.len() as u32);
        for (i, meta) in metas.iter().enumerate() {
            let mut head = list.reborrow().get(i as u32);
            head.set_key("var/x");
            head.set_digest(&[0; 32]);
            head.set_meta_json(meta.as_bytes());
        }
        let mut options = ReaderOptions::new();
        options.traversal_limit_in_words(None);
        let segments = message.get_segments_for_output();
        let message = capnp::message::Reader::new(capnp::message::SegmentArray::new(&segments), options);
        decode_heads(message.get_root::<state_heads_results::Reader<'_>>().and_then(|r| r.get_heads()).expect("a list"))
    }

    #[test]
    fn metadata_is_bounded_in_total() {
        let meta = format!("{{\"x\":[{}]}}", vec!["0"; limits::STATE_META_PARTS / 4].join(","));
        assert_eq!(heads(&vec![meta.clone(); 3]).map(|heads| heads.len()), Ok(3));
        let refused = heads(&vec![meta; 4]).expect_err("too many parts");
        assert_eq!(refused.reason, "state_size");
    }
}
