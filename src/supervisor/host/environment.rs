//! The host as the daemon found it.

use std::path::PathBuf;
use std::sync::Arc;

use crate::core::engine::EngineName;
use crate::mcp::Launch;
use crate::mcp::allow::AllowList;

/// What the daemon found on its host; constant while it runs.
pub struct Environment {
    /// Whether kernels belong to their peers' uids.
    pub system_wide: bool,
    /// The daemon's process, for clients.
    pub pid: u32,
    /// The host's name.
    pub host_name: String,
    /// The home of the daemon's own user.
    pub home: Option<PathBuf>,
    /// The engines that can run here.
    pub engines: Vec<EngineName>,
    /// MCP servers that kernels may use.
    pub mcp_allowed: Arc<AllowList>,
    /// How MCP servers are started.
    pub mcp_launch: Launch,
    /// The data folder.
    pub data: PathBuf,
    /// Folder of the kernels' sockets.
    pub kernel_sockets: PathBuf,
    /// The daemon's own folders: never shown to a kernel.
    pub protected: Vec<PathBuf>,
}
