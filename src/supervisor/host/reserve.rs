//! The disk reserve: a file deleted on a full disk, so that finished work can still be recorded.
//!
//! Owns only that file. Writers report a full disk; the reserve is recreated when there is room again.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use nix::fcntl::posix_fallocate;
use nix::sys::statvfs::statvfs;

use crate::core::limits;

/// The reserved part of the disk.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    held: Cell<bool>,
    spent: Cell<bool>,
}

impl Reserve {
    /// Keeps the reserve in that file, if there is room.
    pub fn new(path: PathBuf) -> Self {
        let whole = path
            .symlink_metadata()
            .is_ok_and(|found| found.is_file() && found.blocks() * 512 >= limits::DISK_RESERVE_BYTES);
        let reserve = Reserve { path, held: Cell::new(whole), spent: Cell::new(false) };
        reserve.keep();
        reserve
    }

    /// Frees the reserve; returns whether there was one.
    pub fn release(&self) -> bool {
        if !self.held.replace(false) {
            return false;
        }
        self.spent.set(true);
        match std::fs::remove_file(&self.path) {
            Ok(()) => {
                tracing::warn!(path = %self.path.display(), "the disk is full: its reserve was let go");
                true
            }
            Err(error) => {
                tracing::error!(path = %self.path.display(), %error, "the disk's reserve could not be let go");
                false
            }
        }
    }

    /// Bytes still free on the reserve's file system, if the host reports them.
    pub fn free_bytes(&self) -> Option<u64> {
        let found = self.path.parent().and_then(|folder| statvfs(folder).ok())?;
        Some(found.blocks_available().saturating_mul(found.fragment_size()))
    }

    /// Files that can still be created there; `None` if the file system does not count them.
    pub fn free_files(&self) -> Option<u64> {
        let found = self.path.parent().and_then(|folder| statvfs(folder).ok())?;
        (found.files() > 0).then(|| found.files_available())
    }

    /// Recreates the reserve, if the disk has room for several times its size.
    pub fn keep(&self) {
        if self.held.get() {
            return;
        }
        if self.free_bytes().unwrap_or(0) < limits::DISK_RESERVE_BYTES * ROOM {
            return;
        }
        match self.make() {
            Ok(()) => {
                self.held.set(true);
                self.spent.set(false);
            }
            Err(error) => {
                tracing::debug!(%error, "no reserve could be made");
                let _ = std::fs::remove_file(&self.path);
                // With this much free room, the failure has another cause than a full disk.
                self.spent.set(false);
            }
        }
    }

    /// Whether the reserve is freed and not recreated: the remaining room is for mandatory records.
    pub fn is_spent(&self) -> bool {
        self.spent.get()
    }

    fn make(&self) -> io::Result<()> {
        let file = File::options().create(true).truncate(true).write(true).mode(0o600).open(&self.path)?;
        Ok(posix_fallocate(&file, 0, limits::DISK_RESERVE_BYTES as i64)?)
    }
}

/// Free room required to recreate the reserve, as a multiple of its size.
const ROOM: u64 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_release_and_refill() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("reserve");
        let reserve = Reserve::new(path.clone());
        let held = || std::fs::metadata(&path).map_or(0, |found| found.blocks() * 512);
        assert!(held() >= limits::DISK_RESERVE_BYTES && !reserve.is_spent());
        assert!(reserve.release() && held() == 0 && reserve.is_spent());
        assert!(!reserve.release(), "there is only one");
        reserve.keep();
        assert!(held() >= limits::DISK_RESERVE_BYTES && !reserve.is_spent());
        // The next daemon finds the file.
        assert!(Reserve::new(path.clone()).release() && held() == 0);
    }
}
