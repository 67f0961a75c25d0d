//! Durability of acknowledged changes.

use serde::{Deserialize, Serialize};

/// What an acknowledged change survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The end of any process; a loss of power may take the last moments, never consistency.
    Process,
    /// A loss of power too: every acknowledgement waits for the disk.
    Power,
}
