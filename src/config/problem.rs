//! Problems of a configuration file: the place, the key, the reason and the remedy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1; 0 if it concerns the whole file.
    pub line: usize,
    /// The key with its section, for example `defaults.memory`; may be empty.
    pub key: String,
    /// The reason.
    pub what: String,
    /// The remedy; may be empty.
    pub hint: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        write!(f, ": {}", self.what)?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, " ({})", self.hint) }
    }
}

/// Why there is no usable configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file exists but cannot be read.
    #[error("could not read configuration {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file can be read but has faults.
    #[error("{}", lines(.0))]
    Wrong(Vec<Problem>),
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n")
}

/// A problem before its file and line are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) key: Vec<String>,
    pub(super) what: String,
    pub(super) hint: String,
}

impl Fault {
    pub(super) fn new(key: &[&str], what: impl Into<String>) -> Self {
        Self { key: key.iter().map(|part| (*part).to_owned()).collect(), what: what.into(), hint: String::new() }
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    /// The problem of this fault in a line of a file.
    pub(super) fn at(self, file: &Path, line: usize) -> Problem {
        Problem { file: file.to_owned(), line, key: self.key.join("."), what: self.what, hint: self.hint }
    }
}
