//! Services that the supervisor's modules share: configuration, databases, events, audit, metrics. Knows no kernel and
//! no worker.

pub mod actor;
pub mod audit;
pub(crate) mod data_sync;
pub mod environment;
pub mod events;
pub(crate) mod metrics;
pub(crate) mod operation_queue;
pub(crate) mod prepared_copies;
pub(crate) mod reserve;
pub(crate) mod signing;
pub mod upkeep;
pub(crate) mod venv;
mod worker_rights;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::catalog::CatalogHandle;
use crate::config::Config;
use crate::core::engine::EngineName;
use crate::core::error::{DISK_FULL, Error, Result};
use crate::core::ids::{HostId, KernelId};
use crate::core::info::HostInfo;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::pool::Rules;
use crate::core::spec::{NEVER_SHOWN, WORKSPACE};
use crate::isolation::{Drivers, KernelHome};
use crate::store::StoreHandle;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::Auditing;
use crate::supervisor::host::environment::Environment;
use crate::supervisor::host::events::Events;
use crate::supervisor::host::metrics::Metrics;
use crate::supervisor::host::prepared_copies::PreparedCopies;
use crate::supervisor::host::reserve::Reserve;
use crate::supervisor::host::upkeep::Upkeep;
use crate::sys;

/// The services that kernels share. They need no lock, since one thread owns them.
pub struct Host {
    /// The configuration.
    pub config: Config,
    /// The host as the daemon found it.
    pub environment: Environment,
    /// How workers can run here.
    pub drivers: Drivers,
    /// The databases.
    pub catalog: CatalogHandle,
    /// Objects.
    pub store: StoreHandle,
    /// The event log.
    pub events: Rc<Events>,
    /// The capabilities of the file system that holds the workspaces.
    pub files: crate::workspace::FsAbilities,
    /// Counters and timings.
    pub metrics: Metrics,
    pub(crate) reserve: Reserve,
    /// The operations on groups.
    pub(crate) group_queue: Rc<operation_queue::OperationQueue>,
    /// Watches of kernels' files.
    pub(crate) file_watches: std::sync::Arc<tokio::sync::Semaphore>,
    /// The key that signs, since its first use.
    pub(crate) key: tokio::sync::OnceCell<std::sync::Arc<signing::HostKey>>,
    /// Runs git for groups, since its first use.
    pub(crate) git: tokio::sync::OnceCell<Rc<crate::git::Git>>,
    /// Runs programs of data sources, since its first use.
    pub(crate) programs: tokio::sync::OnceCell<Rc<crate::programs::Programs>>,
    /// Members of restores that could not be ended: kernels among them stay held.
    pub(crate) parked: RefCell<HashMap<crate::core::ids::GroupId, Vec<Box<dyn std::any::Any>>>>,
    /// Folders without a git repository, by content.
    pub(crate) barren: std::sync::Arc<std::sync::Mutex<crate::workspace::Barren>>,
    pub(crate) prepared: PreparedCopies,
    pub(crate) data_sync: std::sync::Arc<data_sync::DataSync>,
    pub(crate) auditing: Auditing,
    /// State of the upkeep.
    pub upkeep: Upkeep,
    stopping: Cell<bool>,
    clients: Cell<usize>,
    clients_of: RefCell<HashMap<u32, usize>>,
    subscriptions_of: RefCell<HashMap<u32, usize>>,
    used_at_ms: Cell<i64>,
    /// Cloned by every kernel in memory.
    pub(crate) remembered: Rc<()>,
}

impl Host {
    pub(crate) fn new(
        config: Config,
        environment: Environment,
        drivers: Drivers,
        catalog: CatalogHandle,
        store: StoreHandle,
        events: Rc<Events>,
    ) -> Rc<Self> {
        let reserve = Reserve::new(environment.data.join("reserve"));
        let prepared = PreparedCopies::new(environment.data.join("prepared"));
        let data_sync = data_sync::DataSync::new(&environment.data);
        let kernels = catalog.kernel_files(KernelId::from_bytes([0; 16])).dir;
        let files = crate::workspace::abilities(kernels.parent().unwrap_or(&kernels));
        Rc::new(Host {
            config,
            environment,
            drivers,
            catalog,
            store,
            events,
            files,
            metrics: Metrics::new(),
            reserve,
            group_queue: Rc::default(),
            file_watches: std::sync::Arc::new(tokio::sync::Semaphore::new(limits::FILE_WATCHES_IN_ALL)),
            key: tokio::sync::OnceCell::new(),
            git: tokio::sync::OnceCell::new(),
            programs: tokio::sync::OnceCell::new(),
            parked: RefCell::default(),
            barren: std::sync::Arc::default(),
            prepared,
            data_sync,
            auditing: Auditing::default(),
            upkeep: Upkeep::default(),
            stopping: Cell::new(false),
            clients: Cell::new(0),
            clients_of: RefCell::default(),
            subscriptions_of: RefCell::default(),
            used_at_ms: Cell::new(sys::clock::now_ms()),
            remembered: Rc::default(),
        })
    }

