//! Launches and finds workers in virtual machines.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::client::{PortConnector, unexpected};
use super::files::MirroredFiles;
use super::handle::{MachineHandle, Record, no_mounts};
use super::image::{self, Image};
use super::machine::{Folder, Machine, Machines};
use super::qemu::{self, NewMachine, Sockets};
use super::workspace::MirroredWorkspace;
use crate::core::durability::Durability;
use crate::core::engine::EngineName;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::WorkerId;
use crate::core::info::Ability;
use crate::core::limits;
use crate::core::spec::{Isolation, KernelSpec, Net};
use crate::isolation::process::handle::ProcessRecord;
use crate::isolation::process::launch::WorkerProcess;
use crate::isolation::{
    EngineState, FileAccess, IsolationDriver, KernelHome, Launched, NewWorker, OpenWorkspace, Probe, Reach, Recorder,
    Shape,
};
use crate::link::bootstrap::{LaunchDocument, ReportLine};
use crate::link::machine::{Reply, Request};
use crate::sandbox::{RunAs, SandboxPlan};
use crate::sys;
use crate::workspace::{Tracker, Workspace, WorkspacePaths};

/// The user of the engine in a guest. Root owns the files on the disk, which are mapped to it.
const GUEST_USER: RunAs = RunAs { uid: 1000, gid: 1000, map_root: true };

/// The driver's settings.
pub struct MicrovmSettings {
    /// The folder of images.
    pub images: PathBuf,
    /// Folder of the ports' sockets.
    pub sockets: PathBuf,
    /// Uid and gid of QEMU, in a daemon that is root.
    pub account: Option<(u32, u32)>,
    /// What the machines' disks withstand.
    pub durability: Durability,
}

/// The driver of microVM isolation. What is the same on the host is done by that of processes.
pub struct MicrovmDriver {
    settings: MicrovmSettings,
    host: Rc<dyn IsolationDriver>,
    machines: Machines,
}

impl MicrovmDriver {
    /// A driver with these settings.
    pub fn new(settings: MicrovmSettings, host: Rc<dyn IsolationDriver>) -> MicrovmDriver {
        MicrovmDriver { settings, host, machines: Machines::default() }
    }

    fn document(&self, new: &NewWorker<'_>, image: &Image) -> Result<LaunchDocument<SandboxPlan>> {
        let mut plan = SandboxPlan::new("/data/kernel");
        plan.limits = new.shape.limits;
        plan.run_as = Some(GUEST_USER);
        plan.hostname = new.name.as_str().to_owned();
        let engine = new.shape.engine;
        let socket = PathBuf::from("/run/ryokan/worker.sock");
        let mut document = LaunchDocument::new(new.identity, new.name.clone(), engine, plan, socket);
        if let Some(interpreter) = image.engines.get(&engine).filter(|interpreter| !interpreter.is_empty()) {
            document.engine_settings.interpreter = vec![interpreter.clone()];
        }
        // The end of the machine is a loss of power to its guest.
        document.power_safe = true;
        document.sync_files = true;
        document.origin = new.origin;
        document.orphan_grace_ms = u64::try_from(new.orphan_grace.as_millis()).unwrap_or(u64::MAX);
        Ok(document)
    }

    async fn boot(
        &self,
        new: &NewWorker<'_>,
        about: &mut Record,
        machine: &Arc<Machine>,
        record: &Recorder<'_>,
    ) -> Result<WorkerProcess> {
        let folder = &machine.folder;
        let image = image::find(&self.settings.images, &new.shape.variant)?;
        let is_new = !folder.has_disk();
        let disk = if is_new {
            qemu::make_disk(&folder.new_disk(), new.shape.limits.workspace_bytes).await?;
            folder.new_disk()
        } else {
            folder.disk()
        };
        let disk = qemu::open_disk(&disk)?;
        record(about.write()?).await?;
        let log = std::io::stderr().as_fd().try_clone_to_owned();
        let log = log.map_err(|error| Error::internal(error.to_string()))?;
        let MicrovmSettings { account, durability, .. } = self.settings;
        let (limits, sockets) = (&new.shape.limits, &about.sockets);
        let mut child = qemu::start(NewMachine { image: &image, disk, sockets, limits, account, durability, log })?;
        let pid = child.id().ok_or_else(|| Error::unavailable("the virtual machine ended at once"))?;
        let process = WorkerProcess::find(pid).map_err(|error| Error::unavailable(format!("qemu: {error}")))?;
        let identified = ProcessRecord::of(pid);
        // Reaps it.
        tokio::task::spawn_local(async move { child.wait().await });
        let started = async {
            about.process = Some(identified.map_err(|error| Error::unavailable(format!("identify qemu: {error}")))?);
            record(about.write()?).await?;
            let document = self.document(new, &image)?.to_bytes()?;
            let document = [&document[..], &new.identity.secret].concat();
            let (machine, dir) = (Arc::clone(machine), folder.dir.clone());
            let mut prepared = tokio::task::spawn_blocking(move || prepare(&machine, is_new, &document));
            let served = tokio::select! {
                prepared = &mut prepared => prepared.map_err(|error| Error::internal(error.to_string()))?,
                _ = process.ended() => {
                    // It fails soon, and keeps no disk of a later machine.
                    let _ = prepared.await;
                    Err(Error::unavailable("the virtual machine ended while it started"))
                }
            };
            served.inspect_err(|_| self.machines.note_failure(&dir))
        };
        match started.await {
            Ok(()) => Ok(process),
            Err(error) => {
                process.kill();
                let _ = process.ended().await;
                Err(error)
            }
        }
    }
}

