//! One pack file: a sequence of entries and, once it is full, a table of them.
//!
//! ```text
//! header │ entry │ entry │ … │ table │ trailer
//!          ▲ appended, then synced      ▲ written when everything before it is synced
//! ```
//!
//! A pack without a trailer is being written, or its writer died: a scan finds its entries. Callers name an entry by
//! its [`Slot`]; what is returned was verified.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::encode::decode;
use super::error::StoreError;
use super::format::{self, ENTRY_HEADER, Entry, Key, List, PACK_HEADER, Slot, TRAILER};
use super::packed::Packed;
use super::{Result, limits};
use crate::sys::{fault, fs, random};

#[derive(Debug)]
pub(super) struct Pack {
    pub number: u32,
    path: PathBuf,
    file: File,
    /// `None` if the header is damaged: then content is verified by its digest alone.
    key: Option<Key>,
}

/// An entry as stored, verified.
#[derive(Debug)]
pub(super) struct Stored {
    pub entry: Entry,
    pub bytes: Vec<u8>,
}

/// Result of a scan.
#[derive(Debug)]
pub(super) struct Scan {
    pub slots: Vec<Slot>,
    /// The damaged ones.
    pub damaged: Vec<Slot>,
    /// End of the last entry.
    pub end: u64,
}

/// Path of a pack.
pub(super) fn path(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("{number:08x}.pack"))
}

/// The number in a pack's file name.
pub(super) fn number(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?.strip_suffix(".pack")?;
    (name.len() == 8).then(|| u32::from_str_radix(name, 16).ok())?
}

impl Pack {
    /// Creates a pack with its header. Durable only after [`Pack::sync`] and a sync of the directory.
    pub(super) fn create(dir: &Path, number: u32) -> Result<Pack> {
        let path = path(dir, number);
        let key = random::bytes();
        let create = || {
            fault::point("store.pack.create")?;
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all_at(&format::pack_header(number, &key), 0).inspect_err(|_| {
                // The first error is the one to report.
                let _ = std::fs::remove_file(&path);
            })?;
            Ok(file)
        };
        let file = create().map_err(|e| StoreError::io("create", &path, e))?;
        Ok(Pack { number, path, file, key: Some(key) })
    }

