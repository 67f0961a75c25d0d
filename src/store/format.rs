//! Byte layout of packs, lists, the index and the list of dropped entries: `docs/snapshot-format.md`. Pure.
//!
//! All numbers are little-endian. A *check* is the first eight bytes of a BLAKE3 hash, against accidental damage.
//! Object content is also verified against its whole digest.

use std::ops::Range;

use crate::core::ids::Digest;
use crate::core::limits;

/// Version of packs, of the index and of the list of dropped entries.
pub(super) const VERSION: u32 = 1;

pub(super) const PACK_MAGIC: &[u8; 8] = b"RYOKANPK";
const TRAILER_MAGIC: &[u8; 8] = b"RYOKANPE";
const INDEX_MAGIC: &[u8; 8] = b"RYOKANIX";
const DROPPED_MAGIC: &[u8; 8] = b"RYOKANDR";
/// First bytes of every entry.
pub(super) const ENTRY_MAGIC: &[u8; 4] = b"RYEN";

pub(super) const PACK_HEADER: usize = 64;
pub(super) const ENTRY_HEADER: usize = 64;
pub(super) const SLOT: usize = 56;
pub(super) const TRAILER: usize = 24;
pub(super) const INDEX_HEADER: usize = 32;
const LIST_HEADER: usize = 16;
const LIST_ITEM: usize = 36;

/// A pack's random key: no outsider can produce bytes that pass for an entry of it.
pub(super) type Key = [u8; 32];

pub(super) fn check(bytes: &[u8]) -> [u8; 8] {
    first(*blake3::hash(bytes).as_bytes())
}

fn first(hash: [u8; 32]) -> [u8; 8] {
    let mut check = [0; 8];
    check.copy_from_slice(&hash[..8]);
    check
}

pub(super) fn digest_of(bytes: &[u8]) -> Digest {
    Digest::from_bytes(*blake3::hash(bytes).as_bytes())
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// Kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    /// The bytes of a whole object.
    Whole,
    /// A chunk of an object.
    Part,
    /// The list of an object's chunks.
    List,
}

impl Kind {
    fn of(byte: u8) -> Option<Kind> {
        match byte {
            1 => Some(Kind::Whole),
            2 => Some(Kind::Part),
            3 => Some(Kind::List),
            _ => None,
        }
    }

    fn byte(self) -> u8 {
        match self {
            Kind::Whole => 1,
            Kind::Part => 2,
            Kind::List => 3,
        }
    }

    /// Whether the digest is that of the entry's bytes.
    pub(super) fn is_data(self) -> bool {
        match self {
            Kind::Whole | Kind::Part => true,
            Kind::List => false,
        }
    }

    /// Whether the digest is an object's address.
    pub(super) fn is_object(self) -> bool {
        match self {
            Kind::Whole | Kind::List => true,
            Kind::Part => false,
        }
    }
}

/// Encoding of an entry's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// None.
    Raw,
    /// One zstd frame.
    Zstd,
}

/// The header of a pack.
pub(super) fn pack_header(number: u32, key: &Key) -> [u8; PACK_HEADER] {
    let mut bytes = [0; PACK_HEADER];
    bytes[..8].copy_from_slice(PACK_MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&number.to_le_bytes());
    bytes[16..48].copy_from_slice(key);
    let check = check(&bytes[..56]);
    bytes[56..].copy_from_slice(&check);
    bytes
}

/// A pack's key and version; `None` if the header is damaged.
pub(super) fn read_pack_header(bytes: &[u8; PACK_HEADER]) -> Option<(Key, u32)> {
    let whole = &bytes[..8] == PACK_MAGIC && check(&bytes[..56]) == bytes[56..];
    whole.then(|| (array(bytes, 16), u32_at(bytes, 8)))
}

/// The header of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub kind: Kind,
    pub encoding: Encoding,
    /// Length as stored.
    pub stored: u32,
    /// Length after decoding.
    pub plain: u32,
    /// Length of the object or chunk.
    pub size: u64,
    pub digest: Digest,
}

