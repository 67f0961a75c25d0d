//! What the daemon itself does for sandboxes: finds the cgroup that it may divide, and programs.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Folders of programs that kernels see too.
const PROGRAM_FOLDERS: [&str; 4] = ["/usr/local/bin", "/usr/bin", "/bin", "/opt/bin"];

/// The cgroup v2 folder in which this daemon may make children, if there is one: below its own cgroup, if that is its own to
/// divide (`Delegate=yes` in the unit, or root).
pub fn delegated_cgroup() -> Option<PathBuf> {
    let own = super::abilities::own_cgroup()?;
    let euid = nix::unistd::geteuid();
    if !euid.is_root() && fs::metadata(&own).ok()?.uid() != euid.as_raw() {
        return None;
    }
    let base = own.join("ryokan");
    if !base.is_dir() {
        fs::create_dir(&base).ok()?;
    }
    // A group that holds processes cannot hand its controllers down: the daemon goes into a leaf of its own.
    if own.join("cgroup.type").is_file() {
        let leaf = own.join("daemon");
        let moved = fs::create_dir_all(&leaf).and_then(|()| fs::write(leaf.join("cgroup.procs"), "0"));
        if let Err(error) = moved {
            tracing::debug!(%error, group = %own.display(), "the daemon stays in its cgroup; no controllers for kernels");
        }
    }
    for controller in ["memory", "pids", "cpu"] {
        // One that is not there is not used; `show` says which limits are in force.
        let _ = fs::write(own.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    Some(base)
}

/// An executable that kernels can run too: an absolute path, or a name in the system's program folders.
pub fn find_program(name: &Path) -> Option<PathBuf> {
    let executable = |path: &Path| {
        let meta = fs::metadata(path).ok()?;
        (meta.is_file() && meta.permissions().mode() & 0o111 != 0).then(|| path.to_owned())
    };
    if name.is_absolute() {
        return executable(name);
    }
    PROGRAM_FOLDERS.iter().find_map(|folder| executable(&Path::new(folder).join(name)))
}
