//! The daemon's part of sandboxing: finds its delegated cgroup, and programs for kernels. Runs in
//! the daemon.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::tree::SYSTEM;
use super::tree_etc::MOUNTED;

/// Program folders that kernels see, too.
const PROGRAM_FOLDERS: [&str; 4] = ["/usr/local/bin", "/usr/bin", "/bin", "/opt/bin"];

/// The daemon's subgroup of its unit (`DelegateSubgroup=`). A cgroup with processes cannot delegate
/// controllers, so the daemon must not be in the group that holds kernels' groups.
const OWN_LEAF: &str = "daemon";

/// The cgroup v2 folder in which this daemon may create children with limits, if any: in a unit
/// with a subgroup for the daemon and delegated controllers. Groups without limits would be
/// useless: a kernel's processes end with their init anyway, and moving a process costs up to 20
/// ms.
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
        // A cgroup that cannot delegate is not used; `show` lists the limits in force.
        let _ = fs::write(unit.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    Some(base)
}

/// Whether groups below that cgroup can limit fractions of processors.
pub fn divides_processors(base: Option<&Path>) -> bool {
    let controllers = base.and_then(|base| fs::read_to_string(base.join("cgroup.controllers")).ok());
    controllers.is_some_and(|names| names.split_whitespace().any(|name| name == "cpu"))
}

/// Why there is no program for kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unfound {
    /// It does not exist or is not executable.
    Absent,
    /// It exists, but kernels cannot see it or the target of its links.
    Hidden,
}

/// Finds an executable that kernels can run: an absolute path, or a name in the system's program
/// folders. `more` lists further host folders that kernels see; targets of links must be visible,
/// too.
///
/// # Errors
/// Why there is no such program.
pub fn find_program(name: &Path, more: &[PathBuf]) -> Result<PathBuf, Unfound> {
    let seen = |path: &Path| {
        let always = SYSTEM.iter().chain(MOUNTED).map(Path::new);
        always.chain(more.iter().map(PathBuf::as_path)).any(|folder| path.starts_with(folder))
    };
    let look = |path: PathBuf| {
        let meta = fs::metadata(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::PermissionDenied => Unfound::Hidden,
            _ => Unfound::Absent,
        })?;
        if !meta.is_file() || meta.permissions().mode() & 0o111 == 0 {
            return Err(Unfound::Absent);
        }
        let target = path.canonicalize().map_err(|_| Unfound::Absent)?;
        match seen(&path) && (seen(&target) || more.iter().any(|folder| is_within(&target, folder))) {
            true => Ok(path),
            false => Err(Unfound::Hidden),
        }
    };
    if name.is_absolute() {
        return look(name.to_owned());
    }
    let mut why = Unfound::Absent;
    for folder in PROGRAM_FOLDERS {
        match look(Path::new(folder).join(name)) {
            Err(Unfound::Absent) => {}
            Err(Unfound::Hidden) => why = Unfound::Hidden,
            found => return found,
        }
    }
    Err(why)
}

/// Whether a path without links is below a folder that may be reached by a link.
fn is_within(target: &Path, folder: &Path) -> bool {
    folder.canonicalize().is_ok_and(|folder| target.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn hidden_program_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = folder.path().join("own");
        fs::copy("/bin/true", &own).expect("copied");
        let (out, into) = (folder.path().join("out"), folder.path().join("into"));
        symlink("/usr/bin/env", &out).expect("linked");
        symlink(folder.path(), &into).expect("linked");
        assert_eq!(find_program(Path::new("env"), &[]), Ok("/usr/bin/env".into()));
        assert_eq!(find_program(Path::new("/usr/bin/env"), &[]), Ok("/usr/bin/env".into()));
        let around = Path::new("/usr/../").join(own.strip_prefix("/").expect("absolute"));
        for hidden in [&own, &out, &around] {
            assert_eq!(find_program(hidden, &[]), Err(Unfound::Hidden), "{hidden:?}");
        }
        for more in [folder.path().to_owned(), into] {
            let there = more.join("own");
            assert_eq!(find_program(&there, std::slice::from_ref(&more)), Ok(there));
        }
        assert_eq!(find_program(&out, &[folder.path().to_owned()]), Ok(out), "both are seen");
        for absent in ["/usr/share", "/usr/bin/no-such-program", "no-such-program", "/etc/passwd"] {
            assert_eq!(find_program(Path::new(absent), &[]), Err(Unfound::Absent), "{absent}");
        }
    }
}
