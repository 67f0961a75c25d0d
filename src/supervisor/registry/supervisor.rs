//! The set of kernels: create, find, list; adopt from a former daemon; release at the end.

use std::path::Path;
use std::rc::{Rc, Weak};
use std::time::Instant;

use futures::StreamExt as _;
use tokio::sync::mpsc;
use tracing::Instrument as _;

use super::kernels::{Registry, SocketPublisher};
use crate::catalog::{CatalogHandle, Created, IdempotencyKey, KernelRow, NewAudit, Notes};
use crate::config::Config;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId};
use crate::core::kernel::State;
use crate::core::kernel::transition::Transitions;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::spec::{Isolation, KernelSpec, Net};
use crate::core::venv::is_in_workspace;
use crate::isolation::Drivers;
use crate::store::StoreHandle;
use crate::supervisor::checkpoint::{self, Suspension};
use crate::supervisor::host::Host;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::host::environment::Environment;
use crate::supervisor::host::events::Events;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::host::venv::{has_venv, no_venv};
use crate::supervisor::kernel::command::{Actor, StopMode};
use crate::supervisor::kernel::journal::{Loaded, Records, StateRecord};
use crate::supervisor::kernel::services::KernelServices;
use crate::supervisor::kernel::sharing::Sharing;
use crate::supervisor::kernel::task::{Adopted, Beginning, Report, Task};
use crate::supervisor::kernel::tools::Tools;
use crate::supervisor::kernel::{Kernel, View};
use crate::supervisor::registry::idempotency::{KeyLock, made_as};
use crate::supervisor::workers::reserved::ReservedWorker;
use crate::supervisor::workers::{Workers, admission};

/// The first ownership epoch of a kernel.
const FIRST_EPOCH: Epoch = Epoch(1);

/// All kernels of a daemon.
#[derive(Clone)]
pub struct Supervisor {
    pub(super) host: Rc<Host>,
    pub(super) workers: Rc<Workers>,
    pub(super) registry: Rc<Registry>,
    pub(super) services: Rc<KernelServices>,
}

