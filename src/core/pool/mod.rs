//! The policy of a warm pool: how many ready workers of one image, engine and shape are held, and
//! which of them are destroyed.
//!
//! ```text
//!             Create                       taken
//!  (nothing) ───────▶ creating ──▶ idle ─────────▶ granted: serves one kernel, then is destroyed
//!                        │           │
//!                  stuck │           │ worn, old, unused, surplus, pressure, stopping
//!                        ▼           ▼
//!                        leaving ◀───┘──▶ (nothing)
//! ```
//!
//! Owns the decisions: [`plan`] returns the slots to create and destroy, [`choose`] the slot to
//! grant. Events are reported to [`Demand`], [`Breaker`] and [`Counters`]. This module never
//! starts, ends or grants a worker and never reads a clock: every `now_ms` is milliseconds of a
//! monotonic clock.

mod breaker;
mod demand;
mod plan;
mod refresh;

use std::time::Duration;

use super::limits;
use super::spec::Isolation;

pub use breaker::{Breaker, Gate};
pub use demand::Demand;
pub use plan::{Action, Plan, View, Why, plan};
pub use refresh::{Attempt, Refresh, RefreshRules, RefreshTime, TemplateAge, refresh};

/// The configured size and lifetimes of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Idle slots while requests arrive. With 0 the pool is off, and slots are created only for
    /// waiting requests.
    pub pool_size: u32,
    /// Maximum of idle slots and slots in creation together.
    pub max_pool_size: u32,
    /// Idle slots while no requests arrive; recycling never leaves fewer.
    pub min_idle: u32,
    /// Milliseconds without a request after which the pool counts as quiet.
    pub max_idle_time_ms: u64,
    /// Executions after which an idle slot is replaced.
    pub max_exec_count: u32,
    /// Age in milliseconds at which an idle slot is replaced.
    pub max_uptime_ms: u64,
    /// Longest time between two plans, and the idle time before a surplus slot is destroyed,
    /// milliseconds.
    pub maintenance_interval_ms: u64,
    /// Milliseconds after which a creation is stuck.
    pub creation_ms: u64,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            pool_size: limits::DEFAULT_POOL_SIZE,
            max_pool_size: limits::DEFAULT_MAX_POOL_SIZE,
            min_idle: limits::DEFAULT_MIN_IDLE,
            max_idle_time_ms: limits::DEFAULT_MAX_IDLE_TIME.as_millis() as u64,
            max_exec_count: limits::DEFAULT_MAX_EXEC_COUNT,
            max_uptime_ms: limits::DEFAULT_MAX_UPTIME.as_millis() as u64,
            maintenance_interval_ms: limits::DEFAULT_MAINTENANCE_INTERVAL.as_millis() as u64,
            creation_ms: limits::POOL_CREATION.as_millis() as u64,
        }
    }
}

/// Invalid [`Rules`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// The minimum exceeds the normal size.
    #[error("min_idle {min_idle} is more than pool_size {pool_size}")]
    MinIdle {
        /// `min_idle`.
        min_idle: u32,
        /// `pool_size`.
        pool_size: u32,
    },
    /// The normal size exceeds the maximum.
    #[error("pool_size {pool_size} is more than max_pool_size {max_pool_size}")]
    PoolSize {
        /// `pool_size`.
        pool_size: u32,
        /// `max_pool_size`.
        max_pool_size: u32,
    },
    /// A size exceeds [`limits::POOL_SLOTS`].
    #[error("{rule} {slots} is more than {}", limits::POOL_SLOTS)]
    TooMany {
        /// The rule's name in the configuration.
        rule: &'static str,
        /// The configured value.
        slots: u32,
    },
    /// Zero executions would make every slot worn before its first one.
    #[error("max_exec_count is at least 1")]
    MaxExecCount,
    /// A time shorter than [`limits::POOL_TIME_MIN`].
    #[error("{rule} is at least a second")]
    Short {
        /// The rule's name in the configuration.
        rule: &'static str,
    },
}

