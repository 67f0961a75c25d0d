//! Workers as processes: started, adopted, watched, ended, and remembered in the catalog so that none is ever lost.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::host::Host;
use super::kernel::Kernel;
use super::task::Listener;
use crate::catalog::{CatalogHandle, WorkerRow};
use crate::core::error::{Error, Result};
use crate::core::ids::{KernelId, WorkerId};
use crate::core::info::MountInfo;
use crate::rpc::worker_link::{WorkerIdentity, WorkerLink, WorkerReport};
use crate::sandbox::plan::{PlannedMount, RunAs, SandboxPlan};
use crate::sys;
use crate::worker::launch::{self, LaunchDocument};

/// A worker that is up and attached.
pub struct Started {
    /// The link to it.
    pub link: WorkerLink,
    /// What it said when it was attached.
    pub report: WorkerReport,
    /// Its process.
    pub process: WorkerProcess,
}

/// The init process of a worker, by descriptor: never mistaken for another that took over its number.
pub struct WorkerProcess {
    /// Which worker.
    pub id: WorkerId,
    /// Its number on this host.
    pub pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    socket: PathBuf,
    live: Rc<Cell<usize>>,
}

impl WorkerProcess {
    fn open(id: WorkerId, pid: u32, socket: PathBuf, live: &Rc<Cell<usize>>) -> io::Result<Self> {
        let pidfd = sys::pidfd::open(Pid::from_raw(pid.cast_signed()))?;
        let pidfd = sys::ready::watch(pidfd, Interest::READABLE)?;
        live.set(live.get() + 1);
        Ok(WorkerProcess { id, pid, pidfd, socket, live: Rc::clone(live) })
    }

    /// Waits for its end.
    pub async fn ended(&self) {
        // An error means that the descriptor cannot be polled, which only happens when the run time is ending.
        let _ = self.pidfd.readable().await;
    }

