//! Limits on workers, their memory and concurrent executions; for all users together and for each user.
//!
//! A request beyond a limit is refused at once, and the error names what to wait for. A warm worker counts against no
//! user until it is bound, and is evicted when its place is needed.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::Limits;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::quantity::{self, format_size};
use crate::core::spec::KernelLimits;
use crate::supervisor::workers::start_queue::STARTS;

/// Reasons of errors when no further worker is admitted: the host's limit, and the user's worker and memory limits.
const HOSTS_PLACES: &str = "workers";
const USERS_WORKERS: &str = "workers_per_user";
const USERS_MEMORY: &str = "memory_per_user";

/// Whether an error reports a lack of capacity, so that the kernel is not at fault.
pub(crate) fn is_no_place(error: &Error) -> bool {
    error.code == ErrorCode::Busy
        && [HOSTS_PLACES, USERS_WORKERS, USERS_MEMORY, STARTS].contains(&error.reason.as_str())
}

/// The error for a worker that exceeds a whole limit.
fn too_large(one: ResourceUse, bounds: &Bounds, key: &str) -> Error {
    let most = quantity::format_size(bounds.memory_bytes.unwrap_or(u64::MAX));
    Error::refused(format!(
        "a kernel with {} of memory is more than {most}, which is all there may be",
        quantity::format_size(one.memory_bytes)
    ))
    .reason("memory")
    .hint(format!("make one with less --memory, or have {key} raised in the configuration"))
}

/// Limits on concurrent use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Workers.
    pub workers: usize,
    /// The sum of their memory limits, bytes; `None`: no bound.
    pub memory_bytes: Option<u64>,
    /// Executions.
    pub executions: usize,
}

impl Bounds {
    /// What all users may have at once.
    pub(crate) fn of_host(limits: &Limits) -> Bounds {
        Bounds { workers: limits.workers, memory_bytes: limits.memory, executions: limits.executions_in_flight }
    }

    /// What one user may have at once.
    pub(crate) fn of_user(limits: &Limits) -> Bounds {
        Bounds {
            workers: limits.workers_per_user,
            memory_bytes: limits.memory_per_user,
            executions: limits.executions_in_flight_per_user,
        }
    }
}

/// Resources in use or requested.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ResourceUse {
    pub workers: usize,
    pub memory_bytes: u64,
}

impl ResourceUse {
    /// One worker with that memory limit.
    pub(crate) fn one(memory_bytes: u64) -> ResourceUse {
        ResourceUse { workers: 1, memory_bytes }
    }

    pub(crate) fn and(self, more: ResourceUse) -> ResourceUse {
        ResourceUse {
            workers: self.workers.saturating_add(more.workers),
            memory_bytes: self.memory_bytes.saturating_add(more.memory_bytes),
        }
    }

    fn without(self, less: ResourceUse) -> ResourceUse {
        ResourceUse {
            workers: self.workers.saturating_sub(less.workers),
            memory_bytes: self.memory_bytes.saturating_sub(less.memory_bytes),
        }
    }

    fn is_within(self, bounds: &Bounds) -> bool {
        self.workers <= bounds.workers && bounds.memory_bytes.is_none_or(|most| self.memory_bytes <= most)
    }
}

/// Permits to run one execution, the user's and the host's; released when dropped.
pub type ExecPermit = (OwnedSemaphorePermit, OwnedSemaphorePermit);

/// Number of users whose semaphores are kept although they run nothing.
const USERS_KEPT: usize = 64;

/// The resources in use on a host.
pub struct Admission {
    host: Bounds,
    user: Bounds,
    all: Cell<ResourceUse>,
    of: RefCell<HashMap<u32, ResourceUse>>,
    running: Arc<Semaphore>,
    running_of: RefCell<HashMap<u32, Arc<Semaphore>>>,
}

impl Admission {
    pub(crate) fn new(host: Bounds, user: Bounds) -> Rc<Self> {
        Rc::new(Admission {
            host,
            user,
            all: Cell::default(),
            of: RefCell::default(),
            running: Arc::new(Semaphore::new(host.executions)),
            running_of: RefCell::default(),
        })
    }

    /// The number of workers, warm ones included.
    pub fn workers(&self) -> usize {
        self.all.get().workers
    }

    /// Takes a worker's place unconditionally. It counts against no user until a quota is attached.
    pub(crate) fn place(self: &Rc<Self>, memory_bytes: u64) -> WorkerPermit {
        let taken = ResourceUse::one(memory_bytes);
        self.all.set(self.all.get().and(taken));
        WorkerPermit { admission: Rc::clone(self), taken, share: None }
    }

    /// Takes one worker of a user's quota. Check and use are one step, so that two concurrent calls cannot both get the
    /// last one.
    ///
    /// # Errors
    /// `busy`, `refused`, as [`Self::admit`].
    pub(crate) fn share(self: &Rc<Self>, uid: u32, one: ResourceUse) -> Result<UserQuota> {
        self.admit(uid, one)?;
        Ok(self.share_anyway(uid, one))
    }

