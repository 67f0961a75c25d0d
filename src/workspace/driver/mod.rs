//! What a file system can do for captures and forks, one driver for each way.
//!
//! What changed is found in one way everywhere (`scan`): a driver only says how the bytes of a changed file are held while
//! everything stands still, and how a whole workspace is copied. So a tree is the same whoever captured it.
//!
//! ```text
//!            before          nobody writes          writers go on            all is read
//!  driver:   ahead(file) ──▶ hold(file) ──▶ Held ──▶ open(held) ─▶ bytes ──▶ release
//! ```
//!
//! | driver | where | holds a file by | copies a workspace by |
//! |---|---|---|---|
//! | `btrfs` | Btrfs, the workspace in a subvolume | a clone; when many changed, a snapshot of the subvolume | a snapshot |
//! | `reflink` | XFS, Btrfs | a clone | clones of its files |
//! | `tracked` | everywhere | its bytes, read | the bytes of its files |
//!
//! To add one: a file here with the trait, a [`DriverKind`], a line in [`choose`] that finds by trying whether the file system
//! can, and a line in `model_tests`, which holds every driver against the same model.

mod abilities;
mod btrfs;
mod reflink;
mod tracked;

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;

pub use abilities::{FsAbilities, abilities, doctor};

use super::error::WorkspaceError;
use super::paths::WorkspacePaths;
use super::tree::entry::Name;
use crate::sys::fs;

/// Which driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DriverKind {
    /// Snapshots of a Btrfs subvolume.
    Btrfs,
    /// Clones of files.
    Reflink,
    /// Files are read.
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

/// A driver, and why it is no better one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverChoice {
    /// Which.
    pub kind: DriverKind,
    /// What keeps the next better one, or a part of this one, from being used; empty: nothing.
    pub reason: String,
}

impl std::fmt::Display for DriverChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.name())?;
        if self.reason.is_empty() { Ok(()) } else { write!(f, " ({})", self.reason) }
    }
}

/// A file's bytes as they were while nobody wrote, still to be read.
#[derive(Debug)]
pub(super) enum HeldFile {
    /// A file without a name that shares the other's blocks.
    Clone(File),
    /// At this place of a copy of everything.
    Within(Vec<Name>),
}

/// One way to hold and to copy files. All of it blocks.
pub(super) trait Driver: std::fmt::Debug + Send {
    /// Which it is, and why no better one.
    fn choice(&self) -> &DriverChoice;

    /// Files up to so many bytes are sooner read than held, as long as there is memory for them.
    fn reads_up_to(&self) -> u64;

    /// Writers still run: does for a file what [`Self::hold`] would have to wait for.
    fn ahead(&mut self, file: &File) -> io::Result<()>;

    /// Nobody writes: holds a file's bytes without reading them. None: this one has to be read at once.
    fn hold(&mut self, file: &File, place: &dyn Fn() -> Vec<Name>) -> Result<Option<HeldFile>, WorkspaceError>;

    /// What was held, to be read. Writers may run.
    fn open(&mut self, held: HeldFile) -> Result<File, WorkspaceError>;

    /// What was held is not needed any more. Nothing held: nothing done.
    fn release(&mut self) -> Result<(), WorkspaceError>;

    /// Holds every file, and takes a snapshot after so many clones: small trees meet what large ones do.
    #[cfg(test)]
    fn hold_all(&mut self, clones: usize);
}

/// The driver for a workspace: the best that its file system can. Removes what a killed process left of snapshots.
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

/// A file in a folder that has no name, and goes when it is closed.
fn nameless(dir: BorrowedFd<'_>) -> io::Result<File> {
    use nix::fcntl::{OFlag, openat};
    use nix::sys::stat::Mode;
    let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    Ok(openat(dir, ".", flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
}

/// Whether an error says that these blocks cannot be shared, whatever the reason: then a file is read.
pub(super) fn cannot_clone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EXDEV | libc::EINVAL | libc::ENOTTY | libc::EMLINK))
        && !fs::is_full(error)
}
