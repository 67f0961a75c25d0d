//! Received kernels: checked, prepared, activated or discarded.
//!
//! A prepared kernel is a directory and a record in the catalog, and no kernel of this host: nothing can use or start it
//! before it is activated. It has no right to host paths, network or MCP servers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};

use super::evidence::{Evidence, check_excerpt};
use super::history::check_history;
use super::missing::missing;
use super::preview::Preview;
use super::room::Holder;
use super::sessions::Bounds;
use super::steps::Steps;
use super::{Incoming, IncomingFiles, is_epoch, memory, older_checkpoints, read, without_host, write};
use crate::bundle;
use crate::catalog::state::{Arrival, EntryKind, NewEntry};
use crate::catalog::{HandoverRow, KernelRow, NewAudit, Notes, StateHandle};
use crate::core::checkpoint::{Manifest, StateParts};
use crate::core::error::{Error, Result};
use crate::core::handover::{Missing, Prepared, Side, Stage, Target};
use crate::core::ids::{CheckpointId, Digest, Epoch, HandoverId, HostId, KernelId};
use crate::core::kernel::{Life, State, StopReason};
use crate::core::limits;
use crate::core::origin::{Origin, OriginKind};
use crate::core::snapshot::{Continuing, KindRequest, choose_for_move};
use crate::core::spec::KernelSpec;
use crate::store::StoreHandle;
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::command::{Actor, StopMode};
use crate::supervisor::kernel::journal::{Records, StateRecord};
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::bundle_io::{client_error, has_room, holds_state};
use crate::supervisor::registry::supervisor::ReservedName;
use crate::teleport::target::{Admission, TargetHost};
use crate::teleport::{Accept, Offer, Received, Seal, Wire};

/// Serves the source at the other end of a stream, on behalf of `actor`.
///
/// # Errors
/// Violations of the protocol and failed steps.
pub async fn serve(
    supervisor: &Supervisor,
    actor: Actor,
    read: impl AsyncRead + Unpin + 'static,
    write: impl AsyncWrite + Unpin + 'static,
) -> Result<()> {
    let target = TargetSide::new(supervisor.clone(), actor);
    let served = crate::teleport::target::serve(Wire::new(read, write), &target).await;
    if let Err(error) = &served {
        tracing::info!(%error, "an incoming connection of another host ended");
        supervisor.host().audit_refusal(&target.actor, "kernel.arrive", None, error).await;
    }
    served
}

/// This host as a target, for the kernels of one user.
pub(super) struct TargetSide {
    pub supervisor: Supervisor,
    pub actor: Actor,
    pub(super) preview: RefCell<Option<Preview>>,
    /// Syncs that had failed when it began.
    failed_syncs: u64,
}

/// A verified kernel, not yet on disk.
struct Verified {
    seal: Seal,
    manifest: Manifest,
    parts: StateParts,
    manifests: Vec<Manifest>,
    audit: Option<Evidence>,
    /// What its files, its machine and its history take.
    bytes: u64,
}

impl TargetSide {
    pub(super) fn new(supervisor: Supervisor, actor: Actor) -> TargetSide {
        let failed_syncs = supervisor.host().failed_syncs();
        TargetSide { supervisor, actor, preview: RefCell::default(), failed_syncs }
    }

    pub(super) fn host(&self) -> &Rc<Host> {
        self.supervisor.host()
    }

    /// The record of an incoming handover of this user.
    pub(super) async fn row(&self, id: HandoverId) -> Result<Option<HandoverRow>> {
        let rows = self.host().catalog.handovers().await?;
        Ok(rows.into_iter().find(|row| row.id == id && row.side == Side::In && row.uid == self.actor.uid))
    }

    /// Whether this user's kernel lives or lived here at this epoch or a later one.
    fn lives_here(&self, (id, epoch): (KernelId, Epoch)) -> bool {
        self.supervisor.get(id).is_some_and(|known| known.uid == self.actor.uid && known.epoch >= epoch)
    }