    /// The number of kernels in memory, including removed kernels that are still referenced.
    pub(crate) fn remembered(&self) -> usize {
        Rc::strong_count(&self.remembered) - 1
    }

    /// Writes a record of something that already happened. On a full disk it frees prepared copies first, then the disk
    /// reserve.
    ///
    /// # Errors
    /// Those of `write`.
    pub(crate) async fn making_room<T>(&self, mut write: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        let is_full = |done: &Result<T>| done.as_ref().is_err_and(|error| error.reason == DISK_FULL);
        let mut done = write().await;
        if is_full(&done) && self.prepared.discard_all().await {
            done = write().await;
        }
        if is_full(&done) && self.reserve.release() {
            done = write().await;
        }
        done
    }

    /// Whether new work would use the room reserved for records of finished work.
    pub(crate) fn disk_is_full(&self) -> bool {
        if self.reserve.is_spent() {
            self.reserve.keep();
        }
        self.reserve.is_spent()
    }

    /// Bytes still free on the data's file system, if the host reports them.
    pub(crate) fn free_bytes(&self) -> Option<u64> {
        self.reserve.free_bytes()
    }

    /// Files that can still be created there; `None` if the file system does not count them.
    pub(crate) fn free_files(&self) -> Option<u64> {
        self.reserve.free_files()
    }

    /// The error for [`disk_is_full`](Self::disk_is_full).
    pub(crate) fn full() -> Error {
        Error::busy("no room on the disk that holds ryokan's data").reason(DISK_FULL).hint(
            "free space on the device or raise the quota; `ryokan rm` and `ryokan gc` free space, and so does code that \
                 deletes files of its kernel: if that is refused, too, after `ryokan stop` and `ryokan start`; `ryokan \
                 du` shows what takes the most room",
        )
    }

    /// Milliseconds since 1970.
    pub fn now_ms(&self) -> i64 {
        sys::clock::now_ms()
    }

    /// Random bytes.
    pub fn random<const N: usize>(&self) -> [u8; N] {
        sys::random::bytes()
    }

    /// This host's identity.
    pub fn id(&self) -> HostId {
        self.catalog.host_id()
    }

    /// This host's description for clients.
    pub fn info(&self) -> HostInfo {
        HostInfo {
            id: self.id(),
            name: self.environment.host_name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            engines: self.environment.engines.clone(),
            pid: self.environment.pid,
        }
    }

    /// The daemon as the actor of its own operations.
    pub(crate) fn own_actor(&self) -> Actor {
        Actor { uid: nix::unistd::geteuid().as_raw(), client: "ryokand".into(), lease: Vec::new() }
    }

    /// Whether the daemon is ending.
    pub fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    pub(crate) fn set_stopping(&self) {
        self.stopping.set(true);
    }

    /// Counts a client of `uid`; the returned guard uncounts it.
    ///
    /// # Errors
    /// `busy` if the host's or the user's limit is reached.
    pub fn client(self: &Rc<Self>, uid: u32) -> Result<ClientGuard> {
        let (all, most) = (self.clients.get(), self.config.limits.clients);
        if all >= most {
            return Err(Error::busy(format!("this daemon has {all} clients already"))
                .reason("clients")
                .hint("try again when some of them have left, or raise limits.clients in the configuration"));
        }
        let mut clients_of = self.clients_of.borrow_mut();
        let own = clients_of.entry(uid).or_default();
        if *own >= self.config.limits.clients_per_user {
            return Err(Error::busy(format!("you have {own} clients connected already"))
                .reason("clients_per_user")
                .hint("close some of them, or have limits.clients_per_user raised in the configuration"));
        }
        *own += 1;
        self.clients.set(all + 1);
        self.used_at_ms.set(self.now_ms());
        Ok(ClientGuard { host: Rc::clone(self), uid })
    }

