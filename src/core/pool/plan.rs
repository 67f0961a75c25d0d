//! Computes the slots to create and destroy as a pure function of a view of one pool.
//!
//! The steps run in this order: abandon stuck creations, replace worn and old slots, destroy the
//! surplus, create missing slots. The caller applies a plan to the view before it makes the next
//! one: a second plan of the same moment is empty. Every event, including a failure reported to the
//! breaker, requires a new plan, and so does [`Plan::look_again_at_ms`]; for conditions that depend
//! on time alone, the latter suffices.

use super::{Breaker, Demand, Gate, Rules, Slot, SlotId, SlotState};
use crate::core::limits;

/// The current state of one pool.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The pool's validated rules.
    pub rules: &'a Rules,
    /// The pool's slots, without granted and dead workers.
    pub slots: &'a [Slot],
    /// Requests that wait for a slot.
    pub waiting: u32,
    /// How many more workers the host may start.
    pub room: u32,
    /// The host is short of memory.
    ///
    /// The caller must hold this flag for some time: if it were cleared as soon as the pool's slots
    /// are gone, the pool would refill and drain again.
    pub pressure: bool,
    /// The daemon is stopping.
    pub paused: bool,
    /// Recent requests.
    pub demand: &'a Demand,
    /// Recent failures.
    pub breaker: &'a Breaker,
}

/// One step of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Begin the creation of a slot.
    Create,
    /// Destroy a slot, which is [`SlotState::Leaving`] from then on.
    Destroy {
        /// The slot to destroy.
        slot: SlotId,
        /// The reason. The caller reports [`Why::Stuck`] to the breaker as a failure.
        why: Why,
    },
}

/// Why a slot is destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// It ran `max_exec_count` executions.
    Worn,
    /// Its age reached `max_uptime`.
    Old,
    /// It was idle for `max_idle_time`, and no request arrived during that time.
    Unused,
    /// There are more idle slots than wanted.
    Surplus,
    /// The host is short of memory.
    Pressure,
    /// The daemon is stopping.
    Stopping,
    /// It was not ready within [`Rules::creation_ms`].
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

/// The actions to perform now, and when to plan again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The actions, to be performed in this order.
    pub actions: Vec<Action>,
    /// When a plan may be needed although no event occurs, milliseconds; `None`: never.
    pub look_again_at_ms: Option<u64>,
}

/// Makes the plan for this moment.
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
    /// Idle slots that are kept so far, oldest first.
    idle: Vec<&'a Slot>,
    /// Start times of the creations within their deadline.
    creating: Vec<u64>,
    /// Creations past their deadline.
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
                SlotState::Creating { since_ms } if now_ms.saturating_sub(since_ms) >= rules.creation_ms => {
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

    /// Number of slots that count toward `max_pool_size`.
    fn have(&self) -> u32 {
        count(self.idle.len() + self.creating.len())
    }

    fn give_up_stuck(&mut self) {
        self.actions.extend(self.stuck.iter().map(|slot| Action::Destroy { slot: *slot, why: Why::Stuck }));
    }

    /// Destroys idle slots for which `why` returns a reason, oldest first, until `least` are left.
    ///
    /// The second argument of `why` is the number of idle slots left.
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

    /// Destroys worn and old slots once their replacements are ready.
    ///
    /// Only where no replacement fits beside them is one destroyed first, provided that `min_idle`
    /// slots remain.
    fn replace_stale(&mut self) {
        let fits = self.rules.max_pool_size.min(self.have().saturating_add(self.view.room));
        let least = match self.gate {
            Gate::Free => self.want.min(fits.saturating_sub(1)),
            // A replacement may never become ready.
            Gate::Trial | Gate::Shut { .. } => self.want,
        };
        let (rules, now_ms) = (self.rules, self.now_ms);
        self.recycle(least.max(rules.min_idle), |slot, _| slot.stale(rules, now_ms));
    }

    /// Destroys surplus slots that were idle for some time, because a client may request a slot
    /// again soon.
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

    /// How long a surplus slot must have been idle before it is destroyed.
    fn patience_ms(&self) -> u64 {
        let Rules { max_idle_time_ms, maintenance_interval_ms, .. } = *self.rules;
        if self.is_quiet() { max_idle_time_ms } else { maintenance_interval_ms.min(max_idle_time_ms) }
    }

    fn create(&mut self) {
        let creating = count(self.creating.len());
        // Under pressure nothing is created ahead, so a stale slot still serves a waiting request.
        let counts = |slot: &&&Slot| self.view.pressure || slot.stale(self.rules, self.now_ms).is_none();
        let usable = creating.saturating_add(count(self.idle.iter().filter(counts).count()));
        let allowed = match self.gate {
            Gate::Free => u32::MAX,
            // A stuck creation is a trial too, until its failure is reported.
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

    /// Returns the first moment at which time alone makes an action due, at most
    /// `maintenance_interval` ahead.
    fn look_again_at_ms(&self) -> Option<u64> {
        let rules = self.rules;
        let mut due: Vec<u64> =
            self.creating.iter().map(|since_ms| since_ms.saturating_add(rules.creation_ms)).collect();
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

fn idle_since_ms(slot: &Slot) -> u64 {
    match slot.state {
        SlotState::Idle { since_ms } => since_ms,
        SlotState::Creating { .. } | SlotState::Leaving => slot.created_ms,
    }
}

fn count(many: usize) -> u32 {
    u32::try_from(many).unwrap_or(u32::MAX)
}
