//! The execution channel: a socket beside the worker's link for the start and end of executions.
//!
//! ```text
//! daemon ── prepare ──▶ init       sent while the journal is written
//!        ── commit ────▶            the journal has it: begin
//!        ── abort ─────▶            do not run it
//!        ◀── answer ───             running │ finished, with all output │ refused
//! ```
//! One message (`ExecChannelCall`, `ExecChannelAnswer` of schema/worker.capnp) is one packet. Both
//! ends read and write packets directly: no queue, no extra task, no call bookkeeping. A message
//! that is too large for a packet goes as an ordinary call.

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

/// One end of an execution channel.
#[derive(Debug)]
pub struct ExecChannel {
    socket: AsyncFd<Watched>,
}

/// Creates both ends of a new execution channel. Must be called inside a runtime.
///
/// # Errors
/// If no descriptors are left.
pub fn pair() -> io::Result<(ExecChannel, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
    Ok((ExecChannel::new(ours)?, theirs))
}

thread_local! {
    /// The packet buffer, shared by all channels of a thread: a thread reads one packet at a time.
    static PACKET: RefCell<Vec<Word>> = RefCell::new(Word::allocate_zeroed_vec(limits::EXEC_CHANNEL_BYTES / 8));
}

impl ExecChannel {
    /// Wraps one end. Must be called inside a runtime.
    ///
    /// # Errors
    /// If it cannot be watched.
    pub fn new(socket: OwnedFd) -> io::Result<ExecChannel> {
        // Allocate the buffer now, while no execution waits for it.
        PACKET.with(|_| ());
        Ok(ExecChannel { socket: watch(socket, Interest::READABLE)? })
    }

    /// Sends a message without blocking. Returns false if the message is too large for a packet.
    ///
    /// # Errors
    /// If the other end is closed, or its buffer is full.
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

    /// Waits for a message and decodes it with `read`.
    ///
    /// # Errors
    /// If the other end is closed, for an invalid message, and the errors of `read`.
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

    /// Returns a message that has already arrived, whether or not the event loop has noticed it.
    ///
    /// # Errors
    /// As [`Self::poll_message`].
    pub(crate) fn message_now<T>(&self, read: &impl Read<T>) -> capnp::Result<Option<T>> {
        PACKET.with_borrow_mut(|packet| {
            let bytes = Word::words_to_bytes_mut(packet);
            let length = loop {
                match recv(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC) {
                    Ok(0) => {
                        return Err(capnp::Error::disconnected("the execution channel is closed".into()));
                    }
                    Ok(n) => break n,
                    Err(Errno::EINTR) => {}
                    Err(Errno::EAGAIN) => return Ok(None),
                    Err(error) => return Err(io::Error::from(error).into()),
                }
            };
            let Some(mut whole) = bytes.get(..length) else {
                return Err(capnp::Error::failed(format!("a packet of {length} bytes on the execution channel")));
            };
            let mut options = ReaderOptions::new();
            options.traversal_limit_in_words(Some(limits::EXEC_CHANNEL_BYTES));
            let message = serialize::read_message_from_flat_slice(&mut whole, options)?;
            read(&message).map(Some)
        })
    }
}

/// A decoder of one message.
pub(crate) trait Read<T>: Fn(&Message<'_>) -> capnp::Result<T> {}
impl<T, F: Fn(&Message<'_>) -> capnp::Result<T>> Read<T> for F {}

/// A message inside its packet.
pub(crate) type Message<'a> = capnp::message::Reader<serialize::BufferSegments<&'a [u8]>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::schema::worker_capnp::exec_channel_call;

    fn commit(exec: u64) -> Builder<HeapAllocator> {
        let mut message = Builder::new_default();
        message.init_root::<exec_channel_call::Builder<'_>>().set_commit(exec);
        message
    }

    fn number(message: &Message<'_>) -> capnp::Result<u64> {
        match message.get_root::<exec_channel_call::Reader<'_>>()?.which()? {
            exec_channel_call::Commit(exec) => Ok(exec),
            _ => Err(capnp::Error::failed("another message".into())),
        }
    }

    #[tokio::test]
    async fn exec_channel_messages_arrive_in_order() {
        let (here, there) = pair().expect("an execution channel");
        let there = ExecChannel::new(there).expect("its other end");
        assert!(there.message_now(&number).expect("open").is_none());
        for exec in 1..=3 {
            assert!(here.send(&commit(exec)).expect("sent"));
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
    async fn invalid_exec_channel_message_is_refused() {
        let (here, there) = pair().expect("an execution channel");
        let there = ExecChannel::new(there).expect("its other end");
        let mut large = Builder::new_default();
        large
            .init_root::<exec_channel_call::Builder<'_>>()
            .init_start()
            .set_request_json(&vec![b'x'; limits::EXEC_CHANNEL_BYTES]);
        assert!(!here.send(&large).expect("not sent"));
        for garbage in [&[0xff; 64][..], b"GET / HTTP/1.1", &[0; 7], &vec![0; limits::EXEC_CHANNEL_BYTES + 8]] {
            send(here.socket.as_raw_fd(), garbage, MsgFlags::empty()).expect("sent");
            assert!(there.message_now(&number).is_err(), "{} bytes", garbage.len());
        }
        assert!(here.send(&commit(7)).expect("sent"));
        assert_eq!(there.message_now(&number).expect("open"), Some(7));
    }

    #[tokio::test]
    async fn full_exec_channel_never_blocks() {
        let (here, _there) = pair().expect("an execution channel");
        assert!((0..1_000_000).any(|exec| here.send(&commit(exec)).is_err()));
    }
}
