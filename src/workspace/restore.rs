//! Makes a workspace equal to a tree.
//!
//! A pass updates the index; it is compared with the tree where digests differ, and only the differences are applied.
//! Files are prepared beside the workspace and renamed into place. After a kill at any point, the next restore starts
//! again and ends in the same tree: the workspace itself is the only state. Finally another pass compares the result:
//! what could not be created (devices, foreign owners) is reported, any other difference is an error.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::beneath::{self, Kind, proc_path};
use super::capture_stats::CaptureStats;
use super::encode::encode;
use super::error::WorkspaceError;
use super::index::{FolderId, Index, Known, NodeState, Place, ROOT, Stamp};
use super::objects::{HashOnly, Objects};
use super::stage::{Owner, Stage, Staged, set_time};
use super::tracker::{Pass, Tracker};
use super::tree::TreeId;
use super::tree::entry::{Content, Entry, Meta, Name, Node, Reason, path_of};
use super::tree::format::Folder;
use super::tree::needs::is_kept;
use super::tree::read;
use crate::core::durability::Durability;
use crate::core::ids::Digest;
use crate::sys::fault;

type Result<T> = std::result::Result<T, WorkspaceError>;

/// Result of a restore.
#[derive(Debug, Clone)]
pub struct Restored {
    /// Entries that could not be restored: those missing in the tree, and owners that only root may set.
    pub left: Vec<PathBuf>,
    /// Entries created, changed or removed, and their folders; a removed folder counts as one.
    pub changed: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Statistics of the passes.
    pub stats: CaptureStats,
}

impl Tracker {
    /// Makes the workspace equal to a tree. There must be no writers.
    ///
    /// Uncaptured content is lost: capture first. The caller ensures that all objects of the tree exist.
    ///
    /// # Errors
    /// The tree cannot be read; file operations fail; there is a writer. The workspace is then between the two trees,
    /// and the next restore completes it.
    pub fn restore(&mut self, target: TreeId, objects: &dyn Objects, durability: Durability) -> Result<Restored> {
        match self.restore_once(target, objects, durability) {
            // Another file may have got the same inode, size and times within one tick of the clock: trust no stamp,
            // read every file.
            Err(WorkspaceError::NotRestored { .. }) => {
                self.forget()?;
                self.restore_once(target, objects, durability)
            }
            done => done,
        }
    }

    fn restore_once(&mut self, target: TreeId, objects: &dyn Objects, durability: Durability) -> Result<Restored> {
        let wanted = read::root(objects, target)?;
        let mut stage = Stage::open(&self.paths, self.device)?;
        let done = self.restore_to(target, &wanted, objects, &mut stage);
        // Only an exact result refers to existing objects.
        self.set_trusted(matches!(&done, Ok(restored) if restored.left.is_empty()));
        let restored = done?;
        stage.leave();
        if durability == Durability::Power {
            let sync = fault::point("workspace.place.sync").and_then(|()| Ok(nix::unistd::syncfs(&self.root)?));
            sync.map_err(|e| WorkspaceError::io("sync", &self.paths.workspace, e))?;
        }
        if restored.left.is_empty() {
            self.base = Some(target);
        }
        Ok(restored)
    }

    fn restore_to(
        &mut self,
        target: TreeId,
        wanted: &Entry,
        objects: &dyn Objects,
        stage: &mut Stage,
    ) -> Result<Restored> {
        let mut stats = self.pass(&mut HashOnly, objects, &mut Pass { frozen: true, ..Pass::default() })?;
        let owner = Owner { own: self.owner, privileged: nix::unistd::Uid::effective().is_root() };
        let mut left = Vec::new();
        let mut changed = 0;
        if encode(&mut self.index, &mut HashOnly)? != target {
            let mut apply = Apply::new(self.root.as_fd(), &self.index, objects, stage, owner);
            apply.run(wanted)?;
            let (touched, contents) = apply.end()?;
            changed = touched.iter().filter(|(_, name)| name.is_some()).count() as u64;
            self.drain();
            self.changes.clear_unreported();
            touched.into_iter().for_each(|place| match place {
                (folder, Some(name)) => self.changes.check_metadata_only((folder, name)),
                (folder, None) => self.changes.add_folder(folder),
            });
            let mut pass = Pass { frozen: true, contents, all_reported: true, deferred: None };
            stats.examined += self.pass(&mut HashOnly, objects, &mut pass)?.examined;
            if encode(&mut self.index, &mut HashOnly)? != target {
                left = differences(&self.index, objects, wanted, owner)?;
            }
        }
        Ok(Restored { left, changed, bytes: stage.bytes, stats })
    }
}

