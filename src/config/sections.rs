//! The sections of the configuration file with their keys and defaults. `check.rs` checks their
//! values.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::path_rules::PathRules;
use super::values::{bound, cpus, loopback, optional_path, size, span, wait};
use crate::core::accelerator::Accelerator;
use crate::core::durability::Durability;
use crate::core::engine::EngineName;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::pool::RefreshRules;
use crate::core::retention::Retention;
use crate::core::spec::{KernelLimits, KernelSpec, Net};
use crate::core::vmm::WantedVmm;

/// `[defaults]`: values of a new kernel that its creator does not specify.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// The interpreter.
    pub engine: EngineName,
    /// Memory, bytes.
    #[serde(with = "size")]
    pub memory: u64,
    /// Thousandths of a processor.
    #[serde(with = "cpus")]
    pub cpus: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Open files of one process.
    pub open_files: u32,
    /// Size of the workspace, bytes.
    #[serde(with = "size")]
    pub workspace_size: u64,
    /// Idle time after which a kernel is stopped; `None`: never.
    #[serde(with = "wait")]
    pub idle_timeout: Option<Duration>,
    /// Output of one execution kept in the journal, bytes.
    #[serde(with = "size")]
    pub output_kept: u64,
    /// The network.
    pub net: Net,
    /// Number of automatic checkpoints to keep; 0: all.
    pub keep_checkpoints: u32,
    /// Age at which an automatic checkpoint is removed; `None`: never.
    #[serde(with = "wait")]
    pub keep_checkpoints_for: Option<Duration>,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            engine: EngineName::Kaish,
            memory: limits::DEFAULT_MEMORY_BYTES,
            cpus: limits::DEFAULT_CPU_MILLI,
            pids: limits::DEFAULT_PIDS,
            open_files: limits::DEFAULT_OPEN_FILES,
            workspace_size: limits::DEFAULT_WORKSPACE_BYTES,
            idle_timeout: Some(limits::DEFAULT_IDLE_TIMEOUT),
            output_kept: limits::OUTPUT_KEPT_BYTES,
            net: Net::None,
            keep_checkpoints: limits::DEFAULT_CHECKPOINTS_KEPT,
            keep_checkpoints_for: Some(limits::DEFAULT_CHECKPOINTS_KEPT_FOR),
        }
    }
}

impl Defaults {
    /// The limits of one kernel.
    pub fn limits(&self) -> KernelLimits {
        KernelLimits {
            memory_bytes: self.memory,
            cpu_milli: self.cpus,
            pids: self.pids,
            open_files: self.open_files,
            workspace_bytes: self.workspace_size,
        }
    }

    /// The retention of automatic checkpoints.
    pub fn retention(&self) -> Retention {
        let newest = (self.keep_checkpoints > 0).then_some(self.keep_checkpoints);
        Retention { newest, keep_for_ms: self.keep_checkpoints_for.map(ms) }
    }