    /// Whether the kernel takes the place that it left here; reserves its name otherwise.
    async fn place(&self, kernel: KernelId, epoch: Epoch, spec: &KernelSpec) -> Result<Option<ReservedName>> {
        let rows = self.host().catalog.handovers().await?;
        if rows.iter().any(|row| row.kernel == kernel && row.side == Side::In && !row.live) {
            return Err(Error::busy(format!("kernel {} waits here for the end of another handover", spec.name))
                .reason("prepared")
                .hint("`ryokan teleport --status` on that host shows it"));
        }
        let Some(known) = self.supervisor.get(kernel) else {
            return self.supervisor.reserve(self.actor.uid, spec.name.clone()).map(Some);
        };
        let state = known.view().state;
        match state {
            _ if known.uid != self.actor.uid => Err(Error::already_exists("another user has this kernel")),
            State::Departed { epoch: left, .. } if left < epoch => match known.spec().name == spec.name {
                true => Ok(None),
                false => Err(Error::conflict(format!("the kernel left here as {}", known.spec().name))),
            },
            State::Departed { epoch: left, .. } => Err(Error::refused(format!(
                "epoch {} of kernel {} has ended: it left here for {}",
                epoch.0, spec.name, left.0
            ))
            .reason("epoch")),
            _ => Err(Error::already_exists(format!("kernel {} lives here", spec.name)).reason("live")),
        }
    }

    /// Reads the description and verifies everything that it references.
    async fn verify(
        &self,
        source: HostId,
        offer: &Offer,
        received: &Received,
        description: Digest,
    ) -> Result<Verified> {
        let wrong = |what: &str| Error::corrupt(format!("the received kernel: {what}")).reason("handover");
        if !received.held.contains(&description) {
            return Err(wrong("its description was not sent"));
        }
        let bytes = self.host().store.get(description, limits::HANDOVER_SEAL_BYTES).await?;
        let seal: Seal = serde_json::from_slice(&bytes).map_err(|error| wrong(&error.to_string()))?;
        seal.spec.check().map_err(|error| wrong(&error.to_string()))?;
        if seal.head.kernel != offer.kernel
            || seal.spec.name != offer.spec.name
            || seal.spec.engine != offer.spec.engine
            || seal.spec.isolation != offer.spec.isolation
        {
            return Err(wrong("it is another one than was offered"));
        }
        if seal.history.len() > limits::HANDOVER_PAGES || seal.history.iter().any(|page| !received.held.contains(page))
        {
            return Err(wrong("its history was not sent"));
        }
        let pages = self.page_bytes(&seal.history, received.most_bytes).await?;
        let (head, held) = (seal.head.clone(), received.held.clone());
        let verified = self.host().store.run_beside(move |store| Ok(bundle::verify(store, &head, held))).await?;
        let (manifests, parts, bytes) = verified.map_err(client_error)?;
        let manifest = manifests.iter().find(|manifest| manifest.id == seal.head.begin).cloned();
        let manifest = manifest.ok_or_else(|| wrong("it begins at no checkpoint"))?;
        if manifests.iter().any(|manifest| manifest.engine != seal.spec.engine) {
            return Err(wrong("a checkpoint of another engine"));
        }
        if manifest.machine.is_some() {
            let spec = without_host(&seal.spec);
            checkpoint::machine::check_arrival(self.host(), &spec, self.actor.uid, &manifest).await?;
        }
        has_room(self.host(), &manifest, bytes)?;
        holds_state(self.host(), &manifest, parts.bytes())?;
        // The files, the engine's state, the history and the machine together.
        let bytes = bytes.saturating_add(parts.bytes()).saturating_add(pages);
        let bytes = bytes.saturating_add(checkpoint::machine::installed_bytes(&manifest));
        let free = self.host().free_bytes().unwrap_or(u64::MAX);
        // Files may be many times what has arrived: they are made of objects that repeat, or were here before.
        self.supervisor.registry().handovers.room.needs(offer.handover, bytes, free)?;
        let audit = match seal.audit {
            Some(excerpt) if received.held.contains(&excerpt) => {
                Some(check_excerpt(self.host(), excerpt, source, offer.kernel).await?)
            }
            Some(_) => return Err(wrong("its excerpt of the audit log was not sent")),
            None => None,
        };
        Ok(Verified { seal, manifest, parts, manifests, audit, bytes })
    }

