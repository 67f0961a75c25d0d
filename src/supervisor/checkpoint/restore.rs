//! Going back to a checkpoint: all of it or nothing, and never further than the next undo.

use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use super::gather::gather;
use super::verify::{self, Present};
use super::{Files, Keep, Still, contents, find, memory, seal};
use crate::catalog::state::{EntryKind, Finished, NewEntry, Restored};
use crate::core::checkpoint::{Checkpoint, CheckpointType, Manifest, Recalled, Restoration, StateParts, Taking};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{CheckpointId, Digest};
use crate::core::info::{GivenMount, MissedEntry};
use crate::core::kernel::transition::{Kind, Record, Recovery, Step, Transition};
use crate::core::limits;
use crate::core::workflow::Options;
use crate::link::host::WorkerLink;
use crate::supervisor::checkpoint::pruning::hold;
use crate::supervisor::checkpoint::queue_ticket;
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change, Trace};
use crate::supervisor::kernel::journal::version_after;
use crate::supervisor::kernel::transition::ExclusiveTransition;
use crate::supervisor::registry::create_from::load_engine;

/// A checkpoint with what it holds.
struct Target {
    checkpoint: Checkpoint,
    manifest: Manifest,
    parts: StateParts,
}

/// Brings a kernel to one of its checkpoints.
///
/// # Errors
/// `notFound`, `conflict` (version, another restore, ambiguous), `refused`, `corrupt`: nothing was touched then. What fails later is
/// taken back: the kernel is as it was.
pub async fn restore(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    reference: &str,
    options: Options,
    change: Change,
) -> Result<Restoration> {
    let checkpoint = find(kernel, reference).await?;
    to(host, kernel, checkpoint, options, change).await
}

/// Goes back to where the kernel was before its last restore. Once more: forwards again.
///
/// # Errors
/// `notFound` if nothing was restored, and those of [`restore`].
pub async fn undo(host: &Rc<Host>, kernel: &Rc<Kernel>, change: Change) -> Result<Restoration> {
    let name = &kernel.spec.name;
    let none = || Error::not_found(format!("nothing was restored in kernel {name}, so there is nothing to undo"));
    let id = kernel.records.head().await?.undo.ok_or_else(|| {
        none().hint(format!("`ryokan log {name}` lists checkpoints; `ryokan restore {name} REF` goes back to one"))
    })?;
    let checkpoint = kernel.records.checkpoint(id).await?.ok_or_else(none)?;
    // What the restore did to decisions and artifacts is taken back with it: that needs no asking.
    to(host, kernel, checkpoint, Options::default(), change).await
}

async fn to(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    checkpoint: Checkpoint,
    options: Options,
    change: Change,
) -> Result<Restoration> {
    let begun = Instant::now();
    let transition = Rc::new(ExclusiveTransition::begin(kernel, Kind::Restore)?);
    // Until the database knows that it is being restored, and the files are its own.
    let (checkpoint, held) = hold(kernel, checkpoint).await?;
    let target = load(host, kernel, checkpoint).await?;
    judge(host, kernel, &target)?;
    if options.with_artifacts {
        check_artifacts(host, &target).await?;
    }
    if kernel.thread_of.is_none() {
        kernel.others_rest()?;
    }
    let (actor, change) = (change.actor.clone(), Trace::Transition(change));
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    // Until its turn comes it is given up with its client: what that does not see any more must not undo the work of others.
    let (patience, _wish) = queue_ticket::Patience::of_a_wish(&kernel);
    // In a task of its own: once something was touched it goes on to one of its two ends, whoever still waits for it.
    let restoring = tokio::task::spawn_local(async move {
        let _held = held;
        let (of, own, owned) = (Rc::clone(&host), Rc::clone(&kernel), Rc::clone(&transition));
        let done = queue_ticket::take(patience, change, limits::CHECKPOINT_WAIT, move |link| async move {
            perform(&of, &own, &link, &owned, target, options, &actor).await
        });
        match done.await {
            Ok(done) => {
                host.metrics.since(Stage::Restore, kernel.spec.engine, begun);
                Ok(done)
            }
            Err(failed) if kernel.is_changing() => Err(revert(&host, &kernel, transition, failed).await),
            Err(failed) => Err(failed),
        }
    });
    restoring.await.map_err(|error| Error::internal(error.to_string()))?
}

