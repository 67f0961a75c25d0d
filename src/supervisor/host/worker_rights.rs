//! Whether the unprivileged account of root's kernels can write what root grants them.

use std::fs::{File, Metadata};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::Host;
use crate::config;
use crate::core::error::{Error, Result};
use crate::core::spec::AllowedPath;
use crate::sys::inode;

/// The extended attribute of an access list.
const ACCESS_LIST: &[u8] = b"system.posix_acl_access";

impl Host {
    /// Refuses a path that is granted to one of root's kernels for writing, and that its account cannot write. Other
    /// users' kernels have the rights of their user.
    ///
    /// # Errors
    /// `refused`.
    pub(crate) fn check_writable(&self, uid: u32, allowed: &AllowedPath, real: &Path) -> Result<()> {
        if !allowed.writable || uid != 0 || !nix::unistd::geteuid().is_root() || self.maps_owner(uid, real) {
            return Ok(());
        }
        let user = &self.config.sandbox.worker_user;
        let (Ok(account), Ok(found)) = (config::account(user), std::fs::metadata(real)) else { return Ok(()) };
        if may_write(&found, account) || has_access_list(real) {
            return Ok(());
        }
        let (shown, mode) = (allowed.path.display(), found.mode() & 0o7777);
        let message = format!(
            "{shown} cannot be written by this kernel: its code runs as user {user}, and the path has owner {} and mode \
             {mode:o}",
            found.uid()
        );
        Err(Error::refused(message).reason("not_writable").hint(format!(
            "give it to that user: chown {user} {shown}, or setfacl -m u:{user}:rwX {shown}; or grant it as \
             {shown}:ro; or name it in sandbox.map_owner of the configuration"
        )))
    }
}

/// Whether owner, group and mode let an account write a file, or change a directory.
fn may_write(found: &Metadata, (uid, gid): (u32, u32)) -> bool {
    let wanted = if found.is_dir() { 0o3 } else { 0o2 };
    let shift = match () {
        () if found.uid() == uid => 6,
        () if found.gid() == gid => 3,
        () => 0,
    };
    found.mode() >> shift & wanted == wanted
}

/// Whether an access list says more than the mode.
fn has_access_list(real: &Path) -> bool {
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(real);
    let names = opened.and_then(|file| inode::attributes(file.as_fd()));
    names.is_ok_and(|names| names.iter().any(|name| name == ACCESS_LIST))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn mode_decides_writing() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        let (uid, gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
        for (path, mode, account, wanted) in [
            (folder.path(), 0o755, (uid + 1, gid + 1), false),
            (folder.path(), 0o757, (uid + 1, gid + 1), true),
            (folder.path(), 0o752, (uid + 1, gid + 1), false),
            (folder.path(), 0o775, (uid + 1, gid), true),
            (folder.path(), 0o757, (uid + 1, gid), false),
            (folder.path(), 0o700, (uid, gid), true),
            (&*file, 0o602, (uid + 1, gid + 1), true),
            (&*file, 0o604, (uid + 1, gid + 1), false),
        ] {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("changed");
            let found = std::fs::metadata(path).expect("there");
            assert_eq!(may_write(&found, account), wanted, "{mode:o} {account:?}");
            std::fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).expect("changed");
        }
        assert!(!has_access_list(folder.path()));
    }
}
