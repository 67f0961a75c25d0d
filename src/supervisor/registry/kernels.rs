//! The table of kernels: lookup by name and id, listing by user.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::Semaphore;

use super::Supervisor;
use super::idempotency::Keys;
use super::teleport::Handovers;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::core::info::Ability;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::nearest::nearest;
use crate::core::usage::DiskFigures;
use crate::supervisor::host::metrics::Gauges;
use crate::supervisor::kernel::Kernel;

/// Publishes (`true`) or closes a kernel's socket.
pub type SocketPublisher = Box<dyn Fn(&Rc<Kernel>, bool)>;

/// The kernels of a daemon, and the names in use.
pub struct Registry {
    pub(super) by_id: RefCell<HashMap<KernelId, Rc<Kernel>>>,
    pub(super) by_name: RefCell<BTreeMap<(u32, KernelName), KernelId>>,
    /// Names of sockets that were published beside the kernels' own.
    pub(crate) published: RefCell<HashSet<(u32, String)>>,
    /// Names of kernels that are being created.
    pub(super) creating: RefCell<BTreeMap<(u32, KernelName), ()>>,
    /// Kernels that are being created, with the versions of the images that they name.
    pub(super) images_held: RefCell<Vec<(String, String)>>,
    pub(super) sockets: RefCell<Option<SocketPublisher>>,
    pub(super) keys: Keys,
    /// Permits for concurrent exports and imports.
    pub(super) bundles: Arc<Semaphore>,
    /// Moves between hosts.
    pub(super) handovers: Handovers,
}

impl Registry {
    /// A table without kernels. Kernels that arrive may take `arrivals` bytes together, if configured.
    pub(super) fn new(arrivals: Option<u64>) -> Self {
        Registry {
            by_id: RefCell::default(),
            by_name: RefCell::default(),
            published: RefCell::default(),
            creating: RefCell::default(),
            images_held: RefCell::default(),
            sockets: RefCell::new(None),
            keys: Keys::default(),
            bundles: Arc::new(Semaphore::new(limits::BUNDLES_CONCURRENT)),
            handovers: Handovers::new(arrivals),
        }
    }
}

impl Supervisor {
    /// Every kernel.
    pub fn kernels(&self) -> Vec<Rc<Kernel>> {
        self.registry.by_id.borrow().values().cloned().collect()
    }

    /// The kernels that `uid` may see: the user's own, or all in a per-user daemon.
    pub fn visible(&self, uid: u32) -> Vec<Rc<Kernel>> {
        let by_id = self.registry.by_id.borrow();
        let names = self.registry.by_name.borrow();
        let own = names.iter().filter(|((owner, _), _)| !self.host.environment.system_wide || *owner == uid);
        own.filter_map(|(_, id)| by_id.get(id).cloned()).collect()
    }

    /// A kernel by name or id.
    ///
    /// # Errors
    /// `notFound`, both for an absent kernel and for another user's.
    pub fn find(&self, uid: u32, name: &str) -> Result<Rc<Kernel>> {
        let unknown = || {
            let known: Vec<String> = self.visible(uid).iter().map(|kernel| kernel.spec().name.to_string()).collect();
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            let meant = nearest(name, &known).map(|near| format!("did you mean {near}? ")).unwrap_or_default();
            Error::not_found(format!("there is no kernel {:?}", name.chars().take(80).collect::<String>()))
                .hint(format!("{meant}`ryokan ls` lists the kernels there are"))
        };
        let id = match name.parse::<KernelName>() {
            Ok(name) => self.registry.by_name.borrow().get(&(uid, name)).copied(),
            Err(_) => None,
        };
        let id = id.or_else(|| name.parse::<KernelId>().ok()).ok_or_else(unknown)?;
        let kernel = self.registry.by_id.borrow().get(&id).cloned().ok_or_else(unknown)?;
        if self.host.environment.system_wide && kernel.uid != uid {
            return Err(unknown());
        }
        Ok(kernel)
    }

    pub(crate) fn publish_socket(&self, kernel: &Rc<Kernel>, open: bool) {
        if let Some(keeper) = &*self.registry.sockets.borrow() {
            keeper(kernel, open);
        }
    }

    /// A kernel by id.
    pub(crate) fn get(&self, id: KernelId) -> Option<Rc<Kernel>> {
        self.registry.by_id.borrow().get(&id).cloned()
    }

    /// The host's capabilities, including those of the data's file system.
    ///
    /// # Errors
    /// `internal` if a probe panics.
    pub async fn abilities(&self) -> Result<Vec<Ability>> {
        let (probes, data) = (self.workers.probes(), self.host.environment.data.clone());
        let found = tokio::task::spawn_blocking(move || {
            let mut found: Vec<Ability> = probes.into_iter().flat_map(|probe| probe()).collect();
            found.extend(crate::workspace::doctor(&data));
            found
        });
        found.await.map_err(|error| Error::internal(error.to_string()))
    }

    /// All metrics as OpenMetrics text.
    pub fn metrics_text(&self) -> String {
        let (host, workers) = (&self.host, &self.workers);
        let is_memory_short = workers.pressure.is_on();
        let state = |kernel: Rc<Kernel>| (kernel.spec().engine, kernel.view().state.name().to_owned());
        let measured = self.kernels().into_iter().filter_map(|kernel| kernel.disk.get());
        host.metrics.text(&Gauges {
            disk: measured.fold(DiskFigures::default(), |sum, measured| sum.plus(&measured.figures())),
            kernels: self.kernels().into_iter().map(state).collect(),
            remembered: host.remembered(),
            workers: workers.live(),
            clients: host.clients(),
            is_memory_short,
            pools: workers.pool.infos(is_memory_short),
            pool_totals: workers.pool.totals(),
        })
    }

    /// Milliseconds without a connected client or a kernel with a worker.
    pub fn idle_ms(&self) -> i64 {
        self.host.idle_ms(self.workers.live() > self.workers.unused())
    }
}
