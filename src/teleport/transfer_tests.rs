//! Transfers between two stores, and a sender that lies.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::*;

/// A store, with its directory.
struct Kit {
    handle: StoreHandle,
    store: Store,
    _dir: tempfile::TempDir,
}

impl Kit {
    fn new() -> Kit {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let store = Store::open(&dir.path().join("store")).expect("opened");
        Kit { handle: StoreHandle::new(store.clone()), store, _dir: dir }
    }

    fn put(&self, bytes: &[u8]) -> Digest {
        self.store.put(bytes).expect("stored")
    }

    fn receiving(&self) -> Receiving {
        Receiving::new(self.handle.clone(), Reuse::All, u64::MAX)
    }

    /// It has the objects and nothing damaged.
    fn has(&self, objects: &[(Digest, Vec<u8>)]) {
        for (digest, bytes) in objects {
            assert!(self.store.get(*digest, u64::MAX).expect("arrived") == *bytes, "{digest}");
        }
        let verified = self.store.verify(|_| ()).expect("readable");
        assert!(verified.damaged.is_empty(), "{:?}", verified.damaged);
    }
}

/// Incompressible bytes.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

fn digest_of(bytes: &[u8]) -> Digest {
    Digest::from_bytes(*blake3::hash(bytes).as_bytes())
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let local = tokio::task::LocalSet::new();
    let done = catch_unwind(AssertUnwindSafe(|| local.block_on(&runtime, work)));
    // A transfer that a test leaves incomplete has a thread that waits.
    runtime.shutdown_background();
    done.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Gives a frame to the receiving side; returns its answer.
async fn given(receiving: &mut Receiving, frame: Frame) -> Result<Option<Frame>> {
    match frame {
        Frame::Question(digests) => return receiving.question(digests).await.map(Frame::Answer).map(Some),
        Frame::ChunkQuestion(digests) => return receiving.chunk_question(digests).await.map(Frame::Answer).map(Some),
        Frame::Object { digest, size } => {
            receiving.check_object(digest, size)?;
            receiving.object(digest, size).await?;
        }
        Frame::Chunk(chunk) => receiving.chunk(chunk).await?,
        Frame::Piece(piece) => receiving.piece(piece).await?,
        Frame::Message(Message::Flush { objects }) => {
            receiving.flush(objects).await?;
            return Ok(Some(Frame::Message(Message::Flushed)));
        }
        Frame::Message(_) | Frame::Answer(_) => return Err(wrong("a frame of the other side")),
    }
    Ok(None)
}

/// Sends objects; returns the totals.
fn sent(from: &Kit, receiving: &mut Receiving, digests: &[Digest]) -> Sent {
    let (near, far) = tokio::io::duplex(1 << 16);
    let ((near_read, near_write), (far_read, far_write)) = (tokio::io::split(near), tokio::io::split(far));
    let (mut near, mut far) = (Wire::new(near_read, near_write), Wire::new(far_read, far_write));
    let mut totals = Sent::default();
    let sending = send(&mut near, &from.handle, digests, &mut totals, 0, &|_| ());
    let answering = async {
        loop {
            let frame = far.frame(limits::HANDOVER_STEP).await.expect("a frame").expect("not its end");
            if let Some(answer) = given(receiving, frame).await.expect("accepted") {
                far.write_frame(&answer).await.expect("sent");
                far.flush().await.expect("sent");
            }
        }
    };
    block_on(async {
        tokio::select! {
            done = sending => done.expect("sent"),
            () = answering => unreachable!("it answers until the other side ends"),
        }
    });
    totals
}

#[test]
fn stored_objects_arrive_whole() {
    let (from, to) = (Kit::new(), Kit::new());
    let contents = [vec![], vec![1], vec![7; 500_000], noise(1, 400_000), noise(2, 900_000), noise(3, 5_000_000)];
    let contents = contents.into_iter().chain([vec![9; 3_000_000], b"words and words ".repeat(200_000)]);
    let objects: Vec<(Digest, Vec<u8>)> = contents.map(|bytes| (from.put(&bytes), bytes)).collect();
    let digests: Vec<Digest> = objects.iter().map(|(digest, _)| *digest).collect();
    let all: u64 = objects.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let mut receiving = to.receiving();
    let totals = sent(&from, &mut receiving, &digests);
    assert_eq!((totals.objects, totals.sent_objects), (8, 8));
    assert_eq!((totals.bytes, totals.sent_bytes + totals.reused_bytes), (all, all));
    // Equal chunks of the zeros travel once, and what is compressed in the store is so on the wire.
    assert!(totals.wire_bytes < 7_000_000, "{totals:?}");
    assert_eq!(receiving.received().expect("between rounds").held.len(), 8);
    to.has(&objects);
    for digest in &digests {
        let list = from.store.chunks(*digest).expect("stored");
        assert_eq!(to.store.chunks(*digest).expect("arrived"), list);
        for (chunk, length) in list.chunks {
            let [here, there] = [&from, &to].map(|kit| kit.store.packed(*digest, chunk, length).expect("whole"));
            assert!(here == there, "it is stored as it was");
        }
    }
    let again = sent(&from, &mut to.receiving(), &digests);
    assert_eq!((again.sent_objects, again.sent_bytes, again.reused_bytes), (0, 0, all));
}

#[test]
fn only_missing_chunks_travel() {
    let (from, to) = (Kit::new(), Kit::new());
    let mut bytes = noise(1, 12_000_000);
    let first = from.put(&bytes);
    sent(&from, &mut to.receiving(), &[first]);
    bytes.splice(6_000_000..6_000_000, *b"a few bytes more");
    let second = from.put(&bytes);
    let totals = sent(&from, &mut to.receiving(), &[first, second]);
    assert_eq!(totals.sent_objects, 1);
    assert!(totals.sent_bytes <= 3 << 20 && totals.wire_bytes <= 3 << 20, "{totals:?}");
    assert_eq!(totals.sent_bytes + totals.reused_bytes, totals.bytes);
    to.has(&[(second, bytes)]);
}

/// More questions than one, and objects of which the next question asks while they travel.
#[test]
fn many_objects_arrive() {
    let (from, to) = (Kit::new(), Kit::new());
    let count = 2 * limits::HANDOVER_DIGESTS as u64 + 10;
    let batch = from.store.batch();
    let mut digests: Vec<Digest> = (0..count).map(|n| batch.put(&n.to_le_bytes()).expect("taken")).collect();
    batch.commit().expect("durable");
    digests.push(from.put(&noise(1, 2_000_000)));
    digests.insert(100, from.put(&noise(2, 2_000_000)));
    // Named twice, in different questions.
    digests.push(digests[0]);
    let mut receiving = to.receiving();
    let totals = sent(&from, &mut receiving, &digests);
    assert_eq!((totals.objects, totals.sent_objects), (count + 3, count + 2));
    assert!(digests.iter().all(|digest| to.store.contains(*digest)));
    to.has(&[]);
}

/// What only other users have is sent, although the store has it.
#[test]
fn chunks_of_other_users_are_sent() {
    let (from, to) = (Kit::new(), Kit::new());
    let mut bytes = noise(1, 3_000_000);
    let theirs = to.put(&bytes);
    bytes.extend(noise(2, 600_000));
    let wanted = from.put(&bytes);
    let only = |own: &[Digest]| Receiving::new(to.handle.clone(), Reuse::Only(own.iter().copied().collect()), u64::MAX);
    let totals = sent(&from, &mut only(&[]), &[wanted]);
    assert_eq!(totals.sent_bytes, bytes.len() as u64, "{totals:?}");
    to.has(&[(wanted, bytes.clone())]);
    bytes.extend(noise(3, 600_000));
    let longer = from.put(&bytes);
    let totals = sent(&from, &mut only(&[theirs]), &[longer]);
    assert!(totals.reused_bytes > 1_500_000 && totals.sent_bytes < 2_700_000, "{totals:?}");
    // A chunk that arrived in the same connection may be named.
    let (mut receiving, twice) = (only(&[]), from.put(&[&bytes[..], &bytes[..]].concat()));
    let totals = sent(&from, &mut receiving, &[longer, twice]);
    assert!(totals.reused_bytes >= 3_000_000, "{totals:?}");
    let chunk = to.store.chunks(theirs).expect("stored").chunks[0];
    let (digest, size) = (digest_of(b"wanted"), 3_000_000);
    let refused = block_on(async {
        let mut receiving = only(&[]);
        given(&mut receiving, Frame::Question(vec![digest])).await?;
        let answer = given(&mut receiving, Frame::ChunkQuestion(vec![chunk.0])).await?;
        assert!(matches!(answer, Some(Frame::Answer(bits)) if bits == [1]));
        given(&mut receiving, Frame::Object { digest, size }).await?;
        given(&mut receiving, Frame::Chunk(Chunk { digest: chunk.0, length: chunk.1, sent: None })).await
    });
    assert_eq!(refused.map(drop).map_err(|error| error.reason), Err("protocol".into()));
}

/// Asks for an object, then gives frames, and ends the round.
fn refusal(to: &Kit, asked: Digest, frames: Vec<Frame>) -> Error {
    let mut receiving = to.receiving();
    let done = block_on(async {
        given(&mut receiving, Frame::Question(vec![asked])).await?;
        for frame in frames {
            given(&mut receiving, frame).await?;
        }
        given(&mut receiving, Frame::Message(Message::Flush { objects: 1 })).await
    });
    done.map(drop).expect_err("refused")
}

#[test]
fn lies_about_chunks_are_refused() {
    let to = Kit::new();
    let (plain, large) = (b"words and words ".repeat(10_000), noise(1, 1_000_000));
    let (small, whole, absent) = (digest_of(&plain), digest_of(&large), digest_of(b"absent"));
    let object = |digest: Digest, size: usize| Frame::Object { digest, size: size as u64 };
    let chunk = |digest: Digest, length: usize, sent: Option<(Encoding, usize)>| {
        let sent = sent.map(|(encoding, stored)| (encoding, stored as u32));
        Frame::Chunk(Chunk { digest, length: length as u32, sent })
    };
    let piece = |bytes: &[u8]| Frame::Piece(bytes.to_vec());
    let pieces = |bytes: &[u8]| bytes.chunks(limits::HANDOVER_PIECE_BYTES).map(piece).collect::<Vec<_>>();
    let packed = zstd::bulk::compress(&plain, 1).expect("memory takes it");
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).expect("memory takes it");
    let (raw, zstd) = (Encoding::Raw, Encoding::Zstd);
    let halves = |first: usize| {
        let (front, back) = large.split_at(first);
        let mut frames = vec![object(whole, large.len())];
        for half in [front, back] {
            frames.push(chunk(digest_of(half), half.len(), Some((raw, half.len()))));
            frames.extend(pieces(half));
        }
        frames
    };
    let mut swapped = halves(400_000);
    swapped[0] = object(small, large.len());
    let length = plain.len();
    for (what, asked, frames) in [
        ("a chunk of no object", small, vec![chunk(small, length, Some((raw, length)))]),
        ("a piece of no chunk", small, vec![object(small, length), piece(&plain)]),
        ("an empty piece", small, vec![object(small, 1), chunk(small, 1, Some((raw, 1))), piece(&[])]),
        ("a chunk beyond the object", small, vec![object(small, 10), chunk(small, 11, Some((raw, 11)))]),
        ("an empty chunk", small, vec![object(small, 10), chunk(small, 0, Some((raw, 0)))]),
        ("raw bytes of another length", small, vec![object(small, length), chunk(small, length, Some((raw, 10)))]),
        (
            "packed bytes that are longer",
            small,
            vec![object(small, length), chunk(small, length, Some((zstd, length)))],
        ),
        ("no packed bytes", small, vec![object(small, length), chunk(small, length, Some((zstd, 0)))]),
        (
            "a chunk within another",
            small,
            vec![object(small, length), chunk(small, 9, Some((raw, 9))), chunk(small, 9, Some((raw, 9)))],
        ),
        ("a longer chunk", small, vec![object(small, 4), chunk(small, 4, Some((raw, 4))), piece(b"12345")]),
        ("a bomb", small, vec![object(small, length), chunk(small, length, Some((zstd, bomb.len()))), piece(&bomb)]),
        (
            "another length",
            small,
            vec![object(small, length + 1), chunk(small, length + 1, Some((zstd, packed.len()))), piece(&packed)],
        ),
        (
            "another address",
            whole,
            vec![object(whole, length), chunk(small, length, Some((zstd, packed.len()))), piece(&packed)],
        ),
        ("an absent chunk", absent, vec![object(absent, length), chunk(absent, length, None)]),
        ("a cut at a wrong place", whole, halves(100_000)),
        ("chunks of another object", small, swapped),
        ("an object without its end", whole, halves(400_000)[..2].iter().map(copy).collect()),
        ("a question within an object", whole, vec![object(whole, 4), Frame::Question(vec![small])]),
        ("one about chunks", whole, vec![object(whole, 4), Frame::ChunkQuestion(vec![small])]),
        ("an object within another", whole, vec![object(whole, 4), object(whole, 4)]),
    ] {
        let error = refusal(&to, asked, frames);
        assert_eq!(error.reason, "protocol", "{what}: {error}");
        assert!(!to.store.contains(whole), "{what}");
    }
    let mut receiving = to.receiving();
    block_on(async {
        given(&mut receiving, Frame::Question(vec![whole])).await.expect("asked");
        for frame in halves(400_000) {
            given(&mut receiving, frame).await.expect("honest");
        }
        assert!(receiving.received().is_err(), "it is not verified yet");
        given(&mut receiving, Frame::Message(Message::Flush { objects: 1 })).await.expect("verified");
    });
    assert!(receiving.received().expect("verified").held.contains(&whole));
    to.has(&[(whole, large)]);
}

