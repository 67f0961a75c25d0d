//! The configuration: one TOML file, every key with a default, unknown keys refused.
//!
//! ```text
//! text ─ read.rs ─▶ RawConfig (shape) ─ check.rs ─▶ Config (checked, what the daemon runs with)
//!                        ▲                              │
//!                        └───────── to_toml ────────────┘
//! ```
//! `config.example.toml` shows every key; a test keeps it true.

mod check;
mod host;
mod path_rules;
mod pool;
mod problem;
mod raw;
mod read;
mod servers;
mod values;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::host::account;
pub use self::path_rules::PathRules;
pub use self::pool::Pools;
pub use self::problem::{ConfigError, Problem};
pub use self::raw::RawConfig;
use self::raw::{
    RawBash, RawDaemon, RawDefaults, RawEngines, RawLimits, RawMcp, RawNode, RawPython, RawSandbox, RawUpkeep,
};
use self::read::Document;
use self::values::{Cpus, Size, Span, Wait};
use super::paths::Paths;
use crate::core::engine::EngineName;
use crate::core::retention::Retention;
use crate::core::spec::{KernelLimits, Net};
use crate::mcp::allow::{AllowList, ServerEntry};

/// Largest configuration file, bytes.
const FILE_BYTES: u64 = 1 << 20;

/// What the daemon runs with: every value is checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// What a new kernel has when its creator does not say.
    pub defaults: Defaults,
    /// Bounds of this daemon, within those of `core::limits`.
    pub limits: Limits,
    /// Rules of the sandbox.
    pub sandbox: Sandbox,
    /// The daemon's own behaviour.
    pub daemon: Daemon,
    /// What is done now and then.
    pub upkeep: Upkeep,
    /// Workers that are kept ready.
    pub pools: Pools,
    /// The Python engine.
    pub engines: Engines,
    /// The MCP servers that kernels may use, ordered by name.
    pub mcp_servers: Vec<ServerEntry>,
}

/// `[defaults]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// The interpreter.
    pub engine: EngineName,
    /// Bounds of one kernel.
    pub limits: KernelLimits,
    /// Idle time after which a kernel is stopped; `None`: never.
    pub idle_timeout: Option<Duration>,
    /// Output that the journal keeps of one execution, bytes.
    pub output_kept_bytes: u64,
    /// The network.
    pub net: Net,
    /// How long checkpoints that ryokan takes by itself are kept.
    pub retention: Retention,
}

/// `[limits]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Kernels, live or not.
    pub kernels: usize,
    /// Kernels of one user of a system-wide daemon.
    pub kernels_per_user: usize,
    /// Workers at once.
    pub workers: usize,
    /// Workers of one user of a system-wide daemon.
    pub workers_per_user: usize,
    /// The sum of all workers' memory limits, bytes; `None`: no bound.
    pub memory_bytes: Option<u64>,
    /// The same for one user of a system-wide daemon.
    pub memory_per_user_bytes: Option<u64>,
    /// Workers that are started at once, those for the pool not counted.
    pub worker_starts: usize,
    /// Who wants a worker waits so long for his turn.
    pub worker_wait: Duration,
    /// Clients at once.
    pub clients: usize,
    /// Clients of one user of a system-wide daemon.
    pub clients_per_user: usize,
    /// Executions that run at once, over all kernels.
    pub executions_in_flight: usize,
    /// The same for one user of a system-wide daemon.
    pub executions_in_flight_per_user: usize,
    /// Executions that wait in one kernel.
    pub executions_queued: usize,
}

/// `[sandbox]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// More host paths that every kernel sees, read-only, at their own place.
    pub system_paths: Vec<PathBuf>,
    /// The account that runs the workers of a daemon that was started as root.
    pub worker_user: String,
    /// Sandbox layers that kernels may ask to do without.
    pub allow_degraded: Vec<String>,
    /// Whether kernels may ask for the host's network.
    pub net_host_allowed: bool,
    /// Host paths that no kernel is ever given (`deny_paths`).
    pub path_rules: PathRules,
}

/// `[daemon]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Daemon {
    /// A worker whose daemon is gone lives this long.
    pub orphan_grace: Duration,
    /// An orderly stop takes at most this long.
    pub drain: Duration,
    /// What an acknowledged change survives.
    pub durability: Durability,
    /// Form of log lines.
    pub log_format: LogFormat,
    /// Which log lines, in the words of `tracing_subscriber::EnvFilter`.
    pub log_level: String,
    /// A daemon that was started on demand ends after this long without work; `None`: never.
    pub idle_exit: Option<Duration>,
    /// Where metrics are served beside their socket: an address of the loopback.
    pub metrics_address: Option<SocketAddr>,
    /// The PSI file that says when memory is short; `None`: nobody asks.
    pub pressure_file: Option<PathBuf>,
}

