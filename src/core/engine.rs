//! The engines by name. What an engine does is in `worker::engines`; what it must keep, in `docs/engine-contract.md`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The interpreter inside a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineName {
    /// The kaish shell, part of the worker itself.
    Kaish,
    /// The host's CPython.
    Python,
    /// The host's GNU bash.
    Bash,
    /// The host's Node.js.
    Node,
}

/// A text that names no engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no engine {0:?}; there are: kaish, python, bash, node")]
pub struct UnknownEngine(String);

impl EngineName {
    /// Every engine.
    pub const ALL: [EngineName; 4] = [EngineName::Kaish, EngineName::Python, EngineName::Bash, EngineName::Node];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            EngineName::Kaish => "kaish",
            EngineName::Python => "python",
            EngineName::Bash => "bash",
            EngineName::Node => "node",
        }
    }
}

impl fmt::Display for EngineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EngineName {
    type Err = UnknownEngine;
    fn from_str(text: &str) -> Result<Self, UnknownEngine> {
        Self::ALL
            .into_iter()
            .find(|engine| engine.name() == text)
            .ok_or_else(|| UnknownEngine(text.chars().take(40).collect()))
    }
}
