//! The index of a workspace: every folder and entry as last seen, with its `stat` data. In memory, without I/O. `scan`
//! updates it, `encode` builds a tree from it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::PathBuf;

use super::tree::entry::{Content, Entry, Group, Meta, Moment, Name, Node, Reason, path_of};
use super::tree::format::PageRef;
use crate::core::ids::Digest;

/// Number of a folder; never reused within one index.
pub(super) type FolderId = u32;
/// The workspace itself.
pub(super) const ROOT: FolderId = 0;

/// `stat` data that identifies a state of an inode. If it is unchanged, so is the inode, except as described in `scan`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct Stamp {
    pub inode: u64,
    pub size: u64,
    pub modified: Moment,
    /// Unlike the others, programs cannot set this one.
    pub changed: Moment,
}

/// One entry as last seen.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub stamp: Stamp,
    /// Whether any later change changes the stamp: it was older than the clock's grain when seen.
    pub settled: bool,
    pub meta: Meta,
    pub what: NodeState,
}

#[derive(Debug, Clone)]
pub(super) enum NodeState {
    File {
        content: Content,
        /// Number of hard links, inside and outside the workspace.
        names: u64,
        group: Option<Group>,
    },
    Folder(FolderId),
    Symlink(Box<[u8]>),
    Fifo,
    Missing(Reason),
}

/// The outdated pages of a folder's object.
#[derive(Debug, Clone, Default)]
pub(super) enum Stale {
    #[default]
    All,
    Names(BTreeSet<Name>),
}

#[derive(Debug, Clone)]
pub(super) struct Folder {
    pub parent: FolderId,
    pub name: Name,
    pub depth: u32,
    pub watch: Option<i32>,
    pub entries: BTreeMap<Name, Known>,
    pub pages: Vec<PageRef>,
    pub stale: Stale,
    pub digest: Option<Digest>,
}

impl Folder {
    pub(super) fn new(parent: FolderId, name: Name, depth: u32) -> Folder {
        let (entries, pages) = (BTreeMap::new(), Vec::new());
        Folder { parent, name, depth, watch: None, entries, pages, stale: Stale::All, digest: None }
    }
}

/// An entry's folder and name.
pub(super) type Place = (FolderId, Name);

#[derive(Debug, Clone)]
pub(super) struct Index {
    pub folders: HashMap<FolderId, Folder>,
    next: FolderId,
    /// The workspace's own mode, times, attributes.
    pub root: Meta,
    pub root_stamp: Stamp,
    /// All known names of inodes with several names, by inode.
    pub links: HashMap<u64, BTreeSet<Place>>,
    /// Inodes that gained or lost a name.
    pub regroup: HashSet<u64>,
    /// Files that may be open for writing: they may change without events.
    pub hot: BTreeSet<Place>,
    /// Entries that are captured partly or not at all.
    pub missing: BTreeMap<Place, Reason>,
    /// Those of them that are known to be files.
    pub missing_files: BTreeSet<Place>,
    /// Folders to encode, the deepest first.
    pub stale: BTreeSet<(Reverse<u32>, FolderId)>,
    pub watches: HashMap<i32, FolderId>,
    /// Number of entries.
    pub count: u64,
}

impl Index {
    pub(super) fn new() -> Index {
        let mut index = Index {
            folders: HashMap::new(),
            next: ROOT,
            root: Meta::default(),
            root_stamp: Stamp::default(),
            links: HashMap::new(),
            regroup: HashSet::new(),
            hot: BTreeSet::new(),
            missing: BTreeMap::new(),
            missing_files: BTreeSet::new(),
            stale: BTreeSet::new(),
            watches: HashMap::new(),
            count: 0,
        };
        index.add_folder(ROOT, Name::default(), 0);
        index
    }

    /// The same index for another workspace, without watches.
    pub(super) fn unwatched(mut self) -> Index {
        self.watches.clear();
        self.folders.values_mut().for_each(|folder| folder.watch = None);
        self
    }

    fn add_folder(&mut self, parent: FolderId, name: Name, depth: u32) -> FolderId {
        let id = self.next;
        self.next += 1;
        self.folders.insert(id, Folder::new(parent, name, depth));
        self.stale.insert((Reverse(depth), id));
        id
    }

    /// A known folder.
    pub(super) fn folder(&self, id: FolderId) -> &Folder {
        self.folders.get(&id).expect("ids are of folders that are in the index")
    }

    pub(super) fn folder_mut(&mut self, id: FolderId) -> &mut Folder {
        self.folders.get_mut(&id).expect("ids are of folders that are in the index")
    }

    pub(super) fn known(&self, folder: FolderId, name: &[u8]) -> Option<&Known> {
        self.folders.get(&folder)?.entries.get(name)
    }