    /// Takes quota for a worker that exists already, without a check.
    pub(crate) fn share_anyway(self: &Rc<Self>, uid: u32, one: ResourceUse) -> UserQuota {
        let mut of = self.of.borrow_mut();
        let own = of.entry(uid).or_default();
        *own = own.and(one);
        UserQuota { admission: Rc::clone(self), uid, taken: one }
    }

    /// Whether one more worker fits once `gone` is freed.
    pub(crate) fn fits(&self, one: ResourceUse, gone: ResourceUse) -> bool {
        self.all.get().without(gone).and(one).is_within(&self.host)
    }

    /// How many more workers of that limit fit.
    pub(crate) fn room(&self, memory_bytes: u64) -> u32 {
        let all = self.all.get();
        let places = self.host.workers.saturating_sub(all.workers);
        let by_memory = self.host.memory_bytes.map_or(usize::MAX, |most| {
            usize::try_from(most.saturating_sub(all.memory_bytes) / memory_bytes.max(1)).unwrap_or(usize::MAX)
        });
        u32::try_from(places.min(by_memory)).unwrap_or(u32::MAX)
    }

    /// Whether that user may have one more worker.
    ///
    /// # Errors
    /// `busy`: what to wait for. `refused` for a worker that exceeds the whole quota.
    pub(crate) fn admit(&self, uid: u32, one: ResourceUse) -> Result<()> {
        let own = self.of.borrow().get(&uid).copied().unwrap_or_default();
        if own.and(one).is_within(&self.user) {
            return Ok(());
        }
        if !one.is_within(&self.user) {
            return Err(too_large(one, &self.user, "limits.memory_per_user"));
        }
        let hint = "stop one of your kernels, or wait until one is stopped for being idle";
        Err(match own.workers >= self.user.workers {
            true => Error::busy(format!("you have {} workers already", own.workers)).reason(USERS_WORKERS),
            false => Error::busy(format!(
                "your kernels were promised {} of memory already, and this one wants {}",
                quantity::format_size(own.memory_bytes),
                quantity::format_size(one.memory_bytes)
            ))
            .reason(USERS_MEMORY),
        }
        .hint(hint))
    }

    /// The error when the host has no room for one more worker.
    pub(crate) fn no_room(&self, one: ResourceUse) -> Error {
        if !one.is_within(&self.host) {
            return too_large(one, &self.host, "limits.memory");
        }
        let all = self.all.get();
        match all.workers >= self.host.workers {
            true => Error::busy(format!("this host runs {} workers already", self.host.workers))
                .hint("stop a kernel, or raise limits.workers in the configuration"),
            false => Error::busy(format!(
                "this host has promised {} of memory to its workers already, and this one wants {}",
                quantity::format_size(all.memory_bytes),
                quantity::format_size(one.memory_bytes)
            ))
            .hint("stop a kernel, or raise limits.memory in the configuration"),
        }
        .reason(HOSTS_PLACES)
    }

    /// Acquires permits to run one execution, if they are free now.
    pub(crate) fn try_acquire_exec(&self, uid: u32) -> Option<ExecPermit> {
        let own = self.executions_of(uid).try_acquire_owned().ok()?;
        Some((own, Arc::clone(&self.running).try_acquire_owned().ok()?))
    }

    /// Waits for permits to run one execution. Fair in order of arrival, first among one user's kernels, then among
    /// users.
    pub(crate) fn acquire_exec(&self, uid: u32) -> impl Future<Output = Option<ExecPermit>> + 'static {
        let (share, running) = (self.executions_of(uid), Arc::clone(&self.running));
        async move {
            let own = share.acquire_owned().await.ok()?;
            Some((own, running.acquire_owned().await.ok()?))
        }
    }

    fn executions_of(&self, uid: u32) -> Arc<Semaphore> {
        let mut running_of = self.running_of.borrow_mut();
        if running_of.len() >= USERS_KEPT {
            // Running and waiting executions hold a reference.
            running_of.retain(|_, share| Arc::strong_count(share) > 1);
        }
        Arc::clone(running_of.entry(uid).or_insert_with(|| Arc::new(Semaphore::new(self.user.executions))))
    }
}

/// A worker's place on the host, taken before any wait and released when dropped.
pub(crate) struct WorkerPermit {
    admission: Rc<Admission>,
    taken: ResourceUse,
    share: Option<UserQuota>,
}

impl WorkerPermit {
    /// Attaches the user's quota.
    pub(crate) fn belongs(&mut self, share: UserQuota) {
        self.share = Some(share);
    }
}

impl Drop for WorkerPermit {
    fn drop(&mut self) {
        self.admission.all.set(self.admission.all.get().without(self.taken));
    }
}

/// One worker's part of its user's quota; released when dropped.
pub(crate) struct UserQuota {
    admission: Rc<Admission>,
    uid: u32,
    taken: ResourceUse,
}

