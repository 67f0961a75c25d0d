//! Events: numbered and kept by the catalog, then handed to whoever subscribed.
//!
//! Publishing never waits: an event goes to a bounded queue that one task empties into the catalog, many at a time. When the queue is
//! full the event is dropped and a later one says how many were. Subscribers read pages from the catalog, so one that is
//! slow costs no memory, and one that comes back resumes by number.

use std::cell::Cell;
use std::rc::Rc;

use tokio::sync::{mpsc, watch};

use crate::catalog::{CatalogHandle, EventPage, NewEvent};
use crate::core::error::Result;
use crate::core::limits;

/// The host's events.
#[derive(Debug)]
pub struct Events {
    catalog: CatalogHandle,
    queue: mpsc::Sender<NewEvent>,
    newest: watch::Receiver<u64>,
    dropped: Cell<u64>,
    now_ms: fn() -> i64,
}

impl Events {
    /// Starts the task that writes events. Must run inside a `LocalSet`.
    pub fn start(catalog: CatalogHandle, now_ms: fn() -> i64) -> Rc<Self> {
        let (queue, waiting) = mpsc::channel(limits::EVENTS_BEHIND);
        let (number, newest) = watch::channel(0);
        tokio::task::spawn_local(write(catalog.clone(), waiting, number));
        Rc::new(Events { catalog, queue, newest, dropped: Cell::new(0), now_ms })
    }

    /// Publishes an event; `kernel` is empty for one of the host's own.
    pub fn publish(&self, kernel: &str, kind: &str, detail: serde_json::Value) {
        let event = |kernel: &str, kind: &str, detail: serde_json::Value| NewEvent {
            at_ms: (self.now_ms)(),
            kernel: kernel.to_owned(),
            kind: kind.to_owned(),
            detail_json: detail.to_string(),
        };
        let dropped = self.dropped.get();
        if dropped > 0
            && self.queue.try_send(event("", "events_dropped", serde_json::json!({ "count": dropped }))).is_ok()
        {
            self.dropped.set(0);
        }
        if self.queue.try_send(event(kernel, kind, detail)).is_err() {
            self.dropped.set(self.dropped.get() + 1);
        }
    }

    /// Follows the events after number `since`.
    pub fn follow(self: &Rc<Self>, since: u64) -> Follower {
        Follower { events: Rc::clone(self), newest: self.newest.clone(), at: since }
    }
}

async fn write(catalog: CatalogHandle, mut waiting: mpsc::Receiver<NewEvent>, number: watch::Sender<u64>) {
    let mut batch = Vec::new();
    while waiting.recv_many(&mut batch, limits::DATABASE_BATCH).await > 0 {
        match catalog.append_events(std::mem::take(&mut batch)).await {
            Ok(events) => {
                if let Some(newest) = events.last() {
                    number.send_replace(newest.sequence);
                }
            }
            Err(error) => tracing::error!(%error, "events could not be written"),
        }
    }
}

/// One subscriber's place.
#[derive(Debug)]
pub struct Follower {
    events: Rc<Events>,
    newest: watch::Receiver<u64>,
    at: u64,
}

impl Follower {
    /// The next page: waits until there is something.
    ///
    /// # Errors
    /// The catalog's.
    pub async fn next(&mut self) -> Result<EventPage> {
        loop {
            self.newest.mark_unchanged();
            let page = self.events.catalog.events_after(self.at, limits::PAGE_ROWS).await?;
            if let Some(last) = page.events.last() {
                self.at = last.sequence;
                return Ok(page);
            }
            if self.newest.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}
