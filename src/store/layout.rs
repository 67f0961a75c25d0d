//! Files of the store: format 2.
//!
//! ```text
//! store/format              "2\n"; written last, when all of the below is there
//! store/lock                locked while the store is open
//! store/packs/0000002a.pack entries (pack)
//! store/index/*.index       where entries of full packs are (segment); made again if it is lost
//! store/dropped             entries that garbage collection dropped without removing their pack
//! ```

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::fcntl::{Flock, FlockArg};

use super::error::StoreError;
use super::{Result, limits};
use crate::sys::fs;

const FORMAT: u32 = 2;
const DIR_MODE: u32 = 0o700;

#[derive(Debug)]
pub(super) struct Layout {
    pub packs: PathBuf,
    pub index: PathBuf,
    pub dropped: PathBuf,
    /// Held until the store is dropped.
    _lock: Flock<File>,
}

impl Layout {
    /// Opens the directory of a store, or creates it. Completes an interrupted creation.
    pub(super) fn open(dir: &Path) -> Result<Layout> {
        let format = dir.join("format");
        let found = match std::fs::read_to_string(&format) {
            Ok(found) => Some(found.trim().to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(StoreError::io("read", &format, error)),
        };
        let is_present = found.as_deref() == Some(&FORMAT.to_string());
        if let Some(found) = found.filter(|_| !is_present) {
            let found = found.chars().take(40).collect();
            return Err(StoreError::UnknownFormat { path: format, found, known: FORMAT });
        }
        if !is_present {
            fs::create_dir_durable(dir, DIR_MODE, "store.layout.dir")?;
        }
        let lock = lock(&dir.join("lock"))?;
        let layout =
            Layout { packs: dir.join("packs"), index: dir.join("index"), dropped: dir.join("dropped"), _lock: lock };
        if !is_present {
            layout.create(&format)?;
        }
        fs::sweep_temps(dir)?;
        fs::sweep_temps(&layout.index)?;
        Ok(layout)
    }

    fn create(&self, format: &Path) -> Result<()> {
        for dir in [&self.packs, &self.index] {
            fs::create_dir_durable(dir, DIR_MODE, "store.part.dir")?;
        }
        fs::replace(format, format!("{FORMAT}\n").as_bytes(), 0o600, "store.format.write")?;
        Ok(())
    }
}

/// Locks the store. A child that a killed owner had just forked may hold the lock for a moment.
fn lock(path: &Path) -> Result<Flock<File>> {
    let late = Instant::now() + limits::STORE_LOCK_WAIT;
    loop {
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
        let file = file.map_err(|e| StoreError::io("open", path, e))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) if Instant::now() < late => {
                std::thread::sleep(limits::STORE_LOCK_WAIT / 50);
            }
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => return Err(StoreError::InUse { path: path.to_owned() }),
            Err((_, errno)) => return Err(StoreError::io("lock", path, errno.into())),
        }
    }
}
