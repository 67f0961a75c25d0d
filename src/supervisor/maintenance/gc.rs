//! Garbage collection: retention first, then unreferenced objects.

use std::collections::HashSet;
use std::time::Instant;

use tokio::sync::mpsc;

use super::marks::Marks;
use super::roots::{self, Named};
use super::{Running, is_gone, relay};
use crate::catalog::state::RootKind;
use crate::core::audit::NewAudit;
use crate::core::checkpoint::Checkpoint;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, KernelId};
use crate::core::limits;
use crate::core::quantity::format_size;
use crate::core::retention;
use crate::core::upkeep::{GcItem, GcReport, GcThing};
use crate::store::{self, Fate, GcOptions, Store, StoreError};
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;

/// The options of a collection.
#[derive(Debug, Clone, Copy)]
pub struct GcAsked {
    /// Only report what would be removed.
    pub dry_run: bool,
    /// Upper bound of bytes copied out of sparsely used packs.
    pub copy_most: u64,
    /// Started by the daemon: a run that changes nothing is not audited.
    pub in_background: bool,
}

/// Collects garbage. `take` receives each removed checkpoint; in a dry run, each checkpoint and object. A started
/// collection runs to its end, even if its client disconnects.
///
/// # Errors
/// `busy` if another run is in progress; a root that cannot be read or followed, and then nothing is removed; an error
/// of `take`, which ends the reports but not the collection.
pub async fn collect(
    supervisor: &Supervisor,
    asked: GcAsked,
    actor: &Actor,
    take: impl AsyncFnMut(GcItem) -> Result<()>,
) -> Result<GcReport> {
    let host = supervisor.host();
    let (tell, items) = mpsc::channel(limits::UPKEEP_QUEUE);
    let (of, who) = (supervisor.clone(), actor.clone());
    let running = Running::begin(host)?;
    let work = tokio::task::spawn_local(async move {
        let _running = running;
        let done = perform(&of, asked, tell).await;
        note(of.host(), asked, &who, &done).await;
        done
    });
    relay(items, take, work).await
}

async fn note(host: &Host, asked: GcAsked, actor: &Actor, done: &Result<GcReport>) {
    match done {
        Ok(done) => {
            let is_nothing = done.checkpoints_removed == 0 && done.objects_removed == 0 && done.packs_removed == 0;
            if asked.in_background && is_nothing || asked.dry_run {
                return;
            }
            let detail = format!(
                "{} checkpoints, {} objects of {} removed, {} of packs given back",
                done.checkpoints_removed,
                done.objects_removed,
                format_size(done.bytes_removed),
                format_size(done.pack_bytes_removed.saturating_sub(done.bytes_copied)),
            );
            host.write_audit(NewAudit { detail, ..host.line(actor, "host.gc", None) }).await;
            let detail = serde_json::json!(done);
            host.events.publish("", "gc_done", detail);
        }
        Err(error) if asked.in_background => tracing::debug!(%error, "a turn of collection failed"),
        Err(error) => host.audit_refusal(actor, "host.gc", None, error).await,
    }
}

async fn perform(supervisor: &Supervisor, asked: GcAsked, tell: mpsc::Sender<GcItem>) -> Result<GcReport> {
    let host = supervisor.host();
    // From here on the store keeps objects that are stored or used again. It also keeps unreferenced objects of running
    // operations: those are named after the rows are listed, and the operations end before the list is used.
    let (grace, begun) = (host.config.upkeep.grace, Instant::now());
    let held = host.store.run_beside(move |store| Ok(store.guard_before_all(grace))).await?;
    let mut done = GcReport { dry_run: asked.dry_run, ..GcReport::default() };
    let doomed = retain(supervisor, asked.dry_run, &tell, &mut done).await?;
    let mut listed = roots::list(supervisor).await?;
    // In a dry run, objects that only doomed checkpoints need count as removed.
    listed.retain(|root| match root.named {
        Named::Row(RootKind::Checkpoint { number }) => !doomed.contains(&(root.kernel, number)),
        Named::Row(RootKind::Blob | RootKind::Output { .. }) | Named::Files | Named::Freeze { .. } => true,
    });
    let roots: Vec<(String, KernelId, Named, Digest)> =
        listed.into_iter().map(|root| (root.name.to_string(), root.kernel, root.named, root.digest)).collect();
    let options = GcOptions {
        dry_run: asked.dry_run,
        grace: host.config.upkeep.grace,
        copy_most: asked.copy_most,
        ..GcOptions::default()
    };
    let marked = host.store.run_beside(move |store| Ok(mark(store, roots, asked.dry_run))).await?;
    let marks = std::sync::Arc::new(marked?);
    let run = async || {
        let (marks, tell) = (std::sync::Arc::clone(&marks), tell.clone());
        let work = move |store: &Store| sweep(store, options, &marks, asked.dry_run.then_some(&tell));
        host.store.run_beside(work).await.map_err(Error::from)
    };
    // The collection needs a little room before it frees any.
    let swept = host.making_room(run).await;
    drop(held);
    let (report, recent) = swept?;
    if let Some(before) = begun.checked_sub(grace).filter(|_| !asked.dry_run) {
        supervisor.objects_collected(before);
    }
    Ok(GcReport {
        objects_kept: report.kept,
        bytes_kept: report.kept_bytes,
        objects_removed: report.dropped,
        bytes_removed: report.dropped_bytes,
        objects_recent: recent,
        packs_removed: report.packs_removed,
        pack_bytes_removed: report.removed_bytes,
        bytes_copied: report.copied_bytes,
        ..done
    })
}