/// A folder of the workspace and its target.
struct Pair {
    names: Vec<Name>,
    /// `None` if it was just created.
    id: Option<FolderId>,
    digest: Digest,
}

struct Apply<'a> {
    root: BorrowedFd<'a>,
    index: &'a Index,
    objects: &'a dyn Objects,
    stage: &'a mut Stage,
    owner: Owner,
    pairs: Vec<Pair>,
    /// Folders whose mode and times are set at the end.
    folders: BTreeMap<Vec<Name>, Meta>,
    touched: Vec<(FolderId, Option<Name>)>,
    contents: HashMap<Stamp, Content>,
    groups: HashMap<[u8; 16], Content>,
}

impl<'a> Apply<'a> {
    fn new(
        root: BorrowedFd<'a>,
        index: &'a Index,
        objects: &'a dyn Objects,
        stage: &'a mut Stage,
        owner: Owner,
    ) -> Apply<'a> {
        Apply {
            root,
            index,
            objects,
            stage,
            owner,
            pairs: Vec::new(),
            folders: BTreeMap::new(),
            touched: Vec::new(),
            contents: HashMap::new(),
            groups: HashMap::new(),
        }
    }

    fn run(&mut self, wanted: &Entry) -> Result<()> {
        self.folders.insert(Vec::new(), wanted.meta.clone());
        self.touched.push((ROOT, None));
        if let Some(digest) = read::root_folder(wanted)
            && self.index.folder(ROOT).digest != Some(digest)
        {
            self.pairs.push(Pair { names: Vec::new(), id: Some(ROOT), digest });
        }
        while let Some(pair) = self.pairs.pop() {
            self.folder(&pair)?;
        }
        Ok(())
    }

    /// Compares a folder with its target, entry by entry.
    fn folder(&mut self, pair: &Pair) -> Result<()> {
        let path = || path_of(pair.names.iter().map(|name| &**name));
        let dir = self.open(&pair.names).map_err(|e| WorkspaceError::io("open", &path(), e))?;
        let objects = self.objects;
        let mut both = MergedEntries::of(self.index, objects, pair.id, pair.digest)?;
        while let Some((known, wanted)) = both.next()? {
            let name =
                known.map_or_else(|| wanted.as_ref().map(|entry| entry.name.clone()), |(name, _)| Some(name.clone()));
            let Some(name) = name else { continue };
            let place = EntryAt { pair, dir: dir.as_fd(), name };
            self.entry(&place, known.map(|(_, known)| known), wanted)?;
        }
        Ok(())
    }

    /// Opens a folder for writing.
    fn open(&self, names: &[Name]) -> io::Result<OwnedFd> {
        let dir = beneath::folder(self.root, names)?;
        let mode = beneath::look_at(&dir)?.st_mode;
        if self.owner.privileged || mode & 0o700 == 0o700 {
            return Ok(dir);
        }
        std::fs::set_permissions(proc_path(dir.as_fd()), Permissions::from_mode(mode & 0o1777 | 0o700))?;
        Ok(beneath::folder(self.root, names)?)
    }

    fn entry(&mut self, here: &EntryAt<'_>, known: Option<&Known>, wanted: Option<Entry>) -> Result<()> {
        let Some(wanted) = wanted else {
            self.touch(here);
            return self.remove(here);
        };
        let Some(known) = known else { return self.make(here, &wanted) };
        let now = self.index.entry(&here.name, known);
        if now == wanted {
            return Ok(());
        }
        self.touch(here);
        match (&now.node, &wanted.node) {
            // Neither can be created; a mount stays, and is reported at the end.
            (Node::Missing { .. }, Node::Missing { .. }) | (Node::Missing { reason: Reason::Mount }, _) => Ok(()),
            (_, Node::Missing { .. }) => self.remove(here),
            (Node::Folder { digest: a }, Node::Folder { digest: b }) => {
                self.folders.insert(here.names(), wanted.meta.clone());
                if a != b
                    && let NodeState::Folder(id) = known.what
                {
                    self.pairs.push(Pair { names: here.names(), id: Some(id), digest: *b });
                }
                Ok(())
            }
            (Node::File { .. }, Node::File { .. }) if is_kept(&now, &wanted) => self.adjust(here, known, &wanted.meta),
            (Node::Folder { .. } | Node::Missing { .. }, _) | (_, Node::Folder { .. }) => {
                self.remove(here)?;
                self.make(here, &wanted)
            }
            (_, Node::File { .. } | Node::Symlink { .. } | Node::Fifo) => self.make(here, &wanted),
        }
    }

    fn touch(&mut self, here: &EntryAt<'_>) {
        if let Some(id) = here.pair.id {
            self.touched.push((id, Some(here.name.clone())));
            self.touched.push((id, None));
        }
    }

    fn remove(&mut self, here: &EntryAt<'_>) -> Result<()> {
        match self.stage.remove(here.dir, &here.name) {
            // A mount point stays; it is reported at the end.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EXDEV)) => Ok(()),
            done => done.map_err(|e| WorkspaceError::io("remove", &here.path(), e)),
        }
    }

    fn make(&mut self, here: &EntryAt<'_>, wanted: &Entry) -> Result<()> {
        self.touch(here);
        let staged = match &wanted.node {
            Node::Missing { .. } => return Ok(()),
            Node::Folder { digest } => {
                self.stage.folder(here.dir, &here.name).map_err(|e| WorkspaceError::io("make", &here.path(), e))?;
                self.folders.insert(here.names(), wanted.meta.clone());
                self.pairs.push(Pair { names: here.names(), id: None, digest: *digest });
                return Ok(());
            }
            Node::File { size, content, group } => {
                if let Some(group) = group {
                    self.groups.insert(*group, content.clone());
                }
                self.stage.file(self.objects, (*size, content, *group), &wanted.meta, self.owner)?
            }
            Node::Symlink { target } => self.stage.symlink(target, &wanted.meta, self.owner)?,
            Node::Fifo => self.stage.fifo(&wanted.meta, self.owner)?,
        };
        let known = here.pair.id.and_then(|id| self.index.known(id, &here.name));
        // A hard-linked file stays anyway, and would have one more link for a while.
        let keep =
            known.filter(|known| matches!(known.what, NodeState::File { names: 1, .. })).map(|known| known.stamp.size);
        self.place(here, &staged, keep)?;
        if let (Some(file), Node::File { content, .. }) = (&staged.file, &wanted.node) {
            // Of the new file itself, whatever has its name by now.
            let stat = beneath::look_at(file).map_err(|e| WorkspaceError::of("look at", &here.path())(e))?;
            self.contents.insert(beneath::stamp(&stat), content.clone());
        }
        Ok(())
    }

    fn place(&mut self, here: &EntryAt<'_>, staged: &Staged, keep: Option<u64>) -> Result<()> {
        let failed = |error| WorkspaceError::io("make", &here.path(), error);
        match self.stage.place(staged, here.dir, &here.name, keep) {
            // A folder appeared at this name.
            Err(error) if error.raw_os_error() == Some(libc::EISDIR) => {
                self.remove(here)?;
                self.stage.place(staged, here.dir, &here.name, None).map_err(failed)
            }
            done => done.map_err(failed),
        }
    }

    /// Sets mode and time of a file that is otherwise right.
    fn adjust(&mut self, here: &EntryAt<'_>, known: &Known, meta: &Meta) -> Result<()> {
        let adjust = || -> io::Result<bool> {
            fault::point("workspace.place.meta")?;
            let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let file = openat(here.dir, &*here.name, flags, Mode::empty())?;
            let stat = beneath::look_at(&file)?;
            if beneath::kind(&stat) != Kind::File || stat.st_ino != known.stamp.inode {
                return Ok(false);
            }
            std::fs::set_permissions(proc_path(file.as_fd()), Permissions::from_mode(meta.mode))?;
            set_time(file.as_fd(), meta.modified)?;
            Ok(true)
        };
        match adjust() {
            Ok(true) => Ok(()),
            Ok(false) => Err(WorkspaceError::NotRestored { path: here.path() }),
            Err(error) => Err(WorkspaceError::io("change", &here.path(), error)),
        }
    }

    /// Sets mode and times of folders, the deepest first; returns the touched entries, and the new files' contents by
    /// stamp.
    #[allow(clippy::type_complexity, reason = "two lists, taken apart at once by the only caller")]
    fn end(mut self) -> Result<(HashSet<(FolderId, Option<Name>)>, HashMap<Stamp, Content>)> {
        let mut folders: Vec<(Vec<Name>, Meta)> = std::mem::take(&mut self.folders).into_iter().collect();
        folders.sort_by_key(|(names, _)| std::cmp::Reverse(names.len()));
        for (names, meta) in folders {
            let path = path_of(names.iter().map(|name| &**name));
            let dir = fault::point("workspace.place.folder_meta").and_then(|()| self.open(&names));
            let dir = dir.map_err(|e| WorkspaceError::io("open", &path, e))?;
            self.stage.apply_meta(dir.as_fd(), &meta, self.owner)?;
        }
        for (group, content) in &self.groups {
            // The stamp after its name in the staging folder is removed.
            if let Some(file) = self.stage.take_group(group)
                && let Ok(stat) = beneath::look_at(&file)
            {
                self.contents.insert(beneath::stamp(&stat), content.clone());
            }
        }
        Ok((self.touched.into_iter().collect(), self.contents))
    }
}

