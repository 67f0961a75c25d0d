//! A spool of state entries that wait until the engine has accepted them. It is an unnamed file:
//! memory holds one entry at a time and nothing is left behind. Runs in init.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::catalog::CatalogError;
use crate::catalog::Entry;
use crate::core::limits;
use crate::link::types::StateChunk;

/// Spooled entries.
pub struct Spool {
    file: BufWriter<File>,
    folder: PathBuf,
    /// The incomplete entry.
    open: Option<String>,
    entries: usize,
    bytes: u64,
}

impl Spool {
    /// Creates a spool in a folder.
    ///
    /// # Errors
    /// The file system's errors.
    pub fn create(folder: &Path) -> io::Result<Spool> {
        let name = folder.join("engine.load");
        let _ = std::fs::remove_file(&name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&name)?;
        std::fs::remove_file(&name)?;
        Ok(Spool { file: BufWriter::new(file), folder: folder.to_owned(), open: None, entries: 0, bytes: 0 })
    }

    /// Adds one chunk.
    ///
    /// # Errors
    /// `InvalidInput` for chunks out of order or beyond the limits; the file system's errors.
    pub fn add(&mut self, chunk: &StateChunk) -> io::Result<()> {
        let wrong = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why.to_owned()));
        match &self.open {
            Some(key) if *key != chunk.key => return wrong("an entry between the chunks of another"),
            Some(_) => {}
            None => self.entries += 1,
        }
        self.bytes += chunk.data.len() as u64;
        if chunk.key.is_empty() || chunk.key.contains('\0') || std::str::from_utf8(&chunk.meta_json).is_err() {
            return wrong("an entry without a key or with meta data that is no text");
        }
        if self.entries > limits::STATE_ENTRIES || self.bytes > limits::STATE_BYTES {
            return wrong("more state than a kernel can have");
        }
        self.file.write_all(&[u8::from(chunk.more)])?;
        for part in [chunk.key.as_bytes(), &chunk.meta_json, &chunk.data] {
            self.file.write_all(&(part.len() as u32).to_le_bytes())?;
            self.file.write_all(part)?;
        }
        self.open = chunk.more.then(|| chunk.key.clone());
        Ok(())
    }

    /// The entries in arrival order.
    ///
    /// # Errors
    /// The file system's errors; an incomplete last entry.
    pub fn into_entries(self) -> Result<impl Iterator<Item = Result<Entry, CatalogError>>, CatalogError> {
        let Spool { file, folder, open, entries, .. } = self;
        let failed = move |error: io::Error| {
            CatalogError::File(crate::sys::fs::FsError { op: "read", path: folder.clone(), source: error })
        };
        if open.is_some() {
            return Err(failed(io::Error::from(io::ErrorKind::UnexpectedEof)));
        }
        let mut file = file.into_inner().map_err(|e| failed(e.into_error()))?;
        file.seek(SeekFrom::Start(0)).map_err(&failed)?;
        let mut file = BufReader::with_capacity(64 << 10, file);
        let mut left = entries;
        Ok(std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            Some(read_entry(&mut file).map_err(&failed))
        }))
    }
}

fn read_entry(file: &mut impl Read) -> io::Result<Entry> {
    let mut entry = Entry { key: String::new(), meta_json: String::new(), body: Vec::new() };
    loop {
        let mut more = [0];
        file.read_exact(&mut more)?;
        let (key, meta, mut data) = (read_part(file)?, read_part(file)?, read_part(file)?);
        if entry.key.is_empty() {
            let text = |bytes| String::from_utf8(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
            (entry.key, entry.meta_json) = (text(key)?, text(meta)?);
        }
        match entry.body.is_empty() {
            true => entry.body = data,
            false => entry.body.append(&mut data),
        }
        if more == [0] {
            return Ok(entry);
        }
    }
}

fn read_part(file: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    file.read_exact(&mut length)?;
    let mut part = vec![0; u32::from_le_bytes(length) as usize];
    file.read_exact(&mut part)?;
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Durability;
    use crate::catalog::{EngineDb, EngineInfo};

    fn chunk(key: &str, data: &[u8], more: bool) -> StateChunk {
        StateChunk { key: key.into(), meta_json: b"{}".to_vec(), data: data.to_vec(), more }
    }

    #[test]
    fn spool_entries_round_trip() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut spool = Spool::create(folder.path()).expect("a spool");
        for part in [chunk("a", b"1", false), chunk("b", b"2", true), chunk("b", b"3", false), chunk("c", b"", false)] {
            spool.add(&part).expect("added");
        }
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
        let entries: Vec<_> = spool.into_entries().expect("readable").map(|entry| entry.expect("readable")).collect();
        let seen: Vec<_> = entries.iter().map(|e| (e.key.as_str(), &e.body[..])).collect();
        assert_eq!(seen, [("a", &b"1"[..]), ("b", b"23"), ("c", b"")]);
    }

    #[test]
    fn chunks_out_of_order_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut spool = Spool::create(folder.path()).expect("a spool");
        spool.add(&chunk("a", b"1", true)).expect("added");
        assert!(spool.add(&chunk("b", b"1", false)).is_err());
        assert!(spool.add(&chunk("", b"1", false)).is_err());
        assert!(spool.into_entries().is_err());
    }

    #[test]
    fn broken_spool_keeps_old_state() {
        let folder = tempfile::tempdir().expect("a folder");
        let db = EngineDb::open(&folder.path().join("engine.db"), Durability::Process).expect("a database");
        let info = EngineInfo { name: "kaish".into(), version: "1".into(), format: 1 };
        let old = Entry { key: "var/x".into(), meta_json: "{}".into(), body: b"old".to_vec() };
        db.replace_all(&info, [Ok(old)], &[]).expect("stored");
        let mut spool = Spool::create(folder.path()).expect("a spool");
        spool.add(&chunk("var/x", b"new", false)).expect("added");
        spool.add(&chunk("var/y", b"new", false)).expect("added");
        // The second entry is lost.
        spool.entries += 1;
        assert!(db.replace_all(&info, spool.into_entries().expect("complete"), &[]).is_err());
        assert_eq!(db.entry("var/x").expect("readable").expect("there").body, b"old");
    }
}
