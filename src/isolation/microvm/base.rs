//! The file beneath a machine's memory: it has a name in the machine's folder as long as something needs it.
//!
//! ```text
//!  templates/KEY/ram ─ link ─▶ machine.base    a machine runs that has mapped it
//!                                └─ link ─▶ suspended.base    only the pages that differ from it are saved
//! ```
//!
//! A template that is rebuilt or removed loses its own name of the file, and nothing else. The file is never written.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::linkat;
use serde::{Deserialize, Serialize};

use super::saved::unreadable;
use super::stamp::{self, Stamp};
use super::template;
use crate::core::error::{Error, Result};

/// The name while a machine runs.
const RUNNING: &str = "machine.base";
/// The name while a machine is suspended.
pub(super) const SAVED: &str = "suspended.base";

/// The template whose memory is beneath a machine's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BaseTemplate {
    pub id: String,
    /// The digest of its memory.
    pub blake3: String,
}

/// The file beneath the changed pages of a suspended machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Base {
    /// `None`: it is the memory of a machine that was copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<BaseTemplate>,
    stamp: Stamp,
    /// What it holds, where no template says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    contents: Option<String>,
}

impl Base {
    /// Makes the file durable and describes it. Blocks.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn describe(file: &File, template: Option<BaseTemplate>) -> io::Result<Base> {
        // A template's is so already.
        file.sync_all()?;
        let contents = template.is_none().then(|| stamp::contents(file)).transpose()?;
        Ok(Base { template, stamp: Stamp::of_file(file)?, contents })
    }

    /// Its size.
    pub(super) fn bytes(&self) -> u64 {
        self.stamp.bytes
    }

    /// Opens the file, which must hold what was described: its contents are read if only its stamp differs, as that of a
    /// copy, or of a file whose time was changed. Blocks.
    ///
    /// # Errors
    /// `corrupt`; `busy`, `unavailable` if it cannot be read now.
    pub(super) fn open(&self, dir: &Path) -> Result<File> {
        let damaged = |error: io::Error| unreadable(SAVED, &error);
        let file = open(dir, SAVED).map_err(damaged)?;
        let found = Stamp::of_file(&file).map_err(damaged)?;
        let is_it =
            found == self.stamp || (found.bytes == self.stamp.bytes && self.is_equal(&file).map_err(damaged)?);
        is_it.then_some(file).ok_or_else(|| Error::corrupt(format!("{SAVED} is not the file beneath the saved pages")))
    }

    /// Whether a file holds the same. Blocks.
    fn is_equal(&self, file: &File) -> io::Result<bool> {
        match (&self.template, &self.contents) {
            (Some(template), _) => Ok(template::part(file)?.blake3 == template.blake3),
            (None, Some(contents)) => Ok(stamp::contents(file)? == *contents),
            (None, None) => Ok(false),
        }
    }
}

/// Gives the file beneath a machine that starts a name in its folder, in place of that of an earlier machine. Blocks.
///
/// # Errors
/// Those of linking: a file without any name cannot get one, nor one of another file system.
pub(super) fn pin(dir: &Path, file: &File) -> io::Result<()> {
    unpin(dir)?;
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(AT_FDCWD, from.as_str(), AT_FDCWD, &dir.join(RUNNING), AtFlags::AT_SYMLINK_FOLLOW)?)
}

/// Removes the name after the machine's end. Blocks.
///
/// # Errors
/// Those of removing.
pub(super) fn unpin(dir: &Path) -> io::Result<()> {
    absent(std::fs::remove_file(dir.join(RUNNING)))
}

/// Moves the name with the machine's disk. Blocks.
///
/// # Errors
/// Those of renaming.
pub(super) fn move_pin(from: &Path, to: &Path) -> io::Result<()> {
    absent(std::fs::rename(from.join(RUNNING), to.join(RUNNING)))
}

/// The file with that name for a running machine, which must be the one that its monitor has mapped. Blocks.
///
/// # Errors
/// Those of opening; `InvalidData` for another file.
pub(super) fn pinned(dir: &Path, mapped: &File) -> io::Result<File> {
    let file = open(dir, RUNNING)?;
    match is_same(&file, mapped)? {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "another file is beneath its memory")),
    }
}

