//! What is to be created and destroyed: a pure function of a view of one pool.
//!
//! In this order: what hangs in creation is given up; what is worn or old is replaced; what is too much goes; what is missing is
//! created. Whoever performs a plan applies it to the view before the next one is made: a second plan of the same moment has
//! nothing left to do. Whatever happens then (a failure that is told to the breaker, too) asks for a new plan, and so does
//! [`Plan::look_again_at_ms`]; that one alone is enough for what depends on time.

use super::{Breaker, Demand, Gate, Rules, Slot, SlotId, SlotState};
use crate::core::limits;

/// One pool as it is now.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// What it is to be like; checked.
    pub rules: &'a Rules,
    /// Its slots. Neither those that were given to kernels nor dead ones.
    pub slots: &'a [Slot],
    /// Who waits for a slot.
    pub waiting: u32,
    /// How many more workers the host may start at all.
    pub room: u32,
    /// Memory is short on the host. Whoever says so says it for some time: if it ended as soon as the pool's own slots are gone,
    /// they would come back and go again.
    pub pressure: bool,
    /// The daemon stops.
    pub paused: bool,
    /// Who came.
    pub demand: &'a Demand,
    /// What failed.
    pub breaker: &'a Breaker,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Begin the creation of a slot.
    Create,
    /// Destroy this one; from now on it is [`SlotState::Leaving`].
    Destroy {
        /// Which one.
        slot: SlotId,
        /// Why. [`Why::Stuck`] is to be told to the breaker as a failure.
        why: Why,
    },
}

/// Why a slot goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// It ran `max_exec_count` executions.
    Worn,
    /// It has the age of `max_uptime`.
    Old,
    /// Nobody came for `max_idle_time`, and so long it was idle.
    Unused,
    /// There are more idle ones than are wanted.
    Surplus,
    /// Memory is short on the host.
    Pressure,
    /// The daemon stops.
    Stopping,
    /// It was not ready within [`limits::POOL_CREATION`].
    Stuck,
}

impl Why {
    /// The reason in a few words.
    pub const fn name(self) -> &'static str {
        match self {
            Why::Worn => "worn",
            Why::Old => "old",
            Why::Unused => "unused",
            Why::Surplus => "surplus",
            Why::Pressure => "memory pressure",
            Why::Stopping => "daemon stops",
            Why::Stuck => "stuck in creation",
        }
    }
}

/// What to do now, and when to ask again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// In this order.
    pub actions: Vec<Action>,
    /// When there may be something to do although nothing happens, milliseconds; `None`: never.
    pub look_again_at_ms: Option<u64>,
}

/// Says what to do now.
pub fn plan(view: &View<'_>, now_ms: u64) -> Plan {
    let mut draft = Draft::of(view, now_ms);
    draft.give_up_stuck();
    if view.paused {
        draft.recycle(0, |_, _| Some(Why::Stopping));
    } else if view.pressure {
        draft.recycle(view.waiting, |_, _| Some(Why::Pressure));
    } else {
        draft.replace_stale();
        draft.shrink();
    }
    draft.create();
    Plan { look_again_at_ms: draft.look_again_at_ms(), actions: draft.actions }
}

struct Draft<'a> {
    view: &'a View<'a>,
    rules: &'a Rules,
    now_ms: u64,
    gate: Gate,
    /// How many slots are wanted, idle or in creation.
    want: u32,
    /// Those that stay so far, the oldest first.
    idle: Vec<&'a Slot>,
    /// When each creation began that still has time.
    creating: Vec<u64>,
    /// Those whose time is over.
    stuck: Vec<SlotId>,
    actions: Vec<Action>,
}

