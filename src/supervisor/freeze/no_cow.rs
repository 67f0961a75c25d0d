//! Databases of groups that Btrfs copies on each write.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use super::objects::blocking;
use crate::core::error::Result;
use crate::core::info::Ability;
use crate::supervisor::registry::Supervisor;
use crate::sys::{btrfs, inode};

/// Databases that the detail names.
const NAMED: usize = 5;

/// Whether the SQLite members of the caller's groups are in directories with the attribute No_COW, as far as they are on
/// Btrfs; `None`: none is.
///
/// # Errors
/// Database errors.
pub async fn no_cow(supervisor: &Supervisor, uid: u32) -> Result<Option<Ability>> {
    let groups = super::list(supervisor, uid).await?;
    let members = groups.iter().flat_map(|group| &group.members);
    let mut paths: Vec<PathBuf> =
        members.filter_map(|member| member.target.database_path()).map(PathBuf::from).collect();
    paths.sort();
    paths.dedup();
    let looked = blocking(move || Ok(paths.into_iter().filter_map(is_no_cow).collect::<Vec<_>>()));
    let found = looked.await?;
    let copied: Vec<String> =
        found.iter().filter(|(_, is_no_cow)| !is_no_cow).map(|(path, _)| path.display().to_string()).collect();
    Ok((!found.is_empty()).then(|| Ability {
        name: "no_cow".into(),
        present: copied.is_empty(),
        required: false,
        detail: match copied.len() {
            0 => format!("the databases of groups on Btrfs ({}) are in directories with No_COW", found.len()),
            all => {
                let more = if all > NAMED { format!(" and {} more", all - NAMED) } else { String::new() };
                let named = &copied[..all.min(NAMED)];
                format!("Btrfs copies each write of {}{more}: the files fragment", named.join(", "))
            }
        },
        hint: match copied.is_empty() {
            true => String::new(),
            false => "while no program uses it: make a new directory, `chattr +C` it, and copy the database there (docs/storage.md)".into(),
        },
    }))
}

/// Whether a database's file on Btrfs has the attribute No_COW. By a program of its own: a close of the file in this process
/// would release the locks that SQLite holds on it. Blocks.
pub(super) fn is_no_cow_file(path: &Path) -> bool {
    let is_btrfs = || {
        let folder = File::open(path.parent()?).ok()?;
        Some(inode::file_system(folder.as_fd()).ok()? == btrfs::MAGIC)
    };
    if is_btrfs() != Some(true) {
        return false;
    }
    inode::is_no_cow_apart(path)
}

/// Whether new files beside a database on Btrfs are written in place; `None`: it is elsewhere, or cannot be read. The
/// database itself is not opened: to close it would release the locks that SQLite holds on it in this process.
fn is_no_cow(path: PathBuf) -> Option<(PathBuf, bool)> {
    let folder = File::open(path.parent()?).ok()?;
    let is_btrfs = inode::file_system(folder.as_fd()).ok()? == btrfs::MAGIC;
    let found = is_btrfs.then(|| inode::is_no_cow(folder.as_fd()).ok()).flatten()?;
    Some((path, found))
}