/// After a restore that failed half-way: leaves going back to recovery, and waits for it.
async fn revert(host: &Rc<Host>, kernel: &Rc<Kernel>, transition: Rc<ExclusiveTransition>, failed: Error) -> Error {
    // Where even that cannot be written, recovery may finish the restore instead: either is a whole state.
    let aborted = transition.abort(host).await;
    if let Err(error) = &aborted {
        tracing::warn!(kernel = %kernel.spec.name, %error, "a failed restore could not be recorded as such");
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
            Error { message, ..failed }.hint("nothing is lost: the next use tries again")
        }
    }
}

/// What a checkpoint of this kernel says that it holds.
async fn load(host: &Rc<Host>, kernel: &Rc<Kernel>, checkpoint: Checkpoint) -> Result<Target> {
    let short = checkpoint.short_id();
    if !checkpoint.restore_point {
        return Err(Error::refused(format!("checkpoint {short} is not one to restore")).reason("no_restore_point"));
    }
    let (manifest, parts) = contents(host, &checkpoint).await?;
    if manifest.kernel != kernel.id || manifest.id != checkpoint.id {
        return Err(Error::refused(format!("checkpoint {short} is another kernel's")).reason("other_kernel"));
    }
    if manifest.engine != kernel.spec.engine {
        let (its, ours) = (manifest.engine.name(), kernel.spec.engine.name());
        return Err(Error::refused(format!("checkpoint {short} is of engine {its}, not {ours}")).reason("engine"));
    }
    Ok(Target { checkpoint, manifest, parts })
}

/// Whether the content is there of what artifacts are to be again.
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

/// Whether what was given may still be given.
fn judge(host: &Host, kernel: &Kernel, target: &Target) -> Result<()> {
    target.manifest.mounts.iter().try_for_each(|GivenMount { mount, real }| {
        host.check_given(kernel.uid, Path::new(&mount.source), real.as_deref().map(Path::new)).map(drop)
    })
}

async fn perform(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    transition: &ExclusiveTransition,
    target: Target,
    options: Options,
    actor: &Actor,
) -> Result<Restoration> {
    // From here to the end nothing begins where the same files are: what it wrote would be in neither of the two checkpoints.
    let _hold = kernel.hold_files();
    if kernel.thread_of.is_none() {
        kernel.others_rest()?;
    }
    let before = kernel.view().version;
    let name = match target.checkpoint.name.as_str() {
        _ if target.checkpoint.kind == CheckpointType::System => "before undo".into(),
        "" => format!("before restore of {}", target.checkpoint.short_id()),
        name => format!("before restore of {name}"),
    };
    let name = name.chars().take(limits::CHECKPOINT_NAME_BYTES / 4).collect::<String>();
    // Out of a restore that could not be ended there is nothing whole to be kept: what was taken before that one is.
    let Target { manifest, parts, .. } = &target;
    let unfinished = kernel.transitions.borrow().record().and_then(safety_of);
    let (safety, present, objects_read) = match unfinished {
        Some(safety) => {
            verify::whole(&host.store, manifest, parts).await?;
            (safety, None, None)
        }
        None => {
            // The copy of the one that is restored is not to go for this.
            let keep = Keep { kind: CheckpointType::System, spare: Some(target.checkpoint.id) };
            let gathered = gather(host, kernel, link, Some(keep)).await?;
            let present = Present::of(&gathered, kernel);
            let read = verify::difference(&host.store, &present, manifest, parts).await?;
            let taking = Taking::by_us(CheckpointType::System, &name);
            (seal(host, kernel, gathered, &taking, actor, None).await?.0.id, Some(present), Some(read))
        }
    };
    let id = target.checkpoint.id;
    // Before its files are touched: a mount goes with the folder on which it stands.
    kernel.part_with_mounts(target.manifest.mounts.clone()).await?;
    let intent = Transition::Restore { target: id, safety, options };
    if let Err(error) = transition.record(intent, actor.to_string(), host.now_ms()).await {
        kernel.take_back_mounts().await;
        return Err(error);
    }
    let restoring = Restoring { safety, actor: actor.to_string(), options };
    let applied = apply(host, kernel, Some(link), transition, &target, present.as_ref(), restoring).await?;
    let Applied { finished, engine, missed, files_changed, engine_us } = applied;
    let version = version_after(finished.sequence);
    // How much it was: the more differs, the more is read.
    let detail = serde_json::json!({
        "id": id, "name": target.checkpoint.name, "safety": safety, "files_changed": files_changed,
        "objects_read": objects_read, "engine": engine, "engine_us": engine_us,
    });
    host.events.publish(&kernel.event_name, "checkpoint_restored", detail);
    let (words, manifest) = (format!("{id}, safety checkpoint {safety}"), target.checkpoint.manifest);
    host.audit_checkpoint(actor, "checkpoint.restore", kernel, (before, version), manifest, words).await;
    let checkpoint = kernel.records.checkpoint(id).await?.unwrap_or(target.checkpoint);
    let Finished { decisions_changed, artifacts_changed, .. } = finished;
    Ok(Restoration { checkpoint, safety, version, missed, files_changed, engine, decisions_changed, artifacts_changed })
}

