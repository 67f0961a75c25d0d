//! Finds checkpoints, and reads their contents.

use crate::core::checkpoint::{AMBIGUOUS, Checkpoint, Manifest, Named, RefError, Reference, StateParts};
use crate::core::error::{Error, Result};
use crate::core::ids::CheckpointId;
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;

/// Finds a checkpoint of a kernel by a reference.
///
/// # Errors
/// `notFound`, `invalidArgument`, and `conflict` with the candidates if the reference is ambiguous.
pub async fn find(kernel: &Kernel, reference: &str) -> Result<Checkpoint> {
    let name = &kernel.spec().name;
    let refusal = |error: RefError| match error {
        RefError::Malformed(_) => Error::invalid(error.to_string()),
        RefError::Ambiguous { .. } => Error::conflict(error.to_string())
            .reason(AMBIGUOUS)
            .hint(format!("give more of its id: `ryokan log {name}` shows it")),
        RefError::Unknown(_) | RefError::TooFar { .. } => {
            Error::not_found(format!("kernel {name}: {error}")).hint(format!("`ryokan log {name}` lists what there is"))
        }
    };
    let reference: Reference = reference.parse().map_err(refusal)?;
    let mut all = kernel.records.all_checkpoints().await?;
    all.reverse();
    let named: Vec<Named> = all.iter().map(Named::from).collect();
    let id = reference.find(&named).map_err(refusal)?;
    let found = all.into_iter().find(|checkpoint| checkpoint.id == id);
    found.ok_or_else(|| Error::internal("a checkpoint that was found is gone"))
}

/// Contents of a checkpoint, read back and verified.
///
/// # Errors
/// `corrupt`; `unsupported` for a checkpoint of a later release.
pub(crate) async fn contents(host: &Host, checkpoint: &Checkpoint) -> Result<(Manifest, StateParts)> {
    let manifest = manifest_of(host, checkpoint).await?;
    let parts = super::state::list(&host.store, manifest.state).await?;
    Ok((manifest, parts))
}

/// Manifest of a checkpoint, read back and verified.
///
/// # Errors
/// `corrupt`; `unsupported` for a checkpoint of a later release.
pub(crate) async fn manifest_of(host: &Host, checkpoint: &Checkpoint) -> Result<Manifest> {
    use crate::core::checkpoint::ManifestError as Wrong;
    let bytes = host.store.get(checkpoint.manifest, limits::MANIFEST_BYTES as u64).await?;
    Manifest::decode(&bytes).map_err(|error| match error {
        Wrong::UnknownFormat(_) | Wrong::UnknownWorkFormat(_) | Wrong::Kind(_) => {
            Error::unsupported(error.to_string()).reason("manifest_format")
        }
        Wrong::Malformed(_) | Wrong::Parts(_) | Wrong::TooLarge { .. } => Error::corrupt(error.to_string()),
    })
}

impl Kernel {
    /// A checkpoint that the kernel's own records refer to.
    pub(super) async fn recorded(&self, id: CheckpointId) -> Result<Checkpoint> {
        let found = self.records.checkpoint(id).await?;
        found
            .ok_or_else(|| Error::corrupt(format!("checkpoint {id}, which kernel {} needs, is gone", self.spec().name)))
    }
}
