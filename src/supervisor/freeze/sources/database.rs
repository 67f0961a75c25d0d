//! A database of a group during one operation: how it is locked, captured, replaced and brought back.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use async_trait::async_trait;

use super::{DataSource, NOT_STORED, other_content};
use crate::catalog::host_database::{self as database, Present, Replaced, WriteLock};
use crate::catalog::pinned_database::{PinnedDatabase, copy_file, version};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::cost::Driver;
use crate::core::freeze::{Captured, DatabasePart};
use crate::core::ids::Digest;
use crate::core::kernel::transition::Kind;
use crate::supervisor::freeze::no_cow::is_no_cow_file;
use crate::supervisor::freeze::objects::{self, blocking};
use crate::supervisor::host::Host;

/// The folder of copies of what other programs wrote during a restore that was reverted.
pub(in crate::supervisor::freeze) const KEPT: &str = "kept";

/// One database.
#[derive(Debug)]
struct LiveDatabase {
    path: PathBuf,
    lock: Option<WriteLock>,
    pinned: Option<PinnedDatabase>,
    /// What a copy of the pinned content led to, if it was made ahead of the rest.
    copied: Option<Result<()>>,
    /// How it was pinned last.
    driver: Driver,
    /// SQLite's parameters then.
    parameters: String,
    /// Whether its file is written in place, as it was looked at before a lock.
    no_cow: bool,
    /// Whether it may hold the target of a restore.
    is_switched: bool,
    /// A copy of what another program wrote during the restore.
    kept: Option<PathBuf>,
}

impl LiveDatabase {
    /// A database that is at no operation yet.
    fn new(path: PathBuf) -> LiveDatabase {
        let driver = Driver::Transaction;
        let (parameters, no_cow, is_switched) = (String::new(), false, false);
        LiveDatabase {
            path,
            lock: None,
            pinned: None,
            copied: None,
            driver,
            parameters,
            no_cow,
            is_switched,
            kept: None,
        }
    }

    /// A restore of a former daemon may have changed it.
    fn may_be_switched(&mut self) {
        self.is_switched = true;
    }

    /// Locks it against writers, if SQLite can read it.
    async fn lock(&mut self) -> Result<()> {
        let path = self.path.clone();
        self.lock = blocking(move || match database::present(&path)? {
            Present::Whole => WriteLock::take(&path).map(Some),
            Present::Absent | Present::Damaged(_) => Ok(None),
        })
        .await?;
        Ok(())
    }

    /// Looks whether the file is written in place.
    async fn look_at_file(&mut self) {
        let path = self.path.clone();
        // A file that cannot be looked at has no attribute that matters.
        self.no_cow = blocking(move || Ok(is_no_cow_file(&path))).await.unwrap_or(false);
    }

    /// Admits writers.
    fn unlock(&mut self) {
        drop(self.lock.take());
    }

    /// The present revision. A missing or damaged database fails, unless `any` state may be captured.
    async fn revision(&self, any: bool) -> Result<String> {
        let path = self.path.clone();
        blocking(move || match database::present(&path)? {
            Present::Whole => Ok(database::revision(&path)?.to_string()),
            Present::Absent if any => Ok("absent".into()),
            Present::Damaged(_) if any => Ok("damaged".into()),
            Present::Absent => Err(Error::not_found(format!("there is no {}", path.display()))),
            Present::Damaged(why) => Err(Error::corrupt(why).reason("database_damaged")),
        })
        .await
    }

    /// What the gate and the lock judge: the schema. Nothing is copied.
    async fn present(&self) -> Result<DatabasePart> {
        let path = self.path.clone();
        blocking(move || {
            Ok(match database::present(&path)? {
                Present::Whole => {
                    let revision = database::revision(&path)?;
                    DatabasePart::Whole { image: NOT_STORED, bytes: 0, revision, mode: 0, no_cow: false }
                }
                Present::Absent => DatabasePart::Absent,
                Present::Damaged(_) => DatabasePart::Damaged { files: Vec::new() },
            })
        })
        .await
    }