/// What a restore did, once it is done.
struct Applied {
    finished: Finished,
    engine: Recalled,
    missed: Vec<MissedEntry>,
    files_changed: u64,
    /// How long it took to bring the engine back, microseconds.
    engine_us: u64,
}

/// What a restore is asked for.
struct Restoring {
    safety: CheckpointId,
    actor: String,
    options: Options,
}

/// Files first, then the engine's state, then the records. Each step may be repeated. Without a worker, the next one finds the
/// engine's state in `engine.db`.
async fn apply(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: Option<&Rc<WorkerLink>>,
    transition: &ExclusiveTransition,
    target: &Target,
    present: Option<&Present>,
    restoring: Restoring,
) -> Result<Applied> {
    transition.enter(Step::Files)?;
    let files_changed = match kernel.thread_of {
        None => restore_files(host, kernel, link, target.manifest.workspace.tree).await?,
        // They are another kernel's, and that one's to restore.
        Some(_) => 0,
    };
    let begun = tokio::time::Instant::now();
    transition.enter(Step::EngineState)?;
    let Target { checkpoint, manifest, parts } = target;
    let is_there = present.is_some_and(|present| present.is_state(parts));
    let (engine, mut missed) = match link {
        Some(link) => memory::recall(host, link, checkpoint, (manifest, parts), is_there).await?,
        None => {
            host.catalog.recreate_engine_db(kernel.id).await?;
            load_engine(host, kernel.id, manifest.engine, parts.clone()).await?;
            let why_not_memory = String::from("no worker was running");
            (Recalled::Saved { why_not_memory }, manifest.missed.clone())
        }
    };
    let engine_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    if kernel.thread_of.is_some() {
        let owner = &kernel.files().spec.name;
        missed.push(MissedEntry {
            key: "workspace".into(),
            type_name: "workspace".into(),
            reason: format!("it is kernel {owner}'s: a checkpoint of that one brings files back"),
        });
    }
    transition.enter(Step::Commit)?;
    let (id, short) = (checkpoint.id, checkpoint.short_id());
    let Restoring { safety, actor, options } = restoring;
    let entry = NewEntry {
        kind: EntryKind::Mark,
        at_ms: host.now_ms(),
        actor: actor.clone(),
        text: match checkpoint.name.as_str() {
            _ if id == safety => format!("went back to {short}: a restore could not be done"),
            "" => format!("restored {short}"),
            name => format!("restored {short} {name:?}"),
        },
        detail_json: serde_json::json!({ "checkpoint": id, "safety": safety }).to_string(),
    };
    let done = Restored {
        target: id,
        safety,
        actor,
        options,
        at_ms: host.now_ms(),
        mounts: manifest.mounts.clone(),
        mcp: manifest.mcp.iter().map(|part| (part.name.clone(), part.transport.clone())).collect(),
        work: manifest.work.clone(),
        entry,
    };
    let finished = kernel.finish_restore(done).await?;
    transition.ended()?;
    Ok(Applied { finished, engine, missed, files_changed, engine_us })
}

