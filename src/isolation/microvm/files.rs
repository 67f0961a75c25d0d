//! Access to the files of a kernel with this isolation.
//!
//! ```text
//!  read ────▶ pull, if a machine has the files ─────▶ mirror
//!  change ──▶ where is the truth? ┬ a machine ──────▶ its guest applies it; the next pull brings it into the mirror
//!                                 └ no machine ─────▶ mirror, kept from a start of the machine meanwhile
//! ```
//!
//! A file is written where the truth was as it began. If a machine started or ended since then, it does not appear.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, OwnedRwLockReadGuard};
use tokio::time::{Instant, sleep, timeout_at};

use super::DISK;
use super::changes::{MOVED, Upload, moved, suspended};
use super::handle::blocking;
use super::machine::{Machine, Machines, Phase};
use super::watches::{GuestWatch, MirrorWatch};
use crate::core::error::{Error, Result};
use crate::core::files::{FileChange, FileInfo, FilePath, Placement};
use crate::core::limits;
use crate::isolation::{FileAccess, FileListing, FileWatch, OpenFile, PendingFile};

/// Pause between two checks of whether an ending machine has ended.
const ENDING: Duration = Duration::from_millis(50);

/// Where a kernel's files are.
#[derive(Clone)]
pub(super) struct Place {
    machines: Machines,
    dir: PathBuf,
}

/// What has the newest files, and what keeps it so.
enum Truth {
    Guest(Arc<Machine>, OwnedMutexGuard<()>),
    Mirror(OwnedRwLockReadGuard<()>),
}

impl Place {
    #[cfg(test)]
    pub(super) fn of_machine(machine: &Arc<Machine>) -> Place {
        let machines = Machines::default();
        machines.add(machine);
        Place { machines, dir: machine.folder.dir.clone() }
    }

    /// The machine that has the files.
    pub(super) fn machine(&self) -> Option<Arc<Machine>> {
        self.machines.find(&self.dir)
    }

    async fn pull(&self) -> Result<()> {
        let machine = match self.machines.find(&self.dir) {
            Some(machine) => machine,
            None if self.check_mirror().is_ok() => return Ok(()),
            // It may be starting.
            None => {
                let until = Instant::now() + limits::VM_CALL;
                let _started = timeout_at(until, self.machines.start_lock(&self.dir).read_owned()).await;
                match self.machines.find(&self.dir) {
                    Some(machine) => machine,
                    None => return self.check_mirror(),
                }
            }
        };
        // One thread for all readers of a kernel, until its transfer has ended.
        let access = Arc::clone(&machine.access_lock).lock_owned().await;
        if self.machines.find(&self.dir).is_none() {
            return self.check_mirror();
        }
        blocking(move || {
            let _access = access;
            machine.pull()
        })
        .await
    }

    fn check_mirror(&self) -> Result<()> {
        if !self.dir.join(DISK).exists() {
            return Ok(());
        }
        Err(Error::unavailable("the kernel's files are on the disk of a virtual machine that has ended")
            .hint("start the kernel, for example with ryokan exec"))
    }

    /// Finds what a change has to change. Waits for a machine that starts or ends.
    async fn truth(&self) -> Result<Truth> {
        let until = Instant::now() + limits::VM_CALL;
        let late = |_| Error::busy("the kernel's virtual machine starts, ends, or transfers files").hint("try again");
        loop {
            let Some(machine) = self.machines.find(&self.dir) else {
                let lock = self.machines.start_lock(&self.dir).read_owned();
                let lock = timeout_at(until, lock).await.map_err(late)?;
                if self.machines.find(&self.dir).is_some() {
                    continue;
                }
                self.check_mirror()?;
                return Ok(Truth::Mirror(lock));
            };
            match machine.phase() {
                Phase::Open => {
                    let access = timeout_at(until, Arc::clone(&machine.access_lock).lock_owned());
                    return Ok(Truth::Guest(machine, access.await.map_err(late)?));
                }
                Phase::Stopping | Phase::Parked => return Err(suspended()),
                Phase::Over => timeout_at(until, sleep(ENDING)).await.map_err(late)?,
            }
        }
    }
}

pub(super) struct MirroredFiles {
    mirror: Rc<dyn FileAccess>,
    place: Place,
}

impl MirroredFiles {
    pub(super) fn new(mirror: Rc<dyn FileAccess>, machines: Machines, dir: PathBuf) -> MirroredFiles {
        MirroredFiles { mirror, place: Place { machines, dir } }
    }
}

#[async_trait::async_trait(?Send)]
impl FileAccess for MirroredFiles {
    async fn stat(&self, path: FilePath, follow: bool) -> Result<FileInfo> {
        self.place.pull().await?;
        self.mirror.stat(path, follow).await
    }