    /// Stores the manifests without what they name of the source host; returns the replaced ones.
    async fn strip(&self, manifests: &[Manifest]) -> Result<Vec<(CheckpointId, Digest)>> {
        let mut replaced = Vec::new();
        for manifest in manifests {
            let spec = &manifest.spec;
            let is_free = Missing::of_spec(spec).is_empty();
            if is_free && manifest.mounts.is_empty() && manifest.mcp.is_empty() {
                continue;
            }
            let stripped = Manifest {
                spec: without_host(spec),
                mounts: Vec::new(),
                mcp: Vec::new(),
                tools: Vec::new(),
                ..manifest.clone()
            };
            replaced.push((manifest.id, self.host().store.put(checkpoint::encode(&stripped)?).await?));
        }
        Ok(replaced)
    }

    /// Fills the directory of a prepared kernel; returns its record.
    async fn fill(
        &self,
        files: KernelId,
        source: HostId,
        offer: &Offer,
        received: &Received,
        verified: Verified,
        steps: &Steps,
    ) -> Result<Incoming> {
        let (host, Verified { mut seal, manifest, parts, manifests, audit, bytes }) = (self.host(), verified);
        let replaced = self.strip(&manifests).await?;
        let (copy, state) = self.take_preview(offer.handover);
        checkpoint::fill_from(host, files, manifest.workspace.tree, copy).await?;
        steps.ended("files");
        checkpoint::load_engine_from(host, files, (seal.spec.isolation, manifest.engine), parts, state).await?;
        steps.ended("engine state");
        if manifest.machine.is_some() {
            checkpoint::machine::install(host, files, &seal.spec, &manifest).await?;
            steps.ended("machine");
        }
        let state = host.catalog.state(files);
        for page in &seal.history {
            let page = host.store.get(*page, limits::HANDOVER_PAGE_BYTES).await?;
            state.import_history(page).await?;
        }
        let before = state.origin().await?;
        let generation = before.generation.saturating_add(1);
        let origin = Origin { kind: OriginKind::Restored, generation, restored: Some(manifest.id), ..before };
        let mut text = format!("arrived from host {source} at epoch {}", offer.epoch.0);
        if let Some(left) = older_checkpoints(seal.left_behind) {
            text.push_str(&format!(" without {left}"));
        }
        let (kind, at_ms, actor) = (EntryKind::Mark, host.now_ms(), self.actor.to_string());
        let entry = NewEntry { kind, at_ms, actor, text, detail_json: String::new() };
        let expected: HashMap<CheckpointId, Digest> =
            seal.head.checkpoints.iter().map(|one| (one.id, one.manifest)).collect();
        check_history(&state, &expected, seal.left_behind, received).await?;
        let departed = match self.supervisor.get(offer.kernel) {
            Some(departed) => departed.records.all_checkpoints().await?,
            None => Vec::new(),
        };
        let ended_checkpoints = departed.iter().filter(|one| !expected.contains_key(&one.id)).count() as u64;
        // Kept with the kernel, also on its way to further hosts.
        seal.head.blobs.extend(audit.as_ref().map(|audit| audit.excerpt));
        let checkpoints = expected.into_keys().collect();
        state.begin_moved(Arrival { checkpoints, manifests: replaced, origin, blobs: seal.head.blobs, entry }).await?;
        let loaded = Records::new(files, offer.epoch, &host.catalog, &host.store).load().await?;
        state.close().await?;
        steps.ended("history");
        Ok(Incoming {
            files,
            source,
            spec: without_host(&seal.spec),
            epoch: offer.epoch,
            version: loaded.version,
            executions: loaded.executions,
            generation,
            created_at_ms: seal.created_at_ms,
            replaces: self.supervisor.get(offer.kernel).is_some(),
            audit,
            ended_checkpoints,
            bytes,
        })
    }

