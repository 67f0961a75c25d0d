//! Workers as processes: started, adopted, watched, ended, and remembered in the catalog so that none is ever lost.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::admission::{Admission, Place, Share};
use super::pool::Active;
use crate::catalog::{CatalogHandle, WorkerRow};
use crate::core::durability::Durability;
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, HostId, KernelId, WorkerId};
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;
use crate::core::spec::{KernelLimits, KernelSpec, Net};
use crate::isolation::process::cgroups::{Cgroups, remove_cgroup};
use crate::isolation::process::launch;
use crate::link::bootstrap::LaunchDocument;
use crate::link::connector::unix::UnixConnector;
use crate::link::host::{WorkerIdentity, WorkerLink, WorkerListener, WorkerReport};
use crate::sandbox::plan::{PlannedMount, RunAs, SandboxPlan};
use crate::sandbox::{Layer, Owners, Unfound, find_program};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::task::Listener;
use crate::sys;

/// A worker that is up and attached.
pub struct Started {
    /// The link to it.
    pub link: WorkerLink,
    /// What it said when it was attached.
    pub report: WorkerReport,
    /// Its process.
    pub process: WorkerProcess,
    /// The origin of the kernel's state that it was told, if that is known.
    pub told_origin: Option<(OriginKind, u32)>,
}

/// The init process of a worker, counted while it is there.
pub struct WorkerProcess {
    /// Which worker.
    pub id: WorkerId,
    process: Rc<launch::WorkerProcess>,
    socket: PathBuf,
    /// Until it has ended.
    place: RefCell<Option<Place>>,
    /// Of a worker that was a slot.
    pub(crate) active: Option<Active>,
}

impl WorkerProcess {
    /// It serves a kernel of that user from now on.
    pub(crate) fn belongs(&self, share: Share) {
        if let Some(place) = &mut *self.place.borrow_mut() {
            place.belongs(share);
        }
    }

    /// It has ended: what it took is free, whoever still knows of it.
    pub(crate) fn leave_place(&self) {
        self.place.take();
    }

    /// Its private socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its number on this host.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Waits for its end.
    pub async fn ended(&self) {
        if let Err(error) = self.process.ended().await {
            tracing::warn!(worker = %self.id, %error, "a worker's process cannot be watched");
        }
    }

    /// Ends it and, with it, every process of its PID namespace.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// When it began, as /proc counts; 0: it has ended.
    pub(crate) fn start_ticks(&self) -> u64 {
        sys::process::start_ticks(self.process.pid).unwrap_or(0)
    }
}

/// Removes what a worker that has ended may have left: it unlinks its sockets itself, unless it was killed.
fn clear(socket: &Path) {
    for path in [socket.to_owned(), crate::link::connector::unix::descriptor_path(socket)] {
        let _ = std::fs::remove_file(path);
    }
}

/// What the workers of a host share.
pub struct Workers {
    /// Who may have how much.
    pub(crate) admission: Rc<Admission>,
    catalog: CatalogHandle,
    errors: RefCell<HashMap<KernelId, Error>>,
    cgroups: Option<Cgroups>,
    owners: Owners,
}

impl Workers {
    pub(crate) fn new(
        admission: Rc<Admission>,
        catalog: CatalogHandle,
        host: HostId,
        cgroup_base: Option<PathBuf>,
    ) -> Self {
        let cgroups = cgroup_base.map(|base| Cgroups { base, prefix: format!("worker-{host}-") });
        Workers { admission, catalog, errors: RefCell::default(), cgroups, owners: Owners::default() }
    }

    /// How many there are now.
    pub fn live(&self) -> usize {
        self.admission.workers()
    }

    /// Removes what a worker that has ended left on the host.
    async fn clear_away(&self, id: WorkerId, socket: &Path) {
        clear(socket);
        if let Some(cgroups) = &self.cgroups {
            remove_cgroup(&cgroups.of(id)).await;
        }
    }

    /// Forgets a worker that has ended.
    pub(crate) async fn forget(&self, id: WorkerId, socket: &Path) {
        self.clear_away(id, socket).await;
        if let Err(error) = self.catalog.remove_worker(id).await {
            tracing::warn!(worker = %id, %error, "a worker that ended is still in the catalog; the next start removes it");
        }
    }

    /// Ends a worker and forgets it.
    pub(crate) async fn end(&self, process: WorkerProcess) {
        process.kill();
        process.ended().await;
        self.forget(process.id, process.socket()).await;
    }

    /// Ends a worker that is in no catalog.
    pub(crate) async fn end_unrecorded(&self, process: &WorkerProcess) {
        process.kill();
        process.ended().await;
        self.clear_away(process.id, process.socket()).await;
    }

