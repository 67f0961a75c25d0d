//! Size of a tree once it is written out: a folder in many places counts each time, as on disk.

use std::collections::{HashMap, HashSet};

use super::TreeId;
use super::entry::{Content, Group, Node};
use super::format::Folder;
use super::read;
use crate::core::ids::Digest;
use crate::core::limits;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// Size of a folder or tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Number of entries.
    pub entries: u64,
    /// Bytes of the files without holes; a hard-linked file counts once over all calls with one [`Sizes`].
    pub bytes: u64,
    /// Depth of nested folders.
    pub depth: u32,
    /// Whether an entry has another owner than the workspace.
    pub is_foreign: bool,
}

impl Size {
    fn add(&mut self, other: Size) {
        self.entries = self.entries.saturating_add(other.entries);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.depth = self.depth.max(other.depth);
        self.is_foreign |= other.is_foreign;
    }

    /// Whether a workspace may have this size.
    pub fn is_possible(&self) -> bool {
        self.entries <= limits::WORKSPACE_ENTRIES && self.depth <= limits::WORKSPACE_DEPTH
    }
}

/// Known sizes of folders and maps: a second tree costs what it does not share with the first.
#[derive(Debug, Default)]
pub struct Sizes {
    folders: HashMap<Digest, Size>,
    maps: HashMap<Digest, u64>,
    groups: HashSet<Group>,
}

impl Sizes {
    /// The size of a tree.
    ///
    /// # Errors
    /// An object of it is missing, damaged or no tree.
    pub fn of(&mut self, objects: &dyn Objects, tree: TreeId) -> Result<Size, WorkspaceError> {
        let Some(root) = read::root_folder(&read::root(objects, tree)?) else { return Ok(Size::default()) };
        // Not recursive: the tree's author chooses its depth.
        let mut waiting = vec![root];
        while let Some(&digest) = waiting.last() {
            if self.folders.contains_key(&digest) {
                waiting.pop();
                continue;
            }
            let known = waiting.len();
            let size = self.folder(objects, digest, &mut waiting)?;
            if waiting.len() == known {
                self.folders.insert(digest, size);
                waiting.pop();
            }
        }
        Ok(self.folders.get(&root).copied().unwrap_or_default())
    }

    /// The size of one folder or page, if all inner sizes are known; adds the others to `unknown`.
    fn folder(
        &mut self,
        objects: &dyn Objects,
        digest: Digest,
        unknown: &mut Vec<Digest>,
    ) -> Result<Size, WorkspaceError> {
        let (mut size, mut names, before) = (Size::default(), HashSet::new(), unknown.len());
        match read::folder(objects, digest)? {
            Folder::Pages(pages) => {
                for page in pages {
                    match self.folders.get(&page.digest) {
                        Some(known) => size.add(*known),
                        None => unknown.push(page.digest),
                    }
                }
            }
            Folder::Page(entries) => {
                for entry in entries {
                    let is_foreign = entry.meta.owner.is_some();
                    let bytes = match entry.node {
                        Node::Folder { digest } => {
                            match self.folders.get(&digest) {
                                Some(known) => size.add(Size { depth: known.depth.saturating_add(1), ..*known }),
                                None => unknown.push(digest),
                            }
                            0
                        }
                        Node::File { group: Some(group), .. }
                            if self.groups.contains(&group) || names.contains(&group) =>
                        {
                            0
                        }
                        Node::File { size, content, group } => {
                            names.extend(group);
                            self.file(objects, size, &content)?
                        }
                        Node::Symlink { .. } | Node::Fifo | Node::Missing { .. } => 0,
                    };
                    size.add(Size { entries: 1, bytes, depth: 0, is_foreign });
                }
            }
        }
        if unknown.len() == before {
            self.groups.extend(names);
        }
        Ok(size)
    }

    fn file(&mut self, objects: &dyn Objects, size: u64, content: &Content) -> Result<u64, WorkspaceError> {
        let Content::Map(digest) = content else { return Ok(size) };
        if let Some(known) = self.maps.get(digest) {
            return Ok(*known);
        }
        let pieces = read::map(objects, *digest)?.pieces;
        let bytes = pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.length));
        self.maps.insert(*digest, bytes);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::testing::World;

    #[test]
    fn tree_size_skips_holes() {
        let world = World::new();
        for folder in ["a/in", "b/in"] {
            std::fs::create_dir_all(world.path(folder)).expect("made");
            world.write(&format!("{folder}/file"), "x".repeat(100_000));
        }
        let sparse = std::fs::File::create(world.path("sparse")).expect("made");
        sparse.set_len(1 << 40).expect("a hole");
        std::os::unix::fs::FileExt::write_all_at(&sparse, &[1; 4096], 1 << 30).expect("written");
        drop(sparse);
        std::fs::hard_link(world.path("a/in/file"), world.path("a/name")).expect("linked");
        let tree = world.tracker().capture(&world.store).expect("captured").tree;
        let size = Sizes::default().of(&world.store, tree).expect("whole");
        assert_eq!(size, Size { entries: 8, bytes: 200_000 + 4096, depth: 2, is_foreign: false });
        assert!(size.is_possible());
    }
}
