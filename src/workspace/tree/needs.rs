//! The contents needed to turn one tree into another: those that are not in the same place in both.

use super::TreeId;
use super::entry::{Content, Entry, Node};
use super::read::{self, Entries};
use crate::core::ids::Digest;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// Calls `object` for the content of every file that is created when a workspace `present` becomes `target`. Reads
/// folders, pages and maps only where the two differ.
///
/// # Errors
/// An object of folders or maps is missing, damaged or no tree; those of `object`.
pub fn needs(
    objects: &dyn Objects,
    present: TreeId,
    target: TreeId,
    object: &mut dyn FnMut(Digest) -> Result<(), WorkspaceError>,
) -> Result<(), WorkspaceError> {
    if present == target {
        return Ok(());
    }
    let folder = |tree| read::root(objects, tree).map(|root| read::root_folder(&root));
    let mut pairs = vec![(folder(present)?, folder(target)?)];
    while let Some((before, after)) = pairs.pop() {
        let Some(after) = after.filter(|after| before != Some(*after)) else { continue };
        let mut before = match before {
            Some(digest) => Entries::of(objects, digest)?,
            None => Entries::none(objects),
        };
        let mut after = Entries::of(objects, after)?;
        while let Some((known, wanted)) = next(&mut before, &mut after)? {
            let Some(wanted) = wanted else { continue };
            match &wanted.node {
                Node::Folder { digest } => {
                    pairs.push((known.as_ref().and_then(read::root_folder), Some(*digest)));
                }
                Node::File { content, .. } if !known.is_some_and(|known| is_kept(&known, &wanted)) => {
                    contents(objects, content, object)?;
                }
                Node::File { .. } | Node::Symlink { .. } | Node::Fifo | Node::Missing { .. } => {}
            }
        }
    }
    Ok(())
}

/// The next entries of one name, of one or both.
#[allow(clippy::type_complexity, reason = "a pair of which either may be missing")]
fn next<'a>(
    before: &mut Entries<'a>,
    after: &mut Entries<'a>,
) -> Result<Option<(Option<Entry>, Option<Entry>)>, WorkspaceError> {
    before.skip_shared(after);
    let (takes_before, takes_after) =
        match (before.peek()?.map(|entry| &entry.name), after.peek()?.map(|entry| &entry.name)) {
            (None, None) => return Ok(None),
            (Some(_), None) => (true, false),
            (None, Some(_)) => (false, true),
            (Some(known), Some(wanted)) => (known <= wanted, wanted <= known),
        };
    let known = if takes_before { before.take()? } else { None };
    let wanted = if takes_after { after.take()? } else { None };
    Ok(Some((known, wanted)))
}

/// Whether a file stays: at most its mode and time change.
pub(in crate::workspace) fn is_kept(known: &Entry, wanted: &Entry) -> bool {
    let (a, b) = (&known.meta, &wanted.meta);
    known.node == wanted.node && a.owner == b.owner && a.attributes == b.attributes
}

fn contents(
    objects: &dyn Objects,
    content: &Content,
    object: &mut dyn FnMut(Digest) -> Result<(), WorkspaceError>,
) -> Result<(), WorkspaceError> {
    match content {
        Content::Inline(_) => Ok(()),
        Content::Whole(digest) => object(*digest),
        Content::Map(digest) => read::map(objects, *digest)?.pieces.iter().try_for_each(|piece| object(piece.digest)),
    }
}
