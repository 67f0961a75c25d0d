//! The specification of a kernel: validated once, then constant for its life, apart from mounts and
//! MCP servers.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::engine::EngineName;
use super::limits;
use super::name::KernelName;
use super::quantity::format_size;
use super::retention::{Retention, RetentionError};

/// Path of a kernel's files in its sandbox.
pub const WORKSPACE: &str = "/workspace";

/// Host paths that no kernel may see: the host's processes, devices and system interfaces.
pub const NEVER_SHOWN: [&str; 3] = ["/proc", "/sys", "/dev"];

/// The isolation of a kernel's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// A sandboxed process tree.
    Process,
    /// A microVM.
    Microvm,
}

impl Isolation {
    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Isolation::Process => "process",
            Isolation::Microvm => "microvm",
        }
    }

    /// The isolation with this name.
    pub fn from_name(name: &str) -> Option<Isolation> {
        [Isolation::Process, Isolation::Microvm].into_iter().find(|i| i.name() == name)
    }
}

/// The network of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Net {
    /// A separate loopback interface only.
    #[default]
    None,
    /// The host's network; must be requested, and is recorded.
    Host,
}

impl Net {
    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Net::None => "none",
            Net::Host => "host",
        }
    }

    /// The network with this name.
    pub fn from_name(name: &str) -> Option<Net> {
        [Net::None, Net::Host].into_iter().find(|n| n.name() == name)
    }
}

/// A host path that a kernel may use under the same path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllowedPath {
    /// The path, the same inside and outside.
    pub path: PathBuf,
    /// Whether the kernel may write to it.
    pub writable: bool,
    /// The path with symbolic links resolved when it was granted.
    ///
    /// For the daemon only; clients neither set nor see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub real: Option<PathBuf>,
}

impl AllowedPath {
    /// Creates a path that is not resolved yet.
    pub fn new(path: impl Into<PathBuf>, writable: bool) -> Self {
        AllowedPath { path: path.into(), writable, real: None }
    }
}

/// Resource limits of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelLimits {
    /// Memory of all its processes, bytes.
    pub memory_bytes: u64,
    /// Processor time, thousandths of a processor.
    pub cpu_milli: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Open files of one process.
    pub open_files: u32,
    /// Workspace size, bytes.
    pub workspace_bytes: u64,
}

impl Default for KernelLimits {
    fn default() -> Self {
        Self {
            memory_bytes: limits::DEFAULT_MEMORY_BYTES,
            cpu_milli: limits::DEFAULT_CPU_MILLI,
            pids: limits::DEFAULT_PIDS,
            open_files: limits::DEFAULT_OPEN_FILES,
            workspace_bytes: limits::DEFAULT_WORKSPACE_BYTES,
        }
    }
}

/// A kernel's specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelSpec {
    /// Its name; unique among its owner's kernels.
    pub name: KernelName,
    /// The interpreter.
    pub engine: EngineName,
    /// Process or microVM.
    pub isolation: Isolation,
    /// Image and version; empty: the host's own tree.
    pub image: String,
    /// Host paths that it may use.
    pub paths: Vec<AllowedPath>,
    /// Its network.
    pub net: Net,
    /// Its resource limits.
    pub limits: KernelLimits,
    /// Idle time after which it is stopped; zero: never.
    pub idle_timeout_ms: u64,
    /// Labels for its owner's use.
    pub labels: Vec<(String, String)>,
    /// Names of the sandbox layers that the owner agreed to run without.
    pub degraded: Vec<String>,
    /// Whether it is removed when the connection that created it closes.
    #[serde(default)]
    pub ephemeral: bool,
    /// How long automatic checkpoints are kept.
    ///
    /// May change after creation, like mounts.
    #[serde(default)]
    pub retention: Retention,
    /// The virtual environment whose Python is the interpreter, as the kernel sees it; `None`: the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub venv: Option<PathBuf>,
}

