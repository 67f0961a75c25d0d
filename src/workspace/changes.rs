//! What was told of changes since the last pass. Bounded: beyond, everything is walked.

use std::collections::HashMap;

use super::how::Walk;
use super::index::{FolderId, Index, Place};
use super::tree::entry::Name;
use crate::core::limits;
use crate::sys::notify::{Deed, Notify};

/// How closely an entry is to be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Closely {
    /// Found by a walk, told by nobody: its stamp decides.
    Walk,
    /// Its name or its metadata changed.
    Look,
    /// It was opened, and perhaps is still open for writing.
    Open,
    /// It was written.
    Read,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Changes {
    pub names: HashMap<FolderId, HashMap<Name, Closely>>,
    /// A file that somebody wrote to while nobody was to.
    pub written: Option<Place>,
    count: usize,
}

impl Changes {
    pub(super) fn add(&mut self, (folder, name): Place, closely: Closely) {
        let names = self.names.entry(folder).or_default();
        match names.get_mut(&name) {
            Some(known) => *known = closely.max(*known),
            None => {
                names.insert(name, closely);
                self.count += 1;
            }
        }
    }

    /// A folder's own metadata changed.
    pub(super) fn add_folder(&mut self, folder: FolderId) {
        self.names.entry(folder).or_default();
    }

    pub(super) fn is_full(&self) -> bool {
        self.count + self.names.len() > limits::WORKSPACE_CHANGES
    }
}

/// Whose opening of files is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opens {
    /// Who knows: each counts.
    Count,
    /// Our own: nobody else runs.
    Ours,
}

/// Takes what is told. Says why everything must be walked, if something was not told or is too much.
pub(super) fn drain(
    notify: &mut Option<Notify>,
    index: &mut Index,
    changes: &mut Changes,
    opens: Opens,
) -> Option<Walk> {
    let notify = notify.as_mut()?;
    let mut why = None;
    loop {
        let mut overflow = false;
        let taken = notify.take(|event| match event.deed {
            Deed::Overflow => overflow = true,
            Deed::Ended => {
                if let Some(id) = index.watches.remove(&event.watch)
                    && let Some(folder) = index.folders.get_mut(&id)
                {
                    folder.watch = None;
                    changes.add((folder.parent, folder.name.clone()), Closely::Look);
                }
            }
            Deed::Opened if opens == Opens::Ours => {}
            deed @ (Deed::Content | Deed::Closed | Deed::Name | Deed::Opened) => {
                let Some(id) = index.watches.get(&event.watch) else { return };
                let closely = match deed {
                    Deed::Content | Deed::Closed => Closely::Read,
                    Deed::Opened => Closely::Open,
                    Deed::Name | Deed::Overflow | Deed::Ended => Closely::Look,
                };
                if event.name.is_empty() {
                    changes.add_folder(*id);
                } else {
                    if deed == Deed::Content && opens == Opens::Ours {
                        changes.written = Some((*id, event.name.into()));
                    }
                    changes.add((*id, event.name.into()), closely);
                }
            }
        });
        match taken {
            Ok(true) if overflow || changes.is_full() => {
                // What is told beyond adds nothing: everything will be looked at.
                why = why.or(Some(if overflow { Walk::Overflow } else { Walk::TooManyChanges }));
                *changes = Changes::default();
            }
            Ok(true) => {}
            Ok(false) => return why,
            Err(_) => return why.or(Some(Walk::Overflow)),
        }
    }
}