    /// Pins the content; returns it with its revision. Damaged files are stored at once: nothing pins them.
    async fn pin(&mut self, host: &Host, scratch: &Path, any: bool) -> Result<(DatabasePart, String)> {
        self.look_at_file().await;
        // A clone would need a lock that this process holds already.
        let (path, may_clone) = (self.path.clone(), self.lock.is_none());
        let pinned = blocking(move || match database::present(&path)? {
            Present::Whole => PinnedDatabase::pin(&path, may_clone).map(Some),
            Present::Absent => Ok(None),
            Present::Damaged(why) => Err(Error::corrupt(why).reason("database_damaged")),
        });
        match pinned.await {
            Ok(Some(pinned)) => {
                let (revision, mode) = (pinned.revision().clone(), pinned.mode());
                self.driver = pinned.driver();
                self.parameters = pinned.parameters().to_owned();
                self.pinned = Some(pinned);
                let reported = revision.to_string();
                let part = DatabasePart::Whole { image: NOT_STORED, bytes: 0, revision, mode, no_cow: self.no_cow };
                Ok((part, reported))
            }
            Ok(None) if any => Ok((DatabasePart::Absent, "absent".into())),
            Err(error) if any && error.code == ErrorCode::Corrupt => {
                Ok((self.put_damaged(host, scratch).await?, "damaged".into()))
            }
            Ok(None) => Err(Error::not_found(format!("there is no {}", self.path.display()))),
            Err(error) => Err(error),
        }
    }

    /// Copies the pinned content, which ends the pin.
    async fn copy(&mut self, scratch: &Path) {
        let (Some(pinned), to) = (self.pinned.take(), scratch.join("copy")) else { return };
        let copied = blocking(move || {
            remove_copy(&to);
            pinned.copy(&to)
        });
        self.copied = Some(copied.await);
    }

    /// Stores the pinned content. Of a database that turns out to be damaged, a lock still holds the files.
    async fn store(&mut self, host: &Host, scratch: &Path, part: &mut DatabasePart) -> Result<()> {
        self.copy(scratch).await;
        let (Some(copied), copy) = (self.copied.take(), scratch.join("copy")) else { return Ok(()) };
        match (copied, part) {
            (Ok(()), DatabasePart::Whole { image, bytes, .. }) => {
                (*image, *bytes) = objects::put(host, copy).await?;
                Ok(())
            }
            (Err(error), part) if error.code == ErrorCode::Corrupt && self.lock.is_some() => {
                *part = self.put_damaged(host, scratch).await?;
                Ok(())
            }
            (copied, _) => copied,
        }
    }

    /// Stores the files as they are. A lock on them stays.
    async fn put_damaged(&self, host: &Host, scratch: &Path) -> Result<DatabasePart> {
        use std::os::unix::fs::PermissionsExt as _;
        let mut files = Vec::new();
        for suffix in RAW {
            let (file, copy) = (database::beside(&self.path, suffix), scratch.join(format!("raw{suffix}")));
            let Ok(meta) = std::fs::symlink_metadata(&file) else { continue };
            let to = copy.clone();
            if blocking(move || copy_file(&file, &to)).await? {
                let (digest, _) = objects::put(host, copy).await?;
                files.push((suffix.to_owned(), digest, meta.permissions().mode() & 0o777));
            }
        }
        Ok(DatabasePart::Damaged { files })
    }

    /// Makes the inactive files beside it that a replacement by renames needs.
    async fn prepare_files(&mut self, host: &Host, part: &DatabasePart, scratch: &Path) -> Result<()> {
        if matches!(part, DatabasePart::Whole { .. })
            && let Some(lock) = self.lock.take()
        {
            let image = scratch.join("image");
            let (lock, checked) = blocking(move || {
                let checked = lock.check_image(&image);
                Ok((lock, checked))
            })
            .await?;
            self.lock = Some(lock);
            return checked;
        }
        for (suffix, digest, _) in files_of(part) {
            let no_cow = matches!(part, DatabasePart::Whole { no_cow: true, .. });
            objects::get_as(host, digest, &inactive(&self.path, &suffix), no_cow).await?;
        }
        Ok(())
    }

