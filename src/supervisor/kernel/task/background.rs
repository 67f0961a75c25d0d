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
struct Unpublished {
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
type Publish = Box<dyn Fn(serde_json::Value) -> bool>;

/// Background output. Publishes the rest when dropped.
pub(crate) struct Background(Rc<Inner>);

struct Inner {
    every: Duration,
    unpublished: RefCell<Unpublished>,
    publish: Publish,
}

impl Background {
    /// `publish` receives the details of one event.
    pub(crate) fn new(publish: impl Fn(serde_json::Value) -> bool + 'static) -> Self {
        Self::with_interval(EVERY, publish)
    }

    fn with_interval(every: Duration, publish: impl Fn(serde_json::Value) -> bool + 'static) -> Self {
        Background(Rc::new(Inner { every, unpublished: RefCell::default(), publish: Box::new(publish) }))
    }

    /// Records output. Must run inside a `LocalSet`.
    pub(crate) fn wrote(&self, stream: Stream, data: &[u8]) {
        let due = {
            let mut unpublished = self.0.unpublished.borrow_mut();
            let piece = &mut unpublished.streams[usize::from(stream == Stream::Stderr)];
            let room = limits::BACKGROUND_SHOWN_BYTES.saturating_sub(piece.beginning.len());
            piece.beginning.extend_from_slice(&data[..data.len().min(room)]);
            piece.bytes += data.len();
            if unpublished.is_timed {
                return;
            }
            let due = unpublished.last.map(|last| last + self.0.every).filter(|due| *due > Instant::now());
            unpublished.is_timed = due.is_some();
            due
        };
        match due {
            None => self.0.publish_all(),
            Some(due) => {
                let inner = Rc::downgrade(&self.0);
                tokio::task::spawn_local(async move {
                    tokio::time::sleep_until(due).await;
                    if let Some(inner) = Weak::upgrade(&inner) {
                        inner.publish_all();
                    }
                });
            }
        }
    }
}

impl Inner {
    fn publish_all(&self) {
        let streams = {
            let mut unpublished = self.unpublished.borrow_mut();
            (unpublished.last, unpublished.is_timed) = (Some(Instant::now()), false);
            std::mem::take(&mut unpublished.streams)
        };
        for (at, (stream, piece)) in [Stream::Stdout, Stream::Stderr].into_iter().zip(streams).enumerate() {
            let Piece { bytes, beginning } = &piece;
            let (text, left_out) = (String::from_utf8_lossy(beginning), bytes - beginning.len());
            let detail = serde_json::json!({ "stream": stream, "bytes": bytes, "text": text, "left_out": left_out });
            if *bytes > 0 && !(self.publish)(detail) {
                // Published with the next output, or at the end.
                self.unpublished.borrow_mut().streams[at] = piece;
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.publish_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Published = Rc<RefCell<Vec<serde_json::Value>>>;

    fn recorded(every: Duration) -> (Background, Published) {
        let published = Published::default();
        let kept = Rc::clone(&published);
        let publish = move |detail| {
            kept.borrow_mut().push(detail);
            true
        };
        (Background::with_interval(every, publish), published)
    }

    fn texts(published: &Published) -> Vec<String> {
        published.borrow().iter().map(|detail| detail["text"].as_str().expect("a text").to_owned()).collect()
    }

    #[tokio::test]
    async fn job_output_is_coalesced() {
        let writing = async {
            let (background, published) = recorded(Duration::from_secs(600));
            background.wrote(Stream::Stdout, b"first");
            background.wrote(Stream::Stdout, b"sec");
            background.wrote(Stream::Stderr, b"oops");
            background.wrote(Stream::Stdout, b"ond");
            assert_eq!(texts(&published), ["first"]);
            drop(background);
            assert_eq!(texts(&published), ["first", "second", "oops"], "the end tells the rest");
            assert_eq!(
                (&published.borrow()[2]["stream"], &published.borrow()[2]["left_out"]),
                (&"stderr".into(), &0.into())
            );
        };
        tokio::task::LocalSet::new().run_until(writing).await;
    }

    #[tokio::test]
    async fn deferred_job_output_is_flushed() {
        let writing = async {
            let (background, published) = recorded(Duration::from_millis(20));
            background.wrote(Stream::Stdout, b"first");
            background.wrote(Stream::Stdout, b"second");
            while texts(&published).concat() != "firstsecond" {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            drop(background);
            assert_eq!(texts(&published).concat(), "firstsecond", "nothing is reported twice");
        };
        tokio::task::LocalSet::new().run_until(writing).await;
    }

    #[tokio::test]
    async fn unpublished_job_output_is_kept() {
        let writing = async {
            let (known, published) = (Rc::new(std::cell::Cell::new(false)), Published::default());
            let (is_known, kept) = (Rc::clone(&known), Rc::clone(&published));
            let publish = move |detail| {
                if is_known.get() {
                    kept.borrow_mut().push(detail);
                }
                is_known.get()
            };
            let background = Background::with_interval(Duration::from_secs(600), publish);
            background.wrote(Stream::Stdout, b"before");
            known.set(true);
            background.wrote(Stream::Stdout, b" and after");
            drop(background);
            assert_eq!(texts(&published), ["before and after"]);
        };
        tokio::task::LocalSet::new().run_until(writing).await;
    }

    #[tokio::test]
    async fn omitted_job_output_is_counted() {
        let (most, data) = (limits::BACKGROUND_SHOWN_BYTES, vec![b'n'; 3000]);
        let writing = async {
            let (background, published) = recorded(Duration::from_secs(600));
            background.wrote(Stream::Stdout, b"x");
            for _ in 0..5 {
                background.wrote(Stream::Stdout, &data);
            }
            drop(background);
            published.take()
        };
        let published = tokio::task::LocalSet::new().run_until(writing).await;
        assert_eq!(published.len(), 2, "{published:?}");
        assert_eq!((&published[1]["bytes"], &published[1]["left_out"]), (&15_000.into(), &(15_000 - most).into()));
    }
}