    /// Ends it and, with it, every process of its PID namespace.
    pub fn kill(&self) {
        if let Err(error) = sys::pidfd::signal(self.pidfd.as_fd(), Signal::SIGKILL) {
            tracing::debug!(pid = self.pid, %error, "a worker could not be killed: it has ended");
        }
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.live.set(self.live.get() - 1);
        // It unlinks its socket itself, unless it was killed.
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// What the workers of a host share.
pub struct Workers {
    live: Rc<Cell<usize>>,
    most: usize,
    catalog: CatalogHandle,
    errors: RefCell<HashMap<KernelId, Error>>,
}

impl Workers {
    pub(super) fn new(most: usize, catalog: CatalogHandle) -> Self {
        Workers { live: Rc::default(), most, catalog, errors: RefCell::default() }
    }

    /// How many there are now.
    pub fn live(&self) -> usize {
        self.live.get()
    }

    /// Whether one more may be started.
    pub fn have_room(&self) -> bool {
        self.live.get() < self.most
    }

    /// Forgets a worker that has ended.
    pub(super) async fn forget(&self, id: WorkerId) {
        if let Err(error) = self.catalog.remove_worker(id).await {
            tracing::warn!(worker = %id, %error, "a worker that ended is still in the catalog; the next start removes it");
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
            Some(run_as) if run_as.map_root => Ok(Some(crate::sandbox::detach(source, run_as)?)),
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

fn plan(host: &Host, kernel: &Kernel, mounts: Vec<MountInfo>) -> Result<SandboxPlan> {
    let spec = &kernel.spec;
    let files = host.catalog.kernel_files(kernel.id);
    let mut plan = SandboxPlan::new(files.dir);
    plan.net = spec.net;
    plan.limits = spec.limits;
    plan.hostname = spec.name.as_str().to_owned();
    plan.run_as = run_as(host, kernel.uid)?;
    plan.cgroup_base.clone_from(&host.config.cgroup_base);
    plan.protected.clone_from(&host.config.protected);
    plan.degraded = spec
        .degraded
        .iter()
        .map(|name| name.parse().map_err(|_| Error::invalid(format!("there is no sandbox layer {name:?}"))))
        .collect::<Result<_>>()?;
    let system = host.config.system_paths.iter().map(|path| PlannedMount {
        inside: path.clone(),
        source: path.clone(),
        writable: false,
    });
    let own = mounts.into_iter().map(|mount| PlannedMount {
        inside: mount.path.into(),
        source: mount.source.into(),
        writable: mount.writable,
    });
    plan.mounts = system.chain(own).collect();
    Ok(plan)
}

/// Starts a worker and attaches to it. Recorded before it exists, so that a daemon that is killed meanwhile leaves none behind.
pub(super) async fn start(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    _attempt: u64,
    mounts: Vec<MountInfo>,
    listener: Rc<Listener>,
) -> Result<Started> {
    let id = WorkerId::from_bytes(host.random());
    let socket = host.config.worker_sockets.join(format!("{id}.sock"));
    let identity = WorkerIdentity {
        worker: id,
        kernel: kernel.id,
        epoch: kernel.epoch,
        build: launch::build(&host.config.worker_binary)?,
        secret: host.random(),
    };
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
    let document = LaunchDocument {
        worker: id,
        kernel: kernel.id,
        kernel_name: kernel.spec.name.clone(),
        epoch: kernel.epoch,
        build: identity.build.clone(),
        secret: identity.secret,
        engine: kernel.spec.engine,
        python: host.config.python.clone(),
        plan: plan(host, kernel, mounts)?,
        socket: socket.clone(),
        orphan_grace_ms: host.config.orphan_grace.as_millis() as u64,
    };
    let launched = match launch::start(&document, &host.config.worker_binary).await {
        Ok(launched) => launched,
        Err(error) => {
            host.workers.forget(id).await;
            return Err(error);
        }
    };
    let opened = WorkerProcess::open(id, launched.pid, socket.clone(), &host.workers.live);
    let process = opened.map_err(|error| Error::lost(format!("the worker ended as it started: {error}")))?;
    row.pid = launched.pid;
    row.start_ticks = sys::process::start_ticks(launched.pid).unwrap_or(0);
    // On its way while the worker is attached to; an error shows up when it is forgotten.
    let recording = tokio::task::spawn_local(host.catalog.put_worker(row));
    let attached = WorkerLink::attach(&socket, &identity, listener).await;
    if let Ok(Err(error)) = recording.await {
        tracing::warn!(worker = %id, %error, "a worker's process could not be recorded");
    }
    match attached {
        Ok((link, report)) => Ok(Started { link, report, process }),
        Err(error) => {
            process.kill();
            process.ended().await;
            host.workers.forget(id).await;
            Err(error)
        }
    }
}

/// Takes over a worker of a former daemon, or ends it: afterwards it is either adopted or gone.
///
/// # Errors
/// Why it was not adopted.
pub(super) async fn adopt(host: &Rc<Host>, row: &WorkerRow, listener: Rc<Listener>) -> Result<Started> {
    let secret = <[u8; 32]>::try_from(row.secret.as_slice()).map_err(|_| Error::corrupt("a worker's secret is damaged"))?;
    let identity =
        WorkerIdentity { worker: row.id, kernel: row.kernel, epoch: row.epoch, build: row.build.clone(), secret };
    let (link, report) = WorkerLink::attach(&row.socket, &identity, listener).await?;
    let process = WorkerProcess::open(row.id, report.pid, row.socket.clone(), &host.workers.live)
        .map_err(|error| Error::lost(format!("the worker ended as it was adopted: {error}")))?;
    Ok(Started { link, report, process })
}

/// Ends a recorded worker that could not be adopted, if its process is still the one that was recorded.
pub(super) async fn end_orphan(host: &Rc<Host>, row: &WorkerRow) {
    if row.pid != 0
        && row.start_ticks != 0
        && let Ok(process) = WorkerProcess::open(row.id, row.pid, row.socket.clone(), &host.workers.live)
        && sys::process::start_ticks(row.pid).is_some_and(|ticks| ticks == row.start_ticks)
    {
        tracing::info!(worker = %row.id, pid = row.pid, "ending a worker that could not be adopted");
        process.kill();
        process.ended().await;
    }
    let _ = std::fs::remove_file(&row.socket);
    host.workers.forget(row.id).await;
}
