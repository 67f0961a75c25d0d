//! One index file: the slots of many full packs, sorted by digest; a lookup is one small read.
//!
//! The packs hold the same entries: a damaged or missing index file is rebuilt from them. It is read, not mapped:
//! truncation by another program must be an error, not the end of the daemon.

use std::fs::File;
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Result;
use super::error::StoreError;
use super::format::{self, INDEX_HEADER, IndexHeader, SLOT, Slot};
use crate::core::ids::Digest;
use crate::sys::{fault, fs};

/// Approximate entries per bucket: what one lookup reads.
const BUCKET: u64 = 16;

#[derive(Debug)]
pub(super) struct Segment {
    path: PathBuf,
    file: File,
    header: IndexHeader,
    packs: Vec<u32>,
    starts: Vec<u32>,
    checks: Vec<u32>,
}

fn bucket(digest: Digest, bits: u32) -> usize {
    let bytes = digest.as_bytes();
    let first = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    if bits == 0 { 0 } else { (first >> (32 - bits)) as usize }
}

fn short(check: [u8; 8]) -> u32 {
    format::u32_at(&check, 0)
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| format::u32_at(word, 0)).collect()
}

impl Segment {
    /// Opens an index file; reads only its head.
    pub(super) fn open(path: &Path) -> Result<Segment> {
        let damaged = || StoreError::Index { path: path.to_owned() };
        let failed = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => damaged(),
            _ => StoreError::io("read", path, e),
        };
        let file = File::open(path).map_err(|e| StoreError::io("open", path, e))?;
        let length = file.metadata().map_err(failed)?.len();
        let mut first = [0; INDEX_HEADER];
        file.read_exact_at(&mut first, 0).map_err(failed)?;
        let header = IndexHeader::read(&first).ok_or_else(damaged)?;
        let fits = header.head_bytes().checked_add(header.count.saturating_mul(SLOT as u64)) == Some(length);
        if !fits {
            return Err(damaged());
        }
        let mut head = vec![0; header.head_bytes() as usize];
        file.read_exact_at(&mut head, 0).map_err(failed)?;
        let (covered, found) = head.split_at(head.len() - 8);
        if format::check(covered) != found {
            return Err(damaged());
        }
        let (packs, rest) = covered[INDEX_HEADER..].split_at(4 * header.packs as usize);
        let (starts, checks) = rest.split_at(4 * ((1 << header.bits) + 1));
        let (packs, starts, checks) = (words(packs), words(starts), words(checks));
        if !starts.is_sorted() || starts.last().copied().map(u64::from) != Some(header.count) {
            return Err(damaged());
        }
        Ok(Segment { path: path.to_owned(), file, header, packs, starts, checks })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The packs covered.
    pub(super) fn packs(&self) -> &[u32] {
        &self.packs
    }

    pub(super) fn count(&self) -> u64 {
        self.header.count
    }

    /// Adds every slot of a digest.
    pub(super) fn find(&self, digest: Digest, found: &mut Vec<Slot>) -> Result<()> {
        let slots = self.bucket(bucket(digest, self.header.bits))?;
        found.extend(slots.into_iter().filter(|slot| slot.digest == digest));
        Ok(())
    }

    fn bucket(&self, at: usize) -> Result<Vec<Slot>> {
        let (from, to) = (u64::from(self.starts[at]), u64::from(self.starts[at + 1]));
        if from == to {
            return Ok(Vec::new());
        }
        let mut bytes = vec![0; (to - from) as usize * SLOT];
        let damaged = || StoreError::Index { path: self.path.clone() };
        match self.file.read_exact_at(&mut bytes, self.header.head_bytes() + from * SLOT as u64) {
            Ok(()) if short(format::check(&bytes)) == self.checks[at] => {}
            Ok(()) => return Err(damaged()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(damaged()),
            Err(error) => return Err(StoreError::io("read", &self.path, error)),
        }
        bytes.chunks_exact(SLOT).map(|slot| Slot::read(slot).ok_or_else(damaged)).collect()
    }

    /// Every entry in order.
    pub(super) fn iter(self: &Arc<Self>) -> impl Iterator<Item = Result<Slot>> + use<> {
        let segment = Arc::clone(self);
        (0..1usize << self.header.bits).flat_map(move |at| match segment.bucket(at) {
            Ok(slots) => slots.into_iter().map(Ok).collect::<Vec<_>>(),
            Err(error) => vec![Err(error)],
        })
    }
}

/// Writes an index file from sorted entries, at most `most`.
pub(super) fn build(
    path: &Path,
    packs: &[u32],
    most: u64,
    slots: impl Iterator<Item = Result<Slot>>,
) -> Result<Segment> {
    let bits = (most / BUCKET).max(1).ilog2().min(24);
    let mut failed = None;
    let write = |file: &mut File| {
        let head = IndexHeader { bits, count: 0, packs: packs.len() as u32 }.head_bytes();
        file.seek(SeekFrom::Start(head))?;
        let mut body = Body::new(BufWriter::with_capacity(1 << 20, file), bits);
        for slot in slots {
            match slot {
                Ok(slot) => body.add(&slot)?,
                Err(error) => {
                    failed = Some(error);
                    return Err(io::ErrorKind::Other.into());
                }
            }
        }
        body.finish(packs)
    };
    let written = fs::replace_with(path, 0o600, "store.index.write", write);
    if let Some(error) = failed {
        return Err(error);
    }
    written?;
    Segment::open(path)
}

/// Writes the part of an index file after its head.
struct Body<'a> {
    file: BufWriter<&'a mut File>,
    bits: u32,
    count: u32,
    starts: Vec<u32>,
    checks: Vec<u32>,
    bucket: Vec<u8>,
}

