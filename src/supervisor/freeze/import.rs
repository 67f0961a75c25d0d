//! A group from a file: its kernels are created, its repositories get their history, and its freeze is sealed anew for
//! this host. Databases, directories and the work in repositories are brought back by a restore, as on any host.
//!
//! ```text
//! places ─▶ group with its intent ─▶ repositories beside their places ─▶ kernels
//!        ─▶ freeze, members, intent of the places: visible as a whole ─▶ repositories in their places
//! ```
//! A failure before the group is visible withdraws everything; so does the next daemon, which finds the intent. Then
//! nothing is removed any more: what has no place yet comes into it.

use std::path::{Path, PathBuf};

use super::groups::checked_name;
use super::import_end::{new_repositories, place, repository_of, withdraw};
use super::member_places::{self, Placed};
use super::operation_turn::of_targets;
use super::pairings::pairings;
use super::{access, objects, scratch};
use crate::bundle::GroupContents;
use crate::catalog::{NewFreeze, Notes, host_database};
use crate::core::audit::NewAudit;
use crate::core::checkpoint::CheckpointType;
use crate::core::error::{Error, Result};
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::portable::{FreezeOrigin, GroupArrival};
use crate::core::freeze::{
    Captured, DatabasePart, Freeze, FreezeManifest, Group, Intent, Member, NewRepository, Part, RepositoryPart, Target,
};
use crate::core::host_resource::HostResource;
use crate::core::ids::{Digest, FreezeId, GroupId, KernelId};
use crate::core::signature::{Signer, Subject};
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::host::{Host, resolve_missing};
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::bundle_io::{self, Import, Review};
use crate::sys::fault;
use crate::sys::fs::sync_file_system;

/// The result of an import.
pub struct Arrived {
    /// The group.
    pub group: Group,
    /// Its freeze.
    pub freeze: Freeze,
    /// Members of the file that are not in the group.
    pub left_out: Vec<String>,
    /// The resources of the host that its kernels have.
    pub granted: Vec<HostResource>,
    /// The resources that the file requests and its kernels do not have.
    pub withheld: Vec<HostResource>,
}

/// The group of a file before it is imported: its freeze and who sealed that.
pub struct ArrivingGroup {
    /// The freeze.
    pub freeze: Freeze,
    /// Its manifest.
    pub manifest: FreezeManifest,
    /// The host that sealed it.
    pub sealer: Signer,
}

/// Describes the group of a reviewed file.
///
/// # Errors
/// `invalidArgument` for a kernel's file, and database errors.
pub async fn arriving(supervisor: &Supervisor, import: &Import, actor: &Actor) -> Result<ArrivingGroup> {
    let group = import.group()?;
    let sealer = sealer(supervisor, &group.head.freeze, actor).await?;
    Ok(ArrivingGroup { freeze: group.head.freeze.clone(), manifest: group.manifest.clone(), sealer })
}

pub(super) async fn sealer(supervisor: &Supervisor, freeze: &Freeze, actor: &Actor) -> Result<Signer> {
    let known = supervisor.host().known_keys(actor.uid).await?;
    Ok(Signer::of(freeze.signed.as_ref(), Subject::Freeze, freeze.manifest, &known))
}

/// Creates a group from a file.
///
/// # Errors
/// The defect of the file; `alreadyExists`, `refused` (`place`), and errors of kernels and repositories: nothing is left
/// then.
pub async fn import(
    supervisor: &Supervisor,
    mut import: Import,
    arrival: GroupArrival,
    actor: &Actor,
) -> Result<Arrived> {
    import.review(supervisor, actor).await?;
    let parts = &import.group()?.manifest.parts;
    let named = |(name, place): &(String, String)| {
        let part = parts.iter().find(|part| part.name == *name)?;
        Target::named(part.captured.kind(), place)
    };
    let named: Vec<Target> = arrival.places.iter().filter_map(named).collect();
    let turn = of_targets(supervisor.host(), None, named.iter()).await?;
    let (this, actor) = (supervisor.clone(), actor.clone());
    // A separate task, so that a client's disconnect leaves nothing half done.
    let making = tokio::task::spawn_local(async move {
        let _turn = turn;
        let (contents, review) = import.take_group()?;
        let made = perform(&this, contents, review, arrival, &actor).await;
        // Until now it protected the objects of the file.
        drop(import);
        made
    });
    making.await.map_err(|error| Error::internal(error.to_string()))?
}

