//! The changed pages of a suspended machine in a file, and back in the memory of the machine that continues it.
//!
//! ```text
//!  write: private pages of the stopped machine ─ not those that equal the base ─▶ runs in `suspended.pages`
//!  load:  a new monitor maps the base, and waits ─▶ runs into its memory ─▶ it loads processors and devices
//!
//!  magic │ place, pages, kind │ bytes of the pages │ place, pages, kind │ …      kind 2: zeros, without bytes
//! ```
//!
//! Both cost what was changed, whatever the machine's size; the rest of the memory is read from the base when the guest
//! uses it. The pages are private again in the new monitor, so the next suspension writes all that differ from the base.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::time::Instant;

use super::base::{self, BaseTemplate};
use super::handle::blocking;
use super::pages::{MappedMemory, PAGE_BYTES, PIECE};
use super::template::again;
use crate::core::error::{Error, Result};
use crate::sys::fault;

const MAGIC: [u8; 8] = *b"ryopages";
/// The kinds of runs.
const FILLED: u32 = 1;
const ZEROS: u32 = 2;
/// Bytes of a run's place, number of pages and kind.
const HEADER: usize = 16;
const PAGE: usize = PAGE_BYTES as usize;

/// The memory of a suspended machine: a file beneath, and the pages that differ.
pub(super) struct SavedPages {
    pub pages: File,
    pub base: File,
    /// `None`: the base is the memory of a machine that was copied.
    pub template: Option<BaseTemplate>,
}

/// What was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Written {
    /// Private pages of the machine.
    pub private: u64,
    /// Pages with bytes in the file.
    pub filled: u64,
    /// Pages of zeros.
    pub zeros: u64,
}

/// The size of the largest file for a machine.
pub(super) fn most_bytes(memory_bytes: u64) -> u64 {
    memory_bytes + memory_bytes / PAGE_BYTES * HEADER as u64 + MAGIC.len() as u64
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// As in the file beneath.
    Same,
    Zeros,
    Filled,
}

/// Writes the pages of a stopped machine that differ from the file beneath. Blocks.
///
/// # Errors
/// Those of `/proc` and of the files.
pub(super) fn write(mapped: &MappedMemory, base: &File, to: &File) -> io::Result<Written> {
    let (mut out, mut written) = (BufWriter::with_capacity(PIECE as usize, to), Written::default());
    let (mut beneath, zeros) = (vec![0; PIECE as usize], [0_u8; PAGE]);
    out.write_all(&MAGIC)?;
    written.private = mapped.each_changed(|at, pages| {
        let beneath = &mut beneath[..pages.len()];
        base.read_exact_at(beneath, at)?;
        let class = |(page, beneath): (&[u8], &[u8])| match page {
            _ if page == beneath => Class::Same,
            _ if page == zeros => Class::Zeros,
            _ => Class::Filled,
        };
        let classes: Vec<Class> = pages.chunks_exact(PAGE).zip(beneath.chunks_exact(PAGE)).map(class).collect();
        let mut first = 0;
        for run in classes.chunk_by(|one, next| one == next) {
            let (place, count) = (at + (first * PAGE) as u64, run.len());
            match run[0] {
                Class::Same => {}
                Class::Zeros => {
                    out.write_all(&header(place, count, ZEROS))?;
                    written.zeros += count as u64;
                }
                Class::Filled => {
                    out.write_all(&header(place, count, FILLED))?;
                    out.write_all(&pages[first * PAGE..(first + count) * PAGE])?;
                    written.filled += count as u64;
                }
            }
            first += count;
        }
        Ok(())
    })?;
    out.flush()?;
    Ok(written)
}

fn header(place: u64, pages: usize, kind: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&place.to_le_bytes());
    // A run is at most a piece.
    header[8..12].copy_from_slice(&(pages as u32).to_le_bytes());
    header[12..].copy_from_slice(&kind.to_le_bytes());
    header
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the saved pages are not understood: {what}"))
}

/// Passes on the runs of a file: the place and the bytes of at most a piece. Blocks.
///
/// # Errors
/// Those of the file and of `put`; `InvalidData`.
fn each_run(pages: &File, memory_bytes: u64, mut put: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut from = BufReader::with_capacity(PIECE as usize, again(pages)?);
    let (mut magic, mut piece, mut end) = ([0; MAGIC.len()], vec![0; PIECE as usize], 0);
    from.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Err(invalid("their beginning"));
    }
    while let Some((place, count, kind)) = next_header(&mut from)? {
        let bytes = u64::from(count) * PAGE_BYTES;
        let is_inside = place.checked_add(bytes).is_some_and(|end| end <= memory_bytes);
        if !is_inside || place < end || !place.is_multiple_of(PAGE_BYTES) || bytes == 0 || bytes > PIECE {
            return Err(invalid("the place of a run"));
        }
        let run = &mut piece[..bytes as usize];
        match kind {
            FILLED => from.read_exact(run)?,
            ZEROS => run.fill(0),
            _ => return Err(invalid("the kind of a run")),
        }
        put(place, run)?;
        end = place + bytes;
    }
    Ok(())
}

/// Place, number of pages and kind of the next run; `None` at the end.
fn next_header(from: &mut impl BufRead) -> io::Result<Option<(u64, u32, u32)>> {
    if from.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let (mut place, mut count, mut kind) = ([0; 8], [0; 4], [0; 4]);
    from.read_exact(&mut place)?;
    from.read_exact(&mut count)?;
    from.read_exact(&mut kind)?;
    Ok(Some((u64::from_le_bytes(place), u32::from_le_bytes(count), u32::from_le_bytes(kind))))
}

