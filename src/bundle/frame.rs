//! Framing of a file: pieces with their lengths, and a digest of everything at the end.

use std::io::{self, Read, Write};

use super::{BundleError, GROUP_VERSION, MAGIC, OLDEST};
use crate::core::ids::Digest;
use crate::core::limits;

/// Writes pieces.
pub(super) struct Pieces<W: Write> {
    to: W,
    hasher: blake3::Hasher,
    waiting: Vec<u8>,
    bytes: u64,
}

impl<W: Write> Pieces<W> {
    pub(super) fn begin(to: W, version: u32) -> io::Result<Pieces<W>> {
        let waiting = Vec::with_capacity(limits::BUNDLE_PIECE_BYTES);
        let mut pieces = Pieces { to, hasher: blake3::Hasher::new(), waiting, bytes: 0 };
        pieces.put(MAGIC)?;
        pieces.put(&version.to_le_bytes())?;
        Ok(pieces)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        self.to.write_all(bytes)
    }

    fn put_piece(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let piece = std::mem::take(&mut self.waiting);
        self.put(&(piece.len() as u32).to_le_bytes())?;
        self.put(&piece)?;
        self.waiting = piece;
        self.waiting.clear();
        Ok(())
    }

    /// Writes the end; returns the digest and the total number of bytes.
    pub(super) fn finish(mut self) -> io::Result<(Digest, u64)> {
        self.put_piece()?;
        self.put(&0u32.to_le_bytes())?;
        let digest = *self.hasher.finalize().as_bytes();
        self.to.write_all(&digest)?;
        self.to.flush()?;
        Ok((Digest::from_bytes(digest), self.bytes + digest.len() as u64))
    }
}

impl<W: Write> Write for Pieces<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(limits::BUNDLE_PIECE_BYTES - self.waiting.len());
        self.waiting.extend_from_slice(&bytes[..count]);
        if self.waiting.len() == limits::BUNDLE_PIECE_BYTES {
            self.put_piece()?;
        }
        Ok(count)
    }

    /// Writes full pieces, and the last one.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads pieces.
pub(super) struct Opened<R: Read> {
    from: R,
    hasher: blake3::Hasher,
    /// The format version.
    pub(super) version: u32,
    /// Rest of the current piece.
    left: usize,
    ended: bool,
}

impl<R: Read> Opened<R> {
    pub(super) fn begin(from: R) -> Result<Opened<R>, BundleError> {
        let mut opened = Opened { from, hasher: blake3::Hasher::new(), version: 0, left: 0, ended: false };
        let magic = opened.exact::<8>("its beginning")?;
        if &magic != MAGIC {
            return Err(BundleError::Foreign);
        }
        match u32::from_le_bytes(opened.exact("its beginning")?) {
            version if (OLDEST..=GROUP_VERSION).contains(&version) => Ok(Opened { version, ..opened }),
            other => Err(BundleError::Version(other)),
        }
    }

    fn exact<const N: usize>(&mut self, within: &'static str) -> Result<[u8; N], BundleError> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => BundleError::Truncated(within),
            _ => BundleError::Io(error),
        })?;
        self.hasher.update(&bytes);
        Ok(bytes)
    }

    /// The length of the next piece; 0: no more.
    fn next_piece(&mut self) -> Result<(), BundleError> {
        let length = u32::from_le_bytes(self.exact("a piece")?) as usize;
        if length > limits::BUNDLE_PIECE_BYTES {
            return Err(BundleError::Damaged(format!("a piece of {length} bytes")));
        }
        (self.left, self.ended) = (length, length == 0);
        Ok(())
    }

    /// Checks the end: nothing is left, the digest is right, and nothing follows.
    pub(super) fn finish(mut self) -> Result<Digest, BundleError> {
        if self.left == 0 && !self.ended {
            self.next_piece()?;
        }
        if !self.ended {
            return Err(BundleError::Damaged("something follows the last record".into()));
        }
        let due = *self.hasher.finalize().as_bytes();
        let found: [u8; 32] = self.exact("its digest")?;
        if due != found {
            return Err(BundleError::Damaged("its digest is not that of its content".into()));
        }
        match self.from.read(&mut [0])? {
            0 => Ok(Digest::from_bytes(due)),
            _ => Err(BundleError::Damaged("something follows the digest".into())),
        }
    }
}

impl<R: Read> Read for Opened<R> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        if room.is_empty() {
            return Ok(0);
        }
        if self.left == 0 && !self.ended {
            self.next_piece().map_err(io::Error::other)?;
        }
        if self.ended {
            return Ok(0);
        }
        let most = room.len().min(self.left);
        let count = self.from.read(&mut room[..most])?;
        if count == 0 {
            return Err(io::Error::other(BundleError::Truncated("a piece")));
        }
        self.hasher.update(&room[..count]);
        self.left -= count;
        Ok(count)
    }
}
