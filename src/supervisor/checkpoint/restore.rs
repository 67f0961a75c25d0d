//! Restores a checkpoint: completely or not at all, and always undoable.

use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use super::gather::gather;
use super::memory::Keep;
use super::restore_steps::{Applied, Restoring, apply, finish_or_revert, may_be_of_worker, safety_of};
use super::restore_stopped::{Intent, intend, safety_name, with_machine, without_worker};
use super::take::seal;
use super::verify::{self, Present};
use super::{contents, find, machine};
use crate::catalog::state::Finished;
use crate::core::checkpoint::{
    Checkpoint, CheckpointRequest, CheckpointType, Manifest, Restoration, RestoredFrom, StateParts,
};
use crate::core::error::{DISK_FULL, Error, ErrorCode, Result};
use crate::core::ids::{CheckpointId, Digest};
use crate::core::info::{GivenMount, Job};
use crate::core::kernel::State;
use crate::core::kernel::transition::{Kind, Transition};
use crate::core::limits;
use crate::core::snapshot::{KindRequest, PortableKind};
use crate::core::workflow::Options;
use crate::isolation::Reach;
use crate::link::host::WorkerLink;
use crate::supervisor::checkpoint::pruning::pin_for_read;
use crate::supervisor::checkpoint::queue_ticket;
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change, Trace};
use crate::supervisor::kernel::journal::version_after;
use crate::supervisor::kernel::transition::ExclusiveTransition;

/// A checkpoint with its contents.
pub(super) struct Target {
    pub checkpoint: Checkpoint,
    pub manifest: Manifest,
    pub parts: StateParts,
}

/// What a client asks of a restore.
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked {
    /// What else it changes.
    pub options: Options,
    /// The kind; `None`: the checkpoint's own.
    pub kind: Option<KindRequest>,
}

/// Restores a kernel to one of its checkpoints.
///
/// # Errors
/// `notFound`, `conflict` (version, another restore, ambiguous), `refused`, `corrupt`; nothing was changed then. A
/// later failure is rolled back: the kernel is as before.
pub async fn restore(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    reference: &str,
    asked: Asked,
    change: Change,
) -> Result<Restoration> {
    let checkpoint = find(kernel, reference).await?;
    to(host, kernel, checkpoint, asked, change).await
}

/// The checkpoint to which [`undo`] returns.
///
/// # Errors
/// `notFound` if nothing was restored.
pub async fn undo_target(kernel: &Kernel) -> Result<Checkpoint> {
    let name = &kernel.spec().name;
    let none = || Error::not_found(format!("nothing was restored in kernel {name}, so there is nothing to undo"));
    let id = kernel.records.head().await?.undo.ok_or_else(|| {
        none().hint(format!("`ryokan log {name}` lists checkpoints; `ryokan restore {name} REF` goes back to one"))
    })?;
    kernel.records.checkpoint(id).await?.ok_or_else(none)
}

/// Returns to the state before the last restore. A second undo returns to the restored state.
///
/// # Errors
/// `notFound` if nothing was restored, and errors of [`restore`].
pub async fn undo(host: &Rc<Host>, kernel: &Rc<Kernel>, change: Change) -> Result<Restoration> {
    let checkpoint = undo_target(kernel).await?;
    // The restore's effects on decisions and artifacts are undone with it, without confirmation.
    // Where the memory cannot come back, files and state do.
    let asked = Asked { kind: Some(KindRequest::Auto), ..Asked::default() };
    to(host, kernel, checkpoint, asked, change).await
}

/// Restores a checkpoint. On a full disk the safety checkpoint and the records take the disk reserve.
async fn to(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    checkpoint: Checkpoint,
    asked: Asked,
    change: Change,
) -> Result<Restoration> {
    let attempt = async || {
        let change = Change { actor: change.actor.clone(), expected_version: change.expected_version };
        attempt(host, kernel, checkpoint.clone(), asked, change).await
    };
    let done = host.making_room(attempt).await;
    done.map_err(|error| if error.reason == DISK_FULL { error.hint(Host::full().hint) } else { error })
}

