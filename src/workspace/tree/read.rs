//! Reads trees from the store, a page at a time.

use std::collections::VecDeque;

use super::TreeId;
use super::entry::{Entry, Node};
use super::format::{self, Folder, Map, PageRef};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

type Result<T> = std::result::Result<T, WorkspaceError>;

fn malformed(digest: Digest) -> impl FnOnce(format::FormatError) -> WorkspaceError {
    move |source| WorkspaceError::Tree { digest, source }
}

/// The root entry.
///
/// # Errors
/// The object is missing, damaged or no tree.
pub fn root(objects: &dyn Objects, tree: TreeId) -> Result<Entry> {
    format::decode_root(&objects.get(tree.0, limits::TREE_OBJECT_BYTES)?).map_err(malformed(tree.0))
}

/// The digest of the root's folder.
///
/// # Errors
/// As [`root`].
pub fn root_folder(entry: &Entry) -> Option<Digest> {
    match entry.node {
        Node::Folder { digest } => Some(digest),
        Node::File { .. } | Node::Symlink { .. } | Node::Fifo | Node::Missing { .. } => None,
    }
}

/// A folder's object.
///
/// # Errors
/// As [`root`].
pub fn folder(objects: &dyn Objects, digest: Digest) -> Result<Folder> {
    format::decode_folder(&objects.get(digest, limits::TREE_OBJECT_BYTES)?).map_err(malformed(digest))
}

/// A file's map.
///
/// # Errors
/// As [`root`].
pub fn map(objects: &dyn Objects, digest: Digest) -> Result<Map> {
    format::decode_map(&objects.get(digest, limits::TREE_OBJECT_BYTES)?).map_err(malformed(digest))
}

/// Iterates over one folder's entries in order; one page is in memory.
pub struct Entries<'a> {
    objects: &'a dyn Objects,
    page: VecDeque<Entry>,
    /// Entries of `page`, unless that is the folder itself or was begun.
    pages: VecDeque<PageRef>,
}

impl<'a> Entries<'a> {
    /// No entries.
    pub fn none(objects: &'a dyn Objects) -> Entries<'a> {
        Entries { objects, page: VecDeque::new(), pages: VecDeque::new() }
    }

    /// The entries of a folder.
    ///
    /// # Errors
    /// As [`root`].
    pub fn of(objects: &'a dyn Objects, digest: Digest) -> Result<Entries<'a>> {
        let mut entries = Entries::none(objects);
        match folder(objects, digest)? {
            Folder::Page(page) => entries.page = page.into(),
            Folder::Pages(pages) => entries.pages = pages.into(),
        }
        Ok(entries)
    }

    /// The next entry, without taking it.
    ///
    /// # Errors
    /// As [`root`].
    pub fn peek(&mut self) -> Result<Option<&Entry>> {
        while self.page.is_empty() {
            let Some(next) = self.pages.pop_front() else { return Ok(None) };
            self.page = match folder(self.objects, next.digest)? {
                Folder::Page(page) if page.len() as u64 == next.count => page.into(),
                Folder::Page(_) | Folder::Pages(_) => {
                    return Err(malformed(next.digest)(format::FormatError::Malformed(
                        "it is not the page it should be",
                    )));
                }
            };
            if self.page.back().map(|entry| &entry.name) != Some(&next.last) {
                return Err(malformed(next.digest)(format::FormatError::Malformed("it is not the page it should be")));
            }
        }
        Ok(self.page.front())
    }

    /// Takes the next entry.
    ///
    /// # Errors
    /// As [`root`].
    pub fn take(&mut self) -> Result<Option<Entry>> {
        self.peek()?;
        Ok(self.page.pop_front())
    }

    /// Skips to the entry of this name, if it is still to come.
    ///
    /// # Errors
    /// As [`root`].
    pub fn seek(&mut self, name: &[u8]) -> Result<Option<Entry>> {
        while self.page.is_empty() && self.pages.front().is_some_and(|page| &*page.last < name) {
            self.pages.pop_front();
        }
        while let Some(entry) = self.take()? {
            match (*entry.name).cmp(name) {
                std::cmp::Ordering::Less => {}
                std::cmp::Ordering::Equal => return Ok(Some(entry)),
                std::cmp::Ordering::Greater => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Skips pages that both share at their position: they do not differ.
    ///
    /// # Errors
    /// As [`root`].
    pub fn skip_shared(&mut self, other: &mut Entries<'a>) {
        if self.page.is_empty() && other.page.is_empty() {
            while let (Some(a), Some(b)) = (self.pages.front(), other.pages.front()) {
                if a.digest != b.digest {
                    return;
                }
                self.pages.pop_front();
                other.pages.pop_front();
            }
        }
    }
}
