//! Temporary files and whose they are: each open store has a directory of its own below `tmp/`, and holds a lock on it for as
//! long as it lives. A directory whose lock can be taken has a dead owner, whatever killed it; process ids, which are used
//! again, play no part.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{Flock, FlockArg};

use super::Result;
use super::error::StoreError;
use super::layout::Layout;
use crate::sys::fault;

/// The temporary directory of one open store.
#[derive(Debug)]
pub(super) struct Temps {
    dir: PathBuf,
    lock_path: PathBuf,
    count: AtomicU64,
    /// Held until the process ends or the store is dropped.
    _lock: Flock<File>,
}

impl Temps {
    /// Makes a directory for this process and removes those of dead ones.
    pub(super) fn open(layout: &Layout) -> Result<Temps> {
        let tmp = layout.tmp();
        sweep(tmp)?;
        loop {
            let mut random = [0u8; 8];
            getrandom::fill(&mut random)
                .map_err(|e| StoreError::io("name a file in", tmp, io::Error::other(e.to_string())))?;
            let name = format!("{:016x}", u64::from_le_bytes(random));
            let lock_path = tmp.join(format!("{name}.lock"));
            let file = OpenOptions::new().write(true).create_new(true).open(&lock_path);
            let file = file.map_err(|e| StoreError::io("create", &lock_path, e))?;
            // A sweep by another process may have come between: then the lock is on a file without a name.
            if let Some(lock) = try_lock(file)?.filter(|lock| is_named(lock, &lock_path)) {
                let dir = tmp.join(name);
                std::fs::create_dir(&dir).map_err(|e| StoreError::io("create", &dir, e))?;
                return Ok(Temps { dir, lock_path, count: AtomicU64::new(0), _lock: lock });
            }
        }
    }

    /// A new temporary file, for writing.
    pub(super) fn create(&self) -> Result<(PathBuf, File)> {
        let path = self.dir.join(self.count.fetch_add(1, Ordering::Relaxed).to_string());
        let create = || {
            fault::point("store.temp.create")?;
            let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            file.set_permissions(Permissions::from_mode(0o400)).inspect_err(|_| {
                // The first error is the one to tell.
                let _ = std::fs::remove_file(&path);
            })?;
            Ok(file)
        };
        create().map(|file| (path.clone(), file)).map_err(|e| StoreError::io("create", &path, e))
    }
}

impl Drop for Temps {
    fn drop(&mut self) {
        // What cannot be removed now, the next opening removes.
        let _ = std::fs::remove_dir_all(&self.dir);
        let _ = std::fs::remove_file(&self.lock_path);
    }
}

fn try_lock(file: File) -> Result<Option<Flock<File>>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(StoreError::io("lock a file in", Path::new("store/tmp"), errno.into())),
    }
}

fn is_named(lock: &File, path: &Path) -> bool {
    let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    matches!((lock.metadata(), std::fs::symlink_metadata(path)), (Ok(a), Ok(b)) if same(&a, &b))
}

/// Removes the directories of dead owners.
fn sweep(tmp: &Path) -> Result<()> {
    let listed = tmp.read_dir().and_then(Iterator::collect::<io::Result<Vec<_>>>);
    for entry in listed.map_err(|e| StoreError::io("list", tmp, e))? {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "lock") {
            let Ok(file) = OpenOptions::new().write(true).open(&path) else { continue };
            let Some(_lock) = try_lock(file)? else { continue };
            remove(&path.with_extension(""))?;
            remove(&path)?;
        } else if !path.with_extension("lock").exists() {
            // Its lock goes last when a directory goes, so nobody owns it.
            remove(&path)?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    let remove = || {
        fault::point("store.temp.sweep")?;
        if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }
    };
    match remove() {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path, error)),
        Ok(()) | Err(_) => Ok(()),
    }
}
