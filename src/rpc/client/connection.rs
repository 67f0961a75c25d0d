//! One connection: connects within a deadline, drives the protocol, and distinguishes a lost
//! connection from a failed call.

use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use capnp::capability::FromClientHook;
use capnp_rpc::{RpcSystem, rpc_twoparty_capnp, twoparty};
use tokio::net::UnixStream;
use tokio::task::{JoinHandle, LocalSet};

use crate::core::error::{Error, ErrorCode, Result};
use crate::core::limits;
use crate::link::connector::halves::halves;
use crate::rpc::convert::{AFTER_A_LOSS, from_capnp, reader_options};

/// Runs a future that uses clients, on a single-threaded runtime with a [`LocalSet`].
///
/// Blocking reads that are pending when the future ends (standard input, for example) are
/// abandoned.
///
/// # Errors
/// If the operating system provides no runtime.
pub fn run_local<F: Future>(future: F) -> io::Result<F::Output> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let output = LocalSet::new().block_on(&runtime, future);
    runtime.shutdown_background();
    Ok(output)
}

/// Connects to a Unix socket within `deadline`, also by a path longer than a socket address holds.
///
/// # Errors
/// [`ErrorCode::Unavailable`] if no process answers; [`ErrorCode::Refused`] if the caller may not
/// use the socket.
pub async fn connect_stream(path: &Path, deadline: Duration) -> Result<UnixStream> {
    match tokio::time::timeout(deadline, connect_any_length(path)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(e)) if e.kind() == io::ErrorKind::PermissionDenied => {
            Err(Error::refused(format!("may not connect to {}: {e}", path.display()))
                .hint("the socket belongs to another user"))
        }
        Ok(Err(e)) => Err(Error::unavailable(format!("no daemon answers on {}: {e}", path.display()))
            .hint("start ryokand, or name its socket with --socket")),
        Err(_) => Err(Error::unavailable(format!("the daemon on {} did not accept in {deadline:?}", path.display()))
            .hint("it is overloaded or stopped: see its log")),
    }
}

async fn connect_any_length(path: &Path) -> io::Result<UnixStream> {
    /// `sun_path` with its terminating zero.
    const SUN_PATH: usize = 108;
    if path.as_os_str().len() < SUN_PATH {
        return UnixStream::connect(path).await;
    }
    let not_a_file = || io::Error::new(io::ErrorKind::InvalidInput, "the path names no file");
    let folder = path.parent().ok_or_else(not_a_file)?;
    let name = path.file_name().ok_or_else(not_a_file)?;
    let folder = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(folder)?;
    let short: PathBuf = ["/proc/self/fd", &folder.as_raw_fd().to_string()].iter().collect();
    UnixStream::connect(short.join(name)).await
}

/// Drives the protocol of one connection while a client uses it.
pub(super) struct Link {
    driver: JoinHandle<()>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Link {
    /// Starts the protocol on a connected stream and returns the peer's bootstrap capability.
    ///
    /// # Errors
    /// `unavailable` if the socket cannot be watched.
    pub fn start<C: FromClientHook>(stream: UnixStream) -> Result<(Rc<Link>, C)> {
        let (read, write) = halves(stream).map_err(|e| Error::unavailable(format!("the connection: {e}")))?;
        let mut network = twoparty::VatNetwork::new(
            futures::io::BufReader::new(read),
            futures::io::BufWriter::new(write),
            rpc_twoparty_capnp::Side::Client,
            reader_options(),
        );
        network.set_window_size(limits::CHUNK_BYTES);
        let mut system = RpcSystem::new(Box::new(network), None);
        let bootstrap = system.bootstrap(rpc_twoparty_capnp::Side::Server);
        let driver = tokio::task::spawn_local(async move {
            if let Err(error) = system.await {
                tracing::debug!(%error, "connection ended");
            }
        });
        Ok((Rc::new(Link { driver }), bootstrap))
    }

    /// Waits for an answer that does not depend on running code.
    pub async fn call<T>(&self, promise: impl Future<Output = capnp::Result<T>>) -> Result<T> {
        self.call_within(limits::CLIENT_CALL, promise).await
    }

    /// Waits at most `deadline` for an answer.
    pub async fn call_within<T>(
        &self,
        deadline: Duration,
        promise: impl Future<Output = capnp::Result<T>>,
    ) -> Result<T> {
        match tokio::time::timeout(deadline, promise).await {
            Ok(answer) => answer.map_err(|e| self.failure(e)),
            Err(_) => Err(Error::deadline(format!("the daemon gave no answer in {deadline:?}"))
                .hint("it is overloaded or hangs: see its log")),
        }
    }

    /// Waits for an answer without a deadline: for calls whose duration depends on code or files.
    pub async fn wait<T>(&self, promise: impl Future<Output = capnp::Result<T>>) -> Result<T> {
        promise.await.map_err(|e| self.failure(e))
    }

    /// Whether the connection has ended.
    pub fn is_lost(&self) -> bool {
        self.driver.is_finished()
    }

    /// The error of a failed call. On a dead connection every error means a lost connection.
    pub fn failure(&self, exception: capnp::Error) -> Error {
        let error = from_capnp(exception);
        match error.code {
            ErrorCode::Internal if self.is_lost() => lost_connection(&error.message),
            ErrorCode::Internal
            | ErrorCode::InvalidArgument
            | ErrorCode::NotFound
            | ErrorCode::AlreadyExists
            | ErrorCode::Conflict
            | ErrorCode::Refused
            | ErrorCode::Busy
            | ErrorCode::Unsupported
            | ErrorCode::Departed
            | ErrorCode::Lost
            | ErrorCode::Corrupt
            | ErrorCode::Deadline
            | ErrorCode::Unavailable => error,
        }
    }
}

/// The error of every call on a dead connection.
pub(super) fn lost_connection(why: &str) -> Error {
    Error::unavailable(format!("the connection to ryokand was lost: {why}")).hint(AFTER_A_LOSS)
}

/// The fields of an answer.
pub(super) fn fields<T>(reader: capnp::Result<T>) -> Result<T> {
    reader.map_err(|e| Error::internal(format!("the daemon's answer is malformed: {e}")))
}

/// Reports malformed data in an answer as the daemon's fault, not as an invalid argument of the
/// caller.
pub(super) fn answer<T>(read: Result<T>) -> Result<T> {
    read.map_err(|error| match error.code {
        ErrorCode::InvalidArgument => Error {
            code: ErrorCode::Internal,
            message: format!("the daemon's answer is malformed: {}", error.message),
            ..error
        },
        ErrorCode::NotFound
        | ErrorCode::AlreadyExists
        | ErrorCode::Conflict
        | ErrorCode::Refused
        | ErrorCode::Busy
        | ErrorCode::Unsupported
        | ErrorCode::Departed
        | ErrorCode::Lost
        | ErrorCode::Corrupt
        | ErrorCode::Deadline
        | ErrorCode::Unavailable
        | ErrorCode::Internal => error,
    })
}