    /// Makes a part, whose files are in `scratch` or beside the database, the present content. `before`: what it replaces
    /// if no lock holds it. Not to be abandoned.
    async fn switch(&mut self, part: &DatabasePart, before: &Unlocked, scratch: &Path) -> Result<()> {
        let replaced = match self.lock.is_none().then_some(before) {
            None => None,
            // Nothing kept others from writing since.
            Some(before) if self.unlocked(scratch).await? != *before => return Err(database::written(&self.path)),
            Some(Unlocked::Whole) => return Err(database::written(&self.path)),
            Some(Unlocked::Absent) => Some(Replaced::Absent),
            Some(Unlocked::Damaged(_)) => Some(Replaced::Damaged),
        };
        // Before the change: whatever the answer is, it may happen.
        self.is_switched = true;
        let (path, lock, image) = (self.path.clone(), self.lock.take(), scratch.join("image"));
        let files: Vec<(String, PathBuf, u32)> = files_of(part)
            .into_iter()
            .map(|(suffix, _, mode)| (suffix.clone(), inactive(&path, &suffix), mode))
            .collect();
        let mode = mode_of(part);
        blocking(move || match (lock, mode, replaced) {
            (Some(mut lock), Some(mode), _) => {
                lock.replace(&image)?;
                drop(lock);
                database::set_mode(&path, mode)
            }
            // The lock ends after the change.
            (Some(lock), None, _) => database::replace_files(&path, &files, &Replaced::Locked(Box::new(lock))),
            (None, _, Some(replaced)) => database::replace_files(&path, &files, &replaced),
            (None, _, None) => Err(Error::internal("a database is neither locked nor judged")),
        })
        .await
    }

    /// What is there, of a database that no lock holds.
    async fn unlocked(&self, scratch: &Path) -> Result<Unlocked> {
        let (path, scratch) = (self.path.clone(), scratch.to_owned());
        blocking(move || {
            match database::present(&path)? {
                Present::Whole => return Ok(Unlocked::Whole),
                Present::Absent => return Ok(Unlocked::Absent),
                Present::Damaged(_) => {}
            }
            let mut files = Vec::new();
            for suffix in RAW {
                let copy = scratch.join(format!("compared{suffix}"));
                if copy_file(&database::beside(&path, suffix), &copy)? {
                    files.push((suffix.to_owned(), digest_of(&copy)?));
                }
            }
            Ok(Unlocked::Damaged(files))
        })
        .await
    }

    /// Brings it back to `safety` if a restore of `target` may have changed it. What another program wrote since is
    /// copied first. Not to be abandoned.
    async fn revert(
        &mut self,
        host: &Host,
        name: &str,
        (safety, target): (&DatabasePart, Option<&DatabasePart>),
        scratch: &Path,
    ) -> Result<()> {
        if !self.is_switched {
            return Ok(());
        }
        // Locked first: nothing is written between the comparison and the change.
        if self.lock.is_none() {
            self.lock().await?;
        }
        // What is kept is what is replaced.
        let before = if self.lock.is_none() { self.unlocked(scratch).await? } else { Unlocked::Whole };
        let now = scratch.join("now");
        let present = copied(&self.path, &now).await?;
        if is_at(host, &present, &now, safety).await? {
            let (path, mode) = (self.path.clone(), mode_of(safety));
            return blocking(move || mode.map_or(Ok(()), |mode| database::set_mode(&path, mode))).await;
        }
        let is_own = match target {
            Some(target) => is_at(host, &present, &now, target).await?,
            None => false,
        };
        if !is_own {
            self.kept = self.keep(host, name, &present, &now).await?.or(self.kept.take());
        }
        fetch(host, safety, scratch).await?;
        self.prepare_files(host, safety, scratch).await?;
        self.switch(safety, &before, scratch).await
    }

    /// Keeps a copy of the present content, apart from every freeze.
    async fn keep(&self, host: &Host, name: &str, present: &Copied, now: &Path) -> Result<Option<PathBuf>> {
        let files: Vec<(PathBuf, &str)> = match present {
            Copied::Absent => return Ok(None),
            Copied::Whole => vec![(now.to_owned(), "")],
            Copied::Damaged => RAW.map(|suffix| (database::beside(&self.path, suffix), suffix)).to_vec(),
        };
        let folder = host.environment.data.join("groups").join(KEPT);
        let to = folder.join(format!("{name}-{}.db", host.now_ms()));
        let copies: Vec<_> = files.into_iter().map(|(from, suffix)| (from, database::beside(&to, suffix))).collect();
        blocking(move || {
            let failed = |error: std::io::Error| Error::unavailable(format!("{}: {error}", folder.display()));
            crate::sys::fs::create_dir_durable(&folder, 0o700, "freeze.kept.dir")
                .map_err(|error| Error::unavailable(error.to_string()))?;
            for (from, to) in copies {
                if copy_file(&from, &to)? {
                    std::fs::File::open(&to).and_then(|file| file.sync_all()).map_err(failed)?;
                }
            }
            crate::sys::fs::sync_dir(&folder).map_err(|error| Error::unavailable(error.to_string()))
        })
        .await?;
        let (path, kept) = (self.path.display().to_string(), to.display().to_string());
        tracing::warn!(%path, %kept, "another program wrote the database during a restore that is reverted");
        host.events.publish("", "database_kept", serde_json::json!({ "path": path, "kept": kept }));
        Ok(Some(to))
    }

