//! Launches and finds workers in virtual machines.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::accelerator::Accelerators;
use super::client::PortConnector;
use super::copy::{Description, MachineCopy};
use super::disk;
use super::files::MirroredFiles;
use super::handle::{MachineHandle, Record, Shared, Warm, blocking, no_mounts};
use super::image;
use super::images::{HostImages, current_of};
use super::installed;
use super::launch::Serving;
use super::machine::{Folder, Machine, Machines};
use super::monitor::{end_unrecorded, kill_unknown};
use super::notes::Notes;
use super::saved::{self, Saved};
use super::sockets::Sockets;
use super::template::Kind;
use super::templates::{TemplateSettings, Templates};
use super::vmm::{self, Vmm, VmmSettings, Vmms};
use super::workspace::MirroredWorkspace;
use crate::core::accelerator::Accelerator;
use crate::core::durability::Durability;
use crate::core::engine::EngineName;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{HostId, WorkerId};
use crate::core::info::Ability;
use crate::core::limits;
use crate::core::pool::RefreshRules;
use crate::core::snapshot::{Architecture, Site, Snapshot, Teleport};
use crate::core::spec::{Isolation, KernelSpec, Net};
use crate::core::vmm::WantedVmm;
use crate::isolation::cgroups::{Cgroups, remove_cgroup};
use crate::isolation::process::launch::WorkerProcess;
use crate::isolation::{
    Deferral, EngineState, FileAccess, Images, InstallFiles, IsolationDriver, KernelHome, Launched, MachineRoom,
    NamedMachine, NewWorker, OpenWorkspace, Probe, Reach, Recorder, Reporter, Shape,
};
use crate::link::handshake::WorkerIdentity;
use crate::workspace::{Tracker, Workspace, WorkspacePaths};

/// The driver's settings.
pub struct MicrovmSettings {
    /// This host's identity: saved memory continues here only.
    pub host: HostId,
    /// The folder of images.
    pub images: PathBuf,
    /// The file that says which images are current and pinned.
    pub image_list: PathBuf,
    /// The folder of templates.
    pub templates: PathBuf,
    /// Folder of the ports' sockets.
    pub sockets: PathBuf,
    /// Uid and gid of monitors, in a daemon that is root.
    pub account: Option<(u32, u32)>,
    /// The folder for the machines' cgroups, where one is delegated.
    pub cgroup_base: Option<PathBuf>,
    /// What the machines' disks withstand.
    pub durability: Durability,
    /// What runs the guests' instructions.
    pub accelerator: Accelerator,
    /// What runs the machines.
    pub vmm: WantedVmm,
    /// The path of Firecracker; `None`: where a shell would find it.
    pub firecracker: Option<PathBuf>,
    /// When templates are rebuilt.
    pub refresh: RefreshRules,
    /// The worker's binary, which measures KVM.
    pub worker: PathBuf,
}

impl MicrovmSettings {
    fn vmms(&self) -> VmmSettings {
        VmmSettings { wanted: self.vmm, firecracker: self.firecracker.clone(), account: self.account }
    }
}

/// The driver of microVM isolation. What is the same on the host is done by that of processes.
pub struct MicrovmDriver {
    pub(super) settings: MicrovmSettings,
    pub(super) machines: Machines,
    pub(super) templates: Rc<Templates>,
    notes: Rc<Notes>,
    pub(super) vmms: Rc<Vmms>,
    pub(super) cgroups: Option<Cgroups>,
    pub(super) images: Rc<HostImages>,
    host: Rc<dyn IsolationDriver>,
}

impl MicrovmDriver {
    /// A driver with these settings.
    pub fn new(settings: MicrovmSettings, host: Rc<dyn IsolationDriver>) -> MicrovmDriver {
        let accelerators = Accelerators::new(settings.accelerator, settings.worker.clone());
        let vmms = Vmms::new(settings.vmms(), accelerators);
        let cgroups = settings.cgroup_base.clone().map(|base| Cgroups::new(base, settings.host));
        let template_settings = TemplateSettings {
            folder: settings.templates.clone(),
            sockets: settings.sockets.clone(),
            account: settings.account,
            cgroups: cgroups.clone(),
            refresh: settings.refresh,
        };
        let notes = Rc::new(Notes::default());
        let templates = Templates::new(template_settings, Rc::clone(&vmms), Rc::clone(&notes));
        let (folder, list) = (settings.images.clone(), settings.image_list.clone());
        let images = HostImages::new(folder, list, Rc::clone(&templates), Rc::clone(&vmms));
        MicrovmDriver { vmms, cgroups, settings, machines: Machines::default(), templates, notes, images, host }
    }

