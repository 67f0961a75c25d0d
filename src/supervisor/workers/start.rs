//! Gives a kernel its worker: its reserved worker, a warm worker of the pool, or a new one.

use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use futures::FutureExt as _;

use super::Workers;
use super::admission::{ResourceUse, UserQuota, WorkerPermit};
use super::start_queue::StartGrant;
use super::warm_worker::{binding, orphan_grace};
use super::worker::{self, KeptMemory, KernelStart, Started};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::WorkerId;
use crate::core::info::{GivenMount, MountInfo};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::pool::Event;
use crate::core::spec::KernelSpec;
use crate::isolation::{BoundSources, HostMount, KernelHome, MachineCopy, NewWorker, Shape, WorkerHandle};
use crate::link::binding::{CopyIdentity, KernelBinding};
use crate::link::handshake::WorkerIdentity;
use crate::link::host::{WorkerLink, WorkerListener};
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::sys::fault;

/// Starts a worker for a kernel. `given_up` completes when the worker is no longer wanted; it cancels a queued start.
///
/// # Errors
/// `busy`, `refused`, `unsupported`, and those of the start.
pub(crate) async fn start(
    workers: &Rc<Workers>,
    kernel: &KernelStart,
    mounts: Vec<GivenMount>,
    listener: Rc<dyn WorkerListener>,
    mut given_up: impl Future + Unpin,
) -> Result<Started> {
    let (begun, engine) = (Instant::now(), kernel.spec.engine);
    let shape = workers.shape(&kernel.spec, kernel.uid)?;
    let mounts = check_mounts(&workers.host, kernel, mounts)?;
    // Admission was checked with the request; the load may have changed since.
    let (one, admission) = (ResourceUse::one(shape.limits.memory_bytes), &workers.admission);
    let quota = admission.share(kernel.uid, one)?;
    let driver = workers.driver(shape.isolation)?;
    // A warm worker's interpreter runs already.
    let takes_warm = shape.venv.is_none()
        && driver.is_pooled()
        && driver.takes_warm(&workers.host.home(kernel.id, kernel.workspace_of));
    let uses_pool = takes_warm && !hides_system_path(&workers.host, mounts.iter().map(|mount| &*mount.inside));
    let (mut may_wait_for_warm, mut next) = (uses_pool, None);
    if uses_pool {
        match workers.reserved.claim(workers, kernel.id, &shape).await {
            // If the worker is unfit, a new one reports what is wrong with the kernel.
            Some(reserved) => {
                let worker = reserved.worker();
                match reserved.bind(workers, kernel, &mounts, Rc::clone(&listener)).await {
                    Ok(started) => return Ok(taken(workers, started, quota, begun)),
                    Err(error) => not_bound(worker, &error),
                }
                may_wait_for_warm = false;
            }
            None => next = workers.pool.take(workers, &shape).map(|warm| StartGrant::Warm(Box::new(warm))),
        }
    } else {
        workers.reserved.release(workers, kernel.id).await;
    }
    let grant = loop {
        let grant = match next.take() {
            Some(grant) => grant,
            None => {
                let wanted = may_wait_for_warm.then_some(&shape);
                let grant = workers.start_queue.next(workers, kernel.uid, wanted, &mut given_up).await;
                grant.inspect_err(|_| workers.pool.noted(&shape, Event::Refused))?
            }
        };
        let (warm, active) = match grant {
            StartGrant::Warm(warm) => *warm,
            StartGrant::Start(grant) => break grant,
        };
        let worker = warm.id();
        match warm.bind(workers, kernel, &mounts, Rc::clone(&listener), active).await {
            Ok(started) => return Ok(taken(workers, started, quota, begun)),
            Err(error) => not_bound(worker, &error),
        }
        may_wait_for_warm = false;
    };
    if uses_pool {
        workers.pool.noted(&shape, Event::Missed);
    }
    if !workers.pool.make_room(workers, one) {
        workers.pool.noted(&shape, Event::Refused);
        return Err(admission.no_room(one));
    }
    let mut permit = admission.place(one.memory_bytes);
    permit.belongs(quota);
    let started = start_new(workers, permit, kernel, &shape, mounts, listener).await?;
    drop(grant);
    workers.host.metrics.since(Stage::WorkerStarted, engine, begun);
    Ok(started)
}