/// An entry during the comparison of its folder.
struct EntryAt<'a> {
    pair: &'a Pair,
    dir: BorrowedFd<'a>,
    name: Name,
}

impl EntryAt<'_> {
    fn names(&self) -> Vec<Name> {
        let mut names = self.pair.names.clone();
        names.push(self.name.clone());
        names
    }

    fn path(&self) -> PathBuf {
        path_of(self.names().iter().map(|name| &**name))
    }
}

/// Merges the entries of a folder and of its target by name, without pages that both share.
struct MergedEntries<'a> {
    present: std::iter::Peekable<std::vec::IntoIter<(&'a Name, &'a Known)>>,
    objects: &'a dyn Objects,
    page: std::iter::Peekable<std::vec::IntoIter<Entry>>,
    pages: std::vec::IntoIter<Digest>,
}

impl<'a> MergedEntries<'a> {
    fn of(
        index: &'a Index,
        objects: &'a dyn Objects,
        id: Option<FolderId>,
        digest: Digest,
    ) -> Result<MergedEntries<'a>> {
        let there = id.map(|id| index.folder(id));
        let (page, pages) = match read::folder(objects, digest)? {
            Folder::Page(entries) => (entries, Vec::new()),
            Folder::Pages(pages) => (Vec::new(), pages.into_iter().map(|page| page.digest).collect()),
        };
        let wanted: HashSet<Digest> = pages.iter().copied().collect();
        let mut shared = HashSet::new();
        let mut present = Vec::new();
        if let Some(folder) = there {
            let mut entries = folder.entries.iter().peekable();
            for page in &folder.pages {
                let is_shared = wanted.contains(&page.digest);
                if is_shared {
                    shared.insert(page.digest);
                }
                while let Some(entry) = entries.next_if(|(name, _)| **name <= page.last) {
                    if !is_shared {
                        present.push(entry);
                    }
                }
            }
        }
        let pages: Vec<Digest> = pages.into_iter().filter(|page| !shared.contains(page)).collect();
        Ok(MergedEntries {
            present: present.into_iter().peekable(),
            objects,
            page: page.into_iter().peekable(),
            pages: pages.into_iter(),
        })
    }

    #[allow(clippy::type_complexity, reason = "a pair of which either may be missing")]
    fn next(&mut self) -> Result<Option<(Option<(&'a Name, &'a Known)>, Option<Entry>)>> {
        while self.page.peek().is_none() {
            let Some(digest) = self.pages.next() else { break };
            if let Folder::Page(entries) = read::folder(self.objects, digest)? {
                self.page = entries.into_iter().peekable();
            }
        }
        let order = match (self.present.peek(), self.page.peek()) {
            (None, None) => return Ok(None),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((name, _)), Some(entry)) => (**name).cmp(&entry.name),
        };
        let known = if order == Ordering::Greater { None } else { self.present.next() };
        let wanted = if order == Ordering::Less { None } else { self.page.next() };
        Ok(Some((known, wanted)))
    }
}

