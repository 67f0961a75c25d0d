//! A directory of the host: captured as a tree, restored beside itself, and switched by one rename.
//!
//! Files of an operation are in `.NAME.ryokan` beside the directory, on its file system. There, `part` is an incomplete
//! checkout; `new` is a complete one before the switch, and the former directory after it, and never there in part: it is
//! removed under the name `gone`.

use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use async_trait::async_trait;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::{DataSource, other_content, tree_is_whole};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::cost::Driver;
use crate::core::freeze::{Captured, DirectoryPart};
use crate::core::limits;
use crate::store::Store;
use crate::supervisor::freeze::objects::blocking;
use crate::supervisor::freeze::storage::kernel_version;
use crate::supervisor::host::Host;
use crate::sys::fault;
use crate::sys::fs::{remove_tree, sync_dir};
use crate::workspace::{self, DriverKind, Durability, NotCaptured, Tracker, TreeId, WorkspaceError, WorkspacePaths};

/// The revision of every directory: a change is an error of its own.
const REVISION: &str = "directory";

/// The places of one directory.
#[derive(Debug, Clone)]
struct Places {
    path: PathBuf,
    /// The folder beside it.
    beside: PathBuf,
    /// The index that spares reading unchanged files.
    index: PathBuf,
}

/// The source.
pub(super) struct DirectorySource {
    host: Rc<Host>,
    places: Places,
    /// What the present freeze saw first.
    seen: Option<DirectoryPart>,
    /// Follows the directory during a freeze.
    tracker: Option<Tracker>,
    driver: DriverKind,
    is_switched: bool,
    kept: Option<PathBuf>,
}

fn io<'a>(what: &'a str, path: &'a Path) -> impl Fn(std::io::Error) -> Error + 'a {
    move |error| Error::unavailable(format!("cannot {what} {}: {error}", path.display()))
}

/// The index that spares reading unchanged files of a directory again.
pub(super) fn index_of(host: &Host, path: &Path) -> PathBuf {
    let digest: String = blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex().chars().take(32).collect();
    host.environment.data.join("groups").join(format!("{digest}.index"))
}

/// Checks that a directory can be switched: its file system exchanges directories, and its parent admits it. Blocks.
///
/// # Errors
/// `unsupported`, `refused`, `unavailable`.
pub(in crate::supervisor::freeze) fn check(host: &Host, path: &Path) -> Result<()> {
    let places = Places::new(host, path.to_owned());
    let (Some(parent), true) = (path.parent(), path.is_dir()) else {
        return Err(Error::refused(format!("{} is not a directory", path.display())).reason("not_a_directory"));
    };
    let device = |path: &Path| std::fs::metadata(path).map(|meta| meta.dev()).map_err(io("look at", path));
    if device(parent)? != device(path)? {
        return Err(Error::unsupported(format!("{} is a mount point, which cannot be renamed", path.display()))
            .reason("mount_point")
            .hint("give a directory in it"));
    }
    if std::fs::symlink_metadata(&places.beside).is_ok() {
        return Err(Error::refused(format!("{} exists already", places.beside.display()))
            .reason("foreign_folder")
            .hint("ryokan needs this name: move it away"));
    }
    places.make()?;
    let (one, other) = (places.beside.join("one"), places.beside.join("other"));
    let tried = std::fs::create_dir(&one).and_then(|()| std::fs::create_dir(&other));
    let exchanged = tried.and_then(|()| Ok(renameat2(AT_FDCWD, &one, AT_FDCWD, &other, RenameFlags::RENAME_EXCHANGE)?));
    places.discard();
    exchanged.map_err(|error| {
        Error::unsupported(format!("the file system of {} cannot exchange two directories: {error}", path.display()))
            .reason("rename_exchange")
    })
}

/// Removes what is remembered of a directory that is no member any more.
pub(in crate::supervisor::freeze) fn forget(host: &Host, path: &Path) {
    // It is an optimisation, and may not exist.
    let _ = std::fs::remove_file(index_of(host, path));
}

