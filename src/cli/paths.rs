//! Paths of the daemon's socket and of the command line's own files.

use std::path::{Component, Path, PathBuf};

use crate::core::error::{Error, Result};
use crate::daemon::paths::{Mode, Paths};

/// Socket of the user's own daemon, or of the system-wide one.
///
/// # Errors
/// If no directory for it is known.
pub fn socket(mode: Mode) -> Result<PathBuf> {
    let paths = Paths::of_process(mode).map_err(|e| Error::unavailable(e.to_string()))?;
    Ok(paths.control_socket())
}

/// Directory of the sockets of forwarded ports, in the user's runtime directory.
///
/// # Errors
/// If there is no runtime directory.
pub fn ports_dir() -> Result<PathBuf> {
    let paths = Paths::of_process(Mode::User).map_err(|e| Error::unavailable(e.to_string()))?;
    Ok(paths.ports_runtime())
}

/// Directory of the command line's own files: histories, and the log of a daemon that it started.
///
/// # Errors
/// If neither `XDG_STATE_HOME` nor `HOME` is set.
pub fn state_dir() -> Result<PathBuf> {
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|state| state.join("ryokan"))
        .ok_or_else(|| Error::unavailable("no directory for logs: neither XDG_STATE_HOME nor HOME is set"))
}

/// The value of an XDG variable; the specification says to ignore relative paths.
fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// A path as the daemon needs it: absolute and as text.
///
/// Links stay unresolved, except in a path with `..`, which only resolution can interpret.
///
/// # Errors
/// `invalidArgument` for a path that is not UTF-8, `notFound` for one with `..` that does not exist.
pub fn for_daemon(path: &Path) -> Result<String> {
    let wrong = |why: &dyn std::fmt::Display| Error::invalid(format!("path {}: {why}", path.display()));
    let full = match path.components().any(|part| part == Component::ParentDir) {
        true => std::fs::canonicalize(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::not_found(format!("{} does not exist on this host", path.display())),
            _ => wrong(&e),
        })?,
        false => std::path::absolute(path).map_err(|e| wrong(&e))?,
    };
    full.into_os_string().into_string().map_err(|_| wrong(&"not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_absolute() {
        let here = std::env::current_dir().expect("a working directory");
        for (given, wanted) in [
            ("/a/b:c", PathBuf::from("/a/b:c")),
            ("src", here.join("src")),
            ("./src/.", here.join("src")),
            ("src/../src", std::fs::canonicalize("src").expect("it is there")),
        ] {
            assert_eq!(for_daemon(Path::new(given)), Ok(wanted.to_str().expect("UTF-8").to_owned()), "{given}");
        }
        assert!(for_daemon(Path::new("")).is_err());
        assert!(for_daemon(Path::new("nowhere/../x")).is_err());
    }
}
