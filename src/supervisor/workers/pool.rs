//! The warm pool: keeps warm workers ready as `core::pool` decides, hands them out, and counts.
//!
//! ```text
//!  take ──▶ a warm worker of that shape, or none ─▶ a new worker is started
//!    │ demand
//!    ▼
//!  look ◀── a change, or a timer ── plan(view, now) ─▶ create, destroy
//! ```
//!
//! There is one pool for each shape. The pools of default shapes last as long as the daemon. A pool for another shape
//! opens when a kernel of that shape starts, keeps one warm worker while demand lasts (two virtual machines), and closes
//! after a while without demand.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use super::admission::ResourceUse;
use crate::core::engine::EngineName;
use crate::core::error::Result;
use crate::core::ids::WorkerId;
use crate::core::info::PoolInfo;
use crate::core::limits;
use crate::core::pool as policy;
use crate::core::pool::{
    Action, Breaker, Costs, Counters, Demand, Event, Rules, SlotId, SlotState, Stats, View, Why, choose, plan,
};
use crate::isolation::Shape;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::workers::Workers;
use crate::supervisor::workers::warm_worker::WarmWorker;

/// All pools of a host.
pub struct Pool {
    pools: RefCell<Vec<Rc<ShapePool>>>,
    /// Counters of all pools of an engine, closed pools included.
    totals: RefCell<BTreeMap<EngineName, Rc<Cell<Counters>>>>,
    changed: Rc<Notify>,
    began: Instant,
    last_id: Cell<u64>,
    /// When a warm worker was last taken.
    taken: Cell<Option<Instant>>,
    paused: Cell<bool>,
}

/// The pool of one shape.
struct ShapePool {
    shape: Shape,
    rules: Rules,
    /// Whether the pool stays open without demand.
    standing: bool,
    held: RefCell<Vec<Held>>,
    demand: RefCell<Demand>,
    breaker: RefCell<Breaker>,
    counters: Cell<Counters>,
    /// Shared by all pools of that engine.
    total: Rc<Cell<Counters>>,
    active: Cell<u32>,
    /// When its warm workers were last health-checked.
    asked_ms: Cell<u64>,
    /// Waiting starts, the oldest first. An abandoned wait has a closed channel.
    waiting: RefCell<VecDeque<oneshot::Sender<(WarmWorker, Active)>>>,
}

/// A warm worker as the policy sees it and, once ready, the worker itself.
struct Held {
    seen: policy::Slot,
    slot: Option<WarmWorker>,
}

/// A taken worker, counted while it lives.
pub(crate) struct Active {
    pool: Rc<ShapePool>,
}

impl Active {
    fn of(pool: Rc<ShapePool>) -> Self {
        pool.active.set(pool.active.get() + 1);
        Active { pool }
    }

    /// Its engine.
    pub(crate) fn engine(&self) -> EngineName {
        self.pool.shape.engine
    }

    /// Counts the worker as bound to a kernel.
    pub(crate) fn bound(&self) {
        self.pool.count(Event::Taken);
    }

    /// Counts an execution of the worker.
    pub(crate) fn executed(&self) {
        self.pool.count(Event::Executed);
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.pool.active.set(self.pool.active.get().saturating_sub(1));
        self.pool.count(Event::Destroyed);
    }
}

impl ShapePool {
    fn count(&self, event: Event) {
        for counted in [&self.counters, &*self.total] {
            let mut counters = counted.get();
            counters.apply(event);
            counted.set(counters);
        }
    }

    fn seen(&self) -> Vec<policy::Slot> {
        self.held.borrow().iter().map(|held| held.seen).collect()
    }

    fn remove(&self, id: SlotId) -> Option<Held> {
        let mut held = self.held.borrow_mut();
        let at = held.iter().position(|held| held.seen.id == id)?;
        Some(held.swap_remove(at))
    }