    /// Opens a pack.
    pub(super) fn open(dir: &Path, number: u32) -> Result<Pack> {
        let path = path(dir, number);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|e| StoreError::io("open", &path, e))?;
        let mut header = [0; PACK_HEADER];
        let read = match file.read_exact_at(&mut header, 0) {
            Ok(()) => format::read_pack_header(&header),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(error) => return Err(StoreError::io("read", &path, error)),
        };
        if let Some((_, version)) = read.filter(|(_, version)| *version != format::VERSION) {
            return Err(StoreError::UnknownFormat { path, found: version.to_string(), known: format::VERSION });
        }
        Ok(Pack { number, path, file, key: read.map(|(key, _)| key) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the header is intact.
    pub(super) fn is_headed(&self) -> bool {
        self.key.is_some()
    }

    pub(super) fn length(&self) -> Result<u64> {
        self.file.metadata().map(|meta| meta.len()).map_err(|e| StoreError::io("look at", &self.path, e))
    }

    /// Writes an entry at `at`, after all others; returns the position after it.
    pub(super) fn append(&self, at: u64, entry: &Entry, stored: &[u8]) -> Result<u64> {
        let bytes = entry.write(&self.key.unwrap_or_default(), stored);
        let write = fault::point("store.pack.write").and_then(|()| self.file.write_all_at(&bytes, at));
        write.map_err(|e| StoreError::io("write", &self.path, e))?;
        Ok(at + bytes.len() as u64)
    }

    /// Syncs the pack.
    pub(super) fn sync(&self) -> Result<()> {
        let sync = fault::point("store.pack.sync").and_then(|()| self.file.sync_data());
        sync.map_err(|e| StoreError::io("sync", &self.path, e))
    }

    /// Writes the table at `end`. All entries must be durable: a table is trusted.
    pub(super) fn seal(&self, end: u64, slots: &[Slot]) -> Result<()> {
        let seal = || {
            fault::point("store.pack.seal")?;
            self.file.set_len(end)?;
            self.file.write_all_at(&format::table(slots, end as u32), end)
        };
        seal().map_err(|e| StoreError::io("write", &self.path, e))
    }

    /// Truncates at `end`: removes the tail of a dead writer.
    pub(super) fn trim(&self, end: u64) -> Result<()> {
        if self.length()? == end {
            return Ok(());
        }
        let trim = fault::point("store.pack.trim").and_then(|()| self.file.set_len(end));
        trim.map_err(|e| StoreError::io("shorten", &self.path, e))
    }

    /// The table of a full pack; `None` without a valid one.
    pub(super) fn table(&self) -> Result<Option<Vec<Slot>>> {
        let length = self.length()?;
        let Some(trailer_at) = length.checked_sub(TRAILER as u64) else { return Ok(None) };
        let read =
            |room: &mut [u8], at| self.file.read_exact_at(room, at).map_err(|e| StoreError::io("read", &self.path, e));
        let mut trailer = [0; TRAILER];
        read(&mut trailer, trailer_at)?;
        let Some(place) = format::table_place(&trailer, length) else { return Ok(None) };
        let mut bytes = vec![0; (place.end - place.start) as usize];
        read(&mut bytes, place.start)?;
        let slots = format::read_table(&bytes);
        // A table of another pack can be here only if files were renamed.
        Ok(slots.filter(|slots| slots.iter().all(|slot| slot.pack == self.number)))
    }

    /// The entries of a full pack from its table, of any other from a scan.
    pub(super) fn slots(&self) -> Result<Vec<Slot>> {
        match self.table()? {
            Some(slots) => Ok(slots),
            None => self.scan().map(|scan| scan.slots),
        }
    }

    /// Scans the pack. Skips damage: only the entries in it are lost.
    pub(super) fn scan(&self) -> Result<Scan> {
        let bytes = std::fs::read(&self.path).map_err(|e| StoreError::io("read", &self.path, e))?;
        let mut found = Scan { slots: Vec::new(), damaged: Vec::new(), end: PACK_HEADER as u64 };
        let (mut at, mut doubtful_until) = (PACK_HEADER, 0);
        while at + ENTRY_HEADER <= bytes.len() {
            let entry = Entry::read(&bytes[at..]);
            let stored = |entry: &Entry| bytes.get(at + ENTRY_HEADER..)?.get(..entry.stored as usize);
            let Some((entry, stored)) = entry.and_then(|entry| Some((entry, stored(&entry)?))) else {
                at = next_magic(&bytes, at + 1);
                continue;
            };
            let slot = entry.slot(self.number, at as u32);
            let is_good = self.is_good(&entry, &bytes[at..at + ENTRY_HEADER], stored);
            if is_good || at >= doubtful_until {
                found.slots.push(slot);
                found.end = found.end.max(slot.end());
            }
            if is_good {
                at = slot.end() as usize;
                continue;
            }
            // The length may be what is damaged: a whole entry that begins inside it is valid.
            if at >= doubtful_until {
                found.damaged.push(slot);
                doubtful_until = slot.end() as usize;
            }
            at = next_magic(&bytes, at + 1);
        }
        Ok(found)
    }

    fn is_good(&self, entry: &Entry, header: &[u8], stored: &[u8]) -> bool {
        match &self.key {
            Some(key) => Entry::is_whole(key, header, stored),
            // A list has no digest of its own bytes, but no accident passes for one.
            None => is_content(entry, stored),
        }
    }

    /// Reads an entry as stored.
    pub(super) fn read_stored(&self, slot: &Slot) -> Result<Stored> {
        let damaged = || self.damaged(slot);
        let mut bytes = vec![0; ENTRY_HEADER + slot.stored as usize];
        match self.file.read_exact_at(&mut bytes, u64::from(slot.offset)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(damaged()),
            Err(error) => return Err(StoreError::io("read", &self.path, error)),
        }
        let entry = Entry::read(&bytes).ok_or_else(damaged)?;
        let right = entry.slot(slot.pack, slot.offset) == *slot;
        if !right || !self.is_good(&entry, &bytes[..ENTRY_HEADER], &bytes[ENTRY_HEADER..]) {
            return Err(damaged());
        }
        bytes.drain(..ENTRY_HEADER);
        Ok(Stored { entry, bytes })
    }

    /// Reads an entry's decoded bytes; data is verified against its digest.
    pub(super) fn read(&self, slot: &Slot) -> Result<Vec<u8>> {
        let Stored { entry, bytes } = self.read_stored(slot)?;
        content(&entry, &bytes).map(Cow::into_owned).ok_or_else(|| self.damaged(slot))
    }

    /// Reads a chunk as stored; it is verified as by [`Pack::read`].
    pub(super) fn read_packed(&self, slot: &Slot) -> Result<Packed> {
        let Stored { entry, bytes } = self.read_stored(slot)?;
        match is_content(&entry, &bytes) {
            true => Ok(Packed { encoding: entry.encoding, bytes }),
            false => Err(self.damaged(slot)),
        }
    }

    /// Reads the chunk list of an object.
    pub(super) fn read_list(&self, slot: &Slot) -> Result<List> {
        List::read(&self.read(slot)?).filter(|list| list.size == slot.size).ok_or_else(|| self.damaged(slot))
    }

    pub(super) fn damaged(&self, slot: &Slot) -> StoreError {
        StoreError::Damaged { digest: slot.digest, path: self.path.clone(), offset: u64::from(slot.offset) }
    }
}

/// The decoded bytes of an entry; `None` if they are not its content.
fn content<'a>(entry: &Entry, stored: &'a [u8]) -> Option<Cow<'a, [u8]>> {
    let is_right = |plain: &Cow<'_, [u8]>| match entry.kind.is_data() {
        true => format::digest_of(plain) == entry.digest,
        false => List::read(plain).is_some(),
    };
    decode(entry.encoding, entry.plain, stored).filter(is_right)
}

