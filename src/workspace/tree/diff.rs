//! Differences between two trees. Descends only where digests differ; in memory are one page per level of the current
//! path, and a bounded number of files that may be renamed.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;

use super::TreeId;
use super::entry::{Content, Entry, Name, Node, path_of};
use super::read::{self, Entries};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The path in the second tree; in the first if it was removed.
    pub path: PathBuf,
    /// The kind of difference.
    pub kind: ChangeKind,
}

/// Kind of a difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChangeKind {
    /// Only in the second tree. All entries of a folder are reported too.
    Added,
    /// Only in the first tree. All entries of a folder are reported too.
    Removed,
    /// The content of a removed file is under another name.
    Renamed {
        /// The former path.
        from: PathBuf,
    },
    /// The type changed: for example, a file in place of a folder.
    Kind,
    /// The same type, changed.
    Changed(Changed),
}

/// The changed properties; at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changed {
    /// A file's bytes or holes, a link's target, the reason of a missing entry.
    pub content: bool,
    /// Permissions.
    pub mode: bool,
    /// User, group or extended attributes.
    pub ownership: bool,
    /// Hard links.
    pub links: bool,
    /// Modification time.
    pub modified: bool,
}

impl Changed {
    fn of(a: &Entry, b: &Entry) -> Option<Changed> {
        let content = match (&a.node, &b.node) {
            (Node::File { size: s, content: c, .. }, Node::File { size, content, .. }) => (s, c) != (size, content),
            // Their content is compared separately.
            (Node::Folder { .. }, Node::Folder { .. }) => false,
            (a, b) => a != b,
        };
        let group = |node: &Node| if let Node::File { group, .. } = node { *group } else { None };
        let changed = Changed {
            content,
            mode: a.meta.mode != b.meta.mode,
            ownership: a.meta.owner != b.meta.owner || a.meta.attributes != b.meta.attributes,
            links: group(&a.node) != group(&b.node),
            modified: a.meta.modified != b.meta.modified,
        };
        (changed != Changed::default()).then_some(changed)
    }
}

struct Level<'a> {
    path: Vec<Name>,
    before: Entries<'a>,
    after: Entries<'a>,
}

/// Iterates over the differences. Removed and added files come last, when renames are known.
pub struct Diff<'a> {
    objects: &'a dyn Objects,
    levels: Vec<Level<'a>>,
    ready: VecDeque<Change>,
    /// Removed and new files, by content; content cannot tell empty files apart.
    removed: HashMap<(u64, Content), Vec<PathBuf>>,
    new: HashMap<(u64, Content), Vec<PathBuf>>,
    waiting: usize,
    failed: bool,
}

/// Compares two trees.
///
/// # Errors
/// An object is missing, damaged or no tree.
pub fn diff<'a>(objects: &'a dyn Objects, a: TreeId, b: TreeId) -> Result<Diff<'a>, WorkspaceError> {
    let mut diff = Diff {
        objects,
        levels: Vec::new(),
        ready: VecDeque::new(),
        removed: HashMap::new(),
        new: HashMap::new(),
        waiting: 0,
        failed: false,
    };
    if a != b {
        let (before, after) = (read::root(objects, a)?, read::root(objects, b)?);
        if let Some(changed) = Changed::of(&before, &after) {
            diff.ready.push_back(Change { path: PathBuf::new(), kind: ChangeKind::Changed(changed) });
        }
        diff.enter(Vec::new(), read::root_folder(&before), read::root_folder(&after))?;
    }
    Ok(diff)
}

impl<'a> Diff<'a> {
    fn enter(&mut self, path: Vec<Name>, a: Option<Digest>, b: Option<Digest>) -> Result<(), WorkspaceError> {
        if a == b {
            return Ok(());
        }
        let open = |digest| match digest {
            Some(digest) => Entries::of(self.objects, digest),
            None => Ok(Entries::none(self.objects)),
        };
        self.levels.push(Level { path, before: open(a)?, after: open(b)? });
        Ok(())
    }