    /// Adds a folder within a folder. [`Self::set`] adds its entry.
    pub(super) fn make_folder(&mut self, parent: FolderId, name: &[u8]) -> FolderId {
        let depth = self.folder(parent).depth + 1;
        self.add_folder(parent, name.into(), depth)
    }

    /// The names from the workspace to a folder.
    pub(super) fn names(&self, mut id: FolderId) -> Vec<Name> {
        let mut names = Vec::new();
        while id != ROOT {
            let folder = self.folder(id);
            names.push(folder.name.clone());
            id = folder.parent;
        }
        names.reverse();
        names
    }

    pub(super) fn path(&self, folder: FolderId, name: &[u8]) -> PathBuf {
        let mut names = self.names(folder);
        if !name.is_empty() {
            names.push(name.into());
        }
        path_of(names.iter().map(|name| &**name))
    }

    /// Marks an entry as changed: its folder's object is outdated.
    pub(super) fn mark_stale(&mut self, id: FolderId, name: &[u8]) {
        let Some(folder) = self.folders.get_mut(&id) else { return };
        if let Stale::Names(names) = &mut folder.stale {
            names.insert(name.into());
        }
        self.stale.insert((Reverse(folder.depth), id));
    }

    /// Marks all objects of folders as outdated.
    pub(super) fn mark_all_stale(&mut self) {
        for (id, folder) in &mut self.folders {
            folder.stale = Stale::All;
            self.stale.insert((Reverse(folder.depth), *id));
        }
    }

    /// Sets an entry; it must not replace another folder.
    pub(super) fn set(&mut self, folder: FolderId, name: &[u8], known: Known) {
        let place = (folder, Name::from(name));
        let names = |known: &Known| if let NodeState::File { names, .. } = known.what { names } else { 0 };
        let before = self.known(folder, name);
        let had = before.map(|before| (before.stamp.inode, names(before)));
        if let Some((inode, 2..)) = had
            && (inode != known.stamp.inode || names(&known) < 2)
        {
            self.unlink(inode, &place);
        }
        if names(&known) > 1 && self.links.entry(known.stamp.inode).or_default().insert(place.clone()) {
            self.regroup.insert(known.stamp.inode);
        }
        self.missing_files.remove(&place);
        match &known.what {
            NodeState::Missing(reason) => drop(self.missing.insert(place, *reason)),
            NodeState::File { .. } | NodeState::Folder(_) | NodeState::Symlink(_) | NodeState::Fifo => {
                self.missing.remove(&place);
            }
        }
        if had.is_none() {
            self.count += 1;
        }
        self.folder_mut(folder).entries.insert(name.into(), known);
        self.mark_stale(folder, name);
    }

    /// Sets the content of a file whose read was deferred.
    pub(super) fn set_content(&mut self, folder: FolderId, name: &[u8], of: Stamp, now: &Content, is_settled: bool) {
        let known = self.folders.get_mut(&folder).and_then(|folder| folder.entries.get_mut(name));
        if let Some(Known { stamp, settled, what: NodeState::File { content, .. }, .. }) = known
            && *stamp == of
        {
            content.clone_from(now);
            *settled = is_settled;
        }
    }

    fn unlink(&mut self, inode: u64, place: &Place) {
        if let Some(places) = self.links.get_mut(&inode) {
            places.remove(place);
            if places.is_empty() {
                self.links.remove(&inode);
                self.regroup.remove(&inode);
            } else {
                self.regroup.insert(inode);
            }
        }
    }

