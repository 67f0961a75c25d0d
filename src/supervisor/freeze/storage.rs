//! What holds the content of members, for locks: versions and file systems.

use std::path::{Path, PathBuf};

use super::objects::blocking;
use crate::core::error::Result;
use crate::core::freeze::cost::Storage;
use crate::sys::process::kernel_release;
use crate::workspace::file_system_name;

/// The kernel of this host: it clones files and makes snapshots.
pub(super) fn kernel_version() -> String {
    format!("Linux {}", kernel_release())
}

/// Describes what holds the content of a member; `place`: a path in its file system.
///
/// # Errors
/// Those of a thread.
pub(super) async fn storage_at(version: String, place: Option<PathBuf>) -> Result<Storage> {
    let file_system = match place {
        // Nothing is opened: SQLite's locks would be released.
        Some(place) => blocking(move || Ok(file_system(&place))).await?,
        None => String::new(),
    };
    Ok(Storage { version, file_system })
}

fn file_system(place: &Path) -> String {
    let found = (nix::sys::statfs::statfs(place), nix::sys::statvfs::statvfs(place));
    let (Ok(kind), Ok(id)) = found else { return String::new() };
    format!("{} {:016x}", file_system_name(kind.filesystem_type().0), id.filesystem_id())
}