impl Places {
    fn new(host: &Host, path: PathBuf) -> Places {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let beside = path.with_file_name(format!(".{name}.ryokan"));
        Places { beside, index: index_of(host, &path), path }
    }

    fn new_copy(&self) -> PathBuf {
        self.beside.join("new")
    }

    /// Makes the folder beside the directory, or checks that it is our own.
    fn make(&self) -> Result<()> {
        let beside = &self.beside;
        match std::fs::DirBuilder::new().mode(0o700).create(beside) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                let meta = std::fs::symlink_metadata(beside).map_err(io("look at", beside))?;
                let is_private = meta.uid() == nix::unistd::geteuid().as_raw() && meta.mode() & 0o077 == 0;
                if meta.is_dir() && is_private {
                    return Ok(());
                }
                Err(Error::refused(format!("{} is not a folder of ryokan", beside.display()))
                    .reason("foreign_folder")
                    .hint("move it away"))
            }
            made => made.map_err(io("make", beside)),
        }
    }

    /// Removes the folder beside the directory.
    fn discard(&self) {
        // What stays is removed by the next operation.
        if self.make().is_ok() && self.remove_new().is_ok() {
            let _ = remove_tree(&self.beside);
        }
    }

    /// Removes `new`, of which no part may be taken for the former directory after a crash.
    fn remove_new(&self) -> Result<()> {
        let (new, gone) = (self.new_copy(), self.beside.join("gone"));
        remove_old(&gone)?;
        match std::fs::rename(&new, &gone) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed.map_err(io("rename", &new))?,
        }
        sync_dir(&self.beside).map_err(|error| Error::unavailable(error.to_string()))?;
        fault::point("source.directory.discard").map_err(io("remove", &new))?;
        remove_old(&gone)
    }

    fn workspace(&self, of: &Path, index: PathBuf) -> WorkspacePaths {
        WorkspacePaths { workspace: of.to_owned(), staging: self.beside.join("staging"), index }
    }

    /// The tree of the present directory, without a change meanwhile. `tracker`: follows it already, or from now on.
    fn present(&self, store: &Store, tracker: &mut Option<Tracker>) -> Result<DirectoryPart> {
        self.tree(store, &self.path, self.index.clone(), tracker)
    }

    /// Stores what the directory holds now.
    fn ahead(&self, store: &Store, tracker: &mut Option<Tracker>) -> Result<()> {
        if !self.path.is_dir() {
            return Ok(());
        }
        self.make()?;
        let followed = tracker.insert(Tracker::open(self.workspace(&self.path, self.index.clone()))?);
        Ok(followed.prepare(store).map(drop)?)
    }

    /// The tree in the folder beside; `None`: there is none.
    fn beside_tree(&self, store: &Store) -> Result<Option<TreeId>> {
        let part = self.tree(store, &self.new_copy(), self.beside.join("new.index"), &mut None)?;
        Ok(part.tree.map(TreeId))
    }

    fn tree(&self, store: &Store, path: &Path, index: PathBuf, tracker: &mut Option<Tracker>) -> Result<DirectoryPart> {
        let meta = match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(DirectoryPart::default()),
            meta => meta.map_err(io("look at", path))?,
        };
        if !meta.is_dir() {
            return Err(Error::refused(format!("{} is not a directory", path.display())).reason("not_a_directory"));
        }
        self.make()?;
        let tracker = match tracker {
            // An exchange puts another directory here.
            Some(followed) if followed.follows(&meta) => followed,
            _ => tracker.insert(Tracker::open(self.workspace(path, index))?),
        };
        let mut last = None;
        for attempt in 0..limits::DIRECTORY_ATTEMPTS {
            if attempt > 0 && last.is_none() {
                std::thread::sleep(limits::DIRECTORY_PAUSE);
            }
            match tracker.capture(store) {
                Ok(captured) if last == Some(captured.tree) => {
                    refuse_missing(path, &captured.not_captured)?;
                    if let Err(error) = tracker.save() {
                        tracing::warn!(%error, "the index of a directory could not be saved");
                    }
                    let (tree, entries) = (Some(captured.tree.0), captured.entries);
                    return Ok(DirectoryPart { tree, entries, uid: meta.uid(), gid: meta.gid() });
                }
                // The same again shows that nothing changed meanwhile.
                Ok(captured) => last = Some(captured.tree),
                Err(WorkspaceError::Changing { .. }) => last = None,
                Err(error) => return Err(error.into()),
            }
        }
        Err(changed(path, "is written while it is captured"))
    }

    /// Writes a tree into `new`, complete and durable.
    fn checkout(&self, store: &Store, part: &DirectoryPart) -> Result<()> {
        let Some(tree) = part.tree else { return Ok(()) };
        self.make()?;
        let (incomplete, new) = (self.beside.join("part"), self.new_copy());
        remove_old(&incomplete)?;
        self.remove_new()?;
        std::fs::create_dir(&incomplete).map_err(io("make", &incomplete))?;
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&incomplete, Some(part.uid), Some(part.gid)).map_err(io("change", &incomplete))?;
        }
        let paths = self.workspace(&incomplete, self.beside.join("part.index"));
        let (tracker, restored) = workspace::checkout(TreeId(tree), paths, store, Durability::Power)?;
        if tracker.base() != Some(TreeId(tree)) {
            let names: Vec<String> = restored.left.iter().take(5).map(|path| path.display().to_string()).collect();
            return Err(Error::refused(format!(
                "the copy of {} is not exact: {}",
                self.path.display(),
                names.join(", ")
            ))
            .reason("inexact_copy")
            .hint("only root can restore files of other owners"));
        }
        std::fs::rename(&incomplete, &new).map_err(io("rename", &incomplete))?;
        sync_dir(&self.beside).map_err(|error| Error::unavailable(error.to_string()))
    }

    /// Puts `new` in the place of the directory, which becomes `new`. `is_there`: whether each exists.
    fn exchange(&self, directory_is_there: bool, new_is_there: bool) -> Result<()> {
        let (path, new) = (&self.path, &self.new_copy());
        let [time, new_time] =
            [path, new].map(|place| std::fs::symlink_metadata(place).and_then(|meta| meta.modified()));
        let renamed = match (directory_is_there, new_is_there) {
            (true, true) => renameat2(AT_FDCWD, new, AT_FDCWD, path, RenameFlags::RENAME_EXCHANGE),
            (false, true) => renameat2(AT_FDCWD, new, AT_FDCWD, path, RenameFlags::RENAME_NOREPLACE),
            (true, false) => renameat2(AT_FDCWD, path, AT_FDCWD, new, RenameFlags::RENAME_NOREPLACE),
            (false, false) => Ok(()),
        };
        renamed.map_err(|error| io("exchange", path)(error.into()))?;
        // XFS changes the time of a directory that gets another parent; the time is a part of the tree.
        for (place, time) in [(new, time), (path, new_time)] {
            if let Ok(time) = time {
                set_time(place, time).map_err(io("set the time of", place))?;
            }
        }
        for folder in [path.parent().unwrap_or(path), &self.beside] {
            sync_dir(folder).map_err(|error| Error::unavailable(error.to_string()))?;
        }
        Ok(())
    }

    /// Makes the prepared copy the active one; an error may come after the change.
    fn switch(&self, store: &Store, target: &DirectoryPart, safety: &DirectoryPart) -> Result<()> {
        let injected = |error: std::io::Error| Error::unavailable(error.to_string());
        if self.present(store, &mut None)?.tree != safety.tree {
            return Err(changed(&self.path, "was changed during the restore"));
        }
        fault::point("source.directory.switch").map_err(injected)?;
        self.exchange(safety.tree.is_some(), target.tree.is_some())?;
        fault::point("source.directory.switched").map_err(injected)?;
        // Written between the comparison and the exchange.
        if safety.tree.is_some() && self.beside_tree(store)?.map(|tree| tree.0) != safety.tree {
            return Err(changed(&self.path, "was changed during the restore"));
        }
        Ok(())
    }

    /// Brings the directory back; returns where foreign content was moved.
    fn revert(
        &self,
        store: &Store,
        safety: &DirectoryPart,
        target: &DirectoryPart,
        at_ms: i64,
    ) -> Result<Option<PathBuf>> {
        let present = self.present(store, &mut None)?.tree;
        if present == safety.tree {
            return Ok(None);
        }
        let new = self.beside_tree(store)?.map(|tree| tree.0);
        match new {
            // Not exchanged: another program changed the directory itself, and that stays.
            Some(_) if new == target.tree && present.is_some() => return Ok(None),
            // The former directory, with what others wrote in it since.
            Some(_) => self.exchange(present.is_some(), true)?,
            None => {
                self.checkout(store, safety)?;
                self.exchange(present.is_some(), safety.tree.is_some())?;
            }
        }
        if present.is_none() || present == target.tree {
            return Ok(None);
        }
        let name = self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let kept = self.path.with_file_name(format!("{name}.kept-{at_ms}"));
        std::fs::rename(self.new_copy(), &kept).map_err(io("keep", &kept))?;
        sync_dir(kept.parent().unwrap_or(&kept)).map_err(|error| Error::unavailable(error.to_string()))?;
        Ok(Some(kept))
    }
}

