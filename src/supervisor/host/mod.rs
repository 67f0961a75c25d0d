//! What all kernels of a daemon share, and the list of them.

pub mod audit;
pub mod environment;
pub mod events;
pub(crate) mod metrics;
pub(crate) mod reserve;

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::Semaphore;

use super::kernel::Kernel;
use crate::catalog::CatalogHandle;
use crate::config::Config;
use crate::core::engine::EngineName;
use crate::core::error::{DISK_FULL, Error, Result};
use crate::core::ids::{HostId, KernelId};
use crate::core::info::{Ability, HostInfo};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::pool::Rules;
use crate::sandbox::plan::WORKSPACE;
use crate::store::StoreHandle;
use crate::supervisor::checkpoint::prepared_copies::Spares;
use crate::supervisor::host::audit::Auditing;
use crate::supervisor::host::environment::Environment;
use crate::supervisor::host::events::Events;
use crate::supervisor::host::metrics::Metrics;
use crate::supervisor::host::reserve::Reserve;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::maintenance::Upkeep;
use crate::supervisor::registry::idempotency::Keys;
use crate::supervisor::workers::admission::{Admission, Bounds, Taken};
use crate::supervisor::workers::memory_pressure::Pressure;
use crate::supervisor::workers::pool::Pool;
use crate::supervisor::workers::reserved::Promises;
use crate::supervisor::workers::start_queue::Turns;
use crate::supervisor::workers::worker::{self, Workers};
use crate::sys;

/// The services that kernels share. Nothing here is locked: one thread holds it.
pub struct Host {
    /// The configuration.
    pub config: Config,
    /// The host as the daemon found it.
    pub environment: Environment,
    /// The databases.
    pub catalog: CatalogHandle,
    /// Objects.
    pub store: StoreHandle,
    /// The event log.
    pub events: Rc<Events>,
    /// What the file system of the workspaces can do.
    pub files: crate::workspace::FsAbilities,
    /// What the workers share.
    pub workers: Workers,
    /// Workers that are ready before anybody comes.
    pub pool: Pool,
    /// Whether memory is short.
    pub pressure: Pressure,
    /// What is counted and timed.
    pub metrics: Metrics,
    pub(super) by_id: RefCell<HashMap<KernelId, Rc<Kernel>>>,
    pub(super) by_name: RefCell<BTreeMap<(u32, KernelName), KernelId>>,
    /// Names of sockets that were published beside the kernels' own.
    pub(crate) published: RefCell<std::collections::HashSet<(u32, String)>>,
    pub(super) creating: RefCell<BTreeMap<(u32, KernelName), ()>>,
    /// Interpreters that were found where all kernels see them: to look for one follows its links.
    pub(super) interpreters: RefCell<BTreeMap<EngineName, PathBuf>>,
    /// Called when a kernel's door opens (`true`) or closes: whoever serves its socket.
    pub(super) doors: RefCell<Option<DoorKeeper>>,
    pub(super) reserve: Reserve,
    pub(super) spares: Spares,
    pub(super) promises: Promises,
    pub(super) turns: Turns,
    pub(super) keys: Keys,
    pub(super) auditing: Auditing,
    /// What upkeep needs to remember.
    pub upkeep: Upkeep,
    /// Places for kernels' files that are being written or read.
    pub(super) bundles: Arc<Semaphore>,
    stopping: Cell<bool>,
    clients: Cell<usize>,
    clients_of: RefCell<HashMap<u32, usize>>,
    used_at_ms: Cell<i64>,
    /// Every kernel in memory holds it.
    pub(super) remembered: Rc<()>,
}

/// Serves or closes a kernel's socket.
pub type DoorKeeper = Box<dyn Fn(&Rc<Kernel>, bool)>;

impl Host {
    pub(super) fn new(
        config: Config,
        environment: Environment,
        catalog: CatalogHandle,
        store: StoreHandle,
        events: Rc<Events>,
    ) -> Rc<Self> {
        let limits = &config.limits;
        let admission = Admission::new(Bounds::of_host(limits), Bounds::of_user(limits));
        let workers = Workers::new(admission, catalog.clone(), catalog.host_id(), environment.cgroup_base.clone());
        let reserve = Reserve::new(environment.data.join("reserve"));
        // Of a daemon that serves one user, he may have all.
        let share = if environment.system_wide { limits.worker_starts.div_ceil(2) } else { limits.worker_starts };
        let turns = Turns::new(limits.worker_starts, share, limits.worker_wait);
        let spares = Spares::new(environment.data.join("prepared"));
        let kernels = catalog.kernel_files(KernelId::from_bytes([0; 16])).dir;
        let files = crate::workspace::abilities(kernels.parent().unwrap_or(&kernels));
        Rc::new(Host {
            config,
            environment,
            catalog,
            store,
            events,
            files,
            workers,
            pool: Pool::new(),
            pressure: Pressure::default(),
            metrics: Metrics::new(),
            by_id: RefCell::default(),
            by_name: RefCell::default(),
            creating: RefCell::default(),
            published: RefCell::default(),
            interpreters: RefCell::default(),
            doors: RefCell::new(None),
            reserve,
            spares,
            promises: Promises::default(),
            turns,
            keys: Keys::default(),
            auditing: Auditing::default(),
            upkeep: Upkeep::default(),
            bundles: Arc::new(Semaphore::new(limits::BUNDLES_CONCURRENT)),
            stopping: Cell::new(false),
            clients: Cell::new(0),
            clients_of: RefCell::default(),
            used_at_ms: Cell::new(sys::clock::now_ms()),
            remembered: Rc::default(),
        })
    }

