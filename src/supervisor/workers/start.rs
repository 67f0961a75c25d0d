//! How a kernel gets its worker: the one that was promised to it when it was made, a slot of the pool, or one that is started for it.

use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use super::admission::{Place, Share, Taken};
use super::worker::{self, Folders, Shape, Started};
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::core::info::{GivenMount, MountInfo};
use crate::core::limits;
use crate::core::pool::Event;
use crate::core::spec::KernelSpec;
use crate::link::host::WorkerLink;
use crate::sandbox::plan::PlannedMount;
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::task::Listener;
use crate::supervisor::workers::start_queue::Turn;
use crate::sys;

/// Gives a kernel a worker. While it waits for its turn, it may be given up.
pub(crate) async fn start(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    mounts: Vec<GivenMount>,
    listener: Rc<Listener>,
    mut given_up: impl Future + Unpin,
) -> Result<Started> {
    let (begun, engine) = (Instant::now(), kernel.spec.engine);
    let shape = Shape::of(host, &kernel.spec, kernel.uid)?;
    let mounts = given(host, kernel, mounts)?;
    // Judged when it was asked for, too; since then others may have come.
    let (one, admission) = (Taken::one(shape.limits.memory_bytes), &host.workers.admission);
    let share = admission.share(kernel.uid, one)?;
    let had_pool = !hides_system_path(host, mounts.iter().map(|mount| &*mount.inside));
    let (mut can_come_later, mut next) = (had_pool, None);
    if had_pool {
        match host.promises.claim(host, kernel.id, &shape).await {
            // What it is not good for is said by the kernel's own worker, if it is wanted still.
            Some(promise) => {
                let worker = promise.worker();
                match promise.serve(host, kernel, &mounts, &listener).await {
                    Ok(started) => return Ok(taken(host, started, share, begun)),
                    Err(error) => not_bound(worker, &error),
                }
                can_come_later = false;
            }
            None => next = host.pool.take(host, &shape).map(|slot| Turn::Slot(Box::new(slot))),
        }
    } else {
        host.promises.release(host, kernel.id).await;
    }
    let turn = loop {
        let turn = match next.take() {
            Some(turn) => turn,
            None => {
                let turn = host.turns.next(host, kernel.uid, can_come_later.then_some(&shape), &mut given_up).await;
                turn.inspect_err(|_| host.pool.noted(&shape, Event::Refused))?
            }
        };
        let (slot, active) = match turn {
            Turn::Slot(slot) => *slot,
            Turn::Start(turn) => break turn,
        };
        let worker = slot.id();
        match slot.bind(host, kernel, &mounts, Rc::clone(&listener), active).await {
            Ok(started) => return Ok(taken(host, started, share, begun)),
            Err(error) => not_bound(worker, &error),
        }
        can_come_later = false;
    };
    if had_pool {
        host.pool.noted(&shape, Event::Missed);
    }
    if !host.pool.make_room(host, one) {
        host.pool.noted(&shape, Event::Refused);
        return Err(admission.no_room(one));
    }
    let mut place = admission.place(one.memory_bytes);
    place.belongs(share);
    let started = start_new(host, place, kernel, &shape, mounts, listener).await?;
    drop(turn);
    host.metrics.since(Stage::WorkerStarted, engine, begun);
    Ok(started)
}

/// A slot is the kernel's worker.
fn taken(host: &Host, started: Started, share: Share, begun: Instant) -> Started {
    if let Some(active) = &started.process.active {
        active.bound();
        host.metrics.since(Stage::WorkerTaken, active.engine(), begun);
    }
    started.process.belongs(share);
    started
}

/// A slot may be killed or stopped at any moment. What is wrong with the kernel is said by its own worker, too.
fn not_bound(worker: WorkerId, error: &Error) {
    tracing::warn!(%worker, %error, "a slot could not be bound: another worker is started");
}

/// Mounts in a live worker what its kernel has and it has not.
///
/// # Errors
/// Those of the first that cannot be mounted.
pub(crate) async fn mount_now(host: &Host, uid: u32, link: &WorkerLink, mut mounts: Vec<PlannedMount>) -> Result<()> {
    // A mount hides what was mounted below its place before.
    mounts.sort_by_key(|mount| mount.inside.components().count());
    for mount in mounts {
        let detached = host.workers.detach(host, uid, &mount.source)?;
        link.bind(&mount.inside, &mount.source, mount.writable, detached).await?;
    }
    Ok(())
}

/// Starts a worker for a kernel. Recorded before it exists, so that a daemon that is killed meanwhile leaves none behind.
async fn start_new(
    host: &Rc<Host>,
    place: Place,
    kernel: &Rc<Kernel>,
    shape: &Shape,
    mounts: Vec<PlannedMount>,
    listener: Rc<Listener>,
) -> Result<Started> {
    let (identity, socket) = worker::identity(host, kernel.id, kernel.epoch);
    let Folders { dir, own_workspace, workspace } = worker::folders(host, kernel)?;
    let mut plan = worker::plan(host, shape, identity.worker, &dir);
    (plan.own_workspace, plan.workspace) = (own_workspace, workspace);
    plan.hostname = kernel.spec.name.as_str().to_owned();
    plan.mounts.extend(mounts);
    let mut document = worker::document(host, shape, &identity, kernel.spec.name.clone(), plan, &socket).await?;
    document.origin = kernel.origin_now();
    if kernel.spec.ephemeral {
        // No daemon comes back for it; this one has so long to come for the first time.
        document.orphan_grace_ms = document.orphan_grace_ms.min(limits::WORKER_ADOPT.as_millis() as u64);
    }
    let mut row = worker::row(&identity, &socket, None);
    host.catalog.put_worker(row.clone()).await?;
    let record = async |pid| {
        (row.pid, row.start_ticks) = (pid, sys::process::start_ticks(pid).unwrap_or(0));
        Ok(host.catalog.put_worker(row).await?)
    };
    let (link, report, process) = worker::launch(host, place, &document, &identity, listener, record).await?;
    Ok(Started { link, report, process, told_origin: Some(document.origin) })
}

/// What the kernel was given, judged again at each start: what a path leads to may have changed since it was given. What is judged
/// here is opened by this very name, and by no link that comes in its way meanwhile.
pub(crate) fn given(host: &Host, kernel: &Kernel, mounts: Vec<GivenMount>) -> Result<Vec<PlannedMount>> {
    let planned = mounts.into_iter().map(|GivenMount { mount, real }| {
        let real = host.check_given(kernel.uid, Path::new(&mount.source), real.as_deref().map(Path::new));
        let source = real.map_err(|error| with_way_out(error, &kernel.spec, &mount))?;
        Ok(PlannedMount { inside: mount.path.into(), source, writable: mount.writable, system: false })
    });
    planned.collect()
}

/// Whether a path that every kernel has is below one of these: a slot has it already, and what comes later would lie on top.
pub(crate) fn hides_system_path<'a>(host: &Host, mut inside: impl Iterator<Item = &'a Path>) -> bool {
    inside.any(|inside| host.config.sandbox.system_paths.iter().any(|path| path.starts_with(inside)))
}

/// Adds what can be done about a path that may not be given any more.
fn with_way_out(error: Error, spec: &KernelSpec, mount: &MountInfo) -> Error {
    if !error.hint.is_empty() {
        return error;
    }
    let hint = if spec.paths.iter().any(|allowed| allowed.path == Path::new(&mount.path)) {
        String::from("put it back: it belongs to the kernel's specification")
    } else {
        format!("put it back, or take it away: ryokan unmount {} {}", spec.name, mount.path)
    };
    error.hint(hint)
}
