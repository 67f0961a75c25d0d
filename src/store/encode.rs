//! Compression of what goes into an entry.

use std::cell::RefCell;
use std::io;

use super::format::{Encoding, Entry, Kind};
use crate::core::ids::Digest;

/// Of zstd: the least with which a first checkpoint of mixed files is smaller than that of restic, and faster still (ADR 0014).
const LEVEL: i32 = 3;

/// What is shorter is not worth a try, bytes.
const LEAST: usize = 64;

thread_local! {
    // A context takes longer to make than a small chunk to compress.
    static COMPRESSOR: RefCell<Option<zstd::bulk::Compressor<'static>>> = const { RefCell::new(None) };
}

/// Compresses if that saves a sixteenth or more; `None`: store it as it is.
fn compressed(plain: &[u8]) -> Option<Vec<u8>> {
    if plain.len() < LEAST {
        return None;
    }
    let compress = |compressor: &mut Option<zstd::bulk::Compressor<'static>>| -> io::Result<Vec<u8>> {
        let compressor = match compressor {
            Some(compressor) => compressor,
            none => none.insert(zstd::bulk::Compressor::new(LEVEL)?),
        };
        // Without room for more, zstd gives up as soon as it does not help.
        let mut room = Vec::with_capacity(plain.len() - plain.len() / 16);
        compressor.compress_to_buffer(plain, &mut room)?;
        Ok(room)
    };
    // Whatever keeps it from being smaller: as it is, it is always right.
    COMPRESSOR.with_borrow_mut(compress).ok()
}

/// Makes an entry and the bytes that it stores.
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
    fn what_does_not_become_smaller_stays_as_it_is() {
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
