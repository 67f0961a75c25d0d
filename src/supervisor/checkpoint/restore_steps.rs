//! The steps of a restore, and the recovery of an interrupted one.
//!
//! Each step may be repeated. With a worker, files and engine state change in it; without one, the next worker finds them.

use std::rc::Rc;

use super::files::Files;
use super::quiesce::Quiesced;
use super::restore::{Target, load, validate_spec};
use super::verify::{self, Present};
use super::{machine, memory};
use crate::catalog::state::{EntryKind, Finished, NewEntry, Restored};
use crate::core::checkpoint::{Checkpoint, Restoration, RestoredFrom};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{CheckpointId, Digest};
use crate::core::kernel::transition::{Record, Recovery, Step, Transition};
use crate::core::missed::MissedEntry;
use crate::core::workflow::Options;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::journal::version_after;
use crate::supervisor::kernel::transition::ExclusiveTransition;

/// Result of a restore.
pub(super) struct Applied {
    pub finished: Finished,
    pub engine: RestoredFrom,
    pub missed: Vec<MissedEntry>,
    pub files_changed: u64,
    /// Time to restore the engine, microseconds.
    pub engine_us: u64,
}

impl Applied {
    pub fn of(self, checkpoint: Checkpoint, safety: CheckpointId) -> Restoration {
        let Applied { finished, engine, missed, files_changed, engine_us: _ } = self;
        let Finished { sequence, decisions_changed, artifacts_changed } = finished;
        let version = version_after(sequence);
        // No worker ran.
        let ended = Vec::new();
        Restoration {
            checkpoint,
            safety,
            version,
            missed,
            files_changed,
            engine,
            decisions_changed,
            artifacts_changed,
            ended,
        }
    }
}

/// Parameters of a restore.
pub(super) struct Restoring {
    pub safety: CheckpointId,
    pub actor: String,
    pub options: Options,
}

/// Restores files, then engine state, then records. Each step is idempotent. Without a worker, the next one finds the
/// engine's state in `engine.db`.
pub(super) async fn apply(
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
        // Another kernel owns the files and restores them.
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
            super::state::load_engine(host, kernel.id, kernel.spec().isolation, manifest.engine, parts.clone()).await?;
            if restoring.options.with_memory {
                machine::install(host, kernel.id, &kernel.spec_now(), manifest).await?;
                (RestoredFrom::Memory, memory::outside(manifest).cloned().collect())
            } else {
                let why_not_memory = String::from("no worker was running");
                (RestoredFrom::Saved { why_not_memory }, manifest.missed.clone())
            }
        }
    };
    let engine_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    if kernel.thread_of.is_some() {
        let owner = &kernel.files().spec().name;
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

pub(super) async fn restore_files(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: Option<&Rc<WorkerLink>>,
    tree: Digest,
) -> Result<u64> {
    let mut files = Files::of(host, kernel).await?;
    let still = Quiesced::of(kernel, link).await?;
    let changed = files.restore(tree).await;
    still.end().await?;
    changed
}

/// The safety checkpoint of this restore record.
pub(super) fn safety_of(record: &Record) -> Option<CheckpointId> {
    match record.transition {
        Transition::Restore { safety, .. } => Some(safety),
        Transition::Archive { .. } | Transition::Unarchive { .. } | Transition::HandoverOut { .. } => None,
    }
}

/// Ends an interrupted restore: with the live worker, or without one.
///
/// # Errors
/// Errors that prevent both ends. The next attempt may have another worker.
pub(crate) async fn recover(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: Option<&Rc<WorkerLink>>,
    transition: ExclusiveTransition,
    record: Record,
) -> Result<()> {
    let (name, _hold) = (&kernel.spec().name, kernel.hold_files());
    let ended = finish_or_revert(host, kernel, link, &transition, &record).await;
    match &ended {
        Ok(outcome) => {
            host.events.publish(&kernel.event_name(), "restore_ended", serde_json::json!({ "outcome": outcome }))
        }
        Err(error) => {
            tracing::error!(kernel = %name, %error, with_worker = link.is_some(), "an interrupted restore could not be ended");
            let detail = serde_json::json!({ "error": error.message });
            host.events.publish(&kernel.event_name(), "restore_unfinished", detail);
        }
    }
    ended.map(drop)
}

/// Finishes or reverts the restore; returns the outcome's name.
pub(super) async fn finish_or_revert(
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
            validate_spec(host, kernel, &target)?;
            if options.with_memory {
                without(link)?;
                machine::check_arrival(host, &kernel.spec_now(), kernel.uid, &target.manifest).await?;
            }
            verify::whole(&host.store, &target.manifest, &target.parts).await?;
            kernel.detach_mounts(target.manifest.mounts.clone()).await?;
            let restoring = Restoring { safety, actor: actor.clone(), options };
            apply(host, kernel, link, transition, &target, None, restoring).await
        };
        match finish.await {
            Ok(applied) => {
                let checkpoint = kernel.recorded(target).await?;
                *kernel.finished_restore.borrow_mut() = Some(applied.of(checkpoint, safety));
                return Ok("finished");
            }
            // The next attempt runs without this worker.
            Err(error) if link.is_some() && may_be_of_worker(&error) => return Err(error),
            Err(error) => {
                tracing::warn!(kernel = %kernel.spec().name, %error, "an interrupted restore cannot go on: it goes back");
                transition.abort(host).await?;
            }
        }
    }
    let target = load(host, kernel, kernel.recorded(safety).await?).await?;
    verify::whole(&host.store, &target.manifest, &target.parts).await?;
    // The restore's further options are not recorded yet.
    let restoring = |with_memory| {
        let options = Options { with_memory, ..Options::default() };
        Restoring { safety, actor: actor.clone(), options }
    };
    if options.with_memory && target.manifest.machine.is_some() {
        without(link)?;
        let reverted = async {
            machine::check_arrival(host, &kernel.spec_now(), kernel.uid, &target.manifest).await?;
            apply(host, kernel, None, transition, &target, None, restoring(true)).await
        };
        match reverted.await {
            Ok(_) => return Ok("reverted"),
            Err(error) => {
                tracing::warn!(kernel = %kernel.spec().name, %error, "a kernel goes back without its machine's memory");
                let detail = serde_json::json!({ "reason": error.message, "code": error.code.name() });
                host.events.publish(&kernel.event_name(), "memory_lost", detail);
            }
        }
    }
    apply(host, kernel, link, transition, &target, None, restoring(false)).await?;
    Ok("reverted")
}

/// A machine continues in a new worker only.
fn without(link: Option<&Rc<WorkerLink>>) -> Result<()> {
    match link {
        None => Ok(()),
        Some(_) => Err(Error::unavailable("the machine of a checkpoint continues in a new worker")),
    }
}

/// Whether the error may be specific to this worker.
pub(super) fn may_be_of_worker(error: &Error) -> bool {
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
