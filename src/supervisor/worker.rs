//! Workers as processes: started, adopted, watched, ended, and remembered in the catalog so that none is ever lost.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::rc::Rc;

use super::host::Host;
use super::kernel::Kernel;
use super::task::Listener;
use crate::catalog::{CatalogHandle, WorkerRow};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::{HostId, KernelId, WorkerId};
use crate::core::info::{GivenMount, MountInfo};
use crate::core::origin::OriginKind;
use crate::core::spec::KernelSpec;
use crate::rpc::worker_link::{WorkerIdentity, WorkerLink, WorkerReport};
use crate::sandbox::plan::{PlannedMount, RunAs, SandboxPlan};
use crate::sys;
use crate::worker::launch::{self, LaunchDocument};

/// How often a cgroup that is still in use is tried again.
const CGROUP_TRIES: u32 = 25;
/// The pause between those.
const CGROUP_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

/// Reason of the error where a host has no place for one more worker.
pub(super) const NO_PLACE: &str = "workers";

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
    process: launch::WorkerProcess,
    socket: PathBuf,
    _place: Place,
}

/// One of the places that a host has for workers; taken before the launch, given back when dropped.
struct Place(Rc<Cell<usize>>);

impl Place {
    fn take(live: &Rc<Cell<usize>>) -> Self {
        live.set(live.get() + 1);
        Place(Rc::clone(live))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl WorkerProcess {
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
}

/// Removes what a worker that has ended may have left: it unlinks its sockets itself, unless it was killed.
fn clear(socket: &Path) {
    for path in [socket.to_owned(), crate::rpc::worker_socket::descriptor_path(socket)] {
        let _ = std::fs::remove_file(path);
    }
}

/// Where a daemon's workers have their cgroups. Two daemons may share the folder: what a name begins with says whose it is.
#[derive(Debug)]
struct Cgroups {
    base: PathBuf,
    prefix: String,
}

impl Cgroups {
    fn of(&self, worker: WorkerId) -> PathBuf {
        self.base.join(format!("{}{worker}", self.prefix))
    }

    async fn sweep(&self, known: &[WorkerId]) {
        for entry in std::fs::read_dir(&self.base).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let worker = name.strip_prefix(&self.prefix).and_then(|id| id.parse::<WorkerId>().ok());
            if worker.is_some_and(|worker| !known.contains(&worker)) {
                remove_cgroup(&entry.path()).await;
            }
        }
    }
}

/// The host kernel may need a moment to let go of the last process.
async fn remove_cgroup(path: &Path) {
    for _ in 0..CGROUP_TRIES {
        match crate::sandbox::cgroup::remove(path) {
            Ok(()) => return,
            Err(error) => tracing::debug!(path = %path.display(), %error, "a cgroup is still in use"),
        }
        tokio::time::sleep(CGROUP_PAUSE).await;
    }
    tracing::warn!(path = %path.display(), "a worker's cgroup could not be removed; the next start of the daemon tries again");
}

/// What the workers of a host share.
pub struct Workers {
    live: Rc<Cell<usize>>,
    most: usize,
    catalog: CatalogHandle,
    errors: RefCell<HashMap<KernelId, Error>>,
    cgroups: Option<Cgroups>,
}

impl Workers {
    pub(super) fn new(most: usize, catalog: CatalogHandle, host: HostId, cgroup_base: Option<PathBuf>) -> Self {
        let cgroups = cgroup_base.map(|base| Cgroups { base, prefix: format!("worker-{host}-") });
        Workers { live: Rc::default(), most, catalog, errors: RefCell::default(), cgroups }
    }

    /// How many there are now.
    pub fn live(&self) -> usize {
        self.live.get()
    }

    /// Whether one more may be started.
    pub fn have_room(&self) -> bool {
        self.live.get() < self.most
    }

    /// What is said where there is no room.
    pub(super) fn no_room(&self) -> Error {
        Error::busy(format!("this host runs {} workers already", self.most))
            .reason(NO_PLACE)
            .hint("stop a kernel, or raise limits.workers in the configuration")
    }

    /// Forgets a worker that has ended.
    pub(super) async fn forget(&self, id: WorkerId, socket: &Path) {
        clear(socket);
        if let Some(cgroups) = &self.cgroups {
            remove_cgroup(&cgroups.of(id)).await;
        }
        if let Err(error) = self.catalog.remove_worker(id).await {
            tracing::warn!(worker = %id, %error, "a worker that ended is still in the catalog; the next start removes it");
        }
    }

    /// Removes the cgroups of this daemon's workers that the catalog does not know any more.
    pub(super) async fn sweep_cgroups(&self, known: &[WorkerId]) {
        if let Some(cgroups) = &self.cgroups {
            cgroups.sweep(known).await;
        }
    }

