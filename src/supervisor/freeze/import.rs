//! A group from a file: its kernels are created, its repositories get their history, and its freeze is sealed anew for
//! this host. Databases, directories and the work in repositories are brought back by a restore, as on any host.
//!
//! ```text
//! places ─▶ group with its intent ─▶ repositories beside their places ─▶ kernels ─▶ repositories in their places
//!        ─▶ freeze, members, end of the intent: visible as a whole
//! ```
//! A failure withdraws everything; so does the next daemon, which finds the intent.

use std::path::{Path, PathBuf};

use super::groups::checked_name;
use super::member_places::{self, Placed};
use super::run_freeze::pairings;
use super::{access, objects, scratch, turn};
use crate::bundle::GroupContents;
use crate::catalog::{NewFreeze, Notes};
use crate::core::audit::NewAudit;
use crate::core::error::{Error, Result};
use crate::core::freeze::portable::{FreezeOrigin, GroupArrival};
use crate::core::freeze::{Captured, Freeze, FreezeManifest, Group, Intent, Member, Part, RepositoryPart, Target};
use crate::core::host_resource::HostResource;
use crate::core::ids::{Digest, FreezeId, GroupId, KernelId};
use crate::core::signature::{Signer, Subject};
use crate::git::{self, Repository, State};
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::command::Change;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::bundle_io::{self, Import, Review};
use crate::sys::fault;
use crate::sys::fs::{remove_tree, rename_durable};

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

async fn sealer(supervisor: &Supervisor, freeze: &Freeze, actor: &Actor) -> Result<Signer> {
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
    let turn = turn(supervisor.host()).await?;
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
    let name = if arrival.name.is_empty() { contents.manifest.group_name.clone() } else { arrival.name.clone() };
    let name = checked_name(&name)?.to_string();
    if super::exists(supervisor, actor.uid, &name).await {
        return Err(Error::already_exists(format!("there is a group {name} already")).hint("choose another name"));
    }
    if supervisor.find(actor.uid, &name).is_ok() {
        return Err(Error::already_exists(format!("there is a kernel {name}")).hint("choose another name"));
    }
    let mut group = Group {
        id: GroupId::from_bytes(host.random()),
        uid: actor.uid,
        name,
        members: Vec::new(),
        created_at_ms: host.now_ms(),
        freezes: 1,
        head: None,
        undo: None,
        unfinished: false,
    };
    // The user may trust the key no longer.
    sealer.require_trusted()?;
    let placed = member_places::all(supervisor, &mut group, &contents.manifest, &arrival).await;
    let placed = placed.inspect_err(|_| drop(std::fs::remove_dir_all(scratch(host, group.id))))?;
    has_room(host, &contents)?;
    let intent = Intent::Import {
        kernels: group.members.iter().filter_map(kernel_of).collect(),
        repositories: placed.iter().filter(|one| one.is_new).filter_map(|one| path_of(&one.member)).collect(),
    };
    let named = (group.uid, group.name.clone());
    host.catalog.begin_group_import(group.id, named, group.created_at_ms, intent.clone()).await?;
    let arriving = Arriving { supervisor, group, contents, actor, sealer, signer: review.signer };
    let made = arriving.make(placed, &resources).await;
    let Arriving { group, .. } = arriving;
    let _ = std::fs::remove_dir_all(scratch(host, group.id));
    match made {
        Ok(freeze) => {
            Ok(Arrived { group, freeze, left_out: arrival.left_out, granted: resources.0, withheld: resources.1 })
        }
        Err(error) => {
            if let Intent::Import { kernels, repositories } = intent
                && let Err(left) = withdraw(supervisor, group.id, &kernels, &repositories).await
            {
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

fn kernel_of(member: &Member) -> Option<KernelId> {
    match member.target {
        Target::Kernel { id } => Some(id),
        _ => None,
    }
}

fn path_of(member: &Member) -> Option<String> {
    match &member.target {
        Target::Repository { path } => Some(path.clone()),
        _ => None,
    }
}

/// Checks that what the kernels and the members need fits the disk; each kernel's limits are checked when it is created.
fn has_room(host: &Host, contents: &GroupContents) -> Result<()> {
    let kernels = contents.kernels.iter().map(|kernel| kernel.bytes);
    let wanted = kernels.fold(contents.bytes, u64::saturating_add);
    match host.free_bytes() {
        Some(free) if wanted > free => {
            Err(Error::busy(format!("its members have {wanted} bytes, and {free} are free here"))
                .reason(crate::core::error::DISK_FULL)
                .hint("free space on the device or raise the quota, then try again"))
        }
        _ => Ok(()),
    }
}

/// Where a repository is made before it is in its place.
fn beside(group: GroupId, path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}.ryokan-{group}"))
}

/// Removes everything of an import that did not become visible. May be repeated.
///
/// # Errors
/// Those of kernels and files: the intent stays then.
pub(super) async fn withdraw(
    supervisor: &Supervisor,
    group: GroupId,
    kernels: &[KernelId],
    repositories: &[String],
) -> Result<()> {
    let host = supervisor.host();
    for kernel in kernels.iter().filter_map(|id| supervisor.get(*id)) {
        kernel.set_awaits_group(false);
        let change = Change { actor: host.own_actor(), expected_version: 0 };
        supervisor.remove(&kernel, change, true).await?;
    }
    for path in repositories.iter().map(Path::new) {
        let is_own = git::mark_of(path).is_some_and(|mark| mark == group.to_string());
        let own = is_own.then(|| path.to_owned());
        for folder in [Some(beside(group, path)), own].into_iter().flatten() {
            match remove_tree(&folder) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::unavailable(format!("{}: {error}", folder.display())));
                }
                _ => {}
            }
        }
    }
    let line = host.line(&host.own_actor(), "group.withdraw", None);
    let notes = Notes { events: Vec::new(), audit: vec![NewAudit { detail: group.to_string(), ..line }] };
    host.catalog.remove_group(group, true, notes).await?;
    Ok(())
}

