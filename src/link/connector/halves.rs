//! The two halves of a connected Unix socket, for Cap'n Proto's network.
//!
//! Each half registers for its own direction only. tokio's stream registers one socket for both, so
//! it wakes its owner each time the peer reads, which doubles the wake-ups for small messages.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::{AsyncRead, AsyncWrite};
use nix::errno::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys::watched::{Watched, watch};

/// The reading half.
pub struct Reading(AsyncFd<Watched>);

/// The writing half.
pub struct Writing {
    stream: UnixStream,
    /// Set while the socket's buffer is full or was full a moment ago.
    room: Option<AsyncFd<Watched>>,
}

/// Splits a connected stream. Must be called inside a runtime.
///
/// # Errors
/// If the descriptor cannot be duplicated or watched.
pub fn halves(stream: tokio::net::UnixStream) -> io::Result<(Reading, Writing)> {
    // The stream is non-blocking already.
    let stream = stream.into_std()?;
    let read = watch(stream.try_clone()?, Interest::READABLE)?;
    Ok((Reading(read), Writing { stream, room: None }))
}

impl AsyncRead for Reading {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            match nix::unistd::read(guard.get_inner(), out) {
                Ok(n) => {
                    // A short read has emptied the socket; further data wakes the reader again.
                    if n > 0 && n < out.len() {
                        guard.clear_ready();
                    }
                    return Poll::Ready(Ok(n));
                }
                Err(Errno::EAGAIN) => guard.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

impl AsyncWrite for Writing {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let Writing { stream, room } = self.get_mut();
        loop {
            match (&*stream).write(data) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                written => return Poll::Ready(written),
            }
            if room.is_none() {
                *room = Some(watch(stream.try_clone()?, Interest::WRITABLE)?);
            }
            if let Some(room) = room {
                ready!(room.poll_write_ready(cx))?.clear_ready();
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Everything is written: no writer waits for room.
        self.get_mut().room = None;
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.stream.shutdown(std::net::Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn full_socket_defers_writes() -> io::Result<()> {
        let (one, other) = tokio::net::UnixStream::pair()?;
        let (mut read, _its_writing) = halves(one)?;
        let (its_reading, mut write) = halves(other)?;
        let data: Vec<u8> = (0..4 << 20).map(|i: u32| (i % 251) as u8).collect();
        let sending = async {
            write.write_all(&data).await?;
            assert!(write.room.is_some(), "the socket was full");
            write.flush().await?;
            assert!(write.room.is_none());
            write.close().await
        };
        let mut got = Vec::new();
        let reading = async {
            // Slower than the writer, so that it meets a full socket.
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            read.read_to_end(&mut got).await
        };
        let (sent, received) = futures::future::join(sending, reading).await;
        sent?;
        received?;
        assert!(got == data);
        drop(its_reading);
        Ok(())
    }

    #[tokio::test]
    async fn reader_wakes_on_data_and_close() -> io::Result<()> {
        let (one, other) = tokio::net::UnixStream::pair()?;
        let (mut read, _its_writing) = halves(one)?;
        let (its_reading, mut write) = halves(other)?;
        let mut buffer = [0; 64];
        for i in 0..100u8 {
            write.write_all(&[i; 3]).await?;
            let n = read.read(&mut buffer).await?;
            assert_eq!(buffer[..n], [i; 3]);
        }
        drop((write, its_reading));
        assert_eq!(read.read(&mut buffer).await?, 0);
        Ok(())
    }
}
