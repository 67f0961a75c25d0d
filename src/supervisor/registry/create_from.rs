//! Creates kernels from a checkpoint: a fork's of another kernel, or an import's of another host. Also creates threads,
//! which have no checkpoint.
//!
//! ```text
//! name reserved ─▶ spec validated ─▶ folder ─▶ files ─▶ engine.db ─▶ manifest ─▶ state.db ─▶ catalog row: visible
//! ```
//! The kernel is invisible until its row exists. A failure removes the folder; a crash leaves a folder that the next
//! start removes.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use super::images::HeldImage;
use super::journal_io;
use super::supervisor::ReservedName;
use crate::bundle::{Journal, Packed};
use crate::catalog::state::{Beginning, EntryKind, FirstCheckpoint, NewCheckpoint, NewEntry};
use crate::catalog::{Created, IdempotencyKey, KernelRow, NewAudit, Notes};
use crate::core::checkpoint::{CheckpointType, MachinePart, Manifest, StateParts};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{CheckpointId, Digest, Epoch, KernelId};
use crate::core::info::{GivenMount, McpTransport};
use crate::core::limits;
use crate::core::origin::Origin;
use crate::core::spec::{KernelSpec, Net};
use crate::core::workflow::{Decision, WorkflowPart};
use crate::isolation::MachineCopy;
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::journal::{Records, StateRecord};
use crate::supervisor::registry::Supervisor;

/// The source of a new kernel.
pub(crate) struct KernelSource {
    /// The checkpoint's manifest.
    pub manifest: Manifest,
    /// The engine state to load.
    pub parts: StateParts,
    /// Blobs that the new kernel may read.
    pub blobs: Vec<Digest>,
    /// The new kernel's origin.
    pub origin: Origin,
    /// The parent of its first checkpoint.
    pub parent: Option<CheckpointId>,
    /// The name of its first checkpoint.
    pub called: String,
    /// The decisions named by the manifest, with their texts as far as known.
    pub decisions: Vec<Decision>,
    /// A kernel whose files may be copied where they equal the checkpoint's.
    pub giving: Option<checkpoint::FileDonor>,
    /// The kernel whose prepared copy may be used.
    pub like: Option<KernelId>,
    /// The machine that the new kernels continue, if they start from a running one.
    pub machine: Option<Rc<MachineCopy>>,
    /// The files of the newest kernel created from this source.
    pub made: RefCell<Option<crate::workspace::Donor>>,
}

/// How records describe a new kernel, whatever its source.
pub(crate) struct CreationRecord<'a> {
    /// The text of the first journal entry.
    pub mark: String,
    /// The action in the audit log; `_weaker` is added for a kernel without a part of the sandbox.
    pub action: &'a str,
    /// The outcome in the audit log.
    pub outcome: String,
    /// The detail of the creation event.
    pub detail: serde_json::Value,
}

/// The initial contents of a new kernel.
struct InitialState {
    origin: Origin,
    work: WorkflowPart,
    decisions: Vec<Decision>,
    checkpoints: Vec<FirstCheckpoint>,
    /// The first journal entry, if it does not concern a checkpoint.
    entry: Option<NewEntry>,
    blobs: Vec<Digest>,
    thread_of: Option<KernelId>,
    machine: Option<Rc<MachineCopy>>,
}

impl InitialState {
    /// The contents inherited from a source, without checkpoints.
    fn of(seed: &KernelSource) -> InitialState {
        InitialState {
            origin: seed.origin.clone(),
            work: seed.manifest.work.clone(),
            decisions: seed.decisions.clone(),
            checkpoints: Vec::new(),
            entry: None,
            blobs: seed.blobs.clone(),
            thread_of: None,
            machine: None,
        }
    }
}

/// The validated specification of a new kernel.
pub(crate) struct ValidatedSpec {
    spec: KernelSpec,
    mounts: Vec<GivenMount>,
    mcp: Vec<(String, McpTransport)>,
    image: HeldImage,
}