/// The differences that could not be applied; any other difference is an error.
pub(super) fn differences(index: &Index, objects: &dyn Objects, wanted: &Entry, owner: Owner) -> Result<Vec<PathBuf>> {
    let mut left = Vec::new();
    if index.root != wanted.meta {
        return Err(WorkspaceError::NotRestored { path: PathBuf::from(".") });
    }
    let mut pairs = Vec::new();
    if let Some(digest) = read::root_folder(wanted) {
        pairs.push(Pair { names: Vec::new(), id: Some(ROOT), digest });
    }
    while let Some(pair) = pairs.pop() {
        let mut both = MergedEntries::of(index, objects, pair.id, pair.digest)?;
        while let Some((known, wanted)) = both.next()? {
            let Some(name) = known.map(|(name, _)| name).or(wanted.as_ref().map(|entry| &entry.name)).cloned() else {
                continue;
            };
            let pair_of = |id, digest| {
                let mut names = pair.names.clone();
                names.push(name.clone());
                Pair { names, id: Some(id), digest }
            };
            let place: Place = (pair.id.unwrap_or(ROOT), name.clone());
            match check_entry(index, &place, known.map(|(_, known)| known), wanted.as_ref(), owner) {
                EntryCheck::Same => {}
                EntryCheck::Within(id, digest) => pairs.push(pair_of(id, digest)),
                EntryCheck::Left => left.push(index.path(place.0, &place.1)),
                EntryCheck::LeftAndWithin(id, digest) => {
                    left.push(index.path(place.0, &place.1));
                    pairs.push(pair_of(id, digest));
                }
                EntryCheck::Wrong => return Err(WorkspaceError::NotRestored { path: index.path(place.0, &place.1) }),
            }
        }
    }
    Ok(left)
}

