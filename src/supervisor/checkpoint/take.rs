//! Takes a checkpoint: captures the kernel's state, stores it, makes it visible.

use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::files::CapturedFiles;
use super::gather::{Gathered, Objects, UnderWay, gather, gather_machine};
use super::machine;
use super::memory::Keep;
use crate::catalog::state::{Added, NewCheckpoint, Together, WORK_CHANGED};
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, FORMAT, MachinePart, Manifest, McpPart, ToolPart};
use crate::core::error::{Error, Result};
use crate::core::freeze::refs::Revisions;
use crate::core::ids::{CheckpointId, Digest};
use crate::core::info::ToolInfo;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::snapshot::{Architecture, PortableKind};
use crate::core::workflow::{Outcome, WorkflowPart};
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::kernel::command::{Actor, Change, Trace};
use crate::supervisor::kernel::journal::version_after;
use crate::supervisor::kernel::{Kernel, work_detail};
use crate::workspace::{self, TreeId};

/// Unreadable files named in one event.
const UNREADABLE_NAMED: usize = 20;

/// Takes a checkpoint at the next safe point.
///
/// # Errors
/// `deadline` if the kernel did not become idle, `conflict`, and capture errors of any part; there is no checkpoint
/// then, and the kernel is unchanged.
pub async fn take(host: &Rc<Host>, kernel: &Rc<Kernel>, taking: CheckpointRequest, actor: Actor) -> Result<Checkpoint> {
    Ok(take_with(host, kernel, taking, actor, None).await?.0)
}

/// As [`take`], combined atomically with a workflow change. Also returns the outcome of the change.
///
/// # Errors
/// As [`take`], and errors of the change.
pub(crate) async fn take_with(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    taking: CheckpointRequest,
    actor: Actor,
    with: Option<Together>,
) -> Result<(Checkpoint, Option<Outcome>)> {
    taking.check()?;
    let kind = machine::check_kind(host, kernel, taking.snapshot)?;
    // Checked before anything is interrupted.
    let version = kernel.view().version;
    if taking.expected_version != 0 && taking.expected_version != version {
        let (name, wanted) = (&kernel.spec().name, taking.expected_version);
        return Err(Error::conflict(format!("kernel {name} is at version {version}, not {wanted}"))
            .hint("look at what changed, then try again with the present version"));
    }
    if taking.interrupt {
        kernel.interrupt_running(&actor).await?;
    }
    let change = Trace::InitialState(Change { actor: actor.clone(), expected_version: taking.expected_version });
    let begun = Instant::now();
    let (wait, own, to) = (taking.wait, Rc::clone(kernel), Rc::clone(host));
    let taken =
        super::queue_ticket::take(super::queue_ticket::Ticket::new(kernel), change, wait, move |link| async move {
            capture_kind(&to, &own, &link, (&taking, kind), &actor, with).await
        });
    let taken = taken.await?;
    host.metrics.since(Stage::Checkpoint, kernel.spec().engine, begun);
    Ok(taken)
}

/// Takes a checkpoint now: the caller holds the worker.
pub(super) async fn capture(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    taking: &CheckpointRequest,
    actor: &Actor,
    with: Option<Together>,
) -> Result<(Checkpoint, Option<Outcome>)> {
    capture_kind(host, kernel, link, (taking, PortableKind::Checkpoint), actor, with).await
}

/// As [`capture`], of that kind.
pub(super) async fn capture_kind(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    (taking, kind): (&CheckpointRequest, PortableKind),
    actor: &Actor,
    with: Option<Together>,
) -> Result<(Checkpoint, Option<Outcome>)> {
    let gathered = match kind {
        PortableKind::Teleport => gather_machine(host, kernel, link).await?,
        PortableKind::Checkpoint => {
            gather(host, kernel, Some(link), Some(Keep { kind: taking.kind, spare: None })).await?
        }
    };
    seal(host, kernel, gathered, taking, actor, with).await
}

