//! The configuration: one TOML file. Every key has a default; unknown keys are refused.
//!
//! ```text
//! text ─ read.rs ─▶ Config, as in the file ─ check.rs ─▶ Config, checked ─▶ daemon, supervisor
//! ```
//! `config.example.toml` shows every key; a test checks that it is complete.

mod check;
mod host;
mod path_rules;
mod pool;
mod postgres;
mod problem;
mod read;
mod rebuild;
mod sections;
mod servers;
mod sources;
mod values;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::host::account;
pub use self::path_rules::PathRules;
pub use self::pool::Pool;
pub use self::postgres::{PostgresServer, PostgresServers};
pub use self::problem::{ConfigError, Problem};
use self::read::Document;
pub use self::rebuild::{Rebuild, Rebuilds};
pub use self::sections::{
    Bash, Daemon, Defaults, Engines, Limits, LogFormat, Microvm, Node, Python, Sandbox, Teleport, Upkeep,
};
pub use self::servers::{Mcp, Server};
pub use self::sources::{Source, Sources};
use crate::mcp::allow::AllowList;

/// Largest configuration file, bytes.
const FILE_BYTES: u64 = 1 << 20;

fn digest_of(text: &str) -> String {
    format!("blake3:{}", blake3::hash(text.as_bytes()).to_hex())
}

/// The whole configuration file. [`Config::load`], [`Config::read`] and [`Config::parse`] return
/// checked ones only.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// `[defaults]`.
    pub defaults: Defaults,
    /// `[limits]`.
    pub limits: Limits,
    /// `[sandbox]`.
    pub sandbox: Sandbox,
    /// `[microvm]`.
    pub microvm: Microvm,
    /// `[daemon]`.
    pub daemon: Daemon,
    /// `[upkeep]`.
    pub upkeep: Upkeep,
    /// `[teleport]`.
    pub teleport: Teleport,
    /// `[pool]`.
    pub pool: Pool,
    /// `[engines]`.
    pub engines: Engines,
    /// `[mcp]`.
    pub mcp: Mcp,
    /// `[sources.NAME]`.
    pub sources: Sources,
    /// `[postgres.NAME]`.
    pub postgres: PostgresServers,
    /// `[rebuild.NAME]`.
    pub rebuild: Rebuilds,
}

impl Config {
    /// Reads the daemon's configuration file. Without a file, returns the defaults.
    ///
    /// # Errors
    /// If the file cannot be read, is writable by other users, or has faults.
    pub fn load(file: &Path) -> Result<Config, ConfigError> {
        match Self::read(file) {
            Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            other => other,
        }
    }

    /// Reads a configuration file that must exist.
    ///
    /// # Errors
    /// As [`Config::load`], and if the file does not exist.
    pub fn read(file: &Path) -> Result<Config, ConfigError> {
        Self::parse(&Self::text_of(file)?, file).map_err(ConfigError::Wrong)
    }

    /// Digest of every value, whatever the file's form is.
    pub fn digest(&self) -> String {
        let text = toml::to_string(self).unwrap_or_else(|_| format!("{self:?}"));
        digest_of(&text)
    }

    /// Digest of each section that has other values than those by default, by name.
    pub fn sections(&self) -> BTreeMap<String, String> {
        // TOML has no numbers as large as some limits.
        let all = |config: &Config| match serde_json::to_value(config) {
            Ok(serde_json::Value::Object(sections)) => sections,
            Ok(_) | Err(_) => serde_json::Map::new(),
        };
        let default = all(&Config::default());
        let is_set = |(name, value): &(String, serde_json::Value)| default.get(name) != Some(value);
        all(self).into_iter().filter(is_set).map(|(name, value)| (name, digest_of(&value.to_string()))).collect()
    }

    fn text_of(file: &Path) -> Result<String, ConfigError> {
        let failed = |source| ConfigError::Read { path: file.to_owned(), source };
        let mut opened = File::open(file).map_err(failed)?;
        let meta = opened.metadata().map_err(failed)?;
        let refused = |what: String, hint: &str| {
            let problem = Problem { file: file.to_owned(), line: 0, key: String::new(), what, hint: hint.into() };
            ConfigError::Wrong(vec![problem])
        };
        if !meta.is_file() {
            return Err(refused("is not a file".into(), ""));
        }
        // A user who can write this file can run programs as the daemon's user.
        if meta.mode() & 0o022 != 0 {
            return Err(refused(
                format!("can be written to by others (mode {:04o})", meta.mode() & 0o7777),
                "chmod go-w",
            ));
        }
        if meta.uid() != 0 && meta.uid() != nix::unistd::geteuid().as_raw() {
            return Err(refused(format!("belongs to uid {}", meta.uid()), "it must be yours or root's"));
        }
        let mut text = String::new();
        opened.by_ref().take(FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > FILE_BYTES {
            return Err(refused(format!("is larger than {FILE_BYTES} bytes"), ""));
        }
        Ok(text)
    }

    /// Parses the text of `file`.
    ///
    /// # Errors
    /// All faults of the text.
    pub fn parse(text: &str, file: &Path) -> Result<Config, Vec<Problem>> {
        let document = Document::parse(text).map_err(|(line, fault)| vec![fault.at(file, line)])?;
        let (config, mut faults) = document.read();
        match check::check(config) {
            Ok(config) if faults.is_empty() => return Ok(config),
            Ok(_) => {}
            // A malformed key was omitted, which may make other values look wrong: report each key
            // once.
            Err(more) => faults.extend(
                more.into_iter()
                    .filter(|fault| !faults.iter().any(|f| f.key.starts_with(&fault.key)))
                    .collect::<Vec<_>>(),
            ),
        }
        let mut problems: Vec<_> = faults.into_iter().map(|fault| document.place(fault, file)).collect();
        problems.sort_by_key(|problem| problem.line);
        Err(problems)
    }

    /// The items named in `text`, the source of this configuration, that this host lacks.
    fn lacking(&self, text: &str, file: &Path) -> Vec<Problem> {
        let Ok(document) = Document::parse(text) else { return Vec::new() };
        let faults = host::lacking(self, |key| document.has(key));
        faults.into_iter().map(|fault| document.place(fault, file)).collect()
    }

    /// The effective values as a configuration file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("tables of plain values are always TOML")
    }

    /// The same as JSON, for programs.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("tables of plain values are always JSON")
    }

    /// The allow-list of MCP servers; its hints name `file`.
    pub fn allow_list(&self, file: PathBuf) -> AllowList {
        AllowList::new(self.mcp.entries(), file)
    }
}

/// All problems of a configuration file, including items that this host lacks and values that
/// prevent kernels from starting.
///
/// Empty if the daemon would start with it, have all of its engines, and run kernels.
pub fn check(file: &Path) -> Vec<Problem> {
    let checked = Config::text_of(file).and_then(|text| {
        let config = Config::parse(&text, file).map_err(ConfigError::Wrong)?;
        Ok(config.lacking(&text, file))
    });
    match checked {
        Ok(problems) | Err(ConfigError::Wrong(problems)) => problems,
        Err(ConfigError::Read { path, source }) => {
            vec![Problem { file: path, line: 0, key: String::new(), what: source.to_string(), hint: String::new() }]
        }
    }
}

#[cfg(test)]
mod tests;
