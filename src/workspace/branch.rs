//! A new workspace from a live one: what both have is shared or copied, and the rest comes from the store. In the end it is the
//! tree that was asked for, whatever happened to the live one meanwhile.
//!
//! ```text
//!  Tracker::donor ──▶ Donor: what was known of the live workspace at its last capture
//!                       ├ btrfs   snapshot of the subvolume, then what differs from the tree is restored in the copy: what was
//!                       │         told of changes since (Tracker::tell) says where to look
//!                       └ else    checkout: each file cloned (reflink) or copied (tracked) while its stamp is the known one
//! ```
//! A file that changes while it is taken is taken from the store: nothing stands still for it, but for the instant after a snapshot
//! in which whoever writes is between two calls.

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

/// A live workspace as it was at its last capture or restore, to take files from. Holds nothing: the live one goes on.
#[derive(Debug)]
pub struct Donor {
    kind: DriverKind,
    paths: WorkspacePaths,
    root: OwnedFd,
    index: Index,
    /// Which state of its tracker this is.
    state: u64,
    /// Nobody wants any more what is made from it.
    cancelled: AtomicBool,
}

/// A copy of all of a live workspace, in the place of a new one. The live one may have been written to before.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// What may differ from what the donor knows, if that is known.
    told: Option<Changes>,
}

/// How a workspace was branched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Branched {
    /// Whether all of the live one was copied by one snapshot.
    pub snapshot: bool,
    /// Files that share their blocks with the live one's.
    pub cloned: u64,
    /// Files that were copied from it.
    pub copied: u64,
}

impl Tracker {
    /// What files can be taken from. None while it is not sure what is known: then a branch takes all from the store.
    ///
    /// # Errors
    /// The host gives no descriptor.
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

    /// What files can be taken from a workspace that is no longer followed.
    pub fn into_donor(self) -> Option<Donor> {
        let (sure, kind) = (self.is_trusted(), self.driver.choice().kind);
        let Tracker { paths, root, index, state, .. } = self;
        sure.then(|| Donor { kind, paths, root, index: index.unwatched(), state, cancelled: AtomicBool::new(false) })
    }

    /// Tells a snapshot what was changed since the donor's knowledge. Whatever changed files before the snapshot must have told
    /// of it: who writes is stopped for a moment in between, so that nobody is within a call that changes something.
    pub fn tell(&mut self, donor: &Donor, snapshot: &mut Snapshot) {
        self.drain();
        let all_is_told =
            self.notify.is_some() && self.full_scan.is_none() && self.is_trusted() && self.state == donor.state;
        snapshot.told = all_is_told.then(|| self.changes.clone());
    }
}

/// Makes an empty workspace equal to a tree, with the help of a live one, or of a snapshot of that, which is in its place already.
/// Nobody else may be in the new one; what is made and not ended is the caller's to remove. The tracker that is given knows
/// everything already: the first capture reads nothing.
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
        let mut tracker = Tracker::seeded(paths, donor.index.clone(), snapshot.told)?;
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

/// A donor's file, open.
pub(super) struct DonorFile<'a> {
    file: File,
    known: &'a Known,
    clones: bool,
}

/// What became of a gift.
pub(super) enum DonorCopy {
    Cloned,
    /// So many bytes were written.
    Copied(u64),
    /// It is not what was known.
    Changed,
    /// There is no such file.
    Nothing,
}

impl Donor {
    /// Whether its files are taken one by one: all at once costs nothing worth doing ahead.
    pub fn copies(&self) -> bool {
        self.kind != DriverKind::Btrfs
    }

    /// Files, folders and links in it.
    pub fn entries(&self) -> u64 {
        self.index.count
    }

    /// Bytes that a copy of it takes at most: in whole blocks, holes and second names included.
    pub fn bytes(&self) -> u64 {
        const BLOCK: u64 = 4096;
        let size = |known: &Known| match known.what {
            NodeState::File { .. } => known.stamp.size.next_multiple_of(BLOCK),
            NodeState::Folder(_) | NodeState::Symlink(_) => BLOCK,
            NodeState::Fifo | NodeState::Missing(_) => 0,
        };
        self.index.folders.values().flat_map(|folder| folder.entries.values()).map(size).sum()
    }

    /// Ends the copying from it that is under way: it fails.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// A folder, by its names, if it is known and still there.
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

    /// Puts a snapshot in the place of a new workspace, where the file system has such. Before the new one is branched,
    /// [`Tracker::tell`] saves it a look at every file.
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

    /// Puts a snapshot of the subvolume in the place of the new one, which is empty. False if there is none to take the place of.
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
            // An empty one goes as a folder does, whoever asks.
            std::fs::remove_dir(to)?;
            fault::point("workspace.branch.snapshot")?;
            btrfs::snapshot(File::open(from)?.as_fd(), File::open(home)?.as_fd(), &name)
        };
        swap().map_err(|error| WorkspaceError::io("take a snapshot", to, error))?;
        Ok(true)
    }
}

/// A donor's folder, open.
pub(super) struct DonorFolder<'a> {
    donor: &'a Donor,
    id: FolderId,
    dir: OwnedFd,
}

impl DonorFolder<'_> {
    /// The file of this name, if it is known to have this content, and worth more than to read that from the store.
    pub(super) fn file(&self, name: &[u8], content: &Content) -> Option<DonorFile<'_>> {
        let known = self.donor.index.known(self.id, name)?;
        let NodeState::File { content: has, .. } = &known.what else { return None };
        // One that somebody may write to without a word, or wrote to within the clock's grain, is not known by its stamp.
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
    /// Gives an empty file the content. After [`Given::Changed`] it has who knows what.
    pub(super) fn copy_to(&self, to: &File, size: u64) -> io::Result<DonorCopy> {
        if self.known.stamp.size != size {
            return Ok(DonorCopy::Changed);
        }
        let given = if self.clones {
            match inode::clone_blocks(self.file.as_fd(), to.as_fd()) {
                Ok(()) => DonorCopy::Cloned,
                Err(error) if super::driver::cannot_clone(&error) => DonorCopy::Copied(self.copy(to, size)?),
                Err(error) => return Err(error),
            }
        } else {
            DonorCopy::Copied(self.copy(to, size)?)
        };
        // Whoever wrote meanwhile changed the stamp, for it was older than the clock's grain.
        Ok(if is_unchanged(&self.file, self.known.stamp) { given } else { DonorCopy::Changed })
    }

    /// Copies what is data, and leaves holes.
    fn copy(&self, to: &File, size: u64) -> io::Result<u64> {
        if size <= limits::TREE_PIECE_BYTES as u64 && read::hole(&self.file, 0)?.is_none_or(|at| at >= size) {
            let mut bytes = vec![0; usize::try_from(size).map_err(io::Error::other)?];
            // One that is shorter by now is found to have changed.
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
            // In the host kernel, where it can.
            copied += io::copy(&mut from.take(end - start), &mut into)?;
            at = end;
        }
        to.set_len(size)?;
        Ok(copied)
    }
}
