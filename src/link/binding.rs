//! What makes a slot a kernel's worker: sent once over the private link, after which the slot is that kernel's for good.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::core::ids::{Epoch, KernelId};
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;

/// A file or folder of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundSource {
    /// Its path, without symbolic links.
    pub path: PathBuf,
    /// Not 0: it comes as the detached mount of that number on the descriptor socket. 0: the worker opens the path itself.
    #[serde(default)]
    pub token: u64,
}

/// A mount that the kernel was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundMount {
    /// Where the kernel sees it.
    pub inside: PathBuf,
    /// What.
    pub source: BoundSource,
    /// Whether the kernel may change it.
    pub writable: bool,
}

/// The folder of a kernel that is older than its worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundFolder {
    /// The folder.
    pub dir: BoundSource,
    /// What becomes `/workspace`: a path within the folder.
    pub own_workspace: PathBuf,
    /// Another folder to be `/workspace`: that of the kernel whose thread this one is.
    #[serde(default)]
    pub workspace: Option<BoundSource>,
}

/// The kernel that a slot is to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelBinding {
    /// The kernel.
    pub kernel: KernelId,
    /// The ownership under which it is served.
    pub epoch: Epoch,
    /// Its name: for the code inside, and what it calls its host.
    pub name: KernelName,
    /// Its folder; none: that on which the slot stands is the kernel's, which is new.
    #[serde(default)]
    pub folder: Option<BoundFolder>,
    /// Folders that no mount may show beside those that the slot knows already: its own and that of the workspace.
    #[serde(default)]
    pub protected: Vec<PathBuf>,
    /// What it was given.
    #[serde(default)]
    pub mounts: Vec<BoundMount>,
    /// How the state that it has came to be, and its generation: for the code inside.
    pub origin: (OriginKind, u32),
    /// Whether it goes with its client, and so with the daemon: then its worker does, too.
    #[serde(default)]
    pub ephemeral: bool,
}
