//! Descriptors on the event loop.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the event loop. For reads and writes it should be non-blocking.
///
/// # Errors
/// Those of the registration.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    try_watch(fd, interest).map_err(|(_, error)| error)
}

/// As [`watch`]; a descriptor that cannot be watched (a regular file) comes back.
///
/// # Errors
/// The descriptor and why.
pub fn try_watch(fd: OwnedFd, interest: Interest) -> Result<AsyncFd<OwnedFd>, (OwnedFd, io::Error)> {
    // SAFETY: an `OwnedFd` is open, stays open until it is dropped with the `AsyncFd` that owns it, and always gives the same number.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(tokio::io::unix::AsyncFdRegisterError::into_parts)
}
