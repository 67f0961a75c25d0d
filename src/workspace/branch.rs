//! Creates a workspace from a live one: shares or copies common files and takes the rest from the store. The result is
//! the requested tree, whatever happens to the live workspace meanwhile.
//!
//! ```text
//!  Tracker::donor ──▶ Donor: the index of the live workspace as of its last capture
//!                       ├ btrfs   snapshot of the subvolume; then restores what differs from the tree. The changes since
//!                       │         the capture (Tracker::record_changes) say where to look
//!                       └ else    checkout: clones (reflink) or copies (tracked) each file whose stamp is unchanged
//! ```
//! A file that changes while it is copied is taken from the store. Writers never wait, except for an instant after a
//! snapshot.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::beneath;
use super::changes::Changes;
use super::checkout::checkout_with;
use super::driver::DriverKind;
use super::error::WorkspaceError;
use super::index::{FolderId, Index, Known, NodeState, ROOT, Stamp};
use super::objects::Objects;
use super::paths::WorkspacePaths;
use super::read;
use super::restore::Restored;
use super::tracker::Tracker;
use super::tree::TreeId;
use super::tree::entry::{Content, Name};
use crate::core::durability::Durability;
use crate::core::limits;
use crate::sys::{btrfs, fault, inode};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// A live workspace as of its last capture or restore, as a source of files. It does not block the live one.
#[derive(Debug)]
pub struct Donor {
    kind: DriverKind,
    paths: WorkspacePaths,
    root: OwnedFd,
    index: Index,
    /// State number of its tracker.
    state: u64,
    /// The result is no longer wanted.
    cancelled: AtomicBool,
}

/// A snapshot of a whole live workspace, in place of a new one. The live one may have changed before the snapshot.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// Changes since the donor's index, if known.
    changes: Option<Changes>,
}

/// Statistics of a branch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Branched {
    /// Whether one snapshot copied everything.
    pub snapshot: bool,
    /// Files that share blocks with the donor.
    pub cloned: u64,
    /// Files copied from the donor.
    pub copied: u64,
}

impl Tracker {
    /// The workspace as a donor. `None` while the index is not trusted: then a branch takes everything from the store.
    ///
    /// # Errors
    /// No free descriptor.
    pub fn donor(&self) -> Result<Option<Donor>> {
        if !self.is_trusted() {
            return Ok(None);
        }
        let root = self.root.try_clone().map_err(WorkspaceError::of("open", &self.paths.workspace))?;
        let (kind, index) = (self.driver.choice().kind, self.index.clone().unwatched());
        Ok(Some(Donor {
            kind,
            paths: self.paths.clone(),
            root,
            index,
            state: self.state,
            cancelled: AtomicBool::new(false),
        }))
    }

    /// The workspace as a donor, no longer followed.
    pub fn into_donor(self) -> Option<Donor> {
        let (sure, kind) = (self.is_trusted(), self.driver.choice().kind);
        let Tracker { paths, root, index, state, .. } = self;
        sure.then(|| Donor { kind, paths, root, index: index.unwatched(), state, cancelled: AtomicBool::new(false) })
    }

    /// Records in the snapshot the changes since the donor's index.
    ///
    /// Every change before the snapshot must have been reported: the caller stops writers for a moment between snapshot
    /// and call, so that none is inside a system call.
    pub fn record_changes(&mut self, donor: &Donor, snapshot: &mut Snapshot) {
        self.drain();
        let all_reported =
            self.notify.is_some() && self.full_scan.is_none() && self.is_trusted() && self.state == donor.state;
        snapshot.changes = all_reported.then(|| self.changes.clone());
    }
}

