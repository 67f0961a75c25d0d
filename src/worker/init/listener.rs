//! The private socket and the descriptor socket: who may connect, and a Cap'n Proto system per
//! connection. Runs in init.
//!
//! The outer process creates the sockets as the daemon's user with mode 0600, before it drops
//! rights. A peer must be the daemon's user, and is disconnected unless it proves the worker's
//! secret in time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener as StdListener;
use std::path::Path;
use std::rc::Rc;

use nix::sys::socket::Backlog;
use nix::sys::stat::{Mode, umask};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use crate::core::limits;
use crate::link::connector::DescriptorNote;
use crate::link::connector::unix;
use crate::link::guest::{WorkerCall, serve_connection};
use crate::link::handshake::{Role, SharedIdentity};
use crate::sys::socket::{peer, receive_with_fds};

/// Both sockets, listening.
#[derive(Debug)]
pub struct Sockets {
    /// For Cap'n Proto.
    pub calls: StdListener,
    /// For descriptors.
    pub descriptors: StdListener,
}

impl Sockets {
    /// Creates both sockets for the calling user only, replacing those of a dead worker.
    ///
    /// # Errors
    /// The errors of `bind`.
    pub fn bind(path: &Path) -> io::Result<Sockets> {
        let before = umask(Mode::from_bits_truncate(0o177));
        let listen = |path: &Path| {
            let _ = std::fs::remove_file(path);
            unix::listen(path)
        };
        let bound = listen(path).and_then(|calls| Ok((calls, listen(&unix::descriptor_path(path))?)));
        umask(before);
        let (calls, descriptors) = bound?;
        Ok(Sockets { calls, descriptors })
    }

    /// Both descriptors, which must stay open on the way into the sandbox.
    pub fn fds(&self) -> [std::os::fd::BorrowedFd<'_>; 2] {
        [self.calls.as_fd(), self.descriptors.as_fd()]
    }

    /// Removes the sockets' names, as far as this user may.
    pub fn unlink(path: &Path) {
        let _ = std::fs::remove_file(path);
        let _ = std::fs::remove_file(unix::descriptor_path(path));
    }
}

/// Received, unused descriptors; the oldest is evicted when full.
#[derive(Debug, Clone, Default)]
pub struct Descriptors {
    held: Rc<RefCell<VecDeque<(u64, OwnedFd)>>>,
}

impl Descriptors {
    fn hold(&self, token: u64, descriptor: OwnedFd) {
        let mut held = self.held.borrow_mut();
        if held.len() >= limits::WORKER_DESCRIPTORS {
            held.pop_front();
        }
        held.push_back((token, descriptor));
    }

    /// Takes the descriptor of that token.
    pub fn take(&self, token: u64) -> Option<OwnedFd> {
        let mut held = self.held.borrow_mut();
        let at = held.iter().position(|(of, _)| *of == token)?;
        held.remove(at).map(|(_, descriptor)| descriptor)
    }
}

/// The peers allowed, and where their messages go.
pub struct Door {
    /// The identity that both ends must prove.
    pub identity: SharedIdentity,
    /// The daemon's uid in init's namespace.
    pub daemon_uid: u32,
    /// Receives calls.
    pub calls: mpsc::Sender<WorkerCall>,
    /// Receives descriptors.
    pub descriptors: Descriptors,
}

/// Accepts connections until the task is dropped.
///
/// # Errors
/// If the sockets cannot be watched.
pub async fn serve(sockets: Sockets, door: Door) -> io::Result<()> {
    let Sockets { calls, descriptors } = sockets;
    // The kernel records the listening process at `listen`: from here on peers see init, not the
    // outer process.
    nix::sys::socket::listen(&calls, Backlog::MAXCONN)?;
    calls.set_nonblocking(true)?;
    descriptors.set_nonblocking(true)?;
    let (calls, descriptors) = (UnixListener::from_std(calls)?, UnixListener::from_std(descriptors)?);
    let (door, open) = (Rc::new(door), Rc::new(Cell::new(0usize)));
    for connection in 1u64.. {
        let (stream, for_calls) = tokio::select! {
            accepted = calls.accept() => (accepted, true),
            accepted = descriptors.accept() => (accepted, false),
        };
        let stream = match stream {
            Ok((stream, _)) => stream,
            // Out of descriptors: an open one must close first.
            Err(_) => {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                continue;
            }
        };
        let stranger = peer(&stream).map_or(true, |peer| peer.uid != door.daemon_uid);
        if stranger || open.get() >= limits::WORKER_CONNECTIONS {
            tracing::warn!(stranger, "a connection is refused");
            continue;
        }
        let (door, place) = (door.clone(), Place::take(&open));
        tokio::task::spawn_local(async move {
            match for_calls {
                true => serve_connection(connection, stream, door.identity.now(), door.calls.clone()).await,
                false => {
                    let taking = take_descriptor(stream, &door);
                    let _ = tokio::time::timeout(limits::CLIENT_HELLO, taking).await;
                }
            }
            drop(place);
        });
    }
    Ok(())
}

/// An open connection.
struct Place(Rc<Cell<usize>>);

impl Place {
    fn take(open: &Rc<Cell<usize>>) -> Place {
        open.set(open.get() + 1);
        Place(open.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

async fn take_descriptor(mut stream: UnixStream, door: &Door) -> io::Result<()> {
    let mut bytes = [0; DescriptorNote::BYTES];
    let receive = || receive_with_fds(&stream, &mut bytes);
    stream.readable().await?;
    let (n, mut fds) = stream.async_io(Interest::READABLE, receive).await?;
    let note = DescriptorNote::from_bytes(&bytes);
    let proven = door.identity.now().verify(Role::Descriptor, &note.token.to_le_bytes(), b"", &note.proof);
    match (fds.pop(), fds.is_empty()) {
        (Some(descriptor), true) if n == bytes.len() && proven => {
            door.descriptors.hold(note.token, descriptor);
            stream.write_all(&[1]).await
        }
        _ => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
    }
}
