//! Events: numbered and stored by the catalog, then delivered to subscribers.
//!
//! Publishing never blocks: an event goes to a bounded queue, which one task writes to the catalog in batches. A full
//! queue drops the event, and a later event reports the number of dropped ones. Subscribers read small pages from the
//! catalog, each once the client has taken the one before; a returning subscriber resumes by number.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use tokio::sync::{mpsc, watch};

use crate::catalog::{CatalogError, CatalogHandle, EventPage, NewEvent};
use crate::core::error::Result;
use crate::core::limits;

/// The host's events.
#[derive(Debug)]
pub struct Events {
    catalog: CatalogHandle,
    queue: mpsc::Sender<NewEvent>,
    /// Weak, so that waiters see the channel close when the writer task ends.
    count: Weak<watch::Sender<u64>>,
    /// The number of events that the catalog stored or refused.
    written: watch::Receiver<u64>,
    published: Cell<u64>,
    dropped: Cell<u64>,
    now_ms: fn() -> i64,
}

impl Events {
    /// Starts the task that writes events. Must run inside a `LocalSet`.
    pub fn start(catalog: CatalogHandle, now_ms: fn() -> i64) -> Rc<Self> {
        let (queue, waiting) = mpsc::channel(limits::EVENT_LAG);
        let (count, written) = watch::channel(0);
        let count = Rc::new(count);
        let weak = Rc::downgrade(&count);
        tokio::task::spawn_local(write(catalog.clone(), waiting, count));
        Rc::new(Events { catalog, queue, count: weak, written, published: Cell::new(0), dropped: Cell::new(0), now_ms })
    }

    /// Publishes an event; `kernel` is empty for one of the host's own.
    pub fn publish(&self, kernel: &str, kind: &str, detail: serde_json::Value) {
        self.publish_event(self.event(kernel, kind, detail));
    }

    /// Builds an event without publishing it.
    pub(crate) fn event(&self, kernel: &str, kind: &str, detail: serde_json::Value) -> NewEvent {
        NewEvent {
            at_ms: (self.now_ms)(),
            kernel: kernel.to_owned(),
            kind: kind.to_owned(),
            detail_json: detail.to_string(),
        }
    }

    /// Whether all published events are written, so that an event in another transaction keeps its order.
    pub(crate) fn are_written(&self) -> bool {
        self.dropped.get() == 0 && *self.written.borrow() == self.published.get()
    }

    /// Wakes followers after an event was written in another transaction. Such events are not counted as published.
    pub(crate) fn noted(&self) {
        if let Some(count) = self.count.upgrade() {
            count.send_modify(|_| {});
        }
    }

    /// Publishes an event built earlier.
    pub(crate) fn publish_event(&self, event: NewEvent) {
        let dropped = self.dropped.get();
        let offer = |event| {
            let queued = self.queue.try_send(event).is_ok();
            self.published.set(self.published.get() + u64::from(queued));
            queued
        };
        if dropped > 0 && offer(self.event("", "events_dropped", serde_json::json!({ "count": dropped }))) {
            self.dropped.set(0);
        }
        if !offer(event) {
            self.dropped.set(self.dropped.get() + 1);
        }
    }

    /// Waits until all published events are written or have failed. Called before the daemon ends.
    pub(crate) async fn written(&self) {
        let (mut written, published) = (self.written.clone(), self.published.get());
        // The writer task ends with the catalog; then nothing more is written.
        let _ = written.wait_for(|written| *written >= published).await;
    }

    /// Waits, for a bounded time, until all published events are written.
    pub(crate) async fn flush(&self) {
        // On a full disk, events cannot be written.
        let _ = tokio::time::timeout(limits::EVENT_FLUSH, self.written()).await;
    }

    /// Follows the events after number `since`.
    pub fn follow(self: &Rc<Self>, since: u64) -> Follower {
        let past = Past::Queued { published: self.published.get() };
        Follower { events: Rc::clone(self), written: self.written.clone(), at: since, past }
    }
}

async fn write(catalog: CatalogHandle, mut waiting: mpsc::Receiver<NewEvent>, count: Rc<watch::Sender<u64>>) {
    let mut batch = Vec::new();
    while waiting.recv_many(&mut batch, limits::DATABASE_BATCH).await > 0 {
        let taken = batch.len() as u64;
        let mut counted = false;
        // On a full disk the batch waits for room and new events wait in the queue; subscribers still read stored
        // events.
        while let Err(error) = catalog.append_events(batch.clone()).await {
            if !std::mem::replace(&mut counted, true) {
                tracing::error!(%error, "events could not be written");
                count.send_modify(|count| *count += taken);
            }
            if !matches!(error, CatalogError::Full { .. }) {
                break;
            }
            tokio::time::sleep(limits::JOURNAL_RETRY).await;
        }
        batch.clear();
        count.send_modify(|count| *count += if counted { 0 } else { taken });
    }
}

/// A subscriber's position.
#[derive(Debug)]
pub struct Follower {
    events: Rc<Events>,
    written: watch::Receiver<u64>,
    at: u64,
    past: Past,
}

/// A subscriber's progress through the events that precede its subscription.
#[derive(Debug, Clone, Copy)]
enum Past {
    /// The count of events published by then; the last of them may not be in the catalog yet.
    Queued { published: u64 },
    /// The number of the last past event.
    Until(u64),
    /// All past events were delivered.
    Delivered,
}

/// An item delivered to a subscriber.
#[derive(Debug)]
pub enum Followed {
    /// Events, at least one.
    Page(EventPage),
    /// All past events were delivered. Sent once.
    CaughtUp,
}

impl Follower {
    /// Waits for the next page or the end of the past events.
    ///
    /// # Errors
    /// The catalog's.
    pub async fn next(&mut self) -> Result<Followed> {
        if let Past::Queued { published } = self.past
            && self.written.wait_for(|written| *written >= published).await.is_err()
        {
            return std::future::pending().await;
        }
        loop {
            if let Past::Until(end) = self.past
                && self.at >= end
            {
                self.past = Past::Delivered;
                return Ok(Followed::CaughtUp);
            }
            self.written.mark_unchanged();
            let page = self.events.catalog.events_after(self.at, limits::EVENTS_IN_FLIGHT).await?;
            if let Past::Queued { .. } = self.past {
                self.past = Past::Until(page.newest);
            }
            if let Some(last) = page.events.last() {
                self.at = last.sequence;
                return Ok(Followed::Page(page));
            }
            if !matches!(self.past, Past::Delivered) {
                // The last past event was dropped meanwhile.
                self.at = self.at.max(page.newest);
                continue;
            }
            if self.written.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}
