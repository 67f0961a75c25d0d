//! The members of a group during one operation: how each kind is suspended, captured, restored and resumed.

use std::path::{Component, Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::sources::{self, DataSource, pending};
use super::{access, pauses};
use super::{kept_commits, objects, submodules};
use crate::core::checkpoint::CheckpointType;
use crate::core::error::{Error, Result};
use crate::core::freeze::cost::{Driver, MemberCost};
use crate::core::freeze::drain::{Drain, Executions};
use crate::core::freeze::refs::RepositoryLock;
use crate::core::freeze::{Captured, Group, KernelRevision, Member, Part, Target};
use crate::core::ids::{CheckpointId, FreezeId, GroupId, KernelId};
use crate::core::kernel::transition::Kind;
use crate::git::{Repository, State};
use crate::supervisor::checkpoint::held_kernel::{self as held, HeldKernel};
use crate::supervisor::checkpoint::manifest_of;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;
use crate::sys::fault;

mod notes;

/// One member during an operation.
pub(super) struct Live {
    pub name: String,
    host: Rc<Host>,
    kind: LiveKind,
    /// Files of this operation.
    scratch: PathBuf,
    /// What records it while it is quiesced.
    member: Member,
    group: (GroupId, u32, String),
    /// What was captured of it.
    captured: Option<Captured>,
    /// Time of its steps within the pause, and for storing it.
    spent: (Duration, Duration),
    /// What became of the executions of a kernel.
    executions: Executions,
    /// What it is to become.
    pub target: Option<Captured>,
}

enum LiveKind {
    Kernel { kernel: Rc<Kernel>, held: Option<Box<HeldKernel>>, checkpoint: Option<CheckpointId> },
    Repository { path: PathBuf, repository: Repository, state: Option<Box<State>>, kept: Vec<String> },
    Data(Box<dyn DataSource>),
}

/// The members of a group, kernels first: nothing runs in them while the others are captured. Of a restore of some, only
/// these: `wanted` decides.
///
/// # Errors
/// `notFound` if a member is gone, `refused` by the rules for host paths.
pub(super) async fn open(
    supervisor: &Supervisor,
    group: &Group,
    wanted: impl Fn(&Member) -> bool,
) -> Result<Vec<Live>> {
    let mut members: Vec<&Member> = group.members.iter().filter(|member| wanted(member)).collect();
    members.sort_by_key(|member| match member.target {
        Target::Kernel { .. } => 0,
        Target::Repository { .. } => 1,
        Target::Database { .. } | Target::Directory { .. } | Target::Command { .. } | Target::Postgres { .. } => 2,
        // Its backup begins ahead of the pause: as late as possible.
        Target::Server { .. } => 3,
    });
    let mut opened = Vec::new();
    for member in members {
        let one = open_one(supervisor, group, member).await;
        opened.push(one.map_err(|error| {
            let message = format!("member {}: {}", member.name, error.message);
            Error { message, ..error }
        })?);
    }
    Ok(opened)
}

/// Opens one member.
///
/// # Errors
/// As [`open`].
pub(super) async fn open_one(supervisor: &Supervisor, group: &Group, member: &Member) -> Result<Live> {
    let scratch = super::scratch(supervisor.host(), group.id).join(&member.name);
    open_in(supervisor, group, member, scratch).await
}

/// Opens one member with files of an operation in `scratch`.
///
/// # Errors
/// As [`open`].
pub(super) async fn open_in(supervisor: &Supervisor, group: &Group, member: &Member, scratch: PathBuf) -> Result<Live> {
    let host = supervisor.host();
    std::fs::create_dir_all(&scratch).map_err(|error| Error::unavailable(format!("{}: {error}", scratch.display())))?;
    let kind = match &member.target {
        Target::Kernel { id } => LiveKind::Kernel { kernel: kernel(supervisor, *id)?, held: None, checkpoint: None },
        Target::Repository { path } => {
            let path = PathBuf::from(path);
            access::recheck(host, group.uid, &path)?;
            access::apart_from_servers(host, &path)?;
            let repository =
                Repository::open(&access::git(host).await?, &path).map_err(kept_commits::repository_gone)?;
            access::trusted_repository(supervisor, group.uid, &repository).await?;
            let repository = repository.leaving_out(&sources::database_members(host).await?);
            LiveKind::Repository { path, repository, state: None, kept: Vec::new() }
        }
        Target::Database { .. }
        | Target::Directory { .. }
        | Target::Command { .. }
        | Target::Postgres { .. }
        | Target::Server { .. } => {
            let source = sources::open_checked(supervisor, group.uid, member, scratch.clone()).await?;
            LiveKind::Data(source.ok_or_else(|| Error::internal("the member is no data source"))?)
        }
    };
    Ok(Live {
        name: member.name.clone(),
        host: Rc::clone(host),
        kind,
        scratch,
        member: member.clone(),
        group: (group.id, group.uid, group.name.clone()),
        captured: None,
        spent: (Duration::ZERO, Duration::ZERO),
        executions: Executions::default(),
        target: None,
    })
}

/// The files of the databases that a freeze holds or left out of its repositories: members now or then.
pub(super) fn database_files_of(parts: &[Part]) -> Vec<PathBuf> {
    // An imported freeze may name anything.
    let is_inside = |path: &&Path| path.components().all(|part| matches!(part, Component::Normal(_)));
    let files = parts.iter().flat_map(|part| match &part.captured {
        Captured::Database { path, .. } => sources::database_files(Path::new(path)).into_iter().collect(),
        Captured::Repository { path, part } => {
            let inside = part.left_out.iter().map(Path::new).filter(is_inside);
            inside.map(|file| Path::new(path).join(file)).collect()
        }
        _ => Vec::new(),
    });
    files.collect()
}

fn kernel(supervisor: &Supervisor, id: KernelId) -> Result<Rc<Kernel>> {
    supervisor.get(id).ok_or_else(|| Error::not_found(format!("kernel {id} of the group is gone")))
}

fn injected(error: std::io::Error) -> Error {
    Error::unavailable(error.to_string())
}

impl Live {
    /// Whether a step needs no deadline of its own: each call to a worker and each program of the user has one, and must
    /// not be abandoned.
    pub fn has_deadlines(&self) -> bool {
        matches!(self.kind, LiveKind::Kernel { .. })
            || matches!(self.member.target, Target::Command { .. } | Target::Postgres { .. } | Target::Server { .. })
    }

    /// Whether a change of it goes on although nothing waits for it: it must not be abandoned.
    pub fn is_lasting(&self) -> bool {
        matches!(self.kind, LiveKind::Kernel { .. } | LiveKind::Data(_))
    }

    /// Whether it has a commit or a schema of its own that may change while its group is restored.
    pub fn has_pairings(&self) -> bool {
        // Nothing runs in a held kernel.
        !matches!(self.member.target, Target::Kernel { .. } | Target::Directory { .. } | Target::Command { .. })
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
            LiveKind::Kernel { .. } | LiveKind::Data(_) => None,
        }
    }

    /// Leaves further files of databases out of a repository.
    pub fn leave_out(&mut self, files: &[PathBuf]) {
        if let LiveKind::Repository { repository, .. } = &mut self.kind {
            *repository = repository.clone().leaving_out_also(files);
        }
    }

    /// Stops admission: a kernel is held, a data source quiesced.
    pub async fn suspend(&mut self, transition: Kind, actor: &Actor, drain: Drain) -> Result<()> {
        match &mut self.kind {
            LiveKind::Kernel { kernel, held, .. } => {
                let kernel = HeldKernel::hold(&self.host, kernel, transition, actor, drain).await?;
                self.executions = kernel.executions();
                *held = Some(Box::new(kernel));
            }
            LiveKind::Data(source) => {
                if source.must_resume(transition) {
                    let (id, uid, name) = &self.group;
                    pending::record(&self.host, (*id, *uid, name), &self.member)?;
                }
                source.quiesce(transition).await?;
            }
            LiveKind::Repository { .. } => {}
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
                *state = Some(Box::new(found));
                Ok(revision)
            }
            LiveKind::Data(source) => source.revision(any).await,
        }
    }

    /// Stores what can be stored while the member goes on. It may fail without effect.
    pub async fn ahead(&mut self) {
        match &mut self.kind {
            LiveKind::Kernel { kernel, .. } => {
                if let Err(error) = held::read_ahead(&self.host, kernel).await {
                    // The capture reports it, if it still applies.
                    tracing::debug!(kernel = %kernel.spec().name, %error, "files could not be read ahead");
                }
            }
            LiveKind::Data(source) => source.ahead().await,
            LiveKind::Repository { repository, .. } => {
                // The capture has the same deadline, and reports a failure, if it still applies.
                let read =
                    tokio::time::timeout(self.host.config.limits.freeze_step, repository.state(&self.scratch, false));
                if !read.await.is_ok_and(|read| read.is_ok()) {
                    tracing::debug!(repository = %repository.path().display(), "files could not be read ahead");
                }
            }
        }
    }

    /// Pins the content; returns its revision.
    pub async fn snapshot(&mut self, kind: CheckpointType) -> Result<String> {
        fault::point("freeze.member.snapshot").map_err(injected)?;
        let any = kind == CheckpointType::System;
        match &mut self.kind {
            LiveKind::Kernel { held, checkpoint, .. } => {
                let held = held.as_mut().ok_or_else(not_held)?;
                *checkpoint = Some(held.capture(kind).await?);
                self.executions = held.executions();
                Ok(held.revision())
            }
            LiveKind::Repository { path, repository, state, .. } => {
                let state = state.clone().ok_or_else(|| Error::internal("the repository was not locked"))?;
                let revision = format!("{state:?}");
                let part = submodules::named(repository, &self.scratch, &state).await?;
                self.captured = Some(Captured::Repository { path: path.display().to_string(), part });
                Ok(revision)
            }
            LiveKind::Data(source) => {
                let (captured, revision) = source.pin(any).await?;
                self.captured = Some(captured);
                Ok(revision)
            }
        }
    }

    /// The checkpoint that a seal will make visible.
    pub fn checkpoint(&self) -> Option<(KernelId, CheckpointId)> {
        match &self.kind {
            LiveKind::Kernel { kernel, checkpoint, .. } => checkpoint.map(|id| (kernel.id, id)),
            LiveKind::Repository { .. } | LiveKind::Data(_) => None,
        }
    }

    /// Ends what writers of data wait for, before anything is stored.
    pub async fn admit_writers(&mut self) -> Result<()> {
        match &mut self.kind {
            LiveKind::Data(source) => source.admit_writers().await,
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } => Ok(()),
        }
    }

    /// Stores what the snapshot holds: of a kernel, as a checkpoint.
    pub async fn store(&mut self, freeze: FreezeId, (name, kind): (&str, CheckpointType), actor: &Actor) -> Result<()> {
        let begun = Instant::now();
        objects::blocking(|| fault::point("freeze.member.store").map_err(injected)).await?;
        match (&mut self.kind, &mut self.captured) {
            (LiveKind::Kernel { kernel, held, .. }, captured) => {
                let checkpoint = held.as_mut().ok_or_else(not_held)?.seal(name, kind, actor).await?;
                let manifest = manifest_of(&self.host, &checkpoint).await?;
                *captured = Some(Captured::Kernel {
                    kernel: kernel.id,
                    kernel_name: kernel.spec().name.to_string(),
                    checkpoint: checkpoint.id,
                    manifest: Some(checkpoint.manifest),
                    revision: KernelRevision::from(&manifest),
                    repositories: manifest.repositories,
                    under_way: self.executions.parked,
                });
            }
            (LiveKind::Repository { repository, state, .. }, Some(Captured::Repository { part, .. })) => {
                let state = state.as_ref().ok_or_else(|| Error::internal("the repository was not locked"))?;
                let kept = kept_commits::reference(self.group.0, freeze, &self.name);
                submodules::store(&self.host, (&*repository, &*kept), &self.scratch, state, part).await?;
            }
            (LiveKind::Data(source), Some(captured)) => source.store(captured).await?,
            _ => return Err(Error::internal(format!("member {} was not captured", self.name))),
        }
        self.spent.1 = begun.elapsed();
        Ok(())
    }

    /// Adds to the time within the pause.
    pub fn paused(&mut self, time: Duration) {
        self.spent.0 += time;
    }

    /// What the freeze of it cost.
    pub fn cost(&self) -> MemberCost {
        let driver = match &self.kind {
            LiveKind::Kernel { kernel, .. } => match kernel.capture.borrow().as_str() {
                capture if capture.starts_with(Driver::Btrfs.name()) => Driver::Btrfs,
                capture if capture.starts_with(Driver::Reflink.name()) => Driver::Reflink,
                _ => Driver::Tracked,
            },
            LiveKind::Repository { .. } => Driver::Git,
            LiveKind::Data(source) => source.driver(),
        };
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (name, growth) = (self.name.clone(), driver.growth().name().into());
        let (pause_us, store_us) = (us(self.spent.0), us(self.spent.1));
        MemberCost {
            name,
            driver: driver.name().into(),
            growth,
            pause_us,
            store_us,
            executions: self.executions.clone(),
        }
    }

    /// Whether it is a kernel that starts no executions.
    pub fn is_held(&self) -> bool {
        matches!(&self.kind, LiveKind::Kernel { held: Some(_), .. })
    }

    /// Lets a kernel start executions again; one of a paused group is suspended again.
    pub fn release(&mut self) {
        if let LiveKind::Kernel { kernel, held, .. } = &mut self.kind {
            *held = None;
            if kernel.is_group_paused() {
                pauses::with_threads(kernel);
            }
        }
    }

    /// Removes the checkpoint of a freeze that failed, or what keeps its commits.
    pub async fn withdraw(&self, freeze: FreezeId) -> Result<()> {
        match &self.kind {
            LiveKind::Kernel { kernel, checkpoint: Some(id), .. } => held::withdraw(kernel, *id).await,
            LiveKind::Repository { repository, .. } => {
                kept_commits::release(repository, self.group.0, Some(freeze)).await;
                Ok(())
            }
            LiveKind::Kernel { .. } | LiveKind::Data(_) => Ok(()),
        }
    }

    /// Resumes everything inside a kernel, which still starts nothing; admits writers of data.
    pub async fn resume(&mut self) -> Result<()> {
        match &mut self.kind {
            LiveKind::Kernel { held, .. } => match held {
                Some(held) => held.thaw().await,
                None => Ok(()),
            },
            LiveKind::Data(source) => {
                let resumed = source.resume().await;
                match resumed {
                    Ok(()) => pending::clear(&self.host, self.group.0, &self.name),
                    // The next operation and the next daemon try again.
                    Err(error) => {
                        let detail = serde_json::json!({ "member": self.name, "error": error.message });
                        self.host.events.publish("", "source_not_resumed", detail);
                        Err(error)
                    }
                }
            }
            LiveKind::Repository { .. } => Ok(()),
        }
    }

    /// Keeps a kernel from work until its group is resumed; admits writers of data.
    pub async fn pause(&mut self) -> Result<()> {
        let LiveKind::Kernel { kernel, held, .. } = &mut self.kind else { return self.resume().await };
        kernel.set_group_paused(true);
        match held {
            Some(held) => {
                let paused = held.pause().await;
                if held.is_beside() {
                    pauses::when_idle(kernel);
                }
                kernel.threads().iter().for_each(pauses::when_idle);
                paused
            }
            None => {
                pauses::with_threads(kernel);
                Ok(())
            }
        }
    }

    /// Reads everything that the restore of its target needs.
    pub async fn validate(&mut self) -> Result<()> {
        let target = self.target()?.clone();
        match (&mut self.kind, &target) {
            (LiveKind::Kernel { kernel, .. }, Captured::Kernel { checkpoint, manifest, .. }) => {
                let row = kernel.records.checkpoint(*checkpoint).await?;
                if let (Some(named), Some(row)) = (manifest, row)
                    && row.manifest != *named
                {
                    return Err(Error::corrupt(format!("checkpoint {checkpoint} is not what the freeze captured"))
                        .reason("signature"));
                }
                held::validate(&self.host, kernel, *checkpoint).await
            }
            (LiveKind::Repository { repository, .. }, Captured::Repository { part, .. }) => {
                submodules::validate(&self.host, repository, &self.scratch, part).await
            }
            (LiveKind::Data(source), target) if self.member.target.kind() == target.kind() => {
                source.verify(target).await
            }
            _ => Err(self.other_kind()),
        }
    }

    /// What the gate and the lock judge of the present state; `None` for a kernel and a command source without a revision.
    pub async fn present(&mut self) -> Result<Option<Captured>> {
        match &mut self.kind {
            LiveKind::Kernel { .. } => Ok(None),
            LiveKind::Repository { path, repository, .. } => {
                let state = repository.state(&self.scratch, false).await?;
                let part = submodules::named(repository, &self.scratch, &state).await?;
                Ok(Some(Captured::Repository { path: path.display().to_string(), part }))
            }
            LiveKind::Data(source) => source.present().await,
        }
    }

    /// The part of a kernel with what its workspace has now.
    pub fn present_kernel(&self, repositories: Vec<RepositoryLock>, revision: KernelRevision) -> Part {
        let (kernel, kernel_name) = match &self.kind {
            LiveKind::Kernel { kernel, .. } => (kernel.id, kernel.spec().name.to_string()),
            LiveKind::Repository { .. } | LiveKind::Data(_) => (KernelId::from_bytes([0; 16]), String::new()),
        };
        // Nothing holds it.
        let (checkpoint, manifest) = (CheckpointId::from_bytes([0; 16]), None);
        let captured =
            Captured::Kernel { kernel, kernel_name, checkpoint, manifest, repositories, revision, under_way: 0 };
        Part { name: self.name.clone(), captured, driver: String::new(), storage: Default::default() }
    }

    /// Refuses a restore that would destroy what no freeze holds. `present`: the present state.
    ///
    /// # Errors
    /// `refused` (`ignored_files`).
    pub async fn check_losses(&self, present: Option<&Captured>) -> Result<()> {
        match (&self.kind, self.target()?, present) {
            (
                LiveKind::Repository { repository, .. },
                Captured::Repository { part: target, .. },
                Some(Captured::Repository { part: present, .. }),
            ) => submodules::check_losses(repository, &self.scratch, present, target).await,
            _ => Ok(()),
        }
    }

    /// The kernel, if it is one.
    pub fn kernel(&self) -> Option<&Rc<Kernel>> {
        match &self.kind {
            LiveKind::Kernel { kernel, .. } => Some(kernel),
            LiveKind::Repository { .. } | LiveKind::Data(_) => None,
        }
    }

    /// Makes the inactive copy: objects of a repository to which nothing refers, files beside a database.
    pub async fn prepare(&mut self) -> Result<()> {
        fault::point("freeze.member.prepare").map_err(injected)?;
        let target = self.target()?.clone();
        match (&mut self.kind, &target) {
            (LiveKind::Repository { repository, .. }, Captured::Repository { part, .. }) => {
                submodules::prepare(repository, &self.scratch, part).await
            }
            (LiveKind::Data(source), target) => source.prepare(target).await,
            _ => Ok(()),
        }
    }

    /// Makes the target the present state; returns what a user must know of it.
    pub async fn switch(&mut self, actor: &Actor, attach: bool) -> Result<Vec<String>> {
        fault::point("freeze.member.switch").map_err(injected)?;
        let target = self.target()?.clone();
        let safety = self.captured()?.clone();
        match (&mut self.kind, target, safety) {
            (LiveKind::Kernel { held, .. }, Captured::Kernel { checkpoint, under_way, .. }, _) => {
                let restored = held.as_mut().ok_or_else(not_held)?.restore(checkpoint, actor).await?;
                return Ok(self.notes_of_restore(&restored, under_way));
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
                submodules::check_losses(repository, &self.scratch, &safety, &part).await?;
                submodules::switch(repository, &self.scratch, &part, attach).await?;
            }
            (LiveKind::Data(source), target, safety) => source.switch(&target, &safety).await?,
            _ => return Err(self.other_kind()),
        }
        Ok(Vec::new())
    }

    /// Brings the member back to what was captured before the restore.
    pub async fn revert(&mut self, actor: &Actor) -> Result<()> {
        fault::point("freeze.member.revert").map_err(injected)?;
        let safety = self.captured()?.clone();
        match (&mut self.kind, safety) {
            (LiveKind::Kernel { held, .. }, Captured::Kernel { checkpoint, .. }) => {
                held.as_mut().ok_or_else(not_held)?.revert(checkpoint, actor).await
            }
            (LiveKind::Repository { repository, kept, .. }, Captured::Repository { part, .. }) => {
                let target = match &self.target {
                    Some(Captured::Repository { part, .. }) => Some(part),
                    _ => None,
                };
                let (scratch, group) = (&self.scratch, &self.group.2);
                submodules::recover(&self.host, repository, scratch, &part).await?;
                let found = submodules::keep_work(&self.host, repository, scratch, (group, &part, target)).await?;
                kept.extend(found);
                submodules::switch(repository, scratch, &part, true).await
            }
            (LiveKind::Data(source), safety) => source.revert(&safety, self.target.as_ref()).await,
            _ => Err(self.other_kind()),
        }
    }

    /// Notes that a restore of a former daemon may have changed it.
    pub fn may_be_switched(&mut self) {
        if let LiveKind::Data(source) = &mut self.kind {
            source.may_be_switched();
        }
    }

    /// Keeps code from running in a kernel until its group was brought back.
    pub fn await_group(&self) {
        if let LiveKind::Kernel { kernel, .. } = &self.kind {
            kernel.set_awaits_group(true);
        }
    }

    /// Removes inactive copies.
    pub async fn discard(&mut self) {
        if let LiveKind::Data(source) = &mut self.kind {
            source.discard().await;
        }
    }

    fn target(&self) -> Result<&Captured> {
        self.target.as_ref().ok_or_else(|| Error::internal(format!("member {} has no target", self.name)))
    }

    fn other_kind(&self) -> Error {
        Error::refused(format!("member {} was of another kind at that freeze", self.name)).reason("other_member")
    }
}

fn not_held() -> Error {
    Error::internal("the kernel is not held")
}
