//! What was told of changes since the last pass. Bounded: beyond, everything is walked.

use std::collections::{HashMap, HashSet};

use super::capture_stats::FullScanReason;
use super::index::{FolderId, Index, Place};
use super::tree::entry::Name;
use crate::core::limits;
use crate::sys::notify::{Deed, Event, Notify};

/// How thoroughly a pass checks an entry; a higher level includes the lower ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CheckLevel {
    /// No event names the entry: its stamp decides.
    Stamp,
    /// Its name or metadata changed.
    Metadata,
    /// It was opened, and may still be open for writing.
    Opened,
    /// It was written.
    Content,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Changes {
    pub names: HashMap<FolderId, HashMap<Name, CheckLevel>>,
    /// A file that somebody wrote to while nobody was to.
    pub written: Option<Place>,
    /// Whether something may have been done to a known file by a name that nobody knew, and that is gone: then it was told of that name
    /// alone, or of none.
    pub has_unreported: bool,
    /// Names that came since.
    appeared: HashSet<Place>,
    /// Names that had come when the pass that is under way began. It may find another thing of such a name than what came.
    appeared_before_pass: HashSet<Place>,
    /// Names that were moved away, and did not come to their new place yet: whether they had come since, and how closely they were to
    /// be looked at.
    moving: HashMap<u32, (bool, CheckLevel)>,
    count: usize,
}

impl Changes {
    pub(super) fn add(&mut self, (folder, name): Place, level: CheckLevel) {
        let names = self.names.entry(folder).or_default();
        match names.get_mut(&name) {
            Some(known) => *known = level.max(*known),
            None => {
                names.insert(name, level);
                self.count += 1;
            }
        }
    }

    /// A file that may be changed where nobody tells: unless it is read anyway its stamp decides, whatever is told of it here.
    pub(super) fn add_by_stamp(&mut self, (folder, name): Place) {
        self.add((folder, name.clone()), CheckLevel::Stamp);
        if let Some(level) = self.names.get_mut(&folder).and_then(|names| names.get_mut(&name))
            && *level < CheckLevel::Content
        {
            *level = CheckLevel::Stamp;
        }
    }

    fn level(&self, (folder, name): &Place) -> CheckLevel {
        self.names.get(folder).and_then(|names| names.get(name)).copied().unwrap_or(CheckLevel::Stamp)
    }

    /// A name came. A folder that is new is not watched yet: nobody tells what is done in it. What came to a name that had come since took the
    /// place of something that nobody saw.
    fn on_appeared(&mut self, place: Place, event: &Event<'_>) {
        let before = (event.moved != 0).then(|| self.moving.remove(&event.moved)).flatten();
        let had_come = self.appeared.contains(&place) || self.appeared_before_pass.contains(&place);
        self.has_unreported |= (event.is_folder && before.is_none()) || had_come;
        // What came from where nobody watches may have been written there: a file that had no name is one, and it may have the number and the
        // times of what had this name before.
        let (is_new, level) = before.unwrap_or((true, CheckLevel::Content));
        if is_new {
            self.appeared.insert(place.clone());
        }
        self.add(place, level.max(CheckLevel::Metadata));
    }

    /// A name went. `is_known`: from before what is told of here.
    fn on_disappeared(&mut self, place: Place, event: &Event<'_>, is_known: bool) {
        let level = self.level(&place);
        let (since, before) = (self.appeared.remove(&place), self.appeared_before_pass.remove(&place));
        let had_come = since || before;
        if event.moved == 0 {
            self.has_unreported |= had_come || !is_known;
        } else {
            // A known name to which something else came before it went: two names changed places.
            self.has_unreported |= had_come && is_known;
            self.moving.insert(event.moved, (had_come || !is_known, level));
        }
        self.add(place, CheckLevel::Metadata);
    }

    /// All was taken that is told by now: what was moved away and came nowhere that is watched may be gone.
    fn queue_is_empty(&mut self) {
        self.has_unreported |= self.moving.drain().any(|(_, (had_come, _))| had_come);
    }

    /// Gives what was told for a pass to follow. Which names came stays, until the pass is over.
    pub(super) fn take_for_pass(&mut self) -> Changes {
        let mut told = std::mem::take(self);
        self.appeared_before_pass = std::mem::take(&mut told.appeared);
        told.appeared_before_pass.clear();
        told
    }

    /// A pass is over, and all is taken that was told meanwhile: what it found of the names that had come is known now.
    pub(super) fn end_pass(&mut self, index: &Index) {
        let is_unknown =
            |(folder, name): &Place| index.folders.get(folder).is_some_and(|folder| !folder.entries.contains_key(name));
        let unknown = self.appeared_before_pass.drain().filter(is_unknown);
        self.appeared.extend(unknown);
    }

