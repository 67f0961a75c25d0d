//! What a client must know of a member besides its content.

use super::{Live, LiveKind};
use crate::core::error::{Error, Result};
use crate::core::freeze::cost::Storage;
use crate::supervisor::freeze::storage::{kernel_version, storage_at};
use crate::supervisor::freeze::submodules;

impl Live {
    /// What a client must know of what was captured.
    pub fn not_captured(&self) -> Result<Vec<String>> {
        match &self.kind {
            LiveKind::Repository { repository, state: Some(state), .. } => submodules::under_way(repository, state),
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } | LiveKind::Data(_) => Ok(Vec::new()),
        }
    }

    /// What a client must know of a member that does not go on, and what happens next.
    pub fn not_resumed(&self, error: &Error) -> String {
        format!(
            "member {} still does not work: {}; the next operation of group {} and the next start of the daemon try again",
            self.name, error.message, self.group.2
        )
    }

    /// Says which execution of a kernel was interrupted for the operation.
    pub fn interrupted(&self) -> Option<String> {
        let (name, exec) = (&self.name, self.interrupted);
        (exec != 0).then(|| format!("member {name}: execution {exec} was interrupted"))
    }

    /// What held its content.
    pub async fn storage(&self) -> Result<Storage> {
        let (version, place) = match &self.kind {
            LiveKind::Kernel { .. } => (kernel_version(), Some(self.host.environment.data.clone())),
            LiveKind::Repository { path, repository, .. } => (repository.git().version().await?, Some(path.clone())),
            LiveKind::Data(source) => source.held_by(),
        };
        storage_at(version, place).await
    }

    /// What a restore neither brings back nor keeps.
    pub async fn lost_by_restore(&mut self) -> Result<Option<String>> {
        match &mut self.kind {
            LiveKind::Data(source) => source.lost_by_restore().await,
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } => Ok(None),
        }
    }

    /// Why a resumed data source does not serve.
    pub fn at_rest(&self) -> Option<String> {
        match &self.kind {
            LiveKind::Data(source) => source.at_rest(),
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } => None,
        }
    }

    /// Where the content that another program wrote during the restore was kept.
    pub fn kept(&self) -> Option<&std::path::Path> {
        match &self.kind {
            LiveKind::Data(source) => source.kept(),
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } => None,
        }
    }
}