enum EntryCheck {
    Same,
    Within(FolderId, Digest),
    Left,
    LeftAndWithin(FolderId, Digest),
    Wrong,
}

fn check_entry(
    index: &Index,
    place: &Place,
    known: Option<&Known>,
    wanted: Option<&Entry>,
    owner: Owner,
) -> EntryCheck {
    let now = known.map(|known| index.entry(&place.1, known));
    let is_missing = |entry: &Entry| matches!(entry.node, Node::Missing { .. });
    let (Some(now), Some(wanted)) = (now.as_ref(), wanted) else {
        let lone = now.as_ref().or(wanted);
        return if lone.is_some_and(is_missing) { EntryCheck::Left } else { EntryCheck::Wrong };
    };
    if now == wanted {
        return EntryCheck::Same;
    }
    if is_missing(now) || is_missing(wanted) {
        return EntryCheck::Left;
    }
    let foreign = !owner.privileged && now.meta.owner != wanted.meta.owner;
    let rest = Meta { owner: wanted.meta.owner, ..now.meta.clone() };
    if (foreign && rest != wanted.meta) || (!foreign && now.meta != wanted.meta) {
        return EntryCheck::Wrong;
    }
    match (known.map(|known| &known.what), &now.node, &wanted.node) {
        (Some(NodeState::Folder(id)), Node::Folder { digest: a }, Node::Folder { digest: b }) if a != b => {
            if foreign {
                EntryCheck::LeftAndWithin(*id, *b)
            } else {
                EntryCheck::Within(*id, *b)
            }
        }
        (_, a, b) if a == b => EntryCheck::Left,
        _ => EntryCheck::Wrong,
    }
}