impl<'a> Body<'a> {
    fn new(file: BufWriter<&'a mut File>, bits: u32) -> Body<'a> {
        Body { file, bits, count: 0, starts: vec![0], checks: Vec::new(), bucket: Vec::new() }
    }

    fn add(&mut self, slot: &Slot) -> io::Result<()> {
        while self.checks.len() < bucket(slot.digest, self.bits) {
            self.end_bucket()?;
        }
        slot.write(&mut self.bucket);
        self.count += 1;
        Ok(())
    }

    fn end_bucket(&mut self) -> io::Result<()> {
        self.checks.push(short(format::check(&self.bucket)));
        self.starts.push(self.count);
        self.file.write_all(&self.bucket)?;
        self.bucket.clear();
        Ok(())
    }

    fn finish(mut self, packs: &[u32]) -> io::Result<()> {
        while self.checks.len() < 1 << self.bits {
            self.end_bucket()?;
        }
        self.file.flush()?;
        let header = IndexHeader { bits: self.bits, count: u64::from(self.count), packs: packs.len() as u32 };
        let mut head = header.write();
        for words in [packs, &self.starts, &self.checks] {
            words.iter().for_each(|word| head.extend_from_slice(&word.to_le_bytes()));
        }
        let check = format::check(&head);
        head.extend_from_slice(&check);
        self.file.get_mut().write_all_at(&head, 0)
    }
}

/// Removes an index file that was replaced.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fault::point("store.index.remove").and_then(|()| std::fs::remove_file(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path, error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Merges sorted sources.
pub(super) struct Merge<I: Iterator<Item = Result<Slot>>> {
    sources: Vec<std::iter::Peekable<I>>,
}

impl<I: Iterator<Item = Result<Slot>>> Merge<I> {
    pub(super) fn new(sources: impl IntoIterator<Item = I>) -> Merge<I> {
        Merge { sources: sources.into_iter().map(Iterator::peekable).collect() }
    }
}

impl<I: Iterator<Item = Result<Slot>>> Iterator for Merge<I> {
    type Item = Result<Slot>;

    fn next(&mut self) -> Option<Result<Slot>> {
        let mut least: Option<(usize, Slot)> = None;
        for (at, source) in self.sources.iter_mut().enumerate() {
            match source.peek() {
                Some(Err(_)) => return source.next(),
                Some(Ok(slot)) if least.is_none_or(|(_, other)| *slot < other) => least = Some((at, *slot)),
                Some(Ok(_)) | None => {}
            }
        }
        self.sources[least?.0].next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::format::Kind;

    fn slot(n: u32) -> Slot {
        let digest = format::digest_of(&n.to_le_bytes());
        Slot { digest, pack: n % 3, offset: n, kind: Kind::Whole, stored: n, size: u64::from(n) }
    }

    fn segment(dir: &Path, numbers: impl Iterator<Item = u32>) -> Arc<Segment> {
        let mut slots: Vec<_> = numbers.map(slot).collect();
        slots.sort();
        let count = slots.len() as u64;
        Arc::new(build(&dir.join("0.index"), &[0, 1, 2], count, slots.into_iter().map(Ok)).expect("built"))
    }

    #[test]
    fn index_finds_exact_entries() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for count in [0, 1, 15, 16, 1000, 5000] {
            let segment = segment(dir.path(), 0..count);
            for n in 0..count + 100 {
                let mut found = Vec::new();
                segment.find(slot(n).digest, &mut found).expect("read");
                assert_eq!(found, if n < count { vec![slot(n)] } else { vec![] });
            }
            let all: Vec<_> = segment.iter().collect::<Result<_>>().expect("read");
            assert!(all.is_sorted() && all.len() == count as usize);
            assert_eq!((segment.count(), segment.packs()), (u64::from(count), &[0, 1, 2][..]));
        }
    }

    #[test]
    fn merged_index_is_sorted() {
        let part = |from: u32| {
            let mut slots: Vec<_> = (from..100).step_by(3).map(slot).collect();
            slots.sort();
            slots.into_iter().map(Ok)
        };
        let merged: Vec<_> = Merge::new((0..3).map(part)).collect::<Result<_>>().expect("read");
        assert!(merged.is_sorted() && merged.len() == 100);
    }

    #[test]
    fn damaged_index_is_detected() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let segment = segment(dir.path(), 0..500);
        let whole = std::fs::read(segment.path()).expect("read");
        let path = dir.path().join("damaged");
        for at in (0..whole.len()).step_by(97) {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            std::fs::write(&path, bytes).expect("written");
            let all: Result<Vec<_>> = Segment::open(&path).and_then(|segment| Arc::new(segment).iter().collect());
            assert!(matches!(all, Err(StoreError::Index { .. })), "byte {at}");
        }
        for length in [0, 1, 31, 40, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).expect("written");
            assert!(matches!(Segment::open(&path), Err(StoreError::Index { .. })), "{length} bytes");
        }
    }
}
