//! The silence of a source: a session that brings nothing gives its place up when another kernel needs it.

use std::cell::Cell;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::core::error::{Error, Result};

/// How long a session has been waiting for its source, and its early end.
#[derive(Debug, Default)]
pub struct Silence {
    since: Cell<Option<Instant>>,
    /// Earlier waits since the source brought anything: questions alone do not end a silence.
    waited: Cell<Duration>,
    is_ended: Cell<bool>,
    ended: Notify,
}

impl Silence {
    /// How long the target has waited without getting anything of the kernel.
    pub fn lasts(&self) -> Duration {
        self.waited.get() + self.since.get().map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The source has sent a part of the kernel.
    pub fn broken(&self) {
        self.waited.set(Duration::ZERO);
    }

    /// Ends the session while it waits.
    pub fn end(&self) {
        self.is_ended.set(true);
        self.ended.notify_one();
    }

    /// Whether the session was ended.
    pub fn is_ended(&self) -> bool {
        self.is_ended.get()
    }

    /// Waits for what the source sends next.
    ///
    /// # Errors
    /// `busy` if the session is ended meanwhile, and those of `next`.
    pub async fn during<T>(&self, next: impl Future<Output = Result<T>>) -> Result<T> {
        self.since.set(Some(Instant::now()));
        let received = tokio::select! {
            biased;
            received = next => received,
            () = self.ended.notified() => {
                Err(Error::busy("this source was silent while other kernels arrived").reason("silent"))
            }
        };
        self.waited.set(self.lasts());
        self.since.set(None);
        received
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn questions_end_no_silence() {
        let (silence, wait) = (Silence::default(), Duration::from_millis(5));
        for _ in 0..2 {
            let waiting = async {
                tokio::time::sleep(wait).await;
                Ok(())
            };
            silence.during(waiting).await.expect("received");
        }
        assert!(silence.lasts() >= wait * 2);
        silence.broken();
        assert_eq!(silence.lasts(), Duration::ZERO);
    }
}
