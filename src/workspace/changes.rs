//! What was told of changes since the last pass. Bounded: beyond, everything is walked.

use std::collections::{HashMap, HashSet};

use super::how::Walk;
use super::index::{FolderId, Index, Place};
use super::tree::entry::Name;
use crate::core::limits;
use crate::sys::notify::{Deed, Event, Notify};

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
    /// Whether something may have been done to a known file by a name that nobody knew, and that is gone: then it was told of that name
    /// alone, or of none.
    pub hidden: bool,
    /// Names that came since.
    came: HashSet<Place>,
    /// Names that had come when the pass that is under way began. It may find another thing of such a name than what came.
    came_before: HashSet<Place>,
    /// Names that were moved away, and did not come to their new place yet: whether they had come since, and how closely they were to
    /// be looked at.
    moving: HashMap<u32, (bool, Closely)>,
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

    /// A file that may be changed where nobody tells: unless it is read anyway its stamp decides, whatever is told of it here.
    pub(super) fn add_by_stamp(&mut self, (folder, name): Place) {
        self.add((folder, name.clone()), Closely::Walk);
        if let Some(closely) = self.names.get_mut(&folder).and_then(|names| names.get_mut(&name))
            && *closely < Closely::Read
        {
            *closely = Closely::Walk;
        }
    }

    fn closely(&self, (folder, name): &Place) -> Closely {
        self.names.get(folder).and_then(|names| names.get(name)).copied().unwrap_or(Closely::Walk)
    }

    /// A name came. A folder that is new is not watched yet: nobody tells what is done in it. What came to a name that had come since took the
    /// place of something that nobody saw.
    fn came(&mut self, place: Place, event: &Event<'_>) {
        let before = (event.moved != 0).then(|| self.moving.remove(&event.moved)).flatten();
        let had_come = self.came.contains(&place) || self.came_before.contains(&place);
        self.hidden |= (event.is_folder && before.is_none()) || had_come;
        // What came from where nobody watches may have been written there: a file that had no name is one, and it may have the number and the
        // times of what had this name before.
        let (is_new, closely) = before.unwrap_or((true, Closely::Read));
        if is_new {
            self.came.insert(place.clone());
        }
        self.add(place, closely.max(Closely::Look));
    }

    /// A name went. `is_known`: from before what is told of here.
    fn went(&mut self, place: Place, event: &Event<'_>, is_known: bool) {
        let closely = self.closely(&place);
        let (since, before) = (self.came.remove(&place), self.came_before.remove(&place));
        let had_come = since || before;
        if event.moved == 0 {
            self.hidden |= had_come || !is_known;
        } else {
            // A known name to which something else came before it went: two names changed places.
            self.hidden |= had_come && is_known;
            self.moving.insert(event.moved, (had_come || !is_known, closely));
        }
        self.add(place, Closely::Look);
    }

    /// All was taken that is told by now: what was moved away and came nowhere that is watched may be gone.
    fn all_is_taken(&mut self) {
        self.hidden |= self.moving.drain().any(|(_, (had_come, _))| had_come);
    }

    /// Gives what was told for a pass to follow. Which names came stays, until the pass is over.
    pub(super) fn take_for_pass(&mut self) -> Changes {
        let mut told = std::mem::take(self);
        self.came_before = std::mem::take(&mut told.came);
        told.came_before.clear();
        told
    }

    /// A pass is over, and all is taken that was told meanwhile: what it found of the names that had come is known now.
    pub(super) fn pass_is_over(&mut self, index: &Index) {
        let is_unknown =
            |(folder, name): &Place| index.folders.get(folder).is_some_and(|folder| !folder.entries.contains_key(name));
        let unknown = self.came_before.drain().filter(is_unknown);
        self.came.extend(unknown);
    }

    /// What was told of an entry was our own doing: its stamp says what it is now.
    pub(super) fn only_look(&mut self, (folder, name): Place) {
        let told = self.names.entry(folder).or_default().insert(name, Closely::Look);
        self.count += usize::from(told.is_none());
    }

    /// What was told was our own doing.
    pub(super) fn nothing_is_hidden(&mut self) {
        self.hidden = false;
        self.came.clear();
        self.came_before.clear();
    }

    /// A folder's own metadata changed.
    pub(super) fn add_folder(&mut self, folder: FolderId) {
        self.names.entry(folder).or_default();
    }

    pub(super) fn is_full(&self) -> bool {
        self.count + self.names.len() + self.moving.len() > limits::WORKSPACE_CHANGES
    }
}