    /// Keeps why a kernel's last worker could not be started.
    pub(super) fn remember_error(&self, kernel: KernelId, error: &Error) {
        self.errors.borrow_mut().insert(kernel, error.clone());
    }

    /// Why a kernel's last worker could not be started.
    pub fn last_error(&self, kernel: KernelId) -> Option<Error> {
        self.errors.borrow().get(&kernel).cloned()
    }

    /// For a daemon that is root and a kernel of root's: the source as a detached mount whose owner is mapped to the worker's
    /// user. `None` where the worker opens the source itself, with its own rights.
    ///
    /// # Errors
    /// `unsupported` where the file system refuses such a mount.
    pub(super) fn detach(&self, host: &Host, uid: u32, source: &Path) -> Result<Option<OwnedFd>> {
        match run_as(host, uid)? {
            Some(run_as) if run_as.map_root => Ok(Some(crate::sandbox::mapped_tree(source, run_as)?)),
            _ => Ok(None),
        }
    }
}

/// Which user the workers of a kernel of `uid` run as: `None` in a daemon that is not root.
fn run_as(host: &Host, uid: u32) -> Result<Option<RunAs>> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    if uid != 0 {
        let user = nix::unistd::User::from_uid(uid.into()).ok().flatten();
        let gid = user.map_or(uid, |user| user.gid.as_raw());
        return Ok(Some(RunAs { uid, gid, map_root: false }));
    }
    let (uid, gid) = host.config.worker_user.ok_or_else(|| {
        Error::unsupported("the daemon runs as root and knows no unprivileged user to run workers as")
            .hint("name one in sandbox.worker_user of the configuration")
    })?;
    Ok(Some(RunAs { uid, gid, map_root: true }))
}

