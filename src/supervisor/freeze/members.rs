//! The members of a group during one operation: how each kind is suspended, captured, restored and resumed.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::access;
use super::objects::{self, blocking};
use crate::catalog::host_database::{self as database, Present, WriteLock};
use crate::core::checkpoint::CheckpointType;
use crate::core::error::{Error, Result};
use crate::core::freeze::{Captured, DatabasePart, Group, Member, RepositoryPart, Target};
use crate::core::ids::{CheckpointId, KernelId};
use crate::core::kernel::transition::Kind;
use crate::git::{Repository, State};
use crate::supervisor::checkpoint::held_kernel::{self as held, HeldKernel};
use crate::supervisor::checkpoint::manifest_of;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;
use crate::sys::fault;

/// One member during an operation.
pub(super) struct Live {
    pub name: String,
    host: Rc<Host>,
    kind: LiveKind,
    /// Files of this operation.
    scratch: PathBuf,
    /// What was captured of it.
    captured: Option<Captured>,
    /// What it is to become.
    pub target: Option<Captured>,
}

enum LiveKind {
    Kernel { kernel: Rc<Kernel>, held: Option<Box<HeldKernel>>, checkpoint: Option<CheckpointId> },
    Repository { path: PathBuf, repository: Repository, state: Option<State> },
    Database { path: PathBuf, lock: Option<WriteLock>, is_switched: bool },
}

impl From<&RepositoryPart> for State {
    fn from(part: &RepositoryPart) -> State {
        let RepositoryPart { head, index_tree, work_tree, changed, untracked, .. } = part.clone();
        State { head, index_tree, work_tree, changed, untracked }
    }
}

/// The members of a group, kernels first: nothing runs in them while the others are captured.
///
/// # Errors
/// `notFound` if a member is gone, `refused` by the rules for host paths.
pub(super) async fn open(supervisor: &Supervisor, group: &Group) -> Result<Vec<Live>> {
    let host = supervisor.host();
    let folder = super::scratch(host, group.id);
    let mut members: Vec<&Member> = group.members.iter().collect();
    members.sort_by_key(|member| match member.target {
        Target::Kernel { .. } => 0,
        Target::Repository { .. } => 1,
        Target::Database { .. } => 2,
    });
    let mut opened = Vec::new();
    for (at, member) in members.into_iter().enumerate() {
        let scratch = folder.join(at.to_string());
        std::fs::create_dir_all(&scratch)
            .map_err(|error| Error::unavailable(format!("{}: {error}", scratch.display())))?;
        let kind = match &member.target {
            Target::Kernel { id } => {
                LiveKind::Kernel { kernel: kernel(supervisor, *id)?, held: None, checkpoint: None }
            }
            Target::Repository { path } => {
                let path = PathBuf::from(path);
                access::recheck(host, group.uid, &path)?;
                let repository = Repository::open(&access::git(host).await?, &path)?;
                access::trusted_repository(supervisor, group.uid, &repository).await?;
                LiveKind::Repository { path, repository, state: None }
            }
            Target::Database { path } => {
                let path = PathBuf::from(path);
                access::recheck(host, group.uid, &path)?;
                LiveKind::Database { path, lock: None, is_switched: false }
            }
        };
        let (name, host) = (member.name.clone(), Rc::clone(host));
        opened.push(Live { name, host, kind, scratch, captured: None, target: None });
    }
    Ok(opened)
}

fn kernel(supervisor: &Supervisor, id: KernelId) -> Result<Rc<Kernel>> {
    supervisor.get(id).ok_or_else(|| Error::not_found(format!("kernel {id} of the group is gone")))
}

fn injected(error: std::io::Error) -> Error {
    Error::unavailable(error.to_string())
}

impl Live {
    /// Whether a step needs no deadline of its own: each call to a worker has one, and must not be abandoned.
    pub fn has_deadlines(&self) -> bool {
        matches!(self.kind, LiveKind::Kernel { .. })
    }

    /// What was captured.
    pub fn captured(&self) -> Result<&Captured> {
        self.captured.as_ref().ok_or_else(|| Error::internal(format!("member {} was not captured", self.name)))
    }

