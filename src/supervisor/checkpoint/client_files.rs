//! Files of a kernel as clients read and change them, beside the code inside.
//!
//! A change holds the file lock: no capture and no restore sees a part of it. It is preceded by a journal entry if the
//! journal has none since the kernel's checkpoint, so that an unchanged journal still means unchanged files.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::files::places;
use crate::core::error::{Error, Result};
use crate::core::files::{FileChange, FileError, FileInfo, FilePath, Placement, WhileHeld};
use crate::core::limits;
use crate::isolation::{FileAccess, FileListing, FileWatch, OpenFile, PendingFile};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::file_room::PendingBytes;

/// One client's access to a kernel's files.
pub struct ClientFiles {
    host: Rc<Host>,
    kernel: Rc<Kernel>,
    actor: Actor,
    held: WhileHeld,
    /// Whether the journal names a change of this client.
    is_noted: Cell<bool>,
}

/// An open file of a kernel.
pub struct ClientFile {
    /// The file.
    pub file: Rc<dyn OpenFile>,
    _place: OwnedSemaphorePermit,
}

/// A watched directory of a kernel.
pub struct ClientWatch {
    /// The watch.
    pub watch: Box<dyn FileWatch>,
    _places: [OwnedSemaphorePermit; 2],
}

/// A file that a client writes.
pub struct ClientWrite {
    files: Rc<ClientFiles>,
    /// `None` once it is placed.
    new: Option<Box<dyn PendingFile>>,
    /// The first failure, which every later call repeats: a client may send ahead.
    failed: Option<Error>,
    place: Placement,
    pending: Option<PendingBytes>,
    _place: OwnedSemaphorePermit,
}

impl ClientFiles {
    /// A client's access to a kernel's files.
    pub fn new(host: &Rc<Host>, kernel: &Rc<Kernel>, actor: Actor, held: WhileHeld) -> Rc<ClientFiles> {
        let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
        Rc::new(ClientFiles { host, kernel, actor, held, is_noted: Cell::new(false) })
    }

    fn access(&self) -> Result<Rc<dyn FileAccess>> {
        let owner = self.kernel.files();
        Ok(self.host.drivers.of(owner.spec().isolation)?.files(places(&self.host, owner.id)))
    }

    /// Refuses access while a transition changes the files, or while there are none.
    fn check_present(&self) -> Result<()> {
        for kernel in [self.kernel.files(), &self.kernel] {
            kernel.check_available()?;
            if kernel.interrupted().is_some() {
                // This request is refused, and starts the recovery.
                kernel.wake_sharers();
            }
            kernel.not_in_transition()?;
        }
        Ok(())
    }

    /// As [`Self::check_present`]; `None` during a transition whose end is awaited.
    fn present(&self) -> Option<Result<()>> {
        match self.check_present() {
            Err(_) if self.kernel.awaited_transition().is_some() => None,
            present => Some(present),
        }
    }

    /// Refuses paths that are in a mount of the host, and changes that would take a mount's directory away: what the
    /// code inside sees there is elsewhere.
    async fn check_mounts(&self, paths: &[(&FilePath, bool)]) -> Result<()> {
        for mount in self.kernel.mounts().await? {
            // Most mounts are not in the workspace.
            let Ok(mount) = FilePath::parse(mount.path.as_bytes()) else { continue };
            let hit = paths.iter().find(|(path, moves)| path.is_in(&mount) || *moves && mount.is_in(path));
            if let Some((path, _)) = hit {
                return Err(FileError::Mount.on(&path.shown()));
            }
        }
        Ok(())
    }

    async fn reading(&self, path: &FilePath) -> Result<Rc<dyn FileAccess>> {
        let until = Instant::now() + limits::CHECKPOINT_WAIT;
        loop {
            self.kernel.await_transitions(self.held, until).await?;
            self.check_present()?;
            self.check_mounts(&[(path, false)]).await?;
            // A transition that has begun meanwhile may change the mounts.
            if let Some(present) = self.present() {
                return present.and_then(|()| self.access());
            }
        }
    }