    /// Activates a prepared kernel, `known` if its record may be gone. Idempotent: completes an interrupted activation, and
    /// returns after everything is synced. The memory of a kernel that `awaits_group` goes on with its group.
    pub(super) async fn activate_prepared(
        &self,
        id: HandoverId,
        known: Option<(KernelId, Epoch)>,
        awaits_group: bool,
    ) -> Result<()> {
        let handovers = &self.supervisor.registry().handovers;
        let _turn = handovers.deciding.lock().await;
        let host = self.host();
        let Some(row) = self.row(id).await? else {
            return match known {
                Some(known) if self.lives_here(known) => host.sync_decision_again(None).await,
                _ => Err(Error::not_found(format!("handover {id} is unknown here"))),
            };
        };
        let incoming: Incoming = read(&row)?;
        if !row.live {
            let departed = if incoming.replaces { self.supervisor.get(row.kernel) } else { None };
            if let Some(departed) = &departed {
                // Another arrival of it may live here since.
                match departed.view().state {
                    State::Departed { epoch, .. } if epoch < incoming.epoch => {}
                    _ => {
                        let name = &departed.spec().name;
                        return Err(Error::conflict(format!("kernel {name} lives here already")).reason("live"));
                    }
                }
                departed.stop(host.own_actor(), StopMode::Release).await?;
                self.supervisor.forget_kernel(departed);
                departed.records.close().await;
            }
            let left_by = departed.as_ref().and_then(|departed| match departed.view().state {
                State::Departed { handover, .. } => Some(handover),
                _ => None,
            });
            if let Err(error) = self.record_activation(&row, &incoming, left_by).await {
                if departed.is_some()
                    && let Ok(Some(before)) = host.catalog.kernel(row.kernel).await
                {
                    self.supervisor.recover_kernel(before, None).await;
                }
                return Err(error);
            }
        }
        // Before the acknowledgement, after which the source forgets the move, and before the directory is renamed: a
        // start without this activation would remove it. An earlier attempt may have failed here.
        match row.live {
            true => host.sync_decision_again(None).await?,
            false => host.sync_decision(None).await?,
        }
        let absent = match self.supervisor.get(row.kernel) {
            Some(_) => None,
            None => host.catalog.kernel(row.kernel).await?,
        };
        // A late commit does not open the kernel of a later move.
        if let Some(kernel) = absent.filter(|kernel| kernel.epoch == incoming.epoch) {
            host.catalog.adopt_kernel_files(incoming.files, row.kernel).await?;
            self.supervisor.recover_kernel(kernel, None).await;
            let detail = serde_json::json!({ "handover": id, "source": incoming.source, "epoch": incoming.epoch.0 });
            host.events.publish(&host.event_name(row.uid, &incoming.spec.name), "kernel_arrived", detail);
            if !awaits_group {
                memory::go_on(&self.supervisor, row.kernel);
            }
        }
        if !incoming.replaces {
            self.supervisor.registry().creating.borrow_mut().remove(&(row.uid, incoming.spec.name));
        }
        handovers.room.is_live(id);
        Ok(())
    }

    async fn record_activation(
        &self,
        row: &HandoverRow,
        incoming: &Incoming,
        left_by: Option<HandoverId>,
    ) -> Result<()> {
        let (host, now) = (self.host(), self.host().now_ms());
        let Incoming { spec, version, executions, .. } = incoming.clone();
        let life = Life { state: State::Stopped { reason: StopReason::Asked }, ..Life::default() };
        let kernel = KernelRow {
            id: row.kernel,
            uid: row.uid,
            state_json: write(&StateRecord { life, version, executions, worker_spec: None, resumes: false })?,
            version,
            epoch: incoming.epoch,
            generation: incoming.generation,
            thread_of: None,
            created_at_ms: incoming.created_at_ms,
            last_used_at_ms: now,
            spec,
        };
        let audit = NewAudit {
            kernel: row.kernel.to_string(),
            owner: Some(row.uid),
            version_after: Some(version),
            detail: bounded(format!(
                "{} from host {}, epoch {}; {}handover {}; {}",
                incoming.spec.name,
                incoming.source,
                incoming.epoch.0,
                older_checkpoints(incoming.ended_checkpoints)
                    .map_or_else(String::new, |ended| format!("{ended} ended here; ")),
                row.id,
                incoming.audit.as_ref().map_or("no lines of its log", |audit| &audit.text)
            )),
            ..host.line(&self.actor, "kernel.arrive", None)
        };
        let notes = Notes { events: Vec::new(), audit: vec![audit] };
        let activate = async || {
            let replaced = incoming.replaces.then_some(left_by);
            Ok(host.catalog.activate_handover(row.id, replaced, kernel.clone(), notes.clone()).await?)
        };
        host.making_room(activate).await.map(drop)
    }

