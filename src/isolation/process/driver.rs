//! Launches, finds and sweeps sandboxed process trees.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::engine_state::EngineDatabase;
use super::files::HostFiles;
use super::handle::{ProcessHandle, ProcessRecord, Record, Shared};
use super::interpreters::Interpreters;
use super::launch;
use super::program::WorkerProgram;
use crate::core::durability::Durability;
use crate::core::engine::EngineName;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{HostId, WorkerId};
use crate::core::limits;
use crate::core::spec::{Isolation, KernelSpec};
use crate::isolation::cgroups::{Cgroups, remove_cgroup};
use crate::isolation::{
    EngineState, FileAccess, IsolationDriver, KernelHome, Launched, NewWorker, OpenWorkspace, Probe, Recorder, Shape,
};
use crate::link::bootstrap::LaunchDocument;
use crate::link::connector::unix::UnixConnector;
use crate::sandbox::{Layer, Owners, PlannedMount, RunAs, SandboxPlan};
use crate::workspace::{LocalFiles, Tracker, Workspace, WorkspacePaths};

/// The driver's settings, from the host and the configuration.
pub struct ProcessSettings {
    /// This host's identity: other daemons may use the same cgroup folder.
    pub host: HostId,
    /// The worker's executable.
    pub program: WorkerProgram,
    /// Uid and gid of workers whose kernel belongs to root, in a daemon that is root.
    pub account: Option<(u32, u32)>,
    /// A cgroup v2 folder in which the daemon may create children.
    pub cgroup_base: Option<PathBuf>,
    /// Folder of the private sockets.
    pub sockets: PathBuf,
    /// The daemon's own folders: never exposed to a kernel.
    pub protected: Vec<PathBuf>,
    /// Folder for caches.
    pub cache: PathBuf,
    /// Paths that every kernel sees read-only.
    pub system_paths: Vec<PathBuf>,
    /// Paths whose owner a root daemon maps to the user of its kernels.
    pub mapped_paths: Vec<PathBuf>,
    /// The configured interpreters of engines.
    pub interpreters: BTreeMap<EngineName, PathBuf>,
    /// Modules that a warm Python preloads.
    pub python_preload: Vec<String>,
    /// Memory for forked snapshots of a Python engine, bytes; 0 keeps none.
    pub snapshot_bytes: u64,
    /// Whether saved state must survive a power loss.
    pub power_safe: bool,
}

/// The driver of process isolation.
pub struct ProcessDriver {
    settings: ProcessSettings,
    interpreters: Interpreters,
    shared: Rc<Shared>,
}

/// Further properties that cannot change after a worker's launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Variant {
    degraded: Vec<Layer>,
    run_as: Option<RunAs>,
}

impl ProcessDriver {
    /// A driver with these settings.
    pub fn new(settings: ProcessSettings) -> ProcessDriver {
        let cgroups = settings.cgroup_base.clone().map(|base| Cgroups::new(base, settings.host));
        let interpreters = Interpreters::new(settings.interpreters.clone(), settings.system_paths.clone());
        let mapped_paths = settings.mapped_paths.clone();
        ProcessDriver {
            settings,
            interpreters,
            shared: Rc::new(Shared { cgroups, owners: Owners::default(), mapped_paths }),
        }
    }

    fn durability(&self) -> Durability {
        if self.settings.power_safe { Durability::Power } else { Durability::Process }
    }

    /// The account of a user's workers: `None` in a daemon that is not root.
    fn run_as(&self, uid: u32) -> Result<Option<RunAs>> {
        if !nix::unistd::geteuid().is_root() {
            return Ok(None);
        }
        if uid != 0 {
            let gid = primary_group(uid)?;
            return Ok(Some(RunAs { uid, gid, map_root: false }));
        }
        let (uid, gid) = self.settings.account.ok_or_else(|| {
            Error::unsupported("the daemon runs as root and knows no unprivileged user to run workers as")
                .hint("name one in sandbox.worker_user of the configuration")
        })?;
        Ok(Some(RunAs { uid, gid, map_root: true }))
    }

