//! Objects on their way from one store to another, chunk by chunk as they are stored.
//!
//! Neither end cuts or compresses them again. What arrives is not trusted; what cannot be stored unchanged is encoded anew.

use super::encode::{decode, is_encoded};
use super::format::{Encoding, Entry, Kind, List, digest_of};
use super::pack::Pack;
use super::state::Want;
use super::writer::is_chunk;
use super::{Batch, Result, Store, limits};
use crate::core::ids::Digest;

/// A chunk as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Its encoding.
    pub encoding: Encoding,
    /// Its bytes, encoded.
    pub bytes: Vec<u8>,
}

impl Store {
    /// Reads a chunk of an object as it is stored, and verifies it.
    ///
    /// # Errors
    /// `Damaged`, `Incomplete`, `Io`.
    pub fn packed(&self, object: Digest, chunk: Digest, length: u32) -> Result<Packed> {
        self.read_chunk(object, (chunk, length), Pack::read_packed)
    }

    /// Whether the bytes of a chunk exist; if so, records a reuse, as [`Store::claim`] does.
    pub fn claim_chunk(&self, chunk: Digest) -> bool {
        self.keep(chunk, Want::Data).unwrap_or(false)
    }

    /// The bytes of a chunk, durable or not.
    fn written_chunk(&self, chunk: Digest) -> Result<Vec<u8>> {
        let slots = self.state().find(chunk, Want::Data)?;
        match self.read_best(&slots, Pack::read)? {
            Some(plain) => Ok(plain),
            // Collected just now: its entries were moved.
            None => self.read_entry(chunk, Want::Data, Pack::read),
        }
    }
}

/// An object of a batch that arrives in chunks. Dropping it leaves chunks for garbage collection, each with its own
/// address.
#[derive(Debug)]
pub struct Arriving<'a> {
    store: &'a Store,
    list: List,
    left: u64,
    hasher: blake3::Hasher,
}

impl Batch {
    /// Begins an object of `size` bytes whose chunks another store has cut and encoded.
    pub fn arriving(&self, size: u64) -> Arriving<'_> {
        let list = List { size, chunks: Vec::new() };
        Arriving { store: self.store(), list, left: size, hasher: blake3::Hasher::new() }
    }
}