async fn attempt(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    checkpoint: Checkpoint,
    Asked { mut options, kind }: Asked,
    change: Change,
) -> Result<Restoration> {
    let begun = Instant::now();
    kernel.check_here()?;
    let transition = Rc::new(ExclusiveTransition::begin(kernel, Kind::Restore)?);
    // Pinned until the database records the restore and the files are the kernel's own.
    let (checkpoint, held) = pin_for_read(kernel, checkpoint).await?;
    let target = load(host, kernel, checkpoint).await?;
    validate_spec(host, kernel, &target)?;
    if options.with_artifacts {
        check_artifacts(host, &target).await?;
    }
    let choice = machine::choose(host, kernel, &target.manifest, kind).await?;
    options.with_memory = choice.kind == PortableKind::Teleport;
    let why_not_memory = target.manifest.machine.as_ref().filter(|_| !options.with_memory).map(|_| choice.why);
    if options.with_memory {
        verify::whole(&host.store, &target.manifest, &target.parts).await?;
    } else if host.free_bytes().is_some_and(|free| target.parts.bytes().saturating_mul(2) > free) {
        // The worker receives the engine's state whole, then writes it: a failure in between would end the worker.
        return Err(Host::full());
    }
    if kernel.thread_of.is_none() {
        kernel.refuse_if_others_run()?;
    }
    let again = Change { actor: change.actor.clone(), expected_version: change.expected_version };
    let (actor, change) = (change.actor.clone(), Trace::Transition(change));
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    // While queued, the restore is dropped with its client: a restore that the client does not see must not undo
    // others' work.
    let (ticket, _guard) = queue_ticket::Ticket::with_guard(&kernel);
    let (driver, dir) = (Rc::clone(host.drivers.of(kernel.spec().isolation)?), host.home(kernel.id, None).dir);
    // In its own task: once it has changed something, the restore runs to one of its two ends even if the client is
    // gone.
    let restoring = tokio::task::spawn_local(async move {
        let _held = held;
        let (of, own, owned) = (Rc::clone(&host), Rc::clone(&kernel), Rc::clone(&transition));
        let id = target.checkpoint.id;
        let before = kernel.view().version;
        let had_memory =
            kernel.link.borrow().is_some() || driver.keeps_memory(&host.home(kernel.id, None)).unwrap_or(false);
        let done = match kernel.view().state {
            // Its last worker crashed: the present state may be what does not load.
            State::Crashed { .. } if kernel.interrupted().is_none() && driver.reach(&dir) == Reach::Host => None,
            _ => {
                // A start that fails does so within this time.
                let wait = match driver.reach(&dir) {
                    Reach::Host => limits::CHECKPOINT_WAIT,
                    Reach::Worker | Reach::Nothing => limits::CHECKPOINT_WAIT + limits::VM_BOOT + limits::VM_CALL,
                };
                Some(match options.with_memory {
                    false => {
                        let done = queue_ticket::take(ticket, change, wait, move |link| async move {
                            perform(&of, &own, &link, &owned, (target, options), &actor, None).await
                        });
                        done.await
                    }
                    true => {
                        let (manifest, by) = (target.checkpoint.manifest, actor.clone());
                        let intended = queue_ticket::take(ticket, change, wait, move |link| async move {
                            intend(&of, &own, &link, &owned, (target, options, had_memory), &actor).await
                        });
                        match intended.await {
                            Ok(safety) => {
                                let intent = Intent { id, safety, manifest, before, with_memory: true };
                                with_machine(&host, &kernel, &transition, intent, &by).await
                            }
                            Err(error) => Err(error),
                        }
                    }
                })
            }
        };
        let is_without_worker = |error: &Error| {
            kernel.link.borrow().is_none()
                && !transition.is_recorded()
                && kernel.interrupted().is_none()
                && match driver.reach(&dir) {
                    Reach::Host => may_be_of_worker(error),
                    // A start may succeed: nothing newer is given up.
                    Reach::Worker => false,
                    Reach::Nothing => may_be_of_worker(error) || error.code == ErrorCode::Corrupt,
                }
        };
        let done = match done {
            Some(Err(error)) if !is_without_worker(&error) => Err(error),
            Some(Ok(done)) => Ok(done),
            None | Some(Err(_)) => without_worker(&host, &kernel, &transition, id, options, again).await,
        };
        match done {
            Ok(mut done) => {
                host.metrics.since(Stage::Restore, kernel.spec().engine, begun);
                if let (Some(why), RestoredFrom::Saved { why_not_memory }) = (why_not_memory, &mut done.engine) {
                    *why_not_memory = why;
                }
                Ok(done)
            }
            Err(failed) if transition.is_recorded() => Err(revert(&host, &kernel, transition, failed).await),
            Err(failed) => Err(failed),
        }
    });
    restoring.await.map_err(|error| Error::internal(error.to_string()))?
}