    /// What handles share.
    fn shared(&self, worker: WorkerId) -> Shared {
        let cgroup = self.cgroups.as_ref().map(|cgroups| cgroups.of(worker));
        let (machines, copies) = (self.machines.clone(), self.settings.templates.clone());
        Shared { host: self.settings.host, machines, copies, cgroup, notes: Rc::clone(&self.notes) }
    }

    /// Removes what an ended machine left outside of its kernel's folder.
    async fn clean_up(&self, worker: WorkerId, sockets: &Sockets) {
        sockets.unlink();
        if let Some(cgroups) = &self.cgroups {
            remove_cgroup(&cgroups.of(worker)).await;
        }
    }

    /// The machine that this host would run for such a kernel with that image, if it has the image.
    async fn kind_here(&self, spec: &KernelSpec, uid: u32, image: &str) -> Result<Kind> {
        let shape = self.check(spec, uid)?;
        let found = match image::find(&self.settings.images, image) {
            Ok(found) if found.version == image => found,
            // What this host has in its place, for the refusal.
            Ok(_) | Err(_) => image::find(&self.settings.images, &shape.variant)?,
        };
        let choice = self.vmms.choose(&found).await?;
        Ok(Kind::new(&found, &shape, choice, disk::disk_bytes(spec.limits.workspace_bytes)))
    }
}

#[async_trait::async_trait(?Send)]
impl IsolationDriver for MicrovmDriver {
    fn isolation(&self) -> Isolation {
        Isolation::Microvm
    }

    fn takes_warm(&self, home: &KernelHome) -> bool {
        // What has a disk or kept memory continues with it.
        home.shared_workspace.is_none() && !Folder::of(home).has_disk() && !self.keeps_memory(home).unwrap_or(true)
    }

    fn has_local_files(&self) -> bool {
        false
    }

    fn image_version(&self, spec: &KernelSpec, dir: &Path) -> String {
        match self.machines.find(dir) {
            Some(machine) => machine.image.clone(),
            // An image that cannot be used now is named nevertheless, by its whole version.
            None => self.kept_image(dir).unwrap_or_else(|| {
                self.images.find(&spec.image).map_or_else(|_| spec.image.clone(), |image| image.version)
            }),
        }
    }

    fn kept_image(&self, dir: &Path) -> Option<String> {
        match Saved::read(dir) {
            Ok(Some(saved)) => Some(saved.kind.image),
            Ok(None) | Err(_) => installed::image(dir),
        }
    }

    fn images(&self) -> Option<Rc<dyn Images>> {
        Some(Rc::clone(&self.images) as Rc<dyn Images>)
    }

    fn check(&self, spec: &KernelSpec, uid: u32) -> Result<Shape> {
        let unsupported = |what: &str, reason: &str| {
            Err(Error::unsupported(what.to_owned()).reason(reason).hint("use --isolation process"))
        };
        if spec.venv.is_some() {
            return Err(Error::unsupported(
                "a virtual machine has the Python of its image, and no virtual environment",
            )
            .reason("venv")
            .hint("leave out --venv, or fork with --venv none; or use --isolation process"));
        }
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
        self.vmms.check()?;
        let image = self.images.find(&spec.image)?;
        image.check_engine(spec.engine)?;
        let (engine, limits, net) = (spec.engine, spec.limits, spec.net);
        // Machines of an image serve only kernels of that image.
        Ok(Shape { isolation: Isolation::Microvm, engine, limits, net, uid, variant: image.version, venv: None })
    }