    /// A worker's private socket.
    fn socket(&self, worker: WorkerId) -> PathBuf {
        self.settings.sockets.join(format!("{worker}.sock"))
    }

    fn plan(&self, new: &NewWorker<'_>, variant: &Variant) -> SandboxPlan {
        let NewWorker { shape, identity, home, .. } = new;
        let mut plan = SandboxPlan::new(&home.dir);
        plan.net = shape.net;
        plan.limits = shape.limits;
        plan.run_as = variant.run_as;
        plan.cgroup = self.shared.cgroups.as_ref().map(|cgroups| cgroups.of(identity.worker));
        plan.protected.clone_from(&self.settings.protected);
        plan.degraded.clone_from(&variant.degraded);
        plan.own_workspace.clone_from(&home.own_workspace);
        plan.workspace.clone_from(&home.shared_workspace);
        plan.unbound = new.is_warm;
        match new.is_warm {
            // A warm worker's own folder is removed when a kernel brings another one.
            true => plan.staged_on = home.dir.parent().map(Path::to_owned),
            false => plan.hostname = new.name.as_str().to_owned(),
        }
        let system = self.settings.system_paths.iter().map(|path| {
            // An absent source is reported by the process that opens it.
            let source = path.canonicalize().unwrap_or_else(|_| path.clone());
            let is_mapped = self.shared.mapping(variant.run_as, &source).is_some();
            PlannedMount { inside: path.clone(), source, writable: false, system: true, is_mapped }
        });
        plan.mounts = system.collect();
        plan.mounts.extend(new.mounts.iter().map(|mount| PlannedMount {
            inside: mount.inside.clone(),
            source: mount.source.clone(),
            writable: mount.writable,
            system: false,
            is_mapped: self.shared.mapping(variant.run_as, &mount.source).is_some(),
        }));
        plan
    }

    async fn document(
        &self,
        new: &NewWorker<'_>,
        plan: SandboxPlan,
        socket: PathBuf,
    ) -> Result<LaunchDocument<SandboxPlan>> {
        let engine = new.shape.engine;
        let mut document = LaunchDocument::new(new.identity, new.name.clone(), engine, plan, socket);
        let paths = document.plan.mounts.iter().map(|mount| mount.inside.as_path());
        let found = self.interpreters.find(engine, paths);
        if let Some(venv) = &new.shape.venv {
            // The daemon compiles with its own Python only, never with one that a user chose: another version of Python
            // compiles the sources.
            if let Ok(Some(interpreter)) = found {
                document.engine_settings.python_compiled = self.compiled_driver(&interpreter).await;
            }
            document.engine_settings.interpreter = vec![super::venv::interpreter(venv).display().to_string()];
            document.engine_settings.venv = Some(venv.clone());
        } else if let Some(interpreter) = found? {
            if engine == EngineName::Python {
                document.engine_settings.python_compiled = self.compiled_driver(&interpreter).await;
                if new.is_warm {
                    document.engine_settings.preload.clone_from(&self.settings.python_preload);
                }
            }
            document.engine_settings.set_interpreter(engine, interpreter, new.shape.limits.memory_bytes);
        }
        document.rollback_bytes = match engine {
            EngineName::Python => self.settings.snapshot_bytes,
            EngineName::Kaish | EngineName::Bash | EngineName::Node => 0,
        };
        document.power_safe = self.settings.power_safe;
        document.origin = new.origin;
        document.orphan_grace_ms = new.orphan_grace.as_millis() as u64;
        Ok(document)
    }

    /// The Python driver compiled for an interpreter; `None` only slows the start.
    async fn compiled_driver(&self, interpreter: &str) -> Option<PathBuf> {
        let (cache, interpreter) = (self.settings.cache.clone(), PathBuf::from(interpreter));
        let compiled = crate::worker::engines::python::compiled;
        match tokio::task::spawn_blocking(move || compiled(&cache, &interpreter)).await {
            Ok(Ok(path)) => Some(path),
            Ok(Err(error)) => {
                tracing::info!(%error, "the Python driver is not compiled ahead of time: kernels start more slowly");
                None
            }
            Err(_) => None,
        }
    }
}