    /// The specification of a new kernel; its name is a placeholder.
    pub fn spec(&self) -> KernelSpec {
        let name: KernelName = "default".parse().expect("it is a valid name");
        KernelSpec {
            limits: self.limits(),
            net: self.net,
            retention: self.retention(),
            idle_timeout_ms: self.idle_timeout.map_or(0, ms),
            ..KernelSpec::new(name, self.engine)
        }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// `[limits]`: limits of this daemon, within those of `core::limits`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Kernels, live or not.
    pub kernels: usize,
    /// Kernels of one user of a system-wide daemon.
    pub kernels_per_user: usize,
    /// Workers at once.
    pub workers: usize,
    /// Workers of one user of a system-wide daemon.
    pub workers_per_user: usize,
    /// The sum of all workers' memory limits, bytes; `None`: unlimited.
    #[serde(with = "bound")]
    pub memory: Option<u64>,
    /// The same for one user of a system-wide daemon.
    #[serde(with = "bound")]
    pub memory_per_user: Option<u64>,
    /// Memory of a suspended kernel's processes, bytes; `None`: unlimited.
    #[serde(with = "bound")]
    pub suspended_memory: Option<u64>,
    /// Memory and disk of a snapshot of kind teleport, bytes; `None`: unlimited.
    #[serde(with = "bound")]
    pub teleport_snapshot: Option<u64>,
    /// Workers that start at once, without those for the pool.
    pub worker_starts: usize,
    /// Longest wait for a worker.
    #[serde(with = "span")]
    pub worker_wait: Duration,
    /// Time for one step of one member of a group that is frozen or restored.
    #[serde(with = "span")]
    pub freeze_step: Duration,
    /// Time for storing one member of a group, and for each step that checks, prepares, places or reverts its restore.
    #[serde(with = "span")]
    pub freeze_store: Duration,
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

impl Default for Limits {
    fn default() -> Self {
        Self {
            kernels: limits::KERNELS,
            kernels_per_user: 2000,
            workers: 1000,
            workers_per_user: 500,
            memory: None,
            memory_per_user: None,
            suspended_memory: Some(limits::SNAPSHOT_SUSPEND_BYTES),
            teleport_snapshot: Some(limits::SNAPSHOT_TELEPORT_BYTES),
            worker_starts: limits::WORKER_STARTS,
            worker_wait: limits::WORKER_WAIT,
            freeze_step: limits::FREEZE_STEP,
            freeze_store: limits::FREEZE_STORE,
            clients: limits::CLIENTS,
            clients_per_user: limits::CLIENTS_PER_USER,
            executions_in_flight: 1000,
            executions_in_flight_per_user: 500,
            executions_queued: limits::EXECUTIONS_QUEUED,
        }
    }
}

impl Limits {
    /// The limits of a daemon that serves one user: none is divided between users.
    pub fn of_single_user(self) -> Limits {
        Limits {
            kernels_per_user: self.kernels,
            workers_per_user: usize::MAX,
            memory_per_user: None,
            clients_per_user: self.clients,
            executions_in_flight_per_user: self.executions_in_flight,
            ..self
        }
    }
}

/// `[sandbox]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sandbox {
    /// Additional host paths that every kernel sees read-only, at the same path.
    pub system_paths: Vec<PathBuf>,
    /// The account that runs the workers of a daemon started as root.
    pub worker_user: String,
    /// Sandbox layers that kernels may waive.
    pub allow_degraded: Vec<String>,
    /// Whether kernels may ask for the host's network.
    pub net_host_allowed: bool,
    /// Host paths that are never mounted in a kernel.
    pub deny_paths: PathRules,
    /// Further such paths if the daemon is root.
    pub root_deny_paths: PathRules,
    /// Host paths whose owner a root daemon maps to the user of its own kernels.
    pub map_owner: Vec<PathBuf>,
}

/// Credentials, and sockets that control the host.
const DENIED: [&str; 28] = [
    "~/.ssh",
    "~/.gnupg",
    "~/.aws",
    "~/.azure",
    "~/.config/gcloud",
    "~/.kube",
    "~/.docker",
    "~/.netrc",
    "~/.cargo/credentials",
    "~/.cargo/credentials.toml",
    "~/.npmrc",
    "~/.yarnrc.yml",
    "~/.pypirc",
    "~/.config/pip",
    "~/.git-credentials",
    "~/.config/git/credentials",
    "~/.config/gh",
    "~/.config/hub",
    "~/.config/containers",
    "~/.local/share/keyrings",
    "~/.password-store",
    "~/.local/state/ryokan",
    "/run/user",
    "/run/systemd",
    "/run/dbus",
    "/run/docker.sock",
    "/run/containerd",
    "/run/podman",
];

/// System folders.
const ROOT_DENIED: [&str; 10] =
    ["/bin", "/boot", "/etc", "/lib", "/lib64", "/run", "/sbin", "/usr", "/var/lib", "/var/spool"];

impl Default for Sandbox {
    fn default() -> Self {
        let rules = |texts: &[&str]| {
            let texts: Vec<_> = texts.iter().map(|text| String::from(*text)).collect();
            PathRules::parse(&texts).expect("they are absolute or under ~")
        };
        Self {
            system_paths: Vec::new(),
            worker_user: "nobody".into(),
            allow_degraded: Vec::new(),
            net_host_allowed: true,
            deny_paths: rules(&DENIED),
            root_deny_paths: rules(&ROOT_DENIED),
            map_owner: Vec::new(),
        }
    }
}

/// `[daemon]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Daemon {
    /// How long a worker survives without a daemon.
    #[serde(with = "span")]
    pub orphan_grace: Duration,
    /// Time limit of an orderly stop.
    #[serde(with = "span")]
    pub drain: Duration,
    /// Whether a daemon starts the kernels that ran when the daemon before it was stopped.
    pub resume_kernels: bool,
    /// The failures that an acknowledged change survives.
    pub durability: Durability,
    /// Form of log lines.
    pub log_format: LogFormat,
    /// The log filter, in the syntax of `tracing_subscriber::EnvFilter`.
    pub log_level: String,
    /// Idle time after which an on-demand daemon ends; `None`: never.
    #[serde(with = "wait")]
    pub idle_exit: Option<Duration>,
    /// A loopback address that serves metrics, in addition to the socket.
    #[serde(with = "loopback")]
    pub metrics_address: Option<SocketAddr>,
    /// The PSI file that shows memory pressure; `None`: memory pressure is ignored.
    #[serde(with = "optional_path")]
    pub pressure_file: Option<PathBuf>,
}

impl Default for Daemon {
    fn default() -> Self {
        Self {
            orphan_grace: limits::ORPHAN_GRACE,
            drain: limits::DAEMON_DRAIN,
            resume_kernels: true,
            durability: Durability::Process,
            log_format: LogFormat::Text,
            log_level: "info".into(),
            idle_exit: Some(Duration::from_secs(900)),
            metrics_address: None,
            pressure_file: Some("/proc/pressure/memory".into()),
        }
    }
}

impl Daemon {
    /// The effective log filter: `log_level`, with rmcp limited to errors unless it is named.
    ///
    /// At `info` and `warn`, rmcp logs whole messages of MCP servers.
    pub fn log_filter(&self) -> String {
        if self.log_level.contains("rmcp") { self.log_level.clone() } else { format!("rmcp=error,{}", self.log_level) }
    }
}

