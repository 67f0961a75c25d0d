//! Btrfs, for a workspace in its own subvolume, beside its staging folder:
//!
//! ```text
//! kernels/<id>/files/            the subvolume
//!                ├ workspace/
//!                └ staging/      a rename never leaves a subvolume
//! kernels/<id>/files.moment/     a snapshot, while it is read
//! ```
//!
//! The cost of a snapshot does not depend on size or changes (measured: 7 to 20 ms, a commit of the file system); a
//! clone takes less than a tenth of a millisecond. So a few files are held by clones, and only many by a snapshot.
//!
//! Snapshots are writable, because only root may remove others. Only the daemon reaches them. Where its user may not
//! remove subvolumes at once (`user_subvol_rm_allowed` is not set), removal deletes file by file: then only clones are
//! used.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::reflink::{CLONE_ABOVE, Clones};
use super::{Driver, DriverChoice, HeldFile};
use crate::core::limits;
use crate::sys::{btrfs, fault, fs, inode};
use crate::workspace::beneath;
use crate::workspace::error::WorkspaceError;
use crate::workspace::paths::WorkspacePaths;
use crate::workspace::tree::entry::Name;

#[derive(Debug)]
pub(super) struct Btrfs {
    choice: DriverChoice,
    clones: Clones,
    /// The folder with the subvolume.
    home: PathBuf,
    /// Names of the subvolume, of the snapshot, and of the workspace in both.
    subvolume: String,
    moment: String,
    workspace: String,
    removes_at_once: bool,
    clone_above: u64,
    /// Number of clones that cost as much as a snapshot.
    clones_before: usize,
    /// The workspace in the snapshot, if there is one.
    within: Option<OwnedFd>,
}

impl Btrfs {
    pub(super) fn open(
        paths: &WorkspacePaths,
        choice: DriverChoice,
        removes_at_once: bool,
    ) -> Result<Btrfs, WorkspaceError> {
        let path = &paths.workspace;
        let named = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let subvolume = path.parent().unwrap_or(path);
        let parts = subvolume.parent().zip(named(subvolume)).zip(named(path));
        let ((home, subvolume), workspace) = parts
            .ok_or_else(|| WorkspaceError::io("find the subvolume of", path, io::ErrorKind::InvalidInput.into()))?;
        let moment = format!("{subvolume}.moment");
        let (clones, home) = (Clones::open(paths)?, home.to_owned());
        let clones_before = limits::WORKSPACE_CLONES_BEFORE_SNAPSHOT;
        let (clone_above, within) = (CLONE_ABOVE, None);
        let mut driver = Btrfs {
            choice,
            clones,
            home,
            subvolume,
            moment,
            workspace,
            removes_at_once,
            clone_above,
            clones_before,
            within,
        };
        driver.remove()?;
        Ok(driver)
    }

    fn failed(&self, op: &'static str) -> impl FnOnce(io::Error) -> WorkspaceError {
        let path = self.home.join(&self.moment);
        move |error| WorkspaceError::io(op, &path, error)
    }

    /// Takes the snapshot.
    fn snapshot(&mut self) -> Result<(), WorkspaceError> {
        if self.within.is_some() {
            return Ok(());
        }
        // One that could not be removed.
        self.remove()?;
        let take = || -> io::Result<OwnedFd> {
            fault::point("workspace.snapshot.make")?;
            let home = File::open(&self.home)?;
            let of = beneath::child(home.as_fd(), self.subvolume.as_bytes())?;
            btrfs::snapshot(of.as_fd(), home.as_fd(), &self.moment)?;
            let moment = beneath::child(home.as_fd(), self.moment.as_bytes())?;
            Ok(beneath::child(moment.as_fd(), self.workspace.as_bytes())?)
        };
        let within = take().map_err(self.failed("take a snapshot"))?;
        self.within = Some(within);
        Ok(())
    }

    fn remove(&mut self) -> Result<(), WorkspaceError> {
        self.within = None;
        let remove = || -> io::Result<()> {
            let home = File::open(&self.home)?;
            match beneath::look(home.as_fd(), self.moment.as_bytes()) {
                Err(Errno::ENOENT) => return Ok(()),
                found => found?,
            };
            fault::point("workspace.snapshot.remove")?;
            remove_snapshot(home.as_fd(), &self.home, &self.moment)
        };
        remove().map_err(self.failed("remove the snapshot"))
    }
}

/// Removes a subvolume: at once where that is allowed, else file by file.
pub(crate) fn remove_snapshot(home: BorrowedFd<'_>, path: &Path, name: &str) -> io::Result<()> {
    match btrfs::destroy(home, name) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
            fs::remove_tree(&path.join(name))
        }
        done => done,
    }
}

impl Driver for Btrfs {
    fn choice(&self) -> &DriverChoice {
        &self.choice
    }

    fn reads_up_to(&self) -> u64 {
        self.clone_above
    }

    fn ahead(&mut self, file: &File) -> io::Result<()> {
        inode::write_out(file.as_fd())
    }

    fn hold(&mut self, file: &File, place: &dyn Fn() -> Vec<Name>) -> Result<Option<HeldFile>, WorkspaceError> {
        if self.removes_at_once && self.clones.count() >= self.clones_before {
            // No writer runs: a later snapshot holds the same state for all files.
            self.snapshot()?;
        }
        match self.within {
            Some(_) => Ok(Some(HeldFile::Within(place()))),
            None => self.clones.hold(file),
        }
    }

    fn open(&mut self, held: HeldFile) -> Result<File, WorkspaceError> {
        let (names, within) = match (held, &self.within) {
            (HeldFile::Clone(file), _) => return Ok(file),
            (HeldFile::Within(names), Some(within)) => (names, within),
            (HeldFile::Within(names), None) => unreachable!("the snapshot of {names:?} was released"),
        };
        let (folder, name) = names.split_at(names.len() - 1);
        let open = || -> io::Result<File> {
            let dir = beneath::folder(within.as_fd(), folder)?;
            Ok(beneath::file(dir.as_fd(), &name[0])?)
        };
        open().map_err(self.failed("open a file of the snapshot"))
    }

    fn release(&mut self) -> Result<(), WorkspaceError> {
        self.clones.clear();
        if self.within.is_some() { self.remove() } else { Ok(()) }
    }

    #[cfg(test)]
    fn hold_all(&mut self, clones: usize) {
        (self.clone_above, self.clones_before) = (0, clones);
    }
}
