//! Going back to a checkpoint: all of it or nothing, and never further than the next undo.

use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use super::gather::gather;
use super::verify::{self, Present};
use super::{Files, Keep, Still, contents, find, memory, seal};
use crate::catalog::state::{EntryKind, Finished, NewEntry, Restored, Restoring};
use crate::core::checkpoint::{
    Checkpoint, CheckpointRequest, CheckpointType, Manifest, Restoration, RestoredFrom, StateParts,
};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{CheckpointId, Digest};
use crate::core::info::GivenMount;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::workflow::Options;
use crate::link::host::WorkerLink;
use crate::supervisor::checkpoint::pruning::hold;
use crate::supervisor::checkpoint::queue_ticket;
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change, Trace};
use crate::supervisor::kernel::journal::version_after;

/// Between two looks at whether a worker has ended.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(5);

/// A checkpoint with what it holds.
struct Target {
    checkpoint: Checkpoint,
    manifest: Manifest,
    parts: StateParts,
}

/// Counts as one at a time of what exchanges all that a kernel is: a restore, an archiving.
pub(super) struct Alone(Rc<Kernel>);

impl Alone {
    pub(super) fn begin(kernel: &Rc<Kernel>) -> Result<Alone> {
        if kernel.restoring.replace(true) {
            return Err(Error::conflict(format!("kernel {} is being restored or archived", kernel.spec.name))
                .reason("restoring")
                .hint("wait for that to end, then look at where the kernel is"));
        }
        Ok(Alone(Rc::clone(kernel)))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.restoring.set(false);
        self.0.wake_sessions();
    }
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
    let alone = Alone::begin(kernel)?;
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
    let (actor, change) = (change.actor.clone(), Trace::Restore(change));
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    // Until its turn comes it is given up with its client: what that does not see any more must not undo the work of others.
    let (patience, _wish) = queue_ticket::Patience::of_a_wish(&kernel);
    // In a task of its own: once something was touched it goes on to one of its two ends, whoever still waits for it.
    let restoring = tokio::task::spawn_local(async move {
        let (_alone, _held) = (alone, held);
        let (of, own) = (Rc::clone(&host), Rc::clone(&kernel));
        let done = queue_ticket::take(patience, change, limits::CHECKPOINT_WAIT, move |link| async move {
            perform(&of, &own, &link, target, options, &actor).await
        });
        match done.await {
            Ok(done) => {
                host.metrics.since(Stage::Restore, kernel.spec.engine, begun);
                Ok(done)
            }
            Err(failed) if kernel.between.get() => Err(back(&host, &kernel, failed).await),
            Err(failed) => Err(failed),
        }
    });
    restoring.await.map_err(|error| Error::internal(error.to_string()))?
}

/// After a restore that failed half-way: with a worker of its own if need be, to where the kernel was.
async fn back(host: &Rc<Host>, kernel: &Rc<Kernel>, failed: Error) -> Error {
    if failed.code == ErrorCode::Lost {
        let worker = kernel.link.borrow().as_ref().map(Rc::downgrade);
        if let Some(worker) = worker {
            is_gone(kernel, &worker).await;
        }
    }
    let (of, own) = (Rc::clone(host), Rc::clone(kernel));
    let undone = kernel.first_with_worker(move |link| async move { go_back(&of, &own, &link).await });
    match undone.await {
        Ok(()) => Error { message: format!("{}; the kernel is as it was", failed.message), ..failed },
        Err(error) => {
            let detail = serde_json::json!({ "failed": failed.message, "error": error.message });
            host.events.publish(&kernel.event_name, "restore_unfinished", detail);
            let message = format!("{}; and going back failed too: {}", failed.message, error.message);
            Error { message, ..failed }.hint("nothing is lost: mend the cause, then restore again")
        }
    }
}

