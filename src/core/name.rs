//! Kernel names, validated once at the edge.

use std::fmt;
use std::str::FromStr;

use super::limits;

/// A kernel's name: 1 to [`limits::NAME_BYTES`] of `A-Z a-z 0-9 . _ -`, the first a letter or digit. Safe as a file name
/// and short enough for a socket path.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(transparent)]
pub struct KernelName(String);

/// Why a text is not a kernel name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty.
    #[error("a kernel's name cannot be empty")]
    Empty,
    /// The text is longer than the limit.
    #[error("a kernel's name has at most {max} bytes, this one has {0}", max = limits::NAME_BYTES)]
    TooLong(usize),
    /// The text holds a character that is not allowed.
    #[error("a kernel's name cannot hold {0:?}: letters, digits, '.', '_' and '-' only")]
    Character(char),
    /// The text starts with punctuation.
    #[error("a kernel's name starts with a letter or digit, not with {0:?}")]
    Start(char),
}

impl KernelName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KernelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for KernelName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        if text.len() > limits::NAME_BYTES {
            return Err(NameError::TooLong(text.len()));
        }
        let first = text.chars().next().ok_or(NameError::Empty)?;
        if let Some(wrong) = text.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))) {
            return Err(NameError::Character(wrong));
        }
        if !first.is_ascii_alphanumeric() {
            return Err(NameError::Start(first));
        }
        Ok(Self(text.to_owned()))
    }
}

impl<'de> serde::Deserialize<'de> for KernelName {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_kernel_names_parse() {
        for name in ["a", "demo", "project-x", "A.b_c-9", &"n".repeat(limits::NAME_BYTES)] {
            assert!(name.parse::<KernelName>().is_ok(), "{name}");
        }
    }

    #[test]
    fn invalid_names_are_refused() {
        for name in ["", ".", "..", "-rf", "_x", "a/b", "a\0b", "a b", "é", "../x", &"n".repeat(300)] {
            assert!(name.parse::<KernelName>().is_err(), "{name:?}");
        }
    }
}
