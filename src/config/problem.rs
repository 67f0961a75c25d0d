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

/// The candidate most similar to `word`, if any is close.
pub(super) fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let close = (word.chars().count() / 3).max(1);
    let distances = candidates.iter().map(|candidate| (distance(word, candidate), *candidate));
    distances.min().filter(|(far, _)| *far <= close).map(|(_, candidate)| candidate)
}

/// Number of letters to insert, remove, replace or swap with their neighbour between two words.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().take(64).collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replace = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replace.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_key_gets_suggestion() {
        let keys = ["memory", "cpus", "pids", "open_files", "idle_timeout", "output_kept"];
        for (word, want) in [
            ("memroy", Some("memory")),
            ("cpu", Some("cpus")),
            ("openfiles", Some("open_files")),
            ("idle-timeout", Some("idle_timeout")),
            ("pdis", Some("pids")),
            ("zzz", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, &keys), want, "{word}");
        }
    }
}