    /// The number of waiting starts.
    fn waiting(&self) -> u32 {
        self.waiting.borrow_mut().retain(|waiting| !waiting.is_closed());
        u32::try_from(self.waiting.borrow().len()).unwrap_or(u32::MAX)
    }

    fn first_waiting(&self) -> Option<oneshot::Sender<(WarmWorker, Active)>> {
        self.waiting();
        self.waiting.borrow_mut().pop_front()
    }

    fn failed(&self, why: &str, now_ms: u64) {
        self.count(Event::CreationFailed);
        self.breaker.borrow_mut().failed(why, now_ms);
    }

    /// Marks a warm worker as ready. Returns the worker if it was discarded meanwhile.
    fn keep(&self, id: SlotId, slot: WarmWorker, now_ms: u64) -> Option<WarmWorker> {
        let mut held = self.held.borrow_mut();
        let is_it = |held: &&mut Held| held.seen.id == id && held.seen.state != SlotState::Leaving;
        match held.iter_mut().find(is_it) {
            Some(held) => {
                (held.seen.state, held.seen.created_ms) = (SlotState::Idle { since_ms: now_ms }, now_ms);
                held.slot = Some(slot);
                None
            }
            None => Some(slot),
        }
    }

    /// Handles a worker that failed before it was ready; a worker discarded meanwhile is counted already.
    fn never_ready(&self, id: SlotId, why: &str, now_ms: u64) {
        if self.remove(id).is_some_and(|held| held.seen.state != SlotState::Leaving) {
            self.failed(why, now_ms);
        }
    }

    fn info(&self, now_ms: u64) -> PoolInfo {
        let (slots, breaker, Shape { engine, limits, net, uid, .. }) =
            (self.seen(), self.breaker.borrow(), &self.shape);
        let Stats { total, idle, active, counters } = Stats::of(&slots, self.active.get(), self.counters.get());
        let creating = slots.iter().filter(|slot| matches!(slot.state, SlotState::Creating { .. })).count();
        let again_at_ms = breaker.tries_again_at_ms().unwrap_or(0);
        PoolInfo {
            engine: engine.name().to_owned(),
            memory_bytes: limits.memory_bytes,
            net: net.name().to_owned(),
            uid: *uid,
            pool_size: self.rules.pool_size,
            max_pool_size: self.rules.max_pool_size,
            min_idle: self.rules.min_idle,
            target: self.rules.target(&self.demand.borrow(), now_ms),
            total,
            idle,
            creating: u32::try_from(creating).unwrap_or(u32::MAX),
            active,
            total_created: counters.total_created,
            total_destroyed: counters.total_destroyed,
            total_executions: counters.total_executions,
            creation_errors: counters.creation_errors,
            taken: counters.taken,
            missed: counters.missed,
            refused: counters.refused,
            cpu_milli: limits.cpu_milli,
            pids: limits.pids,
            trouble: breaker.reason().unwrap_or_default().to_owned(),
            tries_again_in_ms: again_at_ms.saturating_sub(now_ms),
        }
    }

    fn is_idle(&self, now_ms: u64) -> bool {
        let quiet = self.demand.borrow().is_quiet(now_ms, self.rules.max_idle_time_ms);
        quiet && !self.standing && self.held.borrow().is_empty() && self.active.get() == 0
    }
}

