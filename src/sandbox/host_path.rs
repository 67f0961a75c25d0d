//! Host paths that a kernel was given, opened so that what was judged is what is used.
//!
//! A path is judged by its name, symbolic links resolved. Whoever may write to a folder on the way can put a link there between
//! the judgement and the use, so it is opened without following any: then it is what its name says, or nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};

use super::layer::{Layer, SandboxError};

/// Opens what is at an absolute path that has no symbolic link in it.
///
/// # Errors
/// `ELOOP` for a link anywhere on the way or at its end, `EINVAL` for a path that is not plain, and those of `open`.
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

/// The same for the sandbox, with the words of one layer.
pub(super) fn open(layer: Layer, path: &Path) -> Result<OwnedFd, SandboxError> {
    open_host_path(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => {
            SandboxError::new(layer, format!("{path:?} leads elsewhere now: a symbolic link was put in its way"))
                .hint("put back what was there, or take the path away and give it anew")
        }
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
