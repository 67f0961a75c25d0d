//! Changes reported since the last pass. Bounded: too many lead to a full scan.

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
    /// A file that was written while writers had to be stopped.
    pub written: Option<Place>,
    /// Whether a known file may have changed through a name that was never known and is gone: only that name, or none,
    /// was reported.
    pub has_unreported: bool,
    /// Names that appeared.
    appeared: HashSet<Place>,
    /// Names that had appeared before the current pass began. It may find something else under such a name.
    appeared_before_pass: HashSet<Place>,
    /// Names that were moved away and have not arrived yet, by event cookie: whether they had appeared since the last
    /// pass, and their check level.
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

    /// Adds a file that may change without events: its stamp decides, unless it is to be read anyway.
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

    /// A name appeared. A new folder is not watched yet, so changes in it are unreported. A name that appears again
    /// replaced an entry that no pass saw.
    fn on_appeared(&mut self, place: Place, event: &Event<'_>) {
        let before = (event.moved != 0).then(|| self.moving.remove(&event.moved)).flatten();
        let had_come = self.appeared.contains(&place) || self.appeared_before_pass.contains(&place);
        self.has_unreported |= (event.is_folder && before.is_none()) || had_come;
        // A file from an unwatched folder may have been written there. A file without a name comes from one too, and
        // may have the inode and times of the previous entry.
        let (is_new, level) = before.unwrap_or((true, CheckLevel::Content));
        if is_new {
            self.appeared.insert(place.clone());
        }
        self.add(place, level.max(CheckLevel::Metadata));
    }

    /// A name disappeared. `is_known`: it is in the index.
    fn on_disappeared(&mut self, place: Place, event: &Event<'_>, is_known: bool) {
        let level = self.level(&place);
        let (since, before) = (self.appeared.remove(&place), self.appeared_before_pass.remove(&place));
        let had_come = since || before;
        if event.moved == 0 {
            self.has_unreported |= had_come || !is_known;
        } else {
            // Something appeared under a known name before that name left: two names were exchanged.
            self.has_unreported |= had_come && is_known;
            self.moving.insert(event.moved, (had_come || !is_known, level));
        }
        self.add(place, CheckLevel::Metadata);
    }

    /// The queue is empty: names that were moved away and did not arrive may be deleted.
    fn queue_is_empty(&mut self) {
        self.has_unreported |= self.moving.drain().any(|(_, (had_come, _))| had_come);
    }

    /// Returns the changes for a pass. The names that appeared stay recorded until the pass ends.
    pub(super) fn take_for_pass(&mut self) -> Changes {
        let mut reported = std::mem::take(self);
        self.appeared_before_pass = std::mem::take(&mut reported.appeared);
        reported.appeared_before_pass.clear();
        reported
    }

    /// A pass ended, and the queue was drained: the names that appeared and were found are known now.
    pub(super) fn end_pass(&mut self, index: &Index) {
        let is_unknown =
            |(folder, name): &Place| index.folders.get(folder).is_some_and(|folder| !folder.entries.contains_key(name));
        let unknown = self.appeared_before_pass.drain().filter(is_unknown);
        self.appeared.extend(unknown);
    }

    /// The reported change of this entry was our own: its stamp is current.
    pub(super) fn check_metadata_only(&mut self, (folder, name): Place) {
        let reported = self.names.entry(folder).or_default().insert(name, CheckLevel::Metadata);
        self.count += usize::from(reported.is_none());
    }

    /// All reported changes were our own.
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

/// How open events are judged.
#[derive(Debug)]
pub(super) enum OpenEvents<'a> {
    /// Other processes run: an open event counts, unless a writer check after it explains it.
    Count(&'a mut WriterChecks),
    /// All opens are our own: no other process runs.
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

/// Files that had no writer when checked, while others could open them. Our own opens of them are reported too.
#[derive(Debug, Default)]
pub(super) struct WriterChecks {
    /// The mark placed before each check.
    after: HashMap<Place, u64>,
    /// Number of marks received.
    marks_seen: u64,
}

impl WriterChecks {
    /// The file had no writer after the mark.
    pub(super) fn no_writer_since(&mut self, place: Place, mark: u64) {
        self.after.insert(place, mark);
    }

    /// An open event before the mark was for reading, or its file was closed by then: otherwise the check had found a
    /// writer.
    fn is_explained(&self, folder: FolderId, name: &Name) -> bool {
        self.after.get(&(folder, name.clone())).is_some_and(|mark| self.marks_seen < *mark)
    }
}

/// Drains the event queue. Returns why a full scan is needed, if events were lost or are too many.
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
                // Further events add nothing: everything will be checked.
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