/// Makes an empty workspace equal to a tree, with the help of a donor, or of a snapshot of it that is in place already.
///
/// The new workspace must be private. After a failure the caller removes what was created. The returned tracker has
/// a complete index: the first capture reads nothing.
///
/// # Errors
/// The folder is not empty; as [`Tracker::restore`].
pub fn branch(
    donor: Option<(&Donor, Option<Snapshot>)>,
    tree: TreeId,
    paths: WorkspacePaths,
    objects: &dyn Objects,
    durability: Durability,
) -> Result<(Tracker, Restored, Branched)> {
    if let Some((donor, Some(snapshot))) = donor {
        let mut tracker = Tracker::seeded(paths, donor.index.clone(), snapshot.changes)?;
        let restored = tracker.restore(tree, objects, durability)?;
        tracker.is_private = false;
        return Ok((tracker, restored, Branched { snapshot: true, ..Branched::default() }));
    }
    check_empty(&paths)?;
    checkout_with(Tracker::open(paths)?, donor.map(|(donor, _)| donor), tree, objects, durability)
}

fn check_empty(paths: &WorkspacePaths) -> Result<()> {
    let path = &paths.workspace;
    let root: OwnedFd = File::open(path).map_err(WorkspaceError::of("open", path))?.into();
    match beneath::list(root.as_fd()).map_err(WorkspaceError::of("list", path))?.is_empty() {
        true => Ok(()),
        false => Err(WorkspaceError::NotEmpty { path: path.clone() }),
    }
}

/// An open file of a donor.
pub(super) struct DonorFile<'a> {
    file: File,
    known: &'a Known,
    clones: bool,
}

/// Result of copying a donor's file.
pub(super) enum DonorCopy {
    Cloned,
    /// Number of bytes written.
    Copied(u64),
    /// The file has changed.
    Changed,
    /// The donor has no such file.
    Nothing,
}

impl Donor {
    /// Whether its files are copied one by one: a snapshot is not worth preparing.
    pub fn copies(&self) -> bool {
        self.kind != DriverKind::Btrfs
    }

    /// Number of entries.
    pub fn entries(&self) -> u64 {
        self.index.count
    }

    /// Upper bound of a copy's size, bytes: whole blocks, holes and hard links included.
    pub fn bytes(&self) -> u64 {
        const BLOCK: u64 = 4096;
        let size = |known: &Known| match known.what {
            NodeState::File { .. } => known.stamp.size.next_multiple_of(BLOCK),
            NodeState::Folder(_) | NodeState::Symlink(_) => BLOCK,
            NodeState::Fifo | NodeState::Missing(_) => 0,
        };
        self.index.folders.values().flat_map(|folder| folder.entries.values()).map(size).sum()
    }

    /// Cancels copying from it, which fails then.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// A folder by its names, if it is known and still exists.
    pub(super) fn folder(&self, names: &[Name]) -> Option<DonorFolder<'_>> {
        let mut id = ROOT;
        for name in names {
            id = match self.index.known(id, name)?.what {
                NodeState::Folder(inner) => inner,
                NodeState::File { .. } | NodeState::Symlink(_) | NodeState::Fifo | NodeState::Missing(_) => {
                    return None;
                }
            };
        }
        let dir = beneath::folder(self.root.as_fd(), names).ok()?;
        Some(DonorFolder { donor: self, id, dir })
    }

    /// Places a snapshot at a new workspace's path, where the file system supports it. [`Tracker::record_changes`]
    /// before the branch saves checking every file.
    ///
    /// # Errors
    /// The folder is not empty; the file system refuses.
    pub fn snapshot(&self, paths: &WorkspacePaths) -> Result<Option<Snapshot>> {
        if self.kind != DriverKind::Btrfs {
            return Ok(None);
        }
        check_empty(paths)?;
        Ok(self.snapshot_to(paths)?.then(Snapshot::default))
    }

    /// Places a snapshot of the subvolume at the path of the new, empty one. False if that is no subvolume.
    fn snapshot_to(&self, paths: &WorkspacePaths) -> Result<bool> {
        let (from, to) = (self.paths.workspace.parent(), paths.workspace.parent());
        let (Some(from), Some(to)) = (from, to) else { return Ok(false) };
        let is_subvolume = |path: &Path| path.metadata().is_ok_and(|found| found.ino() == btrfs::SUBVOLUME_INODE);
        let named = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let (Some(name), Some(home)) = (named(to), to.parent()) else { return Ok(false) };
        if !is_subvolume(to) || self.paths.workspace.file_name() != paths.workspace.file_name() {
            return Ok(false);
        }
        let swap = || -> io::Result<()> {
            fault::point("workspace.branch.empty")?;
            for folder in [&paths.workspace, &paths.staging] {
                match std::fs::remove_dir(folder) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    done => done?,
                }
            }
            // Any user may remove an empty subvolume like a folder.
            std::fs::remove_dir(to)?;
            fault::point("workspace.branch.snapshot")?;
            btrfs::snapshot(File::open(from)?.as_fd(), File::open(home)?.as_fd(), &name)
        };
        swap().map_err(|error| WorkspaceError::io("take a snapshot", to, error))?;
        Ok(true)
    }
}