    /// The attributes of a file; with `follow`, of what a link leads to.
    ///
    /// # Errors
    /// A [`FileError`]; during a transition as [`WhileHeld`] says.
    pub async fn stat(&self, path: FilePath, follow: bool) -> Result<FileInfo> {
        self.reading(&path).await?.stat(path, follow).await
    }

    /// Opens a directory, to list its entries.
    ///
    /// # Errors
    /// As [`Self::stat`].
    pub async fn list(&self, path: FilePath) -> Result<Box<dyn FileListing>> {
        self.reading(&path).await?.list(path).await
    }

    /// Watches a directory, and with `is_recursive` those below it.
    ///
    /// # Errors
    /// As [`Self::stat`]; `busy` if there are too many watches, `unsupported` for a virtual machine of an earlier version.
    pub async fn watch(&self, path: FilePath, is_recursive: bool) -> Result<ClientWatch> {
        let of_kernel = self.kernel.watch_place()?;
        let of_host = Arc::clone(&self.host.file_watches).try_acquire_owned().map_err(|_| {
            Error::busy(format!("{} directories of kernels are watched already", limits::FILE_WATCHES_IN_ALL))
                .reason("watches")
                .hint("try again when one of the watches has ended")
        })?;
        let watch = self.reading(&path).await?.watch(path, is_recursive).await?;
        Ok(ClientWatch { watch, _places: [of_kernel, of_host] })
    }

    /// Opens a file.
    ///
    /// # Errors
    /// As [`Self::stat`]; `busy` if too many are open.
    pub async fn open(&self, path: FilePath) -> Result<(ClientFile, FileInfo)> {
        let place = self.kernel.file_place()?;
        let (file, info) = self.reading(&path).await?.open(path).await?;
        Ok((ClientFile { file, _place: place }, info))
    }

    /// Begins to write a file, which appears with [`ClientWrite::finish`].
    ///
    /// # Errors
    /// As [`Self::stat`]; `busy` (leased, too many open, disk full), `conflict` (version).
    pub async fn begin_write(self: &Rc<Self>, place: Placement, expected_version: u64) -> Result<ClientWrite> {
        if place.path.names().is_empty() {
            return Err(FileError::IsDirectory.on(&place.path.shown()));
        }
        let permit = self.kernel.file_place()?;
        let until = Instant::now() + limits::CHECKPOINT_WAIT;
        self.admit(&[(&place.path, false)], expected_version, until).await?;
        let access = self.access()?;
        let owner = self.kernel.files_owner();
        if owner.file_room().is_count_due() {
            self.count(&*access).await?;
        }
        let new = access.begin_write(owner.spec().limits.workspace_bytes).await?;
        let pending = Some(PendingBytes::new(owner));
        Ok(ClientWrite { files: Rc::clone(self), new: Some(new), failed: None, place, pending, _place: permit })
    }

    /// Counts the bytes of the workspace.
    async fn count(&self, access: &dyn FileAccess) -> Result<()> {
        let begun = Instant::now();
        let bytes = access.used_bytes().await?;
        self.kernel.files().file_room().count(begun, bytes);
        Ok(())
    }

    /// Waits until no transition has the files, and checks that this client may change these paths. Returns
    /// [`Kernel::terms`], which other ones replace once that may be untrue.
    async fn admit(&self, paths: &[(&FilePath, bool)], expected_version: u64, until: Instant) -> Result<u64> {
        loop {
            self.kernel.await_transitions(self.held, until).await?;
            let terms = self.kernel.terms();
            self.kernel.admit(&self.actor, expected_version).await?;
            if self.host.disk_is_full() {
                return Err(Host::full());
            }
            self.check_mounts(paths).await?;
            // A transition that has begun meanwhile may change version and mounts.
            if let Some(present) = self.present() {
                return present.map(|()| terms);
            }
        }
    }

    /// Applies a change.
    ///
    /// # Errors
    /// As [`Self::begin_write`].
    pub async fn change(self: &Rc<Self>, change: FileChange, expected_version: u64) -> Result<()> {
        let turn = self.turn(&change.paths(), expected_version).await?;
        let (files, text) = (Rc::clone(self), change.describe());
        self.exclusively(turn, text, async move { files.access()?.change(change).await }).await
    }

