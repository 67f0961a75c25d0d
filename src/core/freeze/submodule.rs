//! What a freeze holds of submodules.

use serde::{Deserialize, Serialize};

use super::RepositoryPart;
use super::refs::CommitId;
use crate::core::ids::Digest;

/// A submodule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SubmodulePart {
    /// Its directory within the repository.
    pub path: String,
    /// The commit that is checked out; of one that is not initialised, the one that the index records.
    pub commit: CommitId,
    /// Its content; `None`: not initialised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<RepositoryPart>,
}

impl RepositoryPart {
    /// The stored objects of the repository and its submodules.
    pub(super) fn packs(&self) -> Vec<Digest> {
        let inner = self.submodules.iter().filter_map(|one| one.part.as_ref()).flat_map(RepositoryPart::packs);
        self.pack.into_iter().chain(inner).collect()
    }
}