impl Entry {
    /// The whole entry: header, then `stored`.
    pub(super) fn write(&self, key: &Key, stored: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ENTRY_HEADER + stored.len());
        bytes.extend_from_slice(ENTRY_MAGIC);
        bytes.push(self.kind.byte());
        bytes.push(match self.encoding {
            Encoding::Raw => 0,
            Encoding::Zstd => 1,
        });
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&self.stored.to_le_bytes());
        bytes.extend_from_slice(&self.plain.to_le_bytes());
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(self.digest.as_bytes());
        let check = Entry::check(key, &bytes, stored);
        bytes.extend_from_slice(&check);
        bytes.extend_from_slice(stored);
        bytes
    }

    fn check(key: &Key, header: &[u8], stored: &[u8]) -> [u8; 8] {
        let mut hasher = blake3::Hasher::new_keyed(key);
        hasher.update(&header[..56]).update(stored);
        first(*hasher.finalize().as_bytes())
    }

    /// Parses a header; `None` if it is malformed. Does not check the bytes that follow.
    pub(super) fn read(header: &[u8]) -> Option<Entry> {
        if header.len() < ENTRY_HEADER || &header[..4] != ENTRY_MAGIC {
            return None;
        }
        let encoding = match header[5] {
            0 => Encoding::Raw,
            1 => Encoding::Zstd,
            _ => return None,
        };
        let entry = Entry {
            kind: Kind::of(header[4])?,
            encoding,
            stored: u32_at(header, 8),
            plain: u32_at(header, 12),
            size: u64_at(header, 16),
            digest: Digest::from_bytes(array(header, 24)),
        };
        let raw_fits = encoding == Encoding::Zstd || entry.stored == entry.plain;
        let bounded = u64::from(entry.plain.max(entry.stored)) <= limits::STORE_ENTRY_BYTES;
        let sized = !entry.kind.is_data() || entry.size == u64::from(entry.plain);
        (raw_fits && bounded && sized).then_some(entry)
    }

    /// Whether header and bytes are unchanged.
    pub(super) fn is_whole(key: &Key, header: &[u8], stored: &[u8]) -> bool {
        Entry::check(key, header, stored) == header[56..ENTRY_HEADER]
    }

    /// The entry's slot.
    pub(super) fn slot(&self, pack: u32, offset: u32) -> Slot {
        Slot { digest: self.digest, kind: self.kind, pack, offset, stored: self.stored, size: self.size }
    }
}

/// The location of an entry. Ordered by digest, then by location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot {
    pub digest: Digest,
    pub pack: u32,
    /// Offset of its header in the pack.
    pub offset: u32,
    pub kind: Kind,
    pub stored: u32,
    pub size: u64,
}

impl Slot {
    /// End of the entry.
    pub(super) fn end(&self) -> u64 {
        u64::from(self.offset) + ENTRY_HEADER as u64 + u64::from(self.stored)
    }

    /// Its unique location.
    pub(super) fn place(&self) -> (u32, u32) {
        (self.pack, self.offset)
    }

    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.digest.as_bytes());
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(&self.offset.to_le_bytes());
        bytes.extend_from_slice(&self.stored.to_le_bytes());
        bytes.extend_from_slice(&self.pack.to_le_bytes());
        bytes.extend_from_slice(&[self.kind.byte(), 0, 0, 0]);
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Slot> {
        Some(Slot {
            digest: Digest::from_bytes(array(bytes, 0)),
            size: u64_at(bytes, 32),
            offset: u32_at(bytes, 40),
            stored: u32_at(bytes, 44),
            pack: u32_at(bytes, 48),
            kind: Kind::of(bytes[52])?,
        })
    }
}

