//! Restores that recovery performs before the next worker starts: with a virtual machine, and where no worker loads the
//! present state.
//!
//! ```text
//! safety checkpoint ─▶ the transition is recorded ─▶ the worker ends ─▶ recovery: files, state, machine ─▶ next worker
//! ```

use std::rc::Rc;

use super::gather::{gather, gather_machine};
use super::restore::{Target, load};
use super::restore_steps::safety_of;
use super::take::seal;
use super::{machine, verify};
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, Restoration, RestoredFrom};
use crate::core::error::{Error, Result};
use crate::core::ids::{CheckpointId, Digest};
use crate::core::kernel::transition::Transition;
use crate::core::limits;
use crate::core::workflow::Options;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change, StopMode};
use crate::supervisor::kernel::transition::ExclusiveTransition;
use crate::supervisor::workers::worker::KeptMemory;
use crate::sys::fault;

/// Records the intent to restore a checkpoint with its machine, after the safety checkpoint, which holds the present
/// memory if there is any. Nothing runs from then on. Returns the safety checkpoint.
pub(super) async fn intend(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    transition: &ExclusiveTransition,
    (target, options, had_memory): (Target, Options, bool),
    actor: &Actor,
) -> Result<CheckpointId> {
    let _hold = kernel.hold_files();
    if options.with_memory {
        machine::has_room_to_install(host, kernel, &target.manifest, had_memory)?;
    }
    let name = safety_name(&target.checkpoint);
    // A restore that could not be ended leaves no complete state to capture: its own safety checkpoint applies.
    let unfinished = kernel.transitions.borrow().record().and_then(safety_of);
    let safety = match unfinished {
        Some(safety) => safety,
        None => {
            let gathered = match had_memory {
                true => {
                    machine::has_room(host, kernel, &kernel.spec_now())?;
                    gather_machine(host, kernel, link).await?
                }
                false => gather(host, kernel, Some(link), None).await?,
            };
            let taking = CheckpointRequest::new(CheckpointType::System, &name);
            seal(host, kernel, gathered, &taking, actor, None).await?.0.id
        }
    };
    kernel.detach_mounts(target.manifest.mounts.clone()).await?;
    let intent = Transition::Restore { target: target.checkpoint.id, safety, options };
    let recorded = transition.record(intent, actor.to_string(), host.now_ms()).await;
    if recorded.is_err() {
        kernel.reattach_mounts().await;
    }
    recorded.map(|()| safety)
}

/// A recorded restore that recovery performs before the next worker starts.
pub(super) struct Intent {
    pub id: CheckpointId,
    pub safety: CheckpointId,
    pub manifest: Digest,
    /// The kernel's version before it.
    pub before: u64,
    /// Whether the next worker continues the checkpoint's machine.
    pub with_memory: bool,
}

/// Ends the worker; recovery restores, and the next worker continues the machine.
pub(super) async fn with_machine(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    transition: &ExclusiveTransition,
    intent: Intent,
    actor: &Actor,
) -> Result<Restoration> {
    fault::point("machine.restore.recorded").map_err(|error| Error::unavailable(error.to_string()))?;
    if let Err(error) = kernel.stop(actor.clone(), StopMode::Force).await {
        tracing::info!(kernel = %kernel.spec().name, %error, "a worker ended before a restore; its checkpoint has its state");
    }
    by_recovery(host, kernel, transition, intent, actor).await
}

/// The name of the safety checkpoint before a restore.
pub(super) fn safety_name(target: &Checkpoint) -> String {
    let name = match target.name.as_str() {
        _ if target.kind == CheckpointType::System => "before undo".into(),
        "" => format!("before restore of {}", target.short_id()),
        name => format!("before restore of {name}"),
    };
    name.chars().take(limits::CHECKPOINT_NAME_BYTES / 4).collect()
}

