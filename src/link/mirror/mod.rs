//! Makes one file tree equal to another, beneath a folder that untrusted code may own: lists, reads and writes without
//! following a link, and never outside it. Used on both sides of a virtual machine's channel.
//!
//! ```text
//!  guest: Tree ◀── machine channel ──▶ Source or Sink ─ transfer ─ Tree: the mirror on this host
//! ```
//!
//! Regular files, folders and links are mirrored, with mode and modification time. Hard links become separate files;
//! sockets, pipes, devices and attributes are left out.

mod tree;

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use self::tree::Tree;

/// Mode bits that are mirrored: never set-uid or set-gid.
const MODE_BITS: u32 = 0o1777;
/// Largest piece of a file in one read, bytes.
pub const PIECE_BYTES: usize = 1 << 20;
/// Most entries of a tree.
pub const MOST_ENTRIES: usize = 1_000_000;
/// Deepest folder.
const MOST_DEPTH: usize = 256;
/// Longest path and longest target of a link, bytes.
const MOST_PATH: usize = 4095;

/// Type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// A regular file.
    #[serde(rename = "f")]
    File,
    /// A folder.
    #[serde(rename = "d")]
    Folder,
    /// A symbolic link.
    #[serde(rename = "l")]
    Link,
}

/// An entry of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its path below the root, as [`to_text`] writes it.
    #[serde(rename = "p")]
    pub path: String,
    /// Its type.
    #[serde(rename = "k")]
    pub kind: Kind,
    /// Its permissions.
    #[serde(rename = "m")]
    pub mode: u32,
    /// A file's length, bytes.
    #[serde(rename = "s", default)]
    pub size: u64,
    /// Modification time, seconds and nanoseconds.
    #[serde(rename = "t")]
    pub modified: (i64, i64),
    /// Time of the last change, and number of the file.
    #[serde(rename = "c")]
    pub identity: (i64, i64, u64),
    /// A link's target.
    #[serde(rename = "l", default, skip_serializing_if = "String::is_empty")]
    pub target: String,
}

/// What changes whenever a file's content does.
pub type Stamp = (u64, (i64, i64), (i64, i64, u64));

impl Entry {
    /// What changes whenever the file's content does.
    pub fn stamp(&self) -> Stamp {
        (self.size, self.modified, self.identity)
    }
}

/// The stamps of a tree's files by path.
pub fn stamps(entries: &[Entry]) -> HashMap<String, Stamp> {
    entries.iter().filter(|entry| entry.kind == Kind::File).map(|e| (e.path.clone(), e.stamp())).collect()
}

/// Bytes of a path as text: everything but UTF-8 is escaped, so that nothing is lost.
pub fn to_text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for part in chunk.valid().split_inclusive('%') {
            text.push_str(part);
            if part.ends_with('%') {
                text.push_str("25");
            }
        }
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("%{byte:02x}")));
    }
    text
}

/// The inverse of [`to_text`]; `None` if the text is not of its form.
pub fn from_text(text: &str) -> Option<OsString> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        if *first != b'%' {
            bytes.push(*first);
            rest = after;
            continue;
        }
        let digits = std::str::from_utf8(after.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &after[2..];
    }
    (!bytes.contains(&0)).then(|| OsString::from_vec(bytes))
}

/// A checked path below a root: it has only ordinary names, and no other text means the same file.
///
/// # Errors
/// `InvalidInput`.
pub fn inside(text: &str) -> io::Result<PathBuf> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, format!("{text:?} is no path inside"));
    let path = from_text(text).ok_or_else(wrong)?;
    let bytes = path.as_bytes();
    let is_plain = bytes.split(|byte| *byte == b'/').all(|name| !matches!(name, b"" | b"." | b".."));
    if is_plain && bytes.len() <= MOST_PATH && to_text(bytes) == text { Ok(PathBuf::from(path)) } else { Err(wrong()) }
}

/// Where a tree comes from.
pub trait Source {
    /// Every entry, folders before their content.
    ///
    /// # Errors
    /// Those of reading.
    fn list(&mut self) -> io::Result<Vec<Entry>>;

