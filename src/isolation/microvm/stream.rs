//! Splits the saved stream of a stopped machine into its memory and the rest, as a template has them.
//!
//! ```text
//!  header, configuration │ RAM: blocks, pages … │ devices ──▶ state: all but the pages of the largest block
//!                                       └────────────────▶ memory: those pages, in a sparse file that machines map
//! ```
//!
//! The stream is QEMU's migration format, version 3. Its writer is as untrusted as its guest: every length is checked,
//! and what is not understood is an error. A wrong page harms the machine that continues from it, and nothing else.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt as _;

use super::template::again;
use crate::core::limits;

const MAGIC: [u8; 8] = *b"QEVM\0\0\0\x03";
/// Kinds of sections.
const START: u8 = 1;
const PART: u8 = 2;
const END: u8 = 3;
const FULL: u8 = 4;
const COMMAND: u8 = 8;
const FOOTER: u8 = 0x7e;
/// The start of the RAM's section, after the kind and the section's number: name, instance 0, version 4.
const RAM: [u8; 12] = *b"\x03ram\0\0\0\0\0\0\0\x04";
/// Bytes before that section: the machine's name and capabilities.
const MOST_BEFORE: usize = 64 << 10;
/// Blocks of memory: main memory, and those of firmware and devices.
const MOST_BLOCKS: usize = 64;

const PAGE_BYTES: usize = 4096;
const FLAGS: u64 = PAGE_BYTES as u64 - 1;
const ZERO: u64 = 0x02;
const BLOCKS: u64 = 0x04;
const PAGE: u64 = 0x08;
const END_OF_PART: u64 = 0x10;
const SAME_BLOCK: u64 = 0x20;

fn invalid(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a machine's saved stream is not understood: {what}"))
}

/// Splits a stream. `memory_bytes`: the size of main memory. Blocks.
///
/// # Errors
/// Those of the files; `InvalidData`.
pub(super) fn split(stream: &File, memory_bytes: u64, memory: &File, state: &File) -> io::Result<()> {
    // Its writer has the same descriptor, and could move its position for ever.
    let stream = &again(stream)?;
    memory.set_len(memory_bytes)?;
    let mut splitter = Splitter {
        from: BufReader::with_capacity(1 << 20, stream),
        state: BufWriter::new(state),
        state_bytes: 0,
        memory: Pages { file: memory, bytes: memory_bytes, at: 0, gathered: Vec::with_capacity(GATHERED), end: 0 },
        main: Vec::new(),
        block: Vec::new(),
    };
    splitter.run()?;
    splitter.memory.flush()?;
    splitter.state.flush()
}

/// Makes the state of a machine from that of its template and its devices: everything of the template's before the
/// first device, and the devices without the header. `memory_bytes`: the size of main memory. Blocks.
///
/// # Errors
/// As [`split`].
pub(super) fn join(template: &File, devices: &File, memory_bytes: u64, state: &File) -> io::Result<()> {
    let (template, devices) = (&again(template)?, &mut again(devices)?);
    let mut splitter = Splitter {
        from: BufReader::with_capacity(1 << 20, template),
        state: BufWriter::new(state),
        state_bytes: 0,
        // Its memory is a file beside it.
        memory: Pages { file: state, bytes: memory_bytes, at: 0, gathered: Vec::new(), end: 0 },
        main: Vec::new(),
        block: Vec::new(),
    };
    splitter.copy_before_devices()?;
    if splitter.memory.end != 0 {
        return Err(invalid("a template's state has memory"));
    }
    let mut header = [0; MAGIC.len() + 1];
    devices.read_exact(&mut header)?;
    if header[..MAGIC.len()] != MAGIC || header[MAGIC.len()] != FULL {
        return Err(invalid("its devices"));
    }
    splitter.put(&[FULL])?;
    splitter.from = BufReader::new(devices);
    splitter.copy_rest()?;
    splitter.state.flush()
}

/// Everything in a template's state before the first device. `memory_bytes`: the size of main memory. Blocks.
///
/// # Errors
/// As [`split`].
pub(super) fn head(template: &File, memory_bytes: u64) -> io::Result<Vec<u8>> {
    let (template, mut head) = (&again(template)?, Vec::new());
    let mut splitter = Splitter {
        from: BufReader::with_capacity(1 << 20, template),
        state: BufWriter::new(&mut head),
        state_bytes: 0,
        // Never written: its memory is a file beside it.
        memory: Pages { file: template, bytes: memory_bytes, at: 0, gathered: Vec::new(), end: 0 },
        main: Vec::new(),
        block: Vec::new(),
    };
    splitter.copy_before_devices()?;
    if splitter.memory.end != 0 {
        return Err(invalid("a template's state has memory"));
    }
    splitter.state.flush()?;
    drop(splitter);
    Ok(head)
}