/// Records that a warm worker became the kernel's.
fn taken(workers: &Workers, started: Started, quota: UserQuota, begun: Instant) -> Started {
    if let Some(active) = &started.worker.active {
        active.bound();
        workers.host.metrics.since(Stage::WorkerTaken, active.engine(), begun);
    }
    started.worker.belongs(quota);
    started
}

/// Logs a failed bind, after which a new worker is started. A warm worker may be killed at any moment; a problem of the
/// kernel itself is reported by the new worker, too.
fn not_bound(worker: WorkerId, error: &Error) {
    tracing::warn!(%worker, %error, "a warm worker could not be bound: another worker is started");
}

/// Mounts the kernel's mounts that a live worker lacks.
///
/// # Errors
/// Those of the first that cannot be mounted.
pub(crate) async fn attach_mounts(
    worker: &dyn WorkerHandle,
    link: &WorkerLink,
    mut mounts: Vec<HostMount>,
) -> Result<()> {
    // A mount hides earlier mounts below its path.
    mounts.sort_by_key(|mount| mount.inside.components().count());
    for mount in mounts {
        worker.attach_mount(link, &mount).await?;
    }
    Ok(())
}

/// Starts a new worker for a kernel. Recorded before it exists, so that a killed daemon leaves no unknown worker.
async fn start_new(
    workers: &Workers,
    permit: WorkerPermit,
    kernel: &KernelStart,
    shape: &Shape,
    mounts: Vec<HostMount>,
    listener: Rc<dyn WorkerListener>,
) -> Result<Started> {
    let (home, driver) = (workers.host.home(kernel.id, kernel.workspace_of), workers.driver(shape.isolation)?);
    let installed = driver.installed(&home, &kernel.spec, kernel.uid).await;
    let mut start = WorkerStart { workers, kernel, shape, home: &home, mounts, listener };
    let (event, error) = match (installed, driver.saved_worker(&home)) {
        (Ok(None), Ok(None)) => return start.launch(permit, workers.identity(kernel.id, kernel.epoch)).await,
        (Ok(Some(machine)), _) => {
            let listener = Rc::clone(&start.listener);
            match launch_copy(workers, permit, kernel, shape, &machine, listener).await {
                Ok(started) => {
                    if let Err(error) = fault::point("machine.installed.bound") {
                        workers.end(started.worker).await;
                        return Err(Error::unavailable(error.to_string()));
                    }
                    driver.forget_saved(&home);
                    return Ok(started);
                }
                Err(error) => (MEMORY_LOST, error),
            }
        }
        (Err(error), _) => {
            drop(permit);
            (MEMORY_LOST, error)
        }
        (Ok(None), Ok(Some(saved))) => match start.go_on(permit, saved).await {
            Ok(started) => return Ok(started),
            Err(error) => (SUSPEND_LOST, error),
        },
        (Ok(None), Err(error)) => {
            drop(permit);
            (SUSPEND_LOST, error)
        }
    };
    if is_kept(&error, || driver.keeps_memory(&home)) {
        return Err(kept(error, &kernel.spec.name));
    }
    let lost = error;
    tracing::warn!(kernel = %kernel.spec.name, error = %lost, "a machine's kept memory cannot continue");
    workers.host.metrics.noted(Some(kernel.spec.engine), event);
    let detail = serde_json::json!({ "reason": lost.message, "code": lost.code.name() });
    workers.host.events.publish(&workers.host.event_name(kernel.uid, &kernel.spec.name), event, detail);
    driver.forget_saved(&home);
    let (admission, one) = (&workers.admission, ResourceUse::one(shape.limits.memory_bytes));
    let mut permit = admission.place(one.memory_bytes);
    permit.belongs(admission.share_anyway(kernel.uid, one));
    let started = start.launch(permit, workers.identity(kernel.id, kernel.epoch)).await?;
    Ok(Started { memory: KeptMemory::Lost(lost.message), ..started })
}

/// Whether kept memory may continue at a later start, after a start that failed. `keeps` looks whether it is there.
fn is_kept(error: &Error, keeps: impl FnOnce() -> Result<bool>) -> bool {
    let is_void = match error.code {
        ErrorCode::Corrupt => true,
        // The disk has changed since, or the kernel has lived elsewhere: nothing makes the memory valid again.
        ErrorCode::Refused => VOID.contains(&error.reason.as_str()),
        _ => false,
    };
    // A machine that began to continue has removed it.
    !is_void && keeps().unwrap_or_else(|error| error.code != ErrorCode::Corrupt)
}

