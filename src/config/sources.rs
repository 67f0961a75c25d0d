//! `[sources.NAME]`: data sources of groups that the user's own programs freeze, capture, thaw and restore.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::Faults;
use super::problem::Fault;
use super::values::{Span, size, span};
use crate::core::limits;
use crate::core::name::KernelName;

/// Maximum number of sources.
const SOURCES: usize = 64;
/// Upper bound of a program's time limit.
pub(super) const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The sources by name.
pub type Sources = BTreeMap<String, Source>;

/// A source: the command line of each program, without a shell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Source {
    /// Stops writers; empty: nothing does.
    pub freeze: Vec<String>,
    /// Writes the data to its standard output.
    pub capture: Vec<String>,
    /// Admits writers again.
    pub thaw: Vec<String>,
    /// Replaces the data by its standard input.
    pub restore: Vec<String>,
    /// Prints what identifies the data; empty: it is not known whether the data changes.
    pub revision: Vec<String>,
    /// Time limit of each program.
    #[serde(with = "span")]
    pub timeout: Duration,
    /// Maximum size of the data.
    #[serde(with = "size")]
    pub max_size: u64,
}

impl Default for Source {
    fn default() -> Self {
        Self {
            freeze: Vec::new(),
            capture: Vec::new(),
            thaw: Vec::new(),
            restore: Vec::new(),
            revision: Vec::new(),
            timeout: limits::SOURCE_TIMEOUT,
            max_size: limits::SOURCE_BYTES,
        }
    }
}

/// What is wrong with a command line.
pub(super) fn argv_fault(argv: &[String], required: bool) -> Option<String> {
    let bytes = argv.iter().map(|arg| arg.len() + 1).sum::<usize>();
    match argv.first() {
        None if required => Some("a program is required: [\"/absolute/path\", \"argument\"]".into()),
        Some(program) if !program.starts_with('/') => Some(format!("{program:?} is not an absolute path")),
        _ if bytes > limits::ENV_BYTES || argv.iter().any(|arg| arg.contains('\0')) => {
            Some(format!("arguments have at most {} bytes and no NUL", limits::ENV_BYTES))
        }
        Some(_) | None => None,
    }
}

/// Checks every source.
pub(super) fn check(sources: &Sources, faults: &mut Faults) {
    if sources.len() > SOURCES {
        faults.add(Fault::new(&["sources"], format!("more than {SOURCES} sources")));
    }
    for (name, source) in sources {
        let mut wrong = |key: &str, what: String| {
            let path = ["sources", name.as_str(), key];
            faults.add(Fault::new(if key.is_empty() { &path[..2] } else { &path }, what));
        };
        if let Err(error) = name.parse::<KernelName>() {
            wrong("", error.to_string().replace("a kernel's name", "a name"));
        }
        for (key, argv, required) in [
            ("freeze", &source.freeze, !source.thaw.is_empty()),
            ("capture", &source.capture, true),
            ("thaw", &source.thaw, !source.freeze.is_empty()),
            ("restore", &source.restore, true),
            ("revision", &source.revision, false),
        ] {
            if let Some(what) = argv_fault(argv, required) {
                wrong(key, what);
            }
        }
        if source.timeout.is_zero() || source.timeout > LONGEST {
            wrong("timeout", format!("a program's time is above zero and at most {}", Span(LONGEST)));
        }
        if source.max_size == 0 || source.max_size > limits::BLOB_BYTES {
            wrong("max_size", format!("it is above zero and at most {} bytes", limits::BLOB_BYTES));
        }
    }
}