    /// Counts an event subscription of `uid`; the returned guard uncounts it.
    ///
    /// # Errors
    /// `busy` if the user's limit is reached.
    pub fn subscription(self: &Rc<Self>, uid: u32) -> Result<SubscriptionGuard> {
        let mut subscriptions_of = self.subscriptions_of.borrow_mut();
        let own = subscriptions_of.entry(uid).or_default();
        if *own >= limits::SUBSCRIPTIONS_PER_USER {
            return Err(Error::busy(format!("you have {own} event subscriptions already"))
                .reason("subscriptions_per_user")
                .hint("close some of the clients that follow events"));
        }
        *own += 1;
        Ok(SubscriptionGuard { host: Rc::clone(self), uid })
    }

    /// Clients connected now.
    pub fn clients(&self) -> usize {
        self.clients.get()
    }

    /// Milliseconds without a connected client or any use.
    pub(crate) fn idle_ms(&self, in_use: bool) -> i64 {
        if self.clients.get() > 0 || in_use {
            self.used_at_ms.set(self.now_ms());
        }
        self.now_ms() - self.used_at_ms.get()
    }

    /// The locations of a kernel's files, as its worker needs them.
    pub(crate) fn home(&self, kernel: KernelId, workspace_of: Option<KernelId>) -> KernelHome {
        let files = self.catalog.kernel_files(kernel);
        let own_workspace = files.workspace.strip_prefix(&files.dir).unwrap_or("workspace".as_ref()).to_owned();
        let shared_workspace = workspace_of.map(|owner| self.catalog.kernel_files(owner).workspace);
        KernelHome { dir: files.dir, engine_db: files.engine_db, own_workspace, shared_workspace }
    }

    /// A kernel's label in events: its name, prefixed with the owner on a system-wide daemon, where names are unique
    /// per owner only.
    pub fn event_name(&self, uid: u32, name: &KernelName) -> String {
        if self.environment.system_wide { format!("{uid}/{name}") } else { name.to_string() }
    }

    /// Whether an error says that a host path is missing or no longer allowed, so that the engine is not at fault.
    pub(crate) fn is_mount_refused(error: &Error) -> bool {
        ["source_gone", "source_moved", "source", "deny_paths", "own_folder"].contains(&error.reason.as_str())
    }

    /// Checks again that a host path is allowed and still resolves to `recorded`.
    ///
    /// # Errors
    /// As [`Host::check_source`], and `refused` if the path resolves elsewhere.
    pub fn revalidate_source(&self, uid: u32, source: &Path, recorded: Option<&Path>) -> Result<PathBuf> {
        let real = self.check_source(uid, source)?;
        if recorded.is_some_and(|recorded| recorded != real) {
            // The new target is not named: another user's kernel must not learn which paths exist.
            let message = format!("{} leads elsewhere than when it was granted", source.display());
            return Err(Error::refused(message).reason("source_moved"));
        }
        Ok(real)
    }