impl Rules {
    /// Returns the violated rules; a value that violates several is reported once.
    pub fn broken(&self) -> Vec<RulesError> {
        let Rules { pool_size, max_pool_size, min_idle, max_exec_count, .. } = *self;
        let sizes = [("pool_size", pool_size), ("max_pool_size", max_pool_size)];
        let too_many = sizes.into_iter().filter(|(_, slots)| *slots > limits::POOL_SLOTS);
        let mut broken: Vec<_> = too_many.map(|(rule, slots)| RulesError::TooMany { rule, slots }).collect();
        if min_idle > pool_size {
            broken.push(RulesError::MinIdle { min_idle, pool_size });
        }
        if (max_pool_size.saturating_add(1)..=limits::POOL_SLOTS).contains(&pool_size) {
            broken.push(RulesError::PoolSize { pool_size, max_pool_size });
        }
        if max_exec_count == 0 {
            broken.push(RulesError::MaxExecCount);
        }
        let times = [
            ("max_idle_time", self.max_idle_time_ms),
            ("max_uptime", self.max_uptime_ms),
            ("maintenance_interval", self.maintenance_interval_ms),
        ];
        let least_ms = limits::POOL_TIME_MIN.as_millis() as u64;
        let short = times.into_iter().filter(|(_, ms)| *ms < least_ms);
        broken.extend(short.map(|(rule, _)| RulesError::Short { rule }));
        broken
    }

    /// Whether the pool holds no slots ahead of demand.
    pub fn is_off(&self) -> bool {
        self.pool_size == 0
    }

    /// Returns how many idle slots are wanted now, beside those for waiting requests.
    ///
    /// The target is `pool_size`, or the size of the largest recent burst up to `max_pool_size`;
    /// `min_idle` once no request arrived for `max_idle_time`.
    pub fn target(&self, demand: &Demand, now_ms: u64) -> u32 {
        if self.is_off() {
            0
        } else if demand.is_quiet(now_ms, self.max_idle_time_ms) {
            self.min_idle
        } else {
            demand.peak(now_ms, self.max_idle_time_ms).max(self.pool_size).min(self.max_pool_size)
        }
    }
}

/// The costs of an isolation's warm workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// Slots of a pool that its first kernel opened, while requests arrive.
    pub on_demand: u32,
    /// Deadline for the creation of a slot.
    pub creation: Duration,
    /// Time for which a granted slot stays reserved for its kernel's first use.
    pub reservation: Duration,
}

impl Costs {
    /// The costs of that isolation.
    pub const fn of(isolation: Isolation) -> Costs {
        let (on_demand, creation, reservation) = match isolation {
            Isolation::Process => (limits::POOL_ON_DEMAND, limits::POOL_CREATION, limits::POOL_RESERVATION),
            Isolation::Microvm => (limits::VM_POOL_ON_DEMAND, limits::VM_CREATION, limits::VM_RESERVATION),
        };
        Costs { on_demand, creation, reservation }
    }

    /// The rules of a pool of that isolation.
    pub const fn rules(self, configured: Rules) -> Rules {
        Rules { creation_ms: self.creation.as_millis() as u64, ..configured }
    }

    /// The rules of a pool that stays open only while demand lasts.
    pub fn rules_on_demand(self, configured: Rules) -> Rules {
        Rules { pool_size: configured.pool_size.min(self.on_demand), min_idle: 0, ..self.rules(configured) }
    }
}

/// Identifies a slot; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u64);

/// A worker of the pool, in creation, ready or leaving, that belongs to no kernel.
///
/// Granted and dead workers are not slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The slot's identifier.
    pub id: SlotId,
    /// The slot's lifecycle state.
    pub state: SlotState,
    /// Start of the slot's age, milliseconds: when it became ready or, before that, when its
    /// creation began.
    pub created_ms: u64,
    /// Executions so far, without those of its creation.
    pub executions: u32,
}

/// The lifecycle state of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotState {
    /// The worker is starting.
    Creating {
        /// When the creation began, milliseconds.
        since_ms: u64,
    },
    /// The slot can be granted.
    Idle {
        /// When the slot became idle, milliseconds.
        since_ms: u64,
    },
    /// The worker is being destroyed.
    Leaving,
}

