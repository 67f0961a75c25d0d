//! Reads the pages that a stopped machine changed since its memory was mapped from a file, and writes pages into it.
//!
//! ```text
//!  /proc/PID/maps: where the memory file is mapped ─▶ pagemap: which pages are private ─▶ mem: their bytes
//! ```
//!
//! The layout of `pagemap` is that of the host kernel's admin-guide/mm/pagemap. The monitor is untrusted: what it maps
//! there becomes the memory of copies of its own machine, and nothing else.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};

pub(super) const PAGE_BYTES: u64 = 4096;
/// The longest list of mappings, bytes.
const MOST_MAPS: u64 = 8 << 20;
/// Bytes of one page's entry.
const ENTRY: usize = 8;
/// Entries that are read at once.
const ENTRIES: usize = 64 << 10;
/// Bytes of memory that are copied at once.
pub(super) const PIECE: u64 = 1 << 20;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// The page is the file's, unchanged.
const IS_FILE: u64 = 1 << 61;

/// Where a process has mapped the memory of its machine.
#[derive(Debug)]
pub(super) struct MappedMemory {
    parts: Vec<MappedPart>,
    /// Opened once: they are of this process, whatever becomes of its number.
    map: File,
    memory: File,
    /// The file beneath, which does not change.
    base: File,
}

/// One mapping of a part of the file; bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MappedPart {
    address: u64,
    offset: u64,
    bytes: u64,
    inode: u64,
}

impl MappedMemory {
    /// Finds the private mapping of a file of that size in a process. Blocks.
    ///
    /// # Errors
    /// `NotFound` if the memory is no such mapping; those of `/proc`, also where this process may not trace the other.
    pub(super) fn find(pid: u32, memory_bytes: u64) -> io::Result<MappedMemory> {
        // Refused here, not while the machine stands still.
        MappedMemory::find_with(pid, memory_bytes, File::open(format!("/proc/{pid}/mem"))?)
    }

    /// As [`Self::find`], and its pages can be written.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub(super) fn find_writable(pid: u32, memory_bytes: u64) -> io::Result<MappedMemory> {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        MappedMemory::find_with(pid, memory_bytes, memory)
    }

    fn find_with(pid: u32, memory_bytes: u64, memory: File) -> io::Result<MappedMemory> {
        let map = File::open(format!("/proc/{pid}/pagemap"))?;
        let mut maps = String::new();
        File::open(format!("/proc/{pid}/maps"))?.take(MOST_MAPS).read_to_string(&mut maps)?;
        let mut all: Vec<MappedPart> = maps.lines().filter_map(private_file).collect();
        all.sort_by_key(|part| (part.inode, part.offset));
        let missing = || io::Error::new(io::ErrorKind::NotFound, "its memory is not mapped from a file");
        let whole = all.chunk_by(|one, next| one.inode == next.inode).find(|parts| covers(parts, memory_bytes));
        let parts = whole.ok_or_else(missing)?.to_vec();
        let base = open_file(pid, parts[0].inode, memory_bytes)?.ok_or_else(missing)?;
        Ok(MappedMemory { parts, map, memory, base })
    }

    /// The file beneath.
    pub(super) fn base(&self) -> &File {
        &self.base
    }

    /// Writes the changed pages of a stopped machine at their places. Returns their number. Blocks.
    ///
    /// # Errors
    /// Those of `/proc` and of the file.
    pub(super) fn write_changed(&self, to: &File) -> io::Result<u64> {
        self.each_changed(|at, pages| to.write_all_at(pages, at))
    }

    /// Passes on the changed pages of a stopped machine: the place and the bytes of at most [`PIECE`] adjacent ones, in the
    /// order of their places. Returns the number of pages. Blocks.
    ///
    /// # Errors
    /// Those of `/proc` and of `take`.
    pub(super) fn each_changed(&self, mut take: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<u64> {
        let (mut entries, mut piece, mut pages) = (vec![0; ENTRIES * ENTRY], vec![0; PIECE as usize], 0);
        for part in &self.parts {
            let count = (part.bytes / PAGE_BYTES) as usize;
            for first in (0..count).step_by(ENTRIES) {
                let read = &mut entries[..(count - first).min(ENTRIES) * ENTRY];
                self.map.read_exact_at(read, part.address / PAGE_BYTES * ENTRY as u64 + (first * ENTRY) as u64)?;
                let is_changed = |entry: &[u8]| {
                    let bits = entry.try_into().map_or(0, u64::from_ne_bytes);
                    bits & SWAPPED != 0 || (bits & PRESENT != 0 && bits & IS_FILE == 0)
                };
                let flags: Vec<bool> = read.chunks_exact(ENTRY).map(is_changed).collect();
                let mut at = first as u64 * PAGE_BYTES;
                for run in flags.chunk_by(|one, next| one == next) {
                    let bytes = run.len() as u64 * PAGE_BYTES;
                    if run[0] {
                        self.read(part, at, bytes, &mut piece, &mut take)?;
                        pages += run.len() as u64;
                    }
                    at += bytes;
                }
            }
        }
        Ok(pages)
    }

    /// Reads memory of a part, piece by piece.
    fn read(
        &self,
        part: &MappedPart,
        at: u64,
        bytes: u64,
        piece: &mut [u8],
        take: &mut impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < bytes {
            let read = &mut piece[..(bytes - done).min(PIECE) as usize];
            self.memory.read_exact_at(read, part.address + at + done)?;
            take(part.offset + at + done, read)?;
            done += read.len() as u64;
        }
        Ok(())
    }

    /// Writes bytes at a place of the machine's memory. Blocks.
    ///
    /// # Errors
    /// Those of `/proc`; `InvalidInput` beyond the memory.
    pub(super) fn write_at(&self, mut at: u64, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let is_in = |part: &&MappedPart| part.offset <= at && at - part.offset < part.bytes;
            let part = self.parts.iter().find(is_in).ok_or(io::ErrorKind::InvalidInput)?;
            let inside = at - part.offset;
            let (now, rest) = bytes.split_at(bytes.len().min((part.bytes - inside) as usize));
            self.memory.write_all_at(now, part.address + inside)?;
            (at, bytes) = (at + now.len() as u64, rest);
        }
        Ok(())
    }
}

