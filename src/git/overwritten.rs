//! Files that git does not track and would overwrite or remove when it changes a work tree: ignored ones, which no
//! capture holds.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::core::limits;

/// Compares two trees. The repository's own `.gitmodules` hides no submodule.
pub(super) const DIFF_TREE: [&str; 6] =
    ["diff-tree", "-r", "--no-renames", "--ignore-submodules=none", "--name-status", "-z"];

/// The paths that a change of trees adds, and those that it removes.
#[derive(Debug, Default)]
pub(super) struct Change {
    pub added: Vec<PathBuf>,
    pub removed: HashSet<PathBuf>,
    /// The paths with other content.
    pub modified: Vec<PathBuf>,
}

/// What a database of SQLite begins with.
const SQLITE: &[u8; 16] = b"SQLite format 3\0";

/// The files that SQLite has beside a database that is open, or was not closed.
const BESIDE: [&str; 3] = ["-wal", "-shm", "-journal"];

/// The database that a file belongs to, or may be itself, if a program has it open or did not close it.
fn open_database(root: &Path, path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let name = BESIDE.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
    let database = path.with_file_name(name);
    let there = |suffix: &str| fs::symlink_metadata(root.join(path.with_file_name(format!("{name}{suffix}")))).is_ok();
    BESIDE.iter().find(|suffix| there(suffix))?;
    if !fs::symlink_metadata(root.join(&database)).is_ok_and(|meta| meta.is_file()) {
        return None;
    }
    let mut begin = [0; SQLITE.len()];
    let read = fs::File::open(root.join(&database)).and_then(|mut file| file.read_exact(&mut begin));
    (read.is_ok() && begin == *SQLITE).then_some(database)
}

impl Change {
    /// Reads the output of [`DIFF_TREE`].
    pub fn read(reported: &[u8]) -> Change {
        let mut change = Change::default();
        let mut fields = reported.split(|byte| *byte == 0);
        while let (Some(status), Some(name)) = (fields.next(), fields.next()) {
            let path = PathBuf::from(OsStr::from_bytes(name));
            match status {
                b"A" => change.added.push(path),
                b"D" => drop(change.removed.insert(path)),
                // A file in the place of a repository, or the reverse: git removes the whole directory of the latter.
                b"T" => {
                    change.removed.insert(path.clone());
                    change.added.push(path);
                }
                _ => change.modified.push(path),
            }
        }
        change
    }

    /// Some of the databases in the work tree `root` that programs have open, and whose files the change would replace.
    /// Blocks.
    pub fn open_databases(&self, root: &Path) -> Vec<PathBuf> {
        let found = self.removed.iter().chain(&self.modified).filter_map(|path| open_database(root, path));
        let found: BTreeSet<PathBuf> = found.collect();
        found.into_iter().take(limits::IGNORED_NAMED).collect()
    }

    /// Some of the files in the work tree `root` that the change would destroy. Blocks.
    pub fn destroyed(&self, root: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for added in &self.added {
            self.in_the_way(root, added, &mut found);
            found.dedup();
            if found.len() >= limits::IGNORED_NAMED {
                break;
            }
        }
        found
    }

    /// Looks what is where an added file will be.
    fn in_the_way(&self, root: &Path, added: &Path, found: &mut Vec<PathBuf>) {
        let mut path = PathBuf::new();
        for part in added.components() {
            path.push(part);
            match fs::symlink_metadata(root.join(&path)) {
                Ok(meta) if meta.is_dir() => {}
                Ok(_) if self.removed.contains(&path) => return,
                Ok(_) => return found.push(path),
                Err(error) if error.kind() == ErrorKind::NotFound => return,
                // What cannot be read is not known to be captured.
                Err(_) => return found.push(path),
            }
        }
        self.in_directory(root, path, found);
    }

    /// Looks what is in a directory where a file will be.
    fn in_directory(&self, root: &Path, path: PathBuf, found: &mut Vec<PathBuf>) {
        let mut left = vec![path];
        while let Some(path) = left.pop() {
            let Ok(entries) = fs::read_dir(root.join(&path)) else { return found.push(path) };
            for entry in entries.flatten() {
                let inside = path.join(entry.file_name());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left.push(inside);
                } else if !self.removed.contains(&inside) {
                    return found.push(inside);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untracked_files_are_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path();
        for name in ["secret", "tracked", "both/tracked", "both/cache", "out/deep/cache", "free/cache"] {
            let path = root.join(name);
            fs::create_dir_all(path.parent().expect("below the root")).expect("made");
            fs::write(path, "").expect("written");
        }
        let change = Change::read(
            b"A\0secret\0A\0secret/x\0A\0tracked/x\0D\0tracked\0A\0both\0D\0both/tracked\0A\0out\0A\0free/new\0M\0other\0",
        );
        let found = change.destroyed(root);
        let expected: Vec<PathBuf> = ["secret", "both/cache", "out/deep/cache"].map(PathBuf::from).to_vec();
        assert_eq!(found, expected);
    }

    #[test]
    fn exchanged_repository_is_looked_into() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::create_dir(dir.path().join("sub")).expect("made");
        fs::write(dir.path().join("link"), "").expect("written");
        let change = Change::read(b"T\0sub\0T\0link\0");
        assert!(change.destroyed(dir.path()).is_empty(), "nothing is in the directory");
        fs::write(dir.path().join("sub/precious"), "").expect("written");
        assert_eq!(change.destroyed(dir.path()), [PathBuf::from("sub/precious")]);
    }
}