#[async_trait::async_trait(?Send)]
impl IsolationDriver for ProcessDriver {
    fn isolation(&self) -> Isolation {
        Isolation::Process
    }

    fn check(&self, spec: &KernelSpec, uid: u32) -> Result<Shape> {
        if !spec.image.is_empty() {
            return Err(Error::unsupported("images belong to the microvm isolation").reason("image"));
        }
        let paths = spec.paths.iter().map(|allowed| &*allowed.path);
        match &spec.venv {
            Some(venv) => self.interpreters.check_venv(venv, paths, uid)?,
            None => drop(self.interpreters.find(spec.engine, paths)?),
        }
        let is_whole = spec.limits.cpu_milli.is_multiple_of(1000) || spec.degraded.iter().any(|layer| layer == "cpu");
        if !is_whole && !crate::sandbox::divides_processors(self.settings.cgroup_base.as_deref()) {
            let asked = f64::from(spec.limits.cpu_milli) / 1000.0;
            return Err(Error::unsupported(format!("{asked} processors cannot be had here: without the cpu controller of cgroup v2 a kernel has whole ones"))
                .reason("sandbox-cpu")
                .hint("ask for a whole number, or run ryokand under systemd with Delegate=yes (`ryokan doctor` shows what it has)"));
        }
        let layer =
            |name: &String| name.parse().map_err(|_| Error::invalid(format!("there is no sandbox layer {name:?}")));
        let degraded = spec.degraded.iter().map(layer).collect::<Result<_>>()?;
        let run_as = self.run_as(uid)?;
        let uid = run_as.map_or_else(|| nix::unistd::geteuid().as_raw(), |run_as| run_as.uid);
        let variant = serde_json::to_string(&Variant { degraded, run_as });
        let variant = variant.map_err(|error| Error::internal(error.to_string()))?;
        let (engine, limits, net) = (spec.engine, spec.limits, spec.net);
        Ok(Shape { isolation: Isolation::Process, engine, limits, net, uid, variant, venv: spec.venv.clone() })
    }

    async fn launch(&self, new: NewWorker<'_>, record: &Recorder<'_>) -> Result<Launched> {
        let (worker, secret) = (new.identity.worker, new.identity.secret);
        let variant: Variant =
            serde_json::from_str(&new.shape.variant).map_err(|error| Error::internal(error.to_string()))?;
        let socket = self.socket(worker);
        let document = self.document(&new, self.plan(&new, &variant), socket.clone()).await?;
        let mut about = Record { socket: socket.clone(), process: None, run_as: variant.run_as };
        record(about.write()?).await?;
        let started = async |pid| {
            // A later daemon identifies the worker by these.
            let process = ProcessRecord::of(pid)
                .map_err(|error| Error::unavailable(format!("the worker's start time cannot be read: {error}")))?;
            about.process = Some(process);
            record(about.write()?).await
        };
        let stderr = std::io::stderr();
        let launched = launch::start(&document, &secret, &self.settings.program, stderr.as_fd(), started).await;
        match launched {
            Ok(process) => {
                let handle = ProcessHandle {
                    id: worker,
                    process,
                    written: about.write()?,
                    record: about,
                    shared: Rc::clone(&self.shared),
                };
                Ok(Launched {
                    connector: Rc::new(UnixConnector::new(socket)),
                    handle: Rc::new(handle),
                    notes: Vec::new(),
                })
            }
            Err(error) => {
                self.shared.clean_up(worker, &socket).await;
                Err(match &new.shape.venv {
                    Some(venv) => super::venv::explained(venv, &new.name, error),
                    None => error,
                })
            }
        }
    }

    fn adopt(&self, worker: WorkerId, record: &str) -> Result<Launched> {
        let about = Record::read(record)?;
        // A record without a process: the daemon was killed before the worker got its secret, so the worker ends by
        // itself.
        let recorded = about.process.ok_or_else(|| Error::lost("the worker was not started"))?;
        let found = recorded.find();
        let found = found
            .map_err(|error| Error::unavailable(format!("process {} cannot be checked: {error}", recorded.pid)))?;
        let process = found.ok_or_else(|| Error::lost("the worker has ended"))?;
        let connector = Rc::new(UnixConnector::new(&about.socket));
        let (written, shared) = (record.to_owned(), Rc::clone(&self.shared));
        Ok(Launched {
            connector,
            handle: Rc::new(ProcessHandle { id: worker, process, record: about, written, shared }),
            notes: Vec::new(),
        })
    }