impl<'a> Draft<'a> {
    fn of(view: &'a View<'a>, now_ms: u64) -> Draft<'a> {
        let rules = view.rules;
        let ahead = if view.paused || view.pressure { 0 } else { rules.target(view.demand, now_ms) };
        let waiting = if view.paused { 0 } else { view.waiting };
        let mut draft = Draft {
            view,
            rules,
            now_ms,
            gate: view.breaker.gate(now_ms),
            want: ahead.saturating_add(waiting).min(rules.max_pool_size),
            idle: Vec::new(),
            creating: Vec::new(),
            stuck: Vec::new(),
            actions: Vec::new(),
        };
        for slot in view.slots {
            match slot.state {
                SlotState::Creating { since_ms } if now_ms.saturating_sub(since_ms) >= creation_ms() => {
                    draft.stuck.push(slot.id);
                }
                SlotState::Creating { since_ms } => draft.creating.push(since_ms),
                SlotState::Idle { .. } => draft.idle.push(slot),
                SlotState::Leaving => {}
            }
        }
        draft.idle.sort_by_key(|slot| (slot.created_ms, slot.id));
        draft
    }

    fn idle_count(&self) -> u32 {
        count(self.idle.len())
    }

    /// What counts toward `max_pool_size`.
    fn have(&self) -> u32 {
        count(self.idle.len() + self.creating.len())
    }

    fn give_up_stuck(&mut self) {
        self.actions.extend(self.stuck.iter().map(|slot| Action::Destroy { slot: *slot, why: Why::Stuck }));
    }

    /// Destroys idle slots for which there is a reason, the oldest first, as long as more than `least` are left. The reason may
    /// depend on how many are left.
    fn recycle(&mut self, least: u32, why: impl Fn(&Slot, u32) -> Option<Why>) {
        let mut left = self.idle_count();
        let actions = &mut self.actions;
        self.idle.retain(|slot| {
            let why = if left > least { why(slot, left) } else { None };
            if let Some(why) = why {
                left -= 1;
                actions.push(Action::Destroy { slot: slot.id, why });
            }
            why.is_none()
        });
    }

    /// A worn or old slot goes when its replacement is there. Only where none fits in beside it one goes before, if `min_idle`
    /// are left.
    fn replace_stale(&mut self) {
        let fits = self.rules.max_pool_size.min(self.have().saturating_add(self.view.room));
        let least = match self.gate {
            Gate::Free => self.want.min(fits.saturating_sub(1)),
            // Nobody knows whether there will be a replacement.
            Gate::Trial | Gate::Shut { .. } => self.want,
        };
        let (rules, now_ms) = (self.rules, self.now_ms);
        self.recycle(least.max(rules.min_idle), |slot, _| slot.stale(rules, now_ms));
    }

    /// What is more than wanted goes when it was idle for some time: who came once, or gave up waiting, may come again.
    fn shrink(&mut self) {
        let (rules, now_ms, wait_ms) = (self.rules, self.now_ms, self.patience_ms());
        let why = if self.is_quiet() { Why::Unused } else { Why::Surplus };
        self.recycle(self.want.max(rules.min_idle), |slot, left| {
            if left > rules.max_pool_size {
                Some(Why::Surplus)
            } else {
                (now_ms.saturating_sub(idle_since_ms(slot)) >= wait_ms).then_some(why)
            }
        });
    }

    fn is_quiet(&self) -> bool {
        self.view.demand.is_quiet(self.now_ms, self.rules.max_idle_time_ms)
    }

    /// How long a slot must have been idle to go because it is one too many.
    fn patience_ms(&self) -> u64 {
        let Rules { max_idle_time_ms, maintenance_interval_ms, .. } = *self.rules;
        if self.is_quiet() { max_idle_time_ms } else { maintenance_interval_ms.min(max_idle_time_ms) }
    }

    fn create(&mut self) {
        let creating = count(self.creating.len());
        // One that is to be replaced still serves whoever waits, if nothing is created ahead.
        let counts = |slot: &&&Slot| self.view.pressure || slot.stale(self.rules, self.now_ms).is_none();
        let usable = creating.saturating_add(count(self.idle.iter().filter(counts).count()));
        let allowed = match self.gate {
            Gate::Free => u32::MAX,
            // What is stuck is a trial too, until its failure is told.
            Gate::Trial => 1u32.saturating_sub(creating.saturating_add(count(self.stuck.len()))),
            Gate::Shut { .. } => 0,
        };
        let missing = (self.want.saturating_sub(usable))
            .min(self.rules.max_pool_size.saturating_sub(self.have()))
            .min(limits::POOL_CREATIONS.saturating_sub(creating))
            .min(self.view.room)
            .min(allowed);
        let now_ms = self.now_ms;
        self.creating.extend((0..missing).map(|_| now_ms));
        self.actions.extend((0..missing).map(|_| Action::Create));
    }

    /// The first moment at which something that depends on time alone is due, and no later than after `maintenance_interval`.
    fn look_again_at_ms(&self) -> Option<u64> {
        let rules = self.rules;
        let mut due: Vec<u64> = self.creating.iter().map(|since_ms| since_ms.saturating_add(creation_ms())).collect();
        due.extend(self.idle.iter().map(|slot| slot.created_ms.saturating_add(rules.max_uptime_ms)));
        if self.idle_count() > self.want {
            due.extend(self.idle.iter().map(|slot| idle_since_ms(slot).saturating_add(self.patience_ms())));
        }
        if !rules.is_off() && !self.view.paused && !self.view.pressure {
            due.extend(self.view.demand.changes_at_ms(self.now_ms, rules.max_idle_time_ms));
        }
        if self.want > 0 || self.have() > 0 {
            due.push(self.now_ms.saturating_add(rules.maintenance_interval_ms));
        }
        if let Gate::Shut { until_ms } = self.gate
            && self.want > 0
        {
            due.push(until_ms);
        }
        due.into_iter().filter(|at_ms| *at_ms > self.now_ms).min()
    }
}

fn creation_ms() -> u64 {
    limits::POOL_CREATION.as_millis() as u64
}

fn idle_since_ms(slot: &Slot) -> u64 {
    match slot.state {
        SlotState::Idle { since_ms } => since_ms,
        SlotState::Creating { .. } | SlotState::Leaving => slot.created_ms,
    }
}

fn count(many: usize) -> u32 {
    u32::try_from(many).unwrap_or(u32::MAX)
}
