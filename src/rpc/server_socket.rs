//! Listening on Unix sockets whose path may be longer than `sockaddr_un` holds.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

use super::worker_socket;

/// Binds a listener.
///
/// # Errors
/// Those of `bind`.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    worker_socket::listen(path)?.into_std()
}