/// Fills a booted machine and starts its worker. Blocks.
fn prepare(machine: &Machine, is_new: bool, document: &[u8]) -> Result<()> {
    machine.client().open(limits::VM_BOOT)?;
    let now_ns = sys::clock::now_ms().saturating_mul(1_000_000);
    machine.client().tell(&Request::Seed { entropy: sys::random::bytes(), now_ns }, &[])?;
    if is_new {
        machine.push()?;
        machine.push_state()?;
        machine.client().tell(&Request::Sync, &[])?;
        machine.folder.keep_disk()?;
    }
    let within = limits::WORKER_START + limits::VM_CALL;
    let (reply, _) = machine.client().call(&Request::Start, document, within)?;
    machine.client().close();
    match reply {
        Reply::Started(ReportLine::Ready {}) => Ok(()),
        Reply::Started(ReportLine::Failed(error)) => Err(error),
        _ => Err(unexpected()),
    }
}

#[async_trait::async_trait(?Send)]
impl IsolationDriver for MicrovmDriver {
    fn isolation(&self) -> Isolation {
        Isolation::Microvm
    }

    fn is_pooled(&self) -> bool {
        false
    }

    fn has_local_files(&self) -> bool {
        false
    }

    fn can_suspend(&self) -> bool {
        false
    }

    fn image_version(&self, spec: &KernelSpec) -> String {
        image::find(&self.settings.images, &spec.image).map_or_else(|_| String::new(), |image| image.version)
    }

    fn check(&self, spec: &KernelSpec, uid: u32) -> Result<Shape> {
        let unsupported = |what: &str, reason: &str| {
            Err(Error::unsupported(what.to_owned()).reason(reason).hint("use --isolation process"))
        };
        if !spec.paths.is_empty() {
            return Err(no_mounts());
        }
        if spec.net != Net::None {
            return unsupported("a kernel in a virtual machine has no network", "net");
        }
        if !spec.degraded.is_empty() {
            return unsupported("no layer is waived in a virtual machine: its guest has all of them", "degraded");
        }
        if !spec.limits.cpu_milli.is_multiple_of(1000) {
            return unsupported("a virtual machine has whole processors", "cpus");
        }
        qemu::program()?;
        let image = image::find(&self.settings.images, &spec.image)?;
        if !image.engines.contains_key(&spec.engine) {
            return unsupported(&format!("image {} has no {}", image.version, spec.engine), "engine");
        }
        let (engine, limits, net) = (spec.engine, spec.limits, spec.net);
        Ok(Shape { isolation: Isolation::Microvm, engine, limits, net, uid, variant: spec.image.clone() })
    }

    async fn launch(&self, new: NewWorker<'_>, record: &Recorder<'_>) -> Result<Launched> {
        if new.home.shared_workspace.is_some() {
            return Err(Error::unsupported("kernels in virtual machines share no workspace").reason("thread"));
        }
        if !new.mounts.is_empty() {
            return Err(no_mounts());
        }
        let worker = new.identity.worker;
        let (home, sockets) = (new.home, Sockets::new(&self.settings.sockets, &worker));
        let workspace = home.dir.join(&home.own_workspace);
        let folder = Folder { dir: home.dir.clone(), workspace, engine_db: home.engine_db.clone() };
        let mut about = Record {
            sockets: sockets.clone(),
            process: None,
            dir: folder.dir.clone(),
            workspace: folder.workspace.clone(),
            engine_db: folder.engine_db.clone(),
            most_bytes: new.shape.limits.workspace_bytes,
        };
        let machine = Arc::new(Machine::new(folder, about.most_bytes, sockets.control.clone()));
        match self.boot(&new, &mut about, &machine, record).await {
            Ok(process) => {
                let connector = Rc::new(PortConnector { socket: sockets.link.clone() });
                let handle =
                    MachineHandle::new(worker, process, about.write()?, sockets, machine, self.machines.clone());
                Ok(Launched { connector, handle: Rc::new(handle) })
            }
            Err(error) => {
                sockets.unlink();
                Err(error)
            }
        }
    }