fn is_content(entry: &Entry, stored: &[u8]) -> bool {
    content(entry, stored).is_some()
}

fn next_magic(bytes: &[u8], from: usize) -> usize {
    let found = bytes[from..].windows(format::ENTRY_MAGIC.len()).position(|window| window == format::ENTRY_MAGIC);
    found.map_or(bytes.len(), |at| from + at)
}

/// Open packs; the least recently used one is closed first. Readers keep theirs open.
#[derive(Debug, Default)]
pub(super) struct Opened {
    packs: Vec<Arc<Pack>>,
}

impl Opened {
    pub(super) fn get(&mut self, dir: &Path, number: u32) -> Result<Arc<Pack>> {
        let pack = match self.packs.iter().position(|pack| pack.number == number) {
            Some(at) => self.packs.remove(at),
            None => Arc::new(Pack::open(dir, number)?),
        };
        self.add(Arc::clone(&pack));
        Ok(pack)
    }

    pub(super) fn add(&mut self, pack: Arc<Pack>) {
        if self.packs.len() >= limits::STORE_PACKS_OPEN {
            self.packs.remove(0);
        }
        self.packs.push(pack);
    }

    pub(super) fn forget(&mut self, number: u32) {
        self.packs.retain(|pack| pack.number != number);
    }
}

/// Makes the names of new packs durable.
pub(super) fn sync_names(dir: &Path) -> Result<()> {
    fault::point("store.pack.sync_dir").map_err(|e| StoreError::io("sync", dir, e))?;
    Ok(fs::sync_dir(dir)?)
}

/// Removes a pack whose entries were copied or are garbage.
pub(super) fn remove(dir: &Path, number: u32) -> Result<()> {
    let path = path(dir, number);
    match fault::point("store.pack.remove").and_then(|()| std::fs::remove_file(&path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", &path, error)),
        Ok(()) | Err(_) => Ok(()),
    }
}
