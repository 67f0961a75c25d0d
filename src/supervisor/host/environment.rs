//! The host as the daemon found it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::Config;
use crate::core::engine::EngineName;
use crate::core::info::Ability;
use crate::isolation::process::program::WorkerProgram;
use crate::mcp::Launch;
use crate::mcp::allow::AllowList;

/// What the daemon found on its host; constant while it runs.
pub struct Environment {
    /// Whether kernels belong to their peers' uids.
    pub system_wide: bool,
    /// The host's name.
    pub host_name: String,
    /// The home of the daemon's own user.
    pub home: Option<PathBuf>,
    /// The engines that can run here.
    pub engines: Vec<EngineName>,
    /// What workers run.
    pub worker: WorkerProgram,
    /// Uid and gid that workers run under where the daemon is root and the kernel is root's.
    pub worker_account: Option<(u32, u32)>,
    /// A cgroup v2 folder in which the daemon may make children.
    pub cgroup_base: Option<PathBuf>,
    /// MCP servers that kernels may use.
    pub mcp_allowed: Arc<AllowList>,
    /// How MCP servers are started.
    pub mcp_launch: Launch,
    /// The data folder.
    pub data: PathBuf,
    /// Folder of the workers' private sockets.
    pub worker_sockets: PathBuf,
    /// Folder of the kernels' sockets.
    pub kernel_sockets: PathBuf,
    /// The daemon's own folders: never shown to a kernel.
    pub protected: Vec<PathBuf>,
}

/// What a host can do, its file system for the data folder included (or for the nearest folder above it that exists). Blocks.
pub fn abilities(worker: &Path, config: &Config, data: &Path) -> Vec<Ability> {
    let data = data.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    let (interpreters, system_paths) = (config.engines.interpreters(), &config.sandbox.system_paths);
    let mut found = crate::sandbox::abilities::abilities(worker, &interpreters, system_paths);
    found.extend(crate::workspace::doctor(data));
    found
}