/// Waits until a worker whose engine has ended is no longer the kernel's.
async fn is_gone(kernel: &Kernel, worker: &std::rc::Weak<WorkerLink>) {
    let there = || kernel.link.borrow().as_ref().is_some_and(|link| std::ptr::eq(Rc::as_ptr(link), worker.as_ptr()));
    let gone = async {
        while there() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    // If it is there still, what comes next says so.
    let _ = tokio::time::timeout(limits::WORKER_STOP, gone).await;
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
    let (safety, present, objects_read) = match kernel.records.restoring().await? {
        Some(unfinished) => {
            verify::whole(&host.store, manifest, parts).await?;
            (unfinished.safety, None, None)
        }
        None => {
            // The copy of the one that is restored is not to go for this.
            let keep = Keep { kind: CheckpointType::System, spare: Some(target.checkpoint.id) };
            let gathered = gather(host, kernel, link, Some(keep)).await?;
            let present = Present::of(&gathered, kernel);
            let read = verify::difference(&host.store, &present, manifest, parts).await?;
            let taking = CheckpointRequest::new(CheckpointType::System, &name);
            (seal(host, kernel, gathered, &taking, actor, None).await?.0.id, Some(present), Some(read))
        }
    };
    let (id, by, at_ms) = (target.checkpoint.id, actor.to_string(), host.now_ms());
    let restoring = Restoring { target: id, safety, actor: by, at_ms, options };
    // Before its files are touched: a mount goes with the folder on which it stands.
    kernel.part_with_mounts(target.manifest.mounts.clone()).await?;
    if let Err(error) = kernel.records.begin_restore(restoring.clone()).await {
        kernel.take_back_mounts().await;
        return Err(error);
    }
    kernel.between.set(true);
    let Applied { finished, engine, missed, files_changed, engine_us } =
        apply(host, kernel, link, &target, present.as_ref(), restoring).await?;
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
    engine: RestoredFrom,
    missed: Vec<MissedEntry>,
    files_changed: u64,
    /// How long it took to bring the engine back, microseconds.
    engine_us: u64,
}

/// Files first, then the engine's state, then what is recorded. Each may be done twice.
async fn apply(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    target: &Target,
    present: Option<&Present>,
    restoring: Restoring,
) -> Result<Applied> {
    let files_changed = match kernel.thread_of {
        None => restore_files(host, kernel, link, target.manifest.workspace.tree).await?,
        // They are another kernel's, and that one's to restore.
        Some(_) => 0,
    };
    let begun = tokio::time::Instant::now();
    let Target { checkpoint, manifest, parts } = target;
    let is_there = present.is_some_and(|present| present.is_state(parts));
    let (engine, mut missed) = memory::recall(host, link, checkpoint, (manifest, parts), is_there).await?;
    let engine_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    if kernel.thread_of.is_some() {
        let owner = &kernel.files().spec.name;
        missed.push(MissedEntry {
            key: "workspace".into(),
            type_name: "workspace".into(),
            reason: format!("it is kernel {owner}'s: a checkpoint of that one brings files back"),
        });
    }
    let short = target.checkpoint.short_id();
    let entry = NewEntry {
        kind: EntryKind::Mark,
        at_ms: host.now_ms(),
        actor: restoring.actor.clone(),
        text: match target.checkpoint.name.as_str() {
            _ if restoring.target == restoring.safety => format!("went back to {short}: a restore could not be done"),
            "" => format!("restored {short}"),
            name => format!("restored {short} {name:?}"),
        },
        detail_json: serde_json::json!({ "checkpoint": restoring.target, "safety": restoring.safety }).to_string(),
    };
    let done = Restored {
        at_ms: host.now_ms(),
        mounts: target.manifest.mounts.clone(),
        mcp: target.manifest.mcp.iter().map(|part| (part.name.clone(), part.transport.clone())).collect(),
        work: target.manifest.work.clone(),
        entry,
        restoring,
    };
    let finished = kernel.finish_restore(done).await?;
    kernel.between.set(false);
    Ok(Applied { finished, engine, missed, files_changed, engine_us })
}

async fn restore_files(host: &Rc<Host>, kernel: &Rc<Kernel>, link: &Rc<WorkerLink>, tree: Digest) -> Result<u64> {
    let mut files = Files::of(host, kernel).await?;
    let still = Still::of(kernel, link).await?;
    let changed = files.restore(tree).await;
    still.end().await?;
    changed
}

/// To the checkpoint that was taken just before a restore that did not end.
async fn go_back(host: &Rc<Host>, kernel: &Rc<Kernel>, link: &Rc<WorkerLink>) -> Result<()> {
    let Some(restoring) = kernel.records.restoring().await? else { return Ok(()) };
    let safety = kernel.recorded(restoring.safety).await?;
    let target = load(host, kernel, safety).await?;
    verify::whole(&host.store, &target.manifest, &target.parts).await?;
    // Nothing was recorded yet of what was asked beside.
    let back = Restoring { target: restoring.safety, options: Options::default(), ..restoring };
    apply(host, kernel, link, &target, None, back).await.map(drop)
}

impl Kernel {
    /// A checkpoint that the kernel's own records name.
    pub(super) async fn recorded(&self, id: CheckpointId) -> Result<Checkpoint> {
        let found = self.records.checkpoint(id).await?;
        found.ok_or_else(|| Error::corrupt(format!("checkpoint {id}, which kernel {} needs, is gone", self.spec.name)))
    }
}

/// Ends a restore that a former daemon did not live to end: forwards, or else back.
pub(crate) async fn resume(host: &Rc<Host>, kernel: &Rc<Kernel>, link: &Rc<WorkerLink>) {
    let (name, _hold) = (&kernel.spec.name, kernel.hold_files());
    let ended = async {
        let Some(restoring) = kernel.records.restoring().await? else { return Ok(()) };
        let forwards = async {
            let target = load(host, kernel, kernel.recorded(restoring.target).await?).await?;
            judge(host, kernel, &target)?;
            verify::whole(&host.store, &target.manifest, &target.parts).await?;
            kernel.part_with_mounts(target.manifest.mounts.clone()).await?;
            apply(host, kernel, link, &target, None, restoring.clone()).await
        };
        match forwards.await {
            Ok(_) => Ok(()),
            Err(error) => {
                tracing::warn!(kernel = %name, %error, "an unfinished restore cannot go on: it goes back");
                go_back(host, kernel, link).await
            }
        }
    };
    match ended.await {
        Ok(()) => host.events.publish(&kernel.event_name, "restore_ended", serde_json::json!({})),
        Err(error) => {
            tracing::error!(kernel = %name, %error, "an unfinished restore could not be ended");
            let detail = serde_json::json!({ "error": error.message });
            host.events.publish(&kernel.event_name, "restore_unfinished", detail);
        }
    }
    kernel.restoring.set(false);
}