    /// Removes an entry with everything in it. Calls `removed` for every file, and for every watch that is no longer
    /// needed.
    pub(super) fn remove(&mut self, folder: FolderId, name: &[u8], removed: &mut dyn FnMut(Removed<'_>)) {
        let Some(home) = self.folders.get_mut(&folder) else { return };
        let Some(known) = home.entries.remove(name) else { return };
        self.mark_stale(folder, name);
        let mut rest = vec![((folder, Name::from(name)), known)];
        while let Some((place, known)) = rest.pop() {
            self.count -= 1;
            self.missing.remove(&place);
            self.missing_files.remove(&place);
            let was_hot = self.hot.remove(&place);
            match &known.what {
                NodeState::File { names, .. } => {
                    if *names > 1 {
                        self.unlink(known.stamp.inode, &place);
                    }
                    if !was_hot {
                        removed(Removed::File(&place, &known));
                    }
                }
                NodeState::Folder(id) => {
                    let Some(inner) = self.folders.remove(id) else { continue };
                    self.stale.remove(&(Reverse(inner.depth), *id));
                    rest.extend(inner.entries.into_iter().map(|(name, known)| ((*id, name), known)));
                    if let Some(watch) = inner.watch
                        && self.watches.get(&watch) == Some(id)
                    {
                        self.watches.remove(&watch);
                        removed(Removed::Watch(watch));
                    }
                }
                NodeState::Symlink(_) | NodeState::Fifo | NodeState::Missing(_) => {}
            }
        }
    }

    /// The entry as a folder's object has it. Inner folders must be encoded already.
    pub(super) fn entry(&self, name: &[u8], known: &Known) -> Entry {
        let node = match &known.what {
            NodeState::File { content, group, .. } => {
                let size = if let Content::Inline(bytes) = content { bytes.len() as u64 } else { known.stamp.size };
                Node::File { size, content: content.clone(), group: *group }
            }
            NodeState::Folder(id) => {
                Node::Folder { digest: self.folder(*id).digest.expect("deeper folders are encoded first") }
            }
            NodeState::Symlink(target) => Node::Symlink { target: target.clone() },
            NodeState::Fifo => Node::Fifo,
            NodeState::Missing(reason) => Node::Missing { reason: *reason },
        };
        let meta = if let Node::Missing { .. } = node { Meta::default() } else { known.meta.clone() };
        Entry { name: name.into(), meta, node }
    }

    /// Assigns groups to hard-linked files, by their names: so a restored tree is the same tree.
    pub(super) fn regroup(&mut self) {
        for inode in std::mem::take(&mut self.regroup) {
            let places: Vec<Place> = self.links.get(&inode).into_iter().flatten().cloned().collect();
            let group = (places.len() > 1).then(|| self.group_of(&places));
            for (folder, name) in places {
                let known = self.folders.get_mut(&folder).and_then(|folder| folder.entries.get_mut(&name));
                if let Some(Known { what: NodeState::File { group: known, .. }, .. }) = known
                    && *known != group
                {
                    *known = group;
                    self.mark_stale(folder, &name);
                }
            }
        }
    }

    fn group_of(&self, places: &[Place]) -> Group {
        let path = |(folder, name): &Place| {
            let mut names = self.names(*folder);
            names.push(name.clone());
            names.join(&b'/')
        };
        let mut paths: Vec<Vec<u8>> = places.iter().map(path).collect();
        paths.sort();
        let mut group = Group::default();
        group.copy_from_slice(&blake3::hash(&paths.join(&0u8)).as_bytes()[..16]);
        group
    }

    /// Whether there may be a folder that other processes can enter and this one cannot: a known file may get a name in
    /// it and be written through that name, without events.
    pub(super) fn has_unwatchable_dirs(&self) -> bool {
        let unreadable = self.missing.iter().filter(|(_, reason)| **reason == Reason::Unreadable);
        unreadable.into_iter().any(|(place, _)| !self.missing_files.contains(place))
    }

    /// Whether an entry of the folder could not be entered.
    pub(super) fn has_unreadable_child(&self, folder: FolderId) -> bool {
        let within = self.missing.range((folder, Name::default())..).take_while(|((id, _), _)| *id == folder);
        within.into_iter().any(|(_, reason)| is_closed(*reason))
    }

    /// Whether an entry, or an entry in it, could not be entered: changes there were not watched.
    pub(super) fn was_unwatched(&self, folder: FolderId, name: &[u8]) -> bool {
        match self.known(folder, name).map(|known| &known.what) {
            Some(NodeState::Missing(reason)) => is_closed(*reason),
            Some(NodeState::Folder(inner)) => self.has_unreadable_child(*inner),
            Some(NodeState::File { .. } | NodeState::Symlink(_) | NodeState::Fifo) | None => false,
        }
    }

    /// Files that may be written through a name outside the workspace, without events.
    pub(super) fn externally_linked(&self) -> Vec<Place> {
        let mut found = Vec::new();
        for places in self.links.values() {
            let names = places.iter().filter_map(|(folder, name)| match self.known(*folder, name)?.what {
                NodeState::File { names, .. } => Some(names),
                NodeState::Folder(_) | NodeState::Symlink(_) | NodeState::Fifo | NodeState::Missing(_) => None,
            });
            if names.max().is_some_and(|names| names > places.len() as u64) {
                found.extend(places.iter().cloned());
            }
        }
        found
    }
}

/// Whether an entry that is missing for this reason may be a folder.
fn is_closed(reason: Reason) -> bool {
    match reason {
        Reason::Unreadable | Reason::Mount => true,
        Reason::Socket | Reason::Device | Reason::SetId => false,
    }
}

/// An entry or watch that [`Index::remove`] removed.
pub(super) enum Removed<'a> {
    File(&'a Place, &'a Known),
    Watch(i32),
}
