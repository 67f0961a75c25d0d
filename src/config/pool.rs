//! `[pool]`: the number of warm workers, for all engines and for single ones.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::Faults;
use super::problem::Fault;
use super::values::{Span, span};
use crate::core::engine::EngineName;
use crate::core::limits;
use crate::core::pool::{Rules, RulesError};

/// `[pool]`: the rules for every engine, and those for single engines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pool {
    // In a section that omits one of these, it derives from the section's other values, not from
    // the defaults.
    #[serde(default)]
    pool_size: Option<u32>,
    #[serde(default)]
    max_pool_size: Option<u32>,
    #[serde(default)]
    min_idle: Option<u32>,
    #[serde(with = "span")]
    max_idle_time: Duration,
    max_exec_count: u32,
    #[serde(with = "span")]
    max_uptime: Duration,
    #[serde(with = "span")]
    maintenance_interval: Duration,
    /// `[pool.engines.NAME]`.
    engines: BTreeMap<EngineName, EnginePool>,
}

impl Default for Pool {
    fn default() -> Self {
        Pool {
            pool_size: Some(limits::DEFAULT_POOL_SIZE),
            max_pool_size: Some(limits::DEFAULT_MAX_POOL_SIZE),
            min_idle: Some(limits::DEFAULT_MIN_IDLE),
            max_idle_time: limits::DEFAULT_MAX_IDLE_TIME,
            max_exec_count: limits::DEFAULT_MAX_EXEC_COUNT,
            max_uptime: limits::DEFAULT_MAX_UPTIME,
            maintenance_interval: limits::DEFAULT_MAINTENANCE_INTERVAL,
            engines: BTreeMap::new(),
        }
    }
}

impl Pool {
    /// Whether the daemon keeps warm workers of an engine from its start.
    ///
    /// True for kaish, Python and every engine with its own section. For other engines the first
    /// kernel starts the pool.
    pub fn stands(&self, engine: EngineName) -> bool {
        matches!(engine, EngineName::Kaish | EngineName::Python) || self.engines.contains_key(&engine)
    }

    /// The rules of an engine.
    pub fn of(&self, engine: EngineName) -> Rules {
        let usual = self.usual();
        self.engines.get(&engine).map_or(usual, |own| own.over(&usual))
    }

    /// The rules of engines without their own section.
    fn usual(&self) -> Rules {
        let said = EnginePool {
            pool_size: self.pool_size,
            max_pool_size: self.max_pool_size,
            min_idle: self.min_idle,
            max_idle_time: Some(Span(self.max_idle_time)),
            max_exec_count: Some(self.max_exec_count),
            max_uptime: Some(Span(self.max_uptime)),
            maintenance_interval: Some(Span(self.maintenance_interval)),
        };
        said.over(&Rules::default())
    }
}

/// Missing values are those of `[pool]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EnginePool {
    #[serde(skip_serializing_if = "Option::is_none")]
    pool_size: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_pool_size: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_idle: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_idle_time: Option<Span>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_exec_count: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_uptime: Option<Span>,
    #[serde(skip_serializing_if = "Option::is_none")]
    maintenance_interval: Option<Span>,
}

impl EnginePool {
    /// Whether the section contains that key.
    fn says(&self, key: &str) -> bool {
        match key {
            "pool_size" => self.pool_size.is_some(),
            "max_pool_size" => self.max_pool_size.is_some(),
            "min_idle" => self.min_idle.is_some(),
            "max_idle_time" => self.max_idle_time.is_some(),
            "max_exec_count" => self.max_exec_count.is_some(),
            "max_uptime" => self.max_uptime.is_some(),
            "maintenance_interval" => self.maintenance_interval.is_some(),
            _ => false,
        }
    }

    /// Missing values are those of `usual`, adapted to the given ones.
    ///
    /// A section that lowers `pool_size` need not lower the minimum, and one that raises it need
    /// not raise the maximum.
    fn over(&self, usual: &Rules) -> Rules {
        let most = self.max_pool_size.unwrap_or(limits::POOL_SLOTS);
        let pool_size = self.pool_size.unwrap_or(usual.pool_size.min(most));
        Rules {
            pool_size,
            max_pool_size: self.max_pool_size.unwrap_or(usual.max_pool_size.max(pool_size).min(limits::POOL_SLOTS)),
            min_idle: self.min_idle.unwrap_or(usual.min_idle.min(pool_size)),
            max_idle_time_ms: self.max_idle_time.map_or(usual.max_idle_time_ms, ms),
            max_exec_count: self.max_exec_count.unwrap_or(usual.max_exec_count),
            max_uptime_ms: self.max_uptime.map_or(usual.max_uptime_ms, ms),
            maintenance_interval_ms: self.maintenance_interval.map_or(usual.maintenance_interval_ms, ms),
            creation_ms: usual.creation_ms,
        }
    }
}

fn ms(span: Span) -> u64 {
    u64::try_from(span.0.as_millis()).unwrap_or(u64::MAX)
}

/// Checks all rules, and resolves missing values.
pub(super) fn check(pool: &mut Pool, faults: &mut Faults) {
    let usual = pool.usual();
    let broken = usual.broken();
    broken.iter().for_each(|error| faults.add(fault(&["pool"], *error)));
    (pool.pool_size, pool.max_pool_size, pool.min_idle) =
        (Some(usual.pool_size), Some(usual.max_pool_size), Some(usual.min_idle));
    for (engine, own) in &mut pool.engines {
        let rules = own.over(&usual);
        // Errors inherited from `[pool]` were reported there.
        let new = rules.broken().into_iter().filter(|error| own.says(key_of(error)) || !broken.contains(error));
        new.for_each(|error| faults.add(fault(&["pool", "engines", engine.name()], error)));
        *own = EnginePool::from(rules);
    }
}

/// The key that an error concerns.
fn key_of(error: &RulesError) -> &'static str {
    match error {
        RulesError::MinIdle { .. } => "min_idle",
        RulesError::PoolSize { .. } => "pool_size",
        RulesError::MaxExecCount => "max_exec_count",
        RulesError::TooMany { rule, .. } | RulesError::Short { rule } => rule,
    }
}

fn fault(section: &[&str], error: RulesError) -> Fault {
    Fault::new(&[section, &[key_of(&error)]].concat(), error.to_string())
}

impl From<Rules> for EnginePool {
    fn from(rules: Rules) -> Self {
        let span = |ms| Some(Span(Duration::from_millis(ms)));
        EnginePool {
            pool_size: Some(rules.pool_size),
            max_pool_size: Some(rules.max_pool_size),
            min_idle: Some(rules.min_idle),
            max_idle_time: span(rules.max_idle_time_ms),
            max_exec_count: Some(rules.max_exec_count),
            max_uptime: span(rules.max_uptime_ms),
            maintenance_interval: span(rules.maintenance_interval_ms),
        }
    }
}
