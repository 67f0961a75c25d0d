//! Compression of entries.

use std::cell::RefCell;
use std::io;

use super::format::{Encoding, Entry, Kind};
use crate::core::ids::Digest;

/// zstd level: the lowest at which a first checkpoint of mixed files is smaller than restic's, and still faster (ADR
/// 0014).
const LEVEL: i32 = 3;

/// Shorter data is not compressed, bytes.
const LEAST: usize = 64;

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
        let mut room = Vec::with_capacity(plain.len() - plain.len() / 16);
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
                assert_eq!(zstd::bulk::decompress(&packed, plain.len()).expect("whole"), plain);
            }
        }
    }
}
