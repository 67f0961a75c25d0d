//! Durability of acknowledged changes.

use serde::{Deserialize, Serialize};

/// The failures that an acknowledged change survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The end of any process. A power loss may lose the last moments, but never consistency.
    Process,
    /// A power loss too: every acknowledgement waits for the disk.
    Power,
}