impl Slot {
    /// Returns why the slot must be replaced regardless of demand: [`Why::Worn`], [`Why::Old`] or
    /// `None`.
    pub fn stale(&self, rules: &Rules, now_ms: u64) -> Option<Why> {
        if self.executions >= rules.max_exec_count {
            Some(Why::Worn)
        } else if now_ms.saturating_sub(self.created_ms) >= rules.max_uptime_ms {
            Some(Why::Old)
        } else {
            None
        }
    }
}

/// Returns the idle slot to grant, or `None` if none is idle.
///
/// Prefers the oldest slot that is not stale, so that fewer reach their maximum age; otherwise the
/// oldest of all.
pub fn choose(rules: &Rules, slots: &[Slot], now_ms: u64) -> Option<SlotId> {
    slots
        .iter()
        .filter(|slot| matches!(slot.state, SlotState::Idle { .. }))
        .min_by_key(|slot| (slot.stale(rules, now_ms).is_some(), slot.created_ms, slot.id))
        .map(|slot| slot.id)
}

/// A counted event of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A slot became ready.
    Created,
    /// A slot did not become ready.
    CreationFailed,
    /// A slot that had been ready is gone: destroyed, dead, or no longer used by its kernel.
    Destroyed,
    /// A slot, or a worker that once was a slot, ran code.
    Executed,
    /// A slot was granted to a kernel.
    Taken,
    /// A request found no ready slot.
    Missed,
    /// A waiting request ended without a slot.
    Refused,
}

/// Totals since the pool began; they never decrease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Slots that became ready.
    pub total_created: u64,
    /// Slots that were ready and are gone.
    pub total_destroyed: u64,
    /// Executions of all slots, including those after they were granted.
    pub total_executions: u64,
    /// Slots that did not become ready.
    pub creation_errors: u64,
    /// Slots granted to kernels.
    pub taken: u64,
    /// Requests that found no ready slot.
    pub missed: u64,
    /// Missed requests that never received a slot.
    pub refused: u64,
}

impl Counters {
    /// Counts `event`.
    pub fn apply(&mut self, event: Event) {
        let counter = match event {
            Event::Created => &mut self.total_created,
            Event::CreationFailed => &mut self.creation_errors,
            Event::Destroyed => &mut self.total_destroyed,
            Event::Executed => &mut self.total_executions,
            Event::Taken => &mut self.taken,
            Event::Missed => &mut self.missed,
            Event::Refused => &mut self.refused,
        };
        *counter = counter.saturating_add(1);
    }
}

/// Returns the index of the pool to evict when a new pool exceeds the maximum number.
///
/// That is the least recently used pool, provided that it has been unused for
/// [`limits::POOL_EVICTION_AGE`]. Without this minimum age, pools used in turn would evict each
/// other before their slots are used. `came_ms` holds the time of each pool's last request; `None`
/// marks a pool that must not be evicted.
pub fn evicted_pool(came_ms: impl IntoIterator<Item = Option<u64>>, now_ms: u64) -> Option<usize> {
    let latest = now_ms.checked_sub(limits::POOL_EVICTION_AGE.as_millis() as u64)?;
    let went = came_ms.into_iter().enumerate().filter_map(|(at, came)| Some((came?, at)));
    went.filter(|(came, _)| *came <= latest).min().map(|(_, at)| at)
}

/// The current size and totals of a pool.
///
/// The sizes are computed from the slots instead of being counted up and down, so they cannot
/// drift.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Workers of the pool: in creation, idle or granted, but not those being destroyed.
    pub total: u32,
    /// Slots that can be granted.
    pub idle: u32,
    /// Workers granted to live kernels.
    pub active: u32,
    /// The totals.
    pub counters: Counters,
}

impl Stats {
    /// Computes the statistics from `slots` and from `active` granted workers.
    pub fn of(slots: &[Slot], active: u32, counters: Counters) -> Stats {
        let (mut idle, mut creating) = (0u32, 0u32);
        for slot in slots {
            match slot.state {
                SlotState::Creating { .. } => creating = creating.saturating_add(1),
                SlotState::Idle { .. } => idle = idle.saturating_add(1),
                SlotState::Leaving => {}
            }
        }
        Stats { total: idle.saturating_add(creating).saturating_add(active), idle, active, counters }
    }
}

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod regressions;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
