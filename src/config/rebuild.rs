//! `[rebuild.NAME]`: programs that bring a repository's code to what data needs, before a restore of that data.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::Faults;
use super::problem::Fault;
use super::sources::{LONGEST, argv_fault};
use super::values::{Span, span};
use crate::core::limits;
use crate::core::name::KernelName;

/// Maximum number of programs.
const PROGRAMS: usize = 64;

/// The programs by name.
pub type Rebuilds = BTreeMap<String, Rebuild>;

/// A program: its command line, without a shell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rebuild {
    /// The repository's work tree.
    pub repository: PathBuf,
    /// The program with its arguments.
    pub run: Vec<String>,
    /// Its time limit.
    #[serde(with = "span")]
    pub timeout: Duration,
}

impl Default for Rebuild {
    fn default() -> Self {
        Self { repository: PathBuf::new(), run: Vec::new(), timeout: limits::REBUILD_TIMEOUT }
    }
}

/// Checks every program.
pub(super) fn check(rebuilds: &Rebuilds, faults: &mut Faults) {
    if rebuilds.len() > PROGRAMS {
        faults.add(Fault::new(&["rebuild"], format!("more than {PROGRAMS} programs")));
    }
    for (name, rebuild) in rebuilds {
        let mut wrong = |key: &str, what: String| {
            let path = ["rebuild", name.as_str(), key];
            faults.add(Fault::new(if key.is_empty() { &path[..2] } else { &path }, what));
        };
        if let Err(error) = name.parse::<KernelName>() {
            wrong("", error.to_string().replace("a kernel's name", "a name"));
        }
        if !rebuild.repository.is_absolute() {
            wrong("repository", "an absolute path is required".into());
        }
        if let Some(what) = argv_fault(&rebuild.run, true) {
            wrong("run", what);
        }
        if rebuild.timeout.is_zero() || rebuild.timeout > LONGEST {
            wrong("timeout", format!("a program's time is above zero and at most {}", Span(LONGEST)));
        }
    }
}