    async fn list(&self, path: FilePath) -> Result<Box<dyn FileListing>> {
        self.place.pull().await?;
        self.mirror.list(path).await
    }

    async fn open(&self, path: FilePath) -> Result<(Rc<dyn OpenFile>, FileInfo)> {
        self.place.pull().await?;
        self.mirror.open(path).await
    }

    async fn watch(&self, path: FilePath, is_recursive: bool) -> Result<Box<dyn FileWatch>> {
        let place = self.place.clone();
        match self.place.truth().await? {
            Truth::Guest(machine, access) => {
                Ok(Box::new(GuestWatch::begin(place, machine, access, path, is_recursive).await?))
            }
            Truth::Mirror(_lock) => Ok(Box::new(MirrorWatch::new(place, self.mirror.watch(path, is_recursive).await?))),
        }
    }

    async fn begin_write(&self, most_bytes: u64) -> Result<Box<dyn PendingFile>> {
        let place = self.place.clone();
        match self.place.truth().await? {
            Truth::Guest(machine, access) => {
                let asked = Arc::clone(&machine);
                blocking(move || {
                    let _access = access;
                    asked.check_changes()
                })
                .await?;
                let upload = Upload { number: machine.uploads.begin(), bytes: 0, most_bytes };
                Ok(Box::new(GuestFile { place, machine, upload, is_usable: true, is_placed: false }))
            }
            Truth::Mirror(_lock) => Ok(Box::new(MirrorFile { place, new: self.mirror.begin_write(most_bytes).await? })),
        }
    }

    async fn used_bytes(&self) -> Result<u64> {
        self.place.pull().await?;
        self.mirror.used_bytes().await
    }

    async fn change(&self, change: FileChange) -> Result<()> {
        loop {
            let (machine, access) = match self.place.truth().await? {
                Truth::Guest(machine, access) => (machine, access),
                Truth::Mirror(_lock) => return self.mirror.change(change).await,
            };
            let asked = change.clone();
            let changed = blocking(move || {
                let _access = access;
                machine.change(&asked)
            });
            match changed.await {
                // Its worker ended since it was found.
                Err(error) if error.reason == MOVED => {}
                done => return done,
            }
        }
    }
}

/// A file that is written into the mirror.
struct MirrorFile {
    place: Place,
    new: Box<dyn PendingFile>,
}

#[async_trait::async_trait(?Send)]
impl PendingFile for MirrorFile {
    async fn write(&mut self, data: Vec<u8>) -> Result<()> {
        self.new.write(data).await
    }

    async fn place(&mut self, place: Placement) -> Result<FileInfo> {
        match self.place.truth().await? {
            Truth::Mirror(_lock) => self.new.place(place).await,
            Truth::Guest(..) => Err(moved()),
        }
    }
}

/// A file that is written into a guest.
struct GuestFile {
    place: Place,
    machine: Arc<Machine>,
    upload: Upload,
    /// Whether it is not placed, and no call failed or was dropped.
    is_usable: bool,
    is_placed: bool,
}

impl GuestFile {
    fn take(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.is_usable, false) {
            true => Ok(()),
            false => Err(Error::conflict("this file is placed, or writing it has failed")),
        }
    }
}

#[async_trait::async_trait(?Send)]
impl PendingFile for GuestFile {
    async fn write(&mut self, data: Vec<u8>) -> Result<()> {
        self.take()?;
        let access = Arc::clone(&self.machine.access_lock).lock_owned().await;
        let (machine, mut upload) = (Arc::clone(&self.machine), self.upload);
        let append = move || {
            let _access = access;
            machine.append(&mut upload, &data).map(|()| upload)
        };
        self.upload = blocking(append).await?;
        self.is_usable = true;
        Ok(())
    }

    async fn place(&mut self, place: Placement) -> Result<FileInfo> {
        self.take()?;
        match self.place.truth().await? {
            Truth::Guest(machine, access) if Arc::ptr_eq(&machine, &self.machine) => {
                let upload = self.upload;
                let placed = blocking(move || {
                    let _access = access;
                    machine.place(upload, &place)
                });
                let info = placed.await?;
                self.is_placed = true;
                Ok(info)
            }
            Truth::Guest(..) | Truth::Mirror(_) => Err(moved()),
        }
    }
}

impl Drop for GuestFile {
    fn drop(&mut self) {
        let is_begun = self.upload.bytes > 0 || !self.is_usable;
        if self.is_placed || !is_begun {
            return;
        }
        self.machine.uploads.abandon(self.upload.number);
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let machine = Arc::clone(&self.machine);
        drop(runtime.spawn(async move {
            let access = Arc::clone(&machine.access_lock).lock_owned().await;
            // Otherwise the next request discards it.
            blocking(move || {
                let _access = access;
                machine.check_changes()
            })
            .await
        }));
    }
}