    async fn launch(&self, new: NewWorker<'_>, record: &Recorder<'_>) -> Result<Launched> {
        if new.home.shared_workspace.is_some() {
            return Err(Error::unsupported("kernels in virtual machines share no workspace").reason("thread"));
        }
        if !new.mounts.is_empty() {
            return Err(no_mounts());
        }
        let worker = new.identity.worker;
        // What runs the machine is decided as it starts; a copy's is that of its original.
        let vmm = new.copy.map_or(Vmm::Qemu, |copy| copy.kind().vmm());
        let sockets = Sockets::new(&self.settings.sockets, &worker, vmm);
        let folder = Folder::of(new.home);
        let mut about = Record {
            sockets,
            process: None,
            dir: folder.dir.clone(),
            workspace: folder.workspace.clone(),
            engine_db: folder.engine_db.clone(),
            most_bytes: new.shape.limits.workspace_bytes,
            image: new.copy.map_or(&new.shape.variant, |copy| &copy.kind().image).clone(),
            kind: None,
            base: None,
        };
        // Only the worker in a suspended machine continues it.
        let saved = if new.is_warm { None } else { Saved::read(&folder.dir)? };
        let (is_unsealed, dir) = (!new.is_warm && saved.is_none(), folder.dir.clone());
        let saved = saved.filter(|saved| saved.worker().worker == worker);
        if let Some(saved) = &saved {
            // Another image may be current by now.
            about.image.clone_from(&saved.kind.image);
        }
        // Until captures and clients find the machine, nothing changes the files that it takes.
        let _start = self.machines.start_lock(&folder.dir).write_owned().await;
        if is_unsealed {
            // Daemon and machine ended together while it was being saved.
            blocking(move || saved::remove_unsealed(&dir)).await?;
        }
        let machine = Arc::new(Machine::new(folder, &about));
        let started = match new.copy {
            Some(copy) => self.start_copy(worker, copy, &mut about, &machine, record).await,
            None => self.start(&new, &mut about, &machine, saved, record).await,
        };
        match started {
            Ok(Serving { process, shared_boot_id, notes }) => {
                self.images.served(&about.image);
                let warm = new.is_warm.then_some(Warm { shared_boot_id, durability: self.settings.durability });
                let address = about.sockets.link();
                let handle = MachineHandle::new(worker, process, about, machine, self.shared(worker), warm)?;
                let connector = Rc::new(PortConnector { address, stop: handle.watch_stop() });
                Ok(Launched { connector, handle: Rc::new(handle), notes })
            }
            Err(error) => {
                self.clean_up(worker, &about.sockets).await;
                saved::drop_prepared(&about.dir);
                Err(error)
            }
        }
    }

    fn adopt(&self, worker: WorkerId, record: &str) -> Result<Launched> {
        let (about, process) = find(record)?;
        let folder =
            Folder { dir: about.dir.clone(), workspace: about.workspace.clone(), engine_db: about.engine_db.clone() };
        if !folder.has_disk() {
            return Err(Error::lost("the virtual machine has no kernel yet"));
        }
        let machine = Arc::new(Machine::new(folder, &about));
        let address = about.sockets.link();
        let handle = MachineHandle::new(worker, process, about, machine, self.shared(worker), None)?;
        let connector = Rc::new(PortConnector { address, stop: handle.watch_stop() });
        Ok(Launched { connector, handle: Rc::new(handle), notes: Vec::new() })
    }

