//! The options that describe a kernel, shared by `new` and `run`.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::failure::Failure;
use super::paths;
use crate::core::engine::EngineName;
use crate::core::name::KernelName;
use crate::core::quantity::{parse_cpu_milli, parse_duration, parse_size};
use crate::core::spec::{AllowedPath, Isolation, Net};
use crate::core::spec_update::SpecUpdate;
use crate::core::venv::is_in_workspace;
use crate::rpc::convert::spec::SpecRequest;

/// Options of a kernel's limits.
#[derive(Debug, Clone, Default, Args)]
pub struct LimitArgs {
    /// Memory of all processes, such as 512M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Processors, such as 1 or 0.5
    #[arg(long, value_name = "N", value_parser = parse_cpu_milli)]
    pub cpus: Option<u32>,
    /// Maximum processes and threads
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub pids: Option<u32>,
    /// Maximum open files of one process
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub open_files: Option<u32>,
    /// Size of the workspace, such as 10G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub workspace: Option<u64>,
    /// Idle time before it is stopped, such as 5m, or never
    #[arg(long, value_name = "TIME", value_parser = parse_idle)]
    pub idle_timeout: Option<u64>,
}

/// Changes of a kernel's specification.
#[derive(Debug, Clone, Default, Args)]
pub struct UpdateFields {
    /// Network: none or host
    #[arg(long, value_name = "NET", value_parser = nets(), hide_possible_values = true)]
    pub net: Option<Net>,
    /// Limits
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Allow a host path, or change its access; repeatable
    #[arg(long, value_name = "P:ro|rw", value_parser = parse_allowed)]
    pub allow_path: Vec<AllowedPath>,
    /// Withdraw a host path; repeatable
    #[arg(long, value_name = "P")]
    pub remove_path: Vec<PathBuf>,
    /// Virtual environment whose Python runs it, or none
    #[arg(long, value_name = "DIR|none")]
    pub venv: Option<PathBuf>,
}

impl UpdateFields {
    /// The change.
    ///
    /// # Errors
    /// For paths that cannot be sent to the daemon.
    pub fn update(&self) -> Result<SpecUpdate, Failure> {
        Ok(SpecUpdate {
            net: self.net,
            memory_bytes: self.limits.memory,
            cpu_milli: self.limits.cpus,
            pids: self.limits.pids,
            open_files: self.limits.open_files,
            workspace_bytes: self.limits.workspace,
            idle_timeout_ms: self.limits.idle_timeout,
            paths: self.allow_path.iter().map(absolute).collect::<Result<_, _>>()?,
            // Not resolved: the path may be gone from this host.
            remove_paths: self
                .remove_path
                .iter()
                .map(|path| paths::for_daemon(path).map(Into::into))
                .collect::<Result<_, _>>()?,
            venv: match &self.venv {
                Some(none) if none == Path::new("none") => Some(None),
                Some(dir) => Some(Some(venv(dir)?)),
                None => None,
            },
        })
    }
}

/// Options of a kernel's specification.
#[derive(Debug, Clone, Default, Args)]
pub struct SpecArgs {
    /// Interpreter: kaish, python, bash or node
    #[arg(long, value_parser = engines(), hide_possible_values = true)]
    pub engine: Option<EngineName>,
    /// Isolation: process or microvm
    #[arg(long, value_name = "ISOLATION", value_parser = isolations(), hide_possible_values = true)]
    pub isolation: Option<Isolation>,
    /// Image, optionally with its version
    #[arg(long, value_name = "IMG[@VERSION]")]
    pub image: Option<String>,
    /// Allow a host path, visible under the same path; repeatable
    #[arg(long = "allow-path", value_name = "P:ro|rw", value_parser = parse_allowed)]
    pub allow_path: Vec<AllowedPath>,
    /// Virtual environment whose Python runs it, read-only
    #[arg(long, value_name = "DIR")]
    pub venv: Option<PathBuf>,
    /// Network: none or host
    #[arg(long, value_name = "NET", value_parser = nets(), hide_possible_values = true)]
    pub net: Option<Net>,
    /// Limits
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Number of automatic checkpoints to keep, or all
    #[arg(long, value_name = "N", value_parser = parse_newest)]
    pub keep: Option<u32>,
    /// How long to keep them, such as 30d, or never to expire them
    #[arg(long, value_name = "TIME", value_parser = parse_idle)]
    pub keep_for: Option<u64>,
    /// Label; repeatable
    #[arg(long = "label", value_name = "K=V", value_parser = parse_pair)]
    pub labels: Vec<(String, String)>,
    /// Waive a sandbox layer that this host lacks; recorded; repeatable
    #[arg(long, value_name = "LAYER")]
    pub allow_degraded: Vec<String>,
    /// Copy this directory into the workspace
    #[arg(long, value_name = "DIR")]
    pub from_dir: Option<PathBuf>,
}

