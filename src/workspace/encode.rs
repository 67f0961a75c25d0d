//! Builds a tree from an index. Encodes only folders that changed, and of those only the changed pages.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::error::WorkspaceError;
use super::index::{Folder, FolderId, Index, ROOT, Stale};
use super::objects::ObjectBatch;
use super::tree::TreeId;
use super::tree::entry::{Entry, Name, Node};
use super::tree::format::{self, PageRef};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// Puts the new objects of folders, and the tree's root, into the batch.
pub(super) fn encode(index: &mut Index, batch: &mut dyn ObjectBatch) -> Result<TreeId> {
    index.regroup();
    while let Some((_, id)) = index.stale.pop_first() {
        let made = pages(index, id, batch).and_then(|pages| {
            let digest = match pages.as_slice() {
                [] => batch.put(&format::encode_page(0, &[]))?,
                [page] => page.digest,
                pages => batch.put(&format::encode_pages(pages))?,
            };
            Ok((pages, digest))
        });
        let (pages, digest) = match made {
            Ok(made) => made,
            Err(error) => {
                // It still needs encoding.
                let depth = index.folder(id).depth;
                index.stale.insert((std::cmp::Reverse(depth), id));
                return Err(error);
            }
        };
        let folder = index.folder_mut(id);
        (folder.pages, folder.stale) = (pages, Stale::Names(BTreeSet::new()));
        if folder.digest.replace(digest) != Some(digest) && id != ROOT {
            let (parent, name) = (folder.parent, folder.name.clone());
            index.mark_stale(parent, &name);
        }
    }
    let digest = index.folder(ROOT).digest.expect("the root was encoded, now or before");
    let root = Entry { name: Name::default(), meta: index.root.clone(), node: Node::Folder { digest } };
    Ok(TreeId(batch.put(&format::encode_root(&root))?))
}

/// The pages of a folder; unchanged pages are reused.
fn pages(index: &Index, id: FolderId, batch: &mut dyn ObjectBatch) -> Result<Vec<PageRef>> {
    let folder = index.folder(id);
    let all = BTreeSet::new();
    let (old, names) = match &folder.stale {
        Stale::All => (&[][..], &all),
        Stale::Names(names) => (folder.pages.as_slice(), names),
    };
    let mut writer = Pages { index, folder, batch, made: Vec::new(), at: None };
    let mut next = 0;
    while next < old.len() {
        // The last page extends to the end: new entries there belong to it.
        let to = if next + 1 == old.len() { Bound::Unbounded } else { Bound::Included(&old[next].last) };
        let from = writer.at.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        if names.range::<Name, _>((from, to)).next().is_none() {
            writer.at = Some(old[next].last.clone());
            writer.made.push(old[next].clone());
            next += 1;
            continue;
        }
        // Until a page border is unchanged.
        loop {
            if !writer.page()? {
                next = old.len();
                break;
            }
            let at = writer.at.as_ref();
            while old.get(next).is_some_and(|page| Some(&page.last) < at) {
                next += 1;
            }
            if old.get(next).is_some_and(|page| Some(&page.last) == at) {
                next += 1;
                break;
            }
        }
    }
    while writer.page()? {}
    Ok(writer.made)
}

struct Pages<'a> {
    index: &'a Index,
    folder: &'a Folder,
    batch: &'a mut dyn ObjectBatch,
    made: Vec<PageRef>,
    /// The last name of the last page.
    at: Option<Name>,
}

impl Pages<'_> {
    /// Builds the next page; false at the end.
    fn page(&mut self) -> Result<bool> {
        let from = self.at.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let mut bytes = Vec::new();
        let (mut count, mut last) = (0, None);
        for (name, known) in self.folder.entries.range::<Name, _>((from, Bound::Unbounded)) {
            format::encode_entry(&mut bytes, &self.index.entry(name, known));
            (count, last) = (count + 1, Some(name));
            if format::page_ends(name, count) {
                break;
            }
        }
        let Some(last) = last.cloned() else { return Ok(false) };
        let digest = self.batch.put(&format::encode_page(count, &bytes))?;
        self.made.push(PageRef { last: last.clone(), count: count as u64, digest });
        self.at = Some(last);
        Ok(true)
    }
}