async fn restore_files(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: Option<&Rc<WorkerLink>>,
    tree: Digest,
) -> Result<u64> {
    let mut files = Files::of(host, kernel).await?;
    let still = Still::of(kernel, link).await?;
    let changed = files.restore(tree).await;
    still.end().await?;
    changed
}

impl Kernel {
    /// A checkpoint that the kernel's own records name.
    pub(super) async fn recorded(&self, id: CheckpointId) -> Result<Checkpoint> {
        let found = self.records.checkpoint(id).await?;
        found.ok_or_else(|| Error::corrupt(format!("checkpoint {id}, which kernel {} needs, is gone", self.spec.name)))
    }
}

/// The checkpoint before the restore that this record is of.
fn safety_of(record: &Record) -> Option<CheckpointId> {
    match record.transition {
        Transition::Restore { safety, .. } => Some(safety),
        Transition::Archive { .. } | Transition::Unarchive { .. } => None,
    }
}

/// Ends a restore that was interrupted: with the worker that is there, or without one.
///
/// # Errors
/// What keeps it from both ends. The next attempt may have another worker.
pub(crate) async fn recover(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: Option<&Rc<WorkerLink>>,
    transition: ExclusiveTransition,
    record: Record,
) -> Result<()> {
    let (name, _hold) = (&kernel.spec.name, kernel.hold_files());
    let ended = finish_or_revert(host, kernel, link, &transition, &record).await;
    match &ended {
        Ok(outcome) => {
            host.events.publish(&kernel.event_name, "restore_ended", serde_json::json!({ "outcome": outcome }))
        }
        Err(error) => {
            tracing::error!(kernel = %name, %error, with_worker = link.is_some(), "an interrupted restore could not be ended");
            let detail = serde_json::json!({ "error": error.message });
            host.events.publish(&kernel.event_name, "restore_unfinished", detail);
        }
    }
    ended.map(drop)
}

/// Gives the outcome's name.
async fn finish_or_revert(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: Option<&Rc<WorkerLink>>,
    transition: &ExclusiveTransition,
    record: &Record,
) -> Result<&'static str> {
    let Transition::Restore { target, safety, options } = record.transition else {
        return Err(Error::internal("a transition of another kind needs no worker"));
    };
    let actor = record.actor.clone();
    if record.recovery() != Recovery::Revert {
        let finish = async {
            let target = load(host, kernel, kernel.recorded(target).await?).await?;
            judge(host, kernel, &target)?;
            verify::whole(&host.store, &target.manifest, &target.parts).await?;
            kernel.part_with_mounts(target.manifest.mounts.clone()).await?;
            let restoring = Restoring { safety, actor: actor.clone(), options };
            apply(host, kernel, link, transition, &target, None, restoring).await
        };
        match finish.await {
            Ok(_) => return Ok("finished"),
            // The next attempt does without this worker.
            Err(error) if link.is_some() && may_be_of_worker(&error) => return Err(error),
            Err(error) => {
                tracing::warn!(kernel = %kernel.spec.name, %error, "an interrupted restore cannot go on: it goes back");
                transition.abort(host).await?;
            }
        }
    }
    let target = load(host, kernel, kernel.recorded(safety).await?).await?;
    verify::whole(&host.store, &target.manifest, &target.parts).await?;
    // Nothing was recorded yet of what was asked beside.
    let restoring = Restoring { safety, actor, options: Options::default() };
    apply(host, kernel, link, transition, &target, None, restoring).await?;
    Ok("reverted")
}

/// Whether another worker may not fail so.
fn may_be_of_worker(error: &Error) -> bool {
    match error.code {
        ErrorCode::Lost | ErrorCode::Deadline | ErrorCode::Unavailable | ErrorCode::Internal => true,
        ErrorCode::InvalidArgument
        | ErrorCode::NotFound
        | ErrorCode::AlreadyExists
        | ErrorCode::Conflict
        | ErrorCode::Refused
        | ErrorCode::Busy
        | ErrorCode::Unsupported
        | ErrorCode::Departed
        | ErrorCode::Corrupt => false,
    }
}
