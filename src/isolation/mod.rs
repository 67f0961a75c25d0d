//! How workers run: one driver per isolation, one handle per worker.
//!
//! ```text
//!  supervisor ── check, launch, adopt, sweep ──▶ IsolationDriver ─┬ process/    a sandboxed process tree of this host
//!             ◀── Connector, WorkerHandle ──────┘                  └ microvm/    a process tree in a virtual machine
//! ```
//!
//! The supervisor knows kernels, shapes and records; a driver knows processes, folders, mounts and control groups. A
//! driver never decides which kernel gets a worker, and the supervisor never looks into a record.

mod cgroups;
mod files;
pub mod microvm;
pub mod process;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;

use crate::catalog::{Applied, EngineInfo, Entry, EntryHead, Inspected};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::core::info::{Ability, ImageInfo};
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;
use crate::core::snapshot::{KindError, Machine, Site};
use crate::core::spec::{Isolation, KernelLimits, KernelSpec, Net};
use crate::link::binding::{BoundFolder, BoundMount};
use crate::link::connector::Connector;
use crate::link::handshake::WorkerIdentity;
use crate::link::host::WorkerLink;
use crate::workspace::{Workspace, WorkspacePaths};

pub use microvm::{MachineCopy, MachineFiles, SavedMachine};

pub use files::{FileAccess, FileListing, FileWatch, OpenFile, PendingFile};

/// The properties that a warm worker must share with a kernel. Equal shapes share warm workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Its isolation.
    pub isolation: Isolation,
    /// Its engine.
    pub engine: EngineName,
    /// Its resource limits.
    pub limits: KernelLimits,
    /// Its network.
    pub net: Net,
    /// The host user whose rights it has.
    pub uid: u32,
    /// Driver-specific properties that cannot change after launch.
    pub variant: String,
    /// The virtual environment whose interpreter it runs. No warm worker has one: it is seen with the kernel's paths.
    pub venv: Option<PathBuf>,
}

/// The locations of a kernel's files on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelHome {
    /// The kernel's folder.
    pub dir: PathBuf,
    /// The database of its engine state.
    pub engine_db: PathBuf,
    /// Its own workspace, a path within `dir`.
    pub own_workspace: PathBuf,
    /// The workspace of another kernel, if it shares one.
    pub shared_workspace: Option<PathBuf>,
}

/// A host path that a kernel may see. Its source was checked and holds no symbolic links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMount {
    /// The path inside the kernel.
    pub inside: PathBuf,
    /// The path on this host.
    pub source: PathBuf,
    /// Whether the kernel may write to it.
    pub writable: bool,
}

/// The catalog's record of a worker, with which a later daemon finds it: a JSON object that only the driver reads.
pub type WorkerRecord = String;

/// A worker to be launched.
pub struct NewWorker<'a> {
    /// Its required properties.
    pub shape: &'a Shape,
    /// The identity that both ends of the link prove.
    pub identity: &'a WorkerIdentity,
    /// The kernel's name, as the code inside sees it.
    pub name: KernelName,
    /// Where its files are.
    pub home: &'a KernelHome,
    /// Its mounts.
    pub mounts: Vec<HostMount>,
    /// The origin of the state that it loads, and its generation.
    pub origin: (OriginKind, u32),
    /// Its lifetime without a daemon.
    pub orphan_grace: Duration,
    /// Whether it joins the warm pool without a kernel.
    pub is_warm: bool,
    /// The machine with whose memory it begins; its worker is that machine's until it is bound.
    pub copy: Option<&'a MachineCopy>,
}

/// Stores the record of a worker: before the worker exists, and again as soon as it does.
pub type Recorder<'a> = dyn Fn(WorkerRecord) -> LocalBoxFuture<'a, Result<()>> + 'a;

/// A launched worker.
pub struct Launched {
    /// The connection to its init.
    pub connector: Rc<dyn Connector>,
    /// The worker itself.
    pub handle: Rc<dyn WorkerHandle>,
    /// What the launch has to report.
    pub notes: Vec<LaunchNote>,
}

