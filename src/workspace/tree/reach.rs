//! All objects of a tree: for garbage collection, bundles and teleport.

use std::collections::HashSet;

use super::TreeId;
use super::entry::{Content, Node};
use super::format::Folder;
use super::read;
use crate::core::ids::Digest;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// The objects visited. An address does not show an object's type: a file may have the bytes of a folder's object, and
/// then one object is both. So an object visited as content has not been entered, and is when it is met as a folder.
#[derive(Debug, Default)]
pub struct Seen {
    visited: HashSet<Digest>,
    entered: HashSet<Digest>,
}

impl Seen {
    /// Adds an object; returns whether it is new.
    pub fn add(&mut self, digest: Digest) -> bool {
        self.visited.insert(digest)
    }

    /// Records that an object's references are visited; returns whether that is new.
    pub fn enter(&mut self, digest: Digest) -> bool {
        self.entered.insert(digest)
    }

    /// Whether it was visited.
    pub fn contains(&self, digest: Digest) -> bool {
        self.visited.contains(&digest)
    }

    /// Number of objects visited.
    pub fn count(&self) -> usize {
        self.visited.len()
    }
}

/// Calls `object` for every object of a tree, at most once over all calls with the same `seen`: a second tree costs
/// what it does not share with the first.
///
/// # Errors
/// An object of folders or maps is missing, damaged or no tree; those of `object`.
pub fn reach(
    objects: &dyn Objects,
    tree: TreeId,
    seen: &mut Seen,
    object: &mut dyn FnMut(Digest) -> Result<(), WorkspaceError>,
) -> Result<(), WorkspaceError> {
    if !seen.enter(tree.0) {
        return Ok(());
    }
    let mut report = |seen: &mut Seen, digest| if seen.add(digest) { object(digest) } else { Ok(()) };
    report(seen, tree.0)?;
    let root = read::root(objects, tree)?;
    let mut folders: Vec<Digest> = read::root_folder(&root).into_iter().collect();
    while let Some(digest) = folders.pop() {
        if !seen.enter(digest) {
            continue;
        }
        report(seen, digest)?;
        let entries = match read::folder(objects, digest)? {
            Folder::Page(entries) => entries,
            Folder::Pages(pages) => {
                folders.extend(pages.into_iter().map(|page| page.digest));
                continue;
            }
        };
        for entry in entries {
            match entry.node {
                Node::Folder { digest } => folders.push(digest),
                Node::File { content, .. } => reach_content(objects, &content, seen, &mut report)?,
                Node::Symlink { .. } | Node::Fifo | Node::Missing { .. } => {}
            }
        }
    }
    Ok(())
}

/// The same for one file.
fn reach_content(
    objects: &dyn Objects,
    content: &Content,
    seen: &mut Seen,
    report: &mut dyn FnMut(&mut Seen, Digest) -> Result<(), WorkspaceError>,
) -> Result<(), WorkspaceError> {
    match content {
        Content::Inline(_) => Ok(()),
        Content::Whole(digest) => report(seen, *digest),
        Content::Map(digest) => {
            if !seen.enter(*digest) {
                return Ok(());
            }
            report(seen, *digest)?;
            read::map(objects, *digest)?.pieces.iter().try_for_each(|piece| report(seen, piece.digest))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::testing::World;

    /// A file with the bytes of a folder's object must not hide that folder from garbage collection.
    #[test]
    fn aliased_folder_is_followed() {
        let world = World::new();
        std::fs::create_dir(world.path("b")).expect("made");
        for file in 0..3_000 {
            world.write(&format!("b/{file}"), format!("{file}").repeat(300));
        }
        let all = |tree| {
            let mut visited = Vec::new();
            let mut note = |digest| {
                visited.push(digest);
                Ok(())
            };
            reach(&world.store, tree, &mut Seen::default(), &mut note).expect("whole");
            visited
        };
        let mut tracker = world.tracker();
        let first = tracker.capture(&world.store).expect("captured").tree;
        let root = read::root_folder(&read::root(&world.store, first).expect("a root")).expect("a folder");
        let Folder::Page(entries) = read::folder(&world.store, root).expect("a folder") else { panic!("one page") };
        let Node::Folder { digest: folder } = entries[0].node else { panic!("{entries:?}") };
        let object = Objects::get(&world.store, folder, 1 << 20).expect("there");
        assert!(object.len() > crate::core::limits::TREE_INLINE_BYTES, "{}", object.len());
        for name in ["a", "c"] {
            world.write(name, &object);
        }
        let second = tracker.capture(&world.store).expect("captured").tree;
        let visited = all(second);
        assert!(
            all(first).iter().filter(|digest| **digest != first.0 && **digest != root).all(|one| visited.contains(one))
        );
        assert_eq!(visited.iter().filter(|digest| **digest == folder).count(), 1, "each once");
    }
}