    /// A piece of a file from an offset, at most [`PIECE_BYTES`]; empty at the end.
    ///
    /// # Errors
    /// `NotFound` if it is gone.
    fn read(&mut self, path: &str, offset: u64) -> io::Result<Vec<u8>>;
}

/// Where a tree goes.
pub trait Sink {
    /// Every entry, folders before their content.
    ///
    /// # Errors
    /// Those of reading.
    fn list(&mut self) -> io::Result<Vec<Entry>>;

    /// Removes an entry with everything in it.
    ///
    /// # Errors
    /// Those of removing.
    fn remove(&mut self, path: &str) -> io::Result<()>;

    /// Makes a folder that only its owner may use.
    ///
    /// # Errors
    /// Those of creating.
    fn folder(&mut self, path: &str) -> io::Result<()>;

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// Those of creating.
    fn link(&mut self, path: &str, target: &str) -> io::Result<()>;

    /// Writes a piece of a file; the first one, at offset 0, makes a new file.
    ///
    /// # Errors
    /// Those of writing.
    fn write(&mut self, path: &str, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Sets a file's length, or leaves a folder as it is, then sets permissions and modification time.
    ///
    /// # Errors
    /// Those of changing them.
    fn finish(&mut self, entry: &Entry) -> io::Result<()>;
}

/// Makes `sink` equal to `source`. Files for which `unchanged` holds, with the entry of the source and that of the
/// sink, are not read. Returns the source's entries.
///
/// # Errors
/// The first failure; the call may be repeated.
pub fn transfer(
    source: &mut dyn Source,
    sink: &mut dyn Sink,
    most_bytes: u64,
    unchanged: &dyn Fn(&Entry, &Entry) -> bool,
) -> io::Result<Vec<Entry>> {
    let want = source.list()?;
    check(&want, most_bytes)?;
    let have = sink.list()?;
    let wanted: HashMap<&str, &Entry> = want.iter().map(|entry| (&*entry.path, entry)).collect();
    let there: HashMap<&str, &Entry> = have.iter().map(|entry| (&*entry.path, entry)).collect();
    let mut touched: HashSet<&str> = HashSet::new();
    for entry in have.iter().rev() {
        if wanted.get(&*entry.path).is_none_or(|wanted| wanted.kind != entry.kind) {
            sink.remove(&entry.path)?;
            touched.insert(above(&entry.path));
        }
    }
    let mut lost = HashSet::new();
    for entry in &want {
        let before = there.get(&*entry.path).filter(|before| before.kind == entry.kind);
        match (entry.kind, before) {
            (Kind::Folder, Some(_)) => continue,
            (Kind::Folder, None) => sink.folder(&entry.path)?,
            (Kind::Link, Some(before)) if before.target == entry.target => continue,
            (Kind::Link, before) => {
                before.map_or(Ok(()), |_| sink.remove(&entry.path))?;
                sink.link(&entry.path, &entry.target)?;
            }
            (Kind::File, Some(before)) if unchanged(entry, before) => continue,
            (Kind::File, _) => {
                if !copy(source, sink, entry)? {
                    lost.insert(&*entry.path);
                }
            }
        }
        touched.insert(&entry.path);
        touched.insert(above(&entry.path));
    }
    for entry in want.iter().rev().filter(|entry| entry.kind != Kind::Link && !lost.contains(&*entry.path)) {
        let same = there
            .get(&*entry.path)
            .is_some_and(|before| (before.mode, before.modified) == (entry.mode, entry.modified));
        if !same || touched.contains(&*entry.path) {
            sink.finish(entry)?;
        }
    }
    Ok(want)
}

/// Copies a file's content; `false` if it is gone.
fn copy(source: &mut dyn Source, sink: &mut dyn Sink, entry: &Entry) -> io::Result<bool> {
    let mut offset = 0;
    loop {
        let mut piece = match source.read(&entry.path, offset) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            read => read?,
        };
        if piece.len() > PIECE_BYTES {
            return Err(invalid("a piece of a file is too large"));
        }
        // Beyond the listed size, no limit was checked.
        piece.truncate(usize::try_from(entry.size - offset).unwrap_or(PIECE_BYTES));
        let is_hole = offset > 0 && piece.iter().all(|byte| *byte == 0);
        if !is_hole {
            sink.write(&entry.path, offset, &piece)?;
        }
        offset += piece.len() as u64;
        // A file that grows meanwhile is read again later, for its stamp changed.
        if piece.is_empty() || offset >= entry.size {
            return Ok(true);
        }
    }
}