/// A remarkable course of a launch: an event of the host, and counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchNote {
    /// The event.
    pub kind: &'static str,
    /// Its reason.
    pub detail: String,
}

/// Takes reports on what happens beside launches, to one engine's workers or to all.
pub type Reporter = Rc<dyn Fn(Option<EngineName>, LaunchNote)>;

/// Says for how long memory counts as short.
pub type Deferral = Rc<dyn Fn() -> Option<Duration>>;

/// The kernel files sent to a warm worker. Their descriptors are sent before this message.
#[derive(Debug, Default)]
pub struct BoundSources {
    /// The kernel's folder; `None`: the worker's own.
    pub folder: Option<BoundFolder>,
    /// Folders that no mount may expose.
    pub protected: Vec<PathBuf>,
    /// The kernel's mounts.
    pub mounts: Vec<BoundMount>,
    /// Whether the kernel's engine state is in the worker's own folder now.
    pub brings_state: bool,
}

/// Opens a kernel's files. Blocks.
pub type OpenWorkspace = Box<dyn FnOnce() -> Result<Box<dyn Workspace>> + Send>;

/// A kernel's engine state while no worker has it open. Its calls block.
pub trait EngineState: Send {
    /// Replaces all of the state that the kernel's next worker loads.
    ///
    /// # Errors
    /// The first of `entries`, and those of writing; the former state is kept then.
    fn replace(&self, info: &EngineInfo, entries: &mut dyn Iterator<Item = Result<Entry>>) -> Result<()>;

    /// Makes the state equal to these entries; `body` reads those that differ.
    ///
    /// # Errors
    /// The first of `body`, `corrupt` if it read another body, and those of writing; the former state is kept then.
    fn revise(
        &self,
        info: &EngineInfo,
        wanted: &[EntryHead],
        body: &mut dyn FnMut(&EntryHead) -> Result<Vec<u8>>,
    ) -> Result<Applied>;

    /// Passes every entry of the state to `each`.
    ///
    /// # Errors
    /// Those of reading and of `each`; an error if a worker has it open.
    fn read(&self, each: &mut dyn FnMut(Entry) -> Result<()>) -> Result<()>;

    /// Checks the state for damage.
    ///
    /// # Errors
    /// `corrupt`.
    fn inspect(&self) -> Result<Inspected>;
}

/// What reaches the newest files and state of a kernel without a live worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// They are on this host.
    Host,
    /// Only the kernel's next worker reaches them.
    Worker,
    /// The last worker could not be started with them; this host has older ones.
    Nothing,
}

/// Fills the files of a machine: memory, state and disk. Blocks.
pub type InstallFiles = Box<dyn FnOnce([&std::fs::File; 3]) -> Result<()> + Send>;

/// What a snapshot says of its machine, beside the description.
pub struct NamedMachine<'a> {
    /// What a host must have to continue it.
    pub machine: &'a Machine,
    /// The image's version.
    pub image: &'a str,
    /// Size of the memory, bytes.
    pub memory_bytes: u64,
    /// Size of the disk, bytes.
    pub disk_bytes: u64,
}

/// What a machine may need at most, before it is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineRoom {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of the disk's blocks.
    pub disk_bytes: u64,
    /// Size of the largest disk that the kernel's limits allow, bytes.
    pub most_disk_bytes: u64,
}

/// Probes the capabilities of a host. Blocks.
pub type Probe = Box<dyn FnOnce() -> Vec<Ability> + Send>;

/// One way of running workers.
#[async_trait::async_trait(?Send)]
pub trait IsolationDriver {
    /// Which isolation it is.
    fn isolation(&self) -> Isolation;

    /// Whether warm workers of this isolation are kept.
    fn is_pooled(&self) -> bool {
        true
    }

    /// Whether a warm worker can become the worker of the kernel with these files.
    fn takes_warm(&self, _home: &KernelHome) -> bool {
        true
    }

    /// Whether a kernel's files on this host are always up to date.
    fn has_local_files(&self) -> bool {
        true
    }

    /// The version of the image that the kernel with this folder runs, or would run now; empty if there is none.
    fn image_version(&self, _spec: &KernelSpec, _dir: &Path) -> String {
        String::new()
    }