    /// Checks that a kernel of `uid` may use a host path; returns the path without symbolic links.
    ///
    /// # Errors
    /// `invalidArgument`, `notFound`, `refused` with the rule.
    pub fn check_source(&self, uid: u32, source: &Path) -> Result<PathBuf> {
        let shown = source.display();
        if !source.is_absolute() {
            return Err(Error::invalid(format!("source {shown} must be absolute")));
        }
        // The daemon must not reveal which paths exist to another user: the worker opens the path with that user's
        // rights.
        let real = match source.canonicalize() {
            Ok(real) => real,
            Err(_) if uid != nix::unistd::geteuid().as_raw() => source.to_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::not_found(format!("there is no {shown} on this host")).reason("source_gone"));
            }
            Err(error) => return Err(Error::refused(format!("{shown}: {error}")).reason("source")),
        };
        self.check_real_source(uid, source, real)
    }

    /// As [`Self::check_source`], for a path that need not exist: its directory must, unless it is in one of `made`, which
    /// will be made.
    ///
    /// # Errors
    /// As [`Self::check_source`].
    pub(crate) fn check_new_source(&self, uid: u32, source: &Path, made: &[PathBuf]) -> Result<PathBuf> {
        match self.check_source(uid, source) {
            Err(error) if error.reason == "source_gone" => {
                let real = resolve_missing(source);
                let is_placed = |real: &PathBuf| {
                    real.parent()
                        .is_some_and(|folder| folder.is_dir() || made.iter().any(|one| folder.starts_with(one)))
                };
                self.check_real_source(uid, source, real.filter(is_placed).ok_or(error)?)
            }
            found => found,
        }
    }

    /// Applies the rules for host paths to a resolved path.
    pub(crate) fn check_real_source(&self, uid: u32, source: &Path, real: PathBuf) -> Result<PathBuf> {
        let shown = source.display();
        if real.to_str().is_none() {
            return Err(Error::refused(format!("{shown} leads to a path that is not UTF-8")).reason("source"));
        }
        if let Some(why) = self.path_refusal(&real, uid) {
            return Err(Error::refused(format!("{shown} may not be given to a kernel")).reason("deny_paths").hint(why));
        }
        if let Some(own) = NEVER_SHOWN.iter().find(|own| real.starts_with(own)) {
            let message = format!("{shown} is in {own}, which is the host's own view of itself");
            return Err(Error::refused(message).reason("own_folder").hint("give a path outside of it"));
        }
        if let Some(own) = self.environment.protected.iter().find(|own| real.starts_with(own)) {
            return Err(
                Error::refused(format!("{shown} is ryokan's own folder {}", own.display())).reason("own_folder")
            );
        }
        Ok(real)
    }

    /// Whether code of this user's kernels has the rights of a resolved host path's owner.
    pub(crate) fn maps_owner(&self, uid: u32, real: &Path) -> bool {
        let is_roots = uid == 0 && nix::unistd::geteuid().is_root();
        is_roots && self.config.sandbox.map_owner.iter().any(|path| real.starts_with(path))
    }

    /// Why a kernel of this user may not use this resolved host path; `None` if it may.
    pub(crate) fn path_refusal(&self, real: &Path, uid: u32) -> Option<String> {
        let is_own = uid == nix::unistd::geteuid().as_raw();
        let home = if is_own { self.environment.home.clone() } else { home_of(uid) };
        let sandbox = &self.config.sandbox;
        let denied = sandbox.deny_paths.refusal("deny_paths", real, home.as_deref());
        let is_root = nix::unistd::geteuid().is_root();
        denied.or_else(|| {
            let rules = &sandbox.root_deny_paths;
            is_root.then(|| rules.refusal("root_deny_paths", real, home.as_deref())).flatten()
        })
    }

    /// The first configured system path inside the workspace.
    pub(crate) fn path_within_workspace(&self) -> Option<&Path> {
        let paths = &self.config.sandbox.system_paths;
        paths.iter().find(|path| path.starts_with(WORKSPACE)).map(PathBuf::as_path)
    }

    /// The rules of an engine's pools. Pools are off where the engine cannot run, and where a configured system path
    /// lies inside the workspace: a workspace mounted later would hide it.
    pub(crate) fn pool_rules(&self, engine: EngineName) -> Rules {
        match self.environment.engines.contains(&engine) && self.path_within_workspace().is_none() {
            true => self.config.pool.of(engine),
            false => Rules { pool_size: 0, min_idle: 0, ..Rules::default() },
        }
    }
}

/// A connected client.
pub struct ClientGuard {
    host: Rc<Host>,
    uid: u32,
}

impl Drop for ClientGuard {
    fn drop(&mut self) {
        let host = &self.host;
        if let Entry::Occupied(mut own) = host.clients_of.borrow_mut().entry(self.uid) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
        host.clients.set(host.clients.get() - 1);
        host.used_at_ms.set(host.now_ms());
    }
}

/// An event subscription of a user.
pub struct SubscriptionGuard {
    host: Rc<Host>,
    uid: u32,
}

impl Drop for SubscriptionGuard {
    fn drop(&mut self) {
        if let Entry::Occupied(mut own) = self.host.subscriptions_of.borrow_mut().entry(self.uid) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }
}

fn home_of(uid: u32) -> Option<PathBuf> {
    nix::unistd::User::from_uid(uid.into()).ok().flatten().map(|user| user.dir)
}

/// A path whose last components may be missing, without symbolic links in those that exist. `None` for a link that leads
/// nowhere: what is written there would come to be elsewhere.
pub(crate) fn resolve_missing(path: &Path) -> Option<PathBuf> {
    let (mut at, mut rest) = (path, Vec::new());
    loop {
        if let Ok(real) = at.canonicalize() {
            return Some(rest.into_iter().rev().fold(real, |real, name| real.join(name)));
        }
        if std::fs::symlink_metadata(at).is_ok() {
            return None;
        }
        rest.push(at.file_name()?);
        at = at.parent()?;
    }
}
