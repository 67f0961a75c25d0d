//! The git repositories in a captured tree: their present commits.
//!
//! Reads objects of the store only, never the live files: nothing can be executed, and no link can be followed.

use std::collections::HashSet;
use std::path::PathBuf;

use super::TreeId;
use super::entry::{Content, Entry, Node};
use super::lookup::{Text, text};
use super::read::{self, Entries};
use crate::core::freeze::refs::{self, RepositoryLock};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// Folders known to hold no repository, with the depth to which they were searched.
#[derive(Debug, Default)]
pub struct Barren(HashSet<(Digest, usize)>);

/// Folders that are remembered.
const REMEMBERED: usize = 1 << 16;

/// Finds the repositories to a depth of [`limits::REPOSITORY_DEPTH`], at most [`limits::LOCKED_REPOSITORIES`].
///
/// # Errors
/// An object is missing, damaged or no tree.
pub fn repositories(
    objects: &dyn Objects,
    tree: TreeId,
    barren: &mut Barren,
) -> Result<Vec<RepositoryLock>, WorkspaceError> {
    let root = read::root(objects, tree)?;
    let Some(digest) = read::root_folder(&root) else { return Ok(Vec::new()) };
    if barren.0.len() > REMEMBERED {
        barren.0.clear();
    }
    let mut search = Search { objects, barren, found: Vec::new(), folders: 0 };
    search.folder(digest, PathBuf::new(), limits::REPOSITORY_DEPTH)?;
    Ok(search.found)
}

struct Search<'a> {
    objects: &'a dyn Objects,
    barren: &'a mut Barren,
    found: Vec<RepositoryLock>,
    folders: usize,
}

impl Search<'_> {
    /// Searches one folder; returns whether it was searched completely and holds none.
    fn folder(&mut self, digest: Digest, path: PathBuf, depth: usize) -> Result<bool, WorkspaceError> {
        if self.barren.0.contains(&(digest, depth)) {
            return Ok(true);
        }
        if self.folders >= limits::REPOSITORY_FOLDERS || self.found.len() >= limits::LOCKED_REPOSITORIES {
            return Ok(false);
        }
        self.folders += 1;
        let (mut entries, mut is_barren, mut below) = (Entries::of(self.objects, digest)?, true, Vec::new());
        while let Some(entry) = entries.take()? {
            let Node::Folder { digest: inner } = entry.node else { continue };
            if &*entry.name == b".git" {
                is_barren = false;
                self.repository(digest, inner, &path)?;
            } else if depth > 0 {
                use std::os::unix::ffi::OsStrExt as _;
                below.push((inner, path.join(std::ffi::OsStr::from_bytes(&entry.name))));
            }
        }
        for (inner, path) in below {
            is_barren &= self.folder(inner, path, depth - 1)?;
        }
        if is_barren {
            self.barren.0.insert((digest, depth));
        }
        Ok(is_barren)
    }

    fn repository(&mut self, files: Digest, git: Digest, path: &std::path::Path) -> Result<(), WorkspaceError> {
        let found = refs::head(|name, most| {
            let Some(entry) = self.file(git, name)? else { return Ok::<_, WorkspaceError>(None) };
            let Node::File { .. } = entry.node else { return Ok(None) };
            Ok(match text(self.objects, &entry.node, most)? {
                Text::Bytes(bytes) => Some(bytes),
                Text::Larger | Text::None => None,
            })
        })?;
        let index = match self.file(git, "index")?.map(|entry| entry.node) {
            Some(Node::File { content, .. }) => Some(match content {
                Content::Inline(bytes) => Digest::from_bytes(*blake3::hash(&bytes).as_bytes()),
                Content::Whole(digest) | Content::Map(digest) => digest,
            }),
            _ => None,
        };
        let path = if path.as_os_str().is_empty() { ".".into() } else { path.to_string_lossy().into_owned() };
        let (head, note) = match found {
            Ok(head) => (Some(head), String::new()),
            Err(why) => (None, why.to_owned()),
        };
        self.found.push(RepositoryLock { path, head, note, index, files });
        Ok(())
    }

    /// The entry of a path beneath a folder, of plain names only.
    fn file(&self, folder: Digest, path: &str) -> Result<Option<Entry>, WorkspaceError> {
        let (mut at, mut parts) = (folder, path.split('/').peekable());
        while let Some(part) = parts.next() {
            let Some(entry) = Entries::of(self.objects, at)?.seek(part.as_bytes())? else { return Ok(None) };
            match (parts.peek(), &entry.node) {
                (None, _) => return Ok(Some(entry)),
                (Some(_), Node::Folder { digest }) => at = *digest,
                (Some(_), _) => return Ok(None),
            }
        }
        Ok(None)
    }
}
