//! `[postgres.NAME]`: PostgreSQL servers of groups that are captured as a whole, by snapshots of their data directory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::Faults;
use super::problem::Fault;
use super::sources::{LONGEST, argv_fault};
use super::values::{Span, span};
use crate::core::freeze::postgres::Connection;
use crate::core::limits;
use crate::core::name::KernelName;

/// Maximum number of servers.
const SERVERS: usize = 16;

/// The servers by name.
pub type PostgresServers = BTreeMap<String, PostgresServer>;

/// A server: where its data is, and the user's programs that start and stop it, without a shell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PostgresServer {
    /// Its data directory, a Btrfs subvolume.
    pub data: PathBuf,
    /// How it is reached: `dbname`, `host`, `port`, `user`.
    pub connection: String,
    /// The folder of the programs of its version.
    pub programs: PathBuf,
    /// Starts it.
    pub start: Vec<String>,
    /// Stops it.
    pub stop: Vec<String>,
    /// Time limit of each program, and of a start until the server answers.
    #[serde(with = "span")]
    pub timeout: Duration,
}

impl Default for PostgresServer {
    fn default() -> Self {
        Self {
            data: PathBuf::new(),
            connection: String::new(),
            programs: PathBuf::new(),
            start: Vec::new(),
            stop: Vec::new(),
            timeout: limits::SOURCE_TIMEOUT,
        }
    }
}

/// Whether `pg_ctl`, which runs the server through a shell, takes this path as it is.
fn is_plain(path: &std::path::Path) -> bool {
    path.to_str().is_some_and(|text| !text.chars().any(|c| c.is_control() || "\"'`$\\".contains(c)))
}

/// Checks every server.
pub(super) fn check(servers: &PostgresServers, faults: &mut Faults) {
    if servers.len() > SERVERS {
        faults.add(Fault::new(&["postgres"], format!("more than {SERVERS} servers")));
    }
    for (name, server) in servers {
        let overlaps = |other: &PostgresServer| {
            let (data, other) = (&server.data, &other.data);
            data.is_absolute() && other.is_absolute() && (data.starts_with(other) || other.starts_with(data))
        };
        let mut before = servers.iter().take_while(|(other, _)| *other != name);
        if let Some((other, _)) = before.find(|(_, other)| overlaps(other)) {
            let what =
                format!("it overlaps the data of [postgres.{other}]: a restore exchanges a data directory whole");
            faults.add(Fault::new(&["postgres", name.as_str(), "data"], what));
        }
        let mut wrong = |key: &str, what: String| {
            let path = ["postgres", name.as_str(), key];
            faults.add(Fault::new(if key.is_empty() { &path[..2] } else { &path }, what));
        };
        if let Err(error) = name.parse::<KernelName>() {
            wrong("", error.to_string().replace("a kernel's name", "a name"));
        }
        for (key, path) in [("data", &server.data), ("programs", &server.programs)] {
            if !path.is_absolute() {
                wrong(key, "an absolute path is required".into());
            } else if !is_plain(path) {
                wrong(key, "a path here has no quotes, backslashes, `$` and control characters".into());
            }
        }
        if let Err(error) = server.connection.parse::<Connection>() {
            wrong("connection", error.to_string());
        }
        for (key, argv) in [("start", &server.start), ("stop", &server.stop)] {
            if let Some(what) = argv_fault(argv, true) {
                wrong(key, what);
            }
        }
        if server.timeout.is_zero() || server.timeout > LONGEST {
            wrong("timeout", format!("a program's time is above zero and at most {}", Span(LONGEST)));
        }
    }
}