fn remove_old(path: &Path) -> Result<()> {
    match remove_tree(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io("remove", path)(error)),
        _ => Ok(()),
    }
}

fn set_time(directory: &Path, time: std::time::SystemTime) -> std::io::Result<()> {
    let mut options = std::fs::File::options();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY).open(directory)?.set_modified(time)
}

fn changed(path: &Path, how: &str) -> Error {
    Error::new(ErrorCode::Conflict, format!("{} {how}", path.display()))
        .reason("directory_changed")
        .hint("stop the programs that write in it, then try again")
}

pub(super) fn refuse_missing(path: &Path, missing: &[NotCaptured]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<String> =
        missing.iter().take(5).map(|one| format!("{} ({})", one.path.display(), one.reason)).collect();
    Err(Error::refused(format!("{} holds what cannot be captured: {}", path.display(), names.join(", ")))
        .reason("not_captured")
        .hint("move it out of the directory"))
}

impl Drop for DirectorySource {
    fn drop(&mut self) {
        // The operation failed before it suspended the directory. An unfinished restore needs the former directory.
        if self.tracker.take().is_some() && !self.places.new_copy().exists() {
            self.places.discard();
        }
    }
}

fn part_of(captured: &Captured) -> Result<DirectoryPart> {
    match captured {
        Captured::Directory { part, .. } => Ok(*part),
        _ => Err(other_content()),
    }
}

