//! Opens host paths for mounts so that the checked path is the one used.
//!
//! A path is checked by its name with symbolic links resolved. A user who may write to a parent
//! folder could insert a link between check and use, so the path is opened without following links:
//! it is the checked file or an error.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};

use super::layer::{Layer, SandboxError};

/// Opens an absolute path that contains no symbolic link.
///
/// # Errors
/// `ELOOP` for a link anywhere in the path, `EINVAL` for a relative path or one with `..`, and the
/// errors of `open`.
pub fn open_host_path(path: &Path) -> io::Result<OwnedFd> {
    let plain = path.is_absolute() && path.components().all(|part| !matches!(part, Component::ParentDir));
    if !plain {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    Ok(openat2(AT_FDCWD, path, how)?)
}

/// As [`open_host_path`], with an error of a layer.
pub(super) fn open(layer: Layer, path: &Path) -> Result<OwnedFd, SandboxError> {
    open_host_path(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => SandboxError::new(layer, format!("{path:?} contains a symbolic link now"))
            .hint("restore the original path, or unmount it and mount it again"),
        _ => SandboxError::new(layer, format!("cannot open {path:?}: {error}"))
            .hint("make sure that the path exists and that the kernel's user may open it"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_paths_follow_no_links() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().canonicalize().expect("it is there");
        std::fs::create_dir_all(root.join("real/below")).expect("made");
        std::fs::write(root.join("real/below/file"), "").expect("written");
        std::os::unix::fs::symlink("real", root.join("link")).expect("made");
        std::os::unix::fs::symlink("file", root.join("real/below/last")).expect("made");
        for good in ["", "real", "real/below/file"] {
            assert!(open_host_path(&root.join(good)).is_ok(), "{good:?}");
        }
        for (bad, errno) in [
            ("link", libc::ELOOP),
            ("link/below", libc::ELOOP),
            ("real/below/last", libc::ELOOP),
            ("real/../real", libc::EINVAL),
            ("none", libc::ENOENT),
        ] {
            assert_eq!(open_host_path(&root.join(bad)).err().and_then(|e| e.raw_os_error()), Some(errno), "{bad:?}");
        }
        assert!(open_host_path(Path::new("relative")).is_err());
        assert!(open_host_path(Path::new("/proc/self/exe")).is_err());
    }
}