impl Supervisor {
    /// A supervisor without kernels; [`Supervisor::recover`] loads those of the catalog. Must run inside a `LocalSet`.
    pub fn new(
        config: Config,
        environment: Environment,
        drivers: Drivers,
        catalog: CatalogHandle,
        store: StoreHandle,
    ) -> Self {
        let events = Events::start(catalog.clone(), crate::sys::clock::now_ms);
        let host = Host::new(config, environment, drivers, catalog, store, events);
        // Makes its file while there is room.
        host.lost_audit_lines();
        let kept = Rc::downgrade(&host);
        tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(limits::DISK_RESERVE_INTERVAL).await;
                let Some(host) = kept.upgrade() else { return };
                host.reserve.keep();
                host.record_audit_gap().await;
                host.keep_audit_head().await;
            }
        });
        let workers = Workers::new(&host);
        let checkpoints = Rc::new(checkpoint::Checkpoints::new(&host));
        let services = KernelServices { host: Rc::clone(&host), workers: Rc::clone(&workers), checkpoints };
        let registry = Rc::new(Registry::new(host.config.teleport.arrivals));
        let supervisor = Supervisor { host, workers, registry, services: Rc::new(services) };
        let weak = supervisor.downgrade();
        supervisor.workers.pressure.on_relief(move || {
            if let Some(supervisor) = weak.upgrade() {
                supervisor.stop_idle_kernels();
            }
        });
        supervisor
    }

    /// The services that the supervisor's modules share.
    pub fn host(&self) -> &Rc<Host> {
        &self.host
    }

    /// The workers.
    pub fn workers(&self) -> &Rc<Workers> {
        &self.workers
    }

    /// The table of kernels.
    pub(crate) fn registry(&self) -> &Rc<Registry> {
        &self.registry
    }

    /// Sets the function that publishes the kernels' own sockets.
    pub fn set_socket_publisher(&self, publisher: SocketPublisher) {
        *self.registry.sockets.borrow_mut() = Some(publisher);
    }

    /// Creates a kernel. A key used before returns the kernel created with it.
    ///
    /// # Errors
    /// `invalidArgument`, `alreadyExists`, `refused`, `unsupported`, `busy`.
    pub async fn create(
        &self,
        spec: KernelSpec,
        from_dir: Option<&Path>,
        key: &str,
        actor: &Actor,
    ) -> Result<Rc<Kernel>> {
        let scope = format!("create/{}", actor.uid);
        if key.len() > limits::KEY_BYTES {
            return Err(Error::invalid(format!("the key has more than {} bytes", limits::KEY_BYTES)));
        }
        let mut key_lock = None;
        if !key.is_empty() {
            let (known, waited) = self.recall(scope, key).await?;
            if let Some(kernel) = known {
                return made_as(kernel, spec.name.as_str(), spec.engine);
            }
            key_lock = Some(waited);
        }
        let spec = self.checked(spec, actor)?;
        let image = self.hold_image(&spec);
        let reserved = self.reserve(actor.uid, spec.name.clone())?;
        // A separate task, so that a client's disconnect leaves nothing half done.
        let (this, from_dir, actor) = (self.clone(), from_dir.map(Path::to_owned), actor.clone());
        let making = tokio::task::spawn_local(async move {
            let _held = (reserved, image);
            let (begun, engine) = (Instant::now(), spec.engine);
            let key = key_lock.as_ref().map(KeyLock::parts);
            let made = this.make(spec, from_dir.as_deref(), key, &actor).await;
            this.host.metrics.since(Stage::Create, engine, begun);
            made
        });
        making.await.map_err(|error| Error::internal(error.to_string()))?
    }

    /// Reserves a name, and a place within the limits, for a kernel in creation.
    ///
    /// # Errors
    /// `busy` if a limit on kernels is reached, `alreadyExists`.
    pub(crate) fn reserve(&self, uid: u32, name: KernelName) -> Result<ReservedName> {
        let config = &self.host.config.limits;
        {
            let creating = self.registry.creating.borrow();
            let all = self.registry.by_id.borrow().len() + creating.len();
            if all >= config.kernels {
                return Err(Error::busy(format!("there are {all} kernels already"))
                    .reason("kernels")
                    .hint("remove some, or raise limits.kernels"));
            }
            let own = self.visible(uid).len() + creating.keys().filter(|(owner, _)| *owner == uid).count();
            if own >= config.kernels_per_user {
                return Err(Error::busy(format!("you have {own} kernels already"))
                    .reason("kernels_per_user")
                    .hint("remove some, or have limits.kernels_per_user raised"));
            }
        }
        self.reserve_name(uid, name)
    }

    /// Reserves a name.
    ///
    /// # Errors
    /// `alreadyExists`.
    pub(super) fn reserve_name(&self, uid: u32, name: KernelName) -> Result<ReservedName> {
        if self.registry.published.borrow().contains(&(uid, name.to_string())) {
            return Err(Error::already_exists(format!("a kernel is published as {name} already"))
                .hint("take another name: both would have the same socket"));
        }
        let name = (uid, name);
        if self.registry.by_name.borrow().contains_key(&name) || self.registry.creating.borrow().contains_key(&name) {
            return Err(Error::already_exists(format!("there is a kernel {} already", name.1))
                .hint("take another name, or open that kernel"));
        }
        self.registry.creating.borrow_mut().insert(name.clone(), ());
        Ok(ReservedName { registry: Rc::clone(&self.registry), name, is_kept: false })
    }

    /// Checks a requested specification; returns it with its paths resolved.
    fn checked(&self, mut spec: KernelSpec, actor: &Actor) -> Result<KernelSpec> {
        spec.allow_venv();
        self.workers.check_spec(&spec, actor.uid)?;
        self.workers.name_image(&mut spec, actor.uid)?;
        admission::check_host_limits(&spec.limits, &self.host.config.defaults.limits())?;
        for allowed in &mut spec.paths {
            let real = self.host.check_source(actor.uid, &allowed.path)?;
            self.host.check_writable(actor.uid, allowed, &real)?;
            allowed.real = Some(real);
        }
        Ok(spec)
    }

    async fn make(
        &self,
        spec: KernelSpec,
        from_dir: Option<&Path>,
        key: Option<(String, String)>,
        actor: &Actor,
    ) -> Result<Rc<Kernel>> {
        let host = &self.host;
        let own_venv = spec.venv.clone().filter(|venv| is_in_workspace(venv));
        let Some(from) = from_dir else {
            if let Some(venv) = own_venv {
                return Err(no_venv(&spec.name, &venv));
            }
            // The kernel adopts the folder of a warm worker, if one is ready.
            let shape = self.workers.shape(&spec, actor.uid)?;
            let can_come_later = shape.venv.is_none()
                && !crate::supervisor::workers::start::hides_system_path(
                    host,
                    spec.paths.iter().map(|allowed| &*allowed.path),
                );
            let reserved = can_come_later.then(|| ReservedWorker::make(&self.workers, shape, FIRST_EPOCH)).flatten();
            let Some(reserved) = reserved else {
                let id = KernelId::from_bytes(host.random());
                host.catalog.create_kernel_files(id).await?;
                return self.show(id, None, spec, key, actor).await;
            };
            let id = reserved.kernel();
            let made = self.show(id, Some(&reserved), spec, key, actor).await;
            match &made {
                Ok(kernel) if kernel.id == id => self.workers.reserved.keep(&self.workers, reserved),
                Ok(_) | Err(_) => drop(reserved.end(&self.workers)),
            }
            return made;
        };
        let from = host.check_source(actor.uid, from)?;
        let id = KernelId::from_bytes(host.random());
        let files = host.catalog.create_kernel_files(id).await?;
        let (driver, most) = (self.workers.driver(spec.isolation)?, spec.limits.workspace_bytes);
        if let Err(error) = driver.fill_workspace(&files.workspace, &from, actor.uid, most).await {
            host.catalog.remove_kernel_files(id).await?;
            return Err(error);
        }
        if let Some(venv) = own_venv.filter(|venv| !has_venv(&files.workspace, venv)) {
            host.catalog.remove_kernel_files(id).await?;
            return Err(no_venv(&spec.name, &venv));
        }
        self.show(id, None, spec, key, actor).await
    }

    /// Makes a kernel with existing files visible; a failure removes the files. A reserved worker is recorded as the
    /// kernel's.
    async fn show(
        &self,
        id: KernelId,
        reserved: Option<&ReservedWorker>,
        spec: KernelSpec,
        key: Option<(String, String)>,
        actor: &Actor,
    ) -> Result<Rc<Kernel>> {
        let (host, now) = (&self.host, self.host.now_ms());
        let record = StateRecord::default();
        let row = KernelRow {
            id,
            uid: actor.uid,
            spec: spec.clone(),
            state_json: serde_json::to_string(&record).map_err(|error| Error::internal(error.to_string()))?,
            version: 1,
            epoch: FIRST_EPOCH,
            generation: 0,
            thread_of: None,
            created_at_ms: now,
            last_used_at_ms: now,
        };
        let expires_at_ms = now.saturating_add(limits::KEY_LIFETIME.as_millis() as i64);
        let key = key.map(|(scope, key)| IdempotencyKey { scope, key, expires_at_ms });
        let weaker = !spec.degraded.is_empty() || spec.net != Net::None;
        let action = if weaker { "kernel.create_weaker" } else { "kernel.create" };
        let mut words = spec.name.to_string();
        if weaker {
            words.push_str(&format!(": network {}, without {:?}", spec.net.name(), spec.degraded));
        }
        for path in &spec.paths {
            let access = if path.writable { "rw" } else { "ro" };
            let is_mapped = path.real.as_deref().is_some_and(|real| host.maps_owner(actor.uid, real));
            let mapped = if is_mapped { ", owner mapped" } else { "" };
            words.push_str(&format!("; path {} ({access}{mapped})", path.path.display()));
        }
        let audit = NewAudit {
            kernel: id.to_string(),
            owner: Some(actor.uid),
            version_after: Some(1),
            detail: bounded(words),
            ..host.line(actor, action, None)
        };
        let detail = serde_json::json!({ "id": id.to_string(), "by": actor.to_string() });
        let event = host.events.event(&host.event_name(actor.uid, &spec.name), "kernel_created", detail);
        // The event is written with the kernel if that keeps the order of events.
        let noted = host.events.are_written().then(|| event.clone());
        let is_noted = noted.is_some();
        let notes = Notes { events: noted.into_iter().collect(), audit: vec![audit] };
        // Recorded before the worker runs anything, so that a killed daemon leaves no unknown worker.
        let worker = reserved.map(ReservedWorker::row);
        let inserted = host.catalog.insert_kernel_with(row.clone(), key, worker, notes).await;
        match inserted.map(|written| written.value) {
            Ok(Created::New) => {}
            Ok(Created::Before(before)) => {
                host.catalog.remove_kernel_files(id).await?;
                let kernel = self.registry.by_id.borrow().get(&before).cloned();
                let kernel = kernel.ok_or_else(|| Error::not_found("the kernel that this key made was removed"))?;
                return made_as(kernel, spec.name.as_str(), spec.engine);
            }
            Err(error) => {
                host.catalog.remove_kernel_files(id).await?;
                return Err(error.into());
            }
        }
        let kernel = self.open(&row, record, Loaded::empty(), |_| None);
        match is_noted {
            true => host.events.noted(),
            false => host.events.publish_event(event),
        }
        Ok(kernel)
    }

    /// Makes a kernel visible and starts its task.
    pub(crate) fn open(
        &self,
        row: &KernelRow,
        record: StateRecord,
        loaded: Loaded,
        adopted: impl FnOnce(&Rc<Kernel>) -> Option<(Adopted, Channel)>,
    ) -> Rc<Kernel> {
        let host = &self.host;
        let (commands, waiting) = mpsc::channel(limits::KERNEL_REQUESTS);
        let version = loaded.version.max(record.version);
        let owner = row.thread_of.and_then(|owner| self.registry.by_id.borrow().get(&owner).cloned());
        let kernel = Rc::new(Kernel {
            id: row.id,
            uid: row.uid,
            spec: std::cell::RefCell::new(Rc::new(row.spec.clone())),
            worker_spec: std::cell::RefCell::default(),
            epoch: row.epoch,
            thread_of: row.thread_of,
            created_at_ms: row.created_at_ms,
            event_name: std::cell::RefCell::new(host.event_name(row.uid, &row.spec.name)),
            records: Records::new(row.id, row.epoch, &host.catalog, &host.store),
            view: std::cell::RefCell::new(View {
                state: record.life.state.clone(),
                version,
                executions: loaded.executions.max(record.executions),
                checkpoints: loaded.checkpoints,
                last_used_at_ms: row.last_used_at_ms,
                sandbox: Vec::new(),
                missed: Vec::new(),
                unreadable: Vec::new(),
                jobs: Vec::new(),
                worker_pid: None,
                origin: loaded.origin,
                known_origin: None,
                engine_version: String::new(),
            }),
            link: std::cell::RefCell::new(None),
            executions: std::cell::RefCell::default(),
            commands,
            transitions: std::cell::RefCell::new(Transitions::loaded(loaded.transition)),
            tools: std::cell::RefCell::default(),
            sessions: Sharing::new(owner.clone()),
            processes: std::cell::RefCell::default(),
            connections: Rc::default(),
            finished_restore: std::cell::RefCell::default(),
            kept_memory: std::cell::Cell::default(),
            capture: std::cell::RefCell::new(
                host.files.choice(|| host.catalog.kernel_files(row.id).workspace).to_string(),
            ),
            base: std::cell::Cell::new(None),
            retention: std::cell::Cell::new(row.spec.retention),
            prune_due_ms: std::cell::Cell::new(0),
            held: std::cell::RefCell::default(),
            disk: std::cell::Cell::default(),
            worker: std::cell::RefCell::default(),
            is_unreadable: loaded.damage.is_some(),
            resumes: std::cell::Cell::new(record.resumes),
            terms: std::cell::Cell::default(),
            _remembered: Rc::clone(&host.remembered),
        });
        if let Some(owner) = owner {
            owner.joined_by(&kernel);
        }
        let taken_over = adopted(&kernel);
        let tools = match &taken_over {
            Some((_, channel)) => Rc::clone(&channel.tools),
            None => self.tools(row, loaded.mcp),
        };
        let (adopted, channel) = match taken_over {
            Some((adopted, channel)) => (Some(adopted), (channel.reporter, channel.reports)),
            None => (None, mpsc::unbounded_channel()),
        };
        let (lease, mounts, unclosed) = (loaded.lease, loaded.mounts, loaded.running);
        let beginning = Beginning { life: record.life, lease, mounts, tools, unclosed, damage: loaded.damage };
        let task = Task::new(&self.services, Rc::clone(&kernel), waiting, channel, beginning);
        // The span adds the kernel to each log line of its task, at every level.
        let span = tracing::error_span!("kernel", id = %row.id, name = %kernel.event_name());
        tokio::task::spawn_local(task.run(adopted).instrument(span));
        self.registry.by_id.borrow_mut().insert(row.id, Rc::clone(&kernel));
        self.registry.by_name.borrow_mut().insert((row.uid, row.spec.name.clone()), row.id);
        self.publish_socket(&kernel, true);
        kernel
    }

    pub(crate) fn tools(&self, row: &KernelRow, mcp: Vec<(String, crate::core::info::McpTransport)>) -> Rc<Tools> {
        let config = &self.host.environment;
        Tools::new(
            row.spec.name.clone(),
            self.host.event_name(row.uid, &row.spec.name),
            std::sync::Arc::clone(&config.mcp_allowed),
            config.mcp_launch.clone(),
            mcp,
            Rc::clone(&self.host.events),
        )
    }

    /// Shuts down: workers save and end or, with `keep_workers`, are released for the next daemon.
    pub async fn shut_down(&self, keep_workers: bool) {
        let actor = self.host.own_actor();
        // Before their memory is saved, which ends machines.
        let resumed = self.resumed_at_next_start();
        if !keep_workers && self.host.config.microvm.keep_memory {
            self.keep_memory(&actor).await;
        }
        self.host.set_stopping();
        self.workers.start_queue.close();
        let kernels = self.kernels();
        let stops = kernels.iter().map(|kernel| {
            let stopped = StopMode::Daemon { resumes: resumed.contains(&kernel.id) };
            kernel.stop(actor.clone(), if keep_workers { StopMode::Release } else { stopped })
        });
        futures::future::join_all(stops).await;
        self.workers.pool.close(&self.workers).await;
        self.host.prepared.discard_all().await;
        self.host.keep_audit_head().await;
        self.host.events.flush().await;
    }
}