impl Daemon {
    /// The filter to log with: `log_level`, and rmcp silent unless it is named, because at `info` and `warn` it writes
    /// whole messages of MCP servers into the log.
    pub fn log_filter(&self) -> String {
        if self.log_level.contains("rmcp") { self.log_level.clone() } else { format!("rmcp=error,{}", self.log_level) }
    }
}

/// `[upkeep]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upkeep {
    /// How often what is old or named by nobody is removed; `None`: only when it is asked for.
    pub interval: Option<Duration>,
    /// Bytes that one turn copies at most.
    pub copied_bytes: u64,
    /// Copies of kernels' files that are kept ready for their next fork; 0: none.
    pub spares: usize,
    /// For how long what was lately stored or used again is no garbage.
    pub grace: Duration,
}

/// `[engines]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engines {
    /// `[engines.python]`.
    pub python: Python,
    /// `[engines.bash]`: the interpreter.
    pub bash: PathBuf,
    /// `[engines.node]`: the interpreter.
    pub node: PathBuf,
}

impl Engines {
    /// The interpreters of those that are programs of the host.
    pub fn interpreters(&self) -> BTreeMap<EngineName, PathBuf> {
        let Engines { python, bash, node } = self;
        [(EngineName::Python, &python.command), (EngineName::Bash, bash), (EngineName::Node, node)]
            .map(|(engine, command)| (engine, command.clone()))
            .into()
    }
}

/// `[engines.python]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Python {
    /// The interpreter: a name in the system's program folders, or an absolute path.
    pub command: PathBuf,
    /// Memory that copies of one kernel's interpreter may take, bytes; 0: none are kept.
    pub rollback_bytes: u64,
    /// Modules that a worker which waits for a kernel has loaded already.
    pub preload: Vec<String>,
}

/// What an acknowledged change survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The end of any process; a loss of power may take the last moments, never consistency.
    Process,
    /// A loss of power too: every acknowledgement waits for the disk.
    Power,
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

impl Default for Config {
    fn default() -> Self {
        check::check(&RawConfig::default()).expect("a test checks the defaults")
    }
}

impl Config {
    /// Reads the configuration of these paths; without a file, the defaults.
    ///
    /// # Errors
    /// A file that cannot be read, that others could have written, or with anything wrong in it.
    pub fn load(paths: &Paths) -> Result<Config, ConfigError> {
        match Self::read(&paths.config_file()) {
            Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            other => other,
        }
    }

    /// Reads this very file.
    ///
    /// # Errors
    /// As [`Config::load`], and a file that is not there.
    pub fn read(file: &Path) -> Result<Config, ConfigError> {
        Self::parse(&Self::text_of(file)?, file).map_err(ConfigError::Wrong)
    }

    fn text_of(file: &Path) -> Result<String, ConfigError> {
        let failed = |source| ConfigError::Read { path: file.to_owned(), source };
        let mut opened = File::open(file).map_err(failed)?;
        let meta = opened.metadata().map_err(failed)?;
        let refused = |what: String, hint: &str| {
            let problem = Problem { file: file.to_owned(), line: 0, key: String::new(), what, hint: hint.into() };
            ConfigError::Wrong(vec![problem])
        };
        if !meta.is_file() {
            return Err(refused("is not a file".into(), ""));
        }
        // Whoever can write this file can run programs as the daemon's user.
        if meta.mode() & 0o022 != 0 {
            return Err(refused(
                format!("can be written to by others (mode {:04o})", meta.mode() & 0o7777),
                "chmod go-w",
            ));
        }
        if meta.uid() != 0 && meta.uid() != nix::unistd::geteuid().as_raw() {
            return Err(refused(format!("belongs to uid {}", meta.uid()), "it must be yours or root's"));
        }
        let mut text = String::new();
        opened.by_ref().take(FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > FILE_BYTES {
            return Err(refused(format!("is larger than {FILE_BYTES} bytes"), ""));
        }
        Ok(text)
    }

    /// Takes the text of `file`.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(text: &str, file: &Path) -> Result<Config, Vec<Problem>> {
        let document = Document::parse(text).map_err(|(line, fault)| vec![fault.at(file, line)])?;
        let (raw, mut faults) = document.read();
        match check::check(&raw) {
            Ok(config) if faults.is_empty() => return Ok(config),
            Ok(_) => {}
            // A key that is wrong in shape was left out, which may make others look wrong: name each key once.
            Err(more) => faults.extend(
                more.into_iter()
                    .filter(|fault| !faults.iter().any(|f| f.key.starts_with(&fault.key)))
                    .collect::<Vec<_>>(),
            ),
        }
        let mut problems: Vec<_> = faults.into_iter().map(|fault| document.place(fault, file)).collect();
        problems.sort_by_key(|problem| problem.line);
        Err(problems)
    }

