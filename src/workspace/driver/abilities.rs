//! Abilities of a file system, found by trying them in a folder private to the daemon.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use nix::unistd::{UnlinkatFlags, unlinkat};

use super::{DriverChoice, DriverKind, nameless};
use crate::core::info::Ability;
use crate::sys::{btrfs, inode};

/// Abilities of a file system; an error says why one is missing.
#[derive(Debug, Clone)]
pub struct FsAbilities {
    /// Cloning files.
    pub clones: Result<(), String>,
    /// Creating subvolumes.
    pub subvolumes: Result<(), String>,
    /// Removing subvolumes at once.
    pub removal: Result<(), String>,
}

/// Tries the abilities of a folder's file system. Leaves nothing there.
pub fn abilities(dir: &Path) -> FsAbilities {
    let opened = match File::open(dir) {
        Ok(opened) => opened,
        Err(error) => {
            let why = Err(format!("cannot open {}: {error}", dir.display()));
            return FsAbilities { clones: why.clone(), subvolumes: why.clone(), removal: why };
        }
    };
    let magic = inode::file_system(opened.as_fd()).unwrap_or_default();
    let name = name_of(magic);
    let clones = try_clone(&opened).map_err(|error| format!("{name} shares no blocks between files: {error}"));
    if magic != btrfs::MAGIC {
        let why = Err(format!("{name} has no subvolumes"));
        return FsAbilities { clones, subvolumes: why.clone(), removal: why };
    }
    let probe = format!(".subvolume-{}", std::process::id());
    let subvolumes = btrfs::create(opened.as_fd(), &probe).map_err(|error| format!("cannot make a subvolume: {error}"));
    let removal = match (&subvolumes, btrfs::destroy(opened.as_fd(), &probe)) {
        (Err(why), _) => Err(why.clone()),
        (Ok(()), Ok(())) => Ok(()),
        (Ok(()), Err(error)) => {
            // An empty subvolume can be removed like a folder in any case.
            let _ = unlinkat(&opened, probe.as_str(), UnlinkatFlags::RemoveDir);
            Err(format!("the file system is mounted without user_subvol_rm_allowed: {error}"))
        }
    };
    FsAbilities { clones, subvolumes, removal }
}

fn try_clone(dir: &File) -> io::Result<()> {
    let (from, to) = (nameless(dir.as_fd())?, nameless(dir.as_fd())?);
    from.write_all_at(&[1; 8192], 0)?;
    inode::clone_blocks(from.as_fd(), to.as_fd())
}

/// The lines of `doctor` for a folder's file system and the host's change notifications.
pub fn doctor(data: &Path) -> Vec<Ability> {
    let found = abilities(data);
    let line = |name: &str, can: &Result<(), String>, hint: &str| {
        let (detail, hint) = match can {
            Ok(()) => (data.display().to_string(), String::new()),
            Err(why) => (format!("{}: {why}", data.display()), hint.to_owned()),
        };
        Ability { name: name.into(), present: can.is_ok(), required: false, detail, hint }
    };
    let mut lines = vec![
        line("btrfs", &found.subvolumes, "put the data folder on Btrfs for forks in constant time"),
        line(
            "reflink",
            &found.clones,
            "put the data folder on Btrfs or XFS for pauses that large files do not lengthen",
        ),
    ];
    if found.subvolumes.is_ok() {
        let hint = "mount it with user_subvol_rm_allowed: then large changes are captured by one snapshot";
        lines.push(line("snapshot removal", &found.removal, hint));
    }
    lines.push(watches());
    lines
}

/// Watched folders per user below which a few large workspaces lead to full scans.
const WATCHES: u64 = 65_536;

fn watches() -> Ability {
    let limit = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/fs/inotify/{name}")).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or_default()
    };
    let (watches, queues) = (limit("max_user_watches"), limit("max_user_instances"));
    let present = watches >= WATCHES && queues > 0;
    let detail = format!("{watches} folders in {queues} workspaces for each user");
    let hint = if present {
        String::new()
    } else {
        format!("sudo sysctl -w fs.inotify.max_user_watches={WATCHES}: without, every checkpoint looks at every file")
    };
    Ability { name: "file watches".into(), present, required: false, detail, hint }
}

impl FsAbilities {
    /// The best driver for a workspace; its path is only computed where it matters.
    pub fn choice(&self, workspace: impl FnOnce() -> PathBuf) -> DriverChoice {
        let is_subvolume = |path: &Path| path.metadata().is_ok_and(|found| found.ino() == btrfs::SUBVOLUME_INODE);
        match (&self.clones, &self.subvolumes) {
            (Err(why), _) => DriverChoice { kind: DriverKind::Tracked, reason: why.clone() },
            (Ok(()), Err(why)) => DriverChoice { kind: DriverKind::Reflink, reason: why.clone() },
            (Ok(()), Ok(())) if workspace().parent().is_some_and(is_subvolume) => {
                let reason = match &self.removal {
                    Ok(()) => String::new(),
                    Err(why) => format!("captures by clones only: {why}"),
                };
                DriverChoice { kind: DriverKind::Btrfs, reason }
            }
            (Ok(()), Ok(())) => {
                let reason = "the workspace was made as a folder, not in a subvolume".into();
                DriverChoice { kind: DriverKind::Reflink, reason }
            }
        }
    }
}

/// A file system by its number in `statfs`.
pub fn name_of(magic: i64) -> String {
    match magic {
        0xef53 => "ext4".into(),
        0x5846_5342 => "XFS".into(),
        btrfs::MAGIC => "Btrfs".into(),
        0x0102_1994 => "tmpfs".into(),
        0xf2f5_2010 => "F2FS".into(),
        0x2fc1_2fc1 => "ZFS".into(),
        0x794c_7630 => "overlayfs".into(),
        0x6969 => "NFS".into(),
        other => format!("this file system (type {other:#x})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filesystem_abilities_have_hints() {
        let dir = tempfile::tempdir().expect("a folder");
        for ability in doctor(dir.path()) {
            assert!(!ability.detail.is_empty(), "{}", ability.name);
            assert_eq!(ability.present, ability.hint.is_empty(), "{ability:?}");
        }
        assert_eq!(dir.path().read_dir().expect("readable").count(), 0, "nothing is left");
        let none = abilities(&dir.path().join("none"));
        assert_eq!(none.choice(|| dir.path().to_owned()).kind, DriverKind::Tracked);
    }
}
