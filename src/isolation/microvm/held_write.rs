//! The daemon's bytes to a machine's link, held while the machine stands still.
//!
//! A monitor writes what arrives at a port into its guest's memory, stopped or not. While that memory is saved or copied,
//! nothing may arrive.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::AsyncWrite;
use tokio::sync::watch;

/// Whether a machine stands still.
#[derive(Clone)]
pub(super) struct Stop {
    /// Whether it is stopped.
    pub is_parked: watch::Receiver<bool>,
    /// Whether it has ended, perhaps while it was stopped.
    pub has_ended: watch::Receiver<bool>,
}

impl Stop {
    /// Waits until the machine runs; false if it ends first.
    async fn over(mut self) -> bool {
        tokio::select! {
            biased;
            _ = self.has_ended.wait_for(|has_ended| *has_ended) => false,
            runs = self.is_parked.wait_for(|is_parked| !*is_parked) => runs.is_ok(),
        }
    }
}

/// The writing half of a link, whose writes wait while the machine is stopped.
pub(super) struct HeldWrite {
    to: Box<dyn AsyncWrite + Unpin>,
    stop: Stop,
    /// The end of the present stop; false if the machine ends first.
    running: Option<Pin<Box<dyn Future<Output = bool>>>>,
}

impl HeldWrite {
    pub(super) fn new(to: Box<dyn AsyncWrite + Unpin>, stop: Stop) -> HeldWrite {
        HeldWrite { to, stop, running: None }
    }

    /// Waits until the machine runs.
    fn poll_running(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while *self.stop.is_parked.borrow() {
            let running = self.running.get_or_insert_with(|| Box::pin(self.stop.clone().over()));
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
        let (parked, ended, mut bytes) = (watch::Sender::new(false), watch::Sender::new(false), [0; 3]);
        let stop = Stop { is_parked: parked.subscribe(), has_ended: ended.subscribe() };
        let mut held = HeldWrite::new(channel(near)?.write, stop);
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
        let mut writing = Box::pin(held.write_all(b"three"));
        assert!(tokio::time::timeout(moment, &mut writing).await.is_err(), "it waits");
        ended.send_replace(true);
        assert_eq!(writing.await.map_err(|error| error.kind()), Err(io::ErrorKind::BrokenPipe));
        Ok(())
    }
}