impl DirectorySource {
    /// The directory.
    pub fn new(host: Rc<Host>, path: PathBuf) -> DirectorySource {
        let places = Places::new(&host, path);
        let (tracker, driver) = (None, DriverKind::Tracked);
        DirectorySource { host, places, seen: None, tracker, driver, is_switched: false, kept: None }
    }

    async fn on<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Places, &Store) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let places = self.places.clone();
        self.host.store.run_beside(move |store| Ok(work(&places, store))).await?
    }

    async fn look(&mut self, any: bool) -> Result<DirectoryPart> {
        let part = self.following(|places, store, tracker| places.present(store, tracker)).await?;
        match part.tree.is_none() && !any {
            true => Err(Error::not_found(format!("there is no {}", self.places.path.display()))),
            false => Ok(part),
        }
    }

    /// The tree, which is the same from the first look of a freeze to the last.
    async fn look_again(&mut self, any: bool) -> Result<DirectoryPart> {
        let part = self.look(any).await?;
        match self.seen.replace(part) {
            Some(before) if before.tree != part.tree => {
                Err(changed(&self.places.path, "was changed during the freeze"))
            }
            Some(_) | None => Ok(part),
        }
    }

    /// As [`Self::on`], with the tracker.
    async fn following<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Places, &Store, &mut Option<Tracker>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut tracker = self.tracker.take();
        let (tracker, done) = self
            .on(move |places, store| {
                let done = work(places, store, &mut tracker);
                Ok((tracker, done))
            })
            .await?;
        self.driver = tracker.as_ref().map_or(self.driver, |tracker| tracker.driver().kind);
        self.tracker = tracker;
        done
    }

    fn as_captured(&self, part: DirectoryPart) -> Captured {
        Captured::Directory { path: self.places.path.display().to_string(), part }
    }
}

