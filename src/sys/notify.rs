//! Notification of changes in directories (inotify).

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use super::checked;

/// Something was created, removed, renamed, written, opened, closed after writing, or its metadata changed.
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

/// Bytes taken from the kernel at once: some hundreds of events.
const BUFFER: usize = 64 << 10;
/// Bytes of an event before its name.
const HEAD: usize = 16;

/// One queue of notifications.
#[derive(Debug)]
pub struct Notify {
    fd: OwnedFd,
    buffer: Box<[u8]>,
}

/// What an event says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    /// The queue was full: events are missing.
    Overflow,
    /// The watch is no more.
    Ended,
    /// The content of a file changed.
    Content,
    /// A file that was open for writing was closed.
    Closed,
    /// A name or metadata changed.
    Name,
    /// A file was opened, who knows how.
    Opened,
}

/// One event.
#[derive(Debug)]
pub struct Event<'a> {
    /// The watch it belongs to.
    pub watch: i32,
    /// What happened.
    pub deed: Deed,
    /// To which entry of the directory; empty: to the directory itself.
    pub name: &'a [u8],
}

impl Notify {
    /// A new queue.
    ///
    /// # Errors
    /// `EMFILE` if the user has as many as the host allows.
    pub fn new() -> io::Result<Notify> {
        // SAFETY: takes an integer, returns a new descriptor or an error.
        let fd = checked(i64::from(unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) }))?;
        // SAFETY: it was just returned and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).map_err(io::Error::other)?) };
        Ok(Notify { fd, buffer: vec![0; BUFFER].into() })
    }

    /// Watches an open directory. The same directory has the same watch, whatever its name.
    ///
    /// # Errors
    /// `ENOSPC` if the user has as many watches as the host allows.
    pub fn add(&self, dir: BorrowedFd<'_>) -> io::Result<i32> {
        let path = format!("/proc/self/fd/{}\0", dir.as_raw_fd());
        // SAFETY: the path ends with a zero byte and lives through the call.
        let watch = unsafe { libc::inotify_add_watch(self.fd.as_raw_fd(), path.as_ptr().cast(), WATCHED) };
        checked(i64::from(watch)).map(|_| watch)
    }

    /// Ends a watch; one that has ended is fine.
    pub fn remove(&self, watch: i32) {
        // SAFETY: takes integers only.
        let _ = unsafe { libc::inotify_rm_watch(self.fd.as_raw_fd(), watch) };
    }

    /// Takes what is queued, at most one buffer. Says whether there was anything.
    ///
    /// # Errors
    /// What the kernel refuses.
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
            if let Some(deed) = deed(word(4)) {
                event(Event { watch: word(0).cast_signed(), deed, name });
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

fn deed(mask: u32) -> Option<Deed> {
    let has = |bits: u32| mask & bits != 0;
    if has(libc::IN_Q_OVERFLOW) {
        Some(Deed::Overflow)
    } else if has(libc::IN_IGNORED) {
        Some(Deed::Ended)
    } else if has(libc::IN_MODIFY) {
        Some(Deed::Content)
    } else if has(libc::IN_CLOSE_WRITE) {
        Some(Deed::Closed)
    } else if has(libc::IN_OPEN) {
        // Opening a directory changes nothing.
        (!has(libc::IN_ISDIR)).then_some(Deed::Opened)
    } else {
        Some(Deed::Name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_in_a_directory_is_told() {
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
        for (deed, name) in
            [(Deed::Content, "a"), (Deed::Closed, "a"), (Deed::Opened, "a"), (Deed::Name, "a"), (Deed::Name, "b")]
        {
            assert!(seen.contains(&(watch, deed, name.into())), "{deed:?} {name}: {seen:?}");
        }
        notify.remove(watch);
        let mut ended = false;
        while notify.take(|e| ended |= e.deed == Deed::Ended).expect("read") {}
        assert!(ended);
    }
}
