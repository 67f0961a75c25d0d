//! Captures one file of a pass: checks for writers, then reuses its known content, reads it, or defers the read.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};

use nix::errno::Errno;
use nix::sys::stat::FileStat;

use super::beneath;
use super::changes::CheckLevel;
use super::deferred_reads::{self, Deferral};
use super::error::WorkspaceError;
use super::index::{FolderId, Known, NodeState, Stamp};
use super::read::{self, Read};
use super::scan::{Outcome, Scan, moved};
use super::tree::entry::{Attributes, Content, Meta, Name, Reason};
use super::tree::format::decode_map;
use crate::core::limits;

type Result<T> = std::result::Result<T, WorkspaceError>;

/// Content of a file.
enum Contents {
    Known(Content),
    /// Deferred, under this number.
    Deferred(usize),
    Changed,
}

impl Scan<'_> {
    pub(super) fn capture_file(
        &mut self,
        id: FolderId,
        dir: BorrowedFd<'_>,
        name: &[u8],
        stat: &FileStat,
        level: CheckLevel,
    ) -> Result<Outcome> {
        let now = beneath::stamp(stat);
        let mut reuse = None;
        if level < CheckLevel::Content
            && let Some(Known { stamp, settled, what: NodeState::File { content, .. }, .. }) =
                self.index.known(id, name)
        {
            let is_same = match level {
                CheckLevel::Stamp => *stamp == now && *settled && self.is_stored(content),
                // A write through a mapping has no event, and this tracker was not there to check for writers.
                CheckLevel::Metadata | CheckLevel::Opened if self.private || self.has_unreported => {
                    *stamp == now && *settled
                }
                // A change of the bytes would have been reported.
                CheckLevel::Metadata | CheckLevel::Opened => moved(*stamp) == moved(now),
                CheckLevel::Content => false,
            };
            // Within the clock's grain, mode and attributes change without a trace.
            let looks = level == CheckLevel::Metadata || self.private;
            if is_same && *stamp == now && *settled && looks {
                return Ok(Outcome::Done);
            }
            reuse = is_same.then(|| content.clone());
        }
        if reuse.is_none() && level < CheckLevel::Content {
            let is_sure = level != CheckLevel::Stamp && !self.private && !self.has_unreported;
            let by_name = if is_sure { self.contents.get(&moved(now)) } else { None };
            let found = self.contents.get(&now).or(by_name);
            reuse = found.filter(|content| self.is_stored(content)).cloned();
        }
        let file = match beneath::file(dir, name) {
            Ok(file) => file,
            Err(error) if beneath::is_gone(error) => return Ok(Outcome::Changed),
            Err(error) if beneath::is_refused(error) => {
                self.missing(id, name, Reason::Unreadable)?;
                self.index.missing_files.insert((id, name.into()));
                return Ok(Outcome::Done);
            }
            Err(Errno::EXDEV) => return self.missing(id, name, Reason::Mount).map(|_| Outcome::Done),
            Err(error) => return Err(WorkspaceError::of("open", &self.index.path(id, name))(error)),
        };
        let hot = self.has_writers(id, name, &file);
        if hot {
            reuse = None;
        }
        if reuse.is_none() && hot && !self.frozen && now.size > self.driver.reads_up_to() {
            // The frozen pass reads it anyway; flushing it now shortens that.
            let path = || self.index.path(id, name);
            self.driver.ahead(&file).map_err(|error| WorkspaceError::io("write out", &path(), error))?;
            return Ok(Outcome::Later);
        }
        let attributes = beneath::attributes(file.as_fd())
            .map_err(|error| WorkspaceError::io("read the attributes of", &self.index.path(id, name), error))?;
        let content = match reuse {
            Some(content) => Contents::Known(content),
            None => self.contents(id, name, &file, now, hot || level > CheckLevel::Stamp)?,
        };
        let after =
            beneath::look_at(&file).map_err(|e| WorkspaceError::of("look at", &self.index.path(id, name))(e))?;
        if beneath::stamp(&after) != now || matches!(content, Contents::Changed) {
            return Ok(Outcome::Changed);
        }
        self.note_file(id, name, &after, attributes, content, hot);
        Ok(Outcome::Done)
    }

    /// A file's content: read, or deferred. `again`: it may be written again before writers stop.
    fn contents(&mut self, id: FolderId, name: &[u8], file: &File, now: Stamp, again: bool) -> Result<Contents> {
        let path = || self.index.path(id, name);
        if let Some(deferred) = self.deferred.as_deref_mut() {
            let names = || {
                let mut names = self.index.names(id);
                names.push(name.into());
                names
            };
            match deferred.defer(self.driver, file, now, &names, self.stats)? {
                Deferral::Deferred(number) => return Ok(Contents::Deferred(number)),
                Deferral::Changed => return Ok(Contents::Changed),
                Deferral::ReadNow => {}
            }
        } else if again && !self.frozen && now.size > self.driver.reads_up_to() {
            self.driver.ahead(file).map_err(|error| WorkspaceError::io("write out", &path(), error))?;
        }
        match read::content(file, now, self.batch).map_err(|e| e.at(path))? {
            Read::Content(content, bytes) => {
                self.stats.read += 1;
                self.stats.bytes += bytes;
                Ok(Contents::Known(content))
            }
            Read::Changed => Ok(Contents::Changed),
        }
    }

    fn note_file(
        &mut self,
        id: FolderId,
        name: &[u8],
        stat: &FileStat,
        attributes: Attributes,
        content: Contents,
        hot: bool,
    ) {
        let stamp = beneath::stamp(stat);
        // Programs can set the modification time, but every change sets the change time.
        let settled = !hot && stamp.changed < self.settled_before;
        let meta: Meta = beneath::meta(stat, self.owner, attributes);
        let place = (id, Name::from(name));
        let (content, kept) = match content {
            Contents::Known(content) => (content, None),
            Contents::Deferred(number) => (deferred_reads::unknown_content(), Some(number)),
            Contents::Changed => return,
        };
        if let (Some(number), Some(deferred)) = (kept, self.deferred.as_deref_mut()) {
            deferred.note(number, place.clone(), settled);
        }
        // Unknown content is never trusted.
        let settled = settled && kept.is_none();
        if stat.st_nlink > 1 && !hot && kept.is_none() {
            self.contents.insert(stamp, content.clone());
        }
        let group = match self.index.known(id, name) {
            Some(Known { what: NodeState::File { group, .. }, .. }) if stat.st_nlink > 1 => *group,
            Some(_) | None => None,
        };
        let before = self.index.known(id, name).map_or(0, |known| known.stamp.inode);
        let same = match self.index.known(id, name) {
            Some(Known { meta: m, what: NodeState::File { content: c, names, .. }, .. }) => {
                *m == meta && *c == content && *names == stat.st_nlink && stamp.inode == before
            }
            Some(_) | None => false,
        };
        let what = NodeState::File { content, names: stat.st_nlink, group };
        let known = Known { stamp, settled, meta, what };
        if same && let Some(folder) = self.index.folders.get_mut(&id) {
            // Only the stamp differs: the tree does not change.
            folder.entries.insert(name.into(), known);
        } else {
            self.index.set(id, name, known);
        }
        if hot {
            self.index.hot.insert(place.clone())
        } else {
            self.index.hot.remove(&place)
        };
        if beneath::has_set_id(stat) {
            self.index.missing.insert(place, Reason::SetId);
        } else {
            self.index.missing.remove(&place);
        }
    }

    fn is_stored(&self, content: &Content) -> bool {
        let Some(objects) = self.check else { return true };
        match content {
            Content::Inline(_) => true,
            Content::Whole(digest) => objects.contains(*digest),
            // The map and its pieces are about to be reused: reading alone does not protect them.
            Content::Map(digest) => objects
                .contains(*digest)
                .then(|| objects.get(*digest, limits::TREE_OBJECT_BYTES).ok())
                .flatten()
                .and_then(|bytes| decode_map(&bytes).ok())
                .is_some_and(|map| map.pieces.iter().all(|piece| objects.contains(piece.digest))),
        }
    }
}