fn plan(host: &Host, kernel: &Kernel, worker: WorkerId, mounts: Vec<GivenMount>) -> Result<SandboxPlan> {
    let spec = &kernel.spec;
    let files = host.catalog.kernel_files(kernel.id);
    let workspace = files.workspace.strip_prefix(&files.dir).unwrap_or(Path::new("workspace")).to_owned();
    let mut plan = SandboxPlan::new(files.dir);
    if let Some(owner) = kernel.thread_of {
        if kernel.files().id != owner {
            return Err(Error::corrupt(format!("kernel {owner}, in whose workspace it works, is gone")));
        }
        plan.workspace = Some(host.catalog.kernel_files(owner).workspace);
    }
    plan.own_workspace = workspace;
    plan.net = spec.net;
    plan.limits = spec.limits;
    plan.hostname = spec.name.as_str().to_owned();
    plan.run_as = run_as(host, kernel.uid)?;
    plan.cgroup = host.workers.cgroups.as_ref().map(|cgroups| cgroups.of(worker));
    plan.protected.clone_from(&host.config.protected);
    plan.degraded = spec
        .degraded
        .iter()
        .map(|name| name.parse().map_err(|_| Error::invalid(format!("there is no sandbox layer {name:?}"))))
        .collect::<Result<_>>()?;
    let system = host.config.system_paths.iter().map(|path| PlannedMount {
        inside: path.clone(),
        // One that is not there is told by whoever opens it.
        source: path.canonicalize().unwrap_or_else(|_| path.clone()),
        writable: false,
        system: true,
    });
    // Judged again at each start: what a path leads to may have changed since it was given. What is judged here is opened
    // by this very name, and by no link that comes in its way meanwhile.
    let mut own = Vec::new();
    for GivenMount { mount, real } in mounts {
        let real = host.check_given(kernel.uid, Path::new(&mount.source), real.as_deref().map(Path::new));
        let source = real.map_err(|error| with_way_out(error, &kernel.spec, &mount))?;
        own.push(PlannedMount { inside: mount.path.into(), source, writable: mount.writable, system: false });
    }
    plan.mounts = system.chain(own).collect();
    Ok(plan)
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

/// The Python interpreter as kernels see it.
fn interpreter(command: &Path) -> Result<String> {
    let found = crate::sandbox::find_program(command).ok_or_else(|| {
        Error::unsupported(format!("there is no Python interpreter {} that kernels could see", command.display()))
            .reason("python")
            .hint("install python3 below /usr, or name another interpreter in engines.python.command")
    })?;
    Ok(found.display().to_string())
}

/// The Python driver compiled for an interpreter: without it a start takes longer.
async fn compiled_driver(host: &Host, interpreter: &str) -> Option<PathBuf> {
    let (cache, interpreter) = (host.config.cache.clone(), PathBuf::from(interpreter));
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

/// Starts a worker and attaches to it. Recorded before it exists, so that a daemon that is killed meanwhile leaves none behind.
pub(super) async fn start(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    mounts: Vec<GivenMount>,
    listener: Rc<Listener>,
) -> Result<Started> {
    if !host.workers.have_room() {
        return Err(host.workers.no_room());
    }
    let place = Place::take(&host.workers.live);
    let id = WorkerId::from_bytes(host.random());
    let socket = host.config.worker_sockets.join(format!("{id}.sock"));
    let identity = WorkerIdentity {
        worker: id,
        kernel: kernel.id,
        epoch: kernel.epoch,
        build: launch::BUILD.to_owned(),
        secret: host.random(),
    };
    let plan = plan(host, kernel, id, mounts)?;
    let mut document =
        LaunchDocument::new(&identity, kernel.spec.name.clone(), kernel.spec.engine, plan, socket.clone());
    if kernel.spec.engine == EngineName::Python {
        let interpreter = interpreter(&host.config.python)?;
        document.engine_settings.python_compiled = compiled_driver(host, &interpreter).await;
        document.engine_settings.python = vec![interpreter];
    }
    document.power_safe = host.config.power_safe;
    document.origin = {
        let view = kernel.view();
        (view.origin.kind, view.origin.generation)
    };
    document.orphan_grace_ms = host.config.orphan_grace.as_millis() as u64;
    let mut row = WorkerRow {
        id,
        kernel: kernel.id,
        epoch: kernel.epoch,
        build: identity.build.clone(),
        secret: identity.secret.to_vec(),
        pid: 0,
        start_ticks: 0,
        socket: socket.clone(),
    };
    host.catalog.put_worker(row.clone()).await?;
    let record = async |pid| {
        row.pid = pid;
        row.start_ticks = sys::process::start_ticks(pid).unwrap_or(0);
        Ok(host.catalog.put_worker(row).await?)
    };
    let launched = launch::start(&document, &identity.secret, &host.config.worker, Stdio::inherit(), record).await;
    let launched = match launched {
        Ok(launched) => launched,
        Err(error) => {
            host.workers.forget(id, &socket).await;
            return Err(error);
        }
    };
    let process = WorkerProcess { id, process: launched.process, socket: socket.clone(), _place: place };
    let attached = WorkerLink::attach(&socket, &identity, listener).await;
    match attached {
        Ok((link, report)) => Ok(Started { link, report, process, told_origin: Some(document.origin) }),
        Err(error) => {
            process.kill();
            process.ended().await;
            host.workers.forget(id, &socket).await;
            Err(error)
        }
    }
}

/// Takes over a worker of a former daemon, or ends it: afterwards it is either adopted or gone.
///
/// # Errors
/// Why it was not adopted.
pub(super) async fn adopt(host: &Rc<Host>, row: &WorkerRow, listener: Rc<Listener>) -> Result<Started> {
    if row.pid == 0 {
        // The daemon was killed before it recorded the process, so before it gave it its secret: it ends by itself.
        return Err(Error::lost("the worker was not started"));
    }
    let secret =
        <[u8; 32]>::try_from(row.secret.as_slice()).map_err(|_| Error::corrupt("a worker's secret is damaged"))?;
    let identity =
        WorkerIdentity { worker: row.id, kernel: row.kernel, epoch: row.epoch, build: row.build.clone(), secret };
    let (link, report) = WorkerLink::attach(&row.socket, &identity, listener).await?;
    let found = launch::WorkerProcess::find(row.pid).ok();
    let process = found
        .filter(|_| sys::process::start_ticks(row.pid) == Some(row.start_ticks))
        .ok_or_else(|| Error::lost("the worker ended as it was adopted"))?;
    let (socket, place) = (row.socket.clone(), Place::take(&host.workers.live));
    let process = WorkerProcess { id: row.id, process, socket, _place: place };
    Ok(Started { link, report, process, told_origin: None })
}

/// Ends a recorded worker that could not be adopted, if its process is still the one that was recorded.
pub(super) async fn end_orphan(host: &Rc<Host>, row: &WorkerRow) {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain folders do here: what is removed is empty folders, by name.
    #[tokio::test]
    async fn only_its_own_cgroups_of_unknown_workers_are_swept() {
        let base = tempfile::tempdir().expect("a folder");
        let of = |host: &str| Cgroups { base: base.path().to_owned(), prefix: format!("worker-{host}-") };
        let (own, other) = (of("aa"), of("bb"));
        let [known, unknown] = [WorkerId::from_bytes([1; 16]), WorkerId::from_bytes([2; 16])];
        let stay = [own.of(known), other.of(unknown), base.path().join("worker-aa-no-id"), base.path().join("else")];
        for folder in stay.iter().chain([&own.of(unknown)]) {
            std::fs::create_dir_all(folder.join("engine")).expect("made");
        }
        own.sweep(&[known]).await;
        assert!(stay.iter().all(|folder| folder.join("engine").is_dir()));
        assert!(!own.of(unknown).exists());
    }
}
