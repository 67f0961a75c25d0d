//! The binding that makes a warm worker a kernel's worker. Sent once over the private link; final.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;
use crate::link::handshake::PROOF_BYTES;

/// A file or folder of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundSource {
    /// Its path, without symbolic links.
    pub path: PathBuf,
    /// Token of the detached mount sent over the descriptor socket; 0: the worker opens the path.
    #[serde(default)]
    pub token: u64,
}

/// A mount of the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundMount {
    /// Where the kernel sees it.
    pub inside: PathBuf,
    /// The mounted file or folder.
    pub source: BoundSource,
    /// Whether the kernel may change it.
    pub writable: bool,
}

/// The folder of an existing kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundFolder {
    /// The folder.
    pub dir: BoundSource,
    /// What becomes `/workspace`: a path within the folder.
    pub own_workspace: PathBuf,
    /// Another folder to show as `/workspace`: the one of the kernel that shares its workspace.
    #[serde(default)]
    pub workspace: Option<BoundSource>,
}

/// The kernel that a warm worker will serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelBinding {
    /// The kernel.
    pub kernel: KernelId,
    /// The ownership epoch.
    pub epoch: Epoch,
    /// The kernel's name, also its host name inside.
    pub name: KernelName,
    /// The kernel's folder. None for a new kernel, which adopts the warm worker's folder.
    #[serde(default)]
    pub folder: Option<BoundFolder>,
    /// Whether the kernel's engine state has replaced that of the worker's folder, and is loaded.
    #[serde(default)]
    pub brings_state: bool,
    /// Further folders that no mount may show. The warm worker knows its own folder and the
    /// workspace.
    #[serde(default)]
    pub protected: Vec<PathBuf>,
    /// The kernel's mounts.
    #[serde(default)]
    pub mounts: Vec<BoundMount>,
    /// Origin and generation of the kernel's state, for the code inside.
    pub origin: (OriginKind, u32),
    /// Whether the kernel, and with it the worker, ends with its client or the daemon.
    #[serde(default)]
    pub ephemeral: bool,
    /// The worker's new identity, if its machine is a copy of another kernel's. Sent to a suspended worker only.
    #[serde(default)]
    pub copy: Option<CopyIdentity>,
}

/// What a copied worker proves from then on.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyIdentity {
    /// Its id.
    pub worker: WorkerId,
    /// Its secret.
    pub secret: [u8; PROOF_BYTES],
}

impl std::fmt::Debug for CopyIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CopyIdentity").field("worker", &self.worker).finish_non_exhaustive()
    }
}
