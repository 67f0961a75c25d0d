//! Workers: warm, reserved, started, admitted.
//!
//! ```text
//!  kernel task ── start ─▶ its reserved worker ─▶ warm worker of its shape ─▶ start queue ─▶ isolation driver
//! ```
//!
//! Knows shapes, places and quotas; knows no kernels.

pub mod admission;
pub(crate) mod memory_pressure;
pub mod pool;
pub(crate) mod reserved;
pub(crate) mod start;
pub(crate) mod start_queue;
pub(crate) mod warm_worker;
pub mod worker;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use self::admission::{Admission, Bounds, ResourceUse};
use self::memory_pressure::MemoryPressure;
use self::pool::Pool;
use self::reserved::ReservedWorkers;
use self::start_queue::StartQueue;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::core::spec::{Isolation, KernelSpec, Net};
use crate::isolation::{IsolationDriver, Probe, Shape};
use crate::supervisor::host::Host;

/// The workers of a host.
pub struct Workers {
    /// The host.
    pub(crate) host: Rc<Host>,
    /// Who may have how much.
    pub(crate) admission: Rc<Admission>,
    /// Workers that are ready before a kernel needs them.
    pub pool: Pool,
    pub(crate) reserved: ReservedWorkers,
    pub(crate) start_queue: StartQueue,
    /// Whether memory is short.
    pub pressure: MemoryPressure,
    errors: RefCell<HashMap<KernelId, Error>>,
}

impl Workers {
    pub(crate) fn new(host: &Rc<Host>) -> Rc<Self> {
        let limits = &host.config.limits;
        // A daemon that serves one user lets that user have all.
        let share = match host.environment.system_wide {
            true => limits.worker_starts.div_ceil(2),
            false => limits.worker_starts,
        };
        Rc::new(Workers {
            admission: Admission::new(Bounds::of_host(limits), Bounds::of_user(limits)),
            pool: Pool::new(),
            reserved: ReservedWorkers::default(),
            start_queue: StartQueue::new(limits.worker_starts, share, limits.worker_wait),
            pressure: MemoryPressure::default(),
            errors: RefCell::default(),
            host: Rc::clone(host),
        })
    }

    /// The shape of the worker that such a kernel needs.
    ///
    /// # Errors
    /// `unsupported` with a hint if this host cannot run it, `invalidArgument`.
    pub(crate) fn shape(&self, spec: &KernelSpec, uid: u32) -> Result<Shape> {
        self.host.drivers.of(spec.isolation)?.check(spec, uid)
    }

    /// Checks a specification against this host and its configuration.
    ///
    /// # Errors
    /// `invalidArgument`, `unsupported`, `refused`, `unavailable`.
    pub(crate) fn check_spec(&self, spec: &KernelSpec, uid: u32) -> Result<()> {
        let config = &self.host.config.sandbox;
        spec.check().map_err(|error| Error::invalid(error.to_string()))?;
        if self.host.is_stopping() {
            return Err(Error::unavailable("the daemon is stopping"));
        }
        self.shape(spec, uid)?;
        if spec.net == Net::Host && !config.net_host_allowed {
            return Err(Error::refused("the host's network is not given to kernels here")
                .reason("net_host_allowed")
                .hint("set sandbox.net_host_allowed in the configuration"));
        }
        for layer in &spec.degraded {
            if !config.allow_degraded.contains(layer) {
                return Err(Error::refused(format!("kernels may not do without the sandbox layer {layer:?} here"))
                    .reason("allow_degraded")
                    .hint("add it to sandbox.allow_degraded in the configuration"));
            }
        }
        Ok(())
    }

    /// Names the image of a kernel in creation by its whole version: the digits that were given may match later ones.
    ///
    /// # Errors
    /// As [`Self::shape`].
    pub(crate) fn name_image(&self, spec: &mut KernelSpec, uid: u32) -> Result<()> {
        if !spec.image.is_empty() {
            spec.image = self.shape(spec, uid)?.variant;
        }
        Ok(())
    }

    /// The driver of an isolation.
    ///
    /// # Errors
    /// `unsupported` if this build or host has none.
    pub(crate) fn driver(&self, isolation: Isolation) -> Result<&Rc<dyn IsolationDriver>> {
        self.host.drivers.of(isolation)
    }

    /// Probes the drivers' capabilities on this host; each returned function blocks.
    pub(crate) fn probes(&self) -> Vec<Probe> {
        self.host.drivers.all().map(|driver| driver.probe()).collect()
    }

    /// Checks that one more kernel may have a worker; evicts warm workers for it.
    ///
    /// # Errors
    /// `busy`: what to wait for. `unsupported` if this host cannot run it any more.
    pub(crate) fn admit(&self, spec: &KernelSpec, uid: u32) -> Result<()> {
        let one = ResourceUse::one(spec.limits.memory_bytes);
        self.shape(spec, uid)?;
        self.admission.admit(uid, one)?;
        match self.admission.fits(one, self.reclaimable()) {
            true => Ok(()),
            false => Err(self.admission.no_room(one)),
        }
    }

    /// The resources of warm and reserved workers, which are evicted when a kernel needs the room.
    pub(crate) fn reclaimable(&self) -> ResourceUse {
        self.pool.taken().and(self.reserved.taken())
    }

    /// The number of workers.
    pub fn live(&self) -> usize {
        self.admission.workers()
    }

    /// The number of workers without a kernel in use.
    pub fn unused(&self) -> usize {
        self.pool.own() + self.reserved.count()
    }

    /// Records why a kernel's last worker failed to start.
    pub(crate) fn remember_error(&self, kernel: KernelId, error: &Error) {
        self.errors.borrow_mut().insert(kernel, error.clone());
    }

    /// Forgets that error: a worker has started, or the kernel is gone.
    pub(crate) fn forget_error(&self, kernel: KernelId) {
        self.errors.borrow_mut().remove(&kernel);
    }

    /// Why a kernel's last worker failed to start.
    pub fn last_error(&self, kernel: KernelId) -> Option<Error> {
        self.errors.borrow().get(&kernel).cloned()
    }
}
