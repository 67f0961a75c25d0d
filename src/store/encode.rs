//! Compression of entries.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io;

use super::format::{Encoding, Entry, Kind};
use crate::core::ids::Digest;

/// zstd level: the lowest at which a first checkpoint of mixed files is smaller than restic's, and still faster (ADR
/// 0014).
const LEVEL: i32 = 3;

/// Shorter data is not compressed, bytes.
const LEAST: usize = 64;
/// First bytes of a zstd frame; a skippable one has others.
const FRAME: [u8; 4] = 0xFD2F_B528_u32.to_le_bytes();

/// Most bytes to which so many are compressed: that saves at least a sixteenth.
fn most_packed(plain: usize) -> usize {
    plain - plain / 16
}

thread_local! {
    // Creating a context takes longer than compressing a small chunk.
    static COMPRESSOR: RefCell<Option<zstd::bulk::Compressor<'static>>> = const { RefCell::new(None) };
}

/// Compresses if that saves at least a sixteenth; `None`: store the bytes as they are.
fn compressed(plain: &[u8]) -> Option<Vec<u8>> {
    if plain.len() < LEAST {
        return None;
    }
    let compress = |compressor: &mut Option<zstd::bulk::Compressor<'static>>| -> io::Result<Vec<u8>> {
        let compressor = match compressor {
            Some(compressor) => compressor,
            none => none.insert(zstd::bulk::Compressor::new(LEVEL)?),
        };
        // Without room for more, zstd stops as soon as compression does not help.
        let mut room = Vec::with_capacity(most_packed(plain.len()));
        compressor.compress_to_buffer(plain, &mut room)?;
        Ok(room)
    };
    // Any failure: storing the bytes as they are is always correct.
    COMPRESSOR.with_borrow_mut(compress).ok()
}

/// Builds an entry and its stored bytes.
pub(super) fn encode(kind: Kind, digest: Digest, size: u64, plain: &[u8]) -> (Entry, Option<Vec<u8>>) {
    let packed = compressed(plain);
    let encoding = if packed.is_some() { Encoding::Zstd } else { Encoding::Raw };
    let stored = packed.as_ref().map_or(plain.len(), Vec::len) as u32;
    (Entry { kind, encoding, stored, plain: plain.len() as u32, size, digest }, packed)
}

/// Decodes the bytes of an entry; `None` unless that gives `plain` bytes. Allocates no more.
pub(super) fn decode(encoding: Encoding, plain: u32, stored: &[u8]) -> Option<Cow<'_, [u8]>> {
    let decoded = match encoding {
        Encoding::Raw => Cow::Borrowed(stored),
        Encoding::Zstd => Cow::Owned(zstd::bulk::decompress(stored, plain as usize).ok()?),
    };
    (decoded.len() == plain as usize).then_some(decoded)
}

/// Whether bytes that decode to `plain` ones are what [`encode`] could have made: one frame, small enough, and nothing
/// else. A decoder also reads several frames, and skips those of other kinds.
pub(super) fn is_encoded(plain: u32, packed: &[u8]) -> bool {
    let plain = plain as usize;
    plain >= LEAST
        && packed.len() <= most_packed(plain)
        && packed.starts_with(&FRAME)
        && zstd::zstd_safe::find_frame_compressed_size(packed) == Ok(packed.len())
}

#[cfg(test)]
mod tests {
    use super::super::format::digest_of;
    use super::*;

    #[test]
    fn incompressible_data_stays_raw() {
        let mut noise = vec![0; 100_000];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        for (plain, encoding) in [
            (noise, Encoding::Raw),
            (vec![7; 100_000], Encoding::Zstd),
            (vec![7; LEAST - 1], Encoding::Raw),
            (vec![], Encoding::Raw),
        ] {
            let (entry, packed) = encode(Kind::Whole, digest_of(&plain), plain.len() as u64, &plain);
            assert_eq!((entry.encoding, packed.is_some()), (encoding, encoding == Encoding::Zstd));
            assert_eq!(entry.stored as usize, packed.as_ref().map_or(plain.len(), Vec::len));
            if let Some(packed) = packed {
                assert_eq!(decode(Encoding::Zstd, plain.len() as u32, &packed).as_deref(), Some(&plain[..]));
                assert!(is_encoded(plain.len() as u32, &packed));
            }
        }
    }
}