    /// How many kernels are in memory, those that are removed and that somebody still holds included.
    pub(super) fn remembered(&self) -> usize {
        Rc::strong_count(&self.remembered) - 1
    }

    /// Writes what must be written down because it has happened: on a full disk, in the place of what can be made again, or with
    /// what was kept back for that.
    ///
    /// # Errors
    /// Those of `write`.
    pub(super) async fn making_room<T>(&self, mut write: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        let is_full = |done: &Result<T>| done.as_ref().is_err_and(|error| error.reason == DISK_FULL);
        let mut done = write().await;
        if is_full(&done) && self.spares.discard_all().await {
            done = write().await;
        }
        if is_full(&done) && self.reserve.release() {
            done = write().await;
        }
        done
    }

    /// Whether new work would take what is kept back for what has happened already.
    pub(super) fn disk_is_full(&self) -> bool {
        if self.reserve.is_spent() {
            self.reserve.keep();
        }
        self.reserve.is_spent()
    }

    /// Bytes that may still be written where the data is, if the host says.
    pub(super) fn free_bytes(&self) -> Option<u64> {
        self.reserve.free_bytes()
    }

    /// Files that may still be made there; `None`: the file system does not count.
    pub(super) fn free_files(&self) -> Option<u64> {
        self.reserve.free_files()
    }

