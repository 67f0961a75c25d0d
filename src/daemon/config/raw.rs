//! The configuration file's shape, key by key. Unknown keys are refused; what the values mean is checked in `check.rs`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::pool::RawPool;
use super::values::{Cpus, Size, Span, Wait};
use super::{Durability, LogFormat};
use crate::core::engine::EngineName;
use crate::core::limits;
use crate::core::spec::Net;
use crate::mcp::allow::DEFAULT_INSTANCES;

/// The whole file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawConfig {
    pub(super) defaults: RawDefaults,
    pub(super) limits: RawLimits,
    pub(super) sandbox: RawSandbox,
    pub(super) daemon: RawDaemon,
    pub(super) upkeep: RawUpkeep,
    pub(super) pool: RawPool,
    pub(super) engines: RawEngines,
    pub(super) mcp: RawMcp,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawDefaults {
    pub(super) engine: EngineName,
    pub(super) memory: Size,
    pub(super) cpus: Cpus,
    pub(super) pids: u32,
    pub(super) open_files: u32,
    pub(super) workspace_size: Size,
    pub(super) idle_timeout: Wait,
    pub(super) output_kept: Size,
    pub(super) net: Net,
    pub(super) keep_checkpoints: u32,
    pub(super) keep_checkpoints_for: Wait,
}

impl Default for RawDefaults {
    fn default() -> Self {
        Self {
            engine: EngineName::Kaish,
            memory: Size(limits::DEFAULT_MEMORY_BYTES),
            cpus: Cpus(limits::DEFAULT_CPU_MILLI),
            pids: limits::DEFAULT_PIDS,
            open_files: limits::DEFAULT_OPEN_FILES,
            workspace_size: Size(limits::DEFAULT_WORKSPACE_BYTES),
            idle_timeout: Wait(Some(limits::DEFAULT_IDLE_TIMEOUT)),
            output_kept: Size(limits::OUTPUT_KEPT_BYTES),
            net: Net::None,
            keep_checkpoints: limits::DEFAULT_CHECKPOINTS_KEPT,
            keep_checkpoints_for: Wait(Some(limits::DEFAULT_CHECKPOINTS_KEPT_FOR)),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawLimits {
    pub(super) kernels: usize,
    pub(super) kernels_per_user: usize,
    pub(super) workers: usize,
    pub(super) workers_per_user: usize,
    pub(super) memory: Size,
    pub(super) memory_per_user: Size,
    pub(super) worker_starts: usize,
    pub(super) worker_wait: Span,
    pub(super) clients: usize,
    pub(super) clients_per_user: usize,
    pub(super) executions_in_flight: usize,
    pub(super) executions_in_flight_per_user: usize,
    pub(super) executions_queued: usize,
}

impl Default for RawLimits {
    fn default() -> Self {
        Self {
            kernels: limits::KERNELS,
            kernels_per_user: 2000,
            workers: 1000,
            workers_per_user: 500,
            memory: Size(0),
            memory_per_user: Size(0),
            worker_starts: limits::WORKER_STARTS,
            worker_wait: Span(limits::WORKER_WAIT),
            clients: limits::CLIENTS,
            clients_per_user: limits::CLIENTS_PER_USER,
            executions_in_flight: 1000,
            executions_in_flight_per_user: 500,
            executions_queued: limits::EXECUTIONS_QUEUED,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawSandbox {
    pub(super) system_paths: Vec<PathBuf>,
    pub(super) worker_user: String,
    pub(super) allow_degraded: Vec<String>,
    pub(super) net_host_allowed: bool,
    pub(super) deny_paths: Vec<String>,
}

impl Default for RawSandbox {
    fn default() -> Self {
        let secrets =
            ["~/.ssh", "~/.gnupg", "~/.aws", "~/.azure", "~/.config/gcloud", "~/.kube", "~/.docker", "~/.netrc"];
        Self {
            system_paths: Vec::new(),
            worker_user: "nobody".into(),
            allow_degraded: Vec::new(),
            net_host_allowed: true,
            deny_paths: secrets.map(String::from).to_vec(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawDaemon {
    pub(super) orphan_grace: Span,
    pub(super) drain: Span,
    pub(super) durability: Durability,
    pub(super) log_format: LogFormat,
    pub(super) log_level: String,
    pub(super) idle_exit: Wait,
    pub(super) metrics_address: String,
    pub(super) pressure_file: std::path::PathBuf,
}

impl Default for RawDaemon {
    fn default() -> Self {
        Self {
            orphan_grace: Span(limits::ORPHAN_GRACE),
            drain: Span(limits::DAEMON_DRAIN),
            durability: Durability::Process,
            log_format: LogFormat::Text,
            log_level: "info".into(),
            idle_exit: Wait(Some(std::time::Duration::from_secs(900))),
            metrics_address: String::new(),
            pressure_file: "/proc/pressure/memory".into(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawUpkeep {
    pub(super) interval: Wait,
    pub(super) copied: Size,
    pub(super) spares: usize,
    pub(super) grace: Span,
}

impl Default for RawUpkeep {
    fn default() -> Self {
        Self {
            interval: Wait(Some(limits::UPKEEP_INTERVAL)),
            copied: Size(limits::UPKEEP_TURN_BYTES),
            spares: limits::SPARES,
            grace: Span(limits::STORE_GRACE),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawEngines {
    pub(super) python: RawPython,
    pub(super) bash: RawBash,
    pub(super) node: RawNode,
}

/// `[engines.bash]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawBash {
    pub(super) command: String,
}

impl Default for RawBash {
    fn default() -> Self {
        Self { command: "bash".into() }
    }
}

/// `[engines.node]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawNode {
    pub(super) command: String,
}

impl Default for RawNode {
    fn default() -> Self {
        Self { command: "node".into() }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawPython {
    pub(super) command: String,
    pub(super) rollback_memory: Size,
    pub(super) preload: Vec<String>,
}

impl Default for RawPython {
    fn default() -> Self {
        Self { command: "python3".into(), rollback_memory: Size(limits::ROLLBACK_BYTES), preload: Vec::new() }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawMcp {
    pub(super) servers: BTreeMap<String, RawServer>,
}

/// One `[mcp.servers.NAME]`: either `command` with its keys, or `url` with its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawServer {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) command: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) args: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) url: Option<String>,
    pub(super) pass_env: Vec<String>,
    pub(super) kernels: Vec<String>,
    pub(super) timeout: Span,
    pub(super) max_instances: u32,
    // Tables come after plain keys, as TOML wants them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) env: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) headers: Option<BTreeMap<String, String>>,
}

impl Default for RawServer {
    fn default() -> Self {
        Self {
            command: None,
            args: None,
            url: None,
            pass_env: Vec::new(),
            kernels: vec!["*".into()],
            timeout: Span(limits::MCP_CALL),
            max_instances: DEFAULT_INSTANCES,
            env: None,
            headers: None,
        }
    }
}