impl SavedPages {
    /// The same files for another reader.
    ///
    /// # Errors
    /// Those of opening.
    pub(super) fn again(&self) -> io::Result<SavedPages> {
        let (pages, base) = (self.pages.try_clone()?, self.base.try_clone()?);
        Ok(SavedPages { pages, base, template: self.template.clone() })
    }

    /// Writes the pages into a monitor that has mapped the base and did not load a state yet.
    ///
    /// # Errors
    /// `unavailable` if it has mapped something else or cannot be written to; those of the file.
    pub(super) async fn load(self, pid: u32, memory_bytes: u64) -> Result<()> {
        let failed = |error: io::Error| Error::unavailable(format!("the saved pages cannot be loaded: {error}"));
        blocking(move || {
            let mapped = MappedMemory::find_writable(pid, memory_bytes).map_err(failed)?;
            if !base::is_same(&self.base, mapped.base()).map_err(failed)? {
                return Err(Error::unavailable("a monitor has mapped another memory than it was started with"));
            }
            let began = Instant::now();
            each_run(&self.pages, memory_bytes, |at, bytes| mapped.write_at(at, bytes)).map_err(failed)?;
            tracing::info!(took_ms = began.elapsed().as_millis(), "the saved pages of a machine were loaded");
            fault::point("machine.resume.pages").map_err(failed)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::super::pages::tests::{PAGES, with_mapping};
    use super::*;

    const BYTES: u64 = PAGES * PAGE_BYTES;

    /// A file with these bytes.
    fn file(bytes: &[u8]) -> io::Result<File> {
        let file = tempfile::tempfile()?;
        file.write_all_at(bytes, 0)?;
        Ok(file)
    }

    fn read(file: &File) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        again(file)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn saved_pages_come_back() -> io::Result<()> {
        // Two pages are new, one is zeros now, one has its former bytes again.
        let change = "memory[4096:4099] = b'new'; memory[7 * 4096] = 9\n\
                      memory[2 * 4096:3 * 4096] = bytes(4096); memory[5 * 4096] = 1\n";
        let pages = tempfile::tempfile()?;
        let (written, expected) = with_mapping(change, |pid, base| {
            let mapped = MappedMemory::find(pid, BYTES)?;
            let written = write(&mapped, base, &pages)?;
            let whole = file(&read(base)?)?;
            mapped.write_changed(&whole)?;
            Ok((written, read(&whole)?))
        })?;
        assert_eq!(written, Written { private: 4, filled: 2, zeros: 1 });
        let saved = read(&pages)?;
        assert_eq!(saved.len(), MAGIC.len() + 3 * HEADER + 2 * PAGE);
        assert!(saved.len() as u64 <= most_bytes(BYTES));
        // In another process that has mapped the same, and again from there.
        let found = with_mapping("", |pid, base| {
            let mapped = MappedMemory::find_writable(pid, BYTES)?;
            each_run(&pages, BYTES, |at, bytes| mapped.write_at(at, bytes))?;
            let (whole, next) = (file(&read(base)?)?, tempfile::tempfile()?);
            mapped.write_changed(&whole)?;
            write(&mapped, base, &next)?;
            assert!(mapped.write_at(BYTES - 1, b"ab").is_err());
            Ok((read(&whole)?, read(&next)?))
        })?;
        assert!(found == (expected, saved));
        Ok(())
    }

    #[test]
    fn damaged_pages_are_refused() -> io::Result<()> {
        let run = |place: u64, count: usize, kind| header(place, count, kind).to_vec();
        let page = vec![1; PAGE];
        let put = |parts: &[Vec<u8>]| {
            let mut places = Vec::new();
            let whole = [&[MAGIC.to_vec()][..], parts].concat().concat();
            each_run(&file(&whole)?, BYTES, |at, bytes| {
                places.push((at / PAGE_BYTES, bytes.len() / PAGE, bytes[0]));
                Ok(())
            })?;
            Ok::<_, io::Error>(places)
        };
        assert!(put(&[])?.is_empty());
        let right = [run(PAGE_BYTES, 1, FILLED), page.clone(), run(2 * PAGE_BYTES, 6, ZEROS)];
        assert_eq!(put(&right)?, [(1, 1, 1), (2, 6, 0)]);
        let wrong: [&[Vec<u8>]; 9] = [
            &[run(0, 1, FILLED), vec![1; PAGE - 1]],
            &[run(0, 1, FILLED)[..HEADER - 1].to_vec()],
            &[run(0, 1, FILLED), page.clone(), vec![0]],
            &[run(1, 1, FILLED), page.clone()],
            &[run(BYTES, 1, FILLED), page.clone()],
            &[run(u64::MAX - PAGE_BYTES + 1, 1, ZEROS)],
            &[run(0, 9, ZEROS)],
            &[run(0, 1, 3), page.clone()],
            &[run(PAGE_BYTES, 1, ZEROS), run(0, 1, ZEROS)],
        ];
        for (at, parts) in wrong.into_iter().enumerate() {
            assert!(put(parts).is_err(), "{at}");
        }
        assert!(put(&[run(0, 0, ZEROS)]).is_err());
        assert!(each_run(&file(b"ryopage2")?, BYTES, |_, _| Ok(())).is_err());
        assert!(each_run(&file(b"")?, BYTES, |_, _| Ok(())).is_err());
        Ok(())
    }
}