/// Makes a checkpoint of the captured state, combined atomically with a workflow change.
pub(super) async fn seal(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    gathered: Gathered,
    taking: &CheckpointRequest,
    actor: &Actor,
    with: Option<Together>,
) -> Result<(Checkpoint, Option<Outcome>)> {
    let Gathered { id, parts, state, copy, files, machine, mut objects, under_way } = gathered;
    let machine_bytes = machine.as_ref().map_or(0, MachinePart::bytes);
    let before = kernel.view().version;
    let named = with.as_ref().map(|with| with.request().change.names());
    let found = revisions(host, &objects, files.part.tree).await?;
    let mut tries = 0;
    let (sealed, Added { checkpoint, outcome, sequence }) = loop {
        let (mut manifest, work_seen) =
            manifest(host, kernel, (id, state), &files, under_way.as_ref(), with.as_ref()).await?;
        manifest.kind = Manifest::kind_with(machine.as_ref());
        manifest.machine.clone_from(&machine);
        manifest.missed.extend(copy.why_not.iter().cloned());
        manifest.repositories.clone_from(&found.repositories);
        manifest.dependencies.clone_from(&found.dependencies);
        manifest.databases.clone_from(&found.databases);
        let sealed = objects.settle(host, Some(encode(&manifest)?)).await?;
        let sealed = sealed.ok_or_else(|| Error::internal("the manifest was not stored"))?;
        let new = NewCheckpoint {
            id: manifest.id,
            name: taking.name.clone(),
            description: taking.description.clone(),
            kind: taking.kind,
            creator: actor.to_string(),
            at_ms: manifest.at_ms,
            pinned: taking.pinned,
            manifest: sealed,
            files: manifest.workspace.files,
            state_bytes: parts.bytes(),
            machine_bytes,
            summary: taking.summary.clone(),
            compact: taking.compact.clone(),
            work: manifest.work,
            work_seen: Some(work_seen),
            with: with.clone(),
            under_way: under_way.as_ref().map(|under_way| under_way.exec),
        };
        tries += 1;
        match kernel.records.add_checkpoint(new, actor).await {
            // Workflow records changed meanwhile: the manifest is rebuilt with the change.
            Err(error) if error.reason == WORK_CHANGED && tries < limits::SEAL_ATTEMPTS => {}
            added => break (sealed, added?),
        }
    };
    host.metrics.took(Stage::CheckpointPause, kernel.spec().engine, Duration::from_micros(files.pause_us));
    kernel.advance(version_after(sequence));
    let unreadable = files.unreadable();
    {
        let mut view = kernel.view.borrow_mut();
        view.checkpoints += 1;
        view.unreadable.clone_from(&unreadable);
    }
    let reported: Vec<_> = unreadable.iter().take(UNREADABLE_NAMED).map(|missed| &missed.key).collect();
    let detail = serde_json::json!({
        "unreadable": reported, "unreadable_count": unreadable.len(),
        "id": checkpoint.id, "name": checkpoint.name, "type": checkpoint.kind, "pause_us": files.pause_us,
        "files_read": files.files_read, "full_walk": files.full_walk, "copy_us": copy.took_us,
        "kind": checkpoint.snapshot_kind(), "machine_bytes": machine_bytes,
    });
    host.events.publish(&kernel.event_name(), "checkpoint_created", detail);
    let (versions, words) = ((before, checkpoint.version), format!("{} ({})", checkpoint.id, checkpoint.kind.name()));
    host.audit_checkpoint(actor, "checkpoint.create", kernel, versions, sealed, words).await;
    if let (Some((event, deed)), Some(outcome)) = (named, &outcome) {
        let reported = work_detail(outcome);
        let versions = (Some(before), Some(version_after(sequence)));
        host.audit(actor, deed, kernel, versions, reported.to_string()).await;
        host.events.publish(&kernel.event_name(), event, reported);
    }
    super::pruning::prune_soon(host, kernel);
    Ok((checkpoint, outcome))
}

