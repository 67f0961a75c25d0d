//! What a checkpoint, a save or a restore left out.

use serde::{Deserialize, Serialize};

/// Reason of a [`MissedEntry`] for a file that could not be read.
pub const UNREADABLE: &str = "not readable";

/// Part of a kernel's state that was not captured or not restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissedEntry {
    /// `kind/name`, for example `var/connection`.
    pub key: String,
    /// Its type as the engine names it.
    #[serde(rename = "type")]
    pub type_name: String,
    /// Why it was left out.
    pub reason: String,
}