    /// Sets what was captured earlier.
    pub fn set_captured(&mut self, captured: Captured) {
        self.captured = Some(captured);
    }

    /// The repository, for questions about its history.
    pub fn repository(&self) -> Option<&Repository> {
        match &self.kind {
            LiveKind::Repository { repository, .. } => Some(repository),
            LiveKind::Kernel { .. } | LiveKind::Database { .. } => None,
        }
    }

    /// Stops admission: a kernel is held; a database is locked against writers before a restore.
    pub async fn suspend(&mut self, transition: Kind, actor: &Actor) -> Result<()> {
        match &mut self.kind {
            LiveKind::Kernel { kernel, held, .. } => {
                *held = Some(Box::new(HeldKernel::hold(&self.host, kernel, transition, actor).await?));
            }
            LiveKind::Database { path, lock, .. } if transition == Kind::Restore => {
                let path = path.clone();
                *lock = blocking(move || match database::present(&path)? {
                    Present::Whole => WriteLock::take(&path).map(Some),
                    Present::Absent | Present::Damaged(_) => Ok(None),
                })
                .await?;
            }
            LiveKind::Repository { .. } | LiveKind::Database { .. } => {}
        }
        Ok(())
    }

    /// The present revision. A missing or damaged database fails, unless `any` state may be captured.
    pub async fn revision(&mut self, any: bool) -> Result<String> {
        match &mut self.kind {
            LiveKind::Kernel { held, .. } => Ok(held.as_ref().ok_or_else(not_held)?.revision()),
            LiveKind::Repository { repository, state, .. } => {
                let found = repository.state(&self.scratch, false).await?;
                let revision = format!("{found:?}");
                *state = Some(found);
                Ok(revision)
            }
            LiveKind::Database { path, .. } => {
                let path = path.clone();
                blocking(move || match database::present(&path)? {
                    Present::Whole => Ok(database::revision(&path)?.to_string()),
                    Present::Absent if any => Ok("absent".into()),
                    Present::Damaged(_) if any => Ok("damaged".into()),
                    Present::Absent => Err(Error::not_found(format!("there is no {}", path.display()))),
                    Present::Damaged(why) => Err(Error::corrupt(why).reason("database_damaged")),
                })
                .await
            }
        }
    }

    /// Captures the content; returns its revision.
    pub async fn snapshot(&mut self, kind: CheckpointType) -> Result<String> {
        fault::point("freeze.member.snapshot").map_err(injected)?;
        let any = kind == CheckpointType::System;
        match &mut self.kind {
            LiveKind::Kernel { held, checkpoint, .. } => {
                let held = held.as_mut().ok_or_else(not_held)?;
                *checkpoint = Some(held.capture(kind).await?);
                Ok(held.revision())
            }
            LiveKind::Repository { path, repository, state } => {
                let state = state.clone().ok_or_else(|| Error::internal("the repository was not locked"))?;
                let pack = match repository.pack(&self.scratch, &state).await? {
                    Some(file) => Some(objects::put(&self.host, file).await?.0),
                    None => None,
                };
                let revision = format!("{state:?}");
                let State { head, index_tree, work_tree, changed, untracked } = state;
                let part = RepositoryPart { head, index_tree, work_tree, changed, untracked, pack };
                self.captured = Some(Captured::Repository { path: path.display().to_string(), part });
                Ok(revision)
            }
            LiveKind::Database { path, .. } => {
                let path = path.clone();
                let (part, revision) = capture_database(&self.host, &path, &self.scratch, any).await?;
                self.captured = Some(Captured::Database { path: path.display().to_string(), part });
                Ok(revision)
            }
        }
    }

    /// The checkpoint that a seal will make visible.
    pub fn checkpoint(&self) -> Option<(KernelId, CheckpointId)> {
        match &self.kind {
            LiveKind::Kernel { kernel, checkpoint, .. } => checkpoint.map(|id| (kernel.id, id)),
            LiveKind::Repository { .. } | LiveKind::Database { .. } => None,
        }
    }

