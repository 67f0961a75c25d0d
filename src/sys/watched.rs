//! Descriptors in tokio's event loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor that tokio watches. What is in it cannot be exchanged.
#[derive(Debug)]
pub struct Watched(OwnedFd);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Watched {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Has tokio watch a descriptor. Must be called inside a runtime.
///
/// # Errors
/// If it is of a kind that cannot be watched.
pub fn watch(fd: impl Into<OwnedFd>, interest: Interest) -> io::Result<AsyncFd<Watched>> {
    // SAFETY: `Watched` owns its descriptor, always gives the same one, and nothing can be moved out of it while it is
    // watched: its field is private to this file, which does not touch it.
    unsafe { AsyncFd::register_with_interest(Watched(fd.into()), interest) }.map_err(io::Error::from)
}