impl Drop for UserQuota {
    fn drop(&mut self) {
        let mut of = self.admission.of.borrow_mut();
        if let Some(own) = of.get_mut(&self.uid) {
            *own = own.without(self.taken);
            if *own == ResourceUse::default() {
                of.remove(&self.uid);
            }
        }
    }
}

/// Refuses limits that this host can never supply. The configuration's defaults hold on any host.
///
/// # Errors
/// `invalid_argument`.
pub(crate) fn check_host_limits(limits: &KernelLimits, defaults: &KernelLimits) -> Result<()> {
    let here = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    let processors = u32::try_from(here).unwrap_or(u32::MAX);
    if limits.cpu_milli > processors.saturating_mul(1000) && limits.cpu_milli != defaults.cpu_milli {
        let asked = f64::from(limits.cpu_milli) / 1000.0;
        return Err(Error::invalid(format!("{asked} processors are more than this host has ({processors})"))
            .reason("cpus")
            .hint(format!("request at most {processors}")));
    }
    // An unreadable figure bounds nothing.
    let memory = crate::sys::pressure::total().unwrap_or(u64::MAX);
    if limits.memory_bytes > memory && limits.memory_bytes != defaults.memory_bytes {
        let (asked, here) = (format_size(limits.memory_bytes), format_size(memory));
        return Err(Error::invalid(format!("{asked} of memory is more than this host has ({here})"))
            .reason("memory")
            .hint("request less; kernels share the host's memory"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bounds(workers: usize, memory_bytes: Option<u64>) -> Bounds {
        Bounds { workers, memory_bytes, executions: 1 }
    }

    #[test]
    fn per_user_shares_are_enforced() {
        let admission = Admission::new(bounds(4, Some(1000 * MIB)), bounds(2, Some(500 * MIB)));
        let one = ResourceUse::one(100 * MIB);
        // Both at once, before either has a worker.
        let shares = [admission.share(7, one).expect("free"), admission.share(7, one).expect("free")];
        assert_eq!(admission.admit(7, one).map_err(|error| error.reason), Err("workers_per_user".into()));
        assert_eq!(admission.admit(8, one), Ok(()));
        let most = admission.share(8, ResourceUse::one(450 * MIB)).expect("free");
        let refused = admission.admit(8, one).expect_err("he has his share");
        assert!(refused.reason == "memory_per_user" && is_no_place(&refused), "{refused}");
        let never = admission.admit(8, ResourceUse::one(600 * MIB)).expect_err("more than he may have at all");
        assert!(never.code == ErrorCode::Refused && !is_no_place(&never), "{never}");
        drop((shares, most));
        assert_eq!(admission.admit(7, one), Ok(()));
        assert!(admission.of.borrow().is_empty() && admission.all.get() == ResourceUse::default());
    }

    #[test]
    fn unbound_slot_has_no_owner() {
        let admission = Admission::new(bounds(2, Some(1000 * MIB)), bounds(2, None));
        let mut slot = admission.place(800 * MIB);
        assert_eq!(admission.admit(7, ResourceUse::one(800 * MIB)), Ok(()));
        assert_eq!((admission.room(100 * MIB), admission.room(300 * MIB)), (1, 0), "by places, and by memory");
        let one = ResourceUse::one(300 * MIB);
        assert!(!admission.fits(one, ResourceUse::default()) && admission.fits(one, ResourceUse::one(800 * MIB)));
        assert!(admission.no_room(one).message.contains("memory"));
        slot.belongs(admission.share(7, ResourceUse::one(800 * MIB)).expect("free"));
        let mut other = admission.place(100 * MIB);
        other.belongs(admission.share(7, ResourceUse::one(100 * MIB)).expect("free"));
        assert!(admission.admit(7, one).is_err() && admission.no_room(one).message.contains("2 workers"));
        assert_eq!(admission.no_room(ResourceUse::one(2000 * MIB)).code, ErrorCode::Refused);
    }

    #[tokio::test]
    async fn execution_permits_are_fifo() {
        let host = Bounds { executions: 2, ..bounds(9, None) };
        let admission = Admission::new(host, bounds(9, None));
        let first = admission.try_acquire_exec(7).expect("there is");
        assert!(admission.try_acquire_exec(7).is_none(), "his share is one");
        let other = admission.try_acquire_exec(8).expect("there is");
        let (mut own, mut third) = (Box::pin(admission.acquire_exec(7)), Box::pin(admission.acquire_exec(9)));
        assert!(futures::poll!(&mut own).is_pending() && futures::poll!(&mut third).is_pending());
        drop(first);
        // 7 queued first, but for its own permit; 9 is ahead of it in the host's queue.
        let std::task::Poll::Ready(third) = futures::poll!(&mut third) else { panic!("it waits still") };
        assert!(futures::poll!(&mut own).is_pending());
        drop((other, third));
        assert!(futures::poll!(&mut own).is_ready());
    }
}