/// Of a frame without large parts.
fn copy(frame: &Frame) -> Frame {
    match frame {
        Frame::Object { digest, size } => Frame::Object { digest: *digest, size: *size },
        Frame::Chunk(chunk) => Frame::Chunk(*chunk),
        other => panic!("{other:?}"),
    }
}

#[test]
fn addresses_in_memory_are_bounded() {
    let to = Kit::new();
    let question = |from: usize| {
        let digests = (from..from + limits::HANDOVER_DIGESTS).map(|n| digest_of(&n.to_le_bytes()));
        Frame::Question(digests.collect())
    };
    let refused = block_on(async {
        let mut receiving = to.receiving();
        for n in 0..2 {
            given(&mut receiving, question(n * limits::HANDOVER_DIGESTS)).await.expect("answered");
        }
        // Nothing of what is missing was sent.
        given(&mut receiving, question(2 * limits::HANDOVER_DIGESTS)).await
    });
    assert_eq!(refused.map(drop).map_err(|error| error.reason), Err("protocol".into()));
    let all = to.handle.reserve_addresses(limits::HANDOVER_OBJECTS_ALL).expect("no session is left");
    let mut receiving = to.receiving();
    let refused = block_on(given(&mut receiving, question(0)));
    assert_eq!(refused.map(drop).map_err(|error| error.reason), Err("handover_size".into()));
    drop((all, receiving));
    let mut receiving = to.receiving();
    block_on(given(&mut receiving, question(0))).expect("answered");
    // Verification shares what the session has.
    let held = Arc::clone(&receiving.received().expect("between rounds").held);
    assert_eq!(Arc::strong_count(&held), 2);
}
