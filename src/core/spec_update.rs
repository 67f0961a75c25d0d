//! Changes of a kernel's specification. Pure.

use std::path::PathBuf;

use super::diff::of_limits;
use super::spec::{AllowedPath, KernelSpec, Net};

/// A requested change. Unset fields change nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecUpdate {
    /// The network.
    pub net: Option<Net>,
    /// Memory of all its processes, bytes.
    pub memory_bytes: Option<u64>,
    /// Processors, thousandths.
    pub cpu_milli: Option<u32>,
    /// Processes and threads.
    pub pids: Option<u32>,
    /// Open files of one process.
    pub open_files: Option<u32>,
    /// The workspace, bytes.
    pub workspace_bytes: Option<u64>,
    /// Idle time after which it is stopped; zero: never.
    pub idle_timeout_ms: Option<u64>,
    /// Host paths to add, or to give another access.
    pub paths: Vec<AllowedPath>,
    /// Host paths to remove.
    pub remove_paths: Vec<PathBuf>,
    /// The virtual environment; the inner `None`: the configured interpreter.
    pub venv: Option<Option<PathBuf>>,
}

impl SpecUpdate {
    /// The changed specification. It is not checked: see [`KernelSpec::check`].
    ///
    /// # Errors
    /// The path to remove that the specification lacks.
    pub fn apply(&self, spec: &KernelSpec) -> Result<KernelSpec, PathBuf> {
        let mut new = spec.clone();
        for path in &self.remove_paths {
            let at = new.paths.iter().position(|allowed| allowed.path == *path).ok_or_else(|| path.clone())?;
            new.paths.remove(at);
        }
        for allowed in &self.paths {
            match new.paths.iter_mut().find(|known| known.path == allowed.path) {
                Some(known) if known.writable == allowed.writable => {}
                Some(known) => known.clone_from(allowed),
                None => new.paths.push(allowed.clone()),
            }
        }
        let limits = &mut new.limits;
        limits.memory_bytes = self.memory_bytes.unwrap_or(limits.memory_bytes);
        limits.cpu_milli = self.cpu_milli.unwrap_or(limits.cpu_milli);
        limits.pids = self.pids.unwrap_or(limits.pids);
        limits.open_files = self.open_files.unwrap_or(limits.open_files);
        limits.workspace_bytes = self.workspace_bytes.unwrap_or(limits.workspace_bytes);
        if let Some(venv) = &self.venv {
            new.venv.clone_from(venv);
            new.allow_venv();
        }
        new.net = self.net.unwrap_or(new.net);
        new.idle_timeout_ms = self.idle_timeout_ms.unwrap_or(new.idle_timeout_ms);
        Ok(new)
    }
}

/// The changes from one specification to another, a line each.
pub fn changes(before: &KernelSpec, after: &KernelSpec) -> Vec<String> {
    let limits = of_limits(before, after).into_iter();
    let mut lines: Vec<String> =
        limits.map(|change| format!("{} {} -> {}", change.name, change.before, change.after)).collect();
    let access = |allowed: &AllowedPath| if allowed.writable { "rw" } else { "ro" };
    let in_spec = |spec: &KernelSpec, wanted: &AllowedPath| {
        spec.paths.iter().any(|known| (&known.path, known.writable) == (&wanted.path, wanted.writable))
    };
    for gone in before.paths.iter().filter(|path| !in_spec(after, path)) {
        lines.push(format!("without path {}:{}", gone.path.display(), access(gone)));
    }
    for new in after.paths.iter().filter(|path| !in_spec(before, path)) {
        lines.push(format!("path {}:{}", new.path.display(), access(new)));
    }
    if before.venv != after.venv {
        let shown = |spec: &KernelSpec| spec.venv.as_ref().map_or("none".into(), |venv| venv.display().to_string());
        lines.push(format!("venv {} -> {}", shown(before), shown(after)));
    }
    lines
}

/// What a worker with one specification lacks of another. The idle timeout needs no worker.
pub fn not_in_force(worker: &KernelSpec, spec: &KernelSpec) -> Vec<String> {
    changes(&KernelSpec { idle_timeout_ms: spec.idle_timeout_ms, ..worker.clone() }, spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::engine::EngineName;

    fn spec() -> KernelSpec {
        let mut spec = KernelSpec::new("demo".parse().expect("valid name"), EngineName::Kaish);
        spec.paths = vec![AllowedPath::new("/data", false), AllowedPath::new("/src", true)];
        spec
    }

    #[test]
    fn unset_fields_change_nothing() {
        assert_eq!(SpecUpdate::default().apply(&spec()), Ok(spec()));
        assert!(changes(&spec(), &spec()).is_empty());
    }

    #[test]
    fn update_names_its_changes() {
        let update = SpecUpdate {
            net: Some(Net::Host),
            memory_bytes: Some(1 << 30),
            idle_timeout_ms: Some(0),
            paths: vec![AllowedPath::new("/data", true), AllowedPath::new("/new", false)],
            remove_paths: vec!["/src".into()],
            ..SpecUpdate::default()
        };
        let new = update.apply(&spec()).expect("its paths exist");
        assert_eq!(new.paths, [AllowedPath::new("/data", true), AllowedPath::new("/new", false)]);
        let live = [
            "memory 512 MiB -> 1 GiB",
            "net none -> host",
            "without path /data:ro",
            "without path /src:rw",
            "path /data:rw",
            "path /new:ro",
        ];
        assert_eq!(not_in_force(&spec(), &new), live);
        assert_eq!(changes(&spec(), &new).len(), live.len() + 1, "the idle timeout, too");
    }

    #[test]
    fn unknown_path_is_not_removed() {
        let update = SpecUpdate { remove_paths: vec!["/none".into()], ..SpecUpdate::default() };
        assert_eq!(update.apply(&spec()), Err("/none".into()));
    }
}