    async fn end_orphan(&self, worker: WorkerId, record: &str) -> Result<()> {
        match self.adopt(worker, record) {
            Ok(Launched { handle, .. }) => {
                tracing::info!(%worker, pid = handle.process_id(), "ending a worker that could not be adopted");
                handle.kill();
                let _ = tokio::time::timeout(limits::WORKER_STOP, handle.exited()).await;
                if self.may_run(record) {
                    return Err(Error::deadline("the killed worker has not ended"));
                }
                handle.clean_up().await;
            }
            Err(error) if error.code == ErrorCode::Lost => {
                self.shared.clean_up(worker, &Record::read(record)?.socket).await;
            }
            Err(error) if error.code == ErrorCode::Corrupt => {
                tracing::error!(%worker, %error, "the worker's process is unknown");
                if let Some(cgroups) = &self.shared.cgroups {
                    crate::sandbox::cgroup::kill(&cgroups.of(worker));
                }
                self.shared.clean_up(worker, &self.socket(worker)).await;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn may_run(&self, record: &str) -> bool {
        let process = Record::read(record).ok().and_then(|about| about.process);
        process.is_some_and(|process| !matches!(process.find(), Ok(None)))
    }

    fn sweep(&self, known: &[WorkerId]) {
        let stale = self.shared.cgroups.as_ref().map(|cgroups| cgroups.stale(known)).unwrap_or_default();
        // In the background: each group's processes are killed, and their end is awaited.
        tokio::task::spawn_local(async move {
            for path in stale {
                crate::sandbox::cgroup::kill(&path);
                remove_cgroup(&path).await;
            }
        });
        for entry in std::fs::read_dir(&self.settings.sockets).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let worker = name.split('.').next().and_then(|id| id.parse::<WorkerId>().ok());
            if worker.is_some_and(|worker| !known.contains(&worker)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    fn workspace(&self, paths: WorkspacePaths) -> OpenWorkspace {
        Box::new(move || Ok(Box::new(Tracker::open(paths)?) as Box<dyn Workspace>))
    }

    fn files(&self, paths: WorkspacePaths) -> Rc<dyn FileAccess> {
        Rc::new(HostFiles(LocalFiles::new(paths, self.durability())))
    }

    fn engine_state(&self, home: &KernelHome) -> Box<dyn EngineState> {
        Box::new(EngineDatabase { path: home.engine_db.clone(), durability: self.durability() })
    }

    async fn fill_workspace(&self, workspace: &Path, from: &Path, uid: u32, most_bytes: u64) -> Result<()> {
        super::from_dir::copy(from, workspace, uid, most_bytes).await
    }

    fn missing_components(&self, workspace: &Path, inside: &Path) -> u32 {
        crate::sandbox::mountpoint::missing_components(workspace, inside)
    }

    fn remove_components(&self, workspace: &Path, inside: &Path, made: u32) {
        crate::sandbox::mountpoint::remove(workspace, inside, made);
    }

    fn probe(&self) -> Probe {
        let ProcessSettings { program, interpreters, system_paths, .. } = &self.settings;
        let (worker, interpreters, paths) = (program.path().to_owned(), interpreters.clone(), system_paths.clone());
        Box::new(move || crate::sandbox::abilities::abilities(&worker, &interpreters, &paths))
    }
}

/// A user's primary group; for a user without an entry in the user database, the group of the same number.
fn primary_group(uid: u32) -> Result<u32> {
    match nix::unistd::User::from_uid(uid.into()) {
        Ok(user) => Ok(user.map_or(uid, |user| user.gid.as_raw())),
        // Databases differ in how they report an absent user.
        Err(Errno::ENOENT | Errno::ESRCH) => Ok(uid),
        Err(error) => Err(Error::unavailable(format!("user {uid} cannot be looked up: {error}"))),
    }
}
