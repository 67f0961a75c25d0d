//! Paths of a workspace.

use std::path::PathBuf;

/// Where a workspace and its auxiliary files are, all on one file system.
#[derive(Debug, Clone)]
pub struct WorkspacePaths {
    /// The workspace.
    pub workspace: PathBuf,
    /// A folder that only the daemon reaches, for files that are being prepared and for removed files that are not yet
    /// deleted. Created on use; nothing in it survives a restore.
    pub staging: PathBuf,
    /// The file that keeps the index between processes.
    pub index: PathBuf,
}