/// Why a specification is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Not absolute, with `..`, or not UTF-8.
    #[error("path {0:?} must be absolute, without '.' and '..'")]
    Path(PathBuf),
    /// A path that ryokan reserves.
    #[error("path {path:?} cannot be given: {why}")]
    Reserved {
        /// The path.
        path: PathBuf,
        /// The reserved use.
        why: &'static str,
    },
    /// A path occurs twice.
    #[error("path {0:?} is given twice")]
    Twice(PathBuf),
    /// More mounts than allowed.
    #[error("{0} paths are more than {max}", max = limits::MOUNTS)]
    TooManyPaths(usize),
    /// A limit outside its range.
    #[error("{what} of {got} is outside {least} to {most}")]
    Limit {
        /// Which limit.
        what: &'static str,
        /// The requested value.
        got: String,
        /// The minimum.
        least: String,
        /// The maximum.
        most: String,
    },
    /// A label is empty or too long, or there are too many.
    #[error(
        "labels: at most {}, each with a name of 1 to {} bytes and a value up to as many",
        limits::LABELS,
        limits::IDENTIFIER_BYTES
    )]
    Label,
    /// A virtual environment for an engine that is not Python.
    #[error("a virtual environment is for the python engine, not for {0}")]
    VenvEngine(EngineName),
    /// The kernel would not see its virtual environment.
    #[error("none of the kernel's paths holds its virtual environment {0:?}")]
    VenvUnseen(PathBuf),
    /// The retention is invalid.
    #[error(transparent)]
    Retention(#[from] RetentionError),
}

impl KernelSpec {
    /// Creates a specification with the defaults of this release.
    pub fn new(name: KernelName, engine: EngineName) -> Self {
        KernelSpec {
            name,
            engine,
            isolation: Isolation::Process,
            image: String::new(),
            paths: Vec::new(),
            net: Net::None,
            limits: KernelLimits::default(),
            idle_timeout_ms: limits::DEFAULT_IDLE_TIMEOUT.as_millis() as u64,
            labels: Vec::new(),
            degraded: Vec::new(),
            ephemeral: false,
            retention: Retention::default(),
            venv: None,
        }
    }

    /// Returns the idle time after which the kernel is stopped, if any.
    pub fn idle_timeout(&self) -> Option<Duration> {
        (self.idle_timeout_ms > 0).then(|| Duration::from_millis(self.idle_timeout_ms))
    }

    /// Checks every field that does not depend on the host.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn check(&self) -> Result<(), SpecError> {
        if self.paths.len() > limits::MOUNTS {
            return Err(SpecError::TooManyPaths(self.paths.len()));
        }
        for (i, allowed) in self.paths.iter().enumerate() {
            check_inside_path(&allowed.path)?;
            if self.paths[..i].iter().any(|earlier| earlier.path == allowed.path) {
                return Err(SpecError::Twice(allowed.path.clone()));
            }
        }
        let range = |what, got: u64, least: u64, most: u64, unit: fn(u64) -> String| match got {
            got if (least..=most).contains(&got) => Ok(()),
            got => Err(SpecError::Limit { what, got: unit(got), least: unit(least), most: unit(most) }),
        };
        let processors = |milli: u64| (milli as f64 / 1000.0).to_string();
        let number = |number: u64| number.to_string();
        range("memory", self.limits.memory_bytes, 32 << 20, 1 << 50, format_size)?;
        range("cpus", u64::from(self.limits.cpu_milli), 10, 1_024_000, processors)?;
        range("pids", u64::from(self.limits.pids), 8, 1 << 22, number)?;
        // bash uses some descriptors for its driver, with numbers up to 255.
        let files = if self.engine == EngineName::Bash { limits::BASH_MIN_OPEN_FILES } else { limits::MIN_OPEN_FILES };
        range("open files", u64::from(self.limits.open_files), u64::from(files), 1 << 20, number)?;
        range("workspace size", self.limits.workspace_bytes, 1 << 20, 1 << 60, format_size)?;
        let label_fits = |(k, v): &(String, String)| {
            !k.is_empty() && k.len() <= limits::IDENTIFIER_BYTES && v.len() <= limits::IDENTIFIER_BYTES
        };
        if self.labels.len() > limits::LABELS || !self.labels.iter().all(label_fits) {
            return Err(SpecError::Label);
        }
        self.check_venv()?;
        Ok(self.retention.check()?)
    }
}

