//! Every object that a tree needs: for garbage collection, for bundles, for teleport.

use std::collections::HashSet;

use super::TreeId;
use super::entry::{Content, Node};
use super::format::Folder;
use super::read;
use crate::core::ids::Digest;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// What was met on the way. An address says nothing of what an object is: whoever writes the bytes of a folder into a file has made
/// one object that is both. So what was told as content has not been looked into, and is when it is met as a folder.
#[derive(Debug, Default)]
pub struct Seen {
    told: HashSet<Digest>,
    entered: HashSet<Digest>,
}

impl Seen {
    /// Notes an object; whether it is new.
    pub fn tell(&mut self, digest: Digest) -> bool {
        self.told.insert(digest)
    }

    /// Notes that what an object names is looked at; whether that is new.
    pub fn enter(&mut self, digest: Digest) -> bool {
        self.entered.insert(digest)
    }

    /// Whether it was met.
    pub fn contains(&self, digest: Digest) -> bool {
        self.told.contains(&digest)
    }

    /// How many objects were met.
    pub fn count(&self) -> usize {
        self.told.len()
    }
}

/// Calls `object` for every object that a tree needs, its own first, each at most once over all calls with one `seen`: a
/// second tree costs what it does not share with the first.
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
    let mut tell = |seen: &mut Seen, digest| if seen.tell(digest) { object(digest) } else { Ok(()) };
    tell(seen, tree.0)?;
    let root = read::root(objects, tree)?;
    let mut folders: Vec<Digest> = read::root_folder(&root).into_iter().collect();
    while let Some(digest) = folders.pop() {
        if !seen.enter(digest) {
            continue;
        }
        tell(seen, digest)?;
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
                Node::File { content, .. } => reach_content(objects, &content, seen, &mut tell)?,
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
    tell: &mut dyn FnMut(&mut Seen, Digest) -> Result<(), WorkspaceError>,
) -> Result<(), WorkspaceError> {
    match content {
        Content::Inline(_) => Ok(()),
        Content::Whole(digest) => tell(seen, *digest),
        Content::Map(digest) => {
            if !seen.enter(*digest) {
                return Ok(());
            }
            tell(seen, *digest)?;
            read::map(objects, *digest)?.pieces.iter().try_for_each(|piece| tell(seen, piece.digest))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::testing::World;

    /// Whoever writes into a file what a folder's object has must not lead a collection of garbage past that folder.
    #[test]
    fn aliased_folder_is_followed() {
        let world = World::new();
        std::fs::create_dir(world.path("b")).expect("made");
        for file in 0..3_000 {
            world.write(&format!("b/{file}"), format!("{file}").repeat(300));
        }
        let all = |tree| {
            let mut told = Vec::new();
            let mut note = |digest| {
                told.push(digest);
                Ok(())
            };
            reach(&world.store, tree, &mut Seen::default(), &mut note).expect("whole");
            told
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
        let told = all(second);
        assert!(
            all(first).iter().filter(|digest| **digest != first.0 && **digest != root).all(|one| told.contains(one))
        );
        assert_eq!(told.iter().filter(|digest| **digest == folder).count(), 1, "each once");
    }
}