/// Reverts a restore that failed half-way: starts the recovery, and waits for it.
async fn revert(host: &Rc<Host>, kernel: &Rc<Kernel>, transition: Rc<ExclusiveTransition>, failed: Error) -> Error {
    // If the revert cannot be recorded, recovery may finish the restore instead: either state is complete.
    let aborted = transition.abort(host).await;
    if let Err(error) = &aborted {
        tracing::warn!(kernel = %kernel.spec().name, %error, "a failed restore could not be recorded as such");
    }
    transition.release();
    let undone = kernel.recovered().await;
    match (kernel.interrupted(), undone) {
        (None, _) if aborted.is_ok() => {
            Error { message: format!("{}; the kernel is as it was", failed.message), ..failed }
        }
        (None, _) => Error { message: format!("{}; it was recovered since", failed.message), ..failed }
            .hint("look at where the kernel is"),
        (Some(_), undone) => {
            let why = undone.err().map_or_else(String::new, |error| error.message);
            let message = format!("{}; and going back failed too: {why}", failed.message);
            Error { message, ..failed }.hint("nothing is lost: it is tried again by itself")
        }
    }
}

/// Restores a kernel whose worker and transition the caller holds. `given`: a checkpoint of the present state.
///
/// # Errors
/// As [`restore`]; the kernel is as before, unless the transition still has its record: its recovery follows then.
pub(super) async fn restore_held(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    transition: &ExclusiveTransition,
    checkpoint: CheckpointId,
    given: Option<(CheckpointId, Present)>,
    actor: &Actor,
) -> Result<Restoration> {
    let (checkpoint, _held) = pin_for_read(kernel, kernel.recorded(checkpoint).await?).await?;
    let target = load(host, kernel, checkpoint).await?;
    validate_spec(host, kernel, &target)?;
    let done = perform(host, kernel, link, transition, (target, Options::default()), actor, given).await;
    let failed = match done {
        Err(failed) => failed,
        done => return done,
    };
    if transition.is_recorded() {
        transition.abort(host).await?;
        let record = kernel.transitions.borrow().record().cloned();
        let record = record.ok_or_else(|| Error::internal("a recorded transition has no record"))?;
        finish_or_revert(host, kernel, Some(link), transition, &record).await?;
    }
    Err(failed)
}

/// Reads everything that a restore to a checkpoint needs, whatever the kernel is at.
///
/// # Errors
/// As [`restore`].
pub(super) async fn validate(host: &Rc<Host>, kernel: &Rc<Kernel>, checkpoint: CheckpointId) -> Result<()> {
    let target = load(host, kernel, kernel.recorded(checkpoint).await?).await?;
    validate_spec(host, kernel, &target)?;
    verify::whole(&host.store, &target.manifest, &target.parts).await
}

/// Loads the contents of a checkpoint of this kernel.
pub(super) async fn load(host: &Rc<Host>, kernel: &Rc<Kernel>, checkpoint: Checkpoint) -> Result<Target> {
    let short = checkpoint.short_id();
    if !checkpoint.restore_point {
        return Err(Error::refused(format!("checkpoint {short} is not one to restore")).reason("no_restore_point"));
    }
    let (manifest, parts) = contents(host, &checkpoint).await?;
    if manifest.kernel != kernel.id || manifest.id != checkpoint.id {
        return Err(Error::refused(format!("checkpoint {short} is another kernel's")).reason("other_kernel"));
    }
    if manifest.engine != kernel.spec().engine {
        let (its, ours) = (manifest.engine.name(), kernel.spec().engine.name());
        return Err(Error::refused(format!("checkpoint {short} is of engine {its}, not {ours}")).reason("engine"));
    }
    Ok(Target { checkpoint, manifest, parts })
}

/// Checks that the contents of restored artifacts exist.
async fn check_artifacts(host: &Host, target: &Target) -> Result<()> {
    let wanted: Vec<(String, Digest)> =
        target.manifest.work.artifacts.iter().map(|artifact| (artifact.name.clone(), artifact.hash)).collect();
    let missing = host.store.run(move |store| Ok(wanted.into_iter().find(|(_, hash)| !store.contains(*hash)))).await?;
    match missing {
        Some((name, hash)) => {
            Err(Error::corrupt(format!("object {hash}, the content of artifact {name:?} then, is gone"))
                .hint("restore without artifacts"))
        }
        None => Ok(()),
    }
}

