//! Changes in a directory of a workspace, as they happen.
//!
//! Every directory is opened as a client's access opens it, and watched by its descriptor: what code inside renames
//! meanwhile leads nowhere else.

use std::collections::{HashMap, HashSet};
use std::fs::read_dir;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::beneath;
use super::files::{LocalFiles, READ, Root, refusal};
use crate::core::error::{Error, Result};
use crate::core::files::{FileEvent, FileEventKind, FilePath};
use crate::core::limits;
use crate::sys::notify::{Deed, Notify};

/// Events of one batch: those of a read, and the entries of directories that have appeared.
const MOST: usize = 4 * limits::FILE_EVENT_BATCH;

/// A watched directory. All calls block, briefly.
pub struct Watch {
    files: LocalFiles,
    base: FilePath,
    is_recursive: bool,
    notify: Notify,
    /// The names of each watched directory, relative to `base`.
    dirs: HashMap<i32, Vec<Vec<u8>>>,
    /// Device and inode of the watched directory.
    identity: (u64, u64),
    has_more: bool,
    has_ended: bool,
}

/// What one read of the queue brought.
struct Seen {
    watch: i32,
    deed: Deed,
    name: Vec<u8>,
    is_folder: bool,
}

/// Events without repetitions, a bounded number.
#[derive(Default)]
struct Batch {
    events: Vec<FileEvent>,
    known: HashSet<FileEvent>,
    /// Entries of directories that were read for it.
    visited: usize,
    has_overflow: bool,
}

impl Batch {
    fn add(&mut self, kind: FileEventKind, names: &[Vec<u8>]) {
        if self.events.len() >= MOST {
            self.has_overflow = true;
            return;
        }
        let event = FileEvent { kind, path: names.join(&b'/') };
        // A file that is made anew is another one.
        if kind == FileEventKind::Created || kind == FileEventKind::Removed {
            self.known.retain(|known| known.path != event.path);
        }
        if self.known.insert(event.clone()) {
            self.events.push(event);
        }
    }
}

impl Watch {
    /// Watches a directory, and with `is_recursive` all directories below it.
    ///
    /// # Errors
    /// A [`FileError`](crate::core::files::FileError); `refused` (`watch_size`) for too many directories; `busy` if the
    /// host grants no more watches.
    pub fn open(files: LocalFiles, base: FilePath, is_recursive: bool) -> Result<Watch> {
        let notify = Notify::new().map_err(|error| exhausted(&error))?;
        let root = files.root()?;
        let dir = root.resolve(base.names(), OFlag::O_DIRECTORY, &base.shown())?;
        let identity = identity(&dir).map_err(|error| refusal(error, &base.shown()))?;
        root.permit(dir.as_fd(), READ, &base.shown())?;
        let (dirs, has_more, has_ended) = (HashMap::new(), false, false);
        let mut watch = Watch { files, base, is_recursive, notify, dirs, identity, has_more, has_ended };
        // What is there already is no event.
        watch.add(&root, Vec::new(), &mut Batch::default())?;
        Ok(watch)
    }