    /// Removes inactive files.
    fn discard(&self) {
        for suffix in database::SUFFIXES {
            // Most do not exist.
            let _ = std::fs::remove_file(inactive(&self.path, suffix));
        }
    }
}

/// A database as a source.
pub(super) struct DatabaseSource {
    host: Rc<Host>,
    /// The member's name.
    name: String,
    scratch: PathBuf,
    live: LiveDatabase,
}

impl DatabaseSource {
    /// The database in a file.
    pub fn new(host: Rc<Host>, name: String, path: PathBuf, scratch: PathBuf) -> DatabaseSource {
        DatabaseSource { host, name, scratch, live: LiveDatabase::new(path) }
    }

    fn as_captured(&self, part: DatabasePart) -> Captured {
        Captured::Database { path: self.live.path.display().to_string(), part }
    }
}

fn part_of(captured: &Captured) -> Result<&DatabasePart> {
    match captured {
        Captured::Database { part, .. } => Ok(part),
        _ => Err(other_content()),
    }
}

#[async_trait(?Send)]
impl DataSource for DatabaseSource {
    /// A capture is one transaction; only a restore needs the lock.
    async fn quiesce(&mut self, transition: Kind) -> Result<()> {
        if transition == Kind::Restore { self.live.lock().await } else { Ok(()) }
    }

    async fn resume(&mut self) -> Result<()> {
        self.live.unlock();
        Ok(())
    }

    async fn revision(&mut self, any: bool) -> Result<String> {
        self.live.revision(any).await
    }

    async fn present(&mut self) -> Result<Option<Captured>> {
        Ok(Some(self.as_captured(self.live.present().await?)))
    }

    async fn pin(&mut self, any: bool) -> Result<(Captured, String)> {
        let (part, revision) = self.live.pin(&self.host, &self.scratch, any).await?;
        Ok((self.as_captured(part), revision))
    }

    fn driver(&self) -> Driver {
        self.live.driver
    }

    fn held_by(&self) -> (String, Option<PathBuf>) {
        (format!("SQLite {}", version()), self.live.path.parent().map(Path::to_owned))
    }

    fn parameters(&self) -> String {
        self.live.parameters.clone()
    }

    async fn admit_writers(&mut self) -> Result<()> {
        if self.live.driver == Driver::SharedLock {
            self.live.copy(&self.scratch).await;
        }
        Ok(())
    }

    async fn store(&mut self, captured: &mut Captured) -> Result<()> {
        let Captured::Database { part, .. } = captured else { return Err(other_content()) };
        self.live.store(&self.host, &self.scratch, part).await
    }

    async fn verify(&mut self, target: &Captured) -> Result<()> {
        fetch(&self.host, part_of(target)?, &self.scratch).await
    }

    async fn prepare(&mut self, target: &Captured) -> Result<()> {
        self.live.prepare_files(&self.host, part_of(target)?, &self.scratch).await
    }

    async fn switch(&mut self, target: &Captured, safety: &Captured) -> Result<()> {
        self.live.switch(part_of(target)?, &Unlocked::of(part_of(safety)?), &self.scratch).await
    }

    async fn revert(&mut self, safety: &Captured, target: Option<&Captured>) -> Result<()> {
        let parts = (part_of(safety)?, target.map(part_of).transpose()?);
        self.live.revert(&self.host, &self.name, parts, &self.scratch).await
    }

    fn may_be_switched(&mut self) {
        self.live.may_be_switched();
    }

    async fn discard(&mut self) {
        self.live.discard();
    }

    fn kept(&self) -> Option<&Path> {
        self.live.kept.as_deref()
    }
}

