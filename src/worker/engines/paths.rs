//! Path and program completion for shells.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Directory entries inspected per completion.
const ENTRIES_READ: usize = 20_000;

/// Programs on `path` with this prefix.
pub(super) fn executables(path: &str, prefix: &str) -> Vec<String> {
    if prefix.is_empty() {
        return Vec::new();
    }
    let entries = path.split(':').filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    entries
        .take(ENTRIES_READ)
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let runs = name.starts_with(prefix)
                && entry.path().metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
            runs.then_some(name)
        })
        .collect()
}

/// Paths with this prefix; directories end in `/`.
pub(super) fn beginning_with(cwd: &Path, home: Option<&str>, prefix: &str) -> Vec<String> {
    let (dir_text, name) = prefix.rsplit_once('/').map_or(("", prefix), |(dir, name)| (&prefix[..=dir.len()], name));
    let dir: PathBuf = match (dir_text.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => Path::new(home).join(rest),
        _ => cwd.join(dir_text),
    };
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    entries
        .flatten()
        .take(ENTRIES_READ)
        .filter_map(|entry| {
            let found = entry.file_name().into_string().ok()?;
            let shown = found.starts_with(name) && (name.starts_with('.') || !found.starts_with('.'));
            let slash = if entry.path().is_dir() { "/" } else { "" };
            shown.then(|| format!("{dir_text}{found}{slash}"))
        })
        .collect()
}