    /// Removes the sockets and cgroups of workers that the catalog does not know: those of slots whose daemon was killed. The cgroups later: what
    /// is in one is killed, and its end is waited for.
    pub(crate) fn sweep(&self, folder: &Path, known: &[WorkerId]) {
        let stale = self.cgroups.as_ref().map(|cgroups| cgroups.stale(known)).unwrap_or_default();
        tokio::task::spawn_local(async move {
            for path in stale {
                crate::sandbox::cgroup::kill(&path);
                remove_cgroup(&path).await;
            }
        });
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let worker = name.split('.').next().and_then(|id| id.parse::<WorkerId>().ok());
            if worker.is_some_and(|worker| !known.contains(&worker)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Keeps why a kernel's last worker could not be started.
    pub(crate) fn remember_error(&self, kernel: KernelId, error: &Error) {
        self.errors.borrow_mut().insert(kernel, error.clone());
    }

    /// Why a kernel's last worker could not be started.
    pub fn last_error(&self, kernel: KernelId) -> Option<Error> {
        self.errors.borrow().get(&kernel).cloned()
    }

    /// A file or folder as a detached mount on which the worker's user owns what its owner owns. For a daemon that is root.
    ///
    /// # Errors
    /// `unsupported` where the file system refuses such a mount.
    pub(crate) fn mapped(&self, source: &Path, run_as: RunAs) -> Result<OwnedFd> {
        Ok(self.owners.mapped(source, run_as)?)
    }

    /// For a daemon that is root and a kernel of root's: the source as a detached mount whose owner is mapped to the worker's
    /// user. `None` where the worker opens the source itself, with its own rights.
    ///
    /// # Errors
    /// `unsupported` where the file system refuses such a mount.
    pub(crate) fn detach(&self, host: &Host, uid: u32, source: &Path) -> Result<Option<OwnedFd>> {
        match run_as(host, uid)? {
            Some(run_as) if run_as.map_root => self.mapped(source, run_as).map(Some),
            _ => Ok(None),
        }
    }
}

/// Which user the workers of a kernel of `uid` run as: `None` in a daemon that is not root.
pub(crate) fn run_as(host: &Host, uid: u32) -> Result<Option<RunAs>> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    if uid != 0 {
        let user = nix::unistd::User::from_uid(uid.into()).ok().flatten();
        let gid = user.map_or(uid, |user| user.gid.as_raw());
        return Ok(Some(RunAs { uid, gid, map_root: false }));
    }
    let (uid, gid) = host.environment.worker_account.ok_or_else(|| {
        Error::unsupported("the daemon runs as root and knows no unprivileged user to run workers as")
            .hint("name one in sandbox.worker_user of the configuration")
    })?;
    Ok(Some(RunAs { uid, gid, map_root: true }))
}

/// What a worker must be like before it is a kernel's: all that a slot cannot be given later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Its engine.
    pub engine: EngineName,
    /// Its bounds.
    pub limits: KernelLimits,
    /// Its network.
    pub net: Net,
    /// Layers of the sandbox that it does without.
    pub degraded: Vec<Layer>,
    /// Whose rights it has, in a daemon that is root.
    pub run_as: Option<RunAs>,
}

impl Shape {
    /// That of a kernel of `uid`.
    ///
    /// # Errors
    /// `unsupported` if the daemon knows nobody to run it as, `invalidArgument` for a layer that does not exist.
    pub(crate) fn of(host: &Host, spec: &KernelSpec, uid: u32) -> Result<Shape> {
        let layer =
            |name: &String| name.parse().map_err(|_| Error::invalid(format!("there is no sandbox layer {name:?}")));
        Ok(Shape {
            engine: spec.engine,
            limits: spec.limits,
            net: spec.net,
            degraded: spec.degraded.iter().map(layer).collect::<Result<_>>()?,
            run_as: run_as(host, uid)?,
        })
    }
}

/// The sandbox of a worker of that shape, on that folder.
pub(crate) fn plan(host: &Host, shape: &Shape, worker: WorkerId, folder: &Path) -> SandboxPlan {
    let mut plan = SandboxPlan::new(folder);
    plan.net = shape.net;
    plan.limits = shape.limits;
    plan.run_as = shape.run_as;
    plan.cgroup = host.workers.cgroups.as_ref().map(|cgroups| cgroups.of(worker));
    plan.protected.clone_from(&host.environment.protected);
    plan.degraded.clone_from(&shape.degraded);
    let system = host.config.sandbox.system_paths.iter().map(|path| PlannedMount {
        inside: path.clone(),
        // One that is not there is told by whoever opens it.
        source: path.canonicalize().unwrap_or_else(|_| path.clone()),
        writable: false,
        system: true,
    });
    plan.mounts = system.collect();
    plan
}