/// `[microvm]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Microvm {
    /// What runs the guests' instructions.
    pub accelerator: Accelerator,
    /// What runs the machines.
    pub vmm: WantedVmm,
    /// The path of Firecracker; none: it is searched as a shell would.
    #[serde(with = "optional_path")]
    pub firecracker: Option<PathBuf>,
    /// Whether an orderly stop of the daemon keeps the memory of machines.
    pub keep_memory: bool,
    /// Age from which a template in use is rebuilt; none: never.
    #[serde(with = "wait")]
    pub template_max_age: Option<Duration>,
    /// Least time between two attempts to rebuild a template.
    #[serde(with = "span")]
    pub template_refresh_interval: Duration,
}

impl Default for Microvm {
    fn default() -> Self {
        Self {
            accelerator: Accelerator::Auto,
            vmm: WantedVmm::Qemu,
            firecracker: None,
            keep_memory: true,
            template_max_age: Some(limits::VM_TEMPLATE_MAX_AGE),
            template_refresh_interval: limits::VM_TEMPLATE_REFRESH,
        }
    }
}

impl Microvm {
    /// When templates are rebuilt.
    pub fn refresh(&self) -> RefreshRules {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        RefreshRules { max_age_ms: self.template_max_age.map(ms), interval_ms: ms(self.template_refresh_interval) }
    }
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

/// `[upkeep]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Upkeep {
    /// Interval at which expired checkpoints and garbage are removed; `None`: only on request.
    #[serde(with = "wait")]
    pub interval: Option<Duration>,
    /// Maximum bytes that one run copies.
    #[serde(with = "size")]
    pub copy_limit: u64,
    /// Number of prepared copies of kernels' files for their next forks; 0: none.
    pub prepared_copies: usize,
    /// Age below which no object in the store is garbage.
    #[serde(with = "span")]
    pub grace: Duration,
}

impl Default for Upkeep {
    fn default() -> Self {
        Self {
            interval: Some(limits::UPKEEP_INTERVAL),
            copy_limit: limits::UPKEEP_PASS_BYTES,
            prepared_copies: limits::PREPARED_COPIES,
            grace: limits::STORE_GRACE,
        }
    }
}

/// `[teleport]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Teleport {
    /// The program of `ssh://`, and its first arguments.
    pub ssh: Vec<String>,
    /// The command at the far end of `ssh://`, for the shell there.
    pub command: String,
    /// Longest time without progress while a moving kernel is held; then the move ends and the kernel continues.
    #[serde(with = "span")]
    pub stall_timeout: Duration,
    /// Longest time in which a moving kernel is held; then the move ends and the kernel continues.
    #[serde(with = "span")]
    pub pause_limit: Duration,
    /// Room for all kernels that arrive, until they live here, bytes; `None`: half of the free disk.
    #[serde(with = "bound")]
    pub arrivals: Option<u64>,
}

impl Default for Teleport {
    fn default() -> Self {
        Self {
            ssh: vec!["ssh".into()],
            command: "ryokan pipe".into(),
            stall_timeout: limits::HANDOVER_STALL,
            pause_limit: limits::HANDOVER_PAUSE,
            arrivals: None,
        }
    }
}

/// `[engines]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Engines {
    /// `[engines.python]`.
    pub python: Python,
    /// `[engines.bash]`.
    pub bash: Bash,
    /// `[engines.node]`.
    pub node: Node,
}

impl Engines {
    /// The interpreter of an engine that is a host program.
    pub fn interpreter(&self, engine: EngineName) -> Option<&Path> {
        match engine {
            EngineName::Kaish => None,
            EngineName::Python => Some(&self.python.command),
            EngineName::Bash => Some(&self.bash.command),
            EngineName::Node => Some(&self.node.command),
        }
    }

    /// The interpreters of all engines that are host programs.
    pub fn interpreters(&self) -> BTreeMap<EngineName, PathBuf> {
        let named = EngineName::ALL.into_iter().map(|engine| (engine, self.interpreter(engine)));
        named.filter_map(|(engine, command)| Some((engine, command?.to_owned()))).collect()
    }
}

/// `[engines.python]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Python {
    /// The interpreter: a name in the system's program directories, or an absolute path.
    pub command: PathBuf,
    /// Memory limit for forked snapshots of one kernel's interpreter, bytes; 0 disables them.
    #[serde(with = "size")]
    pub rollback_memory: u64,
    /// Modules preloaded in a warm worker.
    pub preload: Vec<String>,
}

impl Default for Python {
    fn default() -> Self {
        Self { command: "python3".into(), rollback_memory: limits::ROLLBACK_BYTES, preload: Vec::new() }
    }
}

/// `[engines.bash]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bash {
    /// The shell, as for Python.
    pub command: PathBuf,
}

impl Default for Bash {
    fn default() -> Self {
        Self { command: "bash".into() }
    }
}

/// `[engines.node]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Node {
    /// The interpreter, as for Python.
    pub command: PathBuf,
}

impl Default for Node {
    fn default() -> Self {
        Self { command: "node".into() }
    }
}