/// The table of a full pack, with the trailer that ends the file.
pub(super) fn table(slots: &[Slot], at: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(slots.len() * SLOT + TRAILER);
    slots.iter().for_each(|slot| slot.write(&mut bytes));
    bytes.extend_from_slice(TRAILER_MAGIC);
    bytes.extend_from_slice(&(slots.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&at.to_le_bytes());
    let check = check(&bytes);
    bytes.extend_from_slice(&check);
    bytes
}

/// Position of the table according to a trailer, in a file of `length` bytes.
pub(super) fn table_place(trailer: &[u8; TRAILER], length: u64) -> Option<Range<u64>> {
    let (count, at) = (u64::from(u32_at(trailer, 8)), u64::from(u32_at(trailer, 12)));
    let fits = at >= PACK_HEADER as u64 && at + count * SLOT as u64 + TRAILER as u64 == length;
    (&trailer[..8] == TRAILER_MAGIC && fits).then_some(at..length)
}

/// Parses a table with its trailer.
pub(super) fn read_table(bytes: &[u8]) -> Option<Vec<Slot>> {
    let (covered, found) = bytes.split_at(bytes.len().checked_sub(8)?);
    if check(covered) != found {
        return None;
    }
    covered[..covered.len() + 8 - TRAILER].chunks_exact(SLOT).map(Slot::read).collect()
}

/// The chunks of an object, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct List {
    /// Length of the object.
    pub size: u64,
    /// Address and length of each.
    pub chunks: Vec<(Digest, u32)>,
}

impl List {
    pub(super) fn write(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LIST_HEADER + self.chunks.len() * LIST_ITEM);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(self.chunks.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.size.to_le_bytes());
        for (digest, length) in &self.chunks {
            bytes.extend_from_slice(digest.as_bytes());
            bytes.extend_from_slice(&length.to_le_bytes());
        }
        bytes
    }

    /// Parses a list; `None` if it is inconsistent.
    pub(super) fn read(bytes: &[u8]) -> Option<List> {
        let items = bytes.get(LIST_HEADER..)?;
        let count = u32_at(bytes, 4) as usize;
        if u32_at(bytes, 0) != VERSION || items.len() != count.checked_mul(LIST_ITEM)? {
            return None;
        }
        let chunks: Vec<_> =
            items.chunks_exact(LIST_ITEM).map(|item| (Digest::from_bytes(array(item, 0)), u32_at(item, 32))).collect();
        let list = List { size: u64_at(bytes, 8), chunks };
        (list.chunks.iter().map(|(_, length)| u64::from(*length)).sum::<u64>() == list.size).then_some(list)
    }
}

/// The header of an index file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IndexHeader {
    /// log2 of the number of buckets; a digest's first bits select its bucket.
    pub bits: u32,
    pub count: u64,
    /// Number of packs covered.
    pub packs: u32,
}

