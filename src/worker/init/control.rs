//! The engine's control socket: bounded frames in both directions. Never blocks; unsent frames are
//! queued. Runs in init.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::task::{Context, Poll, ready};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::engine_frames::{self, EngineEvent};
use crate::core::limits;
use crate::link::frames::{self, Decoder, FrameError};
use crate::sys::socket::{note_senders, receive_from, send_with_fds};
use crate::sys::watched::{Watched, watch};

/// Read size, bytes.
const SCRATCH_BYTES: usize = 64 << 10;

/// A frame from the engine.
#[derive(Debug, PartialEq)]
pub struct Frame {
    /// The decoded event.
    pub event: EngineEvent,
    /// The JSON part unchanged.
    pub json: Vec<u8>,
    /// The tail.
    pub tail: Vec<u8>,
}

/// A frame waiting to be sent.
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    descriptor: Option<OwnedFd>,
}

/// The first sender on a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sender {
    /// Not recorded.
    Unasked,
    /// To be recorded with the first bytes.
    Awaited,
    /// Recorded by the host kernel.
    Known(i32),
}

/// The engine's control socket.
pub struct Control {
    /// Registered for reading only: readiness for writing would wake init whenever the engine
    /// reads.
    socket: AsyncFd<Watched>,
    /// Registered for writing; present while frames wait for room.
    room: Option<AsyncFd<Watched>>,
    decoder: Decoder,
    scratch: Box<[u8]>,
    out: VecDeque<Outgoing>,
    out_bytes: usize,
    /// The engine closed its end.
    ended: bool,
    sender: Sender,
}

impl Control {
    /// Wraps a socket.
    ///
    /// # Errors
    /// If it cannot be watched.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Control {
            socket: watch(socket, Interest::READABLE)?,
            room: None,
            decoder: Decoder::default(),
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
            out: VecDeque::new(),
            out_bytes: 0,
            ended: false,
            sender: Sender::Unasked,
        })
    }

    /// Wraps a socket and records the first sender: see [`Control::sender`].
    ///
    /// # Errors
    /// If it cannot be watched.
    pub fn noting_sender(socket: UnixStream) -> io::Result<Self> {
        note_senders(&socket)?;
        Ok(Control { sender: Sender::Awaited, ..Control::new(socket)? })
    }

    /// The process that sent the first bytes, according to the host kernel; `None` if not recorded
    /// or nothing arrived.
    pub fn sender(&self) -> Option<i32> {
        match self.sender {
            Sender::Known(pid) => Some(pid),
            Sender::Unasked | Sender::Awaited => None,
        }
    }

    /// Queues a frame without id; `descriptor` accompanies its first byte.
    ///
    /// # Errors
    /// If the engine does not read.
    pub fn send(&mut self, json: &[u8], tail: &[u8], descriptor: Option<OwnedFd>) -> Result<(), String> {
        let mut bytes = Vec::new();
        frames::encode_raw(json, tail, &mut bytes).map_err(|e| e.to_string())?;
        self.queue(bytes, descriptor)
    }

    /// Queues a request frame with its id inserted. `json` is an object without `id`.
    ///
    /// # Errors
    /// As [`Self::send`]; also if `json` is no object.
    pub fn request(&mut self, id: u64, json: &[u8], descriptor: Option<OwnedFd>) -> Result<(), String> {
        let fields = json.strip_prefix(b"{").filter(|rest| rest.len() > 1).ok_or("a request that is no object")?;
        let mut whole = format!("{{\"id\":{id},").into_bytes();
        whole.extend_from_slice(fields);
        self.send(&whole, &[], descriptor)
    }

    fn queue(&mut self, bytes: Vec<u8>, descriptor: Option<OwnedFd>) -> Result<(), String> {
        if self.ended {
            return Ok(());
        }
        self.out_bytes += bytes.len();
        if self.out_bytes > limits::ENGINE_QUEUE_BYTES {
            return Err(format!("{} bytes of frames that the engine does not read", self.out_bytes));
        }
        self.out.push_back(Outgoing { bytes, sent: 0, descriptor });
        self.flush();
        Ok(())
    }

    /// Bytes waiting for the engine to read.
    pub fn queued_bytes(&self) -> usize {
        self.out_bytes
    }

    /// Sends as much as possible without blocking.
    fn flush(&mut self) {
        while let Some(first) = self.out.front_mut() {
            let raw = first.descriptor.as_ref().map(|fd| [fd.as_raw_fd()]);
            let fds = raw.as_ref().map_or(&[][..], |one| &one[..]);
            match send_with_fds(self.socket.get_ref().as_fd(), &first.bytes[first.sent..], fds) {
                Ok(sent) => {
                    first.descriptor = None;
                    first.sent += sent;
                    self.out_bytes -= sent;
                    if first.sent == first.bytes.len() {
                        self.out.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The engine closed its end; its exit is handled elsewhere.
                Err(_) => {
                    self.out.clear();
                    self.out_bytes = 0;
                    return;
                }
            }
        }
    }

    /// Continues sending once there is room. Never ready.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) {
        while !self.out.is_empty() {
            if self.room.is_none() {
                let again = self.socket.get_ref().as_fd().try_clone_to_owned();
                match again.and_then(|fd| watch(fd, Interest::WRITABLE)) {
                    Ok(room) => self.room = Some(room),
                    // No descriptor is left for the registration. The engine's silence will end it,
                    // as after a closed socket.
                    Err(error) => {
                        tracing::warn!(%error, "the engine's socket cannot be watched for room");
                        return self.give_up();
                    }
                }
            }
            let Some(room) = &self.room else { return };
            let Poll::Ready(Ok(mut guard)) = room.poll_write_ready(cx) else { return };
            guard.clear_ready();
            self.flush();
        }
        self.room = None;
    }

    fn give_up(&mut self) {
        self.ended = true;
        self.out.clear();
        self.out_bytes = 0;
    }

    /// Reads available data; ready if there was any or the engine closed its end.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while !self.ended {
            let Ok(mut guard) = ready!(self.socket.poll_read_ready(cx)) else {
                self.ended = true;
                break;
            };
            match receive(guard.get_inner(), &mut self.scratch, &mut self.sender) {
                Ok(0) => self.ended = true,
                Ok(n) => {
                    if n < self.scratch.len() {
                        guard.clear_ready();
                    }
                    self.decoder.feed(&self.scratch[..n]);
                    return Poll::Ready(());
                }
                Err(Errno::EAGAIN) => guard.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(_) => self.ended = true,
            }
        }
        Poll::Pending
    }

    /// Reads the remaining data of an ended engine without blocking, up to one largest frame and
    /// the socket's buffer.
    pub fn read_rest(&mut self) {
        let mut room = limits::FRAME_JSON_BYTES + limits::FRAME_TAIL_BYTES;
        while !self.ended && room > 0 {
            match receive(self.socket.get_ref(), &mut self.scratch, &mut self.sender) {
                Ok(0) => self.ended = true,
                Ok(n) => {
                    room = room.saturating_sub(n);
                    self.decoder.feed(&self.scratch[..n]);
                }
                Err(Errno::EINTR) => {}
                Err(_) => return,
            }
        }
    }

    /// The next whole frame.
    ///
    /// # Errors
    /// For an invalid frame. The stream is unreadable afterwards.
    pub fn next(&mut self) -> Result<Option<Frame>, String> {
        match self.decoder.raw_frame().map_err(|e: FrameError| e.to_string())? {
            Some((json, tail)) => {
                Ok(Some(Frame { event: engine_frames::read(json)?, json: json.to_vec(), tail: tail.to_vec() }))
            }
            None => Ok(None),
        }
    }

    /// Whether the engine closed its end.
    pub fn has_ended(&self) -> bool {
        self.ended
    }
}

