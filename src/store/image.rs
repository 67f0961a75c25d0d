//! Images of memory and disks: cut into pieces at fixed places, so that a later image shares all that did not change.
//!
//! ```text
//! file ─▶ data ranges ─▶ pieces of 8 pages ─▶ pages that are not zero ─▶ one object each ─▶ list of the pieces
//! ```
//!
//! | bytes | list |
//! |---|---|
//! | 8 | `RYOKANIM` |
//! | 4 | u32 version: 1 |
//! | 4 | u32 number of pieces |
//! | 8 | u64 length of the image |
//! | 37 each | u32 number of the piece, u8 its pages that are not zero (bit 0 is the first), address |
//!
//! The pieces are in order; one without pages is left out. An object has the pages of its piece one after the other. A
//! last page that the image cuts off is filled up with zeros.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use nix::unistd::{Whence, lseek};

use super::{Batch, Result, Store, StoreError};
use crate::core::error::{Error, ErrorCode};
use crate::core::ids::Digest;
use crate::core::limits;

const MAGIC: &[u8; 8] = b"RYOKANIM";
const VERSION: u32 = 1;
const HEAD: usize = 24;
const ENTRY: usize = 37;
const PAGE: usize = 4096;
const PIECE: usize = 8 * PAGE;

/// A list of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    bytes: u64,
    pieces: Vec<Piece>,
}

/// A piece with at least one page that is not zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its number.
    at: u32,
    /// Its pages that are not zero.
    pages: u8,
    /// Address of those pages.
    pub digest: Digest,
}

impl Piece {
    /// Length of the object.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages.count_ones()) * PAGE as u64
    }

    /// Where each of its pages belongs, and where it is in the object.
    fn places(&self) -> impl Iterator<Item = (u64, usize)> {
        let (first, pages) = (u64::from(self.at) * PIECE as u64, self.pages);
        let numbers = (0..8).filter(move |number| pages >> number & 1 == 1);
        numbers.enumerate().map(move |(nth, number)| (first + number * PAGE as u64, nth * PAGE))
    }
}

fn malformed(what: &str) -> Error {
    Error::corrupt(format!("a list of an image is malformed: {what}"))
}