/// An open folder of a donor.
pub(super) struct DonorFolder<'a> {
    donor: &'a Donor,
    id: FolderId,
    dir: OwnedFd,
}

impl DonorFolder<'_> {
    /// The file with this name, if it has this content and copying it beats reading the store.
    pub(super) fn file(&self, name: &[u8], content: &Content) -> Option<DonorFile<'_>> {
        let known = self.donor.index.known(self.id, name)?;
        let NodeState::File { content: has, .. } = &known.what else { return None };
        // A stamp proves nothing of a file that is open for writing, or was written within the clock's grain.
        let is_sure = known.settled && !self.donor.index.hot.contains(&(self.id, Name::from(name)));
        if has != content || !is_sure || matches!(content, Content::Inline(_)) {
            return None;
        }
        let file = beneath::file(self.dir.as_fd(), name).ok()?;
        let clones = self.donor.kind != DriverKind::Tracked && known.stamp.size > limits::WORKSPACE_COPY_BYTES;
        is_unchanged(&file, known.stamp).then_some(DonorFile { file, known, clones })
    }
}

fn is_unchanged(file: &File, stamp: Stamp) -> bool {
    beneath::look_at(file).is_ok_and(|stat| beneath::stamp(&stat) == stamp)
}

impl DonorFile<'_> {
    /// Copies the content to an empty file. After [`DonorCopy::Changed`] the file has arbitrary content.
    pub(super) fn copy_to(&self, to: &File, size: u64) -> io::Result<DonorCopy> {
        if self.known.stamp.size != size {
            return Ok(DonorCopy::Changed);
        }
        let copied = if self.clones {
            match inode::clone_blocks(self.file.as_fd(), to.as_fd()) {
                Ok(()) => DonorCopy::Cloned,
                Err(error) if super::driver::cannot_clone(&error) => DonorCopy::Copied(self.copy(to, size)?),
                Err(error) => return Err(error),
            }
        } else {
            DonorCopy::Copied(self.copy(to, size)?)
        };
        // A write meanwhile has changed the stamp, which was older than the clock's grain.
        Ok(if is_unchanged(&self.file, self.known.stamp) { copied } else { DonorCopy::Changed })
    }

    /// Copies data and keeps holes.
    fn copy(&self, to: &File, size: u64) -> io::Result<u64> {
        if size <= limits::TREE_PIECE_BYTES as u64 && read::hole(&self.file, 0)?.is_none_or(|at| at >= size) {
            let mut bytes = vec![0; usize::try_from(size).map_err(io::Error::other)?];
            // A file that shrank is detected by its stamp.
            let read = self.file.read_at(&mut bytes, 0)?;
            to.write_all_at(&bytes[..read], 0)?;
            return Ok(read as u64);
        }
        let (mut at, mut copied) = (0, 0);
        while let Some(start) = read::data(&self.file, at)?.filter(|start| *start < size) {
            let end = read::hole(&self.file, start)?.unwrap_or(size).min(size);
            let (mut from, mut into) = (&self.file, to);
            from.seek(SeekFrom::Start(start))?;
            into.seek(SeekFrom::Start(start))?;
            // In the host kernel, if it can.
            copied += io::copy(&mut from.take(end - start), &mut into)?;
            at = end;
        }
        to.set_len(size)?;
        Ok(copied)
    }
}