fn above(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(above, _)| above)
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Checks a list: limits, paths, and that folders come before their content.
fn check(entries: &[Entry], most_bytes: u64) -> io::Result<()> {
    if entries.len() > MOST_ENTRIES {
        return Err(invalid("the workspace has too many files"));
    }
    let (mut folders, mut seen, mut bytes) = (HashSet::from([""]), HashSet::new(), 0u64);
    for entry in entries {
        let path = inside(&entry.path)?;
        if path.components().count() > MOST_DEPTH || !seen.insert(&*entry.path) {
            return Err(invalid("the workspace's list is not a tree"));
        }
        if !folders.contains(above(&entry.path)) {
            return Err(invalid("the workspace's list has a file outside its folders"));
        }
        match entry.kind {
            Kind::Folder => drop(folders.insert(&entry.path)),
            Kind::File => bytes = bytes.saturating_add(entry.size),
            Kind::Link => {
                let target = from_text(&entry.target).ok_or_else(|| invalid("a link's target is invalid"))?;
                if target.is_empty() || target.len() > MOST_PATH {
                    return Err(invalid("a link's target is invalid"));
                }
            }
        }
    }
    if bytes > most_bytes {
        return Err(io::Error::new(
            io::ErrorKind::QuotaExceeded,
            format!("the files of the workspace have {bytes} bytes, more than its limit of {most_bytes}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    #[test]
    fn transfer_makes_trees_equal() -> io::Result<()> {
        let (from, to) = (tempfile::tempdir()?, tempfile::tempdir()?);
        fs::create_dir(from.path().join("d"))?;
        fs::write(from.path().join("d/f"), vec![7; PIECE_BYTES + 5])?;
        fs::write(from.path().join(OsStr::from_bytes(b"odd%\xff")), b"x")?;
        std::os::unix::fs::symlink("/etc/passwd", from.path().join("l"))?;
        fs::set_permissions(from.path().join("d"), fs::Permissions::from_mode(0o500))?;
        fs::create_dir(to.path().join("l"))?;
        fs::write(to.path().join("l/stale"), b"")?;
        let (mut source, mut sink) = (Tree::open(from.path(), true)?, Tree::open(to.path(), true)?);
        let want = transfer(&mut source, &mut sink, 10 << 20, &|_, _| false)?;
        let have = sink.list_all()?;
        let plain = |entries: &[Entry]| -> Vec<_> {
            let mut plain: Vec<_> = entries
                .iter()
                .map(|e| {
                    (e.path.clone(), e.kind, e.size, e.target.clone(), if e.kind == Kind::Link { 0 } else { e.mode })
                })
                .collect();
            plain.sort_by(|one, other| one.0.cmp(&other.0));
            plain
        };
        assert_eq!(plain(&want).len(), 4);
        assert_eq!(fs::read(to.path().join("d/f"))?.len(), PIECE_BYTES + 5);
        assert_eq!(fs::read_link(to.path().join("l"))?, Path::new("/etc/passwd"));
        assert_eq!(plain(&want), plain(&have));
        let (known, own) = (stamps(&want), stamps(&have));
        fs::write(from.path().join("d/f"), b"new")?;
        let same =
            |a: &Entry, b: &Entry| known.get(&a.path) == Some(&a.stamp()) && own.get(&b.path) == Some(&b.stamp());
        transfer(&mut source, &mut sink, 10 << 20, &same)?;
        assert_eq!(fs::read(to.path().join("d/f"))?, b"new");
        Ok(())
    }

    #[test]
    fn closed_folders_stay_closed() -> io::Result<()> {
        let (from, to) = (tempfile::tempdir()?, tempfile::tempdir()?);
        for root in [from.path(), to.path()] {
            fs::create_dir(root.join("d"))?;
            fs::write(root.join("d/f"), b"x")?;
            fs::set_permissions(root.join("d"), fs::Permissions::from_mode(0o100))?;
        }
        let (mut source, mut sink) = (Tree::open(from.path(), true)?, Tree::open(to.path(), true)?);
        let want = transfer(&mut source, &mut sink, 10, &|_, _| true)?;
        source.lock_again(&want)?;
        for root in [from.path(), to.path()] {
            let mode = fs::metadata(root.join("d"))?.permissions().mode();
            assert_eq!(mode & 0o777, 0o100);
            fs::set_permissions(root.join("d"), fs::Permissions::from_mode(0o700))?;
        }
        Ok(())
    }

    #[test]
    fn hostile_lists_are_refused() {
        let entry = |path: &str, kind| Entry {
            path: path.into(),
            kind,
            mode: 0o644,
            size: 1,
            modified: (0, 0),
            identity: (0, 0, 0),
            target: String::new(),
        };
        for bad in
            ["", "/etc/x", "../x", "a/../b", "a//b", "a/./b", ".", "%00", "a/", "%zz", "a/b", "%78", "%FF", "%+f"]
        {
            assert!(check(&[entry(bad, Kind::File)], 10).is_err(), "{bad}");
        }
        let folder = entry("a", Kind::Folder);
        for bad in ["a//b", "a/./b", "a/../b", "a/%62", "a%2fb"] {
            assert!(check(&[folder.clone(), entry(bad, Kind::File)], 10).is_err(), "{bad}");
        }
        assert!(check(&[entry("l", Kind::Link)], 10).is_err());
        assert!(check(&[entry("f", Kind::File), entry("f", Kind::File)], 10).is_err());
        assert!(check(&[entry("f", Kind::File)], 0).is_err());
        assert!(check(&[entry("d", Kind::Folder), entry("d/f", Kind::File)], 10).is_ok());
    }

    /// A source whose file is longer than its list says.
    struct Longer;

    impl Source for Longer {
        fn list(&mut self) -> io::Result<Vec<Entry>> {
            let names = ["empty", "short"].into_iter().zip([0, 3]);
            let entry = |(path, size): (&str, u64)| Entry {
                path: path.into(),
                kind: Kind::File,
                mode: 0o644,
                size,
                modified: (0, 0),
                identity: (0, 0, 0),
                target: String::new(),
            };
            Ok(names.map(entry).collect())
        }

        fn read(&mut self, _: &str, _: u64) -> io::Result<Vec<u8>> {
            Ok(vec![7; PIECE_BYTES])
        }
    }

    #[test]
    fn files_keep_listed_sizes() -> io::Result<()> {
        let to = tempfile::tempdir()?;
        transfer(&mut Longer, &mut Tree::open(to.path(), true)?, 3, &|_, _| false)?;
        assert_eq!((fs::read(to.path().join("empty"))?, fs::read(to.path().join("short"))?), (vec![], vec![7; 3]));
        Ok(())
    }

    #[test]
    fn links_are_never_followed() -> io::Result<()> {
        let (outside, root) = (tempfile::tempdir()?, tempfile::tempdir()?);
        fs::write(outside.path().join("secret"), b"x")?;
        std::os::unix::fs::symlink(outside.path(), root.path().join("d"))?;
        let mut tree = Tree::open(root.path(), true)?;
        assert!(Source::read(&mut tree, "d/secret", 0).is_err());
        assert!(tree.write("d/new", 0, b"x").is_err());
        assert!(tree.remove("d/secret").is_err());
        assert!(outside.path().join("secret").exists() && !outside.path().join("new").exists());
        Ok(())
    }

    #[test]
    fn permissions_behind_links_stay() -> io::Result<()> {
        let (outside, root) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let secret = outside.path().join("secret");
        fs::write(&secret, b"x")?;
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600))?;
        std::os::unix::fs::symlink(&secret, root.path().join("x"))?;
        let mut tree = Tree::open(root.path(), true)?;
        let listed = tree.list_all()?.remove(0);
        for kind in [Kind::File, Kind::Folder, Kind::Link] {
            assert!(tree.finish(&Entry { kind, mode: 0o777, ..listed.clone() }).is_err(), "{kind:?}");
        }
        assert_eq!(fs::metadata(&secret)?.permissions().mode() & 0o777, 0o600);
        Ok(())
    }
}
