//! One file of a pass: asked who may write to it, and read, kept to be read later, or known already.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};

use nix::errno::Errno;
use nix::sys::stat::FileStat;

use super::beneath;
use super::changes::Closely;
use super::error::WorkspaceError;
use super::index::{FolderId, Known, Stamp, What};
use super::keep::{self, Keep};
use super::read::{self, Read};
use super::scan::{Scan, Taken, moved};
use super::tree::entry::{Attributes, Content, Meta, Name, Reason};
use super::tree::format::decode_map;
use crate::core::limits;

type Result<T> = std::result::Result<T, WorkspaceError>;

/// What is known of a file's content.
enum Contents {
    Known(Content),
    /// Under this number, to be read later.
    Kept(usize),
    Changed,
}

impl Scan<'_> {
    pub(super) fn take_file(
        &mut self,
        id: FolderId,
        dir: BorrowedFd<'_>,
        name: &[u8],
        stat: &FileStat,
        closely: Closely,
    ) -> Result<Taken> {
        let now = beneath::stamp(stat);
        let mut reuse = None;
        if closely < Closely::Read
            && let Some(Known { stamp, settled, what: What::File { content, .. }, .. }) = self.index.known(id, name)
        {
            let is_same = match closely {
                Closely::Walk => *stamp == now && *settled && self.is_stored(content),
                // What wrote through a mapping is told by nobody, and is not here to be asked for.
                Closely::Look | Closely::Open if self.private || self.hidden => *stamp == now && *settled,
                // Its bytes did not change, or that would have been told.
                Closely::Look | Closely::Open => moved(*stamp) == moved(now),
                Closely::Read => false,
            };
            // Within the clock's grain mode and attributes change without a trace.
            let looks = closely == Closely::Look || self.private;
            if is_same && *stamp == now && *settled && looks {
                return Ok(Taken::Done);
            }
            reuse = is_same.then(|| content.clone());
        }
        if reuse.is_none() && closely < Closely::Read {
            let is_sure = closely != Closely::Walk && !self.private && !self.hidden;
            let by_name = if is_sure { self.contents.get(&moved(now)) } else { None };
            let found = self.contents.get(&now).or(by_name);
            reuse = found.filter(|content| self.is_stored(content)).cloned();
        }
        let file = match beneath::file(dir, name) {
            Ok(file) => file,
            Err(error) if beneath::is_gone(error) => return Ok(Taken::Changed),
            Err(error) if beneath::is_refused(error) => {
                self.missing(id, name, Reason::Unreadable)?;
                self.index.missing_files.insert((id, name.into()));
                return Ok(Taken::Done);
            }
            Err(Errno::EXDEV) => return self.missing(id, name, Reason::Mount).map(|_| Taken::Done),
            Err(error) => return Err(WorkspaceError::of("open", &self.index.path(id, name))(error)),
        };
        let hot = self.ask(id, name, &file);
        if hot {
            reuse = None;
        }
        if reuse.is_none() && hot && !self.frozen && now.size > self.driver.reads_up_to() {
            // It is held and read when nobody writes, whatever is done now: what it takes to hold it is done.
            let path = || self.index.path(id, name);
            self.driver.ahead(&file).map_err(|error| WorkspaceError::io("write out", &path(), error))?;
            return Ok(Taken::Later);
        }
        let attributes = beneath::attributes(file.as_fd())
            .map_err(|error| WorkspaceError::io("read the attributes of", &self.index.path(id, name), error))?;
        let content = match reuse {
            Some(content) => Contents::Known(content),
            None => self.contents(id, name, &file, now, hot || closely > Closely::Walk)?,
        };
        let after =
            beneath::look_at(&file).map_err(|e| WorkspaceError::of("look at", &self.index.path(id, name))(e))?;
        if beneath::stamp(&after) != now || matches!(content, Contents::Changed) {
            return Ok(Taken::Changed);
        }
        self.note_file(id, name, &after, attributes, content, hot);
        Ok(Taken::Done)
    }

    /// A file's content: read, or kept to be read later. `again`: it may well be written again before writers stop.
    fn contents(&mut self, id: FolderId, name: &[u8], file: &File, now: Stamp, again: bool) -> Result<Contents> {
        let path = || self.index.path(id, name);
        if let Some(keeping) = self.keeping.as_deref_mut() {
            let names = || {
                let mut names = self.index.names(id);
                names.push(name.into());
                names
            };
            match keeping.keep(self.driver, file, now, &names, self.how)? {
                Keep::Kept(number) => return Ok(Contents::Kept(number)),
                Keep::Changed => return Ok(Contents::Changed),
                Keep::Not => {}
            }
        } else if again && !self.frozen && now.size > self.driver.reads_up_to() {
            self.driver.ahead(file).map_err(|error| WorkspaceError::io("write out", &path(), error))?;
        }
        match read::content(file, now, self.batch).map_err(|e| e.at(path))? {
            Read::Content(content, bytes) => {
                self.how.read += 1;
                self.how.bytes += bytes;
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
        // Whatever time of modification was given to it: every change sets the time of change.
        let settled = !hot && stamp.changed < self.settled_before;
        let meta: Meta = beneath::meta(stat, self.owner, attributes);
        let place = (id, Name::from(name));
        let (content, kept) = match content {
            Contents::Known(content) => (content, None),
            Contents::Kept(number) => (keep::unknown(), Some(number)),
            Contents::Changed => return,
        };
        if let (Some(number), Some(keeping)) = (kept, self.keeping.as_deref_mut()) {
            keeping.note(number, place.clone(), settled);
        }
        // What is not known yet is trusted by nobody.
        let settled = settled && kept.is_none();
        if stat.st_nlink > 1 && !hot && kept.is_none() {
            self.contents.insert(stamp, content.clone());
        }
        let group = match self.index.known(id, name) {
            Some(Known { what: What::File { group, .. }, .. }) if stat.st_nlink > 1 => *group,
            Some(_) | None => None,
        };
        let before = self.index.known(id, name).map_or(0, |known| known.stamp.inode);
        let same = match self.index.known(id, name) {
            Some(Known { meta: m, what: What::File { content: c, names, .. }, .. }) => {
                *m == meta && *c == content && *names == stat.st_nlink && stamp.inode == before
            }
            Some(_) | None => false,
        };
        let what = What::File { content, names: stat.st_nlink, group };
        let known = Known { stamp, settled, meta, what };
        if same && let Some(folder) = self.index.folders.get_mut(&id) {
            // Only the stamp differs: the tree does not.
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
            // It is going to be used again, as its pieces are: reading alone does not keep it.
            Content::Map(digest) => objects
                .contains(*digest)
                .then(|| objects.get(*digest, limits::TREE_OBJECT_BYTES).ok())
                .flatten()
                .and_then(|bytes| decode_map(&bytes).ok())
                .is_some_and(|map| map.pieces.iter().all(|piece| objects.contains(piece.digest))),
        }
    }
}