    /// Deletes a prepared kernel. Idempotent.
    pub(super) async fn discard_prepared(&self, id: HandoverId) -> Result<()> {
        let handovers = &self.supervisor.registry().handovers;
        if let Some(session) = handovers.sessions.get(id) {
            // After this, the session prepares nothing.
            *session.is_aborted.lock().await = true;
        }
        let _turn = handovers.deciding.lock().await;
        let host = self.host();
        let Some(row) = self.row(id).await? else {
            // An earlier attempt may have deleted it.
            return host.sync_decision_again(None).await;
        };
        if row.live {
            return Err(Error::conflict(format!("the kernel of handover {id} lives here")).reason("resolved"));
        }
        host.making_room(async || Ok(host.catalog.forget_handover(id).await?)).await?;
        handovers.room.is_discarded(id);
        // The source forgets the move after the acknowledgement.
        let synced = host.sync_decision(None).await;
        // Of a damaged record, the next start removes what is left.
        match read::<Incoming>(&row) {
            Ok(incoming) if !incoming.replaces => {
                self.supervisor.registry().creating.borrow_mut().remove(&(row.uid, incoming.spec.name));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the name of a discarded kernel is free after the next start"),
        }
        if let Ok(IncomingFiles { files }) = read(&row)
            && let Err(error) = host.catalog.remove_unlisted_files(files).await
        {
            tracing::warn!(%error, "the files of a discarded kernel are left");
        }
        synced
    }
}

#[async_trait(?Send)]
impl TargetHost for TargetSide {
    fn host(&self) -> HostId {
        self.supervisor.host().id()
    }

    fn store(&self) -> &StoreHandle {
        &self.supervisor.host().store
    }

    async fn admit(&self, source: HostId, offer: &Offer) -> Result<Admission> {
        let host = self.supervisor.host();
        if source == host.id() {
            return Err(Error::refused("the other end is this host").reason("same_host"));
        }
        if offer.format != StateHandle::history_format() {
            return Err(Error::unsupported("the two hosts run releases with different histories")
                .reason("history_format")
                .hint("update the older one"));
        }
        if let Some(group) = &offer.group {
            return self.admit_group(offer, group).await;
        }
        choose_for_move(KindRequest::Only(offer.kind), Continuing::of(&offer.spec), offer.spec.isolation)?;
        if !is_epoch(&offer.epoch) {
            return Err(Error::refused(format!("epoch {} is out of range", offer.epoch.0)).reason("epoch"));
        }
        let missing = missing(offer)?;
        if host.disk_is_full() {
            return Err(Host::full());
        }
        self.supervisor.workers.check_spec(&without_host(&offer.spec), self.actor.uid)?;
        drop(self.place(offer.kernel, offer.epoch, &offer.spec).await?);
        let (kind, why) = memory::kind_of(self.host(), self.actor.uid, offer).await?;
        let reuse = self.reuse(offer.kernel).await?;
        // No record of this move follows lost writes of an earlier daemon.
        host.making_room(async || Ok(host.catalog.rewrite_handovers().await?)).await?;
        let handovers = &self.supervisor.registry().handovers;
        let of_host = limits::HANDOVERS_CONCURRENT;
        let of_user = if host.environment.system_wide { limits::HANDOVERS_OF_USER } else { of_host };
        let bounds = Bounds { of_host, of_user, silence: host.config.teleport.stall_timeout };
        let silence = handovers.sessions.begin(offer.handover, self.actor.uid, bounds)?;
        let free = host.free_bytes().unwrap_or(u64::MAX);
        let holder = Holder { silence: Rc::clone(&silence), most: bounds.silence };
        let begun = handovers.room.begin(offer.handover, offer.bytes, free, holder);
        let most_bytes = begun.inspect_err(|_| handovers.sessions.end(offer.handover))?;
        let accept = Accept { missing, kind, why };
        Ok(Admission { accept, reuse, most_bytes, silence })
    }

