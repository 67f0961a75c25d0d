//! The policy of a warm pool: how many ready workers of one image, engine and shape wait for a kernel, and which of them go.
//!
//! ```text
//!             Create                       taken
//!  (nothing) ───────▶ creating ──▶ idle ─────────▶ a kernel's: serves that one and is destroyed, never put back
//!                        │           │
//!                  stuck │           │ worn, old, unused, surplus, pressure, stopping
//!                        ▼           ▼
//!                        leaving ◀───┘──▶ (nothing)
//! ```
//!
//! Owns the decisions: [`plan`] says what is to be created and destroyed, [`choose`] which slot is given. What happens is told
//! to [`Demand`], [`Breaker`] and [`Counters`]. Never starts, ends or hands out anything, and never knows a clock: every
//! `now_ms` is milliseconds of one that only goes forward.

mod breaker;
mod demand;
mod plan;

use super::limits;

pub use breaker::{Breaker, Gate};
pub use demand::Demand;
pub use plan::{Action, Plan, View, Why, plan};

/// What a pool is to be like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Idle slots while somebody comes now and then; 0: the pool is off, and slots are created only for who waits for one.
    pub pool_size: u32,
    /// Idle slots and slots in creation together, at most.
    pub max_pool_size: u32,
    /// Idle slots while nobody comes; recycling never leaves fewer.
    pub min_idle: u32,
    /// After so long nobody is expected, milliseconds.
    pub max_idle_time_ms: u64,
    /// An idle slot that ran so many executions is replaced.
    pub max_exec_count: u32,
    /// An idle slot of this age is replaced, milliseconds.
    pub max_uptime_ms: u64,
    /// After so long the pool is looked at although nothing happened, and so long a surplus is left alone, milliseconds.
    pub maintenance_interval_ms: u64,
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
        }
    }
}

/// Rules that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// More are kept in quiet times than in others.
    #[error("min_idle {min_idle} is more than pool_size {pool_size}")]
    MinIdle {
        /// `min_idle`.
        min_idle: u32,
        /// `pool_size`.
        pool_size: u32,
    },
    /// More are kept than may be.
    #[error("pool_size {pool_size} is more than max_pool_size {max_pool_size}")]
    PoolSize {
        /// `pool_size`.
        pool_size: u32,
        /// `max_pool_size`.
        max_pool_size: u32,
    },
    /// More than any pool can have.
    #[error("{rule} {slots} is more than {}", limits::POOL_SLOTS)]
    TooMany {
        /// The rule's name in the configuration.
        rule: &'static str,
        /// What it is.
        slots: u32,
    },
    /// Every slot would be worn before its first execution.
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
    /// The rules that are broken; of those that one number breaks, the first.
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

    /// Whether nothing is kept ready.
    pub fn is_off(&self) -> bool {
        self.pool_size == 0
    }

    /// How many idle slots are wanted now, those for who waits not counted: `pool_size`, or as many as lately came at once, up
    /// to `max_pool_size`; `min_idle` when nobody came for `max_idle_time`.
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

/// Names a slot. Never used again for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u64);

/// A ready worker that nobody owns yet, or one that will be. What was given to a kernel, or died, is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Its name.
    pub id: SlotId,
    /// Where it is in its life.
    pub state: SlotState,
    /// From when its age counts, milliseconds: when it became ready; before that, when its creation began.
    pub created_ms: u64,
    /// What it ran. What belongs to its creation does not count.
    pub executions: u32,
}

/// Where a slot is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotState {
    /// It is being started.
    Creating {
        /// When that began, milliseconds.
        since_ms: u64,
    },
    /// It can be given.
    Idle {
        /// Since when, milliseconds.
        since_ms: u64,
    },
    /// It is being destroyed.
    Leaving,
}

impl Slot {
    /// Why it is to be replaced whoever may come: [`Why::Worn`] or [`Why::Old`]; `None`: it is as good as new.
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

/// Which idle slot to give: of those that are not to be replaced the oldest, so that fewer have to be; else the oldest of all.
/// `None`: none is idle.
pub fn choose(rules: &Rules, slots: &[Slot], now_ms: u64) -> Option<SlotId> {
    slots
        .iter()
        .filter(|slot| matches!(slot.state, SlotState::Idle { .. }))
        .min_by_key(|slot| (slot.stale(rules, now_ms).is_some(), slot.created_ms, slot.id))
        .map(|slot| slot.id)
}

/// What happens in a pool, as far as it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A slot became ready.
    Created,
    /// A slot did not become ready.
    CreationFailed,
    /// A slot that had been ready is gone: destroyed, dead, or its kernel no longer needs it.
    Destroyed,
    /// A slot, or a worker that once was one, ran code.
    Executed,
    /// A slot was given to a kernel.
    Taken,
    /// Somebody came and there was no slot.
    Missed,
    /// Somebody who waited got none.
    Refused,
}

/// What happened since the pool began. Only ever grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Slots that became ready.
    pub total_created: u64,
    /// Of those, the ones that are gone.
    pub total_destroyed: u64,
    /// Executions of all of them, those of their kernels included.
    pub total_executions: u64,
    /// Slots that did not become ready.
    pub creation_errors: u64,
    /// Slots that were given to kernels.
    pub taken: u64,
    /// Those who came when there was none.
    pub missed: u64,
    /// Those of them who got none in the end.
    pub refused: u64,
}

impl Counters {
    /// Counts it.
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

/// Which of as many pools as may be goes for another: the one that nobody came to for longest, if that is [`limits::POOL_EVICTION_AGE`]. Of each, when
/// somebody came last; `None`: it stays whatever happens. Without such a pause pools in turn would end each other's slots before anybody comes.
pub fn gives_way(came_ms: impl IntoIterator<Item = Option<u64>>, now_ms: u64) -> Option<usize> {
    let latest = now_ms.checked_sub(limits::POOL_EVICTION_AGE.as_millis() as u64)?;
    let went = came_ms.into_iter().enumerate().filter_map(|(at, came)| Some((came?, at)));
    went.filter(|(came, _)| *came <= latest).min().map(|(_, at)| at)
}

/// How a pool is. What there is is looked at, never counted up and down: so it cannot drift from what there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Workers that came or will come from the pool: in creation, idle, given; not those that are being destroyed.
    pub total: u32,
    /// Slots that can be given.
    pub idle: u32,
    /// Given to kernels that live.
    pub active: u32,
    /// What happened.
    pub counters: Counters,
}

impl Stats {
    /// Those of these slots, beside so many that kernels have.
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
