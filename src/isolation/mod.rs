//! How workers run: one driver per isolation, one handle per worker.
//!
//! ```text
//!  supervisor ── check, launch, adopt, sweep ──▶ IsolationDriver ── process/    a sandboxed process tree of this host
//!             ◀── Connector, WorkerHandle ──────┘
//! ```
//!
//! The supervisor knows kernels, shapes and records; a driver knows processes, folders, mounts and control groups. A driver
//! never decides which kernel gets a worker, and the supervisor never looks into a record.

pub mod process;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;

use crate::catalog::{EngineInfo, Entry, Inspected};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::core::info::Ability;
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;
use crate::core::spec::{Isolation, KernelLimits, KernelSpec, Net};
use crate::link::binding::{BoundFolder, BoundMount};
use crate::link::connector::Connector;
use crate::link::handshake::WorkerIdentity;
use crate::link::host::WorkerLink;
use crate::workspace::{Workspace, WorkspacePaths};

/// What a worker must be like before it is a kernel's. Equal shapes share warm workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// How it runs.
    pub isolation: Isolation,
    /// Its engine.
    pub engine: EngineName,
    /// Its bounds.
    pub limits: KernelLimits,
    /// Its network.
    pub net: Net,
    /// The user of this host whose rights it has.
    pub uid: u32,
    /// What else the driver cannot change later, in the driver's own words.
    pub variant: String,
}

/// Where a kernel's files are on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelHome {
    /// The kernel's folder.
    pub dir: PathBuf,
    /// The database of its engine's state.
    pub engine_db: PathBuf,
    /// Its own workspace, a path within `dir`.
    pub own_workspace: PathBuf,
    /// The workspace of another kernel that it works in, if it shares one.
    pub shared_workspace: Option<PathBuf>,
}

/// A path of this host that a kernel may see. Its source was checked and holds no symbolic links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMount {
    /// Where the kernel sees it.
    pub inside: PathBuf,
    /// The path on this host.
    pub source: PathBuf,
    /// Whether the kernel may change it.
    pub writable: bool,
}

/// What the catalog keeps of a worker so that a later daemon can find it: a JSON object that only the driver reads.
pub type WorkerRecord = String;

/// A worker that is to be launched.
pub struct NewWorker<'a> {
    /// What it must be like.
    pub shape: &'a Shape,
    /// What both ends of the link prove.
    pub identity: &'a WorkerIdentity,
    /// The kernel's name, as the code inside sees it.
    pub name: KernelName,
    /// Where its files are.
    pub home: &'a KernelHome,
    /// What its kernel was given.
    pub mounts: Vec<HostMount>,
    /// How the state that it loads came to be, and its generation.
    pub origin: (OriginKind, u32),
    /// Life without a daemon.
    pub orphan_grace: Duration,
    /// Whether it waits for its kernel in the warm pool.
    pub is_warm: bool,
}

/// Stores what a later daemon must know of a worker: before the worker exists, and once more as soon as it does.
pub type Recorder<'a> = dyn Fn(WorkerRecord) -> LocalBoxFuture<'a, Result<()>> + 'a;

/// A worker that runs.
pub struct Launched {
    /// The way to its init.
    pub connector: Rc<dyn Connector>,
    /// The worker itself.
    pub handle: Rc<dyn WorkerHandle>,
}

/// What a warm worker is sent of a kernel's files: descriptors that it needs went ahead.
#[derive(Debug, Default)]
pub struct BoundSources {
    /// The kernel's folder; `None`: the worker's own.
    pub folder: Option<BoundFolder>,
    /// Folders that no mount may show.
    pub protected: Vec<PathBuf>,
    /// What the kernel was given.
    pub mounts: Vec<BoundMount>,
}

/// Opens a kernel's files. Blocks.
pub type OpenWorkspace = Box<dyn FnOnce() -> Result<Box<dyn Workspace>> + Send>;

/// A kernel's engine state while no worker has it open. Its calls block.
pub trait EngineState: Send {
    /// Replaces all of it: what the kernel's next worker loads.
    ///
    /// # Errors
    /// Those of writing; the former state is there then.
    fn replace(&self, info: &EngineInfo, entries: &mut dyn Iterator<Item = Entry>) -> Result<()>;

