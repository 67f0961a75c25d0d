//! Unix sockets: descriptors in messages, and who the peer is.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, UnixCredentials, getsockopt, recvmsg, sendmsg, setsockopt, sockopt,
};

/// Descriptors in one message: more than any of our messages carries.
pub const FDS_MAX: usize = 8;

/// Who is at the other end, as the kernel noted it when the connection was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process.
    pub pid: i32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Who is at the other end.
///
/// # Errors
/// If this is no connected Unix socket.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let found = getsockopt(&socket, sockopt::PeerCredentials)?;
    Ok(Peer { pid: found.pid(), uid: found.uid(), gid: found.gid() })
}

/// Sends bytes and descriptors in one message; gives how many bytes went.
///
/// # Errors
/// What the kernel refuses. A closed peer is `EPIPE`, never a signal.
pub fn send_with_fds(socket: impl AsFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<usize> {
    let rights = [ControlMessage::ScmRights(fds)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let sent =
        sendmsg::<()>(socket.as_fd().as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(sent)
}

/// Receives bytes and the descriptors that came along (close-on-exec).
///
/// # Errors
/// What the kernel refuses; `EMSGSIZE` if bytes or descriptors were cut off.
pub fn receive_with_fds(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = nix::cmsg_space!([RawFd; FDS_MAX]);
    let mut parts = [IoSliceMut::new(bytes)];
    let received = recvmsg::<()>(socket.as_fd().as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = message {
            // SAFETY: the kernel has just installed these descriptors in our table; nobody else owns them.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if received.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    Ok((received.bytes, fds))
}

/// Has the kernel note with everything that arrives which process sent it.
///
/// # Errors
/// If this is no Unix socket.
pub fn note_senders(socket: impl AsFd) -> io::Result<()> {
    Ok(setsockopt(&socket, sockopt::PassCred, &true)?)
}

/// Receives bytes without waiting, and the number of the process that sent them, as the kernel noted it: in the receiver's PID
/// namespace, 0 for one outside of it. Needs [`note_senders`]. Descriptors that came along are closed.
///
/// # Errors
/// What the kernel refuses, and if it noted no sender.
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
                // SAFETY: the kernel has just installed these descriptors in our table; nobody else owns them.
                raw.into_iter().for_each(|fd| drop(unsafe { OwnedFd::from_raw_fd(fd) }));
            }
            _ => {}
        }
    }
    match (received.bytes, sender) {
        // The other end is closed: nobody sent that.
        (0, _) => Ok((0, 0)),
        (count, Some(pid)) => Ok((count, pid)),
        (_, None) => Err(io::Error::other("the kernel noted no sender")),
    }
}