    /// The version of the image that memory kept in a kernel's folder continues with, if any is kept.
    fn kept_image(&self, _dir: &Path) -> Option<String> {
        None
    }

    /// The images of this host, if workers have any.
    fn images(&self) -> Option<Rc<dyn Images>> {
        None
    }

    /// Checks that this host can run such a worker for a user, and returns its shape.
    ///
    /// # Errors
    /// `unsupported` with a hint, `invalidArgument`.
    fn check(&self, spec: &KernelSpec, uid: u32) -> Result<Shape>;

    /// Launches a worker. `record` is awaited before the worker exists, and again before it can run anything, so that
    /// every worker is in a catalog. On failure, everything launched has ended.
    ///
    /// # Errors
    /// Those of `record`, and of the start.
    async fn launch(&self, new: NewWorker<'_>, record: &Recorder<'_>) -> Result<Launched>;

    /// Finds a worker that a former daemon launched.
    ///
    /// # Errors
    /// `lost` if the worker has ended, `corrupt` for an unreadable record, `unavailable` if the worker may be running
    /// but cannot be checked.
    fn adopt(&self, worker: WorkerId, record: &str) -> Result<Launched>;

    /// Ends a recorded worker that could not be adopted, if its process is still the recorded one, and removes its
    /// leftovers.
    ///
    /// # Errors
    /// If the worker may be running: its row stays in the catalog.
    async fn end_orphan(&self, worker: WorkerId, record: &str) -> Result<()>;

    /// Whether a recorded worker's process is running, or may be.
    fn may_run(&self, record: &str) -> bool;

    /// Returns a function that opens a kernel's files outside the event loop.
    fn workspace(&self, paths: WorkspacePaths) -> OpenWorkspace;

    /// Access to a kernel's files for clients, whether it has a worker or not.
    fn files(&self, paths: WorkspacePaths) -> Rc<dyn FileAccess>;

    /// A kernel's engine state, while no worker has it open.
    fn engine_state(&self, home: &KernelHome) -> Box<dyn EngineState>;

    /// Copies a folder of this host into a new kernel's workspace, as that user.
    ///
    /// # Errors
    /// `invalidArgument` if the source is no folder, `unsupported` for another user's, `refused` if it holds more than
    /// `most_bytes`.
    async fn fill_workspace(&self, workspace: &Path, from: &Path, uid: u32, most_bytes: u64) -> Result<()>;

    /// Counts the components of a mount's path that are missing in a workspace, which may hold untrusted code's files.
    fn missing_components(&self, workspace: &Path, inside: &Path) -> u32;

    /// Removes the last `made` components of a mount's path from a workspace, while they are empty.
    fn remove_components(&self, workspace: &Path, inside: &Path, made: u32);

    /// Sets what takes the reports of this driver.
    fn report_to(&self, _reporter: Reporter) {}

    /// Sets what says for how long work that no client waits for is deferred, for want of memory.
    fn defer_by(&self, _deferral: Deferral) {}

    /// Removes leftovers of workers that `known` does not name.
    fn sweep(&self, known: &[WorkerId]);

    /// What this host would run for such a kernel with that image, if it has the image.
    ///
    /// # Errors
    /// `refused` if the isolation has no machines; those of [`Self::check`].
    async fn site(&self, _spec: &KernelSpec, _uid: u32, _image: &str) -> Result<Site> {
        Err(KindError::NoMachine.into())
    }

    /// What the kernel's machine may need at most in a snapshot of kind teleport.
    fn machine_room(&self, _spec: &KernelSpec, _dir: &Path) -> MachineRoom {
        MachineRoom { memory_bytes: 0, disk_bytes: 0, most_disk_bytes: 0 }
    }

    /// Checks that a snapshot's description is of the machine that the snapshot names, before anything changes.
    ///
    /// # Errors
    /// `corrupt`, `unsupported` for another format.
    fn check_description(&self, _description: &[u8], _named: &NamedMachine<'_>) -> Result<()> {
        Err(KindError::NoMachine.into())
    }