/// The files of a damaged database. Not the shared memory: SQLite builds it from the log.
const RAW: [&str; 3] = ["", "-wal", "-journal"];

/// What a copy of a database found.
enum Copied {
    Whole,
    Absent,
    Damaged,
}

/// What a change by renames replaces: no lock keeps others from writing it.
#[derive(Debug, PartialEq, Eq)]
enum Unlocked {
    Absent,
    /// Each file's suffix and content.
    Damaged(Vec<(String, Digest)>),
    /// It was damaged or missing when it was to be locked.
    Whole,
}

impl Unlocked {
    fn of(part: &DatabasePart) -> Unlocked {
        match part {
            DatabasePart::Whole { .. } => Unlocked::Whole,
            DatabasePart::Absent => Unlocked::Absent,
            DatabasePart::Damaged { files } => {
                Unlocked::Damaged(files.iter().map(|(suffix, digest, _)| (suffix.clone(), *digest)).collect())
            }
        }
    }
}

/// The address that the store gives a file.
fn digest_of(file: &Path) -> Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    std::fs::File::open(file)
        .and_then(|mut file| std::io::copy(&mut file, &mut hasher))
        .map_err(|error| Error::unavailable(format!("cannot read {}: {error}", file.display())))?;
    Ok(Digest::from_bytes(*hasher.finalize().as_bytes()))
}

/// Removes the copy of a former step.
fn remove_copy(copy: &Path) {
    for suffix in database::SUFFIXES {
        // Most do not exist.
        let _ = std::fs::remove_file(database::beside(copy, suffix));
    }
}

/// Copies a database, if SQLite can read it.
async fn copied(path: &Path, copy: &Path) -> Result<Copied> {
    let (path, copy) = (path.to_owned(), copy.to_owned());
    blocking(move || {
        remove_copy(&copy);
        match database::present(&path)? {
            Present::Whole => match PinnedDatabase::pin(&path, false).and_then(|pinned| pinned.copy(&copy)) {
                Ok(()) => Ok(Copied::Whole),
                Err(error) if error.code == ErrorCode::Corrupt => Ok(Copied::Damaged),
                Err(error) => Err(error),
            },
            Present::Absent => Ok(Copied::Absent),
            Present::Damaged(_) => Ok(Copied::Damaged),
        }
    })
    .await
}

/// Copies the present content into a new file if SQLite can read it; returns the form of what is there.
pub(in crate::supervisor::freeze) async fn copy_now(path: &Path, copy: &Path) -> Result<&'static str> {
    Ok(match copied(path, copy).await? {
        Copied::Whole => "whole",
        Copied::Absent => "absent",
        Copied::Damaged => "damaged",
    })
}

/// Whether the present content, whose copy is `now`, is that of a part. Damaged databases are never the same.
async fn is_at(host: &Host, present: &Copied, now: &Path, part: &DatabasePart) -> Result<bool> {
    match (present, part) {
        (Copied::Absent, DatabasePart::Absent) => Ok(true),
        (Copied::Whole, DatabasePart::Whole { image, .. }) => {
            let (now, other) = (now.to_owned(), now.with_file_name("compared"));
            objects::get(host, *image, &other).await?;
            blocking(move || database::is_same(&now, &other)).await
        }
        _ => Ok(false),
    }
}

/// Reads the files of a part from the store.
async fn fetch(host: &Host, part: &DatabasePart, scratch: &Path) -> Result<()> {
    for (suffix, digest, _) in files_of(part) {
        objects::get(host, digest, &scratch.join(format!("image{suffix}"))).await?;
    }
    Ok(())
}

/// Suffix, content and mode of a captured database's files.
fn files_of(part: &DatabasePart) -> Vec<(String, Digest, u32)> {
    match part {
        DatabasePart::Whole { image, mode, .. } => vec![(String::new(), *image, *mode)],
        DatabasePart::Absent => Vec::new(),
        DatabasePart::Damaged { files } => files.clone(),
    }
}

/// The mode of a whole database's file.
fn mode_of(part: &DatabasePart) -> Option<u32> {
    match part {
        DatabasePart::Whole { mode, .. } => Some(*mode),
        DatabasePart::Absent | DatabasePart::Damaged { .. } => None,
    }
}

/// The inactive file beside a database's.
fn inactive(path: &Path, suffix: &str) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}{suffix}.ryokan"))
}
