//! Files collected while frozen and stored after writers run again: bytes in memory, and files that the driver holds.
//! So the pause includes neither hashing nor compression, nor, where files can be cloned, reading.

use std::collections::HashMap;
use std::fs::File;

use super::beneath;
use super::capture_stats::CaptureStats;
use super::driver::{Driver, HeldFile};
use super::error::WorkspaceError;
use super::index::{Index, Place, Stamp};
use super::objects::ObjectBatch;
use super::read::{self, Read};
use super::tree::entry::{Content, Name};
use crate::core::ids::Digest;
use crate::core::limits;

type Result<T> = std::result::Result<T, WorkspaceError>;

/// Placeholder for unknown content in the index. No object has this address.
pub(super) fn unknown_content() -> Content {
    Content::Map(Digest::from_bytes([0; 32]))
}

enum Source {
    Bytes(Vec<u8>),
    HeldFile(HeldFile),
}

/// One file, under all its names.
struct DeferredFile {
    stamp: Stamp,
    settled: bool,
    source: Source,
    places: Vec<Place>,
}

/// The deferred files. Bounded in number and bytes: further files are read at once.
#[derive(Default)]
pub(super) struct DeferredReads {
    files: Vec<DeferredFile>,
    by_inode: HashMap<u64, usize>,
    bytes: u64,
}

/// Result of deferring a file.
pub(super) enum Deferral {
    /// Deferred under this number.
    Deferred(usize),
    /// It has changed since it was deferred under another name, or it shrank.
    Changed,
    /// It must be read at once.
    ReadNow,
}

impl DeferredReads {
    /// Defers a file that had this stamp a moment ago.
    pub(super) fn defer(
        &mut self,
        driver: &mut dyn Driver,
        file: &File,
        stamp: Stamp,
        names: &dyn Fn() -> Vec<Name>,
        stats: &mut CaptureStats,
    ) -> Result<Deferral> {
        if stamp.size <= limits::TREE_INLINE_BYTES as u64 || self.files.len() >= limits::WORKSPACE_DEFERRED_FILES {
            return Ok(Deferral::ReadNow);
        }
        match self.by_inode.get(&stamp.inode).map(|number| (*number, &self.files[*number])) {
            Some((number, source)) if source.stamp == stamp => return Ok(Deferral::Deferred(number)),
            Some((_, source)) if !source.places.is_empty() => return Ok(Deferral::Changed),
            Some(_) | None => {}
        }
        let fits = self.bytes + stamp.size <= limits::WORKSPACE_DEFERRED_BYTES;
        let path = || super::tree::entry::path_of(names().iter().map(|name| &**name));
        let held = if fits && stamp.size <= driver.reads_up_to() { None } else { driver.hold(file, names)? };
        let source = match held {
            Some(held) => {
                stats.cloned += 1;
                Source::HeldFile(held)
            }
            None if fits => match read::bytes(file, stamp.size).map_err(|e| e.at(path))? {
                read::Bytes::All(bytes) => {
                    self.bytes += stamp.size;
                    Source::Bytes(bytes)
                }
                read::Bytes::Changed => return Ok(Deferral::Changed),
                read::Bytes::Holes => return Ok(Deferral::ReadNow),
            },
            None => return Ok(Deferral::ReadNow),
        };
        let number = self.files.len();
        self.files.push(DeferredFile { stamp, settled: false, source, places: Vec::new() });
        self.by_inode.insert(stamp.inode, number);
        Ok(Deferral::Deferred(number))
    }

    /// Assigns a deferred file to an entry.
    pub(super) fn note(&mut self, number: usize, place: Place, settled: bool) {
        let file = &mut self.files[number];
        file.settled = settled;
        file.places.push(place);
    }

    /// Stores all files, and completes the index.
    pub(super) fn resolve(
        self,
        index: &mut Index,
        driver: &mut dyn Driver,
        batch: &mut dyn ObjectBatch,
        stats: &mut CaptureStats,
    ) -> Result<()> {
        for DeferredFile { stamp, settled, source, places } in self.files {
            let Some((folder, name)) = places.first() else { continue };
            let path = || index.path(*folder, name);
            let read = match source {
                Source::Bytes(bytes) => read::content_of(&bytes, batch).map_err(|e| e.at(path))?,
                Source::HeldFile(held) => {
                    let whole = matches!(held, HeldFile::Within(_));
                    let file = driver.open(held)?;
                    let stat = beneath::look_at(&file).map_err(|e| WorkspaceError::of("look at", &path())(e))?;
                    let now = beneath::stamp(&stat);
                    // The snapshot is later than the check of this file.
                    if now.size != stamp.size || (whole && now != stamp) {
                        return Err(WorkspaceError::Changing { path: path() });
                    }
                    read::content(&file, stamp, batch).map_err(|e| e.at(path))?
                }
            };
            let Read::Content(content, bytes) = read else {
                return Err(WorkspaceError::Changing { path: path() });
            };
            stats.read += 1;
            stats.bytes += bytes;
            for (folder, name) in &places {
                index.set_content(*folder, name, stamp, &content, settled);
            }
        }
        Ok(())
    }
}
