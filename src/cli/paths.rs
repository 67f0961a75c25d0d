//! Where the command line finds and leaves its files. The daemon's side of the same rules is its own.

use std::path::{Component, Path, PathBuf};

use std::os::unix::fs::MetadataExt;

use crate::core::error::{Error, Result};

/// Socket of the system-wide daemon.
pub const SYSTEM_SOCKET: &str = "/run/ryokan/ryokand.sock";

/// Folder of the per-user daemon's sockets.
///
/// # Errors
/// If neither `XDG_RUNTIME_DIR` nor `/run/user/<uid>` can be used.
pub fn runtime_dir() -> Result<PathBuf> {
    if let Some(folder) = absolute("XDG_RUNTIME_DIR") {
        return Ok(folder.join("ryokan"));
    }
    let uid = nix::unistd::getuid().as_raw();
    let usual = PathBuf::from(format!("/run/user/{uid}"));
    match std::fs::metadata(&usual) {
        Ok(folder) if folder.is_dir() && folder.uid() == uid => Ok(usual.join("ryokan")),
        Ok(_) | Err(_) => Err(Error::unavailable(format!(
            "there is no place for the daemon's socket: XDG_RUNTIME_DIR is not set and {} is not yours",
            usual.display()
        ))
        .hint("set XDG_RUNTIME_DIR to a folder of mode 0700 that is yours, or name a socket with --socket")),
    }
}

/// Folder for what the command line itself keeps: histories and the log of a daemon that it started.
///
/// # Errors
/// If neither `XDG_STATE_HOME` nor `HOME` is set.
pub fn state_dir() -> Result<PathBuf> {
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|state| state.join("ryokan"))
        .ok_or_else(|| Error::unavailable("there is no place for logs: neither XDG_STATE_HOME nor HOME is set"))
}

/// A relative path in an XDG variable is to be ignored, says the specification.
fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// A path as the daemon needs it: absolute, as text, and in the user's own words where that is possible: links are
/// followed only for a `..`, which nothing else resolves rightly.
///
/// # Errors
/// `invalidArgument` for a path that is not UTF-8, and for one with `..` that does not exist.
pub fn for_daemon(path: &Path) -> Result<String> {
    let wrong = |why: &dyn std::fmt::Display| Error::invalid(format!("path {}: {why}", path.display()));
    let full = match path.components().any(|part| part == Component::ParentDir) {
        true => std::fs::canonicalize(path).map_err(|e| wrong(&e))?,
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