/// Bytes of adjacent pages that are written at once.
const GATHERED: usize = 1 << 20;

/// Main memory, written in runs of adjacent pages.
struct Pages<'f> {
    file: &'f File,
    bytes: u64,
    /// Where the gathered pages belong.
    at: u64,
    gathered: Vec<u8>,
    /// The end of all pages so far: what is behind it is a hole.
    end: u64,
}

impl Pages<'_> {
    fn put(&mut self, at: u64, page: &[u8; PAGE_BYTES]) -> io::Result<()> {
        if at.checked_add(PAGE_BYTES as u64).is_none_or(|end| end > self.bytes) {
            return Err(invalid("a page is beyond the memory"));
        }
        if at != self.at + self.gathered.len() as u64 || self.gathered.len() >= GATHERED {
            self.flush()?;
            self.at = at;
        }
        self.gathered.extend_from_slice(page);
        self.end = self.end.max(at + PAGE_BYTES as u64);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.gathered, self.at)?;
        self.gathered.clear();
        Ok(())
    }
}

struct Splitter<'f, W: Write> {
    from: BufReader<&'f File>,
    state: BufWriter<W>,
    state_bytes: u64,
    memory: Pages<'f>,
    /// The name of main memory's block.
    main: Vec<u8>,
    /// The block of the last page.
    block: Vec<u8>,
}

