//! Transfer of objects: the sender names addresses, the receiver answers which it lacks, only those travel. Of an object
//! of several chunks, only the chunks travel that the receiver lacks.
//!
//! ```text
//! store ─▶ chunks as stored, verified ─▶ [queue] ─▶ wire ═══ wire ─▶ [queue] ─▶ verified, stored as they are ─▶ store
//!          a blocking thread                        event loops                 a blocking thread
//! ```
//! Event loops only pass bytes on.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::storing::{Item, put_all};
use super::wire::{Chunk, Frame, Message, Wire, bounded, unexpected};
use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::store::{Encoding, List, Packed, Store, StoreError, StoreHandle, is_chunk};

/// Frames queued between disk and connection.
const QUEUED: usize = 16;

/// Totals of a transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// Objects that the kernel consists of.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Objects that the receiver lacked.
    pub sent_objects: u64,
    /// Bytes of their chunks that the receiver lacked.
    pub sent_bytes: u64,
    /// Bytes of objects and chunks that the receiver had.
    pub reused_bytes: u64,
    /// Bytes on the connection.
    pub wire_bytes: u64,
}

/// Receives the phase and the totals so far.
pub type Progress = Box<dyn Fn(&'static str, Sent)>;

/// Holds a transfer to a rate. Time in which the connection was slower is not made up for beyond a second.
struct Pace {
    /// Bytes a second; 0: no limit.
    rate: u64,
    begun: Instant,
    bytes: u64,
}

impl Pace {
    fn new(rate: u64) -> Pace {
        Pace { rate, begun: Instant::now(), bytes: 0 }
    }

    /// Waits until these bytes were due.
    async fn sent(&mut self, bytes: u64) {
        if self.rate == 0 {
            return;
        }
        self.bytes += bytes;
        let due = self.begun + Duration::from_secs_f64(self.bytes as f64 / self.rate as f64);
        let now = Instant::now();
        if now > due + Duration::from_secs(1) {
            (self.begun, self.bytes) = (now, 0);
        }
        tokio::time::sleep_until(due).await;
    }
}

/// Sends the objects that the receiver lacks; returns when the receiver has stored them.
pub(super) async fn send(
    wire: &mut Wire,
    store: &StoreHandle,
    digests: &[Digest],
    totals: &mut Sent,
    limit_rate: u64,
    progress: &dyn Fn(Sent),
) -> Result<()> {
    let (mut count, mut pace) = (0, Pace::new(limit_rate));
    let mut batches = digests.chunks(limits::HANDOVER_DIGESTS);
    let mut asked = batches.next();
    if let Some(first) = asked {
        ask(wire, Frame::Question(first.to_vec())).await?;
    }
    while let Some(batch) = asked {
        let mut lacks = lacking(wire, batch).await?;
        asked = batches.next();
        count += lacks.len() as u64;
        totals.objects += batch.len() as u64;
        totals.sent_objects += lacks.len() as u64;
        let (all, lacked) = (batch.to_vec(), lacks.clone());
        let sizes = store.run(move |store| {
            let size = |digests: &[Digest]| digests.iter().map(|digest| store.size(*digest)).sum::<Result<u64, _>>();
            Ok((size(&all)?, size(&lacked)?))
        });
        let (all, lacked) = sizes.await?;
        totals.bytes += all;
        totals.reused_bytes += all.saturating_sub(lacked);
        loop {
            let group;
            (group, lacks) = store.run(move |store| next_group(store, lacks)).await?;
            let missing = missing_chunks(wire, &group).await?;
            // The receiver answers the next question while these objects travel.
            if let Some(next) = asked.filter(|_| lacks.is_empty()) {
                ask(wire, Frame::Question(next.to_vec())).await?;
            }
            stream(wire, store, (group, missing), totals, &mut pace, progress).await?;
            if lacks.is_empty() {
                break;
            }
        }
    }
    wire.send(Message::Flush { objects: count }).await?;
    match wire.answer().await? {
        Message::Flushed => Ok(()),
        other => Err(unexpected(&other)),
    }
}

async fn ask(wire: &mut Wire, question: Frame) -> Result<()> {
    wire.write_frame(&question).await?;
    wire.flush().await
}

/// Receives the answer to a question: what the receiver lacks.
async fn lacking(wire: &mut Wire, asked: &[Digest]) -> Result<Vec<Digest>> {
    let bits = match wire.frame(limits::HANDOVER_STEP).await? {
        Some(Frame::Answer(bits)) if bits.len() == asked.len().div_ceil(8) => bits,
        Some(Frame::Message(Message::Refused { error })) => return Err(bounded(error)),
        Some(_) => return Err(Error::corrupt("the other host sent a malformed answer").reason("protocol")),
        None => return Err(Error::unavailable("the other host closed the connection").reason("connection")),
    };
    let lacks = asked.iter().enumerate().filter(|(at, _)| bits[at / 8] >> (at % 8) & 1 == 1);
    Ok(lacks.map(|(_, digest)| *digest).collect())
}

/// Objects that are sent together, with their chunks.
type Group = Vec<(Digest, List)>;

/// Takes objects with the chunks of one question, or one object; returns also those that follow.
fn next_group(store: &Store, mut lacks: Vec<Digest>) -> Result<(Group, Vec<Digest>), StoreError> {
    let (mut group, mut chunks) = (Vec::new(), 0);
    for digest in &lacks {
        let list = store.chunks(*digest)?;
        chunks += list.chunks.len();
        group.push((*digest, list));
        if chunks >= limits::HANDOVER_DIGESTS {
            break;
        }
    }
    let later = lacks.split_off(group.len());
    Ok((group, later))
}

/// Asks which chunks of objects of several ones are missing.
async fn missing_chunks(wire: &mut Wire, group: &[(Digest, List)]) -> Result<HashSet<Digest>> {
    let mut distinct = HashSet::new();
    let several = group.iter().filter(|(_, list)| list.chunks.len() > 1).flat_map(|(_, list)| &list.chunks);
    let chunks: Vec<Digest> = several.map(|(chunk, _)| *chunk).filter(|chunk| distinct.insert(*chunk)).collect();
    let mut missing = HashSet::new();
    for asked in chunks.chunks(limits::HANDOVER_DIGESTS) {
        ask(wire, Frame::ChunkQuestion(asked.to_vec())).await?;
        missing.extend(lacking(wire, asked).await?);
    }
    Ok(missing)
}

/// Reads objects on a blocking thread and writes them to the wire.
async fn stream(
    wire: &mut Wire,
    store: &StoreHandle,
    (group, mut missing): (Group, HashSet<Digest>),
    totals: &mut Sent,
    pace: &mut Pace,
    progress: &dyn Fn(Sent),
) -> Result<()> {
    let (to, mut frames) = mpsc::channel(QUEUED);
    let reading = store.run_beside(move |store| {
        for (object, list) in group {
            // The receiver of the frames is gone if the connection is lost.
            if !read_object(store, object, list, &mut missing, |frame| to.blocking_send(frame).is_ok())? {
                break;
            }
        }
        Ok(())
    });
    let sending = async move {
        while let Some(frame) = frames.recv().await {
            let before = wire.sent;
            wire.write_frame(&frame).await?;
            totals.wire_bytes = wire.sent;
            match frame {
                Frame::Chunk(Chunk { sent: Some(_), length, .. }) => totals.sent_bytes += u64::from(length),
                Frame::Chunk(Chunk { sent: None, length, .. }) => totals.reused_bytes += u64::from(length),
                _ => progress(*totals),
            }
            pace.sent(wire.sent - before).await;
        }
        Ok::<(), Error>(())
    };
    let (read, sent) = futures::join!(reading, sending);
    read?;
    sent
}

/// Reads an object, and passes its frames on; false once `to` takes none. Each of the `missing` chunks is read once.
fn read_object(
    store: &Store,
    object: Digest,
    list: List,
    missing: &mut HashSet<Digest>,
    to: impl Fn(Frame) -> bool,
) -> Result<bool, StoreError> {
    if !to(Frame::Object { digest: object, size: list.size }) {
        return Ok(false);
    }
    let is_only = list.chunks.len() == 1;
    for (digest, length) in list.chunks.into_iter().filter(|(_, length)| *length > 0) {
        if !is_only && !missing.remove(&digest) {
            if !to(Frame::Chunk(Chunk { digest, length, sent: None })) {
                return Ok(false);
            }
            continue;
        }
        let Packed { encoding, bytes } = store.packed(object, digest, length)?;
        let sent = Some((encoding, bytes.len() as u32));
        let mut pieces = bytes.chunks(limits::HANDOVER_PIECE_BYTES);
        if !to(Frame::Chunk(Chunk { digest, length, sent })) || !pieces.all(|piece| to(Frame::Piece(piece.to_vec()))) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The objects of the receiver's store that a sender may refer to without sending them.
pub enum Reuse {
    /// Every object: all kernels here have one owner.
    All,
    /// These: those of the owner's kernels. An address must not lead to objects of other users.
    Only(HashSet<Digest>),
}

/// Everything that a sender may refer to: received objects, and named ones that were here.
#[derive(Debug, Default)]
pub struct Received {
    /// The addresses. Shared with those who verify, not copied.
    pub held: Arc<HashSet<Digest>>,
    /// Bytes that may arrive.
    pub most_bytes: u64,
}

/// The receiving side of one kernel's objects.
pub(super) struct Receiving {
    store: StoreHandle,
    /// The owner's objects, if only those may be referred to.
    own: Option<Arc<HashSet<Digest>>>,
    /// Then also chunks: of those objects, once chunks were asked for, and of this connection.
    own_chunks: Option<HashSet<Digest>>,
    received: Received,
    /// Asked for, and not yet begun.
    asked: HashSet<Digest>,
    /// Chunks in questions.
    asked_chunks: usize,
    /// For the addresses in memory.
    reserved: Option<OwnedSemaphorePermit>,
    bytes: u64,
    /// Bytes of chunks that were sent, as they are stored.
    stored: u64,
    round: u64,
    current: Option<Current>,
    sink: Option<Sink>,
    /// Objects that were sent and verified.
    whole: Arc<Mutex<Vec<Digest>>>,
}

/// An object that is not complete.
struct Current {
    size: u64,
    /// Bytes of the chunks that follow.
    left: u64,
    /// Bytes of the current chunk that follow, as it is stored.
    stored: u32,
}

struct Sink {
    to: mpsc::Sender<Item>,
    stored: JoinHandle<Result<Result<()>, StoreError>>,
}

pub(super) fn wrong(what: &str) -> Error {
    Error::corrupt(format!("the source host broke the protocol: {what}")).reason("protocol")
}

fn too_many() -> Error {
    Error::refused(format!("the kernel has more than {} objects", limits::HANDOVER_OBJECTS)).reason("handover_size")
}

/// One bit per address: 1 is missing.
fn bits(digests: &[Digest], is_missing: impl FnMut(&Digest) -> bool) -> Vec<u8> {
    let mut bits = vec![0; digests.len().div_ceil(8)];
    for (at, is_missing) in digests.iter().map(is_missing).enumerate() {
        bits[at / 8] |= u8::from(is_missing) << (at % 8);
    }
    bits
}

impl Receiving {
    pub(super) fn new(store: StoreHandle, reuse: Reuse, most_bytes: u64) -> Receiving {
        let own = match reuse {
            Reuse::All => None,
            Reuse::Only(own) => Some(Arc::new(own)),
        };
        Receiving {
            store,
            own,
            own_chunks: None,
            received: Received { most_bytes, ..Received::default() },
            asked: HashSet::new(),
            asked_chunks: 0,
            reserved: None,
            bytes: 0,
            stored: 0,
            round: 0,
            current: None,
            sink: None,
            whole: Arc::default(),
        }
    }

    /// Everything that has arrived, durably.
    ///
    /// # Errors
    /// `corrupt` within a round.
    pub(super) fn received(&self) -> Result<&Received> {
        match self.sink {
            None => Ok(&self.received),
            Some(_) => Err(wrong("a step within a round")),
        }
    }

    /// Bytes that the store may have got, also from objects that are incomplete.
    pub(super) fn stored(&self) -> u64 {
        self.stored
    }

    /// Answers which of the named objects are missing.
    pub(super) async fn question(&mut self, digests: Vec<Digest>) -> Result<Vec<u8>> {
        if self.current.is_some() {
            return Err(wrong("a question within an object"));
        }
        // The sender asks once more before it sends what the last answer said.
        if self.asked.len() + digests.len() > 2 * limits::HANDOVER_DIGESTS {
            return Err(wrong("questions without the objects that were missing"));
        }
        if self.received.held.len() + self.asked.len() + digests.len() > limits::HANDOVER_OBJECTS {
            return Err(too_many());
        }
        let may = |digest: &Digest| self.own.as_ref().is_none_or(|own| own.contains(digest));
        let usable: Vec<Digest> = digests.iter().copied().filter(may).collect();
        let here =
            self.store.run(move |store| Ok(usable.into_iter().filter(|one| store.claim(*one)).collect::<Vec<_>>()));
        let here = here.await?;
        let held = Arc::make_mut(&mut self.received.held);
        held.extend(here);
        let bits = bits(&digests, |digest| !held.contains(digest) && self.asked.insert(*digest));
        self.reserve()?;
        Ok(bits)
    }

    /// Takes room for the addresses in memory.
    fn reserve(&mut self) -> Result<()> {
        let own = self.own_chunks.as_ref().map_or(0, HashSet::len);
        let count = self.received.held.len() + self.asked.len() + own;
        let more = count.saturating_sub(self.reserved.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        if more == 0 {
            return Ok(());
        }
        let Some(more) = self.store.reserve_addresses(more) else {
            return Err(Error::refused("too many objects of other kernels arrive at once")
                .reason("handover_size")
                .hint("try again when the others have arrived"));
        };
        match &mut self.reserved {
            Some(reserved) => reserved.merge(more),
            None => self.reserved = Some(more),
        }
        Ok(())
    }

    /// Answers which of the named chunks are missing.
    pub(super) async fn chunk_question(&mut self, digests: Vec<Digest>) -> Result<Vec<u8>> {
        if self.current.is_some() {
            return Err(wrong("a question within an object"));
        }
        self.asked_chunks += digests.len();
        if self.asked_chunks > limits::HANDOVER_OBJECTS {
            return Err(too_many());
        }
        let (own, mut chunks) = (self.own.clone(), self.own_chunks.take());
        let answering = self.store.run_beside(move |store| {
            if let Some(own) = own {
                chunks.get_or_insert_with(|| chunks_of(store, &own));
            }
            let is_here = |chunk: &Digest| {
                chunks.as_ref().is_none_or(|chunks| chunks.contains(chunk)) && store.claim_chunk(*chunk)
            };
            let bits = bits(&digests, |chunk| !is_here(chunk));
            Ok((chunks, bits))
        });
        let (chunks, bits) = answering.await?;
        self.own_chunks = chunks;
        self.reserve()?;
        Ok(bits)
    }

    /// Checks that an object may begin.
    pub(super) fn check_object(&self, digest: Digest, size: u64) -> Result<()> {
        if self.current.is_some() {
            return Err(wrong("an object within another"));
        }
        if !self.asked.contains(&digest) {
            return Err(wrong("an object that was not asked for"));
        }
        if size > limits::BLOB_BYTES || self.bytes.saturating_add(size) > self.received.most_bytes {
            return Err(Error::refused(format!("the kernel has more than {} bytes", self.received.most_bytes))
                .reason("handover_size")
                .hint("free space on this host, or move a smaller kernel"));
        }
        Ok(())
    }

    /// An object begins, which was checked.
    pub(super) async fn object(&mut self, digest: Digest, size: u64) -> Result<()> {
        self.asked.remove(&digest);
        // Nothing uses it before the end of the round, which fails unless it is whole.
        Arc::make_mut(&mut self.received.held).insert(digest);
        self.bytes = self.bytes.saturating_add(size);
        self.round += 1;
        self.current = (size > 0).then_some(Current { size, left: size, stored: 0 });
        self.give(Item::Object(digest, size)).await
    }

    /// The next chunk of the current object. Its length and its bytes are verified when it is stored.
    pub(super) async fn chunk(&mut self, chunk: Chunk) -> Result<()> {
        let Some(current) = self.current.as_mut().filter(|current| current.stored == 0) else {
            return Err(wrong("a chunk of no object"));
        };
        let left = current.left.checked_sub(chunk.length.into()).filter(|_| chunk.length > 0);
        let left = left.ok_or_else(|| wrong("an object longer than it says"))?;
        // A chunk is gathered in memory before it is stored.
        if !is_chunk(current.size, current.left, chunk.length) {
            return Err(wrong("a chunk of no such length"));
        }
        current.left = left;
        match (chunk.sent, &mut self.own_chunks) {
            (Some((Encoding::Raw, stored)), _) if stored != chunk.length => {
                return Err(wrong("a chunk that is not raw"));
            }
            (Some((Encoding::Zstd, stored)), _) if stored == 0 || stored >= chunk.length => {
                return Err(wrong("a chunk that is not compressed"));
            }
            (Some((_, stored)), chunks) => {
                current.stored = stored;
                // There are no more than fit into the bytes that may arrive.
                if let Some(chunks) = chunks.as_mut().filter(|_| current.size > limits::STORE_UNCHUNKED_BYTES as u64) {
                    chunks.insert(chunk.digest);
                }
            }
            (None, Some(chunks)) if chunks.contains(&chunk.digest) => {}
            (None, None) if self.own.is_none() => {}
            (None, _) => return Err(wrong("a chunk that was not sent")),
        }
        self.end_object();
        self.give(Item::Chunk(chunk)).await
    }

    /// The next bytes of the current chunk.
    pub(super) async fn piece(&mut self, piece: Vec<u8>) -> Result<()> {
        let Some(current) = self.current.as_mut().filter(|current| current.stored > 0) else {
            return Err(wrong("a piece of no chunk"));
        };
        let left = current.stored.checked_sub(piece.len() as u32).filter(|_| !piece.is_empty());
        current.stored = left.ok_or_else(|| wrong("a chunk longer than it says"))?;
        self.stored = self.stored.saturating_add(piece.len() as u64);
        self.end_object();
        self.give(Item::Piece(piece)).await
    }

    /// The objects that were sent and verified: their sender has them, whatever becomes of the rest.
    pub(super) fn whole(&self) -> Vec<Digest> {
        std::mem::take(&mut *self.whole.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the current object if it is complete.
    fn end_object(&mut self) {
        self.current.take_if(|current| current.left == 0 && current.stored == 0);
    }

    async fn give(&mut self, item: Item) -> Result<()> {
        let store = self.store.clone();
        let sink = self.sink.get_or_insert_with(|| {
            let (to, items) = mpsc::channel(QUEUED);
            let whole = Arc::clone(&self.whole);
            let storing = async move { store.run_beside(move |store| put_all(store, items, &whole)).await };
            let stored = tokio::task::spawn_local(storing);
            Sink { to, stored }
        });
        if sink.to.send(item).await.is_err() {
            return Err(self.end_round().await.err().unwrap_or_else(|| wrong("objects after their end")));
        }
        Ok(())
    }

    /// The end of a round: everything sent is verified and durable.
    pub(super) async fn flush(&mut self, objects: u64) -> Result<()> {
        if self.current.is_some() || objects != std::mem::take(&mut self.round) {
            return Err(wrong("a round that is incomplete"));
        }
        self.end_round().await
    }

    async fn end_round(&mut self) -> Result<()> {
        let Some(Sink { to, stored }) = self.sink.take() else { return Ok(()) };
        drop(to);
        let stored = stored.await.map_err(|error| Error::internal(error.to_string()))?;
        stored?
    }
}

/// The chunks of these objects. Those of an unreadable one are sent again.
fn chunks_of(store: &Store, objects: &HashSet<Digest>) -> HashSet<Digest> {
    let lists = objects.iter().filter_map(|object| store.chunks(*object).ok());
    lists.flat_map(|list| list.chunks).map(|(chunk, _)| chunk).take(limits::HANDOVER_OBJECTS).collect()
}

#[cfg(test)]
#[path = "transfer_tests.rs"]
mod tests;