impl Supervisor {
    /// Saves the memory of virtual machines, those of running code last, which is interrupted as it would be by the stop.
    /// What cannot be saved in time is stopped as other kernels are.
    async fn keep_memory(&self, actor: &Actor) {
        let until = tokio::time::Instant::now() + self.host.config.daemon.drain / 2;
        let is_busy = |kernel: &Rc<Kernel>| matches!(kernel.view().state, State::Busy { .. });
        let mut machines = self.kernels();
        machines.retain(|kernel| {
            let (spec, state) = (kernel.spec(), kernel.view().state);
            let has_memory = matches!(state, State::Ready | State::Suspended | State::Busy { .. });
            spec.isolation == Isolation::Microvm && !spec.ephemeral && has_memory
        });
        machines.sort_by_key(is_busy);
        let how = Suspension { interrupt: true, release: true, until_start: false };
        let save = |kernel: Rc<Kernel>| async move {
            // One that has begun goes on; one that waits for code that ignores its interrupt is given up.
            let saving = checkpoint::suspend(&self.host, &kernel, actor.clone(), how);
            let late = |_| Err(Error::deadline("there is no time left for it"));
            if let Err(error) = tokio::time::timeout_at(until, saving).await.unwrap_or_else(late) {
                tracing::info!(kernel = %kernel.spec().name, %error, "the memory of a machine is not kept");
            }
        };
        futures::stream::iter(machines).for_each_concurrent(limits::MEMORIES_SAVED_AT_ONCE, save).await;
    }
}