/// Checks that the recorded mounts are still allowed.
pub(super) fn validate_spec(host: &Host, kernel: &Kernel, target: &Target) -> Result<()> {
    target.manifest.mounts.iter().try_for_each(|GivenMount { mount, real }| {
        host.revalidate_source(kernel.uid, Path::new(&mount.source), real.as_deref().map(Path::new)).map(drop)
    })
}

async fn perform(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    transition: &ExclusiveTransition,
    (target, options): (Target, Options),
    actor: &Actor,
    given: Option<(CheckpointId, Present)>,
) -> Result<Restoration> {
    // From here on no session of the workspace starts work: its writes would be in neither checkpoint.
    let _hold = kernel.hold_files();
    if kernel.thread_of.is_none() {
        kernel.refuse_if_others_run()?;
    }
    let before = kernel.view().version;
    let name = safety_name(&target.checkpoint);
    // A restore that could not be ended leaves no complete state to capture: its own safety checkpoint applies.
    let Target { manifest, parts, .. } = &target;
    let unfinished = kernel.transitions.borrow().record().and_then(safety_of);
    let (safety, present, objects_read) = match (unfinished, given) {
        (None, Some((safety, present))) => {
            let read = verify::difference(&host.store, &present, manifest, parts).await?;
            (safety, Some(present), Some(read))
        }
        (Some(safety), _) => {
            verify::whole(&host.store, manifest, parts).await?;
            (safety, None, None)
        }
        (None, None) => {
            // The new copy must not evict the copy of the restored checkpoint.
            let keep = Keep { kind: CheckpointType::System, spare: Some(target.checkpoint.id) };
            let gathered = gather(host, kernel, Some(link), Some(keep)).await?;
            let present = Present::of(&gathered, kernel);
            let read = verify::difference(&host.store, &present, manifest, parts).await?;
            let taking = CheckpointRequest::new(CheckpointType::System, &name);
            (seal(host, kernel, gathered, &taking, actor, None).await?.0.id, Some(present), Some(read))
        }
    };
    let id = target.checkpoint.id;
    // Before the files change: a mount is removed with its directory.
    kernel.detach_mounts(target.manifest.mounts.clone()).await?;
    let intent = Transition::Restore { target: id, safety, options };
    if let Err(error) = transition.record(intent, actor.to_string(), host.now_ms()).await {
        kernel.reattach_mounts().await;
        return Err(error);
    }
    // They would write to files of another time. The safety checkpoint names them.
    let ended = kernel.background_work().into_iter();
    let ended = ended.map(|job| Job { id: job.id, command: job.command }).collect();
    kernel.end_processes().await?;
    let restoring = Restoring { safety, actor: actor.to_string(), options };
    let applied = apply(host, kernel, Some(link), transition, &target, present.as_ref(), restoring).await?;
    let Applied { finished, engine, missed, files_changed, engine_us } = applied;
    let version = version_after(finished.sequence);
    // Extent of the restore: more differences mean more reads.
    let detail = serde_json::json!({
        "id": id, "name": target.checkpoint.name, "safety": safety, "files_changed": files_changed,
        "objects_read": objects_read, "engine": engine, "engine_us": engine_us,
    });
    host.events.publish(&kernel.event_name(), "checkpoint_restored", detail);
    let (words, manifest) = (format!("{id}, safety checkpoint {safety}"), target.checkpoint.manifest);
    host.audit_checkpoint(actor, "checkpoint.restore", kernel, (before, version), manifest, words).await;
    // The restore holds, whatever this read returns.
    let checkpoint = match kernel.records.checkpoint(id).await {
        Ok(found) => found.unwrap_or(target.checkpoint),
        Err(error) => {
            tracing::warn!(kernel = %kernel.spec().name, %error, "a restored checkpoint could not be read again");
            target.checkpoint
        }
    };
    let Finished { decisions_changed, artifacts_changed, .. } = finished;
    Ok(Restoration {
        checkpoint,
        safety,
        version,
        missed,
        files_changed,
        engine,
        decisions_changed,
        artifacts_changed,
        ended,
    })
}
