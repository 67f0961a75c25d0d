//! The daemon's bytes to a machine's link, held while the machine stands still.
//!
//! A monitor writes what arrives at a port into its guest's memory, stopped or not. While that memory is saved or copied,
//! nothing may arrive.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::AsyncWrite;
use tokio::sync::watch;

/// The writing half of a link, whose writes wait while the machine is stopped.
pub(super) struct HeldWrite {
    to: Box<dyn AsyncWrite + Unpin>,
    is_parked: watch::Receiver<bool>,
    /// The end of the present stop; false if the machine ends first.
    running: Option<Pin<Box<dyn Future<Output = bool>>>>,
}

impl HeldWrite {
    pub(super) fn new(to: Box<dyn AsyncWrite + Unpin>, is_parked: watch::Receiver<bool>) -> HeldWrite {
        HeldWrite { to, is_parked, running: None }
    }

    /// Waits until the machine runs.
    fn poll_running(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while *self.is_parked.borrow() {
            let mut is_parked = self.is_parked.clone();
            let running =
                self.running.get_or_insert_with(|| Box::pin(async move { is_parked.wait_for(|is| !is).await.is_ok() }));
            let runs = ready!(running.as_mut().poll(cx));
            self.running = None;
            if !runs {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
        }
        self.running = None;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for HeldWrite {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_running(cx))?;
        Pin::new(&mut self.to).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.to).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.to).poll_close(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::AsyncWriteExt as _;
    use tokio::io::AsyncReadExt as _;

    use super::*;
    use crate::link::connector::unix::channel;

    #[tokio::test]
    async fn parked_machine_gets_no_bytes() -> io::Result<()> {
        let (near, mut guest) = tokio::net::UnixStream::pair()?;
        let (parked, mut bytes) = (watch::Sender::new(false), [0; 3]);
        let mut held = HeldWrite::new(channel(near)?.write, parked.subscribe());
        held.write_all(b"one").await?;
        guest.read_exact(&mut bytes).await?;
        parked.send_replace(true);
        let mut writing = Box::pin(held.write_all(b"two"));
        let moment = Duration::from_millis(50);
        assert!(tokio::time::timeout(moment, &mut writing).await.is_err(), "it waits");
        assert_eq!(guest.try_read(&mut bytes).map_err(|error| error.kind()), Err(io::ErrorKind::WouldBlock));
        parked.send_replace(false);
        writing.await?;
        guest.read_exact(&mut bytes).await?;
        assert_eq!(&bytes, b"two");
        // A machine that ends meanwhile ends the wait.
        parked.send_replace(true);
        drop(parked);
        assert_eq!(held.write_all(b"three").await.map_err(|error| error.kind()), Err(io::ErrorKind::BrokenPipe));
        Ok(())
    }
}
