//! What the supervisor needs to know of the configuration and of the paths; the daemon fills it in once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::core::engine::EngineName;
use crate::core::pool::Rules;
use crate::core::spec::KernelSpec;
use crate::isolation::process::program::WorkerProgram;
use crate::mcp::Launch;
use crate::mcp::allow::AllowList;
use crate::sandbox::plan::WORKSPACE;
use crate::supervisor::workers::admission::Bounds;

/// Says why a host path may not be given to a kernel of this uid, with the rule that forbids it, if one does.
pub type PathRule = Box<dyn Fn(&Path, u32) -> Option<String>>;

/// Settings of one daemon; constant while it runs.
pub struct Settings {
    /// What a new kernel has when its creator does not say; name, paths and labels do not count.
    pub defaults: KernelSpec,
    /// Output that the journal keeps of one execution, bytes.
    pub output_kept_bytes: u64,
    /// Kernels, live or not.
    pub kernels: usize,
    /// Kernels of one user.
    pub kernels_per_user: usize,
    /// Clients at once.
    pub clients: usize,
    /// Clients of one user.
    pub clients_per_user: usize,
    /// What all users may have at once of workers, memory and executions.
    pub bounds: Bounds,
    /// What one user may.
    pub bounds_per_user: Bounds,
    /// Executions that wait in one kernel.
    pub executions_queued: usize,
    /// Workers that are started at once, those for the pool not counted.
    pub worker_starts: usize,
    /// Who wants a worker waits so long for his turn.
    pub worker_wait: Duration,
    /// Sandbox layers that kernels may ask to do without.
    pub allow_degraded: Vec<String>,
    /// Whether kernels may ask for the host's network.
    pub net_host_allowed: bool,
    /// Says why this host path may not be given to a kernel, if a rule forbids it.
    pub forbids: PathRule,
    /// More host paths that every kernel sees, read-only.
    pub system_paths: Vec<PathBuf>,
    /// Uid and gid that workers run under where the daemon is root and the kernel is root's.
    pub worker_user: Option<(u32, u32)>,
    /// A worker whose daemon is gone lives this long.
    pub orphan_grace: Duration,
    /// The file that keeps the end of the audit log.
    pub audit_head: PathBuf,
    /// Background upkeep: how often; `None`: never.
    pub upkeep_interval: Option<Duration>,
    /// Bytes that one turn of it copies at most.
    pub upkeep_turn_bytes: u64,
    /// Copies of kernels' files that are kept ready for their next fork; 0: none.
    pub fork_spares: usize,
    /// Their folder, on the file system of the kernels' own.
    pub spares_folder: PathBuf,
    /// For how long what was lately stored or used again is no garbage.
    pub gc_grace: Duration,
    /// An orderly stop of the daemon takes at most this long.
    pub drain: Duration,
    /// Whether acknowledged changes must survive a loss of power.
    pub power_safe: bool,
    /// The interpreters of engines that are programs of the host.
    pub interpreters: BTreeMap<EngineName, PathBuf>,
    /// Memory that copies of one Python engine may take, bytes; 0: none are kept.
    pub rollback_bytes: u64,
    /// Modules that a Python worker has loaded which waits for a kernel.
    pub python_preload: Vec<String>,
    /// The PSI file that says when memory is short; `None`: nobody asks.
    pub pressure_file: Option<PathBuf>,
    /// Folder for what can be made again.
    pub cache: PathBuf,
    /// The file that keeps some of the disk back.
    pub reserve: PathBuf,
    /// The engines that run here, and how many ready workers of each are kept.
    pub pools: Vec<(EngineName, Rules)>,
    /// Those of which some are kept although nobody came yet.
    pub standing_pools: Vec<EngineName>,
    /// What workers run.
    pub worker: WorkerProgram,
    /// Folder of the workers' private sockets.
    pub worker_sockets: PathBuf,
    /// The daemon's own folders: never shown to a kernel.
    pub protected: Vec<PathBuf>,
    /// A cgroup v2 folder in which the daemon may make children.
    pub cgroup_base: Option<PathBuf>,
    /// MCP servers that kernels may use.
    pub mcp_allowed: Arc<AllowList>,
    /// How MCP servers are started.
    pub mcp_launch: Launch,
    /// Whether kernels belong to their peers' uids.
    pub system_wide: bool,
}

impl Settings {
    /// What the configuration gives every kernel within its workspace.
    pub(crate) fn path_within_workspace(&self) -> Option<&Path> {
        self.system_paths.iter().find(|path| path.starts_with(WORKSPACE)).map(PathBuf::as_path)
    }

    /// The rules of an engine's pools; off where the engine cannot run here, and where the configuration gives every kernel something within its
    /// workspace: a workspace that comes later would hide it.
    pub fn pool_rules(&self, engine: EngineName) -> Rules {
        let possible = self.path_within_workspace().is_none();
        let found = self.pools.iter().find(|(of, _)| *of == engine && possible).map(|(_, rules)| *rules);
        found.unwrap_or(Rules { pool_size: 0, min_idle: 0, ..Rules::default() })
    }
}
