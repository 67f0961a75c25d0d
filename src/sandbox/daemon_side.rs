//! What the daemon itself does for sandboxes: finds the cgroup that it may divide, and programs.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Folders of programs that kernels see too.
const PROGRAM_FOLDERS: [&str; 4] = ["/usr/local/bin", "/usr/bin", "/bin", "/opt/bin"];

/// The part of a unit's cgroup that the service manager put the daemon in (`DelegateSubgroup=`): a group that holds processes
/// cannot hand its controllers down, so the daemon must not be where kernels' groups are made.
const OWN_LEAF: &str = "daemon";

/// The cgroup v2 folder in which this daemon may make children with limits, if there is one: in a unit whose daemon is in a leaf
/// of its own, and that was given controllers. A group without limits would be of no use: a kernel's processes end with their
/// init anyway, and to move one into it costs up to 20 ms.
pub fn delegated_cgroup() -> Option<PathBuf> {
    let own = super::abilities::own_cgroup()?;
    let unit = own.parent().filter(|_| own.file_name().is_some_and(|name| name == OWN_LEAF))?.to_owned();
    let controllers = fs::read_to_string(unit.join("cgroup.controllers")).ok()?;
    let wanted =
        ["memory", "pids", "cpu"].map(|name| (name, controllers.split_whitespace().any(|there| there == name)));
    if wanted.iter().all(|(_, there)| !there) {
        return None;
    }
    let euid = nix::unistd::geteuid();
    if !euid.is_root() && fs::metadata(&unit).ok()?.uid() != euid.as_raw() {
        return None;
    }
    let base = unit.join("ryokan");
    if !base.is_dir() {
        fs::create_dir(&base).ok()?;
    }
    for (controller, _) in wanted.iter().filter(|(_, there)| *there) {
        // One that cannot be handed down is not used; `show` says which limits are in force.
        let _ = fs::write(unit.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    Some(base)
}

/// Whether groups below that cgroup can be given parts of a processor.
pub fn divides_processors(base: Option<&Path>) -> bool {
    let controllers = base.and_then(|base| fs::read_to_string(base.join("cgroup.controllers")).ok());
    controllers.is_some_and(|names| names.split_whitespace().any(|name| name == "cpu"))
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