    /// Puts a machine of a snapshot into the folder of a kernel without a worker: its next worker continues it.
    ///
    /// # Errors
    /// `corrupt`, those of `fill` and of the file system: nothing is installed then.
    async fn install(&self, _home: &KernelHome, _description: Vec<u8>, _fill: InstallFiles) -> Result<()> {
        Err(KindError::NoMachine.into())
    }

    /// The machine that is installed in a kernel's folder, if there is one.
    ///
    /// # Errors
    /// `corrupt`, `unsupported`, `refused` if this host would run another machine.
    async fn installed(&self, _home: &KernelHome, _spec: &KernelSpec, _uid: u32) -> Result<Option<MachineCopy>> {
        Ok(None)
    }

    /// Whether the next worker continues memory that is kept in a kernel's folder.
    ///
    /// # Errors
    /// As [`Self::saved_worker`].
    fn keeps_memory(&self, _home: &KernelHome) -> Result<bool> {
        Ok(false)
    }

    /// The worker whose memory is saved in a kernel's folder: a launch with this identity continues it.
    ///
    /// # Errors
    /// `corrupt`, `unsupported`.
    fn saved_worker(&self, _home: &KernelHome) -> Result<Option<WorkerIdentity>> {
        Ok(None)
    }

    /// Discards the memory that is kept in a kernel's folder.
    fn forget_saved(&self, _home: &KernelHome) {}

    /// What reaches the newest files and state of the kernel with this folder.
    fn reach(&self, _dir: &Path) -> Reach {
        Reach::Host
    }

    /// Puts aside what nothing reaches, so that the kernel goes on with what this host has. Returns where it is kept.
    ///
    /// # Errors
    /// Those of renaming.
    async fn put_aside(&self, _dir: &Path) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Probes this host's capabilities for this isolation; the returned function blocks.
    fn probe(&self) -> Probe;
}

/// The images of a host. Knows nothing of the kernels that use them.
#[async_trait::async_trait(?Send)]
pub trait Images {
    /// The folder into which images are built.
    fn folder(&self) -> PathBuf;

    /// All images, without the kernels that use them.
    ///
    /// # Errors
    /// `internal`.
    async fn list(&self) -> Result<Vec<ImageInfo>>;

    /// The version that begins with these digits.
    ///
    /// # Errors
    /// `notFound`, `invalidArgument` if there are several.
    fn resolve(&self, version: &str) -> Result<String>;

    /// Protects an image from removal, or no more. Returns its version.
    ///
    /// # Errors
    /// As [`Self::resolve`], and those of writing.
    fn pin(&self, version: &str, is_pinned: bool) -> Result<String>;

    /// The version of the usable image that begins with these digits, of the newest one if there are none.
    ///
    /// # Errors
    /// `unsupported` with what is wrong with it; `invalidArgument` if there are several.
    fn usable(&self, version: &str) -> Result<String>;

    /// Makes an image current once workers of each of those shapes start from it. Returns its version.
    ///
    /// # Errors
    /// `unsupported` if it cannot be used, `unavailable` with the reason why no worker starts.
    async fn rotate(&self, version: &str, shapes: &[Shape]) -> Result<String>;

    /// Removes an image. The caller has checked that no kernel uses it, without a pause in between.
    ///
    /// # Errors
    /// `conflict` for the current and for a pinned image; those of removing.
    async fn remove(&self, version: &str) -> Result<()>;
}

/// A handle to one worker.
#[async_trait::async_trait(?Send)]
pub trait WorkerHandle {
    /// Its id.
    fn id(&self) -> WorkerId;

    /// Its record for a later daemon.
    fn record(&self) -> WorkerRecord;

    /// Its record once it is the worker of the kernel with these files.
    fn record_for(&self, _home: &KernelHome) -> WorkerRecord {
        self.record()
    }

    /// Stops what a worker runs in while none of its code runs: it is warm, or its processes are suspended.
    /// Without effect where that saves nothing.
    ///
    /// # Errors
    /// If it cannot be stopped. It may be stopped all the same.
    async fn park(&self) -> Result<()> {
        Ok(())
    }

