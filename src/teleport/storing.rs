//! Objects that arrive, verified as they are stored.

use std::sync::{Mutex, PoisonError};

use tokio::sync::mpsc;

use super::transfer::wrong;
use super::wire::Chunk;
use crate::core::error::Result;
use crate::core::ids::Digest;
use crate::store::{Batch, Packed, Store, StoreError};

/// A part of the stream of objects.
pub(super) enum Item {
    Object(Digest, u64),
    Chunk(Chunk),
    Piece(Vec<u8>),
}

/// Verifies and stores objects.
pub(super) fn put_all(
    store: &Store,
    mut items: mpsc::Receiver<Item>,
    whole: &Mutex<Vec<Digest>>,
) -> Result<Result<()>, StoreError> {
    let batch = store.batch();
    while let Some(item) = items.blocking_recv() {
        let Item::Object(address, size) = item else { return Ok(Err(wrong("a chunk of no object"))) };
        match put_object(&batch, address, size, &mut items)? {
            None => break,
            Some(true) => whole.lock().unwrap_or_else(PoisonError::into_inner).push(address),
            Some(false) => return Ok(Err(wrong(&format!("object {address} is not what its address says")))),
        }
    }
    // If the connection is lost, the next try finds what is whole.
    batch.commit()?;
    Ok(Ok(()))
}

/// Stores an object; `None` if the connection is lost, false if the object is not what its address says.
fn put_object(
    batch: &Batch,
    address: Digest,
    size: u64,
    items: &mut mpsc::Receiver<Item>,
) -> Result<Option<bool>, StoreError> {
    let mut object = batch.arriving(size);
    while object.left() > 0 {
        let is_right = match items.blocking_recv() {
            None => return Ok(None),
            Some(Item::Chunk(Chunk { digest, length, sent: None })) => object.reuse(digest, length)?,
            Some(Item::Chunk(Chunk { digest, length, sent: Some((encoding, stored)) })) => {
                let Some(bytes) = gather(stored, items) else { return Ok(None) };
                object.put(digest, length, &Packed { encoding, bytes })?
            }
            Some(Item::Object(..) | Item::Piece(_)) => false,
        };
        if !is_right {
            return Ok(Some(false));
        }
    }
    object.finish(address).map(Some)
}

/// The bytes of a chunk; `None` if the connection is lost.
fn gather(stored: u32, items: &mut mpsc::Receiver<Item>) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < stored as usize {
        match items.blocking_recv()? {
            Item::Piece(piece) if bytes.is_empty() => bytes = piece,
            Item::Piece(piece) => bytes.extend_from_slice(&piece),
            Item::Object(..) | Item::Chunk(_) => return None,
        }
    }
    Some(bytes)
}