    /// Makes a kernel's captured state a checkpoint.
    pub async fn seal(&mut self, name: &str, kind: CheckpointType, actor: &Actor) -> Result<()> {
        let LiveKind::Kernel { kernel, held, .. } = &mut self.kind else { return Ok(()) };
        let checkpoint = held.as_mut().ok_or_else(not_held)?.seal(name, kind, actor).await?;
        let manifest = manifest_of(&self.host, &checkpoint).await?;
        self.captured = Some(Captured::Kernel {
            kernel: kernel.id,
            kernel_name: kernel.spec.name.to_string(),
            checkpoint: checkpoint.id,
            repositories: manifest.repositories,
        });
        Ok(())
    }

    /// Removes the checkpoint of a freeze that failed.
    pub async fn withdraw(&self) -> Result<()> {
        match &self.kind {
            LiveKind::Kernel { kernel, checkpoint: Some(id), .. } => held::withdraw(kernel, *id).await,
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } | LiveKind::Database { .. } => Ok(()),
        }
    }

    /// Admits work again.
    pub async fn resume(&mut self) -> Result<()> {
        match &mut self.kind {
            LiveKind::Kernel { held, .. } => match held.take() {
                Some(mut held) => held.thaw().await,
                None => Ok(()),
            },
            LiveKind::Database { lock, .. } => {
                drop(lock.take());
                Ok(())
            }
            LiveKind::Repository { .. } => Ok(()),
        }
    }

    /// Reads everything that the restore of its target needs.
    pub async fn validate(&self) -> Result<()> {
        match (&self.kind, self.target()?) {
            (LiveKind::Kernel { kernel, .. }, Captured::Kernel { checkpoint, .. }) => {
                held::validate(&self.host, kernel, *checkpoint).await
            }
            (LiveKind::Repository { repository, .. }, Captured::Repository { part, .. }) => {
                let pack = self.scratch.join("restored-pack");
                if let Some(digest) = part.pack {
                    objects::get(&self.host, digest, &pack).await?;
                }
                let apart = self.scratch.join("verify");
                repository.verify(&apart, &part.into(), part.pack.is_some().then_some(&*pack)).await
            }
            (LiveKind::Database { .. }, Captured::Database { part, .. }) => {
                for (suffix, digest, _) in files_of(part) {
                    objects::get(&self.host, digest, &self.scratch.join(format!("image{suffix}"))).await?;
                }
                Ok(())
            }
            _ => Err(self.other_kind()),
        }
    }

    /// What the gate and the lock judge of the present state; `None` for a kernel.
    pub async fn present(&mut self) -> Result<Option<Captured>> {
        match &mut self.kind {
            LiveKind::Kernel { .. } => Ok(None),
            LiveKind::Repository { path, repository, .. } => {
                let State { head, index_tree, work_tree, changed, untracked } =
                    repository.state(&self.scratch, false).await?;
                let part = RepositoryPart { head, index_tree, work_tree, changed, untracked, pack: None };
                Ok(Some(Captured::Repository { path: path.display().to_string(), part }))
            }
            LiveKind::Database { path, .. } => {
                let own = path.clone();
                let part = blocking(move || {
                    Ok(match database::present(&own)? {
                        Present::Whole => {
                            let revision = database::revision(&own)?;
                            // Nothing is copied: only the schema counts here.
                            let image = crate::core::ids::Digest::from_bytes([0; 32]);
                            DatabasePart::Whole { image, bytes: 0, revision, mode: 0 }
                        }
                        Present::Absent => DatabasePart::Absent,
                        Present::Damaged(_) => DatabasePart::Damaged { files: Vec::new() },
                    })
                });
                let part = part.await?;
                Ok(Some(Captured::Database { path: path.display().to_string(), part }))
            }
        }
    }

    /// Makes the inactive copy: objects of a repository to which nothing refers, files beside a database.
    pub async fn prepare(&self) -> Result<()> {
        fault::point("freeze.member.prepare").map_err(injected)?;
        match (&self.kind, self.target()?) {
            (LiveKind::Repository { repository, .. }, Captured::Repository { part, .. }) if part.pack.is_some() => {
                repository.prepare(&self.scratch.join("restored-pack")).await
            }
            (LiveKind::Database { path, lock, .. }, Captured::Database { part, .. })
                if lock.is_none() || !matches!(part, DatabasePart::Whole { .. }) =>
            {
                self.place_beside(path, part).await
            }
            _ => Ok(()),
        }
    }

    /// Makes the target the present state.
    pub async fn switch(&mut self, actor: &Actor, attach: bool) -> Result<()> {
        fault::point("freeze.member.switch").map_err(injected)?;
        let target = self.target()?.clone();
        let safety = self.captured()?.clone();
        match (&mut self.kind, target, safety) {
            (LiveKind::Kernel { held, .. }, Captured::Kernel { checkpoint, .. }, _) => {
                held.as_mut().ok_or_else(not_held)?.restore(checkpoint, actor).await
            }
            (
                LiveKind::Repository { path, repository, .. },
                Captured::Repository { part, .. },
                Captured::Repository { part: safety, .. },
            ) => {
                if repository.state(&self.scratch, false).await? != State::from(&safety) {
                    return Err(Error::conflict(format!("{} was changed during the restore", path.display()))
                        .reason("repository_changed"));
                }
                repository.switch(&self.scratch, &State::from(&part), attach).await
            }
            (LiveKind::Database { path, lock, is_switched }, Captured::Database { part, .. }, _) => {
                switch_database(path.clone(), lock.take(), &part, &self.scratch).await?;
                *is_switched = true;
                Ok(())
            }
            _ => Err(self.other_kind()),
        }
    }

    /// Brings the member back to what was captured before the restore.
    pub async fn revert(&mut self, actor: &Actor) -> Result<()> {
        fault::point("freeze.member.revert").map_err(injected)?;
        let safety = self.captured()?.clone();
        match (&mut self.kind, safety) {
            (LiveKind::Kernel { held, .. }, Captured::Kernel { checkpoint, .. }) => {
                held.as_mut().ok_or_else(not_held)?.revert(checkpoint, actor).await
            }
            (LiveKind::Repository { path, repository, .. }, Captured::Repository { part, .. }) => {
                let before = State::from(&part);
                repository.release_index(&self.scratch);
                if let Some(digest) = part.pack {
                    let pack = self.scratch.join("safety-pack");
                    objects::get(&self.host, digest, &pack).await?;
                    repository.prepare(&pack).await?;
                }
                // Kept as objects of the repository: work of another program since the restore is not lost.
                let present = repository.state(&self.scratch, true).await?;
                if present != before {
                    let detail = serde_json::json!({ "path": path, "tree": present.work_tree.as_str() });
                    self.host.events.publish("", "repository_reverted", detail);
                }
                repository.switch(&self.scratch, &before, true).await
            }
            (LiveKind::Database { path, lock, is_switched }, Captured::Database { part, .. }) => {
                if !*is_switched {
                    return Ok(());
                }
                for (suffix, digest, _) in files_of(&part) {
                    objects::get(&self.host, digest, &self.scratch.join(format!("image{suffix}"))).await?;
                }
                if lock.is_none() {
                    let path = path.clone();
                    *lock = blocking(move || match database::present(&path)? {
                        Present::Whole => WriteLock::take(&path).map(Some),
                        Present::Absent | Present::Damaged(_) => Ok(None),
                    })
                    .await?;
                }
                let (path, lock) = (path.clone(), lock.take());
                if lock.is_none() || !matches!(part, DatabasePart::Whole { .. }) {
                    self.place_beside(&path, &part).await?;
                }
                switch_database(path, lock, &part, &self.scratch).await
            }
            _ => Err(self.other_kind()),
        }
    }

    /// Prepares the recovery of a restore that a former daemon may have carried out here.
    pub async fn after_crash(&mut self) -> Result<()> {
        let safety = self.captured()?.clone();
        if let (LiveKind::Database { path, is_switched, .. }, Captured::Database { part, .. }) =
            (&mut self.kind, safety)
        {
            *is_switched = true;
            if let DatabasePart::Whole { image, .. } = part {
                let (copy, before) = (self.scratch.join("now"), self.scratch.join("before"));
                objects::get(&self.host, image, &before).await?;
                let path = path.clone();
                let is_same = blocking(move || match database::present(&path)? {
                    Present::Whole => {
                        for suffix in database::SUFFIXES {
                            let _ = std::fs::remove_file(database::beside(&copy, suffix));
                        }
                        database::capture(&path, &copy)?;
                        database::is_same(&copy, &before)
                    }
                    Present::Absent | Present::Damaged(_) => Ok(false),
                });
                *is_switched = !is_same.await?;
            }
        }
        Ok(())
    }

    /// Removes inactive copies.
    pub fn discard(&self) {
        let LiveKind::Database { path, .. } = &self.kind else { return };
        for suffix in database::SUFFIXES {
            // Most do not exist.
            let _ = std::fs::remove_file(inactive(path, suffix));
        }
    }

    fn target(&self) -> Result<&Captured> {
        self.target.as_ref().ok_or_else(|| Error::internal(format!("member {} has no target", self.name)))
    }

    fn other_kind(&self) -> Error {
        Error::refused(format!("member {} was of another kind at that freeze", self.name)).reason("other_member")
    }

    async fn place_beside(&self, path: &Path, part: &DatabasePart) -> Result<()> {
        for (suffix, digest, _) in files_of(part) {
            objects::get(&self.host, digest, &inactive(path, &suffix)).await?;
        }
        Ok(())
    }
}