    /// What is said where [`disk_is_full`](Self::disk_is_full).
    pub(super) fn full() -> Error {
        Error::busy("no room on the disk that holds ryokan's data")
            .reason(DISK_FULL)
            .hint("free space on the device or raise the quota, then try again")
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

    /// The host as it introduces itself.
    pub fn info(&self) -> HostInfo {
        HostInfo {
            id: self.id(),
            name: self.environment.host_name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            engines: self.environment.engines.clone(),
        }
    }

    /// Finds out what this host can do.
    ///
    /// # Errors
    /// `internal` if the probe panics.
    pub async fn abilities(&self) -> Result<Vec<Ability>> {
        let (worker, data) = (self.environment.worker.path().to_owned(), self.environment.data.clone());
        let config = self.config.clone();
        let found = tokio::task::spawn_blocking(move || environment::abilities(&worker, &config, &data)).await;
        found.map_err(|error| Error::internal(error.to_string()))
    }

    /// The daemon itself, as it is named where it does something of its own accord.
    pub(super) fn own_actor(&self) -> Actor {
        Actor { uid: nix::unistd::geteuid().as_raw(), client: "ryokand".into(), lease: Vec::new() }
    }

    /// Whether one more kernel may have a worker: slots give way to it.
    ///
    /// # Errors
    /// `busy`: what to wait for. `unsupported` if its interpreter is gone.
    pub(super) fn admit_worker(&self, kernel: &Kernel) -> Result<()> {
        let (admission, one) = (&self.workers.admission, Taken::one(kernel.spec.limits.memory_bytes));
        worker::interpreter(self, kernel.spec.engine, kernel.spec.paths.iter().map(|allowed| &*allowed.path))?;
        admission.admit(kernel.uid, one)?;
        if admission.fits(one, self.gives_way()) { Ok(()) } else { Err(admission.no_room(one)) }
    }

    /// What workers take that nobody uses yet: they go for whoever needs the room.
    pub(super) fn gives_way(&self) -> Taken {
        self.pool.taken().and(self.promises.taken())
    }

    /// Whether the daemon is ending.
    pub fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    pub(super) fn set_stopping(&self) {
        self.stopping.set(true);
        self.turns.close();
    }

    /// Counts a client of `uid` in; gives a guard that counts it out.
    ///
    /// # Errors
    /// `busy` if there are as many as may be, or as one user may have.
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

    /// Clients connected now.
    pub fn clients(&self) -> usize {
        self.clients.get()
    }

    /// For how long nobody was connected and no kernel had a worker, milliseconds.
    pub fn idle_ms(&self) -> i64 {
        if self.clients.get() > 0 || self.workers.live() > self.pool.own() + self.promises.count() {
            self.used_at_ms.set(self.now_ms());
        }
        self.now_ms() - self.used_at_ms.get()
    }

    /// What events call a kernel: its name; system-wide also its owner, for names are unique among one owner's kernels only.
    pub fn event_name(&self, uid: u32, name: &KernelName) -> String {
        if self.environment.system_wide { format!("{uid}/{name}") } else { name.to_string() }
    }

    /// Every kernel.
    pub(super) fn kernels(&self) -> Vec<Rc<Kernel>> {
        self.by_id.borrow().values().cloned().collect()
    }

    /// The kernels that `uid` may see: its own; all of a per-user daemon.
    pub fn visible(&self, uid: u32) -> Vec<Rc<Kernel>> {
        let by_id = self.by_id.borrow();
        let names = self.by_name.borrow();
        let own = names.iter().filter(|((owner, _), _)| !self.environment.system_wide || *owner == uid);
        own.filter_map(|(_, id)| by_id.get(id).cloned()).collect()
    }

    /// A kernel by name or id.
    ///
    /// # Errors
    /// `notFound`, the same for one that is not there and for somebody else's.
    pub fn find(&self, uid: u32, name: &str) -> Result<Rc<Kernel>> {
        let unknown = || {
            Error::not_found(format!("there is no kernel {:?}", name.chars().take(80).collect::<String>()))
                .hint("`ryokan ls` lists the kernels there are")
        };
        let id = match name.parse::<KernelName>() {
            Ok(name) => self.by_name.borrow().get(&(uid, name)).copied(),
            Err(_) => None,
        };
        let id = id.or_else(|| name.parse::<KernelId>().ok()).ok_or_else(unknown)?;
        let kernel = self.by_id.borrow().get(&id).cloned().ok_or_else(unknown)?;
        if self.environment.system_wide && kernel.uid != uid {
            return Err(unknown());
        }
        Ok(kernel)
    }

    pub(super) fn knock(&self, kernel: &Rc<Kernel>, open: bool) {
        if let Some(keeper) = &*self.doors.borrow() {
            keeper(kernel, open);
        }
    }

    /// Whether an error says that something may not be given to the kernel any more, or is not there: nothing is wrong with its engine.
    pub(super) fn is_not_given(error: &Error) -> bool {
        ["source_gone", "source_moved", "source", "deny_paths", "own_folder"].contains(&error.reason.as_str())
    }

    /// Checks again that a path may be given that led to `recorded` when it was, and that it leads there still.
    ///
    /// # Errors
    /// As [`Host::check_source`], and `refused` if it leads elsewhere.
    pub fn check_given(&self, uid: u32, source: &Path, recorded: Option<&Path>) -> Result<PathBuf> {
        let real = self.check_source(uid, source)?;
        if recorded.is_some_and(|recorded| recorded != real) {
            // Where to is not said: another user's kernel must not learn from it what there is.
            let message = format!("{} leads elsewhere than when it was given", source.display());
            return Err(Error::refused(message).reason("source_moved"));
        }
        Ok(real)
    }

    /// Checks that a host path may be given to a kernel of `uid`; gives the path without symbolic links.
    ///
    /// # Errors
    /// `invalidArgument`, `notFound`, `refused` with the rule.
    pub fn check_source(&self, uid: u32, source: &Path) -> Result<PathBuf> {
        let shown = source.display();
        if !source.is_absolute() {
            return Err(Error::invalid(format!("source {shown} must be absolute")));
        }
        // For another user the daemon must not tell what there is: the worker opens the path with that user's rights.
        let real = match source.canonicalize() {
            Ok(real) => real,
            Err(_) if uid != nix::unistd::geteuid().as_raw() => source.to_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::not_found(format!("there is no {shown} on this host")).reason("source_gone"));
            }
            Err(error) => return Err(Error::refused(format!("{shown}: {error}")).reason("source")),
        };
        if real.to_str().is_none() {
            return Err(Error::refused(format!("{shown} leads to a path that is not UTF-8")).reason("source"));
        }
        if let Some(why) = self.path_refusal(&real, uid) {
            return Err(Error::refused(format!("{shown} may not be given to a kernel")).reason("deny_paths").hint(why));
        }
        if let Some(own) = crate::sandbox::NEVER_GIVEN.iter().find(|own| real.starts_with(own)) {
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

    /// Why a kernel of this user must not be given this host path, which is real (links resolved); `None` if it may.
    pub(crate) fn path_refusal(&self, real: &Path, uid: u32) -> Option<String> {
        let is_own = uid == nix::unistd::geteuid().as_raw();
        let home = if is_own { self.environment.home.clone() } else { home_of(uid) };
        self.config.sandbox.deny_paths.refusal(real, home.as_deref())
    }

    /// What the configuration gives every kernel within its workspace.
    pub(crate) fn path_within_workspace(&self) -> Option<&Path> {
        let paths = &self.config.sandbox.system_paths;
        paths.iter().find(|path| path.starts_with(WORKSPACE)).map(PathBuf::as_path)
    }

    /// The rules of an engine's pools; off where the engine cannot run here, and where the configuration gives every kernel something within its
    /// workspace: a workspace that comes later would hide it.
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

fn home_of(uid: u32) -> Option<PathBuf> {
    nix::unistd::User::from_uid(uid.into()).ok().flatten().map(|user| user.dir)
}