    async fn prepare(&self, source: HostId, offer: &Offer, received: &Received, description: Digest) -> Result<()> {
        let handovers = &self.supervisor.registry().handovers;
        let session = handovers.sessions.get(offer.handover);
        let session = session.ok_or_else(|| Error::internal("a session without its record"))?;
        let is_aborted = session.is_aborted.lock().await;
        if *is_aborted {
            return Err(Error::conflict("the source has aborted this handover").reason("aborted"));
        }
        if let Some(group) = &offer.group {
            return self.prepare_group(source, offer, group, received, description).await;
        }
        let host = self.supervisor.host();
        let steps = Steps::since(Instant::now());
        let verified = self.verify(source, offer, received, description).await?;
        steps.ended("verify");
        self.supervisor.workers.check_spec(&without_host(&verified.seal.spec), self.actor.uid)?;
        let reserved = self.place(offer.kernel, offer.epoch, &verified.seal.spec).await?;
        let mut files = host.random::<16>();
        // One thread owns the databases of both.
        files[15] = offer.kernel.as_bytes()[15];
        let files = KernelId::from_bytes(files);
        host.catalog.create_kernel_files(files).await?;
        let made = async {
            steps.ended("directory");
            let incoming = self.fill(files, source, offer, received, verified, &steps).await?;
            // Durable before the source is notified. What a failed sync has lost of the files is not written again: the
            // source moves the kernel again.
            host.sync_since(self.failed_syncs).await?;
            steps.ended("sync");
            let (id, side, kernel, uid) = (offer.handover, Side::In, offer.kernel, self.actor.uid);
            let row =
                HandoverRow { id, side, kernel, uid, live: false, record: write(&incoming)?, at_ms: host.now_ms() };
            host.catalog.put_handover(row).await?;
            steps.ended("record");
            host.sync_decision(None).await?;
            steps.ended("sync");
            Ok(())
        };
        match made.await {
            Ok(()) => {
                let (kernel, steps) = (&offer.spec.name, steps.text());
                tracing::info!(%kernel, handover = %offer.handover, steps, "a kernel is prepared; milliseconds");
                if let Some(reserved) = reserved {
                    reserved.keep();
                }
                // All of it is on the disk.
                handovers.room.is_prepared(offer.handover);
                Ok(())
            }
            Err(error) => {
                // The id may be recorded of another move.
                let is_own = |row: HandoverRow| read(&row).is_ok_and(|own: IncomingFiles| own.files == files);
                if self.row(offer.handover).await.is_ok_and(|row| row.is_some_and(is_own)) {
                    let _ = host.catalog.forget_handover(offer.handover).await;
                }
                if let Err(error) = host.catalog.remove_unlisted_files(files).await {
                    tracing::warn!(%error, "the files of a kernel that was not received are left");
                }
                Err(error)
            }
        }
    }

    fn take_room(&self, handover: HandoverId, bytes: u64) -> Result<()> {
        let host = self.supervisor.host();
        let free = || host.free_bytes().unwrap_or(u64::MAX);
        self.supervisor.registry().handovers.room.take(handover, bytes, free)
    }

    async fn preview(&self, offer: &Offer, received: &Received, tree: Digest) {
        self.write_files(offer, received, tree).await;
    }

    async fn preview_state(&self, offer: &Offer, received: &Received, list: Digest) {
        self.write_state(offer, received, list).await;
    }

    fn end_session(&self, handover: HandoverId, stored: u64, whole: Vec<Digest>) {
        drop(self.preview.take());
        self.may_be_sent_again(whole);
        self.supervisor.registry().handovers.room.end(handover, stored);
        self.supervisor.registry().handovers.sessions.end(handover);
    }

    async fn recorded(&self, handover: HandoverId, kernel: Option<(KernelId, Epoch)>) -> Result<Target> {
        if let Some(row) = self.group_row(handover).await? {
            let is_open = row.stage == Stage::Open;
            return Ok(Target::restarted(Some(if is_open { Prepared::Waiting } else { Prepared::Live })));
        }
        if let Some(row) = self.row(handover).await? {
            let incoming: Incoming = read(&row)?;
            if kernel.is_some_and(|named| named != (row.kernel, incoming.epoch)) {
                return Err(
                    Error::corrupt("the source host names another kernel or epoch than it offered").reason("protocol")
                );
            }
            return Ok(Target::restarted(Some(if row.live { Prepared::Live } else { Prepared::Waiting })));
        }
        // The record of an activated kernel may be gone; the kernel's epoch is not.
        Ok(if kernel.is_some_and(|known| self.lives_here(known)) { Target::Live } else { Target::Gone })
    }

    async fn activate(&self, handover: HandoverId, kernel: Option<(KernelId, Epoch)>) -> Result<()> {
        match self.group_row(handover).await? {
            Some(row) => self.activate_group(row).await,
            None => self.activate_prepared(handover, kernel, false).await,
        }
    }

    async fn discard(&self, handover: HandoverId) -> Result<()> {
        if self.discard_group(handover).await? {
            return Ok(());
        }
        self.discard_prepared(handover).await
    }
}