/// Paths inside a kernel that mounts may not cover, and why.
const RESERVED: &[(&str, &str)] = &[
    ("/proc", "the kernel's own process table is there"),
    ("/dev", "the kernel's own devices are there"),
    ("/sys", "it is not part of a kernel's tree"),
    ("/usr", "the system's programs are there already, read-only"),
    ("/bin", "the system's programs are there already, read-only"),
    ("/sbin", "the system's programs are there already, read-only"),
    ("/lib", "the system's libraries are there already, read-only"),
    ("/lib32", "the system's libraries are there already, read-only"),
    ("/lib64", "the system's libraries are there already, read-only"),
    ("/etc", "the kernel's own settings are there"),
];

/// Checks the mount path of a host path in a kernel.
///
/// # Errors
/// [`SpecError::Path`] or [`SpecError::Reserved`].
pub fn check_inside_path(path: &Path) -> Result<(), SpecError> {
    let wrong = || SpecError::Path(path.to_owned());
    let text = path.to_str().ok_or_else(wrong)?;
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !path.is_absolute() || !plain || text.contains('\0') || text.contains("/./") || text.len() > limits::PATH_BYTES {
        return Err(wrong());
    }
    let reserved = |why| SpecError::Reserved { path: path.to_owned(), why };
    match path.components().count() {
        0 | 1 => return Err(reserved("it is the root of the kernel's tree")),
        2 if path == Path::new("/workspace") => return Err(reserved("the workspace is there")),
        2 if path == Path::new("/tmp") => return Err(reserved("the kernel's own temporary files are there")),
        _ => {}
    }
    match RESERVED.iter().find(|(root, _)| path.starts_with(root)) {
        Some((_, why)) => Err(reserved(why)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> KernelSpec {
        KernelSpec::new("demo".parse().expect("valid name"), EngineName::Kaish)
    }

    #[test]
    fn spec_defaults_match_design() {
        let spec = spec();
        assert_eq!(spec.check(), Ok(()));
        assert_eq!(spec.limits.memory_bytes, 512 << 20);
        assert_eq!((spec.limits.cpu_milli, spec.limits.pids, spec.limits.open_files), (1000, 256, 1024));
        assert_eq!(spec.idle_timeout(), Some(Duration::from_secs(300)));
        assert_eq!(spec.net, Net::None);
    }

    #[test]
    fn paths_are_checked() {
        for good in ["/home/amy/src", "/data", "/workspace/data", "/tmp/x", "/opt/tools"] {
            assert_eq!(check_inside_path(Path::new(good)), Ok(()), "{good}");
        }
        for bad in [
            "",
            "x",
            "/",
            "/a/../b",
            "/proc/1",
            "/dev",
            "/etc/passwd",
            "/usr/lib",
            "/workspace",
            "/tmp",
            "/a\0",
            "/a/./b",
        ] {
            assert!(check_inside_path(Path::new(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn limits_are_checked() {
        let with = |change: fn(&mut KernelSpec)| {
            let mut spec = spec();
            change(&mut spec);
            spec.check()
        };
        assert_eq!(
            with(|s| s.limits.memory_bytes = 10 << 20).map_err(|error| error.to_string()),
            Err("memory of 10 MiB is outside 32 MiB to 1 PiB".into())
        );
        assert_eq!(
            with(|s| s.limits.cpu_milli = 5).map_err(|error| error.to_string()),
            Err("cpus of 0.005 is outside 0.01 to 1024".into())
        );
        assert!(with(|s| s.limits.pids = 0).is_err());
        assert!(with(|s| s.limits.cpu_milli = 0).is_err());
        assert!(with(|s| s.limits.open_files = 1).is_err());
        assert!(with(|s| s.limits.open_files = 64).is_ok());
        assert!(with(|s| (s.limits.open_files, s.engine) = (64, EngineName::Bash)).is_err());
        assert!(with(|s| s.labels = vec![(String::new(), "x".into())]).is_err());
        assert!(with(|s| s.paths = vec![AllowedPath::new("/d", true); 2]).is_err());
    }
}