impl Pool {
    pub(crate) fn new() -> Self {
        Pool {
            pools: RefCell::default(),
            totals: RefCell::default(),
            changed: Rc::default(),
            began: Instant::now(),
            last_id: Cell::new(0),
            taken: Cell::new(None),
            paused: Cell::new(false),
        }
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn of(&self, shape: &Shape) -> Option<Rc<ShapePool>> {
        self.pools.borrow().iter().find(|pool| pool.shape == *shape).cloned()
    }

    fn open(&self, shape: Shape, rules: Rules, standing: bool) -> Rc<ShapePool> {
        let total = Rc::clone(self.totals.borrow_mut().entry(shape.engine).or_default());
        let pool = Rc::new(ShapePool {
            shape,
            rules,
            standing,
            held: RefCell::default(),
            demand: RefCell::new(Demand::new(self.now_ms())),
            breaker: RefCell::default(),
            counters: Cell::default(),
            total,
            active: Cell::new(0),
            asked_ms: Cell::new(self.now_ms()),
            waiting: RefCell::default(),
        });
        self.pools.borrow_mut().push(Rc::clone(&pool));
        self.changed.notify_one();
        pool
    }

    /// The number of unbound workers: idle, in creation, or ending.
    pub(crate) fn own(&self) -> usize {
        self.pools.borrow().iter().map(|pool| pool.held.borrow().len()).sum()
    }

    /// The state of all pools; `short` says whether memory is short.
    pub fn infos(&self, short: bool) -> Vec<PoolInfo> {
        let now_ms = self.now_ms();
        let with_shortage = |mut info: PoolInfo| {
            if short && info.trouble.is_empty() {
                info.trouble = String::from("memory is short on this host: nothing is kept ready");
            }
            info
        };
        self.pools.borrow().iter().map(|pool| with_shortage(pool.info(now_ms))).collect()
    }

    /// Wakes the policy after a change that it depends on.
    pub(crate) fn look_soon(&self) {
        self.changed.notify_one();
    }

    /// Counters of each engine since the daemon began, closed pools included.
    pub fn totals(&self) -> Vec<(EngineName, Counters)> {
        self.totals.borrow().iter().map(|(engine, total)| (*engine, total.get())).collect()
    }

    /// Takes a warm worker of that shape for a kernel in creation, if one is ready. A failure counts as no miss.
    pub(crate) fn take_ahead(&self, shape: &Shape) -> Option<(WarmWorker, Active)> {
        let pool = self.of(shape).filter(|_| !self.paused.get())?;
        let taken = self.take_of(&pool);
        if taken.is_some() {
            pool.demand.borrow_mut().came(self.now_ms());
        }
        taken
    }

    /// Takes a warm worker of that shape, if one is ready. Records the demand.
    pub(crate) fn take(&self, workers: &Rc<Workers>, shape: &Shape) -> Option<(WarmWorker, Active)> {
        if self.paused.get() {
            return None;
        }
        let pool = match self.of(shape) {
            Some(pool) => pool,
            None => {
                let rules = workers.host.pool_rules(shape.engine);
                if rules.is_off() {
                    return None;
                }
                if !self.has_place(workers) {
                    return None;
                }
                self.open(shape.clone(), Costs::of(shape.isolation).rules_on_demand(rules), false)
            }
        };
        pool.demand.borrow_mut().came(self.now_ms());
        let taken = self.take_of(&pool);
        if taken.is_none() {
            self.changed.notify_one();
        }
        taken
    }

    /// Counts the outcome of a request for which no warm worker was ready.
    pub(crate) fn noted(&self, shape: &Shape, event: Event) {
        if let Some(pool) = self.of(shape) {
            pool.count(event);
        }
    }

    /// Waits for a warm worker of that shape until the receiver is dropped; `None` if there is no such pool.
    pub(crate) fn wait(&self, shape: &Shape) -> Option<oneshot::Receiver<(WarmWorker, Active)>> {
        let pool = self.of(shape).filter(|_| !self.paused.get())?;
        let (sender, receiver) = oneshot::channel();
        pool.waiting.borrow_mut().push_back(sender);
        self.changed.notify_one();
        Some(receiver)
    }

    fn take_of(&self, pool: &Rc<ShapePool>) -> Option<(WarmWorker, Active)> {
        let chosen = choose(&pool.rules, &pool.seen(), self.now_ms());
        let slot = chosen.and_then(|id| pool.remove(id)).and_then(|held| held.slot)?;
        self.changed.notify_one();
        self.taken.set(Some(Instant::now()));
        Some((slot, Active::of(Rc::clone(pool))))
    }

    /// Discards warm workers until another worker fits: idle ones first, then those in creation. Returns whether it
    /// fits; ending workers count as gone.
    pub(crate) fn make_room(&self, workers: &Rc<Workers>, one: ResourceUse) -> bool {
        let admission = &workers.admission;
        // If evicting all of them is not enough, none is evicted.
        if !admission.fits(one, workers.reclaimable()) {
            return false;
        }
        let leaving = |slot: &policy::Slot| slot.state == SlotState::Leaving;
        let pools = self.pools.borrow().clone();
        while !admission.fits(one, self.sum(leaving).and(workers.reserved.leaving())) {
            let idle = pools.iter().find_map(|pool| Some((pool, choose(&pool.rules, &pool.seen(), self.now_ms())?)));
            let is_creating = |slot: &policy::Slot| matches!(slot.state, SlotState::Creating { .. });
            let creating = || pools.iter().find_map(|pool| Some((pool, pool.seen().into_iter().find(is_creating)?.id)));
            match idle.or_else(creating) {
                Some((pool, id)) => end(workers, pool, id),
                None if workers.reserved.end_oldest(workers) => {}
                None => return false,
            }
        }
        true
    }

    /// The host resources of its warm workers.
    pub(crate) fn taken(&self) -> ResourceUse {
        self.sum(|_| true)
    }

    fn sum(&self, counts: impl Fn(&policy::Slot) -> bool) -> ResourceUse {
        let pools = self.pools.borrow();
        let each = pools.iter().flat_map(|pool| {
            let slots = pool.seen().into_iter().filter(&counts);
            slots.map(|_| ResourceUse::one(pool.shape.limits.memory_bytes)).collect::<Vec<_>>()
        });
        each.fold(ResourceUse::default(), ResourceUse::and)
    }

    /// Whether another pool may open; evicts a reclaimable pool if necessary.
    fn has_place(&self, workers: &Rc<Workers>) -> bool {
        let pools = self.pools.borrow().clone();
        if pools.len() < limits::POOLS {
            return true;
        }
        let came = pools.iter().map(|pool| (!pool.standing).then(|| pool.demand.borrow().last_ms()));
        let Some(pool) = policy::evicted_pool(came, self.now_ms()).and_then(|at| pools.get(at)) else { return false };
        pool.seen().iter().for_each(|slot| end(workers, pool, slot.id));
        self.pools.borrow_mut().retain(|kept| !Rc::ptr_eq(kept, pool));
        true
    }

    /// Delays a refill after a warm worker was taken: its creation would compete for the processors with the kernel
    /// that starts. Under constant demand the delay is bounded.
    async fn delay_refill(&self) {
        let latest = Instant::now() + limits::POOL_REFILL_DELAY_MAX;
        while let Some(until) = self.taken.get().map(|at| latest.min(at + limits::POOL_REFILL_DELAY))
            && until > Instant::now()
        {
            tokio::time::sleep_until(until.into()).await;
        }
    }

    /// Ends all warm workers, those in creation too, and creates no more.
    pub(crate) async fn close(&self, workers: &Rc<Workers>) {
        self.paused.set(true);
        let pools = self.pools.borrow().clone();
        for pool in &pools {
            pool.seen().iter().for_each(|slot| end(workers, pool, slot.id));
        }
        while workers.reserved.end_oldest(workers) {}
        // A worker that hangs in creation ends with its link; shutdown does not wait longer for it.
        let until = Instant::now() + limits::POOL_CLOSE;
        while self.own() + workers.reserved.count() > 0 && Instant::now() < until {
            // The refill task may consume the notification, hence the timeout.
            let _ = tokio::time::timeout(limits::POOL_REFILL_DELAY, self.changed.notified()).await;
        }
    }
}

/// Opens the default pools, and maintains all pools while the host exists.
pub(crate) fn run(workers: &Rc<Workers>) {
    let uid = nix::unistd::geteuid().as_raw();
    if let Some(path) = workers.host.path_within_workspace() {
        tracing::warn!(path = %path.display(), "no slots are kept ready: a path that every kernel has is within its workspace");
    }
    for engine in &workers.host.environment.engines {
        let rules = workers.host.pool_rules(*engine);
        let mut spec = workers.host.config.defaults.spec();
        spec.engine = *engine;
        match workers.shape(&spec, uid) {
            Ok(shape) if !rules.is_off() && workers.host.config.pool.stands(*engine) => {
                let rules = Costs::of(shape.isolation).rules(rules);
                drop(workers.pool.open(shape, rules, true));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(engine = engine.name(), %error, "no slots are kept ready"),
        }
    }
    let (kept, changed) = (Rc::downgrade(workers), Rc::clone(&workers.pool.changed));
    tokio::task::spawn_local(async move {
        while let Some(workers) = kept.upgrade().filter(|workers| !workers.pool.paused.get()) {
            let next = look(&workers);
            drop(workers);
            let _ = tokio::time::timeout(next, changed.notified()).await;
            // The task that was just handed a worker runs first.
            tokio::task::yield_now().await;
            if let Some(workers) = kept.upgrade() {
                workers.pool.delay_refill().await;
            }
        }
    });
}

/// Applies the policy's plan; returns the longest delay until the next look.
fn look(workers: &Rc<Workers>) -> Duration {
    let mut next_ms = limits::DEFAULT_MAINTENANCE_INTERVAL.as_millis() as u64;
    let now_ms = workers.pool.now_ms();
    let pools = workers.pool.pools.borrow().clone();
    for pool in &pools {
        let plan = plan(
            &View {
                rules: &pool.rules,
                slots: &pool.seen(),
                waiting: pool.waiting(),
                room: workers.admission.room(pool.shape.limits.memory_bytes),
                pressure: workers.pressure.is_on(),
                paused: workers.host.is_stopping(),
                demand: &pool.demand.borrow(),
                breaker: &pool.breaker.borrow(),
            },
            now_ms,
        );
        for action in plan.actions {
            match action {
                Action::Create => create(workers, pool),
                Action::Destroy { slot, why } => {
                    tracing::debug!(slot = slot.0, why = why.name(), "a slot goes");
                    if why == Why::Stuck {
                        pool.failed(why.name(), now_ms);
                    }
                    end(workers, pool, slot);
                }
            }
        }
        if now_ms.saturating_sub(pool.asked_ms.get()) >= pool.rules.maintenance_interval_ms {
            pool.asked_ms.set(now_ms);
            ask_all(workers, pool);
        }
        let again_ms = plan.look_again_at_ms.map_or(pool.rules.maintenance_interval_ms, |at| at.saturating_sub(now_ms));
        next_ms = next_ms.min(again_ms);
    }
    workers.pool.pools.borrow_mut().retain(|pool| !pool.is_idle(now_ms));
    Duration::from_millis(next_ms.max(1))
}

fn create(workers: &Rc<Workers>, pool: &Rc<ShapePool>) {
    let id = SlotId(workers.pool.last_id.get() + 1);
    workers.pool.last_id.set(id.0);
    let now_ms = workers.pool.now_ms();
    let seen = policy::Slot { id, state: SlotState::Creating { since_ms: now_ms }, created_ms: now_ms, executions: 0 };
    pool.held.borrow_mut().push(Held { seen, slot: None });
    let (workers, pool, taken) =
        (Rc::clone(workers), Rc::clone(pool), workers.admission.place(pool.shape.limits.memory_bytes));
    tokio::task::spawn_local(async move {
        let (kept, of) = (Rc::downgrade(&workers), Rc::downgrade(&pool));
        let begun = Instant::now();
        let made = WarmWorker::start(&workers, taken, &pool.shape, move |worker| died(&kept, &of, id, worker)).await;
        if made.is_ok() {
            workers.host.metrics.since(Stage::PoolRefill, pool.shape.engine, begun);
        }
        created(&workers, &pool, id, made).await;
        workers.pool.changed.notify_one();
    });
}

async fn created(workers: &Rc<Workers>, pool: &Rc<ShapePool>, id: SlotId, made: Result<WarmWorker>) {
    let now_ms = workers.pool.now_ms();
    match made {
        Ok(slot) if slot.is_alive() => {
            pool.breaker.borrow_mut().succeeded();
            pool.count(Event::Created);
            match pool.keep(id, slot, now_ms) {
                None => hand_to_first(workers, pool, id),
                Some(slot) => {
                    slot.end(workers).await;
                    pool.count(Event::Destroyed);
                    pool.remove(id);
                }
            }
        }
        Ok(slot) => {
            slot.end(workers).await;
            pool.never_ready(id, "it ended as soon as it was ready", now_ms);
        }
        Err(error) => {
            tracing::warn!(engine = pool.shape.engine.name(), %error, "a slot could not be made ready");
            pool.never_ready(id, &error.message, now_ms);
        }
    }
}

/// Hands a ready worker to the start that waits longest.
fn hand_to_first(workers: &Workers, pool: &Rc<ShapePool>, id: SlotId) {
    let Some(first) = pool.first_waiting() else { return };
    let Some(slot) = pool.remove(id).and_then(|held| held.slot) else { return };
    workers.pool.taken.set(Some(Instant::now()));
    // There is no await since the check, so the receiver is still open.
    let _ = first.send((slot, Active::of(Rc::clone(pool))));
}

/// Health-checks each ready worker, so that a hung or stopped one is found before it is taken.
fn ask_all(workers: &Rc<Workers>, pool: &Rc<ShapePool>) {
    for held in pool.held.borrow().iter() {
        let Some(slot) = &held.slot else { continue };
        let (id, is_well, workers, pool) = (held.seen.id, slot.answers(), Rc::downgrade(workers), Rc::downgrade(pool));
        tokio::task::spawn_local(async move {
            if !is_well.await {
                failed_when_ready(&workers, &pool, id, "a slot that was ready does not answer");
            }
        });
    }
}

/// Discards a ready worker that failed, unless a kernel took it meanwhile.
fn failed_when_ready(workers: &Weak<Workers>, pool: &Weak<ShapePool>, id: SlotId, why: &str) {
    let (Some(workers), Some(pool)) = (workers.upgrade(), pool.upgrade()) else { return };
    let ready = pool.held.borrow().iter().any(|held| held.seen.id == id && held.slot.is_some());
    if ready {
        tracing::warn!(slot = id.0, engine = pool.shape.engine.name(), "{why}");
        pool.breaker.borrow_mut().died(why, workers.pool.now_ms());
        end(&workers, &pool, id);
    }
}

/// Handles a warm worker that ended by itself.
fn died(workers: &Weak<Workers>, pool: &Weak<ShapePool>, id: SlotId, worker: WorkerId) {
    if let Some(workers) = workers.upgrade() {
        workers.reserved.died(&workers, worker);
    }
    failed_when_ready(workers, pool, id, "a slot that was ready ended by itself");
}

/// Ends a warm worker in the background; one in creation ends as soon as it is ready.
fn end(workers: &Rc<Workers>, pool: &Rc<ShapePool>, id: SlotId) {
    let slot = {
        let mut held = pool.held.borrow_mut();
        let Some(held) = held.iter_mut().find(|held| held.seen.id == id) else { return };
        held.seen.state = SlotState::Leaving;
        held.slot.take()
    };
    let Some(slot) = slot else { return };
    let (workers, pool) = (Rc::clone(workers), Rc::clone(pool));
    tokio::task::spawn_local(async move {
        slot.end(&workers).await;
        pool.count(Event::Destroyed);
        pool.remove(id);
        workers.pool.changed.notify_one();
    });
}
