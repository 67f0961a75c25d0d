//! Every object that a tree needs: for garbage collection, for bundles, for teleport.

use std::collections::HashSet;

use super::TreeId;
use super::entry::{Content, Node};
use super::format::Folder;
use super::read;
use crate::core::ids::Digest;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// Calls `object` for every object that a tree needs, its own first, each at most once over all calls with one `seen`: a
/// second tree costs what it does not share with the first.
///
/// # Errors
/// An object of folders or maps is missing, damaged or no tree; those of `object`.
pub fn reach(
    objects: &dyn Objects,
    tree: TreeId,
    seen: &mut HashSet<Digest>,
    object: &mut dyn FnMut(Digest) -> Result<(), WorkspaceError>,
) -> Result<(), WorkspaceError> {
    if !seen.insert(tree.0) {
        return Ok(());
    }
    object(tree.0)?;
    let root = read::root(objects, tree)?;
    let mut folders: Vec<Digest> = read::root_folder(&root).into_iter().collect();
    while let Some(digest) = folders.pop() {
        if !seen.insert(digest) {
            continue;
        }
        object(digest)?;
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
                Node::File { content, .. } => reach_content(objects, &content, seen, object)?,
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
    seen: &mut HashSet<Digest>,
    object: &mut dyn FnMut(Digest) -> Result<(), WorkspaceError>,
) -> Result<(), WorkspaceError> {
    match content {
        Content::Inline(_) => Ok(()),
        Content::Whole(digest) => {
            if seen.insert(*digest) {
                object(*digest)
            } else {
                Ok(())
            }
        }
        Content::Map(digest) => {
            if !seen.insert(*digest) {
                return Ok(());
            }
            object(*digest)?;
            for piece in read::map(objects, *digest)?.pieces {
                if seen.insert(piece.digest) {
                    object(piece.digest)?;
                }
            }
            Ok(())
        }
    }
}
