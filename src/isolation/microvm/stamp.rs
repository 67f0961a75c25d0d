//! Recognises a file without reading it: a write or an exchange changes its stamp.
//!
//! A data directory that is copied to another disk has other inodes: there, contents are compared.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use nix::unistd::{Whence, lseek};

use serde::{Deserialize, Serialize};

/// A file at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    inode: u64,
    pub bytes: u64,
    changed_s: i64,
    changed_ns: i64,
}

impl Stamp {
    /// The stamp of the file with that name; no link is followed.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn of(path: &Path) -> std::io::Result<Stamp> {
        path.symlink_metadata().map(|found| Stamp::from(&found))
    }

    /// The stamp of an open file.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn of_file(file: &File) -> std::io::Result<Stamp> {
        file.metadata().map(|found| Stamp::from(&found))
    }

    /// Whether it is of another file with that size: a copy, or any other.
    pub(super) fn is_elsewhere(&self, was: &Stamp) -> bool {
        self.inode != was.inode && self.bytes == was.bytes
    }

    /// Whether it can be of a copy that was never written to.
    pub(super) fn is_copy(&self, was: &Stamp) -> bool {
        *self == Stamp { inode: self.inode, ..was.clone() } && self.inode != was.inode
    }
}

/// The digest of what a file holds, whatever of it are holes. Blocks.
///
/// # Errors
/// Those of reading.
pub(super) fn contents(file: &File) -> std::io::Result<String> {
    const PIECE: usize = 64 << 10;
    let (mut hasher, mut piece, zeros) = (blake3::Hasher::new(), vec![0; PIECE], vec![0; PIECE]);
    let (bytes, mut at) = (file.metadata()?.len(), 0u64);
    hasher.update(&bytes.to_le_bytes());
    while at < bytes {
        // Only data is read; the piece begins where it would without holes.
        at = match lseek(file, at.cast_signed(), Whence::SeekData) {
            Ok(data) => data.cast_unsigned() / PIECE as u64 * PIECE as u64,
            Err(nix::errno::Errno::ENXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let length = usize::try_from(bytes - at).unwrap_or(PIECE).min(PIECE);
        file.read_exact_at(&mut piece[..length], at)?;
        if piece[..length] != zeros[..length] {
            hasher.update(&at.to_le_bytes());
            hasher.update(&piece[..length]);
        }
        at += length as u64;
    }
    Ok(hasher.finalize().to_hex().to_string())
}

impl From<&Metadata> for Stamp {
    fn from(found: &Metadata) -> Stamp {
        // Not the time of its attributes: another name of the file changes that.
        let (changed_s, changed_ns) = (found.mtime(), found.mtime_nsec());
        Stamp { inode: found.ino(), bytes: found.len(), changed_s, changed_ns }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Replaces a file by a copy with its times, as `rsync -a` makes it.
    pub(in super::super) fn copied(path: &Path) -> std::io::Result<()> {
        let (was, copy) = (path.metadata()?.modified()?, path.with_extension("copy"));
        std::fs::copy(path, &copy)?;
        File::options().write(true).open(&copy)?.set_modified(was)?;
        std::fs::rename(copy, path)
    }

    #[test]
    fn contents_ignore_holes() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let made = |name: &str, is_whole: bool, last: &[u8]| {
            let file = File::options().read(true).write(true).create_new(true).open(folder.path().join(name))?;
            if is_whole {
                file.write_all_at(&vec![0; 1 << 20], 0)?;
            }
            file.set_len(1 << 20)?;
            file.write_all_at(b"first", 5)?;
            file.write_all_at(last, (1 << 20) - 4)?;
            contents(&file)
        };
        let sparse = made("sparse", false, b"last")?;
        assert_eq!(made("whole", true, b"last")?, sparse);
        assert_ne!(made("other", false, b"lost")?, sparse);
        let empty = File::options().read(true).write(true).create_new(true).open(folder.path().join("empty"))?;
        let none = contents(&empty)?;
        empty.set_len(1 << 20)?;
        assert_ne!(contents(&empty)?, none, "the size counts");
        Ok(())
    }
}