impl IndexHeader {
    pub(super) fn write(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(INDEX_HEADER);
        bytes.extend_from_slice(INDEX_MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.bits.to_le_bytes());
        bytes.extend_from_slice(&self.count.to_le_bytes());
        bytes.extend_from_slice(&self.packs.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes
    }

    pub(super) fn read(bytes: &[u8]) -> Option<IndexHeader> {
        let header = IndexHeader { bits: u32_at(bytes, 12), count: u64_at(bytes, 16), packs: u32_at(bytes, 24) };
        let known = &bytes[..8] == INDEX_MAGIC && u32_at(bytes, 8) == VERSION && header.bits <= 24;
        known.then_some(header)
    }

    /// Length of header, packs, starts, checks, and their own check.
    pub(super) fn head_bytes(&self) -> u64 {
        INDEX_HEADER as u64 + 4 * u64::from(self.packs) + 4 * ((1 << self.bits) + 1) + 4 * (1 << self.bits) + 8
    }
}

/// The file that lists dropped entries of packs that still exist.
pub(super) fn dropped(places: &[(u32, u32)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(24 + places.len() * 8);
    bytes.extend_from_slice(DROPPED_MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(places.len() as u32).to_le_bytes());
    for (pack, offset) in places {
        bytes.extend_from_slice(&pack.to_le_bytes());
        bytes.extend_from_slice(&offset.to_le_bytes());
    }
    let check = check(&bytes);
    bytes.extend_from_slice(&check);
    bytes
}

pub(super) fn read_dropped(bytes: &[u8]) -> Option<Vec<(u32, u32)>> {
    let (covered, found) = bytes.split_at(bytes.len().checked_sub(8)?);
    let known = covered.len() >= 16 && &covered[..8] == DROPPED_MAGIC && check(covered) == found;
    if !known || u32_at(covered, 8) != VERSION || covered.len() != 16 + 8 * u32_at(covered, 12) as usize {
        return None;
    }
    Some(covered[16..].chunks_exact(8).map(|place| (u32_at(place, 0), u32_at(place, 4))).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_slot() -> impl Strategy<Value = Slot> {
        (any::<[u8; 32]>(), any::<u32>(), any::<u32>(), 0usize..3, any::<u32>(), any::<u64>()).prop_map(
            |(digest, pack, offset, kind, stored, size)| Slot {
                digest: Digest::from_bytes(digest),
                pack,
                offset,
                kind: [Kind::Whole, Kind::Part, Kind::List][kind],
                stored,
                size,
            },
        )
    }

    proptest! {
        #[test]
        fn store_formats_round_trip(slots in prop::collection::vec(any_slot(), 0..20), key: [u8; 32], stored: Vec<u8>) {
            let bytes = table(&slots, 64);
            let length = 64 + bytes.len() as u64;
            let trailer = array(&bytes, bytes.len() - TRAILER);
            prop_assert_eq!(table_place(&trailer, length), Some(64..length));
            prop_assert_eq!(read_table(&bytes), Some(slots.clone()));
            let chunks: Vec<_> = slots.iter().map(|slot| (slot.digest, slot.stored)).collect();
            let list = List { size: chunks.iter().map(|(_, length)| u64::from(*length)).sum(), chunks };
            prop_assert_eq!(List::read(&list.write()), Some(list));
            let places: Vec<_> = slots.iter().map(Slot::place).collect();
            prop_assert_eq!(read_dropped(&dropped(&places)), Some(places));
            let length = stored.len() as u32;
            let digest = digest_of(&stored);
            let entry = Entry { kind: Kind::Part, encoding: Encoding::Raw, stored: length, plain: length, size: u64::from(length), digest };
            let written = entry.write(&key, &stored);
            prop_assert_eq!(Entry::read(&written), Some(entry));
            prop_assert!(Entry::is_whole(&key, &written, &stored));
        }

        #[test]
        fn foreign_store_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300), magic: bool) {
            let mut bytes = bytes;
            if magic {
                bytes.splice(0..0, ENTRY_MAGIC.iter().copied());
            }
            let _ = Entry::read(&bytes);
            let _ = List::read(&bytes);
            prop_assert_eq!(read_dropped(&bytes), None);
            prop_assert_eq!(read_table(&bytes), None);
        }

        #[test]
        fn flipped_entry_bit_is_detected(stored in prop::collection::vec(any::<u8>(), 1..200), at: usize, bit in 0u8..8) {
            let length = stored.len() as u32;
            let entry = Entry { kind: Kind::List, encoding: Encoding::Zstd, stored: length, plain: 7, size: 9, digest: digest_of(b"") };
            let key = [3; 32];
            let mut written = entry.write(&key, &stored);
            let at = at % written.len();
            written[at] ^= 1 << bit;
            prop_assert!(!Entry::is_whole(&key, &written, &written[ENTRY_HEADER..]));
            let mut header = pack_header(4, &key);
            header[at % PACK_HEADER] ^= 1 << bit;
            prop_assert_eq!(read_pack_header(&header), None);
        }
    }
}
