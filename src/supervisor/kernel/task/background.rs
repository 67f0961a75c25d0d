//! Output of a kernel's background jobs between executions, as events.
//!
//! All clients share the event log: a job with endless output gets one event per stream and interval. No output is
//! skipped: each event counts everything since the previous event, shows its beginning, and says how much is omitted.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::core::exec::Stream;
use crate::core::limits;

/// Interval between two events.
const EVERY: Duration = Duration::from_secs(1);

/// Output that is not published yet.
#[derive(Default)]
struct Untold {
    last: Option<Instant>,
    streams: [Piece; 2],
    is_timed: bool,
}

/// Output of one stream.
#[derive(Default)]
struct Piece {
    bytes: usize,
    beginning: Vec<u8>,
}

/// Publishes an event; returns false while the recipient is unknown.
type Tell = Box<dyn Fn(serde_json::Value) -> bool>;

/// Background output. Publishes the rest when dropped.
pub(crate) struct Background(Rc<Inner>);

struct Inner {
    every: Duration,
    untold: RefCell<Untold>,
    tell: Tell,
}

impl Background {
    /// `tell` publishes the details of one event.
    pub(crate) fn new(tell: impl Fn(serde_json::Value) -> bool + 'static) -> Self {
        Self::telling_every(EVERY, tell)
    }

    fn telling_every(every: Duration, tell: impl Fn(serde_json::Value) -> bool + 'static) -> Self {
        Background(Rc::new(Inner { every, untold: RefCell::default(), tell: Box::new(tell) }))
    }

    /// Records output. Must run inside a `LocalSet`.
    pub(crate) fn wrote(&self, stream: Stream, data: &[u8]) {
        let due = {
            let mut untold = self.0.untold.borrow_mut();
            let piece = &mut untold.streams[usize::from(stream == Stream::Stderr)];
            let room = limits::BACKGROUND_SHOWN_BYTES.saturating_sub(piece.beginning.len());
            piece.beginning.extend_from_slice(&data[..data.len().min(room)]);
            piece.bytes += data.len();
            if untold.is_timed {
                return;
            }
            let due = untold.last.map(|last| last + self.0.every).filter(|due| *due > Instant::now());
            untold.is_timed = due.is_some();
            due
        };
        match due {
            None => self.0.tell_all(),
            Some(due) => {
                let inner = Rc::downgrade(&self.0);
                tokio::task::spawn_local(async move {
                    tokio::time::sleep_until(due).await;
                    if let Some(inner) = Weak::upgrade(&inner) {
                        inner.tell_all();
                    }
                });
            }
        }
    }
}

impl Inner {
    fn tell_all(&self) {
        let streams = {
            let mut untold = self.untold.borrow_mut();
            (untold.last, untold.is_timed) = (Some(Instant::now()), false);
            std::mem::take(&mut untold.streams)
        };
        for (at, (stream, piece)) in [Stream::Stdout, Stream::Stderr].into_iter().zip(streams).enumerate() {
            let Piece { bytes, beginning } = &piece;
            let (text, left_out) = (String::from_utf8_lossy(beginning), bytes - beginning.len());
            let detail = serde_json::json!({ "stream": stream, "bytes": bytes, "text": text, "left_out": left_out });
            if *bytes > 0 && !(self.tell)(detail) {
                // Published with the next output, or at the end.
                self.untold.borrow_mut().streams[at] = piece;
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tell_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Told = Rc<RefCell<Vec<serde_json::Value>>>;

    fn telling(every: Duration) -> (Background, Told) {
        let told = Told::default();
        let kept = Rc::clone(&told);
        let tell = move |detail| {
            kept.borrow_mut().push(detail);
            true
        };
        (Background::telling_every(every, tell), told)
    }

    fn texts(told: &Told) -> Vec<String> {
        told.borrow().iter().map(|detail| detail["text"].as_str().expect("a text").to_owned()).collect()
    }

    #[tokio::test]
    async fn job_output_is_coalesced() {
        let writing = async {
            let (background, told) = telling(Duration::from_secs(600));
            background.wrote(Stream::Stdout, b"first");
            background.wrote(Stream::Stdout, b"sec");
            background.wrote(Stream::Stderr, b"oops");
            background.wrote(Stream::Stdout, b"ond");
            assert_eq!(texts(&told), ["first"]);
            drop(background);
            assert_eq!(texts(&told), ["first", "second", "oops"], "the end tells the rest");
            assert_eq!((&told.borrow()[2]["stream"], &told.borrow()[2]["left_out"]), (&"stderr".into(), &0.into()));
        };
        tokio::task::LocalSet::new().run_until(writing).await;
    }

    #[tokio::test]
    async fn deferred_job_output_is_flushed() {
        let writing = async {
            let (background, told) = telling(Duration::from_millis(20));
            background.wrote(Stream::Stdout, b"first");
            background.wrote(Stream::Stdout, b"second");
            while texts(&told).concat() != "firstsecond" {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            drop(background);
            assert_eq!(texts(&told).concat(), "firstsecond", "nothing is told twice");
        };
        tokio::task::LocalSet::new().run_until(writing).await;
    }

    #[tokio::test]
    async fn unpublished_job_output_is_kept() {
        let writing = async {
            let (known, told) = (Rc::new(std::cell::Cell::new(false)), Told::default());
            let (is_known, kept) = (Rc::clone(&known), Rc::clone(&told));
            let tell = move |detail| {
                if is_known.get() {
                    kept.borrow_mut().push(detail);
                }
                is_known.get()
            };
            let background = Background::telling_every(Duration::from_secs(600), tell);
            background.wrote(Stream::Stdout, b"before");
            known.set(true);
            background.wrote(Stream::Stdout, b" and after");
            drop(background);
            assert_eq!(texts(&told), ["before and after"]);
        };
        tokio::task::LocalSet::new().run_until(writing).await;
    }

    #[tokio::test]
    async fn omitted_job_output_is_counted() {
        let (most, data) = (limits::BACKGROUND_SHOWN_BYTES, vec![b'n'; 3000]);
        let writing = async {
            let (background, told) = telling(Duration::from_secs(600));
            background.wrote(Stream::Stdout, b"x");
            for _ in 0..5 {
                background.wrote(Stream::Stdout, &data);
            }
            drop(background);
            told.take()
        };
        let told = tokio::task::LocalSet::new().run_until(writing).await;
        assert_eq!(told.len(), 2, "{told:?}");
        assert_eq!((&told[1]["bytes"], &told[1]["left_out"]), (&15_000.into(), &(15_000 - most).into()));
    }
}
