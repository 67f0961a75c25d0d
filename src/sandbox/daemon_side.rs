//! What the daemon itself does for sandboxes: finds the cgroup that it may divide, and programs.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Folders of programs that kernels see too.
const PROGRAM_FOLDERS: [&str; 4] = ["/usr/local/bin", "/usr/bin", "/bin", "/opt/bin"];

/// The part of a unit's cgroup that the service manager put the daemon in (`DelegateSubgroup=`): a group that holds processes
/// cannot hand its controllers down, so the daemon must not be where kernels' groups are made.
const OWN_LEAF: &str = "daemon";

/// The cgroup v2 folder in which this daemon may make children, if there is one. Controllers are handed down only in a unit
/// whose daemon is in a leaf of its own; elsewhere the groups only serve to end a kernel's processes as one.
pub fn delegated_cgroup() -> Option<PathBuf> {
    let own = super::abilities::own_cgroup()?;
    let in_leaf = own.file_name().is_some_and(|name| name == OWN_LEAF);
    let unit = if in_leaf { own.parent()?.to_owned() } else { own };
    let euid = nix::unistd::geteuid();
    if !euid.is_root() && fs::metadata(&unit).ok()?.uid() != euid.as_raw() {
        return None;
    }
    let base = unit.join("ryokan");
    if !base.is_dir() {
        fs::create_dir(&base).ok()?;
    }
    if in_leaf {
        for controller in ["memory", "pids", "cpu"] {
            // One that is not there is not used; `show` says which limits are in force.
            let _ = fs::write(unit.join("cgroup.subtree_control"), format!("+{controller}"));
        }
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
