//! Bounds the memory for incoming Cap'n Proto messages: a large message is buffered as it arrives
//! and then passed on whole.
//!
//! Cap'n Proto's reader allocates the size that a message's segment table announces, so a client
//! that announces and sends nothing would cost 64 MiB per connection. With this adapter memory
//! grows with the bytes received. Small messages pass through unchanged. Table format:
//! <https://capnproto.org/encoding.html#serialization-over-a-stream>.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use futures::AsyncRead;

use crate::core::limits;

/// Messages up to this size pass through unbuffered, bytes. Every chunk of a stream fits.
const DIRECT_BYTES: usize = (1 << 20) + (64 << 10);
/// Growth step of the buffer, bytes.
const STEP_BYTES: usize = 64 << 10;
/// The reader refuses a table with more segments; the adapter then stops interpreting the stream.
const SEGMENTS: usize = 512;

/// Wraps the reading half of a connection.
pub struct Arrival<R> {
    inner: R,
    state: State,
    most: MaxWords,
}

/// The current message size limit, in 8-byte words. Clones share the limit and may change it.
#[derive(Clone)]
pub struct MaxWords(Rc<Cell<usize>>);

impl MaxWords {
    /// Creates a limit.
    pub fn new(words: usize) -> Self {
        MaxWords(Rc::new(Cell::new(words)))
    }

    /// Changes the limit for the following messages.
    pub fn set(&self, words: usize) {
        self.0.set(words);
    }
}

enum State {
    /// Reading a segment table.
    Table(Vec<u8>),
    /// Reading the body of a large message.
    Gathering { message: Vec<u8>, filled: usize, whole: usize },
    /// Passing buffered bytes on, then `then` bytes directly.
    Handing { held: Vec<u8>, at: usize, then: usize },
}

impl<R> Arrival<R> {
    /// Wraps `inner`, which is at the start of a message. A message above the limit at its start
    /// ends the connection.
    pub fn new(inner: R, most: MaxWords) -> Self {
        Arrival { inner, state: State::Table(Vec::new()), most }
    }
}

/// Length of the table that starts with these 8 bytes, in bytes.
fn table_length(table: &[u8]) -> usize {
    let count = number(table, 0).wrapping_add(1);
    // The count, one length per segment, and padding to a whole word.
    if (1..SEGMENTS).contains(&count) { (4 + 4 * count).next_multiple_of(8) } else { 8 }
}

/// Length of the body behind a whole table, bytes; 0 if the reader will refuse the message anyway.
fn body_length(table: &[u8]) -> usize {
    let count = number(table, 0).wrapping_add(1);
    if !(1..SEGMENTS).contains(&count) {
        return 0;
    }
    let words: usize = (0..count).map(|segment| number(table, segment + 1)).sum();
    if words > limits::MESSAGE_WORDS { 0 } else { words * 8 }
}

fn number(table: &[u8], at: usize) -> usize {
    let bytes = table.get(at * 4..).and_then(|rest| rest.first_chunk::<4>());
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes)) as usize
}

impl<R: AsyncRead + Unpin> AsyncRead for Arrival<R> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { inner, state, most } = self.get_mut();
        loop {
            match state {
                State::Table(table) => {
                    let wanted = if table.len() < 8 { 8 } else { table_length(table) };
                    if table.len() < wanted {
                        if ready!(more(inner, cx, table, wanted))? == 0 {
                            // End of stream in or before a table: the reader reports which.
                            *state = State::Handing { held: std::mem::take(table), at: 0, then: usize::MAX };
                        }
                        continue;
                    }
                    let body = body_length(table);
                    if body > most.0.get() * 8 {
                        let why = format!("a message of {body} bytes exceeds the limit of {}", most.0.get() * 8);
                        return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
                    }
                    let message = std::mem::take(table);
                    let whole = message.len() + body;
                    *state = if body <= DIRECT_BYTES {
                        State::Handing { held: message, at: 0, then: body }
                    } else {
                        State::Gathering { filled: message.len(), message, whole }
                    };
                }
                State::Gathering { message, filled, whole } => {
                    if *filled == message.len() {
                        message.resize((*whole).min(*filled + STEP_BYTES), 0);
                    }
                    let n = ready!(Pin::new(&mut *inner).poll_read(cx, &mut message[*filled..]))?;
                    *filled += n;
                    if n == 0 || *filled == *whole {
                        let then = if n == 0 { usize::MAX } else { 0 };
                        message.truncate(*filled);
                        *state = State::Handing { held: std::mem::take(message), at: 0, then };
                    }
                }
                State::Handing { held, at, .. } if *at < held.len() => {
                    let n = out.len().min(held.len() - *at);
                    out[..n].copy_from_slice(&held[*at..*at + n]);
                    *at += n;
                    return Poll::Ready(Ok(n));
                }
                State::Handing { then: 0, .. } => *state = State::Table(Vec::new()),
                State::Handing { then, held, .. } => {
                    *held = Vec::new();
                    let most = out.len().min(*then);
                    let n = ready!(Pin::new(inner).poll_read(cx, &mut out[..most]))?;
                    *then -= n;
                    return Poll::Ready(Ok(n));
                }
            }
        }
    }
}