    /// Runs a change under the file lock. In its own task: the lock outlives a client that disconnects.
    async fn exclusively<T: 'static>(
        self: &Rc<Self>,
        turn: OwnedSemaphorePermit,
        text: String,
        change: impl Future<Output = Result<T>> + 'static,
    ) -> Result<T> {
        let files = Rc::clone(self);
        let changing = tokio::task::spawn_local(async move {
            let _turn = turn;
            files.note(&text).await?;
            // Also before: a measurement during the change sees a part of it.
            files.kernel.files().file_room().changed();
            let done = change.await;
            files.kernel.files().file_room().changed();
            files.kernel.follow_files();
            done
        });
        changing.await.map_err(|error| Error::internal(error.to_string()))?
    }

    /// The file lock, while no transition has the files and this client may change these paths. A caller dropped
    /// meanwhile changes nothing.
    async fn turn(&self, paths: &[(&FilePath, bool)], expected_version: u64) -> Result<OwnedSemaphorePermit> {
        let until = Instant::now() + limits::CHECKPOINT_WAIT;
        loop {
            let terms = self.admit(paths, expected_version, until).await?;
            let turn = self.kernel.lock_files_to_change(self.held, until).await?;
            // The kernel's task admits, and may wait for the lock itself: it is asked again without the lock.
            let is_same_version = expected_version == 0 || expected_version == self.kernel.view().version;
            let is_admitted = is_same_version && terms == self.kernel.terms();
            match self.present() {
                Some(Ok(())) if is_admitted => return Ok(turn),
                Some(Ok(())) | None => {}
                Some(Err(error)) => return Err(error),
            }
        }
    }

    async fn note(&self, text: &str) -> Result<()> {
        if self.is_noted.get() && self.kernel.records.changed_since_head().await? {
            return Ok(());
        }
        let version = self.kernel.records.mark(&self.actor, &format!("files: {text}"), self.host.now_ms()).await?;
        self.kernel.advance(version);
        self.is_noted.set(true);
        Ok(())
    }
}

impl ClientWrite {
    /// Appends to the file.
    ///
    /// # Errors
    /// `too_large`, those of the device; the file is then unusable.
    pub async fn write(&mut self, data: Vec<u8>) -> Result<()> {
        let new = match (&self.failed, &mut self.new) {
            (Some(error), _) => return Err(error.clone()),
            (None, Some(new)) => new,
            (None, None) => return Err(Error::conflict("this file is finished")),
        };
        let written = match reserve(&self.files, &mut self.pending, &self.place, data.len() as u64).await {
            Ok(()) => new.write(data).await,
            Err(error) => Err(error),
        };
        self.failed = written.as_ref().err().cloned();
        written
    }

    /// Makes the file appear, complete.
    ///
    /// # Errors
    /// A [`FileError`]; `busy` (leased, disk full), during a transition as [`WhileHeld`] says: another call may succeed
    /// after these. Nothing has appeared then.
    pub async fn finish(&mut self) -> Result<FileInfo> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let finished = || Error::conflict("this file is finished");
        if self.new.is_none() {
            return Err(finished());
        }
        // A refusal keeps the file for another attempt.
        let turn = self.files.turn(&[(&self.place.path, false)], 0).await?;
        let (mut new, place) = (self.new.take().ok_or_else(finished)?, self.place.clone());
        let text = format!("wrote {}", place.path.shown());
        let pending = self.pending.take();
        let placing = async move {
            let placed = new.place(place).await?;
            if let Some(pending) = pending {
                pending.place();
            }
            Ok(placed)
        };
        self.files.exclusively(turn, text, placing).await
    }
}

/// Takes room for more of a file. What was removed or replaced since the last count is counted only if it matters.
async fn reserve(files: &ClientFiles, pending: &mut Option<PendingBytes>, place: &Placement, bytes: u64) -> Result<()> {
    let (Some(pending), shown) = (pending, place.path.shown()) else { return Ok(()) };
    if pending.add(bytes, &shown).is_ok() {
        return Ok(());
    }
    files.count(&*files.access()?).await?;
    pending.add(bytes, &shown)
}
