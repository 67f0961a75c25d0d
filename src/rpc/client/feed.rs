//! Callbacks from the daemon: items pass through a bounded queue, and each is acknowledged when
//! taken.
//!
//! ```text
//! daemon ── onOutput(event) ─▶ Inlet ── queue ─▶ Feed ─▶ the caller's closure
//!        ◀─────────────── acknowledged when the closure is done ──────────┘
//! ```
//! The queue lets a closure borrow from its caller: it runs inside the caller's own future, not in the protocol's task.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

use tokio::sync::{mpsc, oneshot};

use super::connection::{Link, answer, lost_connection};
use crate::core::audit::AuditLine;
use crate::core::checkpoint::Checkpoint;
use crate::core::diff::{Difference, Patch};
use crate::core::error::{Error, Result};
use crate::core::exec::OutputEvent;
use crate::core::files::{FileEvent, FileInfo};
use crate::core::ids::ExecId;
use crate::core::info::{Event, JournalEntry, KernelInfo};
use crate::core::limits;
use crate::core::upkeep::{GcItem, VerifyEvent, VerifyProgress};
use crate::core::workflow::{Artifact, Decision};
use crate::rpc::convert::{checkpoint, files, info, output, to_capnp, upkeep, workflow};
use crate::rpc::schema::ryokan_capnp as wire;

struct Item<T> {
    what: Result<T>,
    taken: oneshot::Sender<()>,
}

/// The end of the queue that receives items from the daemon.
pub(super) struct Inlet<T> {
    queue: mpsc::Sender<Item<T>>,
}

/// The end of the queue from which the caller takes items.
pub(super) struct Feed<T> {
    queue: mpsc::Receiver<Item<T>>,
}

/// Creates a queue and returns its two ends.
pub(super) fn feed<T>() -> (Inlet<T>, Feed<T>) {
    let (put, take) = mpsc::channel(limits::EVENT_LAG);
    (Inlet { queue: put }, Feed { queue: take })
}

impl<T> Inlet<T> {
    /// Queues an item in order of arrival; the future resolves when the item was taken.
    fn put(&self, what: Result<T>) -> impl Future<Output = capnp::Result<()>> + use<T> {
        let (taken, wait) = oneshot::channel();
        let queued = self.queue.try_send(Item { what, taken });
        async move {
            match queued {
                Ok(()) => wait.await.map_err(|_| detached()),
                Err(mpsc::error::TrySendError::Full(_)) => Err(to_capnp(Error::busy("the client's queue is full"))),
                Err(mpsc::error::TrySendError::Closed(_)) => Err(detached()),
            }
        }
    }
}

fn detached() -> capnp::Error {
    to_capnp(Error::unavailable("the client takes no more"))
}

impl<T> Feed<T> {
    /// Passes every item to `take` until `call` has ended and the daemon has released the inlet.
    ///
    /// The answer alone is not the end: calls of one stream are dispatched one after another, so
    /// the answer overtakes items sent before it. An error of `take` ends the feed.
    pub async fn pump<R>(
        mut self,
        link: &Link,
        call: impl Future<Output = Result<R>>,
        mut take: impl AsyncFnMut(T) -> Result<()>,
    ) -> Result<R> {
        let mut call = std::pin::pin!(call);
        let answer = loop {
            tokio::select! {
                biased;
                Some(item) = self.queue.recv() => Self::give(item, &mut take).await?,
                answer = &mut call => break answer?,
            }
        };
        let silent = |_| Error::deadline("the daemon answered and keeps the callback");
        while let Some(item) = tokio::time::timeout(limits::CLIENT_CALL, self.queue.recv()).await.map_err(silent)? {
            Self::give(item, &mut take).await?;
        }
        match link.is_lost() {
            true => Err(lost_connection("not everything had arrived")),
            false => Ok(answer),
        }
    }

    async fn give(item: Item<T>, take: &mut impl AsyncFnMut(T) -> Result<()>) -> Result<()> {
        take(answer(item.what)?).await?;
        // The daemon may have disconnected; then no task waits for the acknowledgement.
        let _ = item.taken.send(());
        Ok(())
    }
}

/// An item of a subscription.
pub(super) enum EventOrMark {
    Event(Event),
    CaughtUp,
}

/// Events of a host or of one kernel: past events first, then live ones. Dropping it ends the
/// subscription.
pub struct Events {
    feed: Feed<EventOrMark>,
    link: Rc<Link>,
    taken: Cell<Option<oneshot::Sender<()>>>,
    _subscription: wire::subscription::Client,
}

impl Events {
    pub(super) fn new(feed: Feed<EventOrMark>, link: Rc<Link>, subscription: wire::subscription::Client) -> Self {
        Events { feed, link, taken: Cell::new(None), _subscription: subscription }
    }

    /// Waits for the next event. An event of kind `gap` replaces events that the daemon no longer
    /// has.
    ///
    /// Cancel safe: no event is lost.
    ///
    /// # Errors
    /// [`ErrorCode::Unavailable`](crate::core::error::ErrorCode::Unavailable) once the connection is lost.
    pub async fn next(&mut self) -> Result<Event> {
        loop {
            if let EventOrMark::Event(event) = self.received().await? {
                return Ok(event);
            }
        }
    }