impl Supervisor {
    /// Validates a specification again: rules may have changed, or this actor may lack the rights.
    ///
    /// # Errors
    /// `busy` (limits), `refused`, `notFound`.
    pub(crate) fn validate_spec(
        &self,
        mut spec: KernelSpec,
        mounts: &[GivenMount],
        mcp: Vec<(String, McpTransport)>,
        actor: &Actor,
    ) -> Result<ValidatedSpec> {
        let host = self.host();
        // The new kernel does not share the lifetime of the source's connection.
        spec.ephemeral = false;
        self.workers.check_spec(&spec, actor.uid)?;
        self.workers.name_image(&mut spec, actor.uid)?;
        let image = self.hold_image(&spec);
        for allowed in &mut spec.paths {
            allowed.real = Some(host.revalidate_source(actor.uid, &allowed.path, allowed.real.as_deref())?);
        }
        let mounts = mounts.iter().map(|GivenMount { mount, real }| {
            let real = host.revalidate_source(actor.uid, Path::new(&mount.source), real.as_deref().map(Path::new))?;
            Ok(GivenMount { mount: mount.clone(), real: Some(real.display().to_string()) })
        });
        let mounts = mounts.collect::<Result<_>>()?;
        for (name, transport) in &mcp {
            match host.environment.mcp_allowed.admit(spec.name.as_str(), name, transport) {
                // The limit on running servers is checked when the server starts.
                Err(error) if error.code != ErrorCode::Busy => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(ValidatedSpec { spec, mounts, mcp, image })
    }

    /// Creates a kernel from a checkpoint.
    ///
    /// # Errors
    /// Those of [`Self::validate_spec`], of the store and of the databases; nothing is left then.
    pub(crate) async fn create_from(
        &self,
        reserved: &ReservedName,
        seed: &KernelSource,
        key: Option<(String, String)>,
        words: CreationRecord<'_>,
        actor: &Actor,
    ) -> Result<Rc<Kernel>> {
        let validated = self.validate_source(reserved, seed, actor)?;
        self.fill_and_publish(self.new_id(), validated, key, words, actor, async |id, validated, words| {
            let host = self.host();
            let tree = seed.manifest.workspace.tree;
            let filled = checkpoint::fill(host, id, tree, seed.like, seed.giving.as_ref()).await?;
            (words.detail["files"], words.detail["full_walk"]) = (filled.way.into(), filled.full_walk.into());
            seed.made.replace(filled.files);
            checkpoint::load_engine(host, id, seed.manifest.spec.isolation, seed.manifest.engine, seed.parts.clone())
                .await?;
            let (new, sealed) = seal(host, id, seed, validated, actor).await?;
            words.outcome = format!("{}; {} manifest {sealed}", words.outcome, new.id);
            let entry = mark(host, actor, words);
            let checkpoints = vec![FirstCheckpoint { new, parent: seed.parent, entry }];
            Ok(InitialState { checkpoints, machine: seed.machine.clone(), ..InitialState::of(seed) })
        })
        .await
    }

    /// The id of a new kernel.
    pub(crate) fn new_id(&self) -> KernelId {
        KernelId::from_bytes(self.host().random())
    }

    /// Creates a kernel with the checkpoints of a file, each with a manifest that names the new kernel, and with its
    /// journal, if the file has one.
    ///
    /// # Errors
    /// As [`Self::create_from`].
    pub(crate) async fn create_imported(
        &self,
        (id, reserved): (KernelId, &ReservedName),
        seed: &KernelSource,
        (checkpoints, journal): (Vec<(Packed, Manifest)>, Option<Journal>),
        words: CreationRecord<'_>,
        actor: &Actor,
    ) -> Result<Rc<Kernel>> {
        let validated = self.validate_source(reserved, seed, actor)?;
        self.fill_and_publish(id, validated, None, words, actor, async |id, validated, words| {
            let host = self.host();
            checkpoint::fill(host, id, seed.manifest.workspace.tree, None, None).await?;
            checkpoint::load_engine(host, id, seed.manifest.spec.isolation, seed.manifest.engine, seed.parts.clone())
                .await?;
            if let Some(journal) = &journal
                && !journal_io::import(host, id, journal).await?
            {
                words.mark.push_str(", without its journal, which another release wrote");
            }
            let mut own = InitialState { entry: Some(mark(host, actor, words)), ..InitialState::of(seed) };
            // The current checkpoint comes last.
            let (at, others): (Vec<_>, Vec<_>) =
                checkpoints.into_iter().partition(|(packed, _)| packed.id == seed.manifest.id);
            for (packed, manifest) in others.into_iter().chain(at) {
                own.checkpoints.push(imported(host, id, validated, packed, manifest, actor).await?);
            }
            Ok(own)
        })
        .await
    }

    /// Creates a kernel that works in the workspace of another.
    ///
    /// # Errors
    /// Those of [`Self::validate_spec`] and of the databases; nothing is left then.
    pub(crate) async fn create_shared(
        &self,
        owner: &Rc<Kernel>,
        validated: ValidatedSpec,
        key: Option<(String, String)>,
        words: CreationRecord<'_>,
        actor: &Actor,
    ) -> Result<Rc<Kernel>> {
        self.fill_and_publish(self.new_id(), validated, key, words, actor, async |_, _, words| {
            Ok(InitialState {
                origin: Origin::default(),
                work: WorkflowPart::default(),
                decisions: Vec::new(),
                checkpoints: Vec::new(),
                entry: Some(mark(self.host(), actor, words)),
                blobs: Vec::new(),
                thread_of: Some(owner.id),
                machine: None,
            })
        })
        .await
    }

    /// Validates the specification of a checkpoint.
    fn validate_source(&self, reserved: &ReservedName, seed: &KernelSource, actor: &Actor) -> Result<ValidatedSpec> {
        let Manifest { spec, mounts, mcp, .. } = &seed.manifest;
        let spec = KernelSpec { name: reserved.name().clone(), ..spec.clone() };
        let mcp = mcp.iter().map(|part| (part.name.clone(), part.transport.clone())).collect();
        self.validate_spec(spec, mounts, mcp, actor)
    }

    /// Creates a kernel's folder, lets `fill` fill it, and makes the kernel visible. A failure leaves nothing behind.
    async fn fill_and_publish<'w>(
        &self,
        id: KernelId,
        validated: ValidatedSpec,
        key: Option<(String, String)>,
        mut words: CreationRecord<'w>,
        actor: &Actor,
        fill: impl AsyncFnOnce(KernelId, &ValidatedSpec, &mut CreationRecord<'w>) -> Result<InitialState>,
    ) -> Result<Rc<Kernel>> {
        let host = self.host();
        host.catalog.create_kernel_files(id).await?;
        let made = match fill(id, &validated, &mut words).await {
            Ok(own) => self.make_visible(id, validated, own, key, words, actor).await,
            Err(error) => Err(error),
        };
        // A remaining folder is removed at the next start; the caller needs the first error.
        if made.is_err()
            && let Err(error) = host.catalog.remove_kernel_files(id).await
        {
            tracing::warn!(%error, "the folder of a kernel that was not made could not be removed");
        }
        made
    }

    async fn make_visible(
        &self,
        id: KernelId,
        validated: ValidatedSpec,
        own: InitialState,
        key: Option<(String, String)>,
        words: CreationRecord<'_>,
        actor: &Actor,
    ) -> Result<Rc<Kernel>> {
        let (host, now) = (self.host(), self.host().now_ms());
        let ValidatedSpec { spec, mounts, mcp, image: _until_it_is_open } = validated;
        let records = Records::new(id, Epoch(1), &host.catalog, &host.store);
        let InitialState { origin, work, decisions, checkpoints, entry, blobs, thread_of, machine } = own;
        let generation = origin.generation;
        let beginning = Beginning { origin, work, decisions, checkpoints, mounts, mcp, blobs, entry, at_ms: now };
        records.begin_kernel(beginning).await?;
        let record = StateRecord::default();
        let weaker = !spec.degraded.is_empty() || spec.net != Net::None;
        let row = KernelRow {
            id,
            uid: actor.uid,
            spec,
            state_json: serde_json::to_string(&record).map_err(|error| Error::internal(error.to_string()))?,
            version: 1,
            epoch: Epoch(1),
            generation,
            thread_of,
            created_at_ms: now,
            last_used_at_ms: now,
        };
        let action = format!("{}{}", words.action, if weaker { "_weaker" } else { "" });
        let audit = NewAudit {
            kernel: id.to_string(),
            owner: Some(actor.uid),
            version_after: Some(1),
            detail: bounded(words.outcome),
            ..host.line(actor, &action, None)
        };
        let expires_at_ms = now.saturating_add(limits::KEY_LIFETIME.as_millis() as i64);
        let key = key.map(|(scope, key)| IdempotencyKey { scope, key, expires_at_ms });
        let loaded = records.load().await?;
        // Its row is in the catalog before the kernel's: the next daemon ends a worker without a kernel.
        let copied = match &machine {
            Some(machine) => Some(self.start_copied(&row, &record, &loaded, machine).await?),
            None => None,
        };
        let notes = Notes { events: Vec::new(), audit: vec![audit] };
        let inserted = match host.catalog.insert_kernel(row.clone(), key, notes).await.map(|inserted| inserted.value) {
            Ok(Created::New) => Ok(()),
            // A concurrent request used the same key.
            Ok(Created::Before(_)) => {
                Err(Error::conflict("this key is being used for another request at the same time")
                    .hint("ask again: what that request made is given"))
            }
            Err(error) => Err(error.into()),
        };
        if let Err(error) = inserted {
            if let Some(copied) = copied {
                copied.end(&self.workers).await;
            }
            return Err(error);
        }
        let kernel = self.open(&row, record, loaded, |kernel| copied.map(|copied| copied.bind(kernel)));
        let mut detail = words.detail;
        detail["id"] = id.to_string().into();
        detail["by"] = actor.to_string().into();
        host.events.publish(&kernel.event_name(), "kernel_created", detail);
        Ok(kernel)
    }
}

fn mark(host: &Host, actor: &Actor, words: &CreationRecord<'_>) -> NewEntry {
    NewEntry {
        kind: EntryKind::Mark,
        at_ms: host.now_ms(),
        actor: actor.to_string(),
        text: words.mark.clone(),
        detail_json: words.detail.to_string(),
    }
}

/// Stores the manifest of the new kernel's own first checkpoint.
async fn seal(
    host: &Host,
    id: KernelId,
    seed: &KernelSource,
    validated: &ValidatedSpec,
    actor: &Actor,
) -> Result<(NewCheckpoint, Digest)> {
    let list = seed.parts.encode().map_err(|error| Error::refused(error.to_string()).reason("state_size"))?;
    let manifest = Manifest {
        host: host.id(),
        kernel: id,
        epoch: Epoch(1),
        id: CheckpointId::from_bytes(host.random()),
        parent: seed.parent,
        at_ms: host.now_ms(),
        spec: validated.spec.clone(),
        journal: 0,
        state: host.store.put(list).await?,
        mounts: validated.mounts.clone(),
        audit: Some(host.catalog.audit_head().await?),
        ..seed.manifest.clone()
    };
    let sealed = host.store.put(checkpoint::encode(&manifest)?).await?;
    let new = NewCheckpoint {
        id: manifest.id,
        name: seed.called.clone(),
        description: String::new(),
        kind: CheckpointType::Auto,
        creator: actor.to_string(),
        at_ms: manifest.at_ms,
        pinned: false,
        manifest: sealed,
        files: manifest.workspace.files,
        state_bytes: seed.parts.bytes(),
        machine_bytes: 0,
        summary: String::new(),
        compact: Vec::new(),
        work: seed.manifest.work.clone(),
        work_seen: None,
        with: None,
        under_way: None,
    };
    Ok((new, sealed))
}

/// Converts a checkpoint of a file to one of the new kernel.
async fn imported(
    host: &Host,
    id: KernelId,
    validated: &ValidatedSpec,
    packed: Packed,
    manifest: Manifest,
    actor: &Actor,
) -> Result<FirstCheckpoint> {
    // The new kernel keeps its own name and owner; its host paths are validated when the checkpoint is restored.
    let spec = KernelSpec { name: validated.spec.name.clone(), ..manifest.spec.clone() };
    let state_list = host.store.get(manifest.state, limits::MANIFEST_BYTES as u64).await?;
    let parts = StateParts::decode(&state_list).map_err(|error| Error::corrupt(error.to_string()))?;
    let files = manifest.workspace.files;
    let audit = Some(host.catalog.audit_head().await?);
    let manifest = Manifest { host: host.id(), kernel: id, epoch: Epoch(1), spec, journal: 0, audit, ..manifest };
    let sealed = host.store.put(checkpoint::encode(&manifest)?).await?;
    let named = if packed.name.is_empty() { String::new() } else { format!(" {:?}", packed.name) };
    let entry = NewEntry {
        kind: EntryKind::Mark,
        at_ms: host.now_ms(),
        actor: actor.to_string(),
        text: format!("imported checkpoint {}{named}", packed.id),
        detail_json: serde_json::json!({ "checkpoint": packed.id, "manifest": sealed }).to_string(),
    };
    let new = NewCheckpoint {
        id: packed.id,
        name: packed.name,
        description: packed.description,
        kind: packed.kind,
        creator: packed.creator,
        at_ms: packed.at_ms,
        pinned: packed.pinned,
        manifest: sealed,
        files,
        state_bytes: parts.bytes(),
        machine_bytes: manifest.machine.as_ref().map_or(0, MachinePart::bytes),
        summary: packed.summary,
        compact: Vec::new(),
        work: manifest.work,
        work_seen: None,
        with: None,
        under_way: None,
    };
    Ok(FirstCheckpoint { new, parent: packed.parent, entry })
}
