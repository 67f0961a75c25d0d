//! Descriptors in tokio's event loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor watched by tokio. The inner descriptor cannot be exchanged.
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

/// Registers a descriptor with tokio. Must be called inside a runtime.
///
/// # Errors
/// If the descriptor cannot be watched.
pub fn watch(fd: impl Into<OwnedFd>, interest: Interest) -> io::Result<AsyncFd<Watched>> {
    // SAFETY: `Watched` owns its descriptor and always returns the same one. Its field is private
    // to this file, which never moves it out while it is watched.
    unsafe { AsyncFd::register_with_interest(Watched(fd.into()), interest) }.map_err(io::Error::from)
}