/// A writable private mapping of a file in a line of `maps`.
fn private_file(line: &str) -> Option<MappedPart> {
    let mut words = line.split_ascii_whitespace();
    let (range, rights, offset, _, inode) =
        (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?.parse().ok()?);
    let (start, end) = range.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let (address, end, offset) = (number(start)?, number(end)?, number(offset)?);
    (rights.starts_with("rw") && rights.ends_with('p') && inode != 0).then_some(MappedPart {
        address,
        offset,
        bytes: end.checked_sub(address)?,
        inode,
    })
}

/// Whether the parts, in order, are a file of that size without a gap.
fn covers(parts: &[MappedPart], bytes: u64) -> bool {
    let end =
        parts.iter().try_fold(0, |end: u64, part| if part.offset == end { end.checked_add(part.bytes) } else { None });
    end == Some(bytes)
}

/// A file that a process has open, by its inode and size: it may have no name any more.
fn open_file(pid: u32, inode: u64, bytes: u64) -> io::Result<Option<File>> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // Closed meanwhile, or no file.
        let Ok(found) = std::fs::metadata(&path) else { continue };
        if !found.is_file() || found.ino() != inode {
            continue;
        }
        // The process may exchange it in between: what was opened counts.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(&path)?;
        let found = file.metadata()?;
        if found.is_file() && found.ino() == inode && found.len() == bytes {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    /// The pages of the file that is mapped.
    pub(in crate::isolation::microvm) const PAGES: u64 = 8;

    /// Maps a file privately, changes its memory, and waits.
    const PROGRAM: &str = "
import mmap, sys
file = open(sys.argv[1], 'rb')
memory = mmap.mmap(file.fileno(), 8 * 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
seen = memory[5 * 4096]
exec(sys.argv[2])
print('ready', flush=True)
sys.stdin.read()
";

    /// Does something with a process that has mapped a file of ones, which has no name any more, and made that change.
    pub(in crate::isolation::microvm) fn with_mapping<T>(
        change: &str,
        act: impl FnOnce(u32, &File) -> io::Result<T>,
    ) -> io::Result<T> {
        let base = tempfile::NamedTempFile::new()?;
        base.as_file().write_all_at(&[1; (PAGES * PAGE_BYTES) as usize], 0)?;
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", PROGRAM]).arg(base.path()).arg(change).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut said = [0; 6];
        child.stdout.take().expect("piped").read_exact(&mut said)?;
        let done = act(child.id(), &base.into_file());
        child.stdin.take().expect("piped").write_all(b"")?;
        child.wait()?;
        done
    }

    #[test]
    fn changed_pages_are_found() -> io::Result<()> {
        let change = "memory[4096:4099] = b'new'; memory[7 * 4096] = 9";
        let bytes = PAGES * PAGE_BYTES;
        let copy = tempfile::tempfile()?;
        copy.write_all_at(&vec![1; bytes as usize], 0)?;
        let (pages, held, is_missing) = with_mapping(change, |pid, _| {
            let mapped = MappedMemory::find(pid, bytes)?;
            let mut held = Vec::new();
            mapped.base().try_clone()?.read_to_end(&mut held)?;
            Ok((mapped.write_changed(&copy)?, held, MappedMemory::find(pid, 4096).is_err()))
        })?;
        assert!(pages == 2 && held == vec![1; bytes as usize] && is_missing);
        let (mut expected, mut found) = (vec![1; bytes as usize], vec![0; bytes as usize]);
        expected[4096..4099].copy_from_slice(b"new");
        expected[7 * 4096] = 9;
        copy.read_exact_at(&mut found, 0)?;
        assert!(found == expected);
        Ok(())
    }

    #[test]
    fn other_mappings_are_ignored() {
        let part = |line| private_file(line).map(|part| (part.address, part.offset, part.bytes));
        assert_eq!(part("7f00-8000 rw-p 00001000 fd:00 12 /a b (deleted)"), Some((0x7f00, 0x1000, 0x100)));
        for line in
            ["7f00-8000 rw-s 0 fd:00 12 /a", "7f00-8000 r--p 0 fd:00 12 /a", "7f00-8000 rw-p 0 00:00 0", "", "x"]
        {
            assert_eq!(part(line), None, "{line}");
        }
        let at = |offset, bytes| MappedPart { address: 0, offset, bytes, inode: 1 };
        assert!(covers(&[at(0, 4), at(4, 4)], 8));
        assert!(!covers(&[at(0, 4), at(5, 3)], 8) && !covers(&[at(0, 4)], 8) && !covers(&[], 8));
    }
}