impl SpecArgs {
    /// The request for a kernel with this name.
    ///
    /// # Errors
    /// For paths that cannot be sent to the daemon.
    pub fn request(&self, name: KernelName) -> Result<SpecRequest, Failure> {
        Ok(SpecRequest {
            engine: self.engine,
            isolation: self.isolation,
            image: self.image.clone(),
            paths: self.allow_path.iter().map(absolute).collect::<Result<_, _>>()?,
            venv: self.venv.as_deref().map(venv).transpose()?,
            net: self.net,
            memory_bytes: self.limits.memory,
            cpu_milli: self.limits.cpus,
            pids: self.limits.pids,
            open_files: self.limits.open_files,
            workspace_bytes: self.limits.workspace,
            idle_timeout_ms: self.limits.idle_timeout,
            keep_checkpoints: self.keep.map(|newest| (newest > 0).then_some(newest)),
            keep_checkpoints_for_ms: self.keep_for.map(|ms| (ms > 0).then_some(ms)),
            labels: self.labels.clone(),
            degraded: self.allow_degraded.clone(),
            from_dir: self.from_dir.as_deref().map(directory).transpose()?,
            ..SpecRequest::new(name)
        })
    }
}

pub(super) fn absolute(allowed: &AllowedPath) -> Result<AllowedPath, Failure> {
    Ok(AllowedPath::new(paths::for_daemon(&allowed.path)?, allowed.writable))
}

/// The path of a virtual environment, as the kernel sees it. `/workspace` is always the kernel's.
fn venv(dir: &Path) -> Result<PathBuf, Failure> {
    match is_in_workspace(dir) {
        true => Ok(dir.to_owned()),
        false => Ok(paths::for_daemon(dir)?.into()),
    }
}

fn directory(path: &Path) -> Result<PathBuf, Failure> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(paths::for_daemon(path)?.into()),
        Ok(_) => Err(Failure::usage(
            format!("--from-dir {}: not a directory", path.display()),
            "name a directory of this host",
        )),
        Err(error) => Err(Failure::of_file("copy", path, &error)),
    }
}

/// The names of engines, also for completions.
pub(super) fn engines() -> impl TypedValueParser<Value = EngineName> {
    PossibleValuesParser::new(EngineName::ALL.map(EngineName::name))
        .try_map(|name| name.parse::<EngineName>().map_err(|error| error.to_string()))
}

/// The names of isolations, also for completions.
pub fn isolations() -> impl TypedValueParser<Value = Isolation> {
    PossibleValuesParser::new([Isolation::Process, Isolation::Microvm].map(Isolation::name))
        .try_map(|name| parse_isolation(&name))
}

/// The names of networks, also for completions.
pub fn nets() -> impl TypedValueParser<Value = Net> {
    PossibleValuesParser::new([Net::None, Net::Host].map(Net::name)).try_map(|name| parse_net(&name))
}

/// Parses the name of an isolation.
///
/// # Errors
/// The names.
pub fn parse_isolation(text: &str) -> Result<Isolation, String> {
    Isolation::from_name(text).ok_or_else(|| "process or microvm".into())
}

/// Parses the name of a network.
///
/// # Errors
/// The names.
pub fn parse_net(text: &str) -> Result<Net, String> {
    Net::from_name(text).ok_or_else(|| "none or host".into())
}

/// Parses a duration as milliseconds.
///
/// # Errors
/// A description of the mistake.
pub fn parse_millis(text: &str) -> Result<u64, String> {
    let duration = parse_duration(text).map_err(|e| e.to_string())?;
    u64::try_from(duration.as_millis()).map_err(|e| e.to_string())
}

/// Parses a count; `all` is 0.
///
/// # Errors
/// A description of the mistake.
pub fn parse_newest(text: &str) -> Result<u32, String> {
    match text {
        "all" => Ok(0),
        text => match text.parse() {
            Ok(0) | Err(_) => Err("a number from 1, or all".into()),
            Ok(newest) => Ok(newest),
        },
    }
}

/// Parses a time as milliseconds; `never` is 0, as in the configuration.
///
/// # Errors
/// A description of the mistake.
pub fn parse_idle(text: &str) -> Result<u64, String> {
    match text {
        "never" => Ok(0),
        text => parse_millis(text).map_err(|why| format!("{why}, or never")),
    }
}

/// Parses `name=value`; the value may contain `=`.
///
/// # Errors
/// A description of the mistake.
pub fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        Some(_) | None => Err("NAME=VALUE".into()),
    }
}

/// Whether a text after a colon looks like an access mode, such as `rx`.
fn is_mode(text: &str) -> bool {
    text.len() <= 3 && text.bytes().all(|byte| b"rwxo".contains(&byte.to_ascii_lowercase()))
}

/// Parses `PATH:ro` or `PATH:rw`, split at the last colon; read-only by default.
///
/// # Errors
/// A description of the mistake.
pub fn parse_allowed(text: &str) -> Result<AllowedPath, String> {
    let (path, writable) = match text.rsplit_once(':') {
        Some((path, "rw")) => (path, true),
        Some((path, "ro")) => (path, false),
        Some((path, mode)) if is_mode(mode) && !Path::new(text).exists() => {
            return Err(format!("{mode:?} is no access: write {path}:ro or {path}:rw"));
        }
        Some(_) | None => (text, false),
    };
    match path.is_empty() {
        true => Err("PATH, PATH:ro or PATH:rw".into()),
        false => Ok(AllowedPath::new(path, writable)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_access_is_refused() {
        for (text, writable) in [("/etc", false), ("/etc:ro", false), ("/etc:rw", true), ("/a:b:rw", true)] {
            assert_eq!(parse_allowed(text).map(|allowed| allowed.writable), Ok(writable), "{text}");
        }
        assert_eq!(parse_allowed("/etc:rx").expect_err("no access"), "\"rx\" is no access: write /etc:ro or /etc:rw");
        assert!(parse_allowed(":rw").is_err());
        assert!(parse_allowed("/srv/data:2024").is_ok(), "a path with a colon");
    }
}