/// Applies the retention of every kernel; in a dry run returns the checkpoints that would be removed.
async fn retain(
    supervisor: &Supervisor,
    dry_run: bool,
    tell: &mpsc::Sender<GcItem>,
    done: &mut GcReport,
) -> Result<HashSet<(KernelId, u64)>> {
    let host = supervisor.host();
    let mut doomed = HashSet::new();
    // A kernel with an unreadable database shows no checkpoints here; listing its roots fails below.
    for kernel in supervisor.kernels().into_iter().filter(|kernel| kernel.view().checkpoints > 0) {
        let (fates, gone) = match retain_one(host, &kernel, dry_run).await {
            Ok(retained) => retained,
            // Removed meanwhile, with its checkpoints.
            Err(_) if is_gone(supervisor, kernel.id) => continue,
            Err(error) => return Err(error),
        };
        for (one, fate) in fates {
            let stays = !gone.contains(&one.number);
            match stays {
                true => done.checkpoints_kept += 1,
                false => done.checkpoints_removed += 1,
            }
            if dry_run && !stays {
                doomed.insert((kernel.id, one.number));
            }
            if dry_run || !stays {
                let thing = GcThing::Checkpoint { kernel: kernel.event_name(), checkpoint: Box::new(one) };
                // The client may have disconnected; the work continues.
                let _ = tell.send(GcItem { thing, stays, why: fate.to_string() }).await;
            }
        }
    }
    Ok(doomed)
}

/// The fates of a kernel's checkpoints, and the numbers of those that are, or in a dry run would be, removed.
async fn retain_one(
    host: &Host,
    kernel: &Kernel,
    dry_run: bool,
) -> Result<(Vec<(Checkpoint, retention::Fate)>, HashSet<u64>)> {
    let fates = kernel.fates(host.now_ms()).await?;
    let gone = match dry_run {
        true => fates.iter().filter(|(_, fate)| !fate.stays()).map(|(one, _)| one.number).collect(),
        false => checkpoint::prune(host, kernel).await?.into_iter().map(|one| one.number).collect(),
    };
    Ok((fates, gone))
}

/// The live objects, with the roots that explain them.
struct Marked {
    marks: Marks,
    roots: Vec<(String, KernelId, Named, Digest)>,
}

fn mark(store: &Store, roots: Vec<(String, KernelId, Named, Digest)>, with_reasons: bool) -> Result<Marked> {
    let mut marks = Marks::new(with_reasons);
    for (at, (name, _, named, digest)) in roots.iter().enumerate() {
        marks.mark(store, at, *named, *digest).map_err(|error| {
            let message = format!("{} of kernel {name} cannot be followed: {}", words(*named), error.message);
            Error { message, ..error }
                .reason("damaged")
                .hint("nothing was removed: `ryokan verify` names what is damaged; what cannot be mended can be removed by name")
        })?;
    }
    Ok(Marked { marks, roots })
}

fn words(named: Named) -> String {
    match named {
        Named::Row(RootKind::Checkpoint { number }) => format!("checkpoint {number}"),
        Named::Row(RootKind::Blob) => "a blob".into(),
        Named::Row(RootKind::Output { exec }) => format!("output of execution {exec}"),
        Named::Files => "the live workspace".into(),
        Named::Freeze { number } => format!("freeze {number}"),
    }
}

fn sweep(
    store: &Store,
    options: GcOptions,
    marked: &Marked,
    tell: Option<&mpsc::Sender<GcItem>>,
) -> std::result::Result<(store::GcReport, u64), StoreError> {
    let mut recent = 0;
    let each = |item: store::GcItem| {
        recent += u64::from(item.fate == Fate::Recent);
        let Some(tell) = tell else { return };
        let why = match item.fate {
            Fate::Live => match marked.marks.by(item.digest).and_then(|at| marked.roots.get(at)) {
                Some((name, _, named, _)) => format!("{} of kernel {name} needs it", words(*named)),
                None => "it is needed".into(),
            },
            Fate::Recent => "stored or used again lately, or by what goes on now".into(),
            Fate::Shared => "a part of an object that stays".into(),
            Fate::Unreferenced => "nothing names it".into(),
        };
        let thing = GcThing::Object { digest: item.digest, bytes: item.bytes };
        // The client may have disconnected; the work continues.
        let _ = tell.blocking_send(GcItem { thing, stays: item.fate.is_kept(), why });
    };
    let report = store.gc(options, |digest| marked.marks.has(digest), each)?;
    Ok((report, recent))
}
