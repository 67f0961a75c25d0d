//! Test support: the invariants of every plan, and a model pool that performs plans.

use super::*;

/// Panics unless the plan satisfies every invariant. `exhaustive` has a test of the same name for
/// each.
pub(super) fn check(view: &View<'_>, now_ms: u64, plan: &Plan) {
    only_idle_or_stuck_slots_are_destroyed(view, now_ms, plan);
    never_below_min_idle_by_recycling(view, now_ms, plan);
    never_above_max(view, now_ms, plan);
    every_reason_is_true(view, now_ms, plan);
    open_breaker_blocks_creation(view, now_ms, plan);
    creatable_slots_are_not_deferred(view, now_ms, plan);
    next_check_is_due_in_time(view, now_ms, plan);
}

/// What remains after a plan.
struct Left<'a> {
    idle: Vec<&'a Slot>,
    /// Slots that were in creation before and are not stuck.
    creating: u32,
    stuck: u32,
    created: u32,
}

fn left<'a>(view: &View<'a>, now_ms: u64, plan: &Plan) -> Left<'a> {
    let gone = |slot: &Slot| destroyed(plan).any(|(id, _)| id == slot.id);
    let mut left = Left { idle: Vec::new(), creating: 0, stuck: 0, created: 0 };
    for slot in view.slots {
        match slot.state {
            SlotState::Creating { since_ms } if is_stuck(view, since_ms, now_ms) => left.stuck += 1,
            SlotState::Creating { .. } => left.creating += 1,
            SlotState::Idle { .. } if !gone(slot) => left.idle.push(slot),
            SlotState::Idle { .. } | SlotState::Leaving => {}
        }
    }
    left.created = plan.actions.iter().filter(|action| **action == Action::Create).count() as u32;
    left
}

fn is_stuck(view: &View<'_>, since_ms: u64, now_ms: u64) -> bool {
    now_ms - since_ms >= view.rules.creation_ms
}

fn destroyed(plan: &Plan) -> impl Iterator<Item = (SlotId, Why)> {
    plan.actions.iter().filter_map(|action| match action {
        Action::Create => None,
        Action::Destroy { slot, why } => Some((*slot, *why)),
    })
}

fn find<'a>(view: &View<'a>, id: SlotId) -> &'a Slot {
    view.slots.iter().find(|slot| slot.id == id).unwrap_or_else(|| panic!("{id:?} is not in the pool: {view:#?}"))
}

fn idle_before(view: &View<'_>) -> u32 {
    view.slots.iter().filter(|slot| matches!(slot.state, SlotState::Idle { .. })).count() as u32
}

/// Granted slots are in no view, so naming one is an error too.
pub(super) fn only_idle_or_stuck_slots_are_destroyed(view: &View<'_>, now_ms: u64, plan: &Plan) {
    let mut seen = Vec::new();
    for (id, why) in destroyed(plan) {
        let may_go = match find(view, id).state {
            SlotState::Creating { since_ms } => why == Why::Stuck && is_stuck(view, since_ms, now_ms),
            SlotState::Idle { .. } => why != Why::Stuck,
            SlotState::Leaving => false,
        };
        assert!(may_go && !seen.contains(&id), "{id:?} {why:?} in {view:#?}");
        seen.push(id);
    }
    let stuck = seen.iter().filter(|id| matches!(find(view, **id).state, SlotState::Creating { .. })).count();
    assert_eq!(left(view, now_ms, plan).stuck, stuck as u32, "stuck creations are abandoned: {view:#?}");
}

pub(super) fn never_below_min_idle_by_recycling(view: &View<'_>, now_ms: u64, plan: &Plan) {
    let forced = |why: Why| match why {
        Why::Pressure | Why::Stopping | Why::Stuck => true,
        Why::Worn | Why::Old | Why::Unused | Why::Surplus => false,
    };
    if destroyed(plan).any(|(_, why)| !forced(why)) {
        let idle = left(view, now_ms, plan).idle.len() as u32;
        assert!(idle >= view.rules.min_idle, "{idle} idle slots left of {view:#?}");
    }
}

pub(super) fn never_above_max(view: &View<'_>, now_ms: u64, plan: &Plan) {
    let left = left(view, now_ms, plan);
    if left.created > 0 {
        let all = left.idle.len() as u32 + left.creating + left.created;
        assert!(all <= view.rules.max_pool_size, "{all} slots in {view:#?}");
        assert!(left.creating + left.created <= 4, "{} created at once in {view:#?}", left.created);
        assert!(left.created <= view.room, "{} created in {view:#?}", left.created);
    }
}