    /// Looks through it for damage.
    ///
    /// # Errors
    /// `corrupt`.
    fn inspect(&self) -> Result<Inspected>;
}

/// Finds out what a host can do. Blocks.
pub type Probe = Box<dyn FnOnce() -> Vec<Ability> + Send>;

/// One way of running workers.
#[async_trait::async_trait(?Send)]
pub trait IsolationDriver {
    /// Which isolation it is.
    fn isolation(&self) -> Isolation;

    /// Checks that this host can run such a worker for a user, and says what shape it has.
    ///
    /// # Errors
    /// `unsupported` with a hint, `invalidArgument`.
    fn check(&self, spec: &KernelSpec, uid: u32) -> Result<Shape>;

    /// Launches a worker. `record` is awaited before the worker exists and again before it can run anything: so none is left
    /// that no catalog knows. What was launched has ended when this fails.
    ///
    /// # Errors
    /// Those of `record`, and why it could not start.
    async fn launch(&self, new: NewWorker<'_>, record: &Recorder<'_>) -> Result<Launched>;

    /// Finds a worker that a former daemon launched.
    ///
    /// # Errors
    /// `lost` if it has ended, `corrupt` for a record that is none of this driver's.
    fn adopt(&self, worker: WorkerId, record: &str) -> Result<Launched>;

    /// Ends a recorded worker that could not be adopted, if it still is the one that was recorded, and removes what it left.
    async fn end_orphan(&self, worker: WorkerId, record: &str);

    /// Whether a recorded worker came to exist: its record is not the one that was made before.
    fn existed(&self, record: &str) -> bool;

    /// A way to a kernel's files, to be opened beside the event loop.
    fn workspace(&self, paths: WorkspacePaths) -> OpenWorkspace;

    /// A kernel's engine state, while no worker has it open.
    fn engine_state(&self, home: &KernelHome) -> Box<dyn EngineState>;

    /// Copies a folder of this host into a new kernel's workspace, as that user.
    ///
    /// # Errors
    /// `invalidArgument` if it is no folder, `unsupported` for another user's, `refused` if it has more than `most_bytes`.
    async fn fill_workspace(&self, workspace: &Path, from: &Path, uid: u32, most_bytes: u64) -> Result<()>;

    /// How many components of a mount's path must be made in a workspace, which may hold the work of untrusted code.
    fn missing_components(&self, workspace: &Path, inside: &Path) -> u32;

    /// Removes the last `made` components of a mount's path from a workspace, as far as they are empty.
    fn remove_components(&self, workspace: &Path, inside: &Path, made: u32);

    /// Removes what workers left on the host that no record in `known` names.
    fn sweep(&self, known: &[WorkerId]);

    /// Finds out what this host can do for this isolation; the returned function blocks.
    fn probe(&self) -> Probe;
}

/// One worker.
#[async_trait::async_trait(?Send)]
pub trait WorkerHandle {
    /// Which worker.
    fn id(&self) -> WorkerId;

    /// What a later daemon must know of it.
    fn record(&self) -> WorkerRecord;

    /// Its process on this host, for people who look at it; `None` where there is none of its own.
    fn process_id(&self) -> Option<u32>;

    /// Ends it at once, with everything inside.
    fn kill(&self);

    /// Waits for its end.
    async fn exited(&self);

    /// Removes what it left on the host. After its end.
    async fn clean_up(&self);

    /// Makes a kernel's files ready for a warm worker. `home`: none where the kernel adopts the worker's own folder.
    ///
    /// # Errors
    /// `unsupported` where a file system refuses it; those of the link.
    async fn bind_sources(
        &self,
        link: &WorkerLink,
        home: Option<&KernelHome>,
        mounts: &[HostMount],
    ) -> Result<BoundSources>;

    /// Mounts a path of this host in the live worker.
    ///
    /// # Errors
    /// `unsupported` where the isolation has no such mounts; those of the mount.
    async fn attach_mount(&self, link: &WorkerLink, mount: &HostMount) -> Result<()>;

    /// Takes a mount away.
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