/// Restores a kernel whose present state no worker can load: the safety checkpoint is made of what the last worker
/// stored, and recovery restores before the next worker starts.
pub(super) async fn without_worker(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    transition: &ExclusiveTransition,
    id: CheckpointId,
    options: Options,
    change: Change,
) -> Result<Restoration> {
    let actor = &change.actor;
    kernel.admit(actor, change.expected_version).await?;
    kernel.stop(actor.clone(), StopMode::Force).await?;
    let target = load(host, kernel, kernel.recorded(id).await?).await?;
    verify::whole(&host.store, &target.manifest, &target.parts).await?;
    if options.with_memory {
        machine::has_room_to_install(host, kernel, &target.manifest, false)?;
    }
    let before = kernel.view().version;
    let gathered = gather(host, kernel, None, None).await?;
    let name = format!("before restore of {}", target.checkpoint.short_id());
    let taking = CheckpointRequest::new(CheckpointType::System, &name);
    let safety = seal(host, kernel, gathered, &taking, actor, None).await?.0.id;
    // Before the record: the recovery that follows it replaces files and state as a whole.
    if let Some(kept) = host.drivers.of(kernel.spec().isolation)?.put_aside(&host.home(kernel.id, None).dir).await? {
        let detail = serde_json::json!({ "kept": kept });
        tracing::warn!(kernel = %kernel.spec().name, kept = %kept.display(), "files that no worker loads are put aside");
        host.events.publish(&kernel.event_name(), "files_put_aside", detail);
    }
    kernel.detach_mounts(target.manifest.mounts.clone()).await?;
    let intent = Transition::Restore { target: id, safety, options };
    if let Err(error) = transition.record(intent, actor.to_string(), host.now_ms()).await {
        kernel.reattach_mounts().await;
        return Err(error);
    }
    let (manifest, with_memory) = (target.checkpoint.manifest, options.with_memory);
    let intent = Intent { id, safety, manifest, before, with_memory };
    by_recovery(host, kernel, transition, intent, actor).await
}

/// Why no worker continues the memory of a restored checkpoint.
fn without_worker_why(failure: Option<Error>) -> String {
    match failure {
        Some(Error { message, hint, .. }) if hint.is_empty() => message,
        // The memory is kept, and the hint says how to go on.
        Some(Error { message, hint, .. }) => format!("{message} ({hint})"),
        None => String::from("no worker could be started with it"),
    }
}

/// Lets recovery perform a recorded restore before the next worker starts, and waits for both.
async fn by_recovery(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    transition: &ExclusiveTransition,
    Intent { id, safety, manifest, before, with_memory }: Intent,
    actor: &Actor,
) -> Result<Restoration> {
    kernel.kept_memory.take();
    kernel.finished_restore.take();
    transition.release();
    let recovered = kernel.recovered().await;
    let finished = kernel.finished_restore.take();
    let (mut done, failure) = match (finished, recovered) {
        (Some(done), recovered) => (done, recovered.err()),
        (None, Err(error)) => return Err(error),
        (None, Ok(())) => {
            return Err(Error::unavailable("the restore could not be done; the kernel is as it was")
                .hint(format!("`ryokan events {}` says why", kernel.spec().name)));
        }
    };
    if with_memory {
        done.engine = match kernel.kept_memory.take() {
            KeptMemory::Continued => RestoredFrom::Memory,
            KeptMemory::Lost(why_not_memory) => RestoredFrom::Saved { why_not_memory },
            KeptMemory::None => RestoredFrom::Saved { why_not_memory: without_worker_why(failure) },
        };
    }
    let detail = serde_json::json!({
        "id": id, "name": done.checkpoint.name, "safety": safety, "files_changed": done.files_changed,
        "engine": done.engine,
    });
    host.events.publish(&kernel.event_name(), "checkpoint_restored", detail);
    let words = format!("{id}, safety checkpoint {safety}");
    let versions = (before, done.version);
    host.audit_checkpoint(actor, "checkpoint.restore", kernel, versions, manifest, words).await;
    Ok(done)
}