/// Where a kernel's files are, as its worker must know.
pub(crate) struct Folders {
    pub dir: PathBuf,
    /// Within it.
    pub own_workspace: PathBuf,
    /// That of the kernel whose thread it is.
    pub workspace: Option<PathBuf>,
}

pub(crate) fn folders(host: &Host, kernel: &Kernel) -> Result<Folders> {
    let mut folders = folders_of(host, kernel.id);
    if let Some(owner) = kernel.thread_of {
        if kernel.files().id != owner {
            return Err(Error::corrupt(format!("kernel {owner}, in whose workspace it works, is gone")));
        }
        folders.workspace = Some(host.catalog.kernel_files(owner).workspace);
    }
    Ok(folders)
}

/// Those of a kernel that works in its own workspace.
pub(crate) fn folders_of(host: &Host, kernel: KernelId) -> Folders {
    let files = host.catalog.kernel_files(kernel);
    let own_workspace = files.workspace.strip_prefix(&files.dir).unwrap_or(Path::new("workspace")).to_owned();
    Folders { dir: files.dir, own_workspace, workspace: None }
}

/// An engine's interpreter as a kernel sees it to which these paths are given; none for one that is part of the worker.
///
/// # Errors
/// `unsupported` if it is not there.
pub(crate) fn interpreter<'a>(
    host: &Host,
    engine: EngineName,
    given: impl Iterator<Item = &'a Path>,
) -> Result<Option<String>> {
    let Some(command) = host.config.engines.interpreter(engine) else { return Ok(None) };
    let known =
        host.interpreters.borrow().get(&engine).filter(|path| path.exists()).map(|path| path.display().to_string());
    if known.is_some() {
        return Ok(known);
    }
    let system_paths = &host.config.sandbox.system_paths;
    let found = match find_program(command, system_paths) {
        Ok(path) => {
            host.interpreters.borrow_mut().insert(engine, path.clone());
            Ok(path)
        }
        Err(Unfound::Hidden) => {
            let seen: Vec<_> = system_paths.iter().cloned().chain(given.map(Path::to_owned)).collect();
            find_program(command, &seen)
        }
        Err(Unfound::Absent) => Err(Unfound::Absent),
    };
    let found = found.map_err(|why| {
        let (command, hidden) = (command.display(), why == Unfound::Hidden);
        let what = if hidden { "a kernel cannot see the" } else { "there is no" };
        let hint = format!(
            "install {engine} below /usr, name another interpreter in engines.{engine}.command, or its folder in sandbox.system_paths"
        );
        Error::unsupported(format!("{what} interpreter {command} for {engine}")).reason(engine.name()).hint(hint)
    })?;
    Ok(Some(found.display().to_string()))
}

/// The Python driver compiled for an interpreter: without it a start takes longer.
async fn compiled_driver(host: &Host, interpreter: &str) -> Option<PathBuf> {
    let (cache, interpreter) = (host.environment.data.join("cache"), PathBuf::from(interpreter));
    let compiling = tokio::task::spawn_blocking(move || crate::worker::engines::python::compiled(&cache, &interpreter));
    match compiling.await {
        Ok(Ok(path)) => Some(path),
        Ok(Err(error)) => {
            tracing::info!(%error, "the Python driver is not compiled ahead of time: kernels start more slowly");
            None
        }
        Err(_) => None,
    }
}

/// A document for a worker of that shape, but for what is a kernel's own.
pub(crate) async fn document(
    host: &Host,
    shape: &Shape,
    identity: &WorkerIdentity,
    name: KernelName,
    plan: SandboxPlan,
    socket: &Path,
) -> Result<LaunchDocument<SandboxPlan>> {
    let mut document = LaunchDocument::new(identity, name, shape.engine, plan, socket.to_owned());
    let given = document.plan.mounts.iter().map(|mount| mount.inside.as_path());
    if let Some(interpreter) = interpreter(host, shape.engine, given)? {
        if shape.engine == EngineName::Python {
            document.engine_settings.python_compiled = compiled_driver(host, &interpreter).await;
            if document.plan.unbound {
                document.engine_settings.preload.clone_from(&host.config.engines.python.preload);
            }
        }
        document.engine_settings.interpreter = vec![interpreter];
        if shape.engine == EngineName::Node {
            // It would take its bound from the host's memory, and be killed at the kernel's instead of collecting its garbage.
            let heap_mib = (shape.limits.memory_bytes >> 20) / 4 * 3;
            document.engine_settings.interpreter.push(format!("--max-old-space-size={heap_mib}"));
        }
    }
    document.rollback_bytes = match shape.engine {
        EngineName::Python => host.config.engines.python.rollback_memory,
        EngineName::Kaish | EngineName::Bash | EngineName::Node => 0,
    };
    document.power_safe = host.config.daemon.durability == Durability::Power;
    document.orphan_grace_ms = host.config.daemon.orphan_grace.as_millis() as u64;
    Ok(document)
}