async fn perform(
    supervisor: &Supervisor,
    contents: GroupContents,
    review: Review,
    arrival: GroupArrival,
    actor: &Actor,
) -> Result<Arrived> {
    let host = supervisor.host();
    let sealer = sealer(supervisor, &contents.head.freeze, actor).await?;
    let resources = bundle_io::divide(review.requested, arrival.granted.clone())?;
    // The user may trust the key no longer.
    sealer.require_trusted()?;
    let id = GroupId::from_bytes(host.random());
    let (group, freeze) =
        build(supervisor, (contents, id), (sealer, review.signer), &resources, &arrival, actor).await?;
    Ok(Arrived { group, freeze, left_out: arrival.left_out, granted: resources.0, withheld: resources.1 })
}

/// Makes a group that moved here, of kernels that live here.
///
/// # Errors
/// As [`import`].
pub(super) async fn bring(
    supervisor: &Supervisor,
    contents: GroupContents,
    id: GroupId,
    arrival: GroupArrival,
    actor: &Actor,
) -> Result<()> {
    let sealer = sealer(supervisor, &contents.head.freeze, actor).await?;
    // The other host is known by its connection.
    let signer = Signer::of(None, Subject::Export, contents.digest, &[]);
    build(supervisor, (contents, id), (sealer, signer), &(Vec::new(), Vec::new()), &arrival, actor).await.map(drop)
}

/// A group without members.
pub(super) fn arriving_group(host: &Host, id: GroupId, name: String, actor: &Actor) -> Group {
    Group {
        id,
        uid: actor.uid,
        name,
        members: Vec::new(),
        created_at_ms: host.now_ms(),
        freezes: 1,
        head: None,
        undo: None,
        unfinished: false,
        on_failure: OnFailure::default(),
        paused: None,
    }
}

async fn build(
    supervisor: &Supervisor,
    (contents, id): (GroupContents, GroupId),
    (sealer, signer): (Signer, Signer),
    resources: &bundle_io::Resources,
    arrival: &GroupArrival,
    actor: &Actor,
) -> Result<(Group, Freeze)> {
    let host = supervisor.host();
    let name = if arrival.name.is_empty() { &contents.manifest.group_name } else { &arrival.name };
    let name = free_name(supervisor, name, actor).await?;
    let mut group = arriving_group(host, id, name, actor);
    let placed = member_places::all(supervisor, &mut group, &contents.manifest, arrival).await;
    let placed = match placed.and_then(|placed| has_room(host, &contents, &placed).map(|()| placed)) {
        Ok(placed) => placed,
        Err(error) => {
            discard_scratch(host, group.id).await;
            return Err(error);
        }
    };
    // Those that moved here are not withdrawn with the group.
    let made = group.members.iter().filter(|_| !arrival.moved);
    let kernels: Vec<KernelId> = made.filter_map(kernel_of).collect();
    let repositories = new_repositories(group.id, &placed);
    let completed: Vec<String> =
        placed.iter().filter(|one| !one.is_new).filter_map(|one| repository_of(&one.member)).collect();
    let intent =
        Intent::Import { kernels: kernels.clone(), repositories: repositories.clone(), completed: completed.clone() };
    let named = (group.uid, group.name.clone());
    host.catalog.begin_group_import(group.id, named, group.created_at_ms, intent).await?;
    let arriving = Arriving {
        supervisor,
        group,
        contents,
        actor,
        sealer,
        signer,
        repositories: &repositories,
        moved: arrival.moved,
    };
    let made = arriving.make(placed, resources).await;
    let Arriving { group, .. } = arriving;
    discard_scratch(host, group.id).await;
    match made {
        Ok(freeze) => {
            if !repositories.is_empty() {
                place(host, group.id, &repositories).await.map_err(|error| {
                    let message = format!(
                        "group {} was imported, but a repository is not in its place: {}",
                        group.name, error.message
                    );
                    let hint = format!("make room there; the next freeze or restore of {} goes on", group.name);
                    Error { message, ..error }.reason("group_unfinished").hint(hint)
                })?;
            }
            Ok((group, freeze))
        }
        Err(error) => {
            if let Err(left) = withdraw(supervisor, group.id, (&kernels, &repositories, &completed)).await {
                tracing::error!(group = %group.name, error = %left, "an import could not be withdrawn");
                host.events.publish(
                    "",
                    "group_unfinished",
                    serde_json::json!({ "group": group.name, "error": left.to_string() }),
                );
            }
            Err(error)
        }
    }
}