/// Reads available data without blocking.
fn receive(socket: &Watched, scratch: &mut [u8], sender: &mut Sender) -> nix::Result<usize> {
    if *sender != Sender::Awaited {
        return recv(socket.as_raw_fd(), scratch, MsgFlags::MSG_DONTWAIT);
    }
    let received = receive_from(socket.as_fd(), scratch);
    let (count, pid) = received.map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EPROTO)))?;
    if count > 0 {
        *sender = Sender::Known(pid);
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn pair() -> (Control, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        (Control::new(ours).expect("a control socket"), theirs)
    }

    #[tokio::test]
    async fn request_id_is_inserted() {
        let (mut control, mut engine) = pair();
        control.request(7, br#"{"op":"vars"}"#, None).expect("sent");
        let mut bytes = [0; 64];
        let n = engine.read(&mut bytes).expect("read");
        assert_eq!(&bytes[8..n], br#"{"id":7,"op":"vars"}"#);
        assert!(control.request(8, b"{}", None).is_err(), "no request is empty");
        assert!(control.request(8, b"[]", None).is_err());
        assert!(control.request(8, b"{", None).is_err());
    }

    #[tokio::test]
    async fn sender_pid_is_authentic() {
        let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
        let mut control = Control::noting_sender(ours).expect("a control socket");
        assert_eq!(control.sender(), None);
        let mut bytes = Vec::new();
        frames::encode_raw(br#"{"ev":"reply","id":1,"ok":true}"#, &[], &mut bytes).expect("encodes");
        theirs.write_all(&bytes).expect("written");
        std::future::poll_fn(|cx| control.poll_read(cx)).await;
        assert_eq!(control.sender(), i32::try_from(std::process::id()).ok());
        assert!(matches!(control.next(), Ok(Some(_))));
        theirs.write_all(&bytes).expect("written");
        std::future::poll_fn(|cx| control.poll_read(cx)).await;
        assert!(matches!(control.next(), Ok(Some(_))));
        drop(theirs);
        control.read_rest();
        assert!(control.has_ended());
    }

    #[tokio::test]
    async fn unread_control_queue_is_bounded() {
        let (mut control, _engine) = pair();
        let json = vec![b'x'; limits::FRAME_JSON_BYTES];
        let sent = (0..8).take_while(|_| control.send(&json, &[], None).is_ok()).count();
        assert!((3..5).contains(&sent), "{sent}");
    }

    #[tokio::test]
    async fn control_frames_are_reassembled() {
        let (mut control, mut engine) = pair();
        let mut bytes = Vec::new();
        frames::encode_raw(br#"{"ev":"reply","id":1,"ok":true}"#, b"tail", &mut bytes).expect("encodes");
        engine.write_all(&bytes[..10]).expect("written");
        std::future::poll_fn(|cx| control.poll_read(cx)).await;
        assert_eq!(control.next(), Ok(None));
        engine.write_all(&bytes[10..]).expect("written");
        std::future::poll_fn(|cx| control.poll_read(cx)).await;
        let frame = control.next().expect("a frame").expect("whole");
        assert_eq!(frame.event, EngineEvent::Reply { id: 1, ok: true });
        assert_eq!(frame.tail, b"tail");
        engine.write_all(&[0xff; 8]).expect("written");
        std::future::poll_fn(|cx| control.poll_read(cx)).await;
        assert!(control.next().is_err());
    }
}