/// An import under way.
struct Arriving<'a> {
    supervisor: &'a Supervisor,
    group: Group,
    contents: GroupContents,
    actor: &'a Actor,
    sealer: Signer,
    signer: Signer,
}

impl Arriving<'_> {
    async fn make(&self, placed: Vec<Placed>, resources: &bundle_io::Resources) -> Result<Freeze> {
        let named =
            |name: String| move |error: Error| Error { message: format!("member {name}: {}", error.message), ..error };
        for one in &placed {
            if let Captured::Repository { part, .. } = &one.part.captured {
                self.repository(one, part).await.map_err(named(one.member.name.clone()))?;
            }
        }
        let mut parts = Vec::new();
        for one in &placed {
            let captured = self.captured(one, resources).await.map_err(named(one.member.name.clone()))?;
            parts.push(Part { name: one.member.name.clone(), captured, driver: one.part.driver.clone() });
        }
        let new: Vec<PathBuf> =
            placed.iter().filter(|one| one.is_new).filter_map(|one| path_of(&one.member)).map(PathBuf::from).collect();
        for path in &new {
            let (from, to) = (beside(self.group.id, path), path.clone());
            let placing = objects::blocking(move || {
                rename_durable(&from, &to, "freeze.import.place").map_err(|error| Error::unavailable(error.to_string()))
            });
            placing.await?;
        }
        let sealed = self.seal(parts).await?;
        new.iter().for_each(|path| git::unmark(path));
        for kernel in self.kernels() {
            kernel.set_awaits_group(false);
        }
        Ok(sealed)
    }

    fn kernels(&self) -> impl Iterator<Item = std::rc::Rc<crate::supervisor::kernel::Kernel>> {
        self.group.members.iter().filter_map(kernel_of).filter_map(|id| self.supervisor.get(id))
    }

    /// Makes a new repository beside its place, or completes an existing one, and checks that the captured work fits.
    async fn repository(&self, one: &Placed, part: &RepositoryPart) -> Result<()> {
        let host = self.supervisor.host();
        let failed = |error: std::io::Error| Error::unavailable(error.to_string());
        let path = PathBuf::from(path_of(&one.member).unwrap_or_default());
        let folder = scratch(host, self.group.id).join(&one.member.name);
        std::fs::create_dir_all(&folder).map_err(failed)?;
        let (git, history) = (access::git(host).await?, folder.join("history"));
        let packed = self.contents.head.histories.iter().find(|history| history.member == one.member.name);
        let packed = packed.ok_or_else(|| Error::corrupt("the file lacks its history"))?;
        objects::get(host, packed.pack, &history).await?;
        let parent = path.parent().unwrap_or(&path).to_owned();
        let most = nix::sys::statvfs::statvfs(&parent)
            .map_or(u64::MAX, |found| found.blocks_available().saturating_mul(found.fragment_size()));
        let step = async {
            let repository = if one.is_new {
                let made = Repository::create(&git, &beside(self.group.id, &path), &history, &part.head, most).await?;
                made.mark(&self.group.id.to_string())?;
                made
            } else {
                let there = Repository::open(&git, &path)?;
                there.add_history(&history, &part.head.commit).await?;
                there
            };
            access::trusted_repository(self.supervisor, self.group.uid, &repository).await?;
            let (pack, apart) = (folder.join("pack"), folder.join("verify"));
            if let Some(digest) = part.pack {
                objects::get(host, digest, &pack).await?;
            }
            repository.verify(&apart, &State::from(part), part.pack.is_some().then_some(&*pack)).await?;
            repository.check_size(&part.work_tree, Some(&apart), most).await
        };
        match tokio::time::timeout(host.config.limits.freeze_store, step).await {
            Ok(done) => done,
            Err(_) => Err(Error::deadline(format!("it was not made within {:?}", host.config.limits.freeze_store))
                .reason("member_late")),
        }
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
            Captured::Kernel { kernel, checkpoint, repositories, revision, .. } => {
                let (id, name, manifest) = self.kernel(one, kernel, resources).await?;
                let (kernel, kernel_name, manifest) = (id, name, Some(manifest));
                Captured::Kernel { kernel, kernel_name, checkpoint, manifest, repositories, revision }
            }
            Captured::Repository { part, .. } => Captured::Repository { path: place, part },
            Captured::Database { part, .. } => Captured::Database { path: place, part },
            Captured::Directory { mut part, .. } => {
                // Users of the source host mean nothing here.
                (part.uid, part.gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
                Captured::Directory { path: place, part }
            }
            Captured::Command { data, bytes, .. } => Captured::Command { source: place, data, bytes },
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
        objects::blocking(|| fault::point("freeze.import.seal").map_err(|error| Error::unavailable(error.to_string())))
            .await?;
        let is_whole = group.members.iter().filter_map(kernel_of).all(|id| self.supervisor.get(id).is_some());
        if !is_whole {
            return Err(Error::conflict("a kernel of the group was removed during the import"));
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
        let sealed = host.catalog.adopt_group(group.members.clone(), new, notes).await?.value;
        let detail = serde_json::json!({ "group": group.name, "id": sealed.id, "file": contents.digest });
        host.events.publish("", "group_imported", detail);
        Ok(sealed)
    }
}
