//! Notification of changes in directories (inotify).

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::fcntl::{OFlag, open};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::Mode;

use super::checked;

/// Created, removed, renamed, written, opened, closed after writing, or changed in its metadata.
const WATCHED: u32 = libc::IN_CREATE
    | libc::IN_DELETE
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_MODIFY
    | libc::IN_CLOSE_WRITE
    | libc::IN_ATTRIB
    | libc::IN_OPEN
    | libc::IN_ONLYDIR
    | libc::IN_EXCL_UNLINK;

/// Bytes read from the kernel at once: some hundred events.
const BUFFER: usize = 64 << 10;
/// Length of an event before its name.
const HEAD: usize = 16;

/// A queue of notifications.
#[derive(Debug)]
pub struct Notify {
    fd: OwnedFd,
    buffer: Box<[u8]>,
    marks: Option<Marks>,
}

/// Two files of our own; opening one marks a place in the queue. They alternate, because the kernel
/// merges two equal events in a row.
#[derive(Debug)]
struct Marks {
    files: [OwnedFd; 2],
    watches: [i32; 2],
    put: u64,
}

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    /// The queue overflowed: events are missing.
    Overflow,
    /// The watch has ended.
    Ended,
    /// A file's content changed.
    Content,
    /// A file that was open for writing was closed.
    Closed,
    /// Metadata changed.
    Changed,
    /// An entry appeared: created, linked or moved here.
    Came,
    /// An entry disappeared: removed or moved away.
    Went,
    /// A file was opened, with any access mode.
    Opened,
    /// A mark of [`Notify::mark`].
    Mark,
}

/// One event.
#[derive(Debug)]
pub struct Event<'a> {
    /// The watch of the event.
    pub watch: i32,
    /// The kind.
    pub deed: Deed,
    /// The entry's name; empty: the directory itself.
    pub name: &'a [u8],
    /// Whether the entry is a directory.
    pub is_folder: bool,
    /// The same value on both sides of a move; else 0.
    pub moved: u32,
}

