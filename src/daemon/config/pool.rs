//! `[pool]`: how many workers are kept ready, for all engines and for each.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::Faults;
use super::problem::Fault;
use super::values::Span;
use crate::core::engine::EngineName;
use crate::core::limits;
use crate::core::pool::{Rules, RulesError};

/// `[pool]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pools {
    /// Those of every engine that has none of its own.
    pub rules: Rules,
    /// `[pool.engines.NAME]`.
    pub engines: BTreeMap<EngineName, Rules>,
}

impl Pools {
    /// Whether workers of it are kept from the beginning: those of kaish and Python, and of every engine that has a section of its own. Of the others
    /// from their first kernel on.
    pub fn stands(&self, engine: EngineName) -> bool {
        matches!(engine, EngineName::Kaish | EngineName::Python) || self.engines.contains_key(&engine)
    }

    /// Those of an engine.
    pub fn of(&self, engine: EngineName) -> Rules {
        self.engines.get(&engine).copied().unwrap_or(self.rules)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawPool {
    // How many: where the file has a section without one of them, it is not that of the default, but one that fits the others.
    #[serde(default)]
    pool_size: Option<u32>,
    #[serde(default)]
    max_pool_size: Option<u32>,
    #[serde(default)]
    min_idle: Option<u32>,
    max_idle_time: Span,
    max_exec_count: u32,
    max_uptime: Span,
    maintenance_interval: Span,
    engines: BTreeMap<EngineName, RawEnginePool>,
}

impl Default for RawPool {
    fn default() -> Self {
        RawPool {
            pool_size: Some(limits::DEFAULT_POOL_SIZE),
            max_pool_size: Some(limits::DEFAULT_MAX_POOL_SIZE),
            min_idle: Some(limits::DEFAULT_MIN_IDLE),
            max_idle_time: Span(limits::DEFAULT_MAX_IDLE_TIME),
            max_exec_count: limits::DEFAULT_MAX_EXEC_COUNT,
            max_uptime: Span(limits::DEFAULT_MAX_UPTIME),
            maintenance_interval: Span(limits::DEFAULT_MAINTENANCE_INTERVAL),
            engines: BTreeMap::new(),
        }
    }
}

/// What is not said is as in `[pool]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawEnginePool {
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

impl RawEnginePool {
    /// Whether it has that key.
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

    /// What is not said is as in `usual`, as far as it fits what is: who keeps fewer ready need not say that so few stay in quiet times,
    /// and who keeps more need not say that so many may be.
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
        }
    }
}

fn ms(span: Span) -> u64 {
    u64::try_from(span.0.as_millis()).unwrap_or(u64::MAX)
}

/// Checks all of them.
pub(super) fn check(raw: &RawPool, faults: &mut Faults) -> Pools {
    let said = RawEnginePool {
        pool_size: raw.pool_size,
        max_pool_size: raw.max_pool_size,
        min_idle: raw.min_idle,
        max_idle_time: Some(raw.max_idle_time),
        max_exec_count: Some(raw.max_exec_count),
        max_uptime: Some(raw.max_uptime),
        maintenance_interval: Some(raw.maintenance_interval),
    };
    let rules = said.over(&Rules::default());
    let usual = rules.broken();
    usual.iter().for_each(|error| faults.add(fault(&["pool"], *error)));
    let of = |(engine, own): (&EngineName, &RawEnginePool)| {
        let rules = own.over(&rules);
        // What is wrong with the section that this one goes back to has been said.
        let new = rules.broken().into_iter().filter(|error| own.says(key_of(error)) || !usual.contains(error));
        new.for_each(|error| faults.add(fault(&["pool", "engines", engine.name()], error)));
        (*engine, rules)
    };
    let engines = raw.engines.iter().map(of).collect();
    Pools { rules, engines }
}

/// The key that an error is about.
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

impl From<&Pools> for RawPool {
    fn from(pools: &Pools) -> Self {
        let span = |ms| Span(Duration::from_millis(ms));
        let own = |rules: &Rules| RawEnginePool {
            pool_size: Some(rules.pool_size),
            max_pool_size: Some(rules.max_pool_size),
            min_idle: Some(rules.min_idle),
            max_idle_time: Some(span(rules.max_idle_time_ms)),
            max_exec_count: Some(rules.max_exec_count),
            max_uptime: Some(span(rules.max_uptime_ms)),
            maintenance_interval: Some(span(rules.maintenance_interval_ms)),
        };
        let Pools { rules, engines } = pools;
        RawPool {
            pool_size: Some(rules.pool_size),
            max_pool_size: Some(rules.max_pool_size),
            min_idle: Some(rules.min_idle),
            max_idle_time: span(rules.max_idle_time_ms),
            max_exec_count: rules.max_exec_count,
            max_uptime: span(rules.max_uptime_ms),
            maintenance_interval: span(rules.maintenance_interval_ms),
            engines: engines.iter().map(|(engine, rules)| (*engine, own(rules))).collect(),
        }
    }
}