impl<W: Write> Splitter<'_, W> {
    fn run(&mut self) -> io::Result<()> {
        self.copy_before_devices()?;
        // Nothing but main memory is left out.
        self.put(&[FULL])?;
        self.copy_rest()
    }

    /// Copies everything before the first device, whose kind is taken.
    fn copy_before_devices(&mut self) -> io::Result<()> {
        let section = self.copy_header()?;
        self.copy_blocks()?;
        self.copy_pages()?;
        self.copy_footer(section)?;
        loop {
            let kind = self.take::<1>()?;
            match kind[0] {
                PART | END => {
                    let number = self.take::<4>()?;
                    if number != section {
                        return Err(invalid("a part of another section than the memory's"));
                    }
                    self.put(&kind)?;
                    self.put(&number)?;
                    self.copy_pages()?;
                    self.copy_footer(section)?;
                }
                COMMAND => {
                    let head = self.take::<4>()?;
                    self.put(&kind)?;
                    self.put(&head)?;
                    self.copy(usize::from(u16::from_be_bytes([head[2], head[3]])))?;
                }
                FULL => return Ok(()),
                other => return Err(invalid(format_args!("a section of kind {other}"))),
            }
        }
    }

    /// Copies everything before the RAM's first part. Returns the section's number.
    fn copy_header(&mut self) -> io::Result<[u8; 4]> {
        let mut header = self.take::<8>()?.to_vec();
        if header != MAGIC {
            return Err(invalid("its header"));
        }
        while !header.ends_with(&RAM) || header.len() < RAM.len() + 13 || header[header.len() - RAM.len() - 5] != START
        {
            if header.len() > MOST_BEFORE {
                return Err(invalid("it has no memory"));
            }
            header.extend(self.take::<1>()?);
        }
        self.put(&header)?;
        let number = header.len() - RAM.len() - 4;
        header[number..number + 4].try_into().map_err(|_| invalid("a section's number"))
    }

    /// Copies the list of blocks, and finds main memory in it.
    fn copy_blocks(&mut self) -> io::Result<()> {
        let word = self.take::<8>()?;
        let (total, flags) = (u64::from_be_bytes(word) & !FLAGS, u64::from_be_bytes(word) & FLAGS);
        if flags != BLOCKS {
            return Err(invalid("its list of memory"));
        }
        self.put(&word)?;
        let (mut listed, mut count) = (0u64, 0);
        while listed < total {
            let name = self.name()?;
            // Its length, and its address: shared memory is a capability of the stream.
            let [length, address] = [self.take::<8>()?, self.take::<8>()?];
            let bytes = u64::from_be_bytes(length);
            if bytes == self.memory.bytes && !std::mem::replace(&mut self.main, name.clone()).is_empty() {
                return Err(invalid("two blocks of main memory"));
            }
            self.put_name(&name)?;
            self.put(&length)?;
            self.put(&address)?;
            listed = listed.checked_add(bytes.max(1)).ok_or_else(|| invalid("a block's length"))?;
            count += 1;
            if count > MOST_BLOCKS {
                return Err(invalid("its list of memory is too long"));
            }
        }
        match self.main.is_empty() {
            true => Err(invalid("it has no main memory of the machine's size")),
            false => Ok(()),
        }
    }

    /// Takes main memory's pages of one part, and copies others.
    fn copy_pages(&mut self) -> io::Result<()> {
        loop {
            let word = u64::from_be_bytes(self.take::<8>()?);
            let (at, flags) = (word & !FLAGS, word & FLAGS);
            match flags & !SAME_BLOCK {
                END_OF_PART => return self.put(&word.to_be_bytes()),
                ZERO | PAGE => {}
                other => return Err(invalid(format_args!("memory with the flags {other:#x}"))),
            }
            if flags & SAME_BLOCK == 0 {
                self.block = self.name()?;
            }
            let (is_main, is_page) = (self.block == self.main, flags & PAGE != 0);
            if !is_main {
                // With its name: the page before may have been left out.
                self.put(&(at | flags & !SAME_BLOCK).to_be_bytes())?;
                let block = self.block.clone();
                self.put_name(&block)?;
            }
            match (is_page, is_main) {
                (true, true) => {
                    let page = self.take::<PAGE_BYTES>()?;
                    self.memory.put(at, &page)?;
                }
                (true, false) => self.copy(PAGE_BYTES)?,
                (false, is_main) => {
                    let fill = self.take::<1>()?;
                    match is_main {
                        // A hole; the pages come in order.
                        true if fill == [0] && at >= self.memory.end => {}
                        true => self.memory.put(at, &[fill[0]; PAGE_BYTES])?,
                        false => self.put(&fill)?,
                    }
                }
            }
        }
    }

    fn copy_footer(&mut self, section: [u8; 4]) -> io::Result<()> {
        let footer = self.take::<5>()?;
        if footer[0] != FOOTER || footer[1..] != section {
            return Err(invalid("a section's end"));
        }
        self.put(&footer)
    }

    fn copy(&mut self, bytes: usize) -> io::Result<()> {
        let mut piece = vec![0; bytes];
        self.from.read_exact(&mut piece)?;
        self.put(&piece)
    }

    fn copy_rest(&mut self) -> io::Result<()> {
        let mut piece = vec![0; 64 << 10];
        loop {
            let count = self.from.read(&mut piece)?;
            if count == 0 {
                return Ok(());
            }
            self.put(&piece[..count])?;
        }
    }

    fn name(&mut self) -> io::Result<Vec<u8>> {
        let [length] = self.take::<1>()?;
        let mut name = vec![0; length.into()];
        self.from.read_exact(&mut name)?;
        Ok(name)
    }

    fn put_name(&mut self, name: &[u8]) -> io::Result<()> {
        self.put(&[u8::try_from(name.len()).map_err(invalid)?])?;
        self.put(name)
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.state_bytes += bytes.len() as u64;
        if self.state_bytes > limits::VM_DEVICE_STATE_BYTES {
            return Err(invalid("its state is too large"));
        }
        self.state.write_all(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTION: [u8; 4] = [0, 0, 0, 2];
    const MAIN: &[u8] = b"\x03ram";
    const FIRMWARE: &[u8] = b"\x07pc.bios";
    const MEMORY: u64 = 4 * PAGE_BYTES as u64;

    fn word(at: u64, flags: u64) -> [u8; 8] {
        (at | flags).to_be_bytes()
    }

    /// The pieces of a stream, and whether each is in the state.
    fn pieces() -> Vec<(Vec<u8>, bool)> {
        let page = |fill: u8| vec![fill; PAGE_BYTES];
        let footer = [&[FOOTER], &SECTION[..]].concat();
        let block = |name: &[u8], bytes: u64| [name, &bytes.to_be_bytes(), &[0; 8]].concat();
        vec![
            ([&MAGIC[..], b"\x07\0\0\0\x03q35", &[START], &SECTION, &RAM].concat(), true),
            (word(MEMORY + PAGE_BYTES as u64, BLOCKS).to_vec(), true),
            (block(MAIN, MEMORY), true),
            (block(FIRMWARE, PAGE_BYTES as u64), true),
            ([&word(0, END_OF_PART)[..], &footer].concat(), true),
            ([&[PART][..], &SECTION].concat(), true),
            ([&word(0, PAGE)[..], MAIN, &page(1)].concat(), false),
            ([&word(4096, ZERO | SAME_BLOCK)[..], &[0]].concat(), false),
            ([&word(8192, PAGE | SAME_BLOCK)[..], &page(3)].concat(), false),
            ([&word(0, PAGE)[..], FIRMWARE, &page(9)].concat(), true),
            ([&word(0, END_OF_PART)[..], &footer].concat(), true),
            ([&[COMMAND, 0, 1, 0, 2][..], b"ab"].concat(), true),
            ([&[END][..], &SECTION, &word(0, END_OF_PART), &footer].concat(), true),
            ([&[FULL][..], b"devices \x01\x02 and all the rest"].concat(), true),
        ]
    }

    /// Memory and state of a stream.
    fn split_bytes(stream: &[u8]) -> io::Result<(Vec<u8>, Vec<u8>)> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("stream"), stream)?;
        let [memory, state] = ["memory", "state"].map(|name| File::create(path(name)));
        let mut written = File::options().read(true).append(true).open(path("stream"))?;
        io::Seek::seek(&mut written, io::SeekFrom::End(0))?;
        split(&written, MEMORY, &memory?, &state?)?;
        Ok((std::fs::read(path("memory"))?, std::fs::read(path("state"))?))
    }

    #[test]
    fn main_memory_is_separated() -> io::Result<()> {
        let all: Vec<u8> = pieces().into_iter().flat_map(|(piece, _)| piece).collect();
        let kept: Vec<u8> = pieces().into_iter().filter(|(_, kept)| *kept).flat_map(|(piece, _)| piece).collect();
        let (memory, state) = split_bytes(&all)?;
        assert_eq!(state, kept);
        let fills: Vec<u8> = memory.chunks(PAGE_BYTES).map(|page| page[0]).collect();
        assert_eq!((memory.len() as u64, fills), (MEMORY, vec![1, 0, 3, 0]));
        Ok(())
    }

    #[test]
    fn devices_follow_template() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let joined = |template: &[u8], devices: &[u8]| {
            let [old, new, state] = ["old", "new", "state"].map(|name| folder.path().join(name));
            std::fs::write(&old, template)?;
            std::fs::write(&new, devices)?;
            join(&File::open(&old)?, &File::open(&new)?, MEMORY, &File::create(&state)?)?;
            std::fs::read(&state)
        };
        let kept = pieces().into_iter().filter(|(_, kept)| *kept).map(|(piece, _)| piece);
        let template: Vec<u8> = kept.flatten().collect();
        let devices = [&MAGIC[..], &[FULL], b"newer"].concat();
        let before = template.len() - b"devices \x01\x02 and all the rest".len();
        assert_eq!(joined(&template, &devices)?, [&template[..before], b"newer"].concat());
        assert_eq!(head(&File::open(folder.path().join("old"))?, MEMORY)?, template[..before - 1]);
        let with_memory: Vec<u8> = pieces().into_iter().flat_map(|(piece, _)| piece).collect();
        assert!(joined(&with_memory, &devices).is_err());
        assert!(head(&File::open(folder.path().join("old"))?, MEMORY).is_err());
        for other in [&b""[..], &MAGIC, b"QEVM\0\0\0\x02\x04", &[&MAGIC[..], &[END]].concat()] {
            assert!(joined(&template, other).is_err(), "{other:?}");
        }
        Ok(())
    }

    #[test]
    fn foreign_streams_are_refused() {
        let changed = |at: usize, piece: Vec<u8>| {
            let mut pieces = pieces();
            pieces[at].0 = piece;
            split_bytes(&pieces.into_iter().flat_map(|(piece, _)| piece).collect::<Vec<u8>>())
        };
        let page = vec![0; PAGE_BYTES];
        let damages = [
            (0, b"QEVM\0\0\0\x02".to_vec()),
            (1, word(MEMORY, PAGE).to_vec()),
            (2, [MAIN, &(2 * MEMORY).to_be_bytes(), &[0; 8]].concat()),
            (3, [MAIN, &MEMORY.to_be_bytes(), &[0; 8]].concat()),
            (5, [&[PART][..], &[0, 0, 0, 3]].concat()),
            (6, [&word(MEMORY, PAGE)[..], MAIN, &page].concat()),
            (6, [&word(0, 0x100)[..], MAIN, &page].concat()),
            (10, [&word(0, END_OF_PART)[..], &[FOOTER, 1, 1, 1, 1]].concat()),
            (13, vec![9]),
            (13, Vec::new()),
        ];
        for (at, piece) in damages {
            assert!(changed(at, piece).is_err(), "piece {at}");
        }
        assert!(split_bytes(&[]).is_err());
    }
}
