//! Drivers: how a file system supports captures and forks.
//!
//! `scan` finds changes in the same way everywhere: a driver only holds the bytes of changed files while the kernel is
//! frozen, and copies whole workspaces. So a tree does not depend on the driver.
//!
//! ```text
//!            before          frozen                     writers run again        all is read
//!  driver:   ahead(file) ──▶ hold(file) ──▶ HeldFile ──▶ open(held) ─▶ bytes ──▶ release
//! ```
//!
//! | driver | where | holds a file by | copies a workspace by |
//! |---|---|---|---|
//! | `btrfs` | Btrfs, the workspace in a subvolume | a clone; when many changed, a snapshot of the subvolume | a snapshot |
//! | `reflink` | XFS, Btrfs | a clone | clones of its files |
//! | `tracked` | everywhere | its bytes, read | the bytes of its files |
//!
//! To add one: a file here with the trait, a [`DriverKind`], a line in [`choose`] that tries whether the file system
//! supports it, and a line in `model_tests`, which tests every driver against the same model.

mod abilities;
mod btrfs;
mod reflink;
mod tracked;

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;

pub use abilities::{FsAbilities, abilities, doctor, name_of as file_system_name};

use super::error::WorkspaceError;
use super::paths::WorkspacePaths;
use super::tree::entry::Name;
use crate::sys::fs;

/// Kind of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DriverKind {
    /// Snapshots of a Btrfs subvolume.
    Btrfs,
    /// Clones of files.
    Reflink,
    /// Reading files.
    Tracked,
}

impl DriverKind {
    /// Its name in every interface.
    pub const fn name(self) -> &'static str {
        match self {
            DriverKind::Btrfs => "btrfs",
            DriverKind::Reflink => "reflink",
            DriverKind::Tracked => "tracked",
        }
    }
}

/// A driver, and why no better one is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverChoice {
    /// Its kind.
    pub kind: DriverKind,
    /// Why the next better driver, or a part of this one, is not used; may be empty.
    pub reason: String,
}

impl std::fmt::Display for DriverChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.name())?;
        if self.reason.is_empty() { Ok(()) } else { write!(f, " ({})", self.reason) }
    }
}

/// A file's bytes as of the freeze, still to be read.
#[derive(Debug)]
pub(super) enum HeldFile {
    /// An unnamed clone.
    Clone(File),
    /// A path in the snapshot.
    Within(Vec<Name>),
}

/// A way to hold and copy files. Blocks.
pub(super) trait Driver: std::fmt::Debug + Send {
    /// Its kind, and why no better one.
    fn choice(&self) -> &DriverChoice;

    /// Up to this size, reading a file is faster than holding it, as long as there is memory.
    fn reads_up_to(&self) -> u64;

    /// Before the freeze: does the slow part of [`Self::hold`].
    fn ahead(&mut self, file: &File) -> io::Result<()>;

    /// While frozen: holds a file's bytes without reading them. `None`: read it now.
    fn hold(&mut self, file: &File, place: &dyn Fn() -> Vec<Name>) -> Result<Option<HeldFile>, WorkspaceError>;

    /// After the freeze: opens a held file.
    fn open(&mut self, held: HeldFile) -> Result<File, WorkspaceError>;

    /// Releases all held files.
    fn release(&mut self) -> Result<(), WorkspaceError>;

    /// For tests: holds every file, and takes a snapshot after this many clones.
    #[cfg(test)]
    fn hold_all(&mut self, clones: usize);
}

/// Chooses the best driver for a workspace. Removes snapshots that a killed process left.
pub(super) fn choose(paths: &WorkspacePaths) -> Result<Box<dyn Driver>, WorkspaceError> {
    match std::fs::DirBuilder::new().create(&paths.staging) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(WorkspaceError::io("make", &paths.staging, error));
        }
        Ok(()) | Err(_) => {}
    }
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(&paths.staging, private).map_err(WorkspaceError::of("change", &paths.staging))?;
    let found = abilities(&paths.staging);
    let choice = found.choice(|| paths.workspace.clone());
    Ok(match choice.kind {
        DriverKind::Btrfs => Box::new(btrfs::Btrfs::open(paths, choice, found.removal.is_ok())?),
        DriverKind::Reflink => Box::new(reflink::Reflink::open(paths, choice)?),
        DriverKind::Tracked => Box::new(tracked::Tracked { choice }),
    })
}

/// Creates an unnamed file in a folder; it vanishes when it is closed.
fn nameless(dir: BorrowedFd<'_>) -> io::Result<File> {
    use nix::fcntl::{OFlag, openat};
    use nix::sys::stat::Mode;
    let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    Ok(openat(dir, ".", flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
}

/// Whether the error means that these blocks cannot be shared: then the file is read.
pub(super) fn cannot_clone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EXDEV | libc::EINVAL | libc::ENOTTY | libc::EMLINK))
        && !fs::is_full(error)
}
