//! Names of the engines. `worker::engines` implements them; `docs/engine-contract.md` defines their
//! contract.

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

/// A text that is not the name of an engine.
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

    /// Whether an engine whose memory was copied seeds its random generators anew.
    pub const fn seeds_anew(self) -> bool {
        match self {
            EngineName::Kaish | EngineName::Python | EngineName::Bash => true,
            // OpenSSL's and V8's generators in it cannot be reached.
            EngineName::Node => false,
        }
    }

    /// The oldest supported interpreter, major and minor; `None` for a built-in engine.
    const fn oldest(self) -> Option<(u32, u32)> {
        match self {
            EngineName::Kaish => None,
            EngineName::Python => Some((3, 8)),
            EngineName::Bash => Some((4, 4)),
            EngineName::Node => Some((18, 0)),
        }
    }

    /// Returns what is wrong with an interpreter that prints `said` as its version.
    ///
    /// `None` if the version suffices or `said` holds none. The first text that looks like a
    /// version counts.
    pub fn too_old(self, said: &str) -> Option<String> {
        let (major, minor) = self.oldest()?;
        let is_version = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
        let number = said.split(|c: char| !c.is_ascii_digit() && c != '.').find(is_version)?;
        let mut parts = number.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        let found = (parts.next()?, parts.next()?);
        (found < (major, minor)).then(|| format!("{self} {number} is too old: {major}.{minor} or later is needed"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outdated_engines_are_detected() {
        for (engine, said, old) in [
            (EngineName::Bash, "GNU bash, version 3.2.57(1)-release (arm64)", true),
            (EngineName::Bash, "4.3.48", true),
            (EngineName::Bash, "GNU bash, version 4.4.20(1)-release", false),
            (EngineName::Bash, "5.2.15", false),
            (EngineName::Node, "v16.20.2", true),
            (EngineName::Node, "20.20.2", false),
            (EngineName::Node, "... of its own. No number", false),
            (EngineName::Python, "Python 2.7.18", true),
            (EngineName::Python, "3.7.17", true),
            (EngineName::Python, "3.8.0", false),
            (EngineName::Python, "Python 3.13.0rc1", false),
            (EngineName::Kaish, "0.1", false),
        ] {
            assert_eq!(engine.too_old(said).is_some(), old, "{engine} {said}: {:?}", engine.too_old(said));
        }
    }
}