    /// A descriptor that becomes readable with new events.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn readiness(&self) -> std::io::Result<OwnedFd> {
        self.notify.as_fd().try_clone_to_owned()
    }

    /// Whether the last call of [`Self::take`] left events, of which the descriptor gives no sign.
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// The events since the last call, a bounded number. After [`FileEventKind::Ended`] there are none.
    ///
    /// # Errors
    /// Those of the queue.
    pub fn take(&mut self) -> Result<Vec<FileEvent>> {
        let (mut batch, mut seen) = (Batch::default(), Vec::new());
        if self.has_ended {
            return Ok(Vec::new());
        }
        // A directory that was replaced has no events of its own.
        self.has_ended = !self.is_current();
        self.has_more = false;
        while !self.has_ended {
            if batch.events.len() >= limits::FILE_EVENT_BATCH {
                self.has_more = true;
                break;
            }
            let more = self.notify.take(|event| {
                let name = event.name.to_vec();
                seen.push(Seen { watch: event.watch, deed: event.deed, name, is_folder: event.is_folder });
            });
            if !more.map_err(|error| Error::unavailable(format!("the watch cannot be read: {error}")))? {
                break;
            }
            for one in seen.drain(..) {
                self.report(one, &mut batch);
            }
        }
        if batch.has_overflow {
            batch.events.push(FileEvent { kind: FileEventKind::Overflow, path: Vec::new() });
        }
        if self.has_ended {
            batch.events.push(FileEvent { kind: FileEventKind::Ended, path: Vec::new() });
        }
        Ok(batch.events)
    }

    fn is_current(&self) -> bool {
        let Ok(root) = self.files.root() else { return false };
        let Ok(dir) = root.try_resolve(self.base.names(), OFlag::O_DIRECTORY) else { return false };
        identity(&dir).is_ok_and(|found| found == self.identity)
    }

    fn report(&mut self, seen: Seen, batch: &mut Batch) {
        if seen.deed == Deed::Overflow {
            batch.has_overflow = true;
            return;
        }
        let Some(dir) = self.dirs.get(&seen.watch).cloned() else { return };
        if seen.deed == Deed::Ended {
            self.dirs.remove(&seen.watch);
            self.has_ended |= dir.is_empty();
            return;
        }
        let names = match seen.name.is_empty() {
            true => dir,
            false => [dir, vec![seen.name]].concat(),
        };
        match seen.deed {
            Deed::Content => batch.add(FileEventKind::Written, &names),
            Deed::Closed => batch.add(FileEventKind::Closed, &names),
            Deed::Changed => batch.add(FileEventKind::Changed, &names),
            Deed::Came => {
                batch.add(FileEventKind::Created, &names);
                if seen.is_folder && self.is_recursive {
                    self.follow(names, batch);
                }
            }
            Deed::Went => {
                if seen.is_folder {
                    self.leave(&names);
                }
                batch.add(FileEventKind::Removed, &names);
            }
            Deed::Overflow | Deed::Ended | Deed::Opened | Deed::Mark => {}
        }
    }

    /// Watches a directory that has appeared, and reports what it holds already. If that is too much, the watch ends: it
    /// would miss later changes without a sign.
    fn follow(&mut self, names: Vec<Vec<u8>>, batch: &mut Batch) {
        let added = self.files.root().and_then(|root| self.add(&root, names, batch));
        if let Err(error) = added {
            tracing::debug!(%error, "a watch of files ends");
            (batch.has_overflow, self.has_ended) = (true, true);
        }
    }

    /// Ends the watches of a directory that was moved away.
    fn leave(&mut self, names: &[Vec<u8>]) {
        let gone: Vec<i32> =
            self.dirs.iter().filter(|(_, dir)| dir.starts_with(names)).map(|(watch, _)| *watch).collect();
        for watch in gone {
            self.notify.remove(watch);
            self.dirs.remove(&watch);
        }
    }

    /// Watches a directory and, if asked, those below it; reports their entries to `found`.
    ///
    /// # Errors
    /// As [`Self::open`].
    fn add(&mut self, root: &Root, names: Vec<Vec<u8>>, found: &mut Batch) -> Result<()> {
        let mut waiting = vec![names];
        while let Some(names) = waiting.pop() {
            let full = [self.base.names(), &names].concat();
            // A link is an entry, not a directory; the watched directory itself may be reached by one.
            let flags = if names.is_empty() { OFlag::O_DIRECTORY } else { OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW };
            let dir = match root.try_resolve(&full, flags) {
                Ok(dir) => dir,
                // Gone, no directory, or a mount of the host.
                Err(_) if !names.is_empty() => continue,
                Err(error) => return Err(refusal(error, &self.base.shown())),
            };
            // What its owner could not read is not reported.
            if !names.is_empty() && root.permit(dir.as_fd(), READ, "").is_err() {
                continue;
            }
            if self.dirs.len() >= limits::WATCHED_DIRECTORIES {
                return Err(self.too_large(limits::WATCHED_DIRECTORIES, "directories"));
            }
            let watch = match self.notify.add(dir.as_fd()) {
                Ok(watch) => watch,
                Err(error) if error.raw_os_error() == Some(Errno::ENOSPC as i32) => return Err(exhausted(&error)),
                Err(_) if !names.is_empty() => continue,
                Err(error) => return Err(Error::unavailable(format!("{}: {error}", self.base.shown()))),
            };
            self.dirs.insert(watch, names.clone());
            if !self.is_recursive {
                continue;
            }
            // After the watch: what comes between is reported twice.
            for entry in read_dir(beneath::proc_path(dir.as_fd())).into_iter().flatten().flatten() {
                found.visited += 1;
                if found.visited > limits::WATCHED_ENTRIES {
                    return Err(self.too_large(limits::WATCHED_ENTRIES, "files"));
                }
                let below = [names.clone(), vec![entry.file_name().into_vec()]].concat();
                found.add(FileEventKind::Created, &below);
                // A link is none.
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    waiting.push(below);
                }
            }
        }
        Ok(())
    }

    fn too_large(&self, most: usize, what: &str) -> Error {
        Error::refused(format!("{} has more than {most} {what} to watch", self.base.shown()))
            .reason("watch_size")
            .hint("watch a directory with fewer of them, or without those below it")
    }
}

fn identity(dir: &OwnedFd) -> nix::Result<(u64, u64)> {
    let stat = beneath::look_at(dir)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn exhausted(error: &std::io::Error) -> Error {
    Error::busy(format!("this host grants no more watches: {error}"))
        .reason("watches")
        .hint("raise fs.inotify.max_user_watches and fs.inotify.max_user_instances")
}
