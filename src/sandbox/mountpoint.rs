//! Mount points in a workspace, seen from the host: which components a mount will create, and
//! removing them afterwards. Runs in the daemon. The path may be controlled by untrusted code: no
//! link is followed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, SFlag, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::plan::WORKSPACE;
use super::tree::find;

/// Number of missing path components (the last may be a file) in `workspace` for a mount at
/// `inside`.
pub fn missing_components(workspace: &Path, inside: &Path) -> u32 {
    let Ok(way) = inside.strip_prefix(WORKSPACE) else { return 0 };
    let Ok(mut here) = open(workspace) else { return 0 };
    let mut parts = way.components();
    while let Some(part) = parts.next() {
        match find(here.as_fd(), Path::new(part.as_os_str())) {
            Ok(found) => here = found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return u32::try_from(parts.count() + 1).unwrap_or(u32::MAX);
            }
            // The mount will fail and report why.
            Err(_) => return 0,
        }
    }
    0
}

/// Removes the last `made` components of the path to `inside`, innermost first, as long as they are
/// empty.
pub fn remove(workspace: &Path, inside: &Path, made: u32) {
    let Ok(way) = inside.strip_prefix(WORKSPACE) else { return };
    let Ok(root) = open(workspace) else { return };
    for (place, is_last) in
        way.ancestors().zip(std::iter::once(true).chain(std::iter::repeat(false))).take(made as usize)
    {
        let (Some(above), Some(name)) = (place.parent(), place.file_name()) else { return };
        let Ok(above) = find(root.as_fd(), above) else { return };
        let is_empty_file = is_last
            && fstatat(&above, name, AtFlags::AT_SYMLINK_NOFOLLOW).is_ok_and(|found| {
                found.st_size == 0 && SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG
            });
        let kind = if is_empty_file { UnlinkatFlags::NoRemoveDir } else { UnlinkatFlags::RemoveDir };
        if unlinkat(&above, name, kind).is_err() {
            // Not empty: it belongs to the kernel now.
            return;
        }
    }
}

fn open(workspace: &Path) -> nix::Result<OwnedFd> {
    openat(AT_FDCWD, workspace, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clear_removes_created_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        let (at, inside) = (|name: &str| here.join(name), |name: &str| Path::new(WORKSPACE).join(name));
        std::fs::create_dir(at("own")).expect("made");
        for (path, made) in [("own", 0), ("own/x", 1), ("a/b/c", 3), ("own/../own", 0)] {
            assert_eq!(missing_components(here, &inside(path)), made, "{path}");
        }
        assert_eq!(missing_components(here, Path::new("/data")), 0, "not in the workspace");
        std::fs::create_dir_all(at("a/b/c")).expect("made");
        std::fs::create_dir(at("own/x")).expect("made");
        remove(here, &inside("a/b/c"), 2);
        assert!(at("a").is_dir() && !at("a/b").exists(), "no more than was made");
        remove(here, &inside("own/x"), 0);
        assert!(at("own/x").is_dir());
        std::fs::write(at("own/x/file"), "").expect("written");
        remove(here, &inside("own/x"), 1);
        assert!(at("own/x/file").exists(), "not empty");
        remove(here, &inside("own/x/file"), 2);
        assert!(at("own").is_dir() && !at("own/x").exists(), "an empty file is a place too");
        std::fs::write(at("full"), "text").expect("written");
        remove(here, &inside("full"), 1);
        assert!(at("full").exists());
    }

    #[test]
    fn mount_points_ignore_symlinks() {
        let (folder, outside) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        std::fs::create_dir(outside.path().join("victim")).expect("made");
        std::os::unix::fs::symlink(outside.path(), folder.path().join("link")).expect("linked");
        assert_eq!(missing_components(folder.path(), Path::new("/workspace/link/other")), 0);
        remove(folder.path(), Path::new("/workspace/link/victim"), 2);
        assert!(outside.path().join("victim").is_dir() && folder.path().join("link").is_symlink());
    }
}