pub(super) fn every_reason_is_true(view: &View<'_>, now_ms: u64, plan: &Plan) {
    let (rules, target) = (view.rules, view.rules.target(view.demand, now_ms));
    let idle = left(view, now_ms, plan).idle.len() as u32;
    for (id, why) in destroyed(plan) {
        let slot = find(view, id);
        let idle_ms = match slot.state {
            SlotState::Idle { since_ms } => now_ms - since_ms,
            SlotState::Creating { .. } | SlotState::Leaving => 0,
        };
        let is_true = match why {
            Why::Worn => slot.executions >= rules.max_exec_count,
            Why::Old => now_ms - slot.created_ms >= rules.max_uptime_ms,
            Why::Unused => {
                idle_ms >= rules.max_idle_time_ms
                    && idle >= target
                    && view.demand.is_quiet(now_ms, rules.max_idle_time_ms)
            }
            Why::Surplus => {
                let over = idle_before(view) > rules.max_pool_size;
                idle >= target && (over || idle_ms >= rules.maintenance_interval_ms.min(rules.max_idle_time_ms))
            }
            Why::Pressure => view.pressure && !view.paused,
            Why::Stopping => view.paused,
            Why::Stuck => true,
        };
        assert!(is_true, "{id:?} {why:?} in {view:#?}");
    }
    if view.paused {
        assert!(idle == 0, "idle slots left in {view:#?}");
    } else if view.pressure {
        assert_eq!(idle, idle_before(view).min(view.waiting), "idle slots ahead of demand in {view:#?}");
    }
}

pub(super) fn open_breaker_blocks_creation(view: &View<'_>, now_ms: u64, plan: &Plan) {
    let left = left(view, now_ms, plan);
    let most = match view.breaker.gate(now_ms) {
        Gate::Free => u32::MAX,
        Gate::Trial => 1u32.saturating_sub(left.creating + left.stuck),
        Gate::Shut { .. } => 0,
    };
    assert!(left.created <= most, "{} created in {view:#?}", left.created);
    assert!(left.created == 0 || !view.paused, "created in {view:#?}");
}

/// The pool creates exactly the slots that are wanted: every waiting request has a slot in creation
/// and the target is met with fresh slots, unless a limit forbids it.
pub(super) fn creatable_slots_are_not_deferred(view: &View<'_>, now_ms: u64, plan: &Plan) {
    let (rules, left) = (view.rules, left(view, now_ms, plan));
    let coming = left.creating + left.created;
    let all = left.idle.len() as u32 + coming;
    let good = if view.pressure {
        all
    } else {
        left.idle.iter().filter(|slot| slot.stale(rules, now_ms).is_none()).count() as u32 + coming
    };
    let want = if view.pressure { view.waiting } else { rules.target(view.demand, now_ms) + view.waiting };
    assert!(left.created == 0 || good <= want, "{} created in {view:#?}", left.created);
    let forbidden = view.paused
        || all >= rules.max_pool_size
        || coming >= 4
        || left.created >= view.room
        || match view.breaker.gate(now_ms) {
            Gate::Free => false,
            Gate::Trial => coming + left.stuck > 0,
            Gate::Shut { .. } => true,
        };
    assert!(good >= want || forbidden, "{good} of {want} in {view:#?}");
}

pub(super) fn next_check_is_due_in_time(view: &View<'_>, now_ms: u64, plan: &Plan) {
    match plan.look_again_at_ms {
        Some(at_ms) => {
            assert!(now_ms < at_ms && at_ms <= now_ms + view.rules.maintenance_interval_ms, "{at_ms} for {view:#?}");
        }
        None => {
            let left = left(view, now_ms, plan);
            let nothing = left.idle.is_empty() && left.creating + left.created + view.waiting == 0;
            assert!(nothing || view.paused || view.rules.max_pool_size == 0, "no next check for {view:#?}");
        }
    }
}