    /// Ends that stop, also one of a former daemon. Without effect if the worker is not stopped.
    ///
    /// # Errors
    /// If it cannot be continued.
    async fn unpark(&self) -> Result<()> {
        Ok(())
    }

    /// The virtual machine that it runs in, if it does.
    fn machine(&self) -> Option<Machine> {
        None
    }

    /// Saves a parked worker's memory in the kernel's folder, for a launch with the same identity. The caller ends the
    /// worker next, or continues it, which discards the saved memory. Returns why all memory in use was written, if it was,
    /// and not only what was changed.
    ///
    /// # Errors
    /// `unsupported` for the isolation; those of saving: nothing is saved then.
    async fn save_memory(&self, _identity: &WorkerIdentity) -> Result<Option<String>> {
        Err(Error::unsupported("the memory of processes cannot be saved")
            .reason("suspend")
            .hint("suspend without --release"))
    }

    /// Checks that the running worker's machine can be saved; stops nothing.
    ///
    /// # Errors
    /// `unsupported`, as [`Self::save_running`].
    fn check_saves_running(&self) -> Result<()> {
        Err(Error::unsupported("processes have no machine of their own").reason("fork"))
    }

    /// Saves a running worker's machine, whose processes are suspended, for launches of other kernels' workers. It runs
    /// on, also after a failure.
    ///
    /// # Errors
    /// `unsupported` for the isolation; those of saving.
    async fn save_running(&self, _worker: &WorkerIdentity) -> Result<SavedMachine> {
        Err(Error::unsupported("processes have no machine of their own").reason("fork"))
    }

    /// Whether the worker is stopped, and answers nothing.
    fn is_parked(&self) -> bool {
        false
    }

    /// Whether what a stopped worker runs in answers in that time. Its code is not asked.
    async fn answers_parked(&self, _within: Duration) -> bool {
        true
    }

    /// Its process id on this host, for display; `None` if it has no process of its own.
    fn process_id(&self) -> Option<u32>;

    /// Kills the worker with everything inside.
    fn kill(&self);

    /// Waits until the worker has ended.
    async fn exited(&self);

    /// Whether it was ended because what it runs in did not answer.
    fn was_silent(&self) -> bool {
        false
    }

    /// Removes its leftovers on the host. Called after its end.
    async fn clean_up(&self);

    /// Prepares a kernel's files for a warm worker, which goes on if it was stopped. `home` is `None` if the kernel adopts the worker's own folder.
    ///
    /// # Errors
    /// `unsupported` where a file system refuses it; those of the link.
    async fn bind_sources(
        &self,
        link: &WorkerLink,
        home: Option<&KernelHome>,
        mounts: &[HostMount],
    ) -> Result<BoundSources>;

    /// Mounts a host path in the live worker.
    ///
    /// # Errors
    /// `unsupported` if the isolation has no such mounts; those of the mount.
    async fn attach_mount(&self, link: &WorkerLink, mount: &HostMount) -> Result<()>;

    /// Removes a mount.
    ///
    /// # Errors
    /// `notFound` if nothing is mounted there, `busy` if it is in use.
    async fn detach_mount(&self, link: &WorkerLink, inside: &Path) -> Result<()>;
}

/// The drivers of this host.
#[derive(Clone, Default)]
pub struct Drivers(Vec<Rc<dyn IsolationDriver>>);

impl Drivers {
    /// Those drivers.
    pub fn new(drivers: Vec<Rc<dyn IsolationDriver>>) -> Drivers {
        Drivers(drivers)
    }

    /// The driver of an isolation.
    ///
    /// # Errors
    /// `unsupported` if this build or host has none.
    pub fn of(&self, isolation: Isolation) -> Result<&Rc<dyn IsolationDriver>> {
        self.0.iter().find(|driver| driver.isolation() == isolation).ok_or_else(|| {
            Error::unsupported("this build runs kernels as processes only")
                .reason("isolation")
                .hint("use --isolation process")
        })
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Rc<dyn IsolationDriver>> {
        self.0.iter()
    }
}