    /// Compares the next pair of entries. False at the end.
    fn step(&mut self) -> Result<bool, WorkspaceError> {
        let Some(level) = self.levels.last_mut() else { return Ok(false) };
        level.before.skip_shared(&mut level.after);
        let (a, b) = (level.before.peek()?.map(|e| &e.name), level.after.peek()?.map(|e| &e.name));
        let (takes_a, takes_b) = match (a, b) {
            (None, None) => {
                self.levels.pop();
                return Ok(true);
            }
            (Some(_), None) => (true, false),
            (None, Some(_)) => (false, true),
            (Some(a), Some(b)) => (a <= b, b <= a),
        };
        let a = if takes_a { level.before.take()? } else { None };
        let b = if takes_b { level.after.take()? } else { None };
        let mut path = level.path.clone();
        path.extend(a.as_ref().or(b.as_ref()).map(|entry| entry.name.clone()));
        self.compare(path, a, b)?;
        Ok(true)
    }

    fn compare(&mut self, path: Vec<Name>, a: Option<Entry>, b: Option<Entry>) -> Result<(), WorkspaceError> {
        let here = path_of(path.iter().map(|name| &**name));
        match (&a, &b) {
            (Some(a), Some(b)) if a.node.same_kind(&b.node) => {
                if let Some(changed) = Changed::of(a, b) {
                    self.ready.push_back(Change { path: here, kind: ChangeKind::Changed(changed) });
                }
            }
            (Some(_), Some(_)) => self.ready.push_back(Change { path: here, kind: ChangeKind::Kind }),
            (Some(a), None) => self.lone(here, a, false),
            (None, Some(b)) => self.lone(here, b, true),
            (None, None) => {}
        }
        let folder = |entry: Option<Entry>| entry.and_then(|entry| read::root_folder(&entry));
        self.enter(path, folder(a), folder(b))
    }

    /// An entry of only one tree: reported now, or later if it may be renamed.
    fn lone(&mut self, path: PathBuf, entry: &Entry, is_new: bool) {
        let kind = if is_new { ChangeKind::Added } else { ChangeKind::Removed };
        let Node::File { size, content, .. } = &entry.node else {
            return self.ready.push_back(Change { path, kind });
        };
        let key = (*size, content.clone());
        let (mine, others) =
            if is_new { (&mut self.new, &mut self.removed) } else { (&mut self.removed, &mut self.new) };
        if let Some(other) = others.get_mut(&key).and_then(Vec::pop) {
            self.waiting -= 1;
            let (from, path) = if is_new { (other, path) } else { (path, other) };
            self.ready.push_back(Change { path, kind: ChangeKind::Renamed { from } });
        } else if *size == 0 || self.waiting >= limits::TREE_DIFF_RENAMES {
            self.ready.push_back(Change { path, kind });
        } else {
            self.waiting += 1;
            mine.entry(key).or_default().push(path);
        }
    }

    fn flush(&mut self) {
        for (map, kind) in [(&mut self.removed, ChangeKind::Removed), (&mut self.new, ChangeKind::Added)] {
            let mut paths: Vec<PathBuf> = std::mem::take(map).into_values().flatten().collect();
            paths.sort();
            self.ready.extend(paths.into_iter().map(|path| Change { path, kind: kind.clone() }));
        }
        self.waiting = 0;
    }
}

impl Iterator for Diff<'_> {
    type Item = Result<Change, WorkspaceError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(change) = self.ready.pop_front() {
                return Some(Ok(change));
            }
            if self.failed {
                return None;
            }
            match self.step() {
                Ok(true) => {}
                Ok(false) if self.waiting > 0 => self.flush(),
                Ok(false) => return None,
                Err(error) => {
                    self.failed = true;
                    return Some(Err(error));
                }
            }
        }
    }
}