/// Reasons of refusals of memory that is of no use any more.
const VOID: [&str; 3] = ["disk", "disk_size", "epoch"];

/// The refusal of a start whose kept memory cannot continue now: memory is not discarded without a request.
fn kept(error: Error, name: &KernelName) -> Error {
    if error.code == ErrorCode::Busy {
        return error;
    }
    let way_out = format!("it is kept; to start from the saved state instead: ryokan start {name} --without-memory");
    let hint = if error.hint.is_empty() { way_out } else { format!("{}; {way_out}", error.hint) };
    let message = format!("the memory of {name} cannot continue now: {}", error.message);
    Error { message, ..error }.hint(hint)
}

/// The event of a suspended machine that could not continue.
const SUSPEND_LOST: &str = "suspend_lost";
/// The event of a checkpoint's machine that could not continue.
const MEMORY_LOST: &str = "memory_lost";

/// Starts the worker of a kernel in creation in a copy of another kernel's machine, and makes it that kernel's. Recorded
/// as any other.
///
/// # Errors
/// `busy`, `unsupported`, those of the start; `unavailable` with the reason `seeding` if guest or engine do not confirm
/// that they are seeded anew: nothing of the kernel has run then. The worker has ended.
pub(crate) async fn start_copied(
    workers: &Rc<Workers>,
    kernel: &KernelStart,
    machine: &MachineCopy,
    listener: Rc<dyn WorkerListener>,
) -> Result<Started> {
    let shape = workers.shape(&kernel.spec, kernel.uid)?;
    let (one, admission) = (ResourceUse::one(shape.limits.memory_bytes), &workers.admission);
    let quota = admission.share(kernel.uid, one)?;
    if !workers.pool.make_room(workers, one) {
        return Err(admission.no_room(one));
    }
    let mut permit = admission.place(one.memory_bytes);
    permit.belongs(quota);
    launch_copy(workers, permit, kernel, &shape, machine, listener).await
}

/// Starts a kernel's worker in a copied or installed machine, and makes it that kernel's.
async fn launch_copy(
    workers: &Workers,
    permit: WorkerPermit,
    kernel: &KernelStart,
    shape: &Shape,
    machine: &MachineCopy,
    listener: Rc<dyn WorkerListener>,
) -> Result<Started> {
    let (identity, home) = (workers.identity(kernel.id, kernel.epoch), workers.host.home(kernel.id, None));
    let new = NewWorker {
        shape,
        identity: &identity,
        name: kernel.spec.name.clone(),
        home: &home,
        mounts: Vec::new(),
        origin: kernel.origin,
        orphan_grace: orphan_grace(workers, kernel),
        is_warm: false,
        copy: Some(machine),
    };
    let record = |record| {
        let row = worker::row(&identity, shape.isolation, record);
        async { Ok(workers.host.catalog.put_worker(row).await?) }.boxed_local()
    };
    let (link, _, worker) = workers.launch(permit, new, &record, listener).await?;
    let copy = Some(CopyIdentity { worker: identity.worker, secret: identity.secret });
    let binding = KernelBinding { copy, ..binding(kernel, BoundSources::default()) };
    match link.bind_kernel(&binding).await {
        Ok(report) => {
            let (known_origin, memory) = (Some(kernel.origin), KeptMemory::Continued);
            Ok(Started { link, report, worker, known_origin, memory })
        }
        Err(error) => {
            workers.end(worker).await;
            Err(error)
        }
    }
}

/// What is the same in each attempt to start a kernel's worker.
struct WorkerStart<'a> {
    workers: &'a Workers,
    kernel: &'a KernelStart,
    shape: &'a Shape,
    home: &'a KernelHome,
    mounts: Vec<HostMount>,
    listener: Rc<dyn WorkerListener>,
}

