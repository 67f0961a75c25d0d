//! What a checkpoint, a save or a restore left out.

use serde::{Deserialize, Serialize};

/// Reason of a [`MissedEntry`] for a file that could not be read.
pub const UNREADABLE: &str = "not readable";
/// Start of the reason of a [`MissedEntry`] that ended with its worker.
const ENDED: &str = "ended with its worker";

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

impl MissedEntry {
    /// The same entry after its worker ended.
    #[must_use]
    pub fn into_ended(self) -> Self {
        match self.has_ended() {
            true => self,
            false => MissedEntry { reason: format!("{ENDED}: {}", self.reason), ..self },
        }
    }

    /// Whether the value is gone: it ended with a former worker, and its name was not bound again.
    pub fn has_ended(&self) -> bool {
        self.reason.starts_with(ENDED)
    }
}