/// Reads until `data` holds `wanted` bytes at most. 0: end of stream.
fn more<R: AsyncRead + Unpin>(
    inner: &mut R,
    cx: &mut Context<'_>,
    data: &mut Vec<u8>,
    wanted: usize,
) -> Poll<io::Result<usize>> {
    let had = data.len();
    data.resize(wanted, 0);
    let read = Pin::new(inner).poll_read(cx, &mut data[had..]);
    let came = if let Poll::Ready(Ok(n)) = &read { *n } else { 0 };
    data.truncate(had + came);
    read
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::AsyncReadExt;
    use futures::executor::block_on;

    /// Returns at most `step` bytes at a time.
    struct Dribble<'a>(&'a [u8], usize);

    impl AsyncRead for Dribble<'_> {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, out: &mut [u8]) -> Poll<io::Result<usize>> {
            let n = self.0.len().min(self.1).min(out.len());
            let (now, later) = self.0.split_at(n);
            out[..n].copy_from_slice(now);
            self.0 = later;
            Poll::Ready(Ok(n))
        }
    }

    fn whole() -> MaxWords {
        MaxWords::new(limits::MESSAGE_WORDS)
    }

    fn message(segments: &[usize]) -> Vec<u8> {
        let mut bytes = (segments.len() as u32 - 1).to_le_bytes().to_vec();
        segments.iter().for_each(|words| bytes.extend((*words as u32).to_le_bytes()));
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let body: usize = segments.iter().sum();
        bytes.extend((0..body * 8).map(|at| (at % 251) as u8));
        bytes
    }

    #[test]
    fn messages_pass_unchanged() {
        let large = DIRECT_BYTES / 8 + 1000;
        let stream =
            [message(&[1]), message(&[large]), message(&[0, 3, large, 7]), message(&[2, 2, 2]), message(&[0; 511])]
                .concat();
        for step in [3, 7, 8, 4096, usize::MAX] {
            // The whole message, and truncations at every kind of place.
            for end in [0, 3, 12, 17, 50_000, large * 8 + 40, stream.len()] {
                let mut read = Vec::new();
                block_on(Arrival::new(Dribble(&stream[..end], step), whole()).read_to_end(&mut read))
                    .expect("no error");
                assert!(read == stream[..end], "{step} {end}");
            }
        }
    }

    #[test]
    fn large_message_is_buffered_whole() {
        struct Never<'a>(Dribble<'a>);
        impl AsyncRead for Never<'_> {
            fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut [u8]) -> Poll<io::Result<usize>> {
                match ready!(Pin::new(&mut self.0).poll_read(cx, out))? {
                    0 => Poll::Pending,
                    n => Poll::Ready(Ok(n)),
                }
            }
        }
        let large = message(&[DIRECT_BYTES]);
        let mut arrival = Arrival::new(Never(Dribble(&large[..100_000], 4096)), whole());
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(Pin::new(&mut arrival).poll_read(&mut cx, &mut [0; 64]).is_pending());
        let State::Gathering { message, .. } = &arrival.state else { panic!("it is gathered") };
        assert!(message.capacity() < 100_000 + 4 * STEP_BYTES, "{}", message.capacity());
    }

    #[test]
    fn message_over_limit_fails_early() {
        let most = MaxWords::new(10);
        let stream = [message(&[10]), message(&[4, 7]), message(&[1])].concat();
        let mut arrival = Arrival::new(Dribble(&stream, usize::MAX), most.clone());
        let mut first = vec![0; message(&[10]).len()];
        block_on(arrival.read_exact(&mut first)).expect("as large as it may be");
        let error = block_on(arrival.read_exact(&mut [0; 1])).expect_err("too large");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let mut arrival = Arrival::new(Dribble(&stream, usize::MAX), most.clone());
        block_on(arrival.read_exact(&mut first)).expect("as before");
        most.set(11);
        let mut rest = Vec::new();
        block_on(arrival.read_to_end(&mut rest)).expect("the limit was raised meanwhile");
        assert_eq!(rest.len(), stream.len() - first.len());
    }

    #[test]
    fn invalid_table_passes_through() {
        for table in [[u32::MAX, 5], [600, 5], [0, u32::MAX]] {
            let mut bytes: Vec<u8> = table.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.extend([9; 100]);
            let mut arrival = Arrival::new(Dribble(&bytes, usize::MAX), whole());
            let mut first = [0; 8];
            block_on(arrival.read_exact(&mut first)).expect("the table");
            assert_eq!(first, bytes[..8]);
        }
    }
}