impl Arriving<'_> {
    /// Bytes that the next chunks have.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Whether the next chunk may have this length.
    fn takes(&self, length: u32) -> bool {
        is_chunk(self.list.size, self.left, length)
    }

    /// Adds the next chunk; false if it is not what its address and its length say, or no chunk of such an object.
    ///
    /// # Errors
    /// `Full`, `Io`.
    pub fn put(&mut self, chunk: Digest, length: u32, packed: &Packed) -> Result<bool> {
        if !self.takes(length) {
            return Ok(false);
        }
        let Some(plain) = decode(packed.encoding, length, &packed.bytes) else { return Ok(false) };
        if digest_of(&plain) != chunk {
            return Ok(false);
        }
        let is_whole = self.list.size <= limits::STORE_UNCHUNKED_BYTES as u64;
        let kind = if is_whole { Kind::Whole } else { Kind::Part };
        let size = u64::from(length);
        if packed.encoding == Encoding::Zstd && !is_encoded(length, &packed.bytes) {
            self.store.add(kind, chunk, size, &plain)?;
        } else if !self.store.keep(chunk, Want::Data)? {
            let (encoding, stored) = (packed.encoding, packed.bytes.len() as u32);
            let entry = Entry { kind, encoding, stored, plain: length, size, digest: chunk };
            self.store.append(&entry, &packed.bytes)?;
        }
        self.count(chunk, &plain);
        Ok(true)
    }

    /// Adds the next chunk, which the store has; false if it does not, or if it is no chunk of such an object.
    ///
    /// # Errors
    /// `Damaged`, `Io`.
    pub fn reuse(&mut self, chunk: Digest, length: u32) -> Result<bool> {
        if !self.takes(length) || !self.store.keep(chunk, Want::Data)? {
            return Ok(false);
        }
        let plain = self.store.written_chunk(chunk)?;
        if plain.len() != length as usize {
            return Ok(false);
        }
        self.count(chunk, &plain);
        Ok(true)
    }

    fn count(&mut self, chunk: Digest, plain: &[u8]) {
        // The address of an only chunk is the object's.
        if self.list.size != plain.len() as u64 {
            self.hasher.update(plain);
        }
        self.left -= plain.len() as u64;
        self.list.chunks.push((chunk, plain.len() as u32));
    }

    /// Ends the object; false, without an object of this address, if it is not what the address says. It is readable
    /// only after the batch's next sync.
    ///
    /// # Errors
    /// `Full`, `Io`.
    pub fn finish(self, address: Digest) -> Result<bool> {
        let found = match *self.list.chunks {
            [] => digest_of(&[]),
            [(only, _)] => only,
            [_, _, ..] => Digest::from_bytes(*self.hasher.finalize().as_bytes()),
        };
        if self.left > 0 || found != address {
            return Ok(false);
        }
        let size = self.list.size;
        match size {
            0 => self.store.add(Kind::Whole, address, 0, &[])?,
            _ if size <= limits::STORE_UNCHUNKED_BYTES as u64 => self.store.name_whole(address, size)?,
            _ => self.store.add(Kind::List, address, size, &self.list.write())?,
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::store_tests::{noise, store};
    use super::*;

    /// Half of it compresses.
    fn mixed(seed: u64, length: usize) -> Vec<u8> {
        let mut bytes = noise(seed, length);
        for piece in bytes.chunks_mut(2000) {
            let half = piece.len() / 2;
            piece[..half].fill(7);
        }
        bytes
    }

    fn zstd(bytes: Vec<u8>) -> Packed {
        Packed { encoding: Encoding::Zstd, bytes }
    }

    fn compressed(plain: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(plain, 1).expect("memory takes it")
    }

    /// Sends an object as it is stored; returns whether it was accepted.
    fn copied(from: &Store, to: &Batch, object: Digest) -> bool {
        let list = from.chunks(object).expect("stored");
        let mut arriving = to.arriving(list.size);
        for (chunk, length) in list.chunks.into_iter().filter(|(_, length)| *length > 0) {
            let packed = from.packed(object, chunk, length).expect("whole");
            if !arriving.put(chunk, length, &packed).expect("room") {
                return false;
            }
        }
        arriving.finish(object).expect("room")
    }

    /// Everything in the store is readable, and verifies.
    fn is_whole(store: &Store) {
        let verified = store.verify(|_| ()).expect("readable");
        assert!(verified.damaged.is_empty(), "{:?}", verified.damaged);
        for object in store.objects() {
            let (digest, size) = object.expect("listed");
            assert_eq!(store.get(digest, u64::MAX).expect("readable").len() as u64, size);
        }
    }

    #[test]
    fn stored_chunks_are_copied() {
        let ((_dir, from), (_other, to)) = (store(), store());
        let mut contents = vec![Vec::new(), vec![1], vec![7; 5000], noise(1, 5000)];
        contents.extend([mixed(2, limits::STORE_UNCHUNKED_BYTES), mixed(3, limits::STORE_UNCHUNKED_BYTES + 1)]);
        contents.extend([noise(4, 3_000_000), mixed(5, 3_000_000), vec![9; 2_500_000]]);
        let mut digests: Vec<Digest> = contents.iter().map(|content| from.put(content).expect("stored")).collect();
        // A chunk that is an object, too.
        let (mut at, chunks) = (0, from.chunks(digests[6]).expect("stored").chunks);
        let part = chunks.iter().find_map(|(_, length)| {
            let range = at..at + *length as usize;
            at = range.end;
            (range.len() <= limits::STORE_UNCHUNKED_BYTES).then(|| contents[6][range].to_vec())
        });
        let part = part.expect("a small chunk");
        digests.push(from.put(&part).expect("stored"));
        contents.push(part);
        let batch = to.batch();
        for digest in &digests {
            assert!(copied(&from, &batch, *digest));
        }
        batch.commit().expect("durable");
        for (digest, content) in digests.iter().zip(&contents) {
            assert_eq!(to.get(*digest, u64::MAX).expect("arrived"), *content);
            assert_eq!(to.chunks(*digest).expect("arrived"), from.chunks(*digest).expect("stored"));
            for (chunk, length) in to.chunks(*digest).expect("arrived").chunks {
                let [here, there] = [&from, &to].map(|store| store.packed(*digest, chunk, length).expect("whole"));
                assert_eq!(here, there, "as it was stored");
            }
            // The store finds what it would have written itself.
            let before = to.objects().count();
            assert_eq!((to.put(content).expect("stored"), to.objects().count()), (*digest, before));
        }
        is_whole(&to);
    }

    #[test]
    fn foreign_encodings_are_replaced() {
        let plain = mixed(1, 300_000);
        let (digest, length) = (digest_of(&plain), plain.len() as u32);
        let (front, back) = plain.split_at(100_000);
        let skippable = [&0x184D_2A50_u32.to_le_bytes()[..], &4u32.to_le_bytes(), b"skip"].concat();
        let loose = noise(2, 100_000);
        let small = vec![7; 40];
        let own = zstd(compressed(&plain));
        assert!(is_encoded(length, &own.bytes), "it is stored as it is");
        for (what, plain, bytes) in [
            ("two frames", &plain, [compressed(front), compressed(back)].concat()),
            ("a frame that is skipped at the end", &plain, [&own.bytes[..], &skippable].concat()),
            ("one at the begin", &plain, [&skippable[..], &own.bytes].concat()),
            ("an empty frame at the end", &plain, [&own.bytes[..], &compressed(&[])].concat()),
            ("a frame that saves nothing", &loose, compressed(&loose)),
            ("a short one", &small, compressed(&small)),
        ] {
            let (_dir, store) = store();
            let (digest, length) = (digest_of(plain), plain.len() as u32);
            let batch = store.batch();
            let mut arriving = batch.arriving(u64::from(length));
            assert!(arriving.put(digest, length, &zstd(bytes.clone())).expect("room"), "{what}");
            assert!(arriving.finish(digest).expect("room"), "{what}");
            batch.commit().expect("durable");
            assert_eq!(store.get(digest, u64::MAX).expect("readable"), *plain, "{what}");
            let packed = store.packed(digest, digest, length).expect("whole");
            let is_own = packed.encoding == Encoding::Raw || is_encoded(length, &packed.bytes);
            assert!(is_own && packed.bytes != bytes, "{what}");
            is_whole(&store);
        }
        let (_dir, store) = store();
        let batch = store.batch();
        let mut arriving = batch.arriving(u64::from(length));
        assert!(arriving.put(digest, length, &own).expect("room") && arriving.finish(digest).expect("room"));
        batch.commit().expect("durable");
        assert_eq!(store.packed(digest, digest, length).expect("whole"), own);
    }

    #[test]
    fn false_chunks_are_refused() {
        let (_dir, store) = store();
        let batch = store.batch();
        let plain = mixed(1, 300_000);
        let (digest, length) = (digest_of(&plain), plain.len() as u32);
        let raw = |bytes: &[u8]| Packed { encoding: Encoding::Raw, bytes: bytes.to_vec() };
        let mut damaged = compressed(&plain);
        damaged[1000] ^= 1;
        let cut = compressed(&plain)[..1000].to_vec();
        let other = mixed(2, 300_000);
        for (what, packed) in [
            ("other bytes", raw(&other)),
            ("other packed bytes", zstd(compressed(&other))),
            ("fewer bytes", raw(&plain[1..])),
            ("more bytes", raw(&[&plain[..], &[0]].concat())),
            ("more packed bytes", zstd(compressed(&[&plain[..], &[0]].concat()))),
            ("no bytes", raw(&[])),
            ("no frame", zstd(plain.clone())),
            ("an empty frame", zstd(Vec::new())),
            ("a damaged frame", zstd(damaged)),
            ("a cut one", zstd(cut)),
            ("a bomb", zstd(compressed(&vec![0; 64 << 20]))),
            ("a frame and garbage", zstd([&compressed(&plain)[..], b"garbage"].concat())),
        ] {
            assert!(!batch.arriving(300_000).put(digest, length, &packed).expect("no failure"), "{what}");
        }
        // An object that is not what its address says: its chunks are.
        let large = mixed(3, 700_000);
        let mut arriving = batch.arriving(700_000);
        for piece in large.chunks(350_000) {
            assert!(arriving.put(digest_of(piece), 350_000, &raw(piece)).expect("room"));
        }
        assert!(!arriving.finish(digest).expect("no failure"));
        let mut short = batch.arriving(700_000);
        assert!(short.put(digest_of(&large[..350_000]), 350_000, &raw(&large[..350_000])).expect("room"));
        assert!(!short.finish(digest_of(&large)).expect("no failure"), "it lacks its second half");
        // An absent chunk, and one of another length.
        assert!(!batch.arriving(300_000).reuse(digest, length).expect("no failure"));
        assert!(!batch.arriving(700_000).reuse(digest_of(&large[..350_000]), 350_001).expect("no failure"));
        batch.commit().expect("durable");
        assert_eq!(store.objects().count(), 0);
        is_whole(&store);
    }

    #[test]
    fn foreign_cuts_are_bounded() {
        let (least, most) = (limits::STORE_CHUNK_MIN_BYTES as u32, limits::STORE_CHUNK_MAX_BYTES as u32);
        let unchunked = limits::STORE_UNCHUNKED_BYTES as u32;
        let takes = |size: u32, left: u32, length: u32| is_chunk(size.into(), left.into(), length);
        assert!(takes(7, 7, 7) && takes(unchunked, unchunked, unchunked), "one chunk");
        assert!(!takes(7, 7, 6) && !takes(unchunked, unchunked, least));
        let size = 3 << 20;
        assert!(takes(size, size, least) && takes(size, size, most) && takes(size, 1, 1));
        assert!(!takes(size, size, least - 1) && !takes(size, size, most + 1) && !takes(size, 5, 6));
        // Legal, and not where the store cuts itself.
        let (_dir, store) = store();
        let plain = noise(1, 1 << 20);
        let digest = digest_of(&plain);
        let batch = store.batch();
        let mut arriving = batch.arriving(plain.len() as u64);
        for piece in plain.chunks(least as usize) {
            let packed = Packed { encoding: Encoding::Raw, bytes: piece.to_vec() };
            assert!(arriving.put(digest_of(piece), piece.len() as u32, &packed).expect("room"));
        }
        assert!(arriving.finish(digest).expect("room"));
        batch.commit().expect("durable");
        assert_eq!(store.put(&plain).expect("stored"), digest);
        assert_eq!(store.get(digest, u64::MAX).expect("readable"), plain);
        assert_eq!(store.get_range(digest, 200_000, 300_000).expect("readable"), plain[200_000..500_000]);
        is_whole(&store);
    }

    /// A chunk of the same batch is not durable yet.
    #[test]
    fn present_chunks_are_verified() {
        let (_dir, store) = store();
        let first = noise(1, 400_000);
        let whole = [&first[..], &first[..]].concat();
        let batch = store.batch();
        let mut arriving = batch.arriving(800_000);
        let packed = Packed { encoding: Encoding::Raw, bytes: first.clone() };
        assert!(arriving.put(digest_of(&first), 400_000, &packed).expect("room"));
        assert!(arriving.reuse(digest_of(&first), 400_000).expect("readable"));
        assert!(arriving.finish(digest_of(&whole)).expect("room"));
        batch.commit().expect("durable");
        assert_eq!(store.get(digest_of(&whole), u64::MAX).expect("readable"), whole);
        super::super::store_tests::flip(&store, digest_of(&first), Want::Data, 100);
        let batch = store.batch();
        assert!(batch.arriving(800_000).reuse(digest_of(&first), 400_000).is_err(), "it is damaged");
        assert!(!store.claim_chunk(digest_of(&first)), "so it is asked for the next time");
    }
}