/// Whether both are one file. Blocks.
///
/// # Errors
/// Those of the file system.
pub(super) fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Keeps the file for a machine that is saved. Blocks.
///
/// # Errors
/// Those of linking.
pub(super) fn keep(dir: &Path) -> io::Result<()> {
    std::fs::hard_link(dir.join(RUNNING), dir.join(SAVED))
}

fn open(dir: &Path, name: &str) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(dir.join(name))
}

fn absent(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_file_outlives_template() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let dir = folder.path();
        let (ram, other, slot) = (dir.join("ram"), dir.join("other"), dir.join("slot"));
        std::fs::create_dir(&slot)?;
        std::fs::write(&ram, [7; 4096])?;
        std::fs::write(&other, [7; 4096])?;
        let (file, foreign) = (File::open(&ram)?, File::open(&other)?);
        pin(&slot, &foreign)?;
        pin(&slot, &file)?;
        move_pin(&slot, dir)?;
        move_pin(&slot, dir)?;
        assert!(pinned(dir, &file).is_ok() && pinned(dir, &foreign).is_err());
        std::fs::remove_file(&ram)?;
        keep(dir)?;
        let template = BaseTemplate { id: String::from("one"), blake3: String::from("digest") };
        let base = Base::describe(&file, Some(template))?;
        unpin(dir)?;
        unpin(dir)?;
        assert!(pinned(dir, &file).is_err() && base.bytes() == 4096);
        assert!(base.open(dir).is_ok_and(|found| found.metadata().is_ok_and(|found| found.len() == 4096)));
        // Without any name it is gone for good.
        std::fs::remove_file(dir.join(SAVED))?;
        assert!(pin(dir, &file).is_err());
        Ok(())
    }

    #[test]
    fn copied_base_is_compared() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let place = folder.path().join(SAVED);
        std::fs::write(&place, b"memory")?;
        let file = File::open(&place)?;
        let blake3 = template::part(&file)?.blake3;
        let of_template = Base::describe(&file, Some(BaseTemplate { id: String::from("one"), blake3 }))?;
        for base in [of_template, Base::describe(&file, None)?] {
            for (bytes, is_same) in [(b"memory", true), (b"memorY", false)] {
                // Another file, as on another disk; the first one keeps its inode.
                std::fs::remove_file(&place)?;
                std::fs::write(&place, bytes)?;
                assert_eq!(base.open(folder.path()).is_ok(), is_same, "{base:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn time_alone_keeps_base() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let place = folder.path().join(SAVED);
        std::fs::write(&place, b"memory")?;
        let file = File::options().read(true).write(true).open(&place)?;
        let blake3 = template::part(&file)?.blake3;
        let of_template = Base::describe(&file, Some(BaseTemplate { id: String::from("one"), blake3 }))?;
        for base in [of_template, Base::describe(&file, None)?] {
            file.set_modified(std::time::SystemTime::UNIX_EPOCH)?;
            assert!(base.open(folder.path()).is_ok(), "{base:?}");
        }
        Ok(())
    }

    #[test]
    fn changed_base_is_refused() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let dir = folder.path();
        let place = dir.join(SAVED);
        let refused = |base: &Base| base.open(dir).err().map(|error| error.code.name());
        let made = |bytes: &[u8]| {
            absent(std::fs::remove_file(&place))?;
            std::fs::write(&place, bytes)?;
            Base::describe(&File::open(&place)?, None)
        };
        let base = made(b"memory")?;
        assert_eq!(refused(&base), None);
        std::fs::remove_file(&place)?;
        assert_eq!(refused(&base), Some("corrupt"));
        std::os::unix::fs::symlink("elsewhere", &place)?;
        assert_eq!(refused(&base), Some("corrupt"));
        let base = made(b"memory")?;
        File::options().write(true).open(&place)?.set_len(3)?;
        assert_eq!(refused(&base), Some("corrupt"));
        let base = made(b"memory")?;
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::os::unix::fs::FileExt::write_all_at(&File::options().write(true).open(&place)?, b"M", 0)?;
        assert_eq!(refused(&base), Some("corrupt"));
        Ok(())
    }
}
