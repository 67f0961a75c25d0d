//! What holds the content of members, for locks: versions and file systems.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::objects::blocking;
use crate::core::error::Result;
use crate::core::freeze::cost::Storage;
use crate::sys::process::kernel_release;
use crate::sys::{btrfs, inode};
use crate::workspace::file_system_name;

/// The kernel of this host: it clones files and makes snapshots.
pub(super) fn kernel_version() -> String {
    format!("Linux {}", kernel_release())
}

/// Describes what holds the content of a member; `place`: a directory in its file system; `source`: its own parameters.
///
/// # Errors
/// Those of a thread.
pub(super) async fn storage_at(version: String, place: Option<PathBuf>, source: String) -> Result<Storage> {
    let (file_system, place) = match place {
        // No file is opened: SQLite's locks would be released.
        Some(place) => blocking(move || Ok((file_system(&place), parameters(&place)))).await?,
        None => Default::default(),
    };
    let known = [source, place].into_iter().filter(|one| !one.is_empty()).collect::<Vec<_>>();
    Ok(Storage { version, file_system, parameters: known.join(", ") })
}

/// The subvolume of a directory on Btrfs with its generation, and whether new files there have No_COW.
fn parameters(place: &Path) -> String {
    let flags = libc::O_DIRECTORY | libc::O_NONBLOCK;
    let Ok(directory) = File::options().read(true).custom_flags(flags).open(place) else { return String::new() };
    if inode::file_system(directory.as_fd()).ok() != Some(btrfs::MAGIC) {
        return String::new();
    }
    let subvolume = btrfs::subvolume(directory.as_fd()).ok();
    let subvolume = subvolume.map(|(id, generation)| format!("subvolume {id} in generation {generation}"));
    let no_cow = inode::is_no_cow(directory.as_fd()).is_ok_and(|is| is).then(|| "No_COW".to_owned());
    subvolume.into_iter().chain(no_cow).collect::<Vec<_>>().join(", ")
}

fn file_system(place: &Path) -> String {
    let found = (nix::sys::statfs::statfs(place), nix::sys::statvfs::statvfs(place));
    let (Ok(kind), Ok(id)) = found else { return String::new() };
    format!("{} {:016x}", file_system_name(kind.filesystem_type().0), id.filesystem_id())
}