impl Notify {
    /// Creates a queue.
    ///
    /// # Errors
    /// `EMFILE` if the user has reached the host's limit.
    pub fn new() -> io::Result<Notify> {
        // SAFETY: takes an integer, returns a new descriptor or an error.
        let fd = checked(i64::from(unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) }))?;
        // SAFETY: the descriptor was just returned; nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).map_err(io::Error::other)?) };
        Ok(Notify { fd, buffer: vec![0; BUFFER].into(), marks: None })
    }

    /// Puts a mark into the queue: all earlier events precede it. Returns the mark's number since
    /// [`Self::unmark`], from 1.
    ///
    /// # Errors
    /// If the host grants no descriptor or watch. There is no mark then.
    pub fn mark(&mut self) -> io::Result<u64> {
        if self.marks.is_none() {
            let file = || Ok::<_, io::Error>(memfd_create(c"ryokan-mark", MFdFlags::MFD_CLOEXEC)?);
            let files = [file()?, file()?];
            let watches = [self.watch(files[0].as_fd(), libc::IN_OPEN)?, self.watch(files[1].as_fd(), libc::IN_OPEN)?];
            self.marks = Some(Marks { files, watches, put: 0 });
        }
        let marks = self.marks.as_mut().ok_or(io::ErrorKind::Other)?;
        let file = &marks.files[(marks.put % 2) as usize];
        open(own(file.as_fd()).as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        marks.put += 1;
        Ok(marks.put)
    }

    /// Stops placing marks.
    pub fn unmark(&mut self) {
        if let Some(marks) = self.marks.take() {
            marks.watches.into_iter().for_each(|watch| self.remove(watch));
        }
    }

    /// Watches an open directory. The same directory keeps the same watch, whatever its name.
    ///
    /// # Errors
    /// `ENOSPC` if the user has reached the host's limit of watches.
    pub fn add(&self, dir: BorrowedFd<'_>) -> io::Result<i32> {
        self.watch(dir, WATCHED)
    }

    fn watch(&self, what: BorrowedFd<'_>, reported: u32) -> io::Result<i32> {
        let path = format!("{}\0", own(what));
        // SAFETY: the path ends with a zero byte and lives through the call.
        let watch = unsafe { libc::inotify_add_watch(self.fd.as_raw_fd(), path.as_ptr().cast(), reported) };
        checked(i64::from(watch)).map(|_| watch)
    }

    /// Ends a watch; succeeds if it has ended already.
    pub fn remove(&self, watch: i32) {
        // SAFETY: takes integers only.
        let _ = unsafe { libc::inotify_rm_watch(self.fd.as_raw_fd(), watch) };
    }

    /// Reads at most one buffer of queued events. Returns whether there were any.
    ///
    /// # Errors
    /// The kernel's errors.
    pub fn take(&mut self, mut event: impl FnMut(Event<'_>)) -> io::Result<bool> {
        let filled = match nix::unistd::read(&self.fd, &mut self.buffer) {
            Ok(count) => count,
            Err(nix::errno::Errno::EAGAIN) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let mut rest = &self.buffer[..filled];
        while let Some((head, tail)) = rest.split_at_checked(HEAD) {
            let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            let length = (word(12) as usize).min(tail.len());
            let name = tail[..length].split(|byte| *byte == 0).next().unwrap_or_default();
            let watch = word(0).cast_signed();
            let is_mark = self.marks.as_ref().is_some_and(|marks| marks.watches.contains(&watch));
            if let Some(deed) = if is_mark { Some(Deed::Mark) } else { deed(word(4)) } {
                event(Event { watch, deed, name, is_folder: word(4) & libc::IN_ISDIR != 0, moved: word(8) });
            }
            rest = &tail[length..];
        }
        Ok(filled > 0)
    }
}

impl AsFd for Notify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The `/proc` path of a descriptor.
fn own(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

fn deed(mask: u32) -> Option<Deed> {
    let has = |bits: u32| mask & bits != 0;
    if has(libc::IN_Q_OVERFLOW) {
        Some(Deed::Overflow)
    } else if has(libc::IN_IGNORED) {
        Some(Deed::Ended)
    } else if has(libc::IN_MODIFY) {
        // For a directory this only means that its times were set.
        Some(if has(libc::IN_ISDIR) { Deed::Changed } else { Deed::Content })
    } else if has(libc::IN_CLOSE_WRITE) {
        Some(Deed::Closed)
    } else if has(libc::IN_OPEN) {
        // Opening a directory changes nothing.
        (!has(libc::IN_ISDIR)).then_some(Deed::Opened)
    } else if has(libc::IN_CREATE | libc::IN_MOVED_TO) {
        Some(Deed::Came)
    } else if has(libc::IN_DELETE | libc::IN_MOVED_FROM) {
        Some(Deed::Went)
    } else {
        Some(Deed::Changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inotify_directory_events() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut notify = Notify::new().expect("a queue");
        let opened = std::fs::File::open(dir.path()).expect("opened");
        let watch = notify.add(opened.as_fd()).expect("watched");
        assert_eq!(notify.add(opened.as_fd()).expect("again"), watch);
        std::fs::write(dir.path().join("a"), "x").expect("written");
        let _ = std::fs::read(dir.path().join("a")).expect("read");
        std::fs::rename(dir.path().join("a"), dir.path().join("b")).expect("renamed");
        let mut seen = Vec::new();
        while notify.take(|e| seen.push((e.watch, e.deed, e.name.to_vec()))).expect("read") {}
        for (deed, name) in [
            (Deed::Content, "a"),
            (Deed::Closed, "a"),
            (Deed::Opened, "a"),
            (Deed::Came, "a"),
            (Deed::Went, "a"),
            (Deed::Came, "b"),
        ] {
            assert!(seen.contains(&(watch, deed, name.into())), "{deed:?} {name}: {seen:?}");
        }
        for mark in 1..=3 {
            let _ = std::fs::File::open(dir.path().join("b")).expect("opened");
            assert_eq!(notify.mark().expect("marked"), mark);
        }
        assert_eq!(notify.mark().expect("marked"), 4);
        let mut seen = Vec::new();
        while notify.take(|e| seen.push(e.deed)).expect("read") {}
        let (opened, mark) = (Deed::Opened, Deed::Mark);
        assert_eq!(seen, [opened, mark, opened, mark, opened, mark, mark], "also two marks in a row");
        notify.unmark();
        assert_eq!(notify.mark().expect("marked"), 1);
        notify.unmark();
        notify.remove(watch);
        let mut ended = false;
        while notify.take(|e| ended |= e.deed == Deed::Ended).expect("read") {}
        assert!(ended);
    }
}