    fn adopt(&self, worker: WorkerId, record: &str) -> Result<Launched> {
        let about = Record::read(record)?;
        let recorded = about.process.ok_or_else(|| Error::lost("the worker was not started"))?;
        let found = recorded.find().map_err(|error| Error::unavailable(format!("check the worker's process: {error}")));
        let process = found?.ok_or_else(|| Error::lost("the worker has ended"))?;
        let folder = Folder { dir: about.dir, workspace: about.workspace, engine_db: about.engine_db };
        let machine = Arc::new(Machine::new(folder, about.most_bytes, about.sockets.control.clone()));
        let connector = Rc::new(PortConnector { socket: about.sockets.link.clone() });
        let (written, machines) = (record.to_owned(), self.machines.clone());
        let handle = MachineHandle::new(worker, process, written, about.sockets, machine, machines);
        Ok(Launched { connector, handle: Rc::new(handle) })
    }

    async fn end_orphan(&self, worker: WorkerId, record: &str) -> Result<()> {
        match self.adopt(worker, record) {
            Ok(Launched { handle, .. }) => {
                tracing::info!(%worker, pid = handle.process_id(), "ending a virtual machine that could not be adopted");
                handle.kill();
                let _ = tokio::time::timeout(limits::WORKER_STOP, handle.exited()).await;
                if self.may_run(record) {
                    return Err(Error::deadline("the killed virtual machine has not ended"));
                }
                handle.clean_up().await;
                Ok(())
            }
            Err(error) if error.code == ErrorCode::Lost => {
                Record::read(record)?.sockets.unlink();
                Ok(())
            }
            // Nothing identifies its process; `sweep` removes its sockets.
            Err(error) if error.code == ErrorCode::Corrupt => {
                tracing::error!(%worker, %error, "the virtual machine's process is unknown");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn may_run(&self, record: &str) -> bool {
        let process = Record::read(record).ok().and_then(|about| about.process);
        process.is_some_and(|process| !matches!(process.find(), Ok(None)))
    }

    fn workspace(&self, paths: WorkspacePaths) -> OpenWorkspace {
        let machines = self.machines.clone();
        Box::new(move || {
            let dir = paths.index.parent().map(Path::to_owned).unwrap_or_default();
            let tracker = Tracker::open(paths)?;
            Ok(Box::new(MirroredWorkspace { tracker, machines, dir }) as Box<dyn Workspace>)
        })
    }

    fn files(&self, paths: WorkspacePaths) -> Rc<dyn FileAccess> {
        let dir = paths.index.parent().map(Path::to_owned).unwrap_or_default();
        Rc::new(MirroredFiles { mirror: self.host.files(paths), machines: self.machines.clone(), dir })
    }

    fn engine_state(&self, home: &KernelHome) -> Box<dyn EngineState> {
        self.host.engine_state(home)
    }

    async fn fill_workspace(&self, workspace: &Path, from: &Path, uid: u32, most_bytes: u64) -> Result<()> {
        self.host.fill_workspace(workspace, from, uid, most_bytes).await
    }

    fn missing_components(&self, _: &Path, _: &Path) -> u32 {
        0
    }

    fn remove_components(&self, _: &Path, _: &Path, _: u32) {}

    fn sweep(&self, _: &[WorkerId]) {
        // Sockets are swept with those of processes; every machine is in a catalog before it exists.
    }

    fn reach(&self, dir: &Path) -> Reach {
        self.machines.reach(dir)
    }

    async fn put_aside(&self, dir: &Path) -> Result<Option<PathBuf>> {
        let (machines, dir) = (self.machines.clone(), dir.to_owned());
        let kept = tokio::task::spawn_blocking(move || machines.put_aside(&dir)).await;
        kept.map_err(|error| Error::internal(error.to_string()))?
    }

    fn probe(&self) -> Probe {
        let images = self.settings.images.clone();
        Box::new(move || abilities(&images))
    }
}

/// Whether this host runs kernels in virtual machines. Blocks.
pub fn abilities(images: &Path) -> Vec<Ability> {
    let found = qemu::program().and_then(|program| Ok((program, image::find(images, "")?)));
    let ability = |present, detail, hint| Ability { name: "microvm".into(), present, required: false, detail, hint };
    vec![match found {
        Ok((program, image)) => {
            let engines: Vec<&str> = image.engines.keys().map(|engine: &EngineName| engine.name()).collect();
            let (short, engines) = (&image.version[..12.min(image.version.len())], engines.join(", "));
            let text = format!(
                "{} with software emulation; image {short}: {}, {engines}; no mounts, no network, no memory snapshots",
                program.display(),
                image.summary
            );
            ability(true, text, String::new())
        }
        Err(error) => ability(false, error.message, error.hint),
    }]
}
