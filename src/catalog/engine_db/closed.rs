//! Verifies a closed engine database without blocking a concurrent open.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::EngineDb;
use crate::catalog::error::CatalogError;
use crate::catalog::sqlite::{Db, Kind, Result};
use crate::core::durability::Durability;
use crate::core::limits;

/// Result of an inspection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inspected {
    /// Every page and every body is sound.
    Sound,
    /// The database was opened meanwhile: the reads may be inconsistent.
    InUse,
}

/// Identifies one state of a file.
type Stamp = Option<(u64, u64, i64, i64)>;

fn stamp(path: &Path) -> Stamp {
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()))
}

fn wal(path: &Path) -> PathBuf {
    let mut wal = path.as_os_str().to_owned();
    wal.push("-wal");
    wal.into()
}

impl EngineDb {
    /// Verifies every page and body of a closed database. Takes no lock and writes nothing to it: if the WAL is not
    /// empty, a copy in `scratch` is verified.
    ///
    /// # Errors
    /// `Corrupt`, `Missing`; read errors.
    pub fn inspect(path: &Path, scratch: &Path) -> Result<Inspected> {
        let log = wal(path);
        let before = (stamp(path), stamp(&log));
        let looked = match std::fs::metadata(&log) {
            Ok(meta) if meta.len() > 0 => in_a_copy(path, &log, scratch),
            Ok(_) | Err(_) => in_place(path),
        };
        match (stamp(path), stamp(&log)) == before {
            true => looked.map(|()| Inspected::Sound),
            false => Ok(Inspected::InUse),
        }
    }
}

fn in_place(path: &Path) -> Result<()> {
    let fail = |error| CatalogError::of_sqlite("look at", path, error);
    std::fs::symlink_metadata(path).map_err(|error| CatalogError::of_io("look at", path, error))?;
    let absolute = std::path::absolute(path).map_err(|error| CatalogError::of_io("look at", path, error))?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(uri(&absolute), flags).map_err(fail)?;
    check(Db::read_only(conn, path, Kind::Engine)?)
}

fn in_a_copy(path: &Path, log: &Path, scratch: &Path) -> Result<()> {
    let copy = scratch.join(Kind::Engine.file_name());
    for (from, to) in [(path, copy.clone()), (log, wal(&copy))] {
        std::fs::copy(from, &to).map_err(|error| CatalogError::of_io("copy", from, error))?;
    }
    // Report the original's path.
    let named = |error| match error {
        CatalogError::Corrupt { why, .. } => CatalogError::Corrupt { path: path.to_owned(), why },
        other => other,
    };
    check(Db::open(Kind::Engine, &copy, Durability::Process).map_err(named)?).map_err(named)
}

fn check(db: Db) -> Result<()> {
    EngineDb { db, totals: std::cell::Cell::new(None), most_bytes: limits::STATE_BYTES }.check()
}

/// The path as a URI that declares the file immutable: SQLite takes no lock and looks for no WAL.
fn uri(path: &Path) -> String {
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => uri.push(char::from(*byte)),
            other => uri.push_str(&format!("%{other:02x}")),
        }
    }
    uri + "?immutable=1"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Changes, Entry};

    fn entry(n: usize) -> Entry {
        Entry { key: format!("var/{n}"), meta_json: "{}".into(), body: vec![n as u8; 5000] }
    }

    #[test]
    fn closed_db_damage_is_detected() {
        let folder = tempfile::tempdir().expect("a folder");
        let odd = folder.path().join("a ?#%b");
        std::fs::create_dir(&odd).expect("made");
        let (path, scratch) = (odd.join("engine.db"), folder.path());
        assert!(EngineDb::inspect(&path, scratch).is_err(), "there is none");
        let db = EngineDb::open(&path, Durability::Process).expect("opened");
        db.apply(&Changes { puts: (0..50).map(entry).collect(), ..Changes::default() }).expect("stored");
        // Open, with everything in the WAL: as a killed worker leaves it.
        let copy = odd.join("killed.db");
        std::fs::copy(&path, &copy).expect("copied");
        std::fs::copy(wal(&path), wal(&copy)).expect("copied");
        assert_eq!(EngineDb::inspect(&copy, scratch).expect("sound"), Inspected::Sound);
        db.close().expect("closed");
        assert_eq!(EngineDb::inspect(&path, scratch).expect("sound"), Inspected::Sound);
        let mut bytes = std::fs::read(&path).expect("read");
        let at = bytes.windows(64).position(|window| window == [7; 64]).expect("a body");
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).expect("written");
        let error = EngineDb::inspect(&path, scratch).expect_err("a flipped bit is found");
        assert!(matches!(&error, CatalogError::Corrupt { path: named, .. } if *named == path), "{error}");
        // It can be opened: nothing was locked.
        EngineDb::open(&path, Durability::Process).map(drop).expect("opened");
    }
}