/// Whether all bytes are zero.
fn is_zero(page: &[u8]) -> bool {
    let (words, rest) = page.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

impl Image {
    /// Stores a file's pages that are not zero, and the list of its pieces. Returns the list and its address.
    ///
    /// # Errors
    /// Those of reading, `Full`, `Io`; `TooLarge` for a file of more than 128 TiB.
    pub fn put(batch: &Batch, file: &File) -> Result<(Digest, Image)> {
        let bytes = file.metadata().map_err(io)?.len();
        if bytes.div_ceil(PIECE as u64) > u64::from(u32::MAX) {
            return Err(StoreError::TooLarge { limit: u64::from(u32::MAX) * PIECE as u64 });
        }
        let mut image = Image { bytes, pieces: Vec::new() };
        let mut next = 0;
        while let Some((begin, end)) = data_after(file, next, bytes)? {
            let (first, last) = (begin / PIECE as u64, end.div_ceil(PIECE as u64));
            for at in first..last {
                image.put_piece(batch, file, at as u32)?;
            }
            next = last * PIECE as u64;
        }
        let list = batch.put(&image.encode())?;
        Ok((list, image))
    }

    fn put_piece(&mut self, batch: &Batch, file: &File, at: u32) -> Result<()> {
        let from = u64::from(at) * PIECE as u64;
        let count = self.bytes.saturating_sub(from).min(PIECE as u64) as usize;
        let mut piece = [0; PIECE];
        file.read_exact_at(&mut piece[..count], from).map_err(io)?;
        let (mut pages, mut filled) = (0, 0);
        for number in 0..8 {
            let place = number * PAGE;
            if !is_zero(&piece[place..place + PAGE]) {
                pages |= 1 << number;
                piece.copy_within(place..place + PAGE, filled);
                filled += PAGE;
            }
        }
        if pages != 0 {
            let digest = batch.put(&piece[..filled])?;
            self.pieces.push(Piece { at, pages, digest });
        }
        Ok(())
    }

    fn encode(&self) -> Vec<u8> {
        let mut list = Vec::with_capacity(HEAD + ENTRY * self.pieces.len());
        list.extend(MAGIC);
        list.extend(VERSION.to_le_bytes());
        list.extend((self.pieces.len() as u32).to_le_bytes());
        list.extend(self.bytes.to_le_bytes());
        for piece in &self.pieces {
            list.extend(piece.at.to_le_bytes());
            list.push(piece.pages);
            list.extend(piece.digest.as_bytes());
        }
        list
    }

    /// Decodes a list.
    ///
    /// # Errors
    /// `corrupt`, `unsupported` for another version.
    pub fn decode(list: &[u8]) -> Result<Image, Error> {
        let (head, entries) = list.split_at_checked(HEAD).ok_or_else(|| malformed("it is too short"))?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if &head[..8] != MAGIC {
            return Err(malformed("it does not begin as one"));
        }
        if word(8) != VERSION {
            return Err(Error::unsupported(format!("a list of an image has version {}, not {VERSION}", word(8))));
        }
        let bytes = u64::from(word(16)) | u64::from(word(20)) << 32;
        let (entries, rest) = entries.as_chunks::<ENTRY>();
        if entries.len() != word(12) as usize || !rest.is_empty() {
            return Err(malformed("it has another length than it says"));
        }
        let pieces: Vec<Piece> = entries.iter().map(piece).collect();
        let most = bytes.div_ceil(PIECE as u64);
        if !pieces.is_sorted_by(|a, b| a.at < b.at) || pieces.last().is_some_and(|last| u64::from(last.at) >= most) {
            return Err(malformed("its pieces are not in order"));
        }
        if pieces.iter().any(|piece| piece.pages == 0 || piece.places().any(|(place, _)| place >= bytes)) {
            return Err(malformed("a piece without pages, or beyond the end"));
        }
        Ok(Image { bytes, pieces })
    }

    /// Reads a list.
    ///
    /// # Errors
    /// Those of [`Self::decode`]; `corrupt` if the list is missing or damaged.
    pub fn load(store: &Store, list: Digest) -> Result<Image, Error> {
        let read = store.get(list, limits::IMAGE_LIST_BYTES).map_err(|error| Error::corrupt(error.to_string()))?;
        Image::decode(&read)
    }

    /// Length of the image.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the pages that are not zero.
    pub fn stored_bytes(&self) -> u64 {
        self.pieces.iter().map(Piece::bytes).sum()
    }

    /// Addresses of the pieces.
    pub fn pieces(&self) -> impl Iterator<Item = Digest> + '_ {
        self.pieces.iter().map(|piece| piece.digest)
    }

    /// The pieces, in order.
    pub fn entries(&self) -> &[Piece] {
        &self.pieces
    }

    /// Reads every piece and passes its pages on with their places. Zero pages are left out.
    ///
    /// # Errors
    /// `corrupt` names the missing or damaged object; those of `page`.
    pub fn read(&self, store: &Store, page: impl Fn(u64, &[u8]) -> std::io::Result<()> + Sync) -> Result<(), Error> {
        let digests: Vec<Digest> = self.pieces().collect();
        let read = store.read_parallel(&digests, |n, reader| {
            let (piece, mut bytes) = (&self.pieces[n], [0; PIECE]);
            if reader.size() != piece.bytes() {
                return Err(StoreError::NotFound(piece.digest));
            }
            let mut filled = 0;
            loop {
                match reader.read_some(&mut bytes[filled..])? {
                    0 => break,
                    count => filled += count,
                }
            }
            for (place, from) in piece.places() {
                let count = self.bytes.saturating_sub(place).min(PAGE as u64) as usize;
                page(place, &bytes[from..from + count]).map_err(io)?;
            }
            Ok::<(), StoreError>(())
        });
        read.map_err(|error| match Error::from(error) {
            Error { code: ErrorCode::NotFound, message, .. } => {
                Error::corrupt(message).hint("ryokan verify names everything that is damaged")
            }
            error => error,
        })
    }

    /// Writes the image into an empty file, with holes for zero pages.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&self, store: &Store, file: &File) -> Result<(), Error> {
        file.set_len(self.bytes).map_err(|error| Error::from(io(error)))?;
        self.read(store, |place, page| file.write_all_at(page, place))
    }
}

fn piece(entry: &[u8; ENTRY]) -> Piece {
    let mut digest = [0; 32];
    digest.copy_from_slice(&entry[5..]);
    let at = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
    Piece { at, pages: entry[4], digest: Digest::from_bytes(digest) }
}

fn io(error: std::io::Error) -> StoreError {
    StoreError::io("read or write", std::path::Path::new("an image"), error)
}