fn not_held() -> Error {
    Error::internal("the kernel is not held")
}

/// Suffix, content and mode of a captured database's files.
fn files_of(part: &DatabasePart) -> Vec<(String, crate::core::ids::Digest, u32)> {
    match part {
        DatabasePart::Whole { image, mode, .. } => vec![(String::new(), *image, *mode)],
        DatabasePart::Absent => Vec::new(),
        DatabasePart::Damaged { files } => files.clone(),
    }
}

/// The inactive file beside a database's.
fn inactive(path: &Path, suffix: &str) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}{suffix}.ryokan"))
}

async fn capture_database(host: &Host, path: &Path, scratch: &Path, any: bool) -> Result<(DatabasePart, String)> {
    let (copy, own) = (scratch.join("copy"), path.to_owned());
    let to = copy.clone();
    let found = blocking(move || {
        for suffix in database::SUFFIXES {
            let _ = std::fs::remove_file(database::beside(&to, suffix));
        }
        match database::present(&own)? {
            Present::Whole => database::capture(&own, &to).map(Ok),
            other => Ok(Err(other)),
        }
    });
    match found.await? {
        Ok((revision, mode)) => {
            let (image, bytes) = objects::put(host, copy).await?;
            let reported = revision.to_string();
            Ok((DatabasePart::Whole { image, bytes, revision, mode }, reported))
        }
        Err(Present::Absent) if any => Ok((DatabasePart::Absent, "absent".into())),
        Err(Present::Damaged(_)) if any => {
            let mut files = Vec::new();
            // Not the shared memory: SQLite builds it from the log.
            for suffix in ["", "-wal", "-journal"] {
                use std::os::unix::fs::PermissionsExt as _;
                let file = database::beside(path, suffix);
                let Ok(meta) = std::fs::symlink_metadata(&file) else { continue };
                let (digest, _) = objects::put(host, file).await?;
                files.push((suffix.to_owned(), digest, meta.permissions().mode() & 0o777));
            }
            Ok((DatabasePart::Damaged { files }, "damaged".into()))
        }
        Err(_) => Err(Error::corrupt(format!("{} cannot be read", path.display())).reason("database_damaged")),
    }
}

async fn switch_database(path: PathBuf, lock: Option<WriteLock>, part: &DatabasePart, scratch: &Path) -> Result<()> {
    let image = scratch.join("image");
    let files: Vec<(String, PathBuf, u32)> =
        files_of(part).into_iter().map(|(suffix, _, mode)| (suffix.clone(), inactive(&path, &suffix), mode)).collect();
    let is_whole = matches!(part, DatabasePart::Whole { .. });
    blocking(move || match lock {
        Some(mut lock) if is_whole => lock.replace(&image),
        lock => {
            drop(lock);
            database::replace_files(&path, &files)
        }
    })
    .await
}
