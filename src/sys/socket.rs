//! Unix sockets: descriptors in messages, and the peer's credentials.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, UnixCredentials, getsockopt, recvmsg, sendmsg, setsockopt, sockopt,
};

/// Descriptors per message: above the need of any of our messages.
pub const FDS_MAX: usize = 8;

/// The peer's credentials, recorded by the kernel at connection time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process.
    pub pid: i32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Reads the peer's credentials.
///
/// # Errors
/// If the socket is no connected Unix socket.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let found = getsockopt(&socket, sockopt::PeerCredentials)?;
    Ok(Peer { pid: found.pid(), uid: found.uid(), gid: found.gid() })
}

/// Sends bytes and descriptors in one message; returns the number of sent bytes.
///
/// # Errors
/// The kernel's errors. A closed peer is `EPIPE`, never a signal.
pub fn send_with_fds(socket: impl AsFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<usize> {
    let rights = [ControlMessage::ScmRights(fds)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let sent =
        sendmsg::<()>(socket.as_fd().as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(sent)
}

/// Receives bytes and the accompanying descriptors (close-on-exec).
///
/// # Errors
/// The kernel's errors; `EMSGSIZE` if bytes or descriptors were cut off.
pub fn receive_with_fds(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = nix::cmsg_space!([RawFd; FDS_MAX]);
    let mut parts = [IoSliceMut::new(bytes)];
    let received = recvmsg::<()>(socket.as_fd().as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = message {
            // SAFETY: the kernel has just installed these descriptors in our table; nothing else
            // owns them.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if received.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    Ok((received.bytes, fds))
}

/// Makes the kernel attach the sender's process id to everything received.
///
/// # Errors
/// If the socket is no Unix socket.
pub fn note_senders(socket: impl AsFd) -> io::Result<()> {
    Ok(setsockopt(&socket, sockopt::PassCred, &true)?)
}

/// Receives bytes without blocking, and the sender's process id as recorded by the kernel: in the
/// receiver's PID namespace, 0 for a process outside. Needs [`note_senders`]. Accompanying
/// descriptors are closed.
///
/// # Errors
/// The kernel's errors, and a missing sender.
pub fn receive_from(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, i32)> {
    let mut space = nix::cmsg_space!(UnixCredentials, [RawFd; FDS_MAX]);
    let mut parts = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let received = recvmsg::<()>(socket.as_fd().as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    let mut sender = None;
    for message in received.cmsgs()? {
        match message {
            ControlMessageOwned::ScmCredentials(found) => sender = Some(found.pid()),
            ControlMessageOwned::ScmRights(raw) => {
                // SAFETY: the kernel has just installed these descriptors in our table; nothing
                // else owns them.
                raw.into_iter().for_each(|fd| drop(unsafe { OwnedFd::from_raw_fd(fd) }));
            }
            _ => {}
        }
    }
    match (received.bytes, sender) {
        // The peer closed the connection: there is no sender.
        (0, _) => Ok((0, 0)),
        (count, Some(pid)) => Ok((count, pid)),
        (_, None) => Err(io::Error::other("the kernel noted no sender")),
    }
}