/// The next range that is no hole.
fn data_after(file: &File, at: u64, bytes: u64) -> Result<Option<(u64, u64)>> {
    if at >= bytes {
        return Ok(None);
    }
    let begin = match lseek(file, at.cast_signed(), Whence::SeekData) {
        Err(nix::errno::Errno::ENXIO) => return Ok(None),
        found => found.map_err(|errno| io(errno.into()))?.cast_unsigned(),
    };
    let end = lseek(file, begin.cast_signed(), Whence::SeekHole).map_err(|errno| io(errno.into()))?;
    Ok(Some((begin, end.cast_unsigned().min(bytes))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::os::unix::fs::MetadataExt as _;

    struct Kit {
        folder: tempfile::TempDir,
        store: Store,
    }

    impl Kit {
        fn new() -> Kit {
            let folder = tempfile::tempdir().expect("a folder");
            let store = Store::open(&folder.path().join("store")).expect("opened");
            Kit { folder, store }
        }

        fn file(&self, name: &str, bytes: u64, pages: &[(u64, u8)]) -> File {
            let mut options = File::options();
            let file = options.read(true).write(true).create(true).truncate(true).open(self.folder.path().join(name));
            let file = file.expect("created");
            file.set_len(bytes).expect("sized");
            for (place, fill) in pages {
                let count = (bytes - place).min(PAGE as u64) as usize;
                file.write_all_at(&vec![*fill; count], *place).expect("written");
            }
            file
        }

        fn put(&self, file: &File) -> (Digest, Image) {
            let batch = self.store.batch();
            let put = Image::put(&batch, file).expect("stored");
            batch.commit().expect("durable");
            put
        }

        fn count(&self) -> usize {
            self.store.objects().count()
        }
    }

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; file.metadata().expect("a file").len() as usize];
        file.read_exact_at(&mut bytes, 0).expect("read");
        bytes
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn zero_pages_are_left_out() {
        let kit = Kit::new();
        // Written zeros are no holes, and the last page is cut off.
        let pages = [(0, 1), (4096, 0), (8192, 2), (5 * MIB, 0), (900 * MIB, 7), (1024 * MIB, 9)];
        let file = kit.file("memory", 1024 * MIB + 100, &pages);
        let (list, image) = kit.put(&file);
        assert_eq!((image.pieces.len(), image.stored_bytes()), (3, 4 * PAGE as u64));
        assert_eq!(kit.count(), 4);
        assert_eq!(Image::load(&kit.store, list).expect("read"), image);
        let back = kit.file("back", 0, &[]);
        image.write(&kit.store, &back).expect("written");
        assert!(back.metadata().expect("a file").blocks() * 512 < MIB, "it has holes");
        for (place, fill) in pages {
            let mut found = [0xff; 100];
            back.read_exact_at(&mut found, place).expect("read");
            assert_eq!(found, [fill; 100], "{place}");
        }
        assert_eq!(back.metadata().expect("a file").len(), 1024 * MIB + 100);
        let (_, empty) = kit.put(&kit.file("empty", 64 * MIB, &[]));
        assert_eq!((empty.bytes(), empty.stored_bytes()), (64 * MIB, 0));
    }

    #[test]
    fn equal_pieces_are_stored_once() {
        let kit = Kit::new();
        let all: Vec<(u64, u8)> = (0..256).map(|n| (n * PAGE as u64, n as u8 | 1)).collect();
        let file = kit.file("memory", 4 * MIB, &all);
        let (_, first) = kit.put(&file);
        let before = kit.count();
        file.write_all_at(b"changed", 77 * PAGE as u64).expect("written");
        let (_, second) = kit.put(&file);
        // The changed piece, and the list.
        assert_eq!(kit.count(), before + 2);
        let (first, second): (HashSet<Digest>, HashSet<Digest>) = (first.pieces().collect(), second.pieces().collect());
        assert_eq!(second.difference(&first).count(), 1);
        let back = kit.file("back", 0, &[]);
        kit.put(&file).1.write(&kit.store, &back).expect("written");
        assert!(content(&back) == content(&file), "it is what was stored");
    }

    #[test]
    fn malformed_lists_are_refused() {
        let kit = Kit::new();
        let (_, image) = kit.put(&kit.file("memory", MIB, &[(0, 1), (70 * 4096, 2)]));
        let list = image.encode();
        assert_eq!(Image::decode(&list).expect("decoded"), image);
        for end in 0..list.len() {
            assert!(Image::decode(&list[..end]).is_err(), "cut at {end}");
        }
        let changed = |at: usize, byte: u8| {
            let mut list = list.clone();
            list[at] = byte;
            Image::decode(&list).err().map(|error| error.code)
        };
        assert_eq!(changed(8, 2), Some(ErrorCode::Unsupported));
        // Magic, count, length, order, pages, beyond the end.
        for (at, byte) in [(0, b'X'), (12, 1), (18, 0), (HEAD, 200), (HEAD + 4, 0), (HEAD + ENTRY + 1, 1)] {
            assert_eq!(changed(at, byte), Some(ErrorCode::Corrupt), "byte {at}");
        }
        let longer = [&list[..], &[0]].concat();
        assert!(Image::decode(&longer).is_err());
    }

    #[test]
    fn missing_and_wrong_pieces_are_named() {
        let kit = Kit::new();
        let (_, image) = kit.put(&kit.file("memory", MIB, &[(0, 1), (70 * 4096, 2)]));
        let read = |image: &Image| image.read(&kit.store, |_, _| Ok(())).err().map(|error| (error.code, error.message));
        assert_eq!(read(&image), None);
        let gone = Digest::from_bytes([7; 32]);
        let mut missing = image.clone();
        missing.pieces[1].digest = gone;
        let mut short = image;
        short.pieces[0].pages = 3;
        for (wrong, named) in [(&missing, gone), (&short, short.pieces[0].digest)] {
            let (code, message) = read(wrong).expect("refused");
            assert!(code == ErrorCode::Corrupt && message.contains(&named.to_string()), "{message}");
        }
    }
}