/// The channel of a worker that was adopted before its kernel's task existed.
pub(crate) struct Channel {
    pub tools: Rc<Tools>,
    pub reporter: mpsc::UnboundedSender<Box<Report>>,
    pub reports: mpsc::UnboundedReceiver<Box<Report>>,
}

/// A name reserved for a kernel in creation.
pub(crate) struct ReservedName {
    registry: Rc<Registry>,
    name: (u32, KernelName),
    is_kept: bool,
}

impl ReservedName {
    /// The name.
    pub fn name(&self) -> &KernelName {
        &self.name.1
    }

    /// Keeps the name reserved beyond this value; its holder releases it.
    pub(super) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for ReservedName {
    fn drop(&mut self) {
        if !self.is_kept {
            self.registry.creating.borrow_mut().remove(&self.name);
        }
    }
}

/// A weak reference to the supervisor, for its own parts.
pub(crate) struct WeakSupervisor {
    host: Weak<Host>,
    workers: Weak<Workers>,
    registry: Weak<Registry>,
    services: Weak<KernelServices>,
}

impl WeakSupervisor {
    /// Upgrades while the supervisor exists.
    pub(crate) fn upgrade(&self) -> Option<Supervisor> {
        Some(Supervisor {
            host: self.host.upgrade()?,
            workers: self.workers.upgrade()?,
            registry: self.registry.upgrade()?,
            services: self.services.upgrade()?,
        })
    }
}

impl Supervisor {
    /// Returns a weak reference.
    pub(crate) fn downgrade(&self) -> WeakSupervisor {
        WeakSupervisor {
            host: Rc::downgrade(&self.host),
            workers: Rc::downgrade(&self.workers),
            registry: Rc::downgrade(&self.registry),
            services: Rc::downgrade(&self.services),
        }
    }
}