/// The revisions in the captured files.
async fn revisions(host: &Host, objects: &Objects, tree: Digest) -> Result<Revisions> {
    let (objects, barren) = (Arc::clone(&objects.together), Arc::clone(&host.barren));
    let found = host.store.run_beside(move |_| {
        // What a panic left is at most incomplete.
        let mut barren = barren.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(workspace::revisions(&*objects, TreeId(tree), &mut barren))
    });
    found.await?.map_err(Error::from)
}

/// Freezes everything inside. On failure, nothing stays frozen.
pub(super) async fn freeze(link: &WorkerLink) -> Result<()> {
    let frozen = link.freeze().await;
    if frozen.is_err() {
        // The worker may be frozen although its reply was lost.
        let _ = link.thaw().await;
    }
    frozen
}

/// Builds a manifest of the captured state and the present workflow records.
async fn manifest(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    (id, state): (CheckpointId, Digest),
    files: &CapturedFiles,
    under_way: Option<&UnderWay>,
    with: Option<&Together>,
) -> Result<(Manifest, WorkflowPart)> {
    let tools = kernel.offered_tools().iter().map(tool_part).collect();
    let seen = kernel.records.workflow_part().await?;
    let work = match with.map(Together::request) {
        Some(request) => seen.clone().after(&request.change, request.at_ms)?,
        None => seen.clone(),
    };
    let view = kernel.view();
    let mut journal = view.version.saturating_sub(1);
    let mut missed = view.missed;
    if let Some(under_way) = under_way {
        let entry = kernel.records.state.exec_entry(under_way.exec).await?;
        journal = entry.map_or(journal, |entry| entry.saturating_sub(1));
        missed.clone_from(&under_way.missed);
    }
    // Not part of the present state any more.
    missed.retain(|entry| !entry.has_ended());
    missed.extend(files.missed.iter().cloned());
    missed.extend(kernel.background_work().iter().map(|job| MissedEntry {
        key: format!("job/{}", job.id),
        type_name: "job".into(),
        reason: format!("a process that runs: {}", job.command),
    }));
    let (mounts, mcp) = kernel.records.grants().await?;
    let (driver, dir) = (host.drivers.of(kernel.spec().isolation)?, host.home(kernel.id, None).dir);
    let manifest = Manifest {
        format: FORMAT,
        kind: Manifest::kind_with(None),
        ryokan: env!("CARGO_PKG_VERSION").into(),
        arch: Architecture::here(),
        base_image_version: driver.image_version(&kernel.spec(), &dir),
        engine_version: kernel.view().engine_version,
        host: host.id(),
        kernel: kernel.id,
        epoch: kernel.epoch,
        id,
        parent: kernel.records.head().await?.checkpoint,
        at_ms: host.now_ms(),
        engine: kernel.spec().engine,
        spec: kernel.spec_now(),
        journal,
        state,
        workspace: files.part.clone(),
        mounts,
        mcp: mcp.into_iter().map(|(name, transport)| McpPart { name, transport }).collect(),
        work,
        tools,
        missed,
        audit: Some(host.catalog.audit_head().await?),
        repositories: Vec::new(),
        dependencies: Vec::new(),
        databases: Vec::new(),
        machine: None,
    };
    Ok((manifest, seen))
}

pub(super) fn tool_part(tool: &ToolInfo) -> ToolPart {
    let mut hash = blake3::Hasher::new();
    // The length comes first, so that the encoding is unambiguous.
    hash.update(&(tool.description.len() as u64).to_le_bytes());
    hash.update(tool.description.as_bytes()).update(tool.schema_json.as_bytes());
    let hash = Digest::from_bytes(*hash.finalize().as_bytes());
    ToolPart { name: tool.name.clone(), source: tool.source.clone(), hash }
}

pub(crate) fn encode(manifest: &Manifest) -> Result<Vec<u8>> {
    manifest.encode().map_err(|error| Error::refused(error.to_string()).reason("manifest_size"))
}