    /// The next event from before the subscription; `None` once, after the last of them.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub async fn next_past(&mut self) -> Result<Option<Event>> {
        Ok(match self.received().await? {
            EventOrMark::Event(event) => Some(event),
            EventOrMark::CaughtUp => None,
        })
    }

    async fn received(&mut self) -> Result<EventOrMark> {
        if let Some(taken) = self.taken.take() {
            let _ = taken.send(());
        }
        // The queue's sender belongs to the protocol's task; it ends with the connection or the
        // subscription.
        let _alive = &self.link;
        match self.feed.queue.recv().await {
            Some(item) => {
                self.taken.set(Some(item.taken));
                answer(item.what)
            }
            None => Err(lost_connection("the daemon ended the events")),
        }
    }
}

impl wire::output_callback::Server for Inlet<(ExecId, OutputEvent)> {
    fn on_output(
        self: Rc<Self>,
        params: wire::output_callback::OnOutputParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| Ok((ExecId(p.get_exec_id()), p.get_event()?)));
        self.put(read.map_err(malformed).and_then(|(exec, event)| Ok((exec, output::read_output_event(event)?))))
    }
}

impl wire::kernel_info_sink::Server for Inlet<KernelInfo> {
    fn next(
        self: Rc<Self>,
        params: wire::kernel_info_sink::NextParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_info());
        self.put(read.map_err(malformed).and_then(info::read_kernel_info).map(|(info, _)| info))
    }
}

impl wire::event_sink::Server for Inlet<EventOrMark> {
    fn event(
        self: Rc<Self>,
        params: wire::event_sink::EventParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_event());
        self.put(read.map_err(malformed).and_then(info::read_event).map(EventOrMark::Event))
    }

    fn caught_up(
        self: Rc<Self>,
        _params: wire::event_sink::CaughtUpParams,
        _results: wire::event_sink::CaughtUpResults,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        self.put(Ok(EventOrMark::CaughtUp))
    }
}

impl wire::checkpoint_sink::Server for Inlet<(Checkpoint, bool)> {
    fn next(
        self: Rc<Self>,
        params: wire::checkpoint_sink::NextParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_checkpoint());
        self.put(read.map_err(malformed).and_then(checkpoint::read_checkpoint))
    }
}

impl wire::difference_sink::Server for Inlet<Difference> {
    fn next(
        self: Rc<Self>,
        params: wire::difference_sink::NextParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_difference());
        self.put(read.map_err(malformed).and_then(checkpoint::read_difference))
    }
}

impl wire::decision_sink::Server for Inlet<Decision> {
    fn next(
        self: Rc<Self>,
        params: wire::decision_sink::NextParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_decision());
        self.put(read.map_err(malformed).and_then(workflow::read_decision))
    }
}

impl wire::artifact_sink::Server for Inlet<Artifact> {
    fn next(
        self: Rc<Self>,
        params: wire::artifact_sink::NextParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_artifact());
        self.put(read.map_err(malformed).and_then(workflow::read_artifact))
    }
}

impl wire::patch_sink::Server for Inlet<Patch> {
    fn next(self: Rc<Self>, params: wire::patch_sink::NextParams) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_patch());
        self.put(read.map_err(malformed).and_then(checkpoint::read_patch))
    }
}

impl wire::file_info_sink::Server for Inlet<FileInfo> {
    fn next(
        self: Rc<Self>,
        params: wire::file_info_sink::NextParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_info());
        self.put(read.map_err(malformed).and_then(files::read_file_info))
    }
}

impl wire::file_event_sink::Server for Inlet<FileEvent> {
    fn next(
        self: Rc<Self>,
        params: wire::file_event_sink::NextParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_event());
        self.put(read.map_err(malformed).and_then(files::read_file_event))
    }
}

impl wire::journal_sink::Server for Inlet<JournalEntry> {
    fn entry(
        self: Rc<Self>,
        params: wire::journal_sink::EntryParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_entry());
        self.put(read.map_err(malformed).and_then(info::read_journal_entry))
    }
}

impl wire::gc_sink::Server for Inlet<GcItem> {
    fn next(self: Rc<Self>, params: wire::gc_sink::NextParams) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_item());
        self.put(read.map_err(malformed).and_then(upkeep::read_gc_item))
    }
}

impl wire::verify_sink::Server for Inlet<VerifyEvent> {
    fn progress(
        self: Rc<Self>,
        params: wire::verify_sink::ProgressParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let at = |p: wire::verify_sink::progress_params::Reader<'_>| VerifyProgress {
            packs: p.get_packs(),
            of_packs: p.get_of_packs(),
            bytes: p.get_bytes(),
        };
        self.put(params.get().map(at).map(VerifyEvent::Progress).map_err(malformed))
    }

    fn damage(
        self: Rc<Self>,
        params: wire::verify_sink::DamageParams,
    ) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_damage());
        self.put(read.map_err(malformed).and_then(upkeep::read_damage).map(VerifyEvent::Damage))
    }
}

impl wire::audit_sink::Server for Inlet<AuditLine> {
    fn next(self: Rc<Self>, params: wire::audit_sink::NextParams) -> impl Future<Output = capnp::Result<()>> + 'static {
        let read = params.get().and_then(|p| p.get_line());
        self.put(read.map_err(malformed).and_then(upkeep::read_audit_line))
    }
}

fn malformed(exception: capnp::Error) -> Error {
    Error::invalid(format!("callback is malformed: {exception}"))
}