/// Whose opening of files is told.
#[derive(Debug)]
pub(super) enum Opens<'a> {
    /// Who knows: each counts, but what was told of before we asked who may write to that file.
    Count(&'a mut Asked),
    /// Our own: nobody else runs.
    Ours,
}

impl Opens<'_> {
    fn is_answered(&self, folder: FolderId, name: &[u8]) -> bool {
        match self {
            Opens::Ours => true,
            Opens::Count(asked) => !asked.after.is_empty() && asked.is_answered(folder, &name.into()),
        }
    }
}

/// Files that were asked who may write to them, nobody, while others could open them: our own opening of them is told, too.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// The mark that was put before a file was asked.
    after: HashMap<Place, u64>,
    /// Marks that were told.
    told: u64,
}

impl Asked {
    /// Nobody could write to that file after the mark was put.
    pub(super) fn nobody_since(&mut self, place: Place, mark: u64) {
        self.after.insert(place, mark);
    }

    /// An opening that was told before its mark was over by then, or it was for reading: else that file would have said so.
    fn is_answered(&self, folder: FolderId, name: &Name) -> bool {
        self.after.get(&(folder, name.clone())).is_some_and(|mark| self.told < *mark)
    }
}

/// Takes what is told. Says why everything must be walked, if something was not told or is too much.
pub(super) fn drain(
    notify: &mut Option<Notify>,
    index: &mut Index,
    changes: &mut Changes,
    mut opens: Opens<'_>,
) -> Option<Walk> {
    let notify = notify.as_mut()?;
    let mut why = None;
    loop {
        let mut overflow = false;
        let taken = notify.take(|event| match event.deed {
            Deed::Overflow => overflow = true,
            Deed::Mark => {
                if let Opens::Count(asked) = &mut opens {
                    asked.told += 1;
                }
            }
            Deed::Ended => {
                if let Some(id) = index.watches.remove(&event.watch)
                    && let Some(folder) = index.folders.get_mut(&id)
                {
                    folder.watch = None;
                    changes.add((folder.parent, folder.name.clone()), Closely::Look);
                }
            }
            deed @ (Deed::Content | Deed::Closed | Deed::Changed | Deed::Came | Deed::Went | Deed::Opened) => {
                let Some(id) = index.watches.get(&event.watch) else { return };
                if deed == Deed::Opened && opens.is_answered(*id, event.name) {
                    return;
                }
                let closely = match deed {
                    Deed::Content | Deed::Closed => Closely::Read,
                    Deed::Opened => Closely::Open,
                    Deed::Changed | Deed::Came | Deed::Went | Deed::Overflow | Deed::Ended | Deed::Mark => {
                        Closely::Look
                    }
                };
                let place = || (*id, Name::from(event.name));
                if event.name.is_empty() {
                    changes.add_folder(*id);
                } else if deed == Deed::Came {
                    changes.came(place(), &event);
                } else if deed == Deed::Went {
                    changes.went(place(), &event, index.known(*id, event.name).is_some());
                } else {
                    if deed == Deed::Content && matches!(opens, Opens::Ours) {
                        changes.written = Some(place());
                    }
                    changes.add(place(), closely);
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
            Ok(false) => {
                changes.all_is_taken();
                return why;
            }
            Err(_) => return why.or(Some(Walk::Overflow)),
        }
    }
}