/// Checks that neither a group nor a kernel of the user has the name.
pub(super) async fn free_name(supervisor: &Supervisor, name: &str, actor: &Actor) -> Result<String> {
    let name = checked_name(name)?.to_string();
    if super::exists(supervisor, actor.uid, &name).await {
        return Err(Error::already_exists(format!("there is a group {name} already")).hint("choose another name"));
    }
    if supervisor.find(actor.uid, &name).is_ok() {
        return Err(Error::already_exists(format!("there is a kernel {name}")).hint("choose another name"));
    }
    Ok(name)
}

fn kernel_of(member: &Member) -> Option<KernelId> {
    match member.target {
        Target::Kernel { id } => Some(id),
        _ => None,
    }
}

pub(super) async fn discard_scratch(host: &Host, group: GroupId) {
    let folder = scratch(host, group);
    // The next operation removes what is left.
    let _ = objects::blocking(move || {
        let _ = std::fs::remove_dir_all(folder);
        Ok(())
    })
    .await;
}

/// Checks that what the members need fits the disk of the store; each kernel's limits are checked when it is created, and
/// the file systems of repositories when they are.
pub(super) fn has_room(host: &Host, contents: &GroupContents, placed: &[Placed]) -> Result<()> {
    let is_placed = |name: &str| placed.iter().any(|one| one.member.name == name);
    let is_kept = |id: KernelId| {
        placed.iter().any(|one| matches!(&one.part.captured, Captured::Kernel { kernel, .. } if *kernel == id))
    };
    let members = contents.sizes.iter().filter(|(name, _)| is_placed(name)).map(|(_, bytes)| *bytes);
    let kernels = contents.kernels.iter().filter(|kernel| is_kept(kernel.head.kernel)).map(|kernel| kernel.bytes);
    let wanted = members.chain(kernels).fold(0, u64::saturating_add);
    match host.free_bytes() {
        Some(free) if wanted > free => {
            Err(Error::busy(format!("its members have {wanted} bytes, and {free} are free here"))
                .reason(crate::core::error::DISK_FULL)
                .hint("free space on the device or raise the quota, then try again"))
        }
        _ => Ok(()),
    }
}

/// An import under way.
pub(super) struct Arriving<'a> {
    pub supervisor: &'a Supervisor,
    pub group: Group,
    pub contents: GroupContents,
    actor: &'a Actor,
    sealer: Signer,
    signer: Signer,
    pub repositories: &'a [NewRepository],
    /// Whether its kernels moved here.
    moved: bool,
}