impl WorkerStart<'_> {
    async fn launch(&mut self, permit: WorkerPermit, identity: WorkerIdentity) -> Result<Started> {
        let WorkerStart { workers, kernel, shape, home, .. } = *self;
        let new = NewWorker {
            shape,
            identity: &identity,
            name: kernel.spec.name.clone(),
            home,
            mounts: self.mounts.clone(),
            origin: kernel.origin,
            orphan_grace: orphan_grace(workers, kernel),
            is_warm: false,
            copy: None,
        };
        let record = |record| {
            let row = worker::row(&identity, shape.isolation, record);
            async { Ok(workers.host.catalog.put_worker(row).await?) }.boxed_local()
        };
        let (link, report, worker) = workers.launch(permit, new, &record, Rc::clone(&self.listener)).await?;
        Ok(Started { link, report, worker, known_origin: Some(kernel.origin), memory: KeptMemory::None })
    }

    /// Continues a worker whose memory was saved. Processes beside the engine were reported as lost, and end.
    async fn go_on(&mut self, permit: WorkerPermit, saved: WorkerIdentity) -> Result<Started> {
        if (saved.kernel, saved.epoch) != (self.kernel.id, self.kernel.epoch) {
            return Err(Error::refused("it belonged to another epoch of the kernel").reason("epoch"));
        }
        let started = self.launch(permit, saved).await?;
        let resumed = async {
            started.link.resume().await?;
            started.link.end_processes().await
        };
        let late = |_| Err(Error::deadline("the worker did not resume in time"));
        match tokio::time::timeout(limits::WORKER_STOP, resumed).await.unwrap_or_else(late) {
            Ok(()) => Ok(Started { memory: KeptMemory::Continued, ..started }),
            Err(error) => {
                self.workers.end(started.worker).await;
                Err(error)
            }
        }
    }
}

/// Checks the kernel's mounts again at each start, since the target of a path may have changed. The worker opens the
/// checked path itself and follows no new link.
pub(crate) fn check_mounts(host: &Host, kernel: &KernelStart, mounts: Vec<GivenMount>) -> Result<Vec<HostMount>> {
    let planned = mounts.into_iter().map(|GivenMount { mount, real }| {
        let real = host.revalidate_source(kernel.uid, Path::new(&mount.source), real.as_deref().map(Path::new));
        let source = real.map_err(|error| with_way_out(error, &kernel.spec, &mount))?;
        Ok(HostMount { inside: mount.path.into(), source, writable: mount.writable })
    });
    planned.collect()
}

/// Whether a system path lies below one of these: a warm worker has it mounted already, and a later mount would cover
/// it.
pub(crate) fn hides_system_path<'a>(host: &Host, mut inside: impl Iterator<Item = &'a Path>) -> bool {
    inside.any(|inside| host.config.sandbox.system_paths.iter().any(|path| path.starts_with(inside)))
}

/// Adds a hint to an error about a path that is no longer allowed.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_void_memory_is_discarded() {
        let refused = |reason: &str| Error::refused("no").reason(reason);
        let curable = [
            refused("vmm_mismatch"),
            refused("base_image_mismatch"),
            Error::unsupported("no KVM"),
            Error::unavailable("no monitor"),
            Error::deadline("late"),
            Error::busy("full"),
            Error::lost("its disk is gone"),
        ];
        for error in curable {
            assert!(is_kept(&error, || Ok(true)), "{error}");
            assert!(is_kept(&error, || Err(Error::unavailable("unreadable"))), "{error}");
            assert!(!is_kept(&error, || Ok(false)), "it began to continue: {error}");
            assert!(!is_kept(&error, || Err(Error::corrupt("damaged"))), "{error}");
        }
        for error in [Error::corrupt("damaged"), refused("disk"), refused("disk_size"), refused("epoch")] {
            assert!(!is_kept(&error, || Ok(true)), "{error}");
        }
    }

    #[test]
    fn refusal_names_way_out() {
        let name: KernelName = "lab".parse().expect("a name");
        let error = kept(Error::refused("QEMU is gone").reason("vmm_mismatch").hint("install it"), &name);
        assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Refused, "vmm_mismatch"));
        assert_eq!(error.message, "the memory of lab cannot continue now: QEMU is gone");
        assert!(error.hint.starts_with("install it; ") && error.hint.ends_with("ryokan start lab --without-memory"));
        assert_eq!(kept(Error::busy("full").hint("try again"), &name).hint, "try again");
    }
}