/// A new worker's identity, and where it will listen.
pub(crate) fn identity(host: &Host, kernel: KernelId, epoch: Epoch) -> (WorkerIdentity, PathBuf) {
    let worker = WorkerId::from_bytes(host.random());
    let socket = host.environment.worker_sockets.join(format!("{worker}.sock"));
    (
        WorkerIdentity {
            worker,
            kernel,
            epoch,
            build: crate::link::bootstrap::BUILD.to_owned(),
            secret: host.random(),
        },
        socket,
    )
}

/// Launches a worker and attaches to it. What was launched is ended and forgotten if that fails.
pub(crate) async fn launch(
    host: &Host,
    place: Place,
    document: &LaunchDocument<SandboxPlan>,
    identity: &WorkerIdentity,
    listener: Rc<dyn WorkerListener>,
    record: impl AsyncFnOnce(u32) -> Result<()>,
) -> Result<(WorkerLink, WorkerReport, WorkerProcess)> {
    let (id, socket) = (identity.worker, &document.socket);
    let launched =
        launch::start(document, &identity.secret, &host.environment.worker, std::io::stderr().as_fd(), record).await;
    let launched = match launched {
        Ok(launched) => launched,
        Err(error) => {
            host.workers.forget(id, socket).await;
            return Err(error);
        }
    };
    let process = WorkerProcess {
        id,
        process: Rc::new(launched.process),
        socket: socket.clone(),
        place: RefCell::new(Some(place)),
        active: None,
    };
    match WorkerLink::attach(Rc::new(UnixConnector::new(socket)), identity, listener).await {
        Ok((link, report)) => Ok((link, report, process)),
        Err(error) => {
            host.workers.end(process).await;
            Err(error)
        }
    }
}

/// What the catalog is to know of a worker; with its process and when that began, or before there is one.
pub(crate) fn row(identity: &WorkerIdentity, socket: &Path, process: Option<(u32, u64)>) -> WorkerRow {
    let (pid, start_ticks) = process.unwrap_or_default();
    WorkerRow {
        id: identity.worker,
        kernel: identity.kernel,
        epoch: identity.epoch,
        build: identity.build.clone(),
        secret: identity.secret.to_vec(),
        pid,
        start_ticks,
        socket: socket.to_owned(),
    }
}

/// Takes over a worker of a former daemon, or ends it: afterwards it is either adopted or gone.
///
/// # Errors
/// Why it was not adopted.
pub(crate) async fn adopt(place: Place, row: &WorkerRow, listener: Rc<Listener>) -> Result<Started> {
    if row.pid == 0 {
        // The daemon was killed before it recorded the process, so before it gave it its secret: it ends by itself.
        return Err(Error::lost("the worker was not started"));
    }
    let secret =
        <[u8; 32]>::try_from(row.secret.as_slice()).map_err(|_| Error::corrupt("a worker's secret is damaged"))?;
    let identity =
        WorkerIdentity { worker: row.id, kernel: row.kernel, epoch: row.epoch, build: row.build.clone(), secret };
    let (link, report) = WorkerLink::attach(Rc::new(UnixConnector::new(&row.socket)), &identity, listener).await?;
    let found = launch::WorkerProcess::find(row.pid).ok();
    let process = found
        .filter(|_| sys::process::start_ticks(row.pid) == Some(row.start_ticks))
        .ok_or_else(|| Error::lost("the worker ended as it was adopted"))?;
    let socket = row.socket.clone();
    let process =
        WorkerProcess { id: row.id, process: Rc::new(process), socket, place: RefCell::new(Some(place)), active: None };
    Ok(Started { link, report, process, told_origin: None })
}

/// Ends a recorded worker that could not be adopted, if its process is still the one that was recorded.
pub(crate) async fn end_orphan(host: &Rc<Host>, row: &WorkerRow) {
    if row.pid != 0
        && row.start_ticks != 0
        && let Ok(process) = launch::WorkerProcess::find(row.pid)
        // Looked at after the descriptor was opened: so the descriptor is of that very process.
        && sys::process::start_ticks(row.pid).is_some_and(|ticks| ticks == row.start_ticks)
    {
        tracing::info!(worker = %row.id, pid = row.pid, "ending a worker that could not be adopted");
        process.kill();
        if let Err(error) = process.ended().await {
            tracing::warn!(worker = %row.id, %error, "a worker's process cannot be watched");
        }
    }
    host.workers.forget(row.id, &row.socket).await;
}