impl Arriving<'_> {
    async fn make(&self, placed: Vec<Placed>, resources: &bundle_io::Resources) -> Result<Freeze> {
        let named =
            |name: String| move |error: Error| Error { message: format!("member {name}: {}", error.message), ..error };
        for one in &placed {
            self.database(one).await.map_err(named(one.member.name.clone()))?;
        }
        for one in &placed {
            if let Captured::Repository { part, .. } = &one.part.captured {
                self.repository(one, part).await.map_err(named(one.member.name.clone()))?;
            }
        }
        for one in &placed {
            self.stays(&one.member).map_err(named(one.member.name.clone()))?;
        }
        let mut parts = Vec::new();
        for one in &placed {
            let captured = self.captured(one, resources).await.map_err(named(one.member.name.clone()))?;
            parts.push(Part {
                name: one.member.name.clone(),
                captured,
                driver: one.part.driver.clone(),
                storage: one.part.storage.clone(),
            });
        }
        for one in placed.iter().filter(|one| !one.is_new) {
            if let Captured::Repository { part, .. } = &one.part.captured {
                self.complete(one, part).await.map_err(named(one.member.name.clone()))?;
            }
        }
        let sealed = self.seal(parts).await?;
        for kernel in self.kernels().filter(|_| !self.moved) {
            kernel.set_awaits_group(false);
        }
        Ok(sealed)
    }

    /// Where the files of a member's import are.
    pub(super) fn folder(&self, one: &Placed) -> Result<PathBuf> {
        let folder = scratch(self.supervisor.host(), self.group.id).join(&one.member.name);
        std::fs::create_dir_all(&folder).map_err(|error| Error::unavailable(error.to_string()))?;
        Ok(folder)
    }

    /// Checks that a captured database is the one that the freeze names, before anything is in a place.
    async fn database(&self, one: &Placed) -> Result<()> {
        let Captured::Database { part: DatabasePart::Whole { image, revision, .. }, .. } = &one.part.captured else {
            return Ok(());
        };
        let (copy, named) = (self.folder(one)?.join("image"), revision.clone());
        objects::get(self.supervisor.host(), *image, &copy).await?;
        match objects::blocking(move || host_database::revision(&copy)).await {
            Ok(found) if found == named => Ok(()),
            Ok(_) => Err(Error::corrupt("its database has another schema than the freeze says")),
            Err(error) => Err(Error::corrupt(format!("its database cannot be read: {}", error.message))),
        }
    }

    /// Checks that the path of a database or directory leads where it was named: links in a new repository do not.
    fn stays(&self, member: &Member) -> Result<()> {
        let (Target::Database { path } | Target::Directory { path }) = &member.target else { return Ok(()) };
        let path = Path::new(path);
        let inside = self.repositories.iter().find_map(|new| {
            let rest = path.strip_prefix(&new.place).ok()?;
            Some(Path::new(&new.beside).join(rest))
        });
        let Some(inside) = inside else {
            return access::recheck(self.supervisor.host(), self.group.uid, path);
        };
        match resolve_missing(&inside).is_some_and(|real| real == inside) {
            true => Ok(()),
            false => Err(Error::refused(format!("{} leads elsewhere in the repository of the file", path.display()))
                .reason("source_moved")
                .hint("give a place outside of the repository")),
        }
    }

    pub(super) async fn in_time(&self, step: impl Future<Output = Result<()>>) -> Result<()> {
        let most = self.supervisor.host().config.limits.freeze_store;
        match tokio::time::timeout(most, step).await {
            Ok(done) => done,
            Err(_) => Err(Error::deadline(format!("it was not made within {most:?}")).reason("member_late")),
        }
    }

    fn kernels(&self) -> impl Iterator<Item = std::rc::Rc<crate::supervisor::kernel::Kernel>> {
        self.group.members.iter().filter_map(kernel_of).filter_map(|id| self.supervisor.get(id))
    }

    /// What the freeze of this host has of a member. A kernel is created.
    async fn captured(&self, one: &Placed, resources: &bundle_io::Resources) -> Result<Captured> {
        let here = |target: &Target| match target {
            Target::Repository { path } | Target::Database { path } | Target::Directory { path } => path.clone(),
            Target::Command { source } => source.clone(),
            Target::Postgres { connection } => connection.clone(),
            Target::Server { server } => server.clone(),
            Target::Kernel { id } => id.to_string(),
        };
        let place = here(&one.member.target);
        Ok(match one.part.captured.clone() {
            Captured::Kernel { kernel, checkpoint, repositories, revision, under_way, .. } if self.moved => {
                let gone = || Error::not_found(format!("kernel {kernel} of the group is gone"));
                let found = self.supervisor.get(kernel).ok_or_else(gone)?;
                let kernel_name = found.spec().name.to_string();
                let manifest = Some(found.records.checkpoint(checkpoint).await?.ok_or_else(gone)?.manifest);
                self.supervisor.host().catalog.begin_pins(vec![(kernel, checkpoint)]).await?;
                found.records.pin_checkpoint(checkpoint, true).await?;
                Captured::Kernel { kernel, kernel_name, checkpoint, manifest, repositories, revision, under_way }
            }
            Captured::Kernel { kernel, checkpoint, repositories, revision, under_way, .. } => {
                let (id, name, manifest) = self.kernel(one, kernel, resources).await?;
                let (kernel, kernel_name, manifest) = (id, name, Some(manifest));
                Captured::Kernel { kernel, kernel_name, checkpoint, manifest, repositories, revision, under_way }
            }
            Captured::Repository { part, .. } => {
                Captured::Repository { path: place, part: RepositoryPart { linked_to: None, ..part } }
            }
            Captured::Database { mut part, .. } => {
                // No database is a program.
                if let DatabasePart::Whole { mode, .. } = &mut part {
                    *mode &= 0o666;
                }
                Captured::Database { path: place, part }
            }
            Captured::Directory { mut part, .. } => {
                // Users of the source host mean nothing here.
                (part.uid, part.gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
                Captured::Directory { path: place, part }
            }
            // What a program of the other host printed says nothing here.
            Captured::Command { data, bytes, .. } => {
                Captured::Command { source: place, data, bytes, revision: String::new() }
            }
            Captured::Postgres { part, .. } => Captured::Postgres { connection: place, part },
            Captured::Server { .. } => return Err(Error::internal("a server has no place")),
        })
    }

    /// Creates a kernel, in which nothing runs yet; returns its id, its name and the manifest of its checkpoint.
    async fn kernel(
        &self,
        one: &Placed,
        former: KernelId,
        (granted, withheld): &bundle_io::Resources,
    ) -> Result<(KernelId, String, Digest)> {
        objects::blocking(|| {
            fault::point("freeze.import.kernel").map_err(|error| Error::unavailable(error.to_string()))
        })
        .await?;
        let (Some(id), Some(reserved)) = (kernel_of(&one.member), &one.reserved) else {
            return Err(Error::internal("a kernel has no name"));
        };
        let contents = self.contents.kernels.iter().find(|contents| contents.head.kernel == former).cloned();
        let mut contents = contents.ok_or_else(|| Error::corrupt("the file lacks its kernel"))?;
        // The freeze needs it: retention does not apply.
        contents.head.checkpoints.iter_mut().for_each(|packed| packed.pinned = true);
        let begin = contents.head.begin;
        let resources = (granted.clone(), withheld.clone());
        let made =
            bundle_io::make(self.supervisor, contents, (id, reserved), resources, &self.signer, self.actor).await?;
        made.kernel.set_awaits_group(true);
        let row = made.kernel.records.checkpoint(begin).await?;
        let row = row.ok_or_else(|| Error::internal("an imported kernel has no checkpoint"))?;
        Ok((id, made.kernel.spec().name.to_string(), row.manifest))
    }

    /// What the audit log says of freeze `id` of this host.
    fn audited(&self, id: FreezeId) -> String {
        let by = |signer: &Signer| {
            let key = signer.key.map_or_else(|| "no key".into(), |key| key.to_string());
            format!("{key} ({})", signer.standing.name())
        };
        format!(
            "{}: {}; freeze {} of host {}, sealed by {}; file {} signed by {}",
            self.group.name,
            id,
            self.contents.head.freeze.id,
            self.contents.head.host,
            by(&self.sealer),
            self.contents.digest,
            by(&self.signer)
        )
    }

    /// Seals the freeze of this host, and makes the group visible.
    async fn seal(&self, parts: Vec<Part>) -> Result<Freeze> {
        let Arriving { group, contents, actor, .. } = self;
        let (host, former) = (self.supervisor.host(), &contents.head.freeze);
        let made: Vec<_> = self.repositories.iter().map(|new| PathBuf::from(&new.beside)).collect();
        let sealing = move || {
            fault::point("freeze.import.seal")?;
            // Git makes objects and references durable, but no files.
            made.iter().try_for_each(|made| sync_file_system(made, "freeze.import.sync"))
        };
        objects::blocking(move || sealing().map_err(|error| Error::unavailable(error.to_string()))).await?;
        let is_here = |id| self.supervisor.get(id).is_some_and(|kernel| kernel.check_here().is_ok());
        let is_whole = group.members.iter().filter_map(kernel_of).all(is_here);
        if !is_whole {
            return Err(Error::conflict("a kernel of the group was removed or moved during the import"));
        }
        let key = host.signing_key().await?;
        let manifest = FreezeManifest {
            id: FreezeId::from_bytes(host.random()),
            group: group.id,
            group_name: group.name.clone(),
            changed: Vec::new(),
            origin: Some(FreezeOrigin {
                host: contents.head.host,
                freeze: former.id,
                manifest: former.manifest,
                signed: former.signed,
                file: contents.digest,
            }),
            parts,
            ..contents.manifest.clone()
        };
        let bytes = manifest.encode().map_err(|error| Error::refused(error.to_string()).reason("manifest_size"))?;
        let digest = host.store.put(bytes).await?;
        let freeze = Freeze {
            id: manifest.id,
            number: 0,
            // No seal covers what the file says of it.
            kind: CheckpointType::Manual,
            at_ms: manifest.at_ms,
            creator: actor.to_string(),
            restored_at_ms: None,
            manifest: digest,
            signed: Some(key.sign(Subject::Freeze, digest)),
            ..former.clone()
        };
        let new = NewFreeze {
            freeze,
            group: group.id,
            checkpoints: manifest.checkpoints(),
            pairings: pairings(&manifest.parts),
        };
        let detail = self.audited(manifest.id);
        let line = host.line(actor, "group.import", None);
        let audit = vec![NewAudit { owner: Some(group.uid), manifest: Some(digest), detail: bounded(detail), ..line }];
        let notes = Notes { events: Vec::new(), audit };
        let repositories = self.repositories.to_vec();
        let next = (!repositories.is_empty()).then_some(Intent::Place { repositories });
        let sealed = host.catalog.adopt_group(group.members.clone(), new, next, notes).await?.value;
        let detail = serde_json::json!({ "group": group.name, "id": sealed.id, "file": contents.digest });
        host.events.publish("", "group_imported", detail);
        Ok(sealed)
    }
}
