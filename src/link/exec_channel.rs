//! The lane: beside the calls of a worker's link, a socket for what is asked most often, an execution's start and its end.
//!
//! ```text
//! daemon ── hold ─────▶ init       on its way while the journal is written
//!        ── go ───────▶            it is: begin
//!        ── withdraw ─▶            it is not to run
//!        ◀── answer ──             runs │ over, with all that it wrote │ refused
//! ```
//! One message (`LaneCall`, `LaneAnswer` of schema/worker.capnp) is one packet, so nothing is to be cut or joined, and both ends read and
//! write it where they stand: no queue, no other task, no bookkeeping of calls. What is too large for a packet is a call.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::task::{Context, Poll, ready};

use capnp::message::{Builder, HeapAllocator, ReaderOptions};
use capnp::{Word, serialize};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::core::limits;
use crate::sys::watched::{Watched, watch};

/// One end.
#[derive(Debug)]
pub struct Lane {
    socket: AsyncFd<Watched>,
}

/// Both ends of a new lane. Must be called inside a runtime.
///
/// # Errors
/// If there are no descriptors left.
pub fn pair() -> io::Result<(Lane, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
    Ok((Lane::new(ours)?, theirs))
}

thread_local! {
    /// Where a packet is read: one for all lanes of a thread, which reads one at a time.
    static PACKET: RefCell<Vec<Word>> = RefCell::new(Word::allocate_zeroed_vec(limits::EXEC_CHANNEL_BYTES / 8));
}

impl Lane {
    /// Takes over one end. Must be called inside a runtime.
    ///
    /// # Errors
    /// If it cannot be watched.
    pub fn new(socket: OwnedFd) -> io::Result<Lane> {
        // Here nobody waits for its memory yet.
        PACKET.with(|_| ());
        Ok(Lane { socket: watch(socket, Interest::READABLE)? })
    }

    /// Sends a message; whether it was small enough for that. Never waits.
    ///
    /// # Errors
    /// If the other end is gone, or has not read for so long that there is no room.
    pub(crate) fn send(&self, message: &Builder<HeapAllocator>) -> io::Result<bool> {
        if serialize::compute_serialized_size_in_words(message) * 8 > limits::EXEC_CHANNEL_BYTES {
            return Ok(false);
        }
        let bytes = serialize::write_message_to_words(message);
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        loop {
            match send(self.socket.as_raw_fd(), &bytes, flags) {
                Ok(_) => return Ok(true),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for a message and gives it to `read`.
    ///
    /// # Errors
    /// If the other end is gone or what came is no message; those of `read`.
    pub(crate) fn poll_message<T>(&self, cx: &mut Context<'_>, read: impl Read<T>) -> Poll<capnp::Result<T>> {
        loop {
            let mut guard = ready!(self.socket.poll_read_ready(cx)).map_err(capnp::Error::from)?;
            match self.message_now(&read) {
                Ok(Some(message)) => return Poll::Ready(Ok(message)),
                Ok(None) => guard.clear_ready(),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// The next message, if it is there, known to the event loop or not.
    ///
    /// # Errors
    /// As [`Self::poll_message`].
    pub(crate) fn message_now<T>(&self, read: &impl Read<T>) -> capnp::Result<Option<T>> {
        PACKET.with_borrow_mut(|packet| {
            let bytes = Word::words_to_bytes_mut(packet);
            let length = loop {
                match recv(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC) {
                    Ok(0) => return Err(capnp::Error::disconnected("the other end of the lane is gone".into())),
                    Ok(n) => break n,
                    Err(Errno::EINTR) => {}
                    Err(Errno::EAGAIN) => return Ok(None),
                    Err(error) => return Err(io::Error::from(error).into()),
                }
            };
            let Some(mut whole) = bytes.get(..length) else {
                return Err(capnp::Error::failed(format!("a packet of {length} bytes on the lane")));
            };
            let mut options = ReaderOptions::new();
            options.traversal_limit_in_words(Some(limits::EXEC_CHANNEL_BYTES));
            let message = serialize::read_message_from_flat_slice(&mut whole, options)?;
            read(&message).map(Some)
        })
    }
}

/// What makes something of a message.
pub(crate) trait Read<T>: Fn(&Message<'_>) -> capnp::Result<T> {}
impl<T, F: Fn(&Message<'_>) -> capnp::Result<T>> Read<T> for F {}

/// A message in its packet.
pub(crate) type Message<'a> = capnp::message::Reader<serialize::BufferSegments<&'a [u8]>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::schema::worker_capnp::lane_call;

    fn go(exec: u64) -> Builder<HeapAllocator> {
        let mut message = Builder::new_default();
        message.init_root::<lane_call::Builder<'_>>().set_go(exec);
        message
    }

    fn number(message: &Message<'_>) -> capnp::Result<u64> {
        match message.get_root::<lane_call::Reader<'_>>()?.which()? {
            lane_call::Go(exec) => Ok(exec),
            _ => Err(capnp::Error::failed("another message".into())),
        }
    }

    #[tokio::test]
    async fn lane_messages_arrive_in_order() {
        let (here, there) = pair().expect("a lane");
        let there = Lane::new(there).expect("its other end");
        assert!(there.message_now(&number).expect("open").is_none());
        for exec in 1..=3 {
            assert!(here.send(&go(exec)).expect("sent"));
        }
        assert_eq!(there.message_now(&number).expect("open"), Some(1));
        for exec in 2..=3 {
            let read = std::future::poll_fn(|cx| there.poll_message(cx, number)).await;
            assert_eq!(read.expect("a message"), exec);
        }
        drop(here);
        assert!(std::future::poll_fn(|cx| there.poll_message(cx, number)).await.is_err(), "its end is seen");
    }

    #[tokio::test]
    async fn invalid_lane_message_is_refused() {
        let (here, there) = pair().expect("a lane");
        let there = Lane::new(there).expect("its other end");
        let mut large = Builder::new_default();
        large
            .init_root::<lane_call::Builder<'_>>()
            .init_start()
            .set_request_json(&vec![b'x'; limits::EXEC_CHANNEL_BYTES]);
        assert!(!here.send(&large).expect("not sent"));
        for garbage in [&[0xff; 64][..], b"GET / HTTP/1.1", &[0; 7], &vec![0; limits::EXEC_CHANNEL_BYTES + 8]] {
            send(here.socket.as_raw_fd(), garbage, MsgFlags::empty()).expect("sent");
            assert!(there.message_now(&number).is_err(), "{} bytes", garbage.len());
        }
        assert!(here.send(&go(7)).expect("sent"));
        assert_eq!(there.message_now(&number).expect("open"), Some(7));
    }

    #[tokio::test]
    async fn full_lane_never_blocks() {
        let (here, _there) = pair().expect("a lane");
        assert!((0..1_000_000).any(|exec| here.send(&go(exec)).is_err()));
    }
}