    /// What was told of an entry was our own doing: its stamp says what it is now.
    pub(super) fn check_metadata_only(&mut self, (folder, name): Place) {
        let told = self.names.entry(folder).or_default().insert(name, CheckLevel::Metadata);
        self.count += usize::from(told.is_none());
    }

    /// What was told was our own doing.
    pub(super) fn clear_unreported(&mut self) {
        self.has_unreported = false;
        self.appeared.clear();
        self.appeared_before_pass.clear();
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
pub(super) enum OpenEvents<'a> {
    /// Who knows: each counts, but what was told of before we asked who may write to that file.
    Count(&'a mut WriterChecks),
    /// Our own: nobody else runs.
    Ours,
}

impl OpenEvents<'_> {
    fn is_explained(&self, folder: FolderId, name: &[u8]) -> bool {
        match self {
            OpenEvents::Ours => true,
            OpenEvents::Count(writer_checks) => {
                !writer_checks.after.is_empty() && writer_checks.is_explained(folder, &name.into())
            }
        }
    }
}

/// Files that were asked who may write to them, nobody, while others could open them: our own opening of them is told, too.
#[derive(Debug, Default)]
pub(super) struct WriterChecks {
    /// The mark that was put before a file was asked.
    after: HashMap<Place, u64>,
    /// Marks that were told.
    marks_seen: u64,
}

impl WriterChecks {
    /// Nobody could write to that file after the mark was put.
    pub(super) fn no_writer_since(&mut self, place: Place, mark: u64) {
        self.after.insert(place, mark);
    }

    /// An opening that was told before its mark was over by then, or it was for reading: else that file would have said so.
    fn is_explained(&self, folder: FolderId, name: &Name) -> bool {
        self.after.get(&(folder, name.clone())).is_some_and(|mark| self.marks_seen < *mark)
    }
}

/// Takes what is told. Says why everything must be walked, if something was not told or is too much.
pub(super) fn drain(
    notify: &mut Option<Notify>,
    index: &mut Index,
    changes: &mut Changes,
    mut opens: OpenEvents<'_>,
) -> Option<FullScanReason> {
    let notify = notify.as_mut()?;
    let mut why = None;
    loop {
        let mut overflow = false;
        let taken = notify.take(|event| match event.deed {
            Deed::Overflow => overflow = true,
            Deed::Mark => {
                if let OpenEvents::Count(writer_checks) = &mut opens {
                    writer_checks.marks_seen += 1;
                }
            }
            Deed::Ended => {
                if let Some(id) = index.watches.remove(&event.watch)
                    && let Some(folder) = index.folders.get_mut(&id)
                {
                    folder.watch = None;
                    changes.add((folder.parent, folder.name.clone()), CheckLevel::Metadata);
                }
            }
            deed @ (Deed::Content | Deed::Closed | Deed::Changed | Deed::Came | Deed::Went | Deed::Opened) => {
                let Some(id) = index.watches.get(&event.watch) else { return };
                if deed == Deed::Opened && opens.is_explained(*id, event.name) {
                    return;
                }
                let level = match deed {
                    Deed::Content | Deed::Closed => CheckLevel::Content,
                    Deed::Opened => CheckLevel::Opened,
                    Deed::Changed | Deed::Came | Deed::Went | Deed::Overflow | Deed::Ended | Deed::Mark => {
                        CheckLevel::Metadata
                    }
                };
                let place = || (*id, Name::from(event.name));
                if event.name.is_empty() {
                    changes.add_folder(*id);
                } else if deed == Deed::Came {
                    changes.on_appeared(place(), &event);
                } else if deed == Deed::Went {
                    changes.on_disappeared(place(), &event, index.known(*id, event.name).is_some());
                } else {
                    if deed == Deed::Content && matches!(opens, OpenEvents::Ours) {
                        changes.written = Some(place());
                    }
                    changes.add(place(), level);
                }
            }
        });
        match taken {
            Ok(true) if overflow || changes.is_full() => {
                // What is told beyond adds nothing: everything will be looked at.
                why = why.or(Some(if overflow { FullScanReason::Overflow } else { FullScanReason::TooManyChanges }));
                *changes = Changes::default();
            }
            Ok(true) => {}
            Ok(false) => {
                changes.queue_is_empty();
                return why;
            }
            Err(_) => return why.or(Some(FullScanReason::Overflow)),
        }
    }
}