#[async_trait(?Send)]
impl DataSource for DirectorySource {
    async fn ahead(&mut self) {
        if let Err(error) = self.following(|places, store, tracker| places.ahead(store, tracker)).await {
            // The capture reports it, if it still applies.
            tracing::debug!(path = %self.places.path.display(), %error, "a directory could not be read ahead");
        }
    }

    async fn resume(&mut self) -> Result<()> {
        self.tracker = None;
        self.discard().await;
        Ok(())
    }

    async fn revision(&mut self, any: bool) -> Result<String> {
        self.look_again(any).await.map(|_| REVISION.into())
    }

    /// It is a directory, or the group would not have it: reading all of it is left to the freeze.
    async fn check_reachable(&mut self) -> Result<()> {
        Ok(())
    }

    async fn present(&mut self) -> Result<Option<Captured>> {
        let part = self.look(true).await?;
        // An unfinished restore needs the former directory.
        if !self.places.new_copy().exists() {
            self.discard().await;
        }
        Ok(Some(self.as_captured(part)))
    }

    /// The content is in the store already, or read now: what changed since [`Self::ahead`].
    async fn pin(&mut self, any: bool) -> Result<(Captured, String)> {
        let part = self.look_again(any).await?;
        Ok((self.as_captured(part), REVISION.into()))
    }

    fn held_by(&self) -> (String, Option<PathBuf>) {
        (kernel_version(), Some(self.places.path.clone()))
    }

    fn driver(&self) -> Driver {
        match self.driver {
            DriverKind::Btrfs => Driver::Btrfs,
            DriverKind::Reflink => Driver::Reflink,
            DriverKind::Tracked => Driver::Tracked,
        }
    }

    async fn verify(&mut self, target: &Captured) -> Result<()> {
        let Some(tree) = part_of(target)?.tree else { return Ok(()) };
        tree_is_whole(&self.host, tree, "directory").await
    }

    async fn prepare(&mut self, target: &Captured) -> Result<()> {
        let part = part_of(target)?;
        self.on(move |places, store| places.checkout(store, &part)).await
    }

    async fn switch(&mut self, target: &Captured, safety: &Captured) -> Result<()> {
        self.is_switched = true;
        let (target, safety) = (part_of(target)?, part_of(safety)?);
        self.on(move |places, store| places.switch(store, &target, &safety)).await
    }

    async fn revert(&mut self, safety: &Captured, target: Option<&Captured>) -> Result<()> {
        if !self.is_switched {
            return Ok(());
        }
        let safety = part_of(safety)?;
        let target = target.map_or(Ok(DirectoryPart::default()), part_of)?;
        let at_ms = self.host.now_ms();
        let kept = self.on(move |places, store| places.revert(store, &safety, &target, at_ms)).await?;
        if let Some(kept) = kept {
            let (path, place) = (self.places.path.display().to_string(), kept.display().to_string());
            tracing::warn!(%path, kept = %place, "another program wrote a directory during a restore that is reverted");
            self.host.events.publish("", "directory_kept", serde_json::json!({ "path": path, "kept": place }));
            self.kept = Some(kept);
        }
        Ok(())
    }

    fn may_be_switched(&mut self) {
        self.is_switched = true;
    }

    async fn discard(&mut self) {
        let places = self.places.clone();
        // What stays is removed by the next operation.
        let _ = blocking(move || {
            if std::fs::symlink_metadata(&places.beside).is_ok_and(|meta| meta.permissions().mode() & 0o077 == 0) {
                places.discard();
            }
            Ok(())
        })
        .await;
    }

    fn kept(&self) -> Option<&Path> {
        self.kept.as_deref()
    }
}
