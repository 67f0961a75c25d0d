//! The silence of a source: a session that sends nothing gives its place up when another kernel needs it.

use std::cell::Cell;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::core::error::{Error, Result};

/// How long a session has been waiting for its source, and its early end.
#[derive(Debug, Default)]
pub struct Silence {
    since: Cell<Option<Instant>>,
    is_ended: Cell<bool>,
    ended: Notify,
}

impl Silence {
    /// How long the source has sent nothing that the target waits for.
    pub fn lasts(&self) -> Duration {
        self.since.get().map_or(Duration::ZERO, |since| since.elapsed())
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
        self.since.set(None);
        received
    }
}
