//! Stores one file: small ones inline, others as pieces, without holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek64};

use super::error::WorkspaceError;
use super::index::Stamp;
use super::objects::ObjectBatch;
use super::tree::entry::Content;
use super::tree::format::{Map, Piece, encode_map};
use crate::core::limits;
use crate::store::StoreError;
use crate::sys::fault;

const PIECE: u64 = limits::TREE_PIECE_BYTES as u64;

/// Result of storing a file.
pub(super) enum Read {
    /// Its content, and the number of bytes read.
    Content(Content, u64),
    Changed,
}

/// Why a file could not be read; the caller knows its path.
pub(super) enum ReadError {
    File(io::Error),
    Store(StoreError),
}

impl ReadError {
    pub(super) fn at(self, path: impl FnOnce() -> PathBuf) -> WorkspaceError {
        match self {
            ReadError::File(error) => WorkspaceError::io("read", &path(), error),
            ReadError::Store(error) => error.into(),
        }
    }
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        ReadError::File(error)
    }
}

impl From<StoreError> for ReadError {
    fn from(error: StoreError) -> Self {
        ReadError::Store(error)
    }
}

/// Result of reading a file into memory.
pub(super) enum Bytes {
    All(Vec<u8>),
    /// Its length changed.
    Changed,
    /// It has holes: it must be read in pieces.
    Holes,
}

/// Reads a file of this length into memory, unless it has holes.
pub(super) fn bytes(file: &File, size: u64) -> Result<Bytes, ReadError> {
    fault::point("workspace.file.keep")?;
    if hole(file, 0)?.is_some_and(|at| at < size) {
        return Ok(Bytes::Holes);
    }
    let mut buffer = vec![0; usize::try_from(size).map_err(io::Error::other)?];
    Ok(if fill(file, 0, &mut buffer)? { Bytes::All(buffer) } else { Bytes::Changed })
}

/// Stores the bytes of a file without holes, as [`content`] would.
pub(super) fn content_of(bytes: &[u8], batch: &mut dyn ObjectBatch) -> Result<Read, ReadError> {
    let size = bytes.len() as u64;
    if bytes.len() <= limits::TREE_INLINE_BYTES {
        return Ok(Read::Content(Content::Inline(bytes.into()), size));
    }
    if size <= PIECE {
        return Ok(Read::Content(Content::Whole(batch.put(bytes)?), size));
    }
    let mut pieces = Vec::new();
    for (n, piece) in bytes.chunks(limits::TREE_PIECE_BYTES).enumerate() {
        pieces.push(Piece { offset: n as u64 * PIECE, length: piece.len() as u64, digest: batch.put(piece)? });
    }
    let map = batch.put(&encode_map(&Map { size, pieces }))?;
    Ok(Read::Content(Content::Map(map), size))
}

/// Reads and stores a file that had this stamp.
pub(super) fn content(file: &File, stamp: Stamp, batch: &mut dyn ObjectBatch) -> Result<Read, ReadError> {
    fault::point("workspace.file.read")?;
    let size = stamp.size;
    let mut buffer = vec![0; usize::try_from(size.min(PIECE)).unwrap_or_default()];
    let is_small = size <= limits::TREE_INLINE_BYTES as u64;
    if is_small || (size <= PIECE && hole(file, 0)?.is_none_or(|at| at >= size)) {
        if !fill(file, 0, &mut buffer)? {
            return Ok(Read::Changed);
        }
        let content = if is_small { Content::Inline(buffer.into()) } else { Content::Whole(batch.put(&buffer)?) };
        return Ok(Read::Content(content, size));
    }
    let has_holes = hole(file, 0)?.is_some_and(|at| at < size);
    let mut pieces = Vec::new();
    let (mut at, mut bytes) = (0, 0);
    while let Some(start) = data(file, at)?.filter(|start| *start < size) {
        let data_end = hole(file, start)?.unwrap_or(size).min(size);
        let (start, end) = if has_holes { written(file, start, data_end)? } else { (start, data_end) };
        at = start;
        while at < end {
            // Pieces end at multiples of their size, wherever data begins: a change moves no other piece.
            let length = (PIECE - at % PIECE).min(end - at);
            let piece = &mut buffer[..usize::try_from(length).unwrap_or_default()];
            if !fill(file, at, piece)? {
                return Ok(Read::Changed);
            }
            pieces.push(Piece { offset: at, length, digest: batch.put(piece)? });
            bytes += length;
            at += length;
        }
        at = data_end;
    }
    let map = batch.put(&encode_map(&Map { size, pieces }))?;
    Ok(Read::Content(Content::Map(map), bytes))
}

/// Trims blocks of zeros from the ends of a data range. XFS reports the surroundings of writes to a clone as data while
/// their pages are in memory: without trimming, equal files would give different trees.
fn written(file: &File, mut start: u64, mut end: u64) -> io::Result<(u64, u64)> {
    const BLOCK: u64 = 4096;
    let mut block = [0; BLOCK as usize];
    let mut is_zero = |from: u64, to: u64| {
        let block = &mut block[..usize::try_from(to - from).unwrap_or_default()];
        Ok::<bool, io::Error>(fill(file, from, block)? && block.iter().all(|byte| *byte == 0))
    };
    while start < end {
        let next = (start / BLOCK + 1) * BLOCK;
        if !is_zero(start, next.min(end))? {
            break;
        }
        start = next.min(end);
    }
    while start < end {
        let before = (end - 1) / BLOCK * BLOCK;
        if !is_zero(before.max(start), end)? {
            break;
        }
        end = before.max(start);
    }
    Ok((start, end))
}

/// Fills the buffer; false if the file ends before.
fn fill(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact_at(buffer, offset) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Start of the next data, if any.
pub(super) fn data(file: &File, from: u64) -> io::Result<Option<u64>> {
    seek(file, from, Whence::SeekData)
}

/// Start of the next hole; the end of the file is one.
pub(super) fn hole(file: &File, from: u64) -> io::Result<Option<u64>> {
    seek(file, from, Whence::SeekHole)
}

fn seek(file: &File, from: u64, whence: Whence) -> io::Result<Option<u64>> {
    let from = i64::try_from(from).map_err(io::Error::other)?;
    match lseek64(file, from, whence) {
        Ok(at) => Ok(u64::try_from(at).ok()),
        Err(Errno::ENXIO) => Ok(None),
        // A file system without support for holes: all is data.
        Err(Errno::EINVAL) => Ok(matches!(whence, Whence::SeekData).then_some(from.cast_unsigned())),
        Err(error) => Err(error.into()),
    }
}