    async fn end_orphan(&self, worker: WorkerId, record: &str) -> Result<()> {
        match find(record) {
            Ok((about, process)) => {
                tracing::info!(%worker, pid = process.pid, "ending a virtual machine that could not be adopted");
                process.kill();
                let _ = tokio::time::timeout(limits::WORKER_STOP, process.ended()).await;
                if self.may_run(record) {
                    return Err(Error::deadline("the killed virtual machine has not ended"));
                }
                self.clean_up(worker, &about.sockets).await;
                saved::drop_prepared(&about.dir);
                Ok(())
            }
            Err(error) if error.code == ErrorCode::Lost => {
                let about = Record::read(record)?;
                // Its daemon may have been killed before it recorded the monitor of this attempt to start it.
                end_unrecorded(&self.settings.sockets, worker).await?;
                self.clean_up(worker, &about.sockets).await;
                saved::drop_prepared(&about.dir);
                Ok(())
            }
            // Only its name identifies its process.
            Err(error) if error.code == ErrorCode::Corrupt => {
                tracing::error!(%worker, %error, "the virtual machine's process is unknown");
                end_unrecorded(&self.settings.sockets, worker).await
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
        Rc::new(MirroredFiles::new(self.host.files(paths), self.machines.clone(), dir))
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

    fn report_to(&self, reporter: Reporter) {
        self.notes.report_to(reporter);
    }

    fn defer_by(&self, deferral: Deferral) {
        self.templates.defer_by(deferral);
    }

    fn sweep(&self, known: &[WorkerId]) {
        self.templates.sweep();
        self.templates.keep_fresh();
        kill_unknown(&self.settings.sockets, known);
    }

    async fn site(&self, spec: &KernelSpec, uid: u32, image: &str) -> Result<Site> {
        let kind = self.kind_here(spec, uid, image).await?;
        Ok(Site {
            architecture: Architecture::here(),
            base_image_version: kind.image.clone(),
            host: self.settings.host,
            machine: Some(kind.machine()),
        })
    }

    fn check_description(&self, description: &[u8], named: &NamedMachine<'_>) -> Result<()> {
        Description::decode(description)?.check(named)
    }

    async fn install(&self, home: &KernelHome, description: Vec<u8>, fill: InstallFiles) -> Result<()> {
        let dir = home.dir.clone();
        blocking(move || installed::install(&dir, &description, fill)).await
    }

    async fn installed(&self, home: &KernelHome, spec: &KernelSpec, uid: u32) -> Result<Option<MachineCopy>> {
        let dir = home.dir.clone();
        let Some(machine) = blocking(move || installed::open(&dir, uid)).await? else { return Ok(None) };
        let (kind, host) = (machine.kind(), self.settings.host);
        let now = self.kind_here(spec, uid, &kind.image).await?;
        let architecture = Architecture::here();
        let snapshot = Snapshot {
            architecture: architecture.clone(),
            base_image_version: kind.image.clone(),
            host,
            content: Teleport { memory_bytes: 0, disk_bytes: 0, machine: kind.machine() },
        };
        let (base_image_version, here) = (now.image.clone(), Some(now.machine()));
        let site = Site { architecture, base_image_version, host, machine: here };
        // The hints of kinds are about checkpoints.
        snapshot.check_arrival(&site, u64::MAX).map_err(|error| Error::from(error).hint(""))?;
        kind.check_same(&now)?;
        Ok(Some(machine))
    }

    fn machine_room(&self, spec: &KernelSpec, dir: &Path) -> MachineRoom {
        let memory_bytes = spec.limits.memory_bytes.saturating_add(limits::VM_EXTRA_MEMORY_BYTES);
        let disk = dir.join(super::DISK).metadata();
        let disk_bytes = disk.map_or(0, |found| std::os::unix::fs::MetadataExt::blocks(&found) * 512);
        let most_disk_bytes = disk::disk_bytes(spec.limits.workspace_bytes);
        MachineRoom { memory_bytes, disk_bytes, most_disk_bytes }
    }

    fn keeps_memory(&self, home: &KernelHome) -> Result<bool> {
        Ok(installed::is_there(&home.dir) || self.saved_worker(home)?.is_some())
    }

    fn saved_worker(&self, home: &KernelHome) -> Result<Option<WorkerIdentity>> {
        Ok(Saved::read(&home.dir)?.map(|saved| saved.worker()))
    }

    fn forget_saved(&self, home: &KernelHome) {
        if let Err(error) = saved::remove(&home.dir).and_then(|()| installed::remove(&home.dir)) {
            tracing::warn!(%error, "a suspended machine that cannot continue is not removed");
        }
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
        let (images, list) = (self.settings.images.clone(), self.settings.image_list.clone());
        let vmms = self.settings.vmms();
        Box::new(move || found(&images, &list, &vmms))
    }
}

/// The recorded machine.
///
/// # Errors
/// `lost` if it has ended, `corrupt`, `unavailable`.
fn find(record: &str) -> Result<(Record, WorkerProcess)> {
    let about = Record::read(record)?;
    let recorded = about.process.ok_or_else(|| Error::lost("the worker was not started"))?;
    let found = recorded.find().map_err(|error| Error::unavailable(format!("check the worker's process: {error}")));
    let process = found?.ok_or_else(|| Error::lost("the worker has ended"))?;
    Ok((about, process))
}

/// Whether this host runs kernels in virtual machines. Blocks.
pub fn abilities(images: &Path, list: &Path, vmm: WantedVmm, firecracker: Option<&Path>) -> Vec<Ability> {
    let firecracker = firecracker.map(Path::to_owned);
    found(images, list, &VmmSettings { wanted: vmm, firecracker, account: None })
}

fn found(images: &Path, list: &Path, vmms: &VmmSettings) -> Vec<Ability> {
    let found = vmm::describe(vmms).and_then(|program| Ok((program, current_of(images, list)?)));
    let ability = |present, detail, hint| Ability { name: "microvm".into(), present, required: false, detail, hint };
    vec![match found {
        Ok((program, image)) => {
            let engines: Vec<&str> = image.engines.keys().map(|engine: &EngineName| engine.name()).collect();
            let (short, engines) = (&image.version[..12.min(image.version.len())], engines.join(", "));
            let text = format!(
                "{program}; image {short}: {}, {engines}; no mounts, no network; suspended machines keep their memory until this host ends",
                image.summary
            );
            ability(true, text, String::new())
        }
        Err(error) => ability(false, error.message, error.hint),
    }]
}