/// Makes plans: [`plan`], or a variant with a mistake, which the checks must find.
pub(super) type Planner = fn(&View<'_>, u64) -> Plan;

/// A pool, its host and its clients.
#[derive(Debug, Clone)]
pub(super) struct World {
    pub rules: Rules,
    pub planner: Planner,
    pub now_ms: u64,
    pub slots: Vec<Slot>,
    pub given: Vec<SlotId>,
    pub waiting: u32,
    pub room: u32,
    pub pressure: bool,
    pub paused: bool,
    pub demand: Demand,
    pub breaker: Breaker,
    pub counters: Counters,
    /// The number of the newest slot.
    pub last: u64,
}

impl World {
    pub fn new(rules: Rules, now_ms: u64) -> World {
        World {
            rules,
            planner: plan,
            now_ms,
            slots: Vec::new(),
            given: Vec::new(),
            waiting: 0,
            room: 1000,
            pressure: false,
            paused: false,
            demand: Demand::new(now_ms),
            breaker: Breaker::default(),
            counters: Counters::default(),
            last: 0,
        }
    }

    /// Creates a pool and fills it.
    pub fn full(rules: Rules, now_ms: u64) -> World {
        let mut world = World::new(rules, now_ms);
        world.settle();
        world
    }

    /// Creates the pool of a view.
    pub fn of(view: &View<'_>, now_ms: u64) -> World {
        World {
            slots: view.slots.to_vec(),
            waiting: view.waiting,
            room: view.room,
            pressure: view.pressure,
            paused: view.paused,
            demand: view.demand.clone(),
            breaker: view.breaker.clone(),
            last: view.slots.len() as u64,
            ..World::new(*view.rules, now_ms)
        }
    }

    pub fn view(&self) -> View<'_> {
        View {
            rules: &self.rules,
            slots: &self.slots,
            waiting: self.waiting,
            room: self.room,
            pressure: self.pressure,
            paused: self.paused,
            demand: &self.demand,
            breaker: &self.breaker,
        }
    }

    /// Makes a plan, checks it and performs it.
    pub fn step(&mut self) -> Plan {
        let plan = (self.planner)(&self.view(), self.now_ms);
        check(&self.view(), self.now_ms, &plan);
        for action in &plan.actions {
            match action {
                Action::Create => self.create(),
                Action::Destroy { slot, why } => {
                    let at = self.slots.iter().position(|one| one.id == *slot).expect("checked");
                    self.slots[at].state = SlotState::Leaving;
                    match why {
                        Why::Stuck => self.creation_failed("stuck"),
                        Why::Worn | Why::Old | Why::Unused | Why::Surplus | Why::Pressure | Why::Stopping => {
                            self.counters.apply(Event::Destroyed);
                        }
                    }
                }
            }
        }
        plan
    }

    fn create(&mut self) {
        self.last += 1;
        self.room -= 1;
        let state = SlotState::Creating { since_ms: self.now_ms };
        self.slots.push(Slot { id: SlotId(self.last), state, created_ms: self.now_ms, executions: 0 });
    }

    /// Completes all creations and destructions until no action is left; returns how many slots
    /// were created.
    pub fn settle(&mut self) -> u32 {
        let before = self.counters.total_created;
        self.serve();
        for _ in 0..100 {
            let idle = self.step().actions.is_empty();
            self.end_leaving();
            let ready: Vec<SlotId> = self.creating().collect();
            if idle && ready.is_empty() {
                return (self.counters.total_created - before) as u32;
            }
            ready.into_iter().for_each(|id| self.succeed(id));
        }
        panic!("the pool does not settle: {self:#?}");
    }

    pub fn creating(&self) -> impl Iterator<Item = SlotId> {
        self.slots.iter().filter(|slot| matches!(slot.state, SlotState::Creating { .. })).map(|slot| slot.id)
    }

    pub fn idle(&self) -> impl Iterator<Item = SlotId> {
        self.slots.iter().filter(|slot| matches!(slot.state, SlotState::Idle { .. })).map(|slot| slot.id)
    }

    /// Requests a slot; returns whether one was ready.
    pub fn come(&mut self) -> bool {
        self.demand.came(self.now_ms);
        if self.waiting == 0 && self.give() {
            return true;
        }
        self.counters.apply(Event::Missed);
        self.waiting += 1;
        false
    }

    fn give(&mut self) -> bool {
        let Some(id) = choose(&self.rules, &self.slots, self.now_ms) else { return false };
        assert!(self.idle().any(|one| one == id) && !self.given.contains(&id), "{id:?} is granted in {self:#?}");
        self.slots.retain(|slot| slot.id != id);
        self.given.push(id);
        self.counters.apply(Event::Taken);
        true
    }

    pub fn give_up_waiting(&mut self) {
        if self.waiting > 0 {
            self.waiting -= 1;
            self.counters.apply(Event::Refused);
        }
    }

    /// Completes the creation; a waiting request receives the slot.
    pub fn succeed(&mut self, id: SlotId) {
        let now_ms = self.now_ms;
        let slot = self.slots.iter_mut().find(|slot| slot.id == id).expect("in creation");
        (slot.state, slot.created_ms) = (SlotState::Idle { since_ms: now_ms }, now_ms);
        self.breaker.succeeded();
        self.counters.apply(Event::Created);
        self.serve();
    }

    fn serve(&mut self) {
        while self.waiting > 0 && self.give() {
            self.waiting -= 1;
        }
    }

    pub fn fail(&mut self, id: SlotId) {
        self.remove(id);
        self.creation_failed("no such image");
    }

    fn creation_failed(&mut self, reason: &str) {
        self.breaker.failed(reason, self.now_ms);
        self.counters.apply(Event::CreationFailed);
    }

    /// Ends an idle slot unexpectedly.
    pub fn die(&mut self, id: SlotId) {
        self.remove(id);
        self.breaker.died("killed", self.now_ms);
        self.counters.apply(Event::Destroyed);
    }

    fn remove(&mut self, id: SlotId) {
        let before = self.slots.len();
        self.slots.retain(|slot| slot.id != id);
        self.room += (before - self.slots.len()) as u32;
    }

    /// Ends the kernel that owns the worker.
    pub fn end_kernel(&mut self, id: SlotId) {
        let before = self.given.len();
        self.given.retain(|given| *given != id);
        assert_eq!(before, self.given.len() + 1, "{id:?} was granted once");
        self.room += 1;
        self.counters.apply(Event::Destroyed);
    }

    pub fn end_leaving(&mut self) {
        let before = self.slots.len();
        self.slots.retain(|slot| slot.state != SlotState::Leaving);
        self.room += (before - self.slots.len()) as u32;
    }

    pub fn stats(&self) -> Stats {
        Stats::of(&self.slots, self.given.len() as u32, self.counters)
    }
}
