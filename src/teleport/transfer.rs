//! Transfer of objects: the sender names addresses, the receiver answers which it lacks, only those travel.

use std::collections::HashSet;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::wire::{Frame, Message, Wire, bounded, unexpected};
use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::store::{Store, StoreError, StoreHandle, Writer};

/// Frames queued between disk and connection.
const QUEUED: usize = 8;
/// Objects up to this size are stored in batches, bytes.
const SMALL: u64 = 1 << 20;

/// Totals of a transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// Objects that the kernel consists of.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Objects that the receiver lacked.
    pub sent_objects: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Bytes of objects that the receiver had.
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
    for asked in digests.chunks(limits::HANDOVER_DIGESTS) {
        wire.write_frame(&Frame::Question(asked.to_vec())).await?;
        wire.flush().await?;
        let bits = match wire.frame(limits::HANDOVER_STEP).await? {
            Some(Frame::Answer(bits)) if bits.len() == asked.len().div_ceil(8) => bits,
            Some(Frame::Message(Message::Refused { error })) => return Err(bounded(error)),
            Some(_) => return Err(Error::corrupt("the other host sent a malformed answer").reason("protocol")),
            None => return Err(Error::unavailable("the other host closed the connection").reason("connection")),
        };
        let lacks = asked.iter().enumerate().filter(|(at, _)| bits[at / 8] >> (at % 8) & 1 == 1);
        let lacks: Vec<Digest> = lacks.map(|(_, digest)| *digest).collect();
        count += lacks.len() as u64;
        totals.objects += asked.len() as u64;
        totals.sent_objects += lacks.len() as u64;
        let (all, lacking) = (asked.to_vec(), lacks.clone());
        let sizes = store.run(move |store| {
            let size = |digests: &[Digest]| digests.iter().map(|digest| store.size(*digest)).sum::<Result<u64, _>>();
            Ok((size(&all)?, size(&lacking)?))
        });
        let (all, lacking) = sizes.await?;
        totals.bytes += all;
        totals.reused_bytes += all.saturating_sub(lacking);
        stream(wire, store, lacks, totals, &mut pace, progress).await?;
    }
    wire.send(Message::Flush { objects: count }).await?;
    match wire.answer().await? {
        Message::Flushed => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// Reads objects on a blocking thread and writes them to the wire.
async fn stream(
    wire: &mut Wire,
    store: &StoreHandle,
    digests: Vec<Digest>,
    totals: &mut Sent,
    pace: &mut Pace,
    progress: &dyn Fn(Sent),
) -> Result<()> {
    let (to, mut frames) = mpsc::channel(QUEUED);
    let reading = store.run_beside(move |store| {
        for digest in digests {
            let mut reader = store.open_object(digest)?;
            let size = reader.size();
            // The receiver of the frames is gone if the connection is lost.
            if to.blocking_send(Frame::Object { digest, size }).is_err() {
                return Ok(());
            }
            loop {
                let mut piece =
                    vec![0; limits::HANDOVER_PIECE_BYTES.min(usize::try_from(size).unwrap_or(usize::MAX).max(1))];
                let count = reader.read_some(&mut piece)?;
                if count == 0 {
                    break;
                }
                piece.truncate(count);
                if to.blocking_send(Frame::Piece(piece)).is_err() {
                    return Ok(());
                }
            }
        }
        Ok(())
    });
    let sending = async move {
        while let Some(frame) = frames.recv().await {
            let before = wire.sent;
            wire.write_frame(&frame).await?;
            totals.wire_bytes = wire.sent;
            if let Frame::Piece(piece) = frame {
                totals.sent_bytes += piece.len() as u64;
                progress(*totals);
            }
            pace.sent(wire.sent - before).await;
        }
        Ok::<(), Error>(())
    };
    let (read, sent) = futures::join!(reading, sending);
    read?;
    sent
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
    /// The addresses.
    pub held: HashSet<Digest>,
    /// Bytes that may arrive.
    pub most_bytes: u64,
}

/// The receiving side of one kernel's objects.
pub(super) struct Receiving {
    store: StoreHandle,
    reuse: Reuse,
    pub received: Received,
    asked: HashSet<Digest>,
    bytes: u64,
    round: u64,
    current: Option<u64>,
    sink: Option<Sink>,
}

struct Sink {
    to: mpsc::Sender<Item>,
    stored: JoinHandle<Result<Result<Vec<Digest>>, StoreError>>,
}

enum Item {
    Object(Digest, u64),
    Piece(Vec<u8>),
}

fn wrong(what: &str) -> Error {
    Error::corrupt(format!("the source host broke the protocol: {what}")).reason("protocol")
}

impl Receiving {
    pub(super) fn new(store: StoreHandle, reuse: Reuse, most_bytes: u64) -> Receiving {
        Receiving {
            store,
            reuse,
            received: Received { held: HashSet::new(), most_bytes },
            asked: HashSet::new(),
            bytes: 0,
            round: 0,
            current: None,
            sink: None,
        }
    }

    /// Answers which of the named objects are missing.
    pub(super) async fn question(&mut self, digests: Vec<Digest>) -> Result<Vec<u8>> {
        if self.current.is_some() {
            return Err(wrong("a question within an object"));
        }
        if self.received.held.len() + self.asked.len() + digests.len() > limits::HANDOVER_OBJECTS {
            return Err(Error::refused(format!("the kernel has more than {} objects", limits::HANDOVER_OBJECTS))
                .reason("handover_size"));
        }
        let may = |digest: &Digest| match &self.reuse {
            Reuse::All => true,
            Reuse::Only(own) => own.contains(digest),
        };
        let usable: Vec<Digest> = digests.iter().copied().filter(may).collect();
        let here =
            self.store.run(move |store| Ok(usable.into_iter().filter(|one| store.claim(*one)).collect::<Vec<_>>()));
        self.received.held.extend(here.await?);
        let mut bits = vec![0; digests.len().div_ceil(8)];
        for (at, digest) in digests.into_iter().enumerate() {
            if !self.received.held.contains(&digest) && self.asked.insert(digest) {
                bits[at / 8] |= 1 << (at % 8);
            }
        }
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
        self.bytes = self.bytes.saturating_add(size);
        self.round += 1;
        self.current = (size > 0).then_some(size);
        self.give(Item::Object(digest, size)).await
    }

    /// A piece of the current object.
    pub(super) async fn piece(&mut self, piece: Vec<u8>) -> Result<()> {
        let left = self.current.ok_or_else(|| wrong("a piece of no object"))?;
        let left = left.checked_sub(piece.len() as u64).ok_or_else(|| wrong("an object longer than it says"))?;
        self.current = (left > 0).then_some(left);
        self.give(Item::Piece(piece)).await
    }

    async fn give(&mut self, item: Item) -> Result<()> {
        let store = self.store.clone();
        let sink = self.sink.get_or_insert_with(|| {
            let (to, items) = mpsc::channel(QUEUED);
            let stored =
                tokio::task::spawn_local(async move { store.run_beside(move |store| put_all(store, items)).await });
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
        self.received.held.extend(stored??);
        Ok(())
    }
}

/// Verifies and stores objects.
fn put_all(store: &Store, mut items: mpsc::Receiver<Item>) -> Result<Result<Vec<Digest>>, StoreError> {
    let (mut batch, mut stored) = (store.batch(), Vec::new());
    let mut together = 0;
    let mut next = items.blocking_recv();
    while let Some(item) = next {
        let Item::Object(address, size) = item else { return Ok(Err(wrong("a piece of no object"))) };
        let mut left = size;
        let (mut small, mut large): (Vec<u8>, Option<Writer>) = (Vec::new(), None);
        if size > SMALL {
            large = Some(store.writer(size)?);
        }
        while left > 0 {
            let Some(Item::Piece(piece)) = items.blocking_recv() else {
                // The connection is lost: the next try finds what is whole.
                batch.commit()?;
                return Ok(Ok(Vec::new()));
            };
            left = left.saturating_sub(piece.len() as u64);
            match &mut large {
                Some(writer) => writer.write(&piece)?,
                None => small.extend_from_slice(&piece),
            }
        }
        let digest = match large {
            Some(writer) => writer.finish()?.0,
            None => {
                let digest = Digest::from_bytes(*blake3::hash(&small).as_bytes());
                if digest == address {
                    batch.put(&small)?;
                }
                together += size;
                digest
            }
        };
        if digest != address {
            return Ok(Err(wrong(&format!("object {address} is not what its address says"))));
        }
        stored.push(address);
        if together > limits::HANDOVER_SEAL_BYTES {
            together = 0;
            std::mem::replace(&mut batch, store.batch()).commit()?;
        }
        next = items.blocking_recv();
    }
    batch.commit()?;
    Ok(Ok(stored))
}