    /// What `text`, which this was taken from, names and this host lacks.
    fn lacking(&self, text: &str, file: &Path) -> Vec<Problem> {
        let Ok(document) = Document::parse(text) else { return Vec::new() };
        let faults = host::lacking(self, |key| document.has(key));
        faults.into_iter().map(|fault| document.place(fault, file)).collect()
    }

    /// The effective values as a configuration file.
    pub fn to_toml(&self) -> String {
        toml::to_string(&RawConfig::from(self)).expect("tables of plain values are always TOML")
    }

    /// The same as JSON, for programs.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(RawConfig::from(self)).expect("tables of plain values are always JSON")
    }

    /// The allow-list for MCP servers; `file` is named in its hints.
    pub fn allow_list(&self, file: PathBuf) -> AllowList {
        AllowList::new(self.mcp_servers.iter().cloned(), file)
    }
}

/// Everything that is wrong with a configuration file, what it names that this host lacks, and what of it no kernel could start with; nothing if the
/// daemon would start with it, have all of its engines, and run kernels.
pub fn check(file: &Path) -> Vec<Problem> {
    let checked = Config::text_of(file).and_then(|text| {
        let config = Config::parse(&text, file).map_err(ConfigError::Wrong)?;
        Ok(config.lacking(&text, file))
    });
    match checked {
        Ok(problems) | Err(ConfigError::Wrong(problems)) => problems,
        Err(ConfigError::Read { path, source }) => {
            vec![Problem { file: path, line: 0, key: String::new(), what: source.to_string(), hint: String::new() }]
        }
    }
}

impl From<&Config> for RawConfig {
    fn from(config: &Config) -> Self {
        let Config { defaults, limits, sandbox, daemon, upkeep, pools, engines, mcp_servers } = config;
        let Engines { python, bash, node } = engines;
        RawConfig {
            defaults: RawDefaults {
                engine: defaults.engine,
                memory: Size(defaults.limits.memory_bytes),
                cpus: Cpus(defaults.limits.cpu_milli),
                pids: defaults.limits.pids,
                open_files: defaults.limits.open_files,
                workspace_size: Size(defaults.limits.workspace_bytes),
                idle_timeout: Wait(defaults.idle_timeout),
                output_kept: Size(defaults.output_kept_bytes),
                net: defaults.net,
                keep_checkpoints: defaults.retention.newest.unwrap_or(0),
                keep_checkpoints_for: Wait(defaults.retention.keep_for_ms.map(Duration::from_millis)),
            },
            limits: RawLimits {
                kernels: limits.kernels,
                kernels_per_user: limits.kernels_per_user,
                workers: limits.workers,
                workers_per_user: limits.workers_per_user,
                memory: Size(limits.memory_bytes.unwrap_or(0)),
                memory_per_user: Size(limits.memory_per_user_bytes.unwrap_or(0)),
                worker_starts: limits.worker_starts,
                worker_wait: Span(limits.worker_wait),
                clients: limits.clients,
                clients_per_user: limits.clients_per_user,
                executions_in_flight: limits.executions_in_flight,
                executions_in_flight_per_user: limits.executions_in_flight_per_user,
                executions_queued: limits.executions_queued,
            },
            sandbox: RawSandbox {
                system_paths: sandbox.system_paths.clone(),
                worker_user: sandbox.worker_user.clone(),
                allow_degraded: sandbox.allow_degraded.clone(),
                net_host_allowed: sandbox.net_host_allowed,
                deny_paths: sandbox.path_rules.texts().map(str::to_owned).collect(),
            },
            daemon: RawDaemon {
                orphan_grace: Span(daemon.orphan_grace),
                drain: Span(daemon.drain),
                durability: daemon.durability,
                log_format: daemon.log_format,
                log_level: daemon.log_level.clone(),
                idle_exit: Wait(daemon.idle_exit),
                metrics_address: daemon.metrics_address.map(|address| address.to_string()).unwrap_or_default(),
                pressure_file: daemon.pressure_file.clone().unwrap_or_default(),
            },
            upkeep: RawUpkeep {
                interval: Wait(upkeep.interval),
                copied: Size(upkeep.copied_bytes),
                spares: upkeep.spares,
                grace: Span(upkeep.grace),
            },
            pool: pools.into(),
            engines: RawEngines {
                python: RawPython {
                    command: python.command.to_string_lossy().into_owned(),
                    rollback_memory: Size(python.rollback_bytes),
                    preload: python.preload.clone(),
                },
                bash: RawBash { command: bash.to_string_lossy().into_owned() },
                node: RawNode { command: node.to_string_lossy().into_owned() },
            },
            mcp: RawMcp {
                servers: mcp_servers.iter().map(|entry| (entry.name.clone(), servers::to_raw(entry))).collect(),
            },
        }
    }
}

#[cfg(test)]
mod tests;
