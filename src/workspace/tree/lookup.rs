//! Lookup of an entry by path, and of a file's content.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path};

use super::TreeId;
use super::entry::{Content, Entry, Node};
use super::read::{self, Entries};
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// The entry at a path, if any.
///
/// # Errors
/// An object is missing, damaged or no tree.
pub fn find(objects: &dyn Objects, tree: TreeId, path: &Path) -> Result<Option<Entry>, WorkspaceError> {
    let mut at = read::root(objects, tree)?;
    for part in path.components() {
        let Component::Normal(name) = part else { return Ok(None) };
        let Some(folder) = read::root_folder(&at) else { return Ok(None) };
        let mut entries = Entries::of(objects, folder)?;
        match entries.seek(name.as_bytes())? {
            Some(entry) => at = entry,
            None => return Ok(None),
        }
    }
    Ok(Some(at))
}

/// Readable content of an entry: a file's bytes, a link's target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Text {
    /// The bytes.
    Bytes(Vec<u8>),
    /// Larger than requested.
    Larger,
    /// Not readable: a folder, a pipe, a missing entry.
    None,
}

/// Reads an entry's content, at most `most` bytes.
///
/// # Errors
/// An object is missing, damaged or no part of a tree.
pub fn text(objects: &dyn Objects, node: &Node, most: u64) -> Result<Text, WorkspaceError> {
    let (size, content) = match node {
        Node::File { size, content, .. } => (*size, content),
        Node::Symlink { target } => return Ok(Text::Bytes(target.to_vec())),
        Node::Folder { .. } | Node::Fifo | Node::Missing { .. } => return Ok(Text::None),
    };
    if size > most {
        return Ok(Text::Larger);
    }
    Ok(Text::Bytes(match content {
        Content::Inline(bytes) => bytes.to_vec(),
        Content::Whole(digest) => objects.get(*digest, most)?,
        Content::Map(digest) => {
            let mut bytes = vec![0; usize::try_from(size).unwrap_or_default()];
            for piece in read::map(objects, *digest)?.pieces {
                let from = usize::try_from(piece.offset).unwrap_or(usize::MAX);
                let read = objects.get(piece.digest, piece.length)?;
                // Bytes that a damaged map places after the end are ignored.
                if let Some(room) = from.checked_add(read.len()).and_then(|to| bytes.get_mut(from..to)) {
                    room.copy_from_slice(&read);
                }
            }
            bytes
        }
    }))
}
